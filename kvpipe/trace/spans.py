"""The parts of a timeline: lanes of spans and marks, and the severity of marks."""

from __future__ import annotations

from typing import Final, NamedTuple

from kvpipe.trace import events as e
from kvpipe.trace import transitions
from kvpipe.trace.events import Event, tag_of

LIFE: Final = "life"
WAITING, LOADING, RUNNING, PREEMPTED = "waiting", "loading", "running", "preempted"
FORWARD, LOAD, SAVE, COPY_FAILED = "forward", "load", "save", "copy_failed"
PHASES = frozenset({WAITING, LOADING, RUNNING, PREEMPTED})

MARKED: dict[type[Event], str] = {
    transitions.Preempted: "notice",
    transitions.Resumed: "good",
    transitions.Recomputing: "notice",
    transitions.Failed: "trouble",
    transitions.Aborted: "notice",
    e.Stuck: "trouble",
    e.TierSlow: "trouble",
    e.TierLost: "trouble",
    e.Fault: "trouble",
    transitions.Illegal: "trouble",
    e.Dropped: "trouble",
    e.FreezeSwitched: "notice",
    e.CacheReset: "notice",
    transitions.Evicted: "calm",
}
MARKS = {f"{tag_of(kind)}_mark": grade for kind, grade in MARKED.items()}
"""Severity of each kind of mark: trouble, notice, good or calm."""

REQUESTS, FORWARDS, LOADS, SAVES, NOTES = "requests", "forward", "loads", "saves", "marks"
LANES = (REQUESTS, FORWARDS, LOADS, SAVES, NOTES)
"""The lanes of a side, from top to bottom."""


class Lane(NamedTuple):
    """A lane of one side of one engine (`rank` -1: the scheduler's). In a row, spans of one layer do not overlap."""

    engine: str
    rank: int
    name: str
    rows: int


class Span(NamedTuple):
    """A span from `begin_ns` to `end_ns`, counted from the trace's start. A mark is a span without length.

    `events`: indices of the timeline's events that it was drawn from. `is_open`: the trace has no end of it.
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
    """How many events that would be drawn were left out, beyond the limit."""


Side = tuple[str, int, str]
"""Engine, rank and lane."""
Bundle = list[Span]
"""Spans that share a row. The first spans the time of all."""


def mark(event: Event, t_ns: int, i: int, name: str = "") -> Span:
    """Return the mark of event number `i`, at `t_ns` from the trace's start."""
    tag = tag_of(event)
    if not name:
        name = f"fault: {event.name}" if isinstance(event, e.Fault) else tag.replace("_", " ")
    return Span(0, 0, f"{tag}_mark", name, t_ns, t_ns, (event.request,) if event.request else (), (i,))
