"""This module writes a timeline as one self-contained HTML page, with the data by columns and one script."""

from __future__ import annotations

import base64
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvpipe.trace.drawn import plain, written
from kvpipe.trace.events import Event, tag_of
from kvpipe.trace.spans import MARKS, Span, Timeline
from kvpipe.trace.timeline import spans

FORMAT = 1
_TEMPLATE = "timeline.html"
_DATA, _HASH = "@TRACE@", "@SCRIPT_HASH@"
_SCRIPT_BEGIN, _SCRIPT_END = "<script>", "</script>"


def write_html(events: Iterable[Event], path: Path) -> Timeline:
    """Write the timeline of `events` as one page that needs no other file. Return the timeline."""
    timeline = spans(events)
    template = resources.files("kvpipe.trace").joinpath(_TEMPLATE).read_text(encoding="utf-8")
    script = template[template.rindex(_SCRIPT_BEGIN) + len(_SCRIPT_BEGIN) : template.rindex(_SCRIPT_END)]
    # The page's security policy allows only this script, so that a script in the data cannot run.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    before, after = template.replace(_HASH, f"sha256-{digest}", 1).split(_DATA, 1)
    with written(path) as out:
        out.write(before)
        for piece in _object(_columns(timeline)):
            out.write(piece)
        out.write(after)
    return timeline


def _object(pairs: Iterable[tuple[str, object]]) -> Iterator[str]:
    """Yield a JSON object as short texts, so that each value exists only while the value is written.

    A value that is an iterator of pairs is written as an object, too.
    """
    for i, (key, value) in enumerate(pairs):
        yield f"{',' if i else '{'}{_json(key)}:"
        if isinstance(value, list) and value and isinstance(value[0], Iterator):
            for j, one in enumerate(value):
                yield "," if j else "["
                yield from _object(one)
            yield "]"
        elif isinstance(value, Iterator):
            yield from _object(value)
        else:
            yield _json(value)
    yield "}"


def _json(value: object) -> str:
    """Return JSON that is safe inside an HTML element, because it is ASCII and has no tags."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


class _Strings(dict[str, int]):
    """Numbers strings, so that the page has each string once. A new string gets the next number."""

    def __missing__(self, text: str) -> int:
        number = self[text] = len(self)
        return number


def _columns(timeline: Timeline) -> Iterator[tuple[str, object]]:
    """Yield the timeline by columns, and the events that the timeline shows."""
    strings = _Strings()
    kinds = _Strings()
    shown = sorted({i for span in timeline.spans for i in span.events}, key=lambda i: (tag_of(timeline.events[i]), i))
    number = {i: n for n, i in enumerate(shown)}
    tracks: list[list[int]] = []
    for span in timeline.spans:
        here = [span.lane, span.row, span.layer]
        if not tracks or tracks[-1][:3] != here:
            tracks.append([*here, 0])
        tracks[-1][3] += 1
    yield "format", FORMAT
    yield "origin_ns", str(timeline.origin_ns)
    yield "wall_ns", str(timeline.wall_ns)
    yield "duration_ns", timeline.duration_ns
    yield "events", timeline.total
    yield "lanes", timeline.lanes
    yield "tracks", tracks
    yield "spans", _spans(timeline.spans, number, kinds, strings)
    yield "shown", _tables(timeline, shown, strings)
    yield "kinds", [[kind, MARKS.get(kind, "")] for kind in kinds]
    yield "strings", list(strings)


def _spans(
    spans: Sequence[Span], number: dict[int, int], kinds: _Strings, strings: _Strings
) -> Iterator[tuple[str, object]]:
    """Yield the columns of spans. `number` maps the index of each shown event to its number on the page."""
    begins = [span.begin_ns for span in spans]
    yield "begin", [begin - before for before, begin in pairwise([0, *begins])]
    yield "took", [span.end_ns - span.begin_ns for span in spans]
    yield "kind", [kinds[span.kind] for span in spans]
    yield "name", [strings[span.name] for span in spans]
    yield "requests", _ragged([strings[one] for one in span.requests] for span in spans)
    yield "events", _ragged([number[i] for i in span.events] for span in spans)
    yield "open", [i for i, span in enumerate(spans) if span.is_open]


def _ragged(lists: Iterable[list[int]]) -> list[list[int]]:
    """Return two lists: the lengths of the lists in order, and the elements of all lists."""
    lengths, flat = [], list[int]()
    for one in lists:
        lengths.append(len(one))
        flat += one
    return [lengths, flat]


def _tables(timeline: Timeline, shown: list[int], strings: _Strings) -> list[Iterator[tuple[str, object]]]:
    """Return a table for each kind of event: the kind's tag, the events' times, and the columns of all other fields.

    A column is [form, values]. The form "one" has one value for all events. The form "text" has indices of `strings`.
    The form "each" has one value per event.
    """
    by_tag: dict[str, list[int]] = defaultdict(list)
    for i in shown:
        by_tag[tag_of(timeline.events[i])].append(i)
    return [_table(timeline, tag, numbers, strings) for tag, numbers in by_tag.items()]


def _table(timeline: Timeline, tag: str, numbers: list[int], strings: _Strings) -> Iterator[tuple[str, object]]:
    yield "tag", tag
    yield "at", [timeline.at_ns[i] for i in numbers]
    yield "fields", _fields(timeline, numbers, strings)


def _fields(timeline: Timeline, numbers: list[int], strings: _Strings) -> Iterator[tuple[str, object]]:
    some = [timeline.events[i] for i in numbers]
    at = [timeline.at_ns[i] for i in numbers]
    for field in some[0].__struct_fields__:
        if field == "t_ns":
            values: list[Any] = [str(event.t_ns - timeline.origin_ns - t) for event, t in zip(some, at, strict=True)]
        elif field == "wall_ns":
            values = [
                str(event.wall_ns - timeline.wall_ns - t) if event.wall_ns else ""
                for event, t in zip(some, at, strict=True)
            ]
        else:
            values = [plain(getattr(event, field)) for event in some]
        yield field, _column(values, strings)


def _column(values: list[Any], strings: _Strings) -> list[object]:
    if all(value == values[0] and type(value) is type(values[0]) for value in values):
        return ["one", values[0]]
    if all(isinstance(value, str) for value in values):
        return ["text", [strings[value] for value in values]]
    return ["each", values]
