"""Counts which cells of the state machines a run has reached.

Every cell is reachable, except the cells that reject their event as a bug.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from kvpipe.statemachine import chunk, copy, job, lookup, request, saving, stage, step
from kvpipe.statemachine.core import Machine

if TYPE_CHECKING:
    from kvpipe.connectors.vllm.trial.trial import Trial

MACHINES: tuple[Machine, ...] = (
    step.STEP, copy.SAVE, copy.LOAD, request.REQUEST, lookup.LOOKUP, saving.SAVING, job.JOB, chunk.CHUNK,
    stage.STAGE,
)  # fmt: skip
_NAMES = frozenset(machine.name for machine in MACHINES)


class CellPlace(NamedTuple):
    """One cell of one state machine's table."""

    machine: str
    state: str
    event: str

    def __str__(self) -> str:
        """Return the cell's name in reports."""
        return f"{self.machine}: {self.state} x {self.event}"


def counts(trial: Trial) -> Counter[CellPlace]:
    """Return how often each cell was taken in `trial`, over all cursors of kvpipe's sides."""
    trial.replay_traces()
    return Counter({CellPlace(*cell): times for cell, times in trial.replay.cells.items() if cell[0] in _NAMES})


def reachable() -> list[CellPlace]:
    """Return every cell that some sequence of vLLM's calls reaches: all cells that do not reject their events."""
    rows = ((machine, state, row) for machine in MACHINES for state, row in machine.table.items())
    return [
        CellPlace(machine.name, state, event)
        for machine, state, row in rows
        for event, cell in row.items()
        if cell.kind != "reject"
    ]


def coverage(taken: Counter[CellPlace]) -> tuple[int, int, list[CellPlace]]:
    """Return (number of reached cells, number of reachable cells, reachable cells that were not reached)."""
    can = reachable()
    missed = [cell for cell in can if not taken[cell]]
    return len(can) - len(missed), len(can), missed
