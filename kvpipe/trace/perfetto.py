"""This module writes a timeline as Chrome trace events, for ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from operator import itemgetter
from pathlib import Path

from kvpipe.trace.drawn import plain, written
from kvpipe.trace.events import SCHEDULER, Event, tag_of
from kvpipe.trace.spans import (
    FORWARDS,
    LIFE,
    LOADS,
    MARKS,
    NOTES,
    PHASES,
    REQUESTS,
    SAVES,
    Bundle,
    Span,
    Timeline,
)
from kvpipe.trace.timeline import spans

_NS_PER_US = 1_000
_THREADS = {REQUESTS: 1, NOTES: 2, FORWARDS: 3, LOADS: 1000, SAVES: 2000}
"""The thread number of each lane's first row. Each row is a thread, because spans of one thread must be nested."""


def write_perfetto(events: Iterable[Event], path: Path) -> Timeline:
    """Write the timeline of `events` to `path` as Chrome trace events. Return the timeline."""
    timeline = spans(events)
    with written(path) as out:
        out.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for i, one in enumerate(_chrome(timeline)):
            out.write((",\n" if i else "") + json.dumps(one, separators=(",", ":"), allow_nan=False))
        out.write("\n]}\n")
    return timeline


def _chrome(timeline: Timeline) -> Iterator[dict[str, object]]:
    processes: dict[tuple[str, int], int] = {}
    for lane in timeline.lanes:
        pid = processes.setdefault((lane.engine, lane.rank), len(processes) + 1)
        side = "scheduler" if lane.rank == SCHEDULER else f"rank {lane.rank}"
        yield from _named("process", pid, 0, f"{lane.engine} {side}".strip())
        for row in range(1 if lane.name == REQUESTS else lane.rows):
            thread = _THREADS[lane.name] + row
            yield from _named("thread", pid, thread, lane.name + (f" {row + 1}" if row else ""))
    pids = [processes[lane.engine, lane.rank] for lane in timeline.lanes]
    timed: list[tuple[int, dict[str, object]]] = []
    for number, life in enumerate(_lives_of(timeline)):
        common = {"cat": "request", "id": number + 1, "pid": pids[life[0].lane], "tid": _THREADS[REQUESTS]}
        begin, end = ({"ph": ph, "name": life[0].name} | common for ph in "be")
        timed.append((life[0].begin_ns, begin | {"args": _args(timeline, life[0])}))
        for phase in life[1:]:
            begin_phase, end_phase = ({"ph": ph, "name": phase.name} | common for ph in "be")
            timed.append((phase.begin_ns, begin_phase | {"args": _args(timeline, phase)}))
            timed.append((phase.end_ns, end_phase))
        timed.append((life[0].end_ns, end))
    for span in timeline.spans:
        lane = timeline.lanes[span.lane]
        thread = _THREADS[lane.name] + (0 if lane.name == REQUESTS else span.row)
        one = {"name": span.name, "cat": lane.name, "pid": pids[span.lane], "tid": thread}
        if span.kind in MARKS:
            timed.append((span.begin_ns, {"ph": "i", "s": "t"} | one | {"args": _args(timeline, span)}))
        elif lane.name != REQUESTS:
            took = {"dur": (span.end_ns - span.begin_ns) / _NS_PER_US}
            timed.append((span.begin_ns, {"ph": "X"} | one | took | {"args": _args(timeline, span)}))
    timed.sort(key=itemgetter(0))  # the sort is stable, so spans with equal times stay nested
    for t, one in timed:
        yield one | {"ts": t / _NS_PER_US}


def _named(what: str, pid: int, tid: int, name: str) -> Iterator[dict[str, object]]:
    """Yield the events that set the name and the position of a process or a thread."""
    common = {"ph": "M", "pid": pid, "tid": tid, "ts": 0}
    yield common | {"name": f"{what}_name", "args": {"name": name}}
    yield common | {"name": f"{what}_sort_index", "args": {"sort_index": tid or pid}}


def _lives_of(timeline: Timeline) -> Iterator[Bundle]:
    """Yield each request's life, followed by the phases of the life."""
    rows: dict[tuple[int, int], list[Bundle]] = {}
    # In a row, all lives come first, by time, and then all phases, by time.
    for span in timeline.spans:
        if span.kind == LIFE:
            rows.setdefault((span.lane, span.row), []).append([span])
        elif span.kind in PHASES:
            lives = rows[span.lane, span.row]
            lives[bisect_right(lives, span.begin_ns, key=lambda life: life[0].begin_ns) - 1].append(span)
    for lives in rows.values():
        yield from lives


def _args(timeline: Timeline, span: Span) -> dict[str, object]:
    """Return the fields of the event from which a span was made. The fields of several events are grouped by tag."""
    reported = [(timeline.events[i], tag_of(timeline.events[i])) for i in span.events]
    fields = [(tag, {name: plain(getattr(event, name)) for name in event.__struct_fields__}) for event, tag in reported]
    return fields[0][1] if len(fields) == 1 else dict(fields)
