"""This module makes a timeline from a trace. A timeline has lanes of spans.

The scheduler's side has a lane of requests. Each request has phases (waiting, loading, running, preempted). A rank has
lanes of forwards, loads and saves. An event without a duration is a mark. A trace may lack any event, because
processes write independently and files are rotated. A span without an end lasts until the engine's last event. A span
without a beginning starts with the span's first event.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Final

from kvpipe.statemachine import copy
from kvpipe.trace import events as e
from kvpipe.trace import transitions
from kvpipe.trace.events import SCHEDULER, Event
from kvpipe.trace.lives import OF_A_LIFE, Lives
from kvpipe.trace.spans import (
    COPY_FAILED,
    FORWARD,
    FORWARDS,
    LANES,
    LOAD,
    LOADS,
    MARKED,
    NOTES,
    REQUESTS,
    SAVE,
    SAVES,
    Bundle,
    Lane,
    Side,
    Span,
    Timeline,
    mark,
)

EVENTS_MAX: Final = 100_000
"""The largest number of events that are drawn.

A browser draws this number without a pause. The limit also bounds the memory.
"""
_CLOCKS_DIFFER_NS = 1_000_000_000
_TOOK_NS_MAX = 10**15
"""The longest duration that is believed, in nanoseconds: eleven days."""


class _DrawnEvents:
    """The drawn events in order of time, and data that was read from the other events. Those are not kept."""

    def __init__(self, events: Iterable[Event], events_max: int) -> None:
        self.left_out = 0
        self.request_of: dict[tuple[str, int], str] = {}
        self.job_ended_ns: dict[tuple[str, int], int] = {}
        self._planned: dict[tuple[str, int], str] = {}
        self._clocks = _Clocks()
        names: dict[str, str] = {}
        kept: list[tuple[int, Event]] = []
        last_ns: dict[str, int] = {}
        self.total = 0
        for event in events:
            self.total += 1
            full = len(kept) >= events_max
            if not full:
                event.engine = names.setdefault(event.engine, event.engine)
                event.request = names.setdefault(event.request, event.request)
            t = self._clocks.time_ns(event)
            if not full or event.engine in last_ns:
                last_ns[event.engine] = max(t, last_ns.get(event.engine, t))
            self._link(event, t, adds=not full)
            if not _is_drawn(event):
                continue
            if full:
                self.left_out += 1
            else:
                kept.append((t, event))
        self.origin_ns = origin = self._clocks.origin_ns or 0
        self.wall_ns = origin + self._clocks.offset_ns if self._clocks.offset_ns else 0
        kept.sort(key=lambda one: (one[0], _TIES.get(type(one[1]), 1)))
        self.events = [event for _, event in kept]
        self.at_ns = [t - origin for t, _ in kept]
        self.last_ns = {engine: t - origin for engine, t in last_ns.items()}
        self.job_ended_ns = {job: t - origin for job, t in self.job_ended_ns.items()}
        self.request_of |= self._planned
        ends = (t + _took(event) for t, event in zip(self.at_ns, self.events, strict=True))
        self.duration_ns = max(max(ends, default=0), max(self.last_ns.values(), default=0))

    def _link(self, event: Event, t: int, *, adds: bool) -> None:
        """Record the request and the end of the job of `event`.

        The request is read from the job's plan, or from the job's first event if the trace lacks the plan. If `adds` is
        false, only jobs that are known already are recorded, because no further event is drawn.
        """
        if isinstance(event, e.LoadPlanned | e.SavePlanned | e.Stuck):
            job = event.engine, event.job
            if adds or job in self._planned or job in self.request_of:
                self._planned[job] = event.request
        elif isinstance(event, transitions.Transition) and event.machine in _JOB_MACHINES:
            job = event.engine, event.cursor
            if not adds and job not in self._planned and job not in self.request_of:
                return
            self.request_of.setdefault(job, event.request)
            if event.rank != SCHEDULER and isinstance(event, transitions.JOB_ENDS):
                self.job_ended_ns[job] = max(t, self.job_ended_ns.get(job, t))


class _Clocks:
    """One clock for the events of several hosts.

    The processes of a host share a monotonic clock. Another host, or an earlier boot, has a monotonic clock with
    another origin. If an event's wall clock shows that its monotonic clock has another origin than the first event's,
    the event's time is shifted.
    """

    def __init__(self) -> None:
        """Start without times.

        `offset_ns` is the difference from the monotonic clock to the wall clock. `origin_ns` is the earliest time.
        """
        self.offset_ns = 0
        self.origin_ns: int | None = None

    def time_ns(self, event: Event) -> int:
        """Return the time of `event` on the clock of the first event that has a wall clock."""
        shift = 0
        if event.wall_ns:
            self.offset_ns = self.offset_ns or event.wall_ns - event.t_ns
            shift = event.wall_ns - event.t_ns - self.offset_ns
        t = event.t_ns + (shift if abs(shift) > _CLOCKS_DIFFER_NS else 0)
        self.origin_ns = t if self.origin_ns is None else min(t, self.origin_ns)
        return t


_TIES: dict[type[Event], int] = {e.Started: -1, e.RequestAdded: 0, e.RequestDone: 2, e.Ended: 3}
_JOB_MACHINES = frozenset({copy.LOAD.name, copy.SAVE.name})


def _is_drawn(event: Event) -> bool:
    """Return whether a span or a mark is drawn for `event`. Most moves of machines are not drawn."""
    if isinstance(event, e.StepRan | e.LayerCopied) or type(event) in MARKED:
        return True
    return event.rank == SCHEDULER and bool(event.request) and isinstance(event, OF_A_LIFE)


def _took(event: Event) -> int:
    return min(max(0, event.took_ns), _TOOK_NS_MAX) if isinstance(event, e.StepRan | e.LayerCopied) else 0


def spans(events: Iterable[Event], events_max: int = EVENTS_MAX) -> Timeline:
    """Make a timeline of `events`, which may come in any order. Any event may be missing.

    At most the first `events_max` of the drawn events are kept.
    """
    trace = _DrawnEvents(events, events_max)
    sides: dict[Side, list[Bundle]] = defaultdict(list)
    lives = Lives(trace.at_ns, trace.job_ended_ns)
    for i, event in enumerate(trace.events):
        marked = type(event) in MARKED
        if event.rank == SCHEDULER and event.request and lives.add(i, event):
            continue
        if isinstance(event, e.StepRan):
            sides[event.engine, event.rank, FORWARDS].append([_lasting(trace, i, FORWARD, f"step {event.step}")])
        elif isinstance(event, e.LayerCopied):
            lane = SAVES if event.kind == SAVE else LOADS
            kind = COPY_FAILED if event.failed else SAVE if lane is SAVES else LOAD
            sides[event.engine, event.rank, lane].append([_lasting(trace, i, kind, f"layer {event.layer}")])
        elif marked and not isinstance(event, transitions.Evicted):
            sides[event.engine, event.rank, NOTES].append([mark(event, trace.at_ns[i], i)])
    for bundle in lives.end(trace.last_ns):
        sides[trace.events[bundle[0].events[0]].engine, SCHEDULER, REQUESTS].append(bundle)
    for side, evicted in _evictions(trace):
        sides[side].append([evicted])
    lanes, placed = _place(sides)
    return Timeline(
        trace.origin_ns, trace.wall_ns, trace.duration_ns, lanes, placed, trace.events, trace.at_ns, trace.total,
        trace.left_out,
    )  # fmt: skip


def _lasting(trace: _DrawnEvents, i: int, kind: str, name: str) -> Span:
    event, begin = trace.events[i], trace.at_ns[i]
    requests = dict.fromkeys([event.request] if event.request else [])
    if isinstance(event, e.LayerCopied):
        requests |= dict.fromkeys(filter(None, (trace.request_of.get((event.engine, job)) for job in event.jobs)))
    return Span(0, 0, kind, name, begin, begin + _took(event), tuple(requests), (i,))


def _evictions(trace: _DrawnEvents) -> Iterator[tuple[Side, Span]]:
    """Yield one mark for all evictions of each step, because a full pool evicts with every save."""
    at: dict[tuple[str, int, int], int] = {}
    chunks: Counter[tuple[str, int, int]] = Counter()
    for i, event in enumerate(trace.events):
        if isinstance(event, transitions.Evicted):
            key = event.engine, event.rank, event.step
            at.setdefault(key, i)
            chunks[key] += 1
    for key, i in at.items():
        yield (
            (key[0], key[1], NOTES),
            mark(trace.events[i], trace.at_ns[i], i, f"evicted: {chunks[key]}")._replace(requests=()),
        )


# ---- lanes and rows -------------------------------------------------------------------------------------------------


def _place(sides: dict[Side, list[Bundle]]) -> tuple[list[Lane], list[Span]]:
    """Give each side a lane, and each bundle of the side a row in the lane.

    Engines are in order of appearance. Each engine's scheduler is above the engine's ranks.
    """
    appeared: dict[str, int] = {}
    for (engine, _, _), bundles in sides.items():
        first = min(bundle[0].begin_ns for bundle in bundles)
        appeared[engine] = min(first, appeared.get(engine, first))
    lanes: list[Lane] = []
    placed: list[Span] = []
    for side in sorted(sides, key=lambda s: (appeared[s[0]], s[0], s[1], LANES.index(s[2]))):
        bundles = sorted(sides[side], key=lambda bundle: bundle[0].begin_ns)
        rows = [0] * len(bundles) if side[2] == NOTES else _rows(bundles)
        number = len(lanes)
        lanes.append(Lane(*side, max(rows) + 1))
        placed += [
            span._replace(lane=number, row=row) for row, bundle in zip(rows, bundles, strict=True) for span in bundle
        ]
    placed.sort(key=lambda s: (s.lane, s.row, s.layer, s.begin_ns))
    return lanes, placed


def _rows(bundles: list[Bundle]) -> list[int]:
    """Return a row for each bundle: the topmost row that is free when the bundle begins.

    The bundles must come in the order of their beginnings.
    """
    taken: list[tuple[int, int]] = []
    free: list[int] = []
    rows = []
    for bundle in bundles:
        begin, end = bundle[0].begin_ns, bundle[0].end_ns
        while taken and taken[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(taken)[1])
        row = heapq.heappop(free) if free else len(taken)
        heapq.heappush(taken, (end, row))
        rows.append(row)
    return rows
