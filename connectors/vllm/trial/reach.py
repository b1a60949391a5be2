"""Which cells of the machines a run has reached: all can be, but those whose event would be a bug of kvpipe."""

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


class Cell(NamedTuple):
    """One cell of one table."""

    machine: str
    state: str
    event: str

    def __str__(self) -> str:
        """Name the cell as reports do."""
        return f"{self.machine}: {self.state} x {self.event}"


def counts(trial: Trial) -> Counter[Cell]:
    """Return how often each cell was taken in `trial`, over all cursors of kvpipe's sides."""
    trial.replay_traces()
    return Counter({Cell(*cell): times for cell, times in trial.replay.cells.items() if cell[0] in _NAMES})


def reachable() -> list[Cell]:
    """Return every cell that some sequence of vLLM's calls leads to: each that does not reject."""
    rows = ((machine, state, row) for machine in MACHINES for state, row in machine.table.items())
    return [
        Cell(machine.name, state, event)
        for machine, state, row in rows
        for event, cell in row.items()
        if cell.kind != "reject"
    ]


def report(taken: Counter[Cell]) -> tuple[int, int, list[Cell]]:
    """Return (cells reached, cells that can be, those that were not)."""
    can = reachable()
    missed = [cell for cell in can if not taken[cell]]
    return len(can) - len(missed), len(can), missed
