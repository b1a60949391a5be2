"""A timeline as one self-contained HTML page: its data by columns, and the one script that may run there."""

from __future__ import annotations

import base64
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from kvpipe.trace.drawn import plain, written
from kvpipe.trace.events import Event, tag_of
from kvpipe.trace.spans import MARKS, Timeline
from kvpipe.trace.timeline import spans

FORMAT = 1
_TEMPLATE = "timeline.html"
_DATA, _HASH = "@TRACE@", "@SCRIPT_HASH@"
_SCRIPT_BEGIN, _SCRIPT_END = "<script>", "</script>"


def write_html(events: Iterable[Event], path: Path) -> Timeline:
    """Write the timeline of `events` as one page that needs nothing else. Return it."""
    timeline = spans(events)
    template = resources.files("kvpipe.trace").joinpath(_TEMPLATE).read_text(encoding="utf-8")
    script = template[template.rindex(_SCRIPT_BEGIN) + len(_SCRIPT_BEGIN) : template.rindex(_SCRIPT_END)]
    # the page's policy runs this one script and nothing else, whatever the data hold
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    before, after = template.replace(_HASH, f"sha256-{digest}", 1).split(_DATA, 1)
    with written(path) as out:
        out.write(before + "{")
        for i, (key, value) in enumerate(_columns(timeline).items()):
            out.write(f"{',' if i else ''}{_json(key)}:{_json(value)}")
        out.write("}" + after)
    return timeline


def _json(value: object) -> str:
    """JSON that may stand inside an HTML element: pure ASCII and no tags."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


class _Strings(dict[str, int]):
    """Each string once."""

    def __missing__(self, text: str) -> int:
        number = self[text] = len(self)
        return number


def _columns(timeline: Timeline) -> dict[str, object]:
    """Return the timeline by columns, and the events that it shows; a column of one value holds it once."""
    strings = _Strings()
    kinds = _Strings()
    shown = sorted({i for span in timeline.spans for i in span.events}, key=lambda i: (tag_of(timeline.events[i]), i))
    number = {i: n for n, i in enumerate(shown)}
    tracks: list[list[int]] = []
    before, track = 0, (-1, -1, -1)
    begins: list[int] = []
    for span in timeline.spans:
        here = (span.lane, span.row, span.layer)
        if here != track:
            track = here
            tracks.append([*here, 0])
        tracks[-1][3] += 1
        begins.append(span.begin_ns - before)
        before = span.begin_ns
    return {
        "format": FORMAT,
        "origin_ns": str(timeline.origin_ns),
        "wall_ns": str(timeline.wall_ns),
        "duration_ns": timeline.duration_ns,
        "events": timeline.total,
        "lanes": timeline.lanes,
        "tracks": tracks,
        "spans": {
            "begin": begins,
            "took": [span.end_ns - span.begin_ns for span in timeline.spans],
            "kind": [kinds[span.kind] for span in timeline.spans],
            "name": [strings[span.name] for span in timeline.spans],
            "requests": _ragged([strings[one] for one in span.requests] for span in timeline.spans),
            "events": _ragged([number[i] for i in span.events] for span in timeline.spans),
            "open": [i for i, span in enumerate(timeline.spans) if span.is_open],
        },
        "shown": _tables(timeline, shown, strings),
        "kinds": [[kind, MARKS.get(kind, "")] for kind in kinds],
        "strings": list(strings),
    }


def _ragged(lists: Iterable[list[int]]) -> list[list[int]]:
    """Return the lists' lengths, and all of them in one."""
    lengths, flat = [], list[int]()
    for one in lists:
        lengths.append(len(one))
        flat += one
    return [lengths, flat]


def _tables(timeline: Timeline, shown: list[int], strings: _Strings) -> list[dict[str, object]]:
    """Return a table for each kind of event: its tag, when each happened, and the columns of all other fields.

    A column is [form, values]: "one" value for all, "text" as indices of `strings`, or "each" as it is.
    """
    by_tag: dict[str, list[int]] = defaultdict(list)
    for i in shown:
        by_tag[tag_of(timeline.events[i])].append(i)
    tables: list[dict[str, object]] = []
    for tag, numbers in by_tag.items():
        some = [timeline.events[i] for i in numbers]
        at = [timeline.at_ns[i] for i in numbers]
        fields: dict[str, list[object]] = {}
        for field in some[0].__struct_fields__:
            if field == "t_ns":
                values: list[Any] = [
                    str(event.t_ns - timeline.origin_ns - t) for event, t in zip(some, at, strict=True)
                ]
            elif field == "wall_ns":
                values = [
                    str(event.wall_ns - timeline.wall_ns - t) if event.wall_ns else ""
                    for event, t in zip(some, at, strict=True)
                ]
            else:
                values = [plain(getattr(event, field)) for event in some]
            fields[field] = _column(values, strings)
        tables.append({"tag": tag, "at": at, "fields": fields})
    return tables


def _column(values: list[Any], strings: _Strings) -> list[object]:
    if all(value == values[0] and type(value) is type(values[0]) for value in values):
        return ["one", values[0]]
    if all(isinstance(value, str) for value in values):
        return ["text", [strings[value] for value in values]]
    return ["each", values]
