"""A trace as a timeline: lanes of spans, written as one self-contained HTML page or as a file for Perfetto.

The scheduler's side has a lane of requests, each with its phases (waiting, loading, running, preempted). A rank has
lanes of its forwards, loads and saves. What happens at one instant is a mark. A trace may lack anything, for processes
write on their own and files are rotated: what never ends lasts until its engine's last event, and what never began
begins with the first that is heard of it.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from kvpipe.statemachine import load, save
from kvpipe.trace import events as e
from kvpipe.trace.events import SCHEDULER, Event

LIFE: Final = "life"
WAITING, LOADING, RUNNING, PREEMPTED = "waiting", "loading", "running", "preempted"
FORWARD, LOAD, SAVE, COPY_FAILED = "forward", "load", "save", "copy_failed"
PHASES = frozenset({WAITING, LOADING, RUNNING, PREEMPTED})

_MARKED: dict[type[Event], str] = {
    e.Preempted: "notice",
    e.Resumed: "good",
    e.Recomputing: "notice",
    e.Failed: "trouble",
    e.Aborted: "notice",
    e.Stuck: "trouble",
    e.TierSlow: "trouble",
    e.TierLost: "trouble",
    e.Fault: "trouble",
    e.Illegal: "trouble",
    e.Dropped: "trouble",
    e.FreezeSwitched: "notice",
    e.CacheReset: "notice",
    e.Evicted: "calm",
}
MARKS = {f"{kind.__struct_config__.tag}_mark": grade for kind, grade in _MARKED.items()}
"""How grave each kind of mark is: trouble, notice, good or calm."""

REQUESTS, FORWARDS, LOADS, SAVES, NOTES = "requests", "forward", "loads", "saves", "marks"
LANES = (REQUESTS, FORWARDS, LOADS, SAVES, NOTES)
"""The lanes of a side, from top to bottom."""

EVENTS_MAX: Final = 250_000
"""As many as a browser draws without a long pause, in about 300 MB here."""
_CLOCKS_DIFFER_NS = 1_000_000_000
_NS_PER_MS = 1_000_000
_TOOK_NS_MAX = 10**15
"""Eleven days: what lasts longer is nonsense."""
_MS_MAX = 1e12


class Lane(NamedTuple):
    """A lane of one side of one engine (`rank` -1: the scheduler's). In a row, spans of one layer do not overlap."""

    engine: str
    rank: int
    name: str
    rows: int


class Span(NamedTuple):
    """What lasted from `begin_ns` to `end_ns`, counted from the trace's start. A mark ends when it begins.

    `events` index the timeline's events: those that say so. `is_open`: nothing says that it ended.
    """

    lane: int
    row: int
    kind: str
    name: str
    begin_ns: int
    end_ns: int
    requests: tuple[str, ...] = ()
    events: tuple[int, ...] = ()
    is_open: bool = False

    @property
    def layer(self) -> int:
        """What covers what in a row: phases their request's life, marks both."""
        return 2 if self.kind in MARKS else 1 if self.kind in PHASES else 0


class Timeline(NamedTuple):
    """A whole trace: its spans by lane, row, layer and time. It starts at `origin_ns` (monotonic), at `wall_ns`."""

    origin_ns: int
    wall_ns: int
    duration_ns: int
    lanes: list[Lane]
    spans: list[Span]
    events: list[Event]
    at_ns: list[int]
    """When each of `events` happened, counted from the trace's start."""
    total: int
    """How many events the trace has, drawn or not."""
    left_out: int
    """How many of those that something is drawn for were too many."""


Side = tuple[str, int, str]
"""Engine, rank and lane."""
Bundle = list[Span]
"""Spans that share a row. The first spans the time of all."""


class _Trace:
    """The events that are drawn, in order, and what the others say of them. Only the former are kept."""

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
            event.engine = names.setdefault(event.engine, event.engine)
            event.request = names.setdefault(event.request, event.request)
            t = self._clocks.time_ns(event)
            last_ns[event.engine] = max(t, last_ns.get(event.engine, t))
            self._link(event, t)
            if not _is_drawn(event):
                continue
            if len(kept) < events_max:
                kept.append((t, event))
            else:
                self.left_out += 1
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

    def _link(self, event: Event, t: int) -> None:
        """Note whose a job is, and when it ended. The request that a plan names counts; else who has it first."""
        if isinstance(event, e.LoadPlanned | e.SavePlanned | e.Stuck):
            self._planned[event.engine, event.job] = event.request
        elif isinstance(event, e.Transition) and event.machine in _JOB_MACHINES:
            job = event.engine, event.cursor
            self.request_of.setdefault(job, event.request)
            if event.rank != SCHEDULER and isinstance(event, _JOB_ENDS):
                self.job_ended_ns[job] = max(t, self.job_ended_ns.get(job, t))


class _Clocks:
    """Puts the events of several hosts on one clock.

    The processes of a host share a monotonic clock. A clock that stands elsewhere (another host's, or that of an
    earlier boot) is told by the wall clock beside it, and is shifted.
    """

    def __init__(self) -> None:
        """Nothing is known. `offset_ns`: from the monotonic clock to the wall clock; `origin_ns`: the first event."""
        self.offset_ns = 0
        self.origin_ns: int | None = None

    def time_ns(self, event: Event) -> int:
        """Return when `event` happened, on the clock of the first event that knows the wall clock."""
        shift = 0
        if event.wall_ns:
            self.offset_ns = self.offset_ns or event.wall_ns - event.t_ns
            shift = event.wall_ns - event.t_ns - self.offset_ns
        t = event.t_ns + (shift if abs(shift) > _CLOCKS_DIFFER_NS else 0)
        self.origin_ns = t if self.origin_ns is None else min(t, self.origin_ns)
        return t


_TIES: dict[type[Event], int] = {e.Started: -1, e.RequestAdded: 0, e.RequestDone: 2, e.Ended: 3}
_JOB_MACHINES = frozenset({load.LOAD.name, save.SAVE.name})
_JOB_ENDS = (e.Finalized, e.Failed, e.Aborted)


def _is_drawn(event: Event) -> bool:
    """Whether a span or a mark is made of `event`: of most moves of machines none is."""
    if isinstance(event, e.StepRan | e.LayerCopied) or type(event) in _MARKED:
        return True
    return event.rank == SCHEDULER and bool(event.request) and isinstance(event, _OF_A_LIFE)


def _took(event: Event) -> int:
    return min(max(0, event.took_ns), _TOOK_NS_MAX) if isinstance(event, e.StepRan | e.LayerCopied) else 0


def _ns(ms: float) -> int:
    """Nanoseconds of a duration that may be nonsense."""
    return int(min(ms, _MS_MAX) * _NS_PER_MS) if ms > 0 else 0


def spans(events: Iterable[Event], events_max: int = EVENTS_MAX) -> Timeline:
    """Make a timeline of `events`, which may come in any order and lack anything.

    At most `events_max` of those that something is drawn for are kept, the first that come.
    """
    trace = _Trace(events, events_max)
    sides: dict[Side, list[Bundle]] = defaultdict(list)
    lives = _Lives(trace)
    for i, event in enumerate(trace.events):
        marked = type(event) in _MARKED
        if event.rank == SCHEDULER and event.request and lives.hear(i, event):
            continue
        if isinstance(event, e.StepRan):
            sides[event.engine, event.rank, FORWARDS].append([_lasting(trace, i, FORWARD, f"step {event.step}")])
        elif isinstance(event, e.LayerCopied):
            lane = SAVES if event.kind == SAVE else LOADS
            kind = COPY_FAILED if event.failed else SAVE if lane is SAVES else LOAD
            sides[event.engine, event.rank, lane].append([_lasting(trace, i, kind, f"layer {event.layer}")])
        elif marked and not isinstance(event, e.Evicted):
            sides[event.engine, event.rank, NOTES].append([_mark(trace, i)])
    for bundle in lives.end():
        sides[trace.events[bundle[0].events[0]].engine, SCHEDULER, REQUESTS].append(bundle)
    for side, mark in _evictions(trace):
        sides[side].append([mark])
    lanes, placed = _place(sides)
    return Timeline(
        trace.origin_ns, trace.wall_ns, trace.duration_ns, lanes, placed, trace.events, trace.at_ns, trace.total,
        trace.left_out,
    )  # fmt: skip


def _lasting(trace: _Trace, i: int, kind: str, name: str) -> Span:
    event, begin = trace.events[i], trace.at_ns[i]
    requests = dict.fromkeys([event.request] if event.request else [])
    if isinstance(event, e.LayerCopied):
        requests |= dict.fromkeys(filter(None, (trace.request_of.get((event.engine, job)) for job in event.jobs)))
    return Span(0, 0, kind, name, begin, begin + _took(event), tuple(requests), (i,))


def _mark(trace: _Trace, i: int, name: str = "") -> Span:
    event, t = trace.events[i], trace.at_ns[i]
    tag = str(event.__struct_config__.tag)
    if not name:
        name = f"fault: {event.name}" if isinstance(event, e.Fault) else tag.replace("_", " ")
    return Span(0, 0, f"{tag}_mark", name, t, t, (event.request,) if event.request else (), (i,))


def _evictions(trace: _Trace) -> Iterator[tuple[Side, Span]]:
    """Yield one mark for all evictions of a step: a full pool evicts with every save."""
    at: dict[tuple[str, int, int], int] = {}
    chunks: Counter[tuple[str, int, int]] = Counter()
    for i, event in enumerate(trace.events):
        if isinstance(event, e.Evicted):
            key = event.engine, event.rank, event.step
            at.setdefault(key, i)
            chunks[key] += 1
    for key, i in at.items():
        yield (key[0], key[1], NOTES), _mark(trace, i, f"evicted: {chunks[key]}")._replace(requests=())


# ---- requests -------------------------------------------------------------------------------------------------------


class _Life:
    """One request, from the first that is heard of it to the last."""

    def __init__(self, request: str, begin_ns: int) -> None:
        """Nothing is known but that it is there."""
        self.request, self.begin_ns, self.end_ns = request, begin_ns, begin_ns
        self.whole = self.done = self.finished = False  # `whole`: its beginning is in the trace
        self.events: list[int] = []
        self.phases: list[Span] = []
        self.marks: list[Span] = []
        self.phase, self.job, self.epoch = "", -1, -1
        self.since_ns, self._since_event, self._admission = 0, -1, -1

    def enter(self, phase: str, t_ns: int, i: int, loaded_ns: int | None = None) -> None:
        """Begin `phase`, and end the one before. `loaded_ns`: see `leave`."""
        if phase != self.phase:
            self.leave(t_ns, i, loaded_ns)
            self.phase, self.since_ns, self._since_event = phase, t_ns, i
            self._admission = -1

    def admit(self, phase: str, t_ns: int, i: int, event: Event, loaded_ns: int | None) -> None:
        """Begin `phase` with an admission. Several events tell of one, in any order: it loads if one says so."""
        if event.step == self._admission:
            self.phase = LOADING if LOADING in {phase, self.phase} else phase
            return
        self.enter(phase, t_ns, i, loaded_ns)
        self._admission = event.step

    def leave(self, t_ns: int, i: int, loaded_ns: int | None = None, *, is_open: bool = False) -> None:
        """End the phase. If it is a load that is known to have ended at `loaded_ns`, it was followed by running."""
        if self.phase == LOADING and loaded_ns is not None and self.since_ns <= loaded_ns < t_ns:
            self._close(loaded_ns, i, is_open=False)
            self.phase, self.since_ns = RUNNING, loaded_ns
        if self.phase:
            self._close(t_ns, i, is_open=is_open)
        self.phase = ""

    def _close(self, t_ns: int, i: int, *, is_open: bool) -> None:
        events = tuple(dict.fromkeys(k for k in (self._since_event, i) if k >= 0))
        self.phases.append(
            Span(0, 0, self.phase, self.phase, self.since_ns, t_ns, (self.request,), events, is_open),
        )

    def bundle(self) -> Bundle:
        """Its spans. The first is the whole life."""
        is_open = not (self.done or self.finished)
        whole = Span(0, 0, LIFE, self.request, self.begin_ns, self.end_ns, (self.request,), tuple(self.events), is_open)
        return [whole, *self.phases, *self.marks]


class _Lives:
    """All requests of the scheduler's sides. An id may be used again once its request is over."""

    def __init__(self, trace: _Trace) -> None:
        self._trace = trace
        self._of: dict[tuple[str, str], _Life] = {}
        self._all: list[tuple[str, _Life]] = []

    def hear(self, i: int, event: Event) -> bool:
        """Take in an event of a request, in order of time; return whether it is shown as part of a life."""
        if not isinstance(event, _OF_A_LIFE):
            return False
        t, key = self._trace.at_ns[i], (event.engine, event.request)
        life = self._of.get(key)
        if life is not None and (life.done or life.finished):
            if isinstance(event, e.RequestDone) and not life.done:
                self._done(life, t, i, event)
                return True
            if not isinstance(event, _BEGINNINGS):
                return False
            life = None
        if life is not None and isinstance(event, e.RequestAdded) and life.whole:
            self._end(life, t)
            life = None
        if life is None:
            if isinstance(event, _NO_BEGINNINGS):
                return False
            life = self._of[key] = _Life(event.request, t)
            self._all.append((event.engine, life))
        life.end_ns = t
        if type(event) in _MARKED:
            life.marks.append(_mark(self._trace, i))
        self._move(life, t, i, event)
        return True

    def _move(self, life: _Life, t: int, i: int, event: Event) -> None:  # noqa: C901, PLR0912  (a case per event)
        loaded = self._trace.job_ended_ns.get((event.engine, life.job))
        match event:
            case e.RequestAdded() | e.Lookup():
                life.whole |= isinstance(event, e.RequestAdded)
                life.enter(life.phase or WAITING, t, i)
                if isinstance(event, e.RequestAdded):
                    life.events.append(i)
            case e.RequestAdmitted():
                waited = min(t, _ns(event.waited_ms))
                if waited and not (life.whole or life.phase or life.phases):
                    life.begin_ns = t - waited
                    life.enter(WAITING, life.begin_ns, -1)
                life.admit(LOADING if "async" in event.load else RUNNING, t, i, event, loaded)
                life.events.append(i)
            case e.LoadPlanned():
                if "async" in event.kind:
                    life.admit(LOADING, t, i, event, loaded)
                    life.job, life.epoch = event.job, event.epoch
            case e.Resumed():
                life.admit(RUNNING, t, i, event, loaded)
            case e.Running() | e.Recomputing():
                life.enter(RUNNING, t, i)
            case e.LeasesReturned() if life.phase == LOADING and event.epoch == life.epoch:
                life.enter(RUNNING, t, i)
            case e.Preempted():
                life.enter(PREEMPTED, t, i, loaded)
            case e.SavePlanned():
                life.enter(life.phase or RUNNING, t, i)
            case e.Finished():
                life.leave(t, i, loaded)
                life.finished = True
            case e.RequestDone():
                self._done(life, t, i, event)
            case _:
                pass
        if not life.events:
            life.events.append(i)

    def _done(self, life: _Life, t: int, i: int, event: e.RequestDone) -> None:
        if not life.whole:
            life.begin_ns = min(life.begin_ns, max(0, t - _ns(event.lived_ms)))
        loaded = self._trace.job_ended_ns.get((event.engine, life.job))
        if loaded is None and event.loading_ms > 0 and not any(p.kind == LOADING for p in life.phases):
            loaded = life.since_ns + _ns(event.loading_ms)
        life.leave(t, i, loaded)
        life.end_ns, life.done = t, True
        life.events.append(i)

    def _end(self, life: _Life, t: int) -> None:
        if not (life.done or life.finished):
            life.end_ns = max(t, life.end_ns)
            life.leave(life.end_ns, -1, is_open=True)

    def end(self) -> Iterator[Bundle]:
        """Yield all requests' spans. Those that never end last until their engine's last event."""
        for engine, life in self._all:
            if self._of[engine, life.request] is life:
                self._end(life, self._trace.last_ns[engine])
            yield life.bundle()


_BEGINNINGS = (e.RequestAdded, e.Lookup, e.RequestAdmitted)
_NO_BEGINNINGS = (e.LeasesReturned, e.Fault, e.Illegal)
_OF_A_LIFE = (
    e.RequestAdded,
    e.Lookup,
    e.RequestAdmitted,
    e.RequestDone,
    e.LoadPlanned,
    e.SavePlanned,
    e.LeasesReturned,
    e.Running,
    e.Preempted,
    e.Resumed,
    e.Recomputing,
    e.Finished,
    e.Fault,
    e.Illegal,
)


# ---- lanes and rows -------------------------------------------------------------------------------------------------


def _place(sides: dict[Side, list[Bundle]]) -> tuple[list[Lane], list[Span]]:
    """Give every bundle a row, and every side its place: engines as they appear, the scheduler above its ranks."""
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
    """Return a row for each bundle, the topmost that is free when it begins. They come in order of their beginnings."""
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


def tag_of(event: Event) -> str:
    """Return what the trace calls this kind of event."""
    return str(event.__struct_config__.tag)
