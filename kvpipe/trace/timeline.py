"""A trace as a timeline: lanes of spans, written as one self-contained HTML page or as a file for Perfetto.

The scheduler's side has a lane of requests, each with its phases (waiting, loading, running, preempted). A rank has
lanes of its forwards, loads and saves. What happens at one instant is a mark. A trace may lack anything, for processes
write on their own and files are rotated: what never ends lasts until its engine's last event, and what never began
begins with the first that is heard of it.
"""

from __future__ import annotations

import base64
import hashlib
import heapq
import json
import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from importlib import resources
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

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

FORMAT = 1
_TEMPLATE = "timeline.html"
_DATA, _HASH = "@TRACE@", "@SCRIPT_HASH@"
_SCRIPT_BEGIN, _SCRIPT_END = "<script>", "</script>"
_CLOCKS_DIFFER_NS = 1_000_000_000
_EXACT_MAX = 1 << 53
"""JavaScript rounds greater integers."""
_NS_PER_MS = 1_000_000
_NS_PER_US = 1_000
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


Side = tuple[str, int, str]
"""Engine, rank and lane."""
Bundle = list[Span]
"""Spans that share a row. The first spans the time of all."""


class _Trace:
    """The events in order, and what links them."""

    def __init__(self, events: Iterable[Event]) -> None:
        unordered = list(events)
        times, self.origin_ns, self.wall_ns = _aligned(unordered)
        order = sorted(range(len(unordered)), key=lambda i: (times[i], _TIES.get(type(unordered[i]), 1)))
        self.events = [unordered[i] for i in order]
        self.at_ns = [times[i] - self.origin_ns for i in order]
        self.duration_ns = 0
        self.last_ns: dict[str, int] = {}
        self.request_of: dict[tuple[str, int], str] = {}
        self.job_ended_ns: dict[tuple[str, int], int] = {}
        for t, event in zip(self.at_ns, self.events, strict=True):
            self.last_ns[event.engine] = max(t, self.last_ns.get(event.engine, 0))
            self.duration_ns = max(self.duration_ns, t + _took(event))
            if isinstance(event, e.LoadPlanned | e.SavePlanned | e.Stuck):
                self.request_of[event.engine, event.job] = event.request
            elif isinstance(event, e.Transition) and event.machine in _JOB_MACHINES:
                self.request_of.setdefault((event.engine, event.cursor), event.request)
                if event.rank != SCHEDULER and isinstance(event, _JOB_ENDS):
                    self.job_ended_ns[event.engine, event.cursor] = t


_TIES: dict[type[Event], int] = {e.Started: -1, e.RequestAdded: 0, e.RequestDone: 2, e.Ended: 3}
_JOB_MACHINES = frozenset({load.LOAD.name, save.SAVE.name})
_JOB_ENDS = (e.Finalized, e.Failed, e.Aborted)


def _aligned(events: list[Event]) -> tuple[list[int], int, int]:
    """Return each event's time, the first of them, and the wall clock then.

    The processes of a host share a monotonic clock. A clock that stands elsewhere (another host's, or that of an
    earlier boot) is told by the wall clock beside it, and is shifted.
    """
    offset = next((event.wall_ns - event.t_ns for event in events if event.wall_ns), 0)
    times = []
    for event in events:
        shift = event.wall_ns - event.t_ns - offset if event.wall_ns else 0
        times.append(event.t_ns + (shift if abs(shift) > _CLOCKS_DIFFER_NS else 0))
    origin = min(times, default=0)
    return times, origin, origin + offset if offset else 0


def _took(event: Event) -> int:
    return max(0, event.took_ns) if isinstance(event, e.StepRan | e.LayerCopied) else 0


def _ns(ms: float) -> int:
    """Nanoseconds of a duration that may be nonsense."""
    return int(min(ms, _MS_MAX) * _NS_PER_MS) if ms > 0 else 0


def spans(events: Iterable[Event]) -> Timeline:
    """Make a timeline of `events`, which may come in any order and lack anything."""
    trace = _Trace(events)
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
    return Timeline(trace.origin_ns, trace.wall_ns, trace.duration_ns, lanes, placed, trace.events, trace.at_ns)


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


# ---- the page -------------------------------------------------------------------------------------------------------


