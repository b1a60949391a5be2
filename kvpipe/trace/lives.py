"""The lives of the requests in a trace, for a timeline. A life has phases, and marks of single events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kvpipe.trace import events as e
from kvpipe.trace import transitions
from kvpipe.trace.events import Event
from kvpipe.trace.spans import LIFE, LOADING, MARKED, PREEMPTED, RUNNING, WAITING, Bundle, Span, mark

JobKey = tuple[str, int]
"""An engine, and the id of one of its jobs."""
_NS_PER_MS = 1_000_000
_MS_MAX = 1e12
_BEGINNINGS = (e.RequestAdded, e.Lookup, e.RequestAdmitted)
_NO_BEGINNINGS = (e.LeasesReturned, e.Fault, transitions.Illegal)
OF_A_LIFE = (
    e.RequestAdded,
    e.Lookup,
    e.RequestAdmitted,
    e.RequestDone,
    e.LoadPlanned,
    e.SavePlanned,
    e.LeasesReturned,
    transitions.Running,
    transitions.Preempted,
    transitions.Resumed,
    transitions.Recomputing,
    transitions.Finished,
    e.Fault,
    transitions.Illegal,
)


def _ns(ms: float) -> int:
    """Return a duration in nanoseconds. The duration is clamped, because a trace may have any number."""
    return int(min(ms, _MS_MAX) * _NS_PER_MS) if ms > 0 else 0


class Life:
    """The life of one request, from the request's first event to its last event."""

    def __init__(self, request: str, begin_ns: int) -> None:
        """Start without phases, at the time `begin_ns` of the first event."""
        self.request, self.begin_ns, self.end_ns = request, begin_ns, begin_ns
        self.whole = self.done = self.finished = False  # `whole` says whether the trace has the request's beginning
        self.events: list[int] = []
        self.phases: list[Span] = []
        self.marks: list[Span] = []
        self.phase, self.job, self.epoch = "", -1, -1
        self.since_ns, self._since_event, self._admission = 0, -1, -1

    def enter(self, phase: str, t_ns: int, i: int, loaded_ns: int | None = None) -> None:
        """End the present phase and begin `phase` at `t_ns`, because of event number `i`.

        `leave` explains `loaded_ns`.
        """
        if phase != self.phase:
            self.leave(t_ns, i, loaded_ns)
            self.phase, self.since_ns, self._since_event = phase, t_ns, i
            self._admission = -1

    def admit(self, phase: str, t_ns: int, i: int, event: Event, loaded_ns: int | None) -> None:
        """Begin `phase` with an admission. Several events may report the same admission, in any order.

        If one of these events reports a load, the phase is loading.
        """
        if event.step == self._admission:
            self.phase = LOADING if LOADING in {phase, self.phase} else phase
            return
        self.enter(phase, t_ns, i, loaded_ns)
        self._admission = event.step

    def leave(self, t_ns: int, i: int, loaded_ns: int | None = None, *, is_open: bool = False) -> None:
        """End the current phase. If the phase is a load that ended at `loaded_ns`, a running phase follows the load."""
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
        """Return the spans of the life. The first span is the whole life."""
        is_open = not (self.done or self.finished)
        whole = Span(0, 0, LIFE, self.request, self.begin_ns, self.end_ns, (self.request,), tuple(self.events), is_open)
        return [whole, *self.phases, *self.marks]


class Lives:
    """The lives of the requests of all engines in a trace. An id may be used again once its request is over."""

    def __init__(self, at_ns: Sequence[int], job_ended_ns: Mapping[JobKey, int]) -> None:
        """`at_ns` has the time of each event. `job_ended_ns` has the times at which ranks reported the ends of jobs."""
        self._at_ns, self._job_ended_ns = at_ns, job_ended_ns
        self._of: dict[tuple[str, str], Life] = {}
        self._all: list[tuple[str, Life]] = []

    def add(self, i: int, event: Event) -> bool:
        """Add an event. Events must come in order of time. Returns whether the event is shown in a request's life."""
        if not isinstance(event, OF_A_LIFE):
            return False
        t, key = self._at_ns[i], (event.engine, event.request)
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
            life = self._of[key] = Life(event.request, t)
            self._all.append((event.engine, life))
        life.end_ns = t
        if type(event) in MARKED:
            life.marks.append(mark(event, t, i))
        self._move(life, t, i, event)
        return True

    def _move(self, life: Life, t: int, i: int, event: Event) -> None:  # noqa: C901, PLR0912  (a case per event)
        loaded = self._job_ended_ns.get((event.engine, life.job))
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
            case transitions.Resumed():
                life.admit(RUNNING, t, i, event, loaded)
            case transitions.Running() | transitions.Recomputing():
                life.enter(RUNNING, t, i)
            case e.LeasesReturned() if life.phase == LOADING and event.epoch == life.epoch:
                life.enter(RUNNING, t, i)
            case transitions.Preempted():
                life.enter(PREEMPTED, t, i, loaded)
            case e.SavePlanned():
                life.enter(life.phase or RUNNING, t, i)
            case transitions.Finished():
                life.leave(t, i, loaded)
                life.finished = True
            case e.RequestDone():
                self._done(life, t, i, event)
            case _:
                pass
        if not life.events:
            life.events.append(i)

    def _done(self, life: Life, t: int, i: int, event: e.RequestDone) -> None:
        if not life.whole:
            life.begin_ns = min(life.begin_ns, max(0, t - _ns(event.lived_ms)))
        loaded = self._job_ended_ns.get((event.engine, life.job))
        if loaded is None and event.loading_ms > 0 and not any(p.kind == LOADING for p in life.phases):
            loaded = life.since_ns + _ns(event.loading_ms)
        life.leave(t, i, loaded)
        life.end_ns, life.done = t, True
        life.events.append(i)

    def _end(self, life: Life, t: int) -> None:
        if not (life.done or life.finished):
            life.end_ns = max(t, life.end_ns)
            life.leave(life.end_ns, -1, is_open=True)

    def end(self, last_ns: Mapping[str, int]) -> Iterator[Bundle]:
        """Yield the spans of all requests. A request without an end lasts until its engine's last time in `last_ns`."""
        for engine, life in self._all:
            if self._of[engine, life.request] is life:
                self._end(life, last_ns[engine])
            yield life.bundle()
