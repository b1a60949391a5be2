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
    transitions.HolderLost: "trouble",
    transitions.HolderReplaced: "good",
    transitions.NodeStranded: "trouble",
    e.Dropped: "trouble",
    e.FreezeSwitched: "notice",
    e.CacheReset: "notice",
    transitions.Evicted: "calm",
}
MARKS = {f"{tag_of(kind)}_mark": grade for kind, grade in MARKED.items()}
"""The severity of each kind of mark: trouble, notice, good or calm."""

REQUESTS, FORWARDS, LOADS, SAVES, NOTES = "requests", "forward", "loads", "saves", "marks"
LANES = (REQUESTS, FORWARDS, LOADS, SAVES, NOTES)
"""The lanes of a side, from top to bottom."""


class Lane(NamedTuple):
    """A lane of one side of one engine.

    `rank` is -1 for the scheduler. In a row, spans of equal `layer` do not overlap.
    """

    engine: str
    rank: int
    name: str
    rows: int


class Span(NamedTuple):
    """A span from `begin_ns` to `end_ns`. Both count from the trace's start. A mark is a span without length.

    `events` has the indices of the timeline's events from which the span was made. `is_open` says whether the trace
    lacks the span's end.
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
        """The order of drawing in a row. Phases are drawn over their request's life, and marks are drawn on top."""
        return 2 if self.kind in MARKS else 1 if self.kind in PHASES else 0


class Timeline(NamedTuple):
    """A whole trace, with its spans ordered by lane, row, layer and time.

    The trace starts at `origin_ns` of the monotonic clock. At this time, the wall clock shows `wall_ns`.
    """

    origin_ns: int
    wall_ns: int
    duration_ns: int
    lanes: list[Lane]
    spans: list[Span]
    events: list[Event]
    at_ns: list[int]
    """The time of each of `events`, counted from the trace's start."""
    total: int
    """The number of the trace's events, drawn or not."""
    left_out: int
    """The number of events that were not drawn because of the limit on drawn events."""


Side = tuple[str, int, str]
"""An engine, a rank and the name of a lane."""
Bundle = list[Span]
"""Spans that share a row. The first span covers the time of all spans of the bundle."""


def mark(event: Event, t_ns: int, i: int, name: str = "") -> Span:
    """Return the mark of event number `i`, at `t_ns` from the trace's start."""
    tag = tag_of(event)
    if not name:
        name = f"fault: {event.name}" if isinstance(event, e.Fault) else tag.replace("_", " ")
    return Span(0, 0, f"{tag}_mark", name, t_ns, t_ns, (event.request,) if event.request else (), (i,))