def write_html(events: Iterable[Event], path: Path) -> Timeline:
    """Write the timeline of `events` as one page that needs nothing else. Return it."""
    timeline = spans(events)
    template = resources.files("kvpipe.trace").joinpath(_TEMPLATE).read_text(encoding="utf-8")
    script = template[template.rindex(_SCRIPT_BEGIN) + len(_SCRIPT_BEGIN) : template.rindex(_SCRIPT_END)]
    # the page's policy runs this one script and nothing else, whatever the data say
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    before, after = template.replace(_HASH, f"sha256-{digest}", 1).split(_DATA, 1)
    path.write_text(before + _json(_columns(timeline)) + after, encoding="utf-8")
    return timeline


def _json(value: object) -> str:
    """JSON that may stand inside an HTML element: pure ASCII and no tags."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _plain(value: Any) -> Any:  # noqa: ANN401  (any field of any event)
    """What JSON and JavaScript can hold of a field: numbers that they would round are text."""
    if isinstance(value, bool | str) or value is None:
        return value
    if isinstance(value, int):
        return value if abs(value) < _EXACT_MAX else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else str(value)


class _Strings(dict[str, int]):
    """Each string once."""

    def __missing__(self, text: str) -> int:
        number = self[text] = len(self)
        return number


def _columns(timeline: Timeline) -> dict[str, object]:
    """Return the timeline by columns, and the events that it shows; columns of one value are told once."""
    strings = _Strings()
    kinds = _Strings()
    shown = sorted({i for span in timeline.spans for i in span.events}, key=lambda i: (_tag(timeline.events[i]), i))
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
        "events": len(timeline.events),
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


def _tag(event: Event) -> str:
    return str(event.__struct_config__.tag)


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
        by_tag[_tag(timeline.events[i])].append(i)
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
                values = [_plain(getattr(event, field)) for event in some]
            fields[field] = _column(values, strings)
        tables.append({"tag": tag, "at": at, "fields": fields})
    return tables


def _column(values: list[Any], strings: _Strings) -> list[object]:
    if all(value == values[0] and type(value) is type(values[0]) for value in values):
        return ["one", values[0]]
    if all(isinstance(value, str) for value in values):
        return ["text", [strings[value] for value in values]]
    return ["each", values]


# ---- Perfetto -------------------------------------------------------------------------------------------------------

_THREADS = {REQUESTS: 1, NOTES: 2, FORWARDS: 3, LOADS: 1000, SAVES: 2000}
"""The thread number of each lane's first row: rows are threads, for what stands on one thread must be nested."""


def write_perfetto(events: Iterable[Event], path: Path) -> Timeline:
    """Write the timeline of `events` as Chrome trace events: for ui.perfetto.dev, chrome://tracing. Return it."""
    timeline = spans(events)
    lines = ",\n".join(json.dumps(one, separators=(",", ":"), allow_nan=False) for one in _chrome(timeline))
    path.write_text(f'{{"displayTimeUnit":"ms","traceEvents":[\n{lines}\n]}}\n', encoding="utf-8")
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
    timed.sort(key=itemgetter(0))  # what begins and ends at one time keeps its order, so it stays nested
    for t, one in timed:
        yield one | {"ts": t / _NS_PER_US}


def _named(what: str, pid: int, tid: int, name: str) -> Iterator[dict[str, object]]:
    """Name a process or a thread, and keep it in its place."""
    common = {"ph": "M", "pid": pid, "tid": tid, "ts": 0}
    yield common | {"name": f"{what}_name", "args": {"name": name}}
    yield common | {"name": f"{what}_sort_index", "args": {"sort_index": tid or pid}}


def _lives_of(timeline: Timeline) -> Iterator[Bundle]:
    """Yield each request's life, and its phases behind it."""
    rows: dict[tuple[int, int], list[Bundle]] = {}
    for span in timeline.spans:  # of a row: first all lives, then all phases, both in order of time
        if span.kind == LIFE:
            rows.setdefault((span.lane, span.row), []).append([span])
        elif span.kind in PHASES:
            lives = rows[span.lane, span.row]
            lives[bisect_right(lives, span.begin_ns, key=lambda life: life[0].begin_ns) - 1].append(span)
    for lives in rows.values():
        yield from lives


def _args(timeline: Timeline, span: Span) -> dict[str, object]:
    """Return all fields of the events that a span was made of, the earlier's by its tag where there are several."""
    told = [(timeline.events[i], _tag(timeline.events[i])) for i in span.events]
    fields = [(tag, {name: _plain(getattr(event, name)) for name in event.__struct_fields__}) for event, tag in told]
    return fields[0][1] if len(fields) == 1 else dict(fields)
