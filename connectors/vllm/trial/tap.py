"""How a trial observes kvpipe: finding it among vLLM's connectors, its plans, its traces, its faults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from kvpipe.trace.events import Started
from kvpipe.trace.recorder import Recorder
from kvpipe.trace.replay import Replay

if TYPE_CHECKING:
    from kvpipe.connectors.vllm.connector import KVPipeConnector
    from kvpipe.connectors.vllm.metadata import PlanMetadata
    from kvpipe.messages import StepPlan
    from kvpipe.statemachine.core import Cursor, Edge, State


class CountedFault(NamedTuple):
    """A fault that kvpipe has counted."""

    name: str
    fields: dict[str, Any]


class TraceTap:
    """Replays what kvpipe's sides trace through the machines, and collects the faults that they count."""

    def __init__(self) -> None:
        """Observe nobody yet."""
        self.replay = Replay()
        self.faults: list[CountedFault] = []
        self.recorders: list[Recorder] = []

    def attach(self, side: KVPipeConnector, rank: int) -> None:
        """Trace `side` from now on, in full detail."""
        side.writer.close()
        recorder: Recorder = side.recorder
        recorder.take()
        recorder.rank, recorder.lifecycle, recorder.transitions, recorder.detail = rank, True, True, True
        if side.scheduler is not None:
            side.scheduler.trace_moves()
        self.replay.feed(Started(0, rank, "", 0, 0, layers=len(side.geometry.layers)))
        self.recorders.append(recorder)
        side.counters.watcher = lambda name, fields: self.faults.append(CountedFault(name, fields))

    def replay_new(self) -> None:
        """Replay what was traced since the last call through the machines."""
        for recorder in self.recorders:
            for event in recorder.take():
                self.replay.feed(event)

    def step_moved(self, cursor: Cursor, was: State, edge: Edge, _why: str) -> None:
        """Count what a rank's step has done: the machine of steps is in no trace."""
        self.replay.cells[cursor.machine.machine.name, was.row, edge.event] += 1


def kvpipe_in(connector: object) -> KVPipeConnector | None:
    """Return kvpipe's connector: `connector` itself, or the only one among those that it passes on to."""
    from kvpipe.connectors.vllm.connector import KVPipeConnector

    inside = [one for one in getattr(connector, "sub_connectors", [connector]) if isinstance(one, KVPipeConnector)]
    return inside[0] if len(inside) == 1 else None


def empty(metadata: Any) -> PlanMetadata:  # noqa: ANN401  (as for `plan_in`)
    """Return kvpipe's metadata for the same step, without anything to do."""
    from kvpipe.connectors.vllm.metadata import PlanMetadata

    return PlanMetadata(plan_in(metadata)._replace(jobs=(), orders=(), question=0, claims=()))


def plan_in(metadata: Any) -> StepPlan:  # noqa: ANN401  (kvpipe's, or what several connectors send together)
    """Return kvpipe's plan for the step."""
    plan: StepPlan = next(one.plan for one in getattr(metadata, "metadata", [metadata]) if hasattr(one, "plan"))
    return plan
