"""Observes kvpipe in a trial: finds it among vLLM's connectors, and reads its plans, traces and faults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from kvpipe.trace.events import Started
from kvpipe.trace.recorder import Recorder
from kvpipe.trace.replay import Replay
from kvpipe.worker.side import WorkerSide

if TYPE_CHECKING:
    from kvpipe.connectors.vllm.connector import KVPipeConnector
    from kvpipe.connectors.vllm.metadata import PlanMetadata
    from kvpipe.protocol.messages import StepPlan
    from kvpipe.statemachine.core import Cursor, Edge, State


class CountedFault(NamedTuple):
    """A fault that kvpipe has counted."""

    name: str
    fields: dict[str, Any]


class TraceTap:
    """Replays the traces of kvpipe's sides through the state machines, and collects the counted faults."""

    def __init__(self) -> None:
        """Start without a side to observe."""
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
            # repeated, because `recorder.take` has dropped the event of the node's first transition
            if side.scheduler.node is not None:
                side.scheduler.tracer.watch_node(side.scheduler.node.pool)
        self.replay.feed(Started(0, rank, "", 0, 0, layers=len(side.geometry.layers)))
        self.recorders.append(recorder)
        side.counters.watcher = lambda name, fields: self.faults.append(CountedFault(name, fields))

    def count_layers(self, side: KVPipeConnector, rank: int) -> None:
        """Set the number of layers that copies of `rank` have in the replay. Called when the rank has its caches."""
        if isinstance(worker := side.worker, WorkerSide):
            self.replay.feed(Started(0, rank, "", 0, 0, layers=len(worker.geometry.layers), part=1))

    def replay_new(self) -> None:
        """Replay the trace events since the last call through the state machines."""
        for recorder in self.recorders:
            for event in recorder.take():
                self.replay.feed(event)

    def step_moved(self, cursor: Cursor, was: State, edge: Edge, _why: str) -> None:
        """Count the transitions of a rank's step, because no trace contains the state machine of steps."""
        self.replay.cells[cursor.machine.machine.name, was.row, edge.event] += 1


def kvpipe_in(connector: object) -> KVPipeConnector | None:
    """Return kvpipe's connector: `connector`, or a connector in `connector`. None: there is none, or more than one."""
    from kvpipe.connectors.vllm.connector import KVPipeConnector

    inside = [one for one in getattr(connector, "sub_connectors", [connector]) if isinstance(one, KVPipeConnector)]
    return inside[0] if len(inside) == 1 else None


def empty(metadata: Any) -> PlanMetadata:  # noqa: ANN401  (as for `plan_in`)
    """Return kvpipe's metadata for the step of `metadata`, with an empty plan."""
    from kvpipe.connectors.vllm.metadata import PlanMetadata

    return PlanMetadata(plan_in(metadata)._replace(jobs=(), orders=(), question=0, claims=()))


def plan_in(metadata: Any) -> StepPlan:  # noqa: ANN401  (kvpipe's, or what several connectors send together)
    """Return kvpipe's plan in the metadata of a step."""
    plan: StepPlan = next(one.plan for one in getattr(metadata, "metadata", [metadata]) if hasattr(one, "plan"))
    return plan
