"""Which cells of the machines a run has reached, and why the others cannot be reached through vLLM's calls."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from kvpipe.statemachine import chunk, load, request, save
from kvpipe.statemachine.core import Machine
from kvpipe.testing.shapes import SHAPES

MACHINES: tuple[Machine, ...] = (save.SAVE, load.LOAD, request.REQUEST, chunk.CHUNK)
_LAYERS = sorted({len(shape.windows) * shape.layers_per_group for shape in SHAPES.values()})


class Cell(NamedTuple):
    """One cell of one table."""

    machine: str
    state: str
    event: str

    def __str__(self) -> str:
        """Name the cell as reports do."""
        return f"{self.machine}: {self.state} x {self.event}"


_NO_EVENT = "the pipeline never sends it: jobs outlive their request, and later steps do not touch earlier jobs"
_ENDS_ONCE = "a batch ends once, by its step's end or by its withdrawal"
_SETTLED = "loads are settled in `get_transfer_results`, before a step can be withdrawn"
_RACE = "needs a completion between the timeout of a wait and its report: a race of two threads"
_SAME_SCHEDULE = "allocation and dispatch belong to one scheduling pass, and nothing comes between"
_FORGOTTEN = "a finished request is not tracked any more"
_BEHIND = "a cursor that was given up counts from before the first layer: late completions are ahead of it"
_NOT_LET_GO = "a reader that leaves while a writer remains is not told: there is nothing to do yet"
_OWN_STEP = (
    "a failed sync load is known with its own step: only the asynchronous scheduler can preempt in between, where "
    "vLLM's own recovery answers wrongly (no shape lets loads fail there)"
)
_ADMITTED = "sent for a request that counts as running only: of the others vLLM is expected to ask"
_NO_LOAD = "a load of an earlier admission that is reported so late: its rank's news would have to be lost for long"
_JUDGED_ONCE = "a job is judged once, when every rank has spoken, and a recomputing request has no other"


def _cells(machine: str, state: str, events: tuple[str, ...], why: str) -> dict[Cell, str]:
    return {Cell(machine, state, event): why for event in events}


_NEVER_SENT = (
    {("save", e): _NO_EVENT for e in (save.EMPTY_STEP, save.PREEMPT, save.ABORT)}
    | {("load", e): _NO_EVENT for e in (load.EMPTY_STEP, load.PREEMPT, load.ABORT)}
    | {("load", load.CANCEL): _SETTLED}
)
_UNREACHABLE: dict[Cell, str] = {
    **_cells("save", save.PENDING, (save.CANCEL,), "a withdrawal waits for the copies that were submitted first"),
    **_cells("save", save.FINALIZED, (save.STEP_END_COMPLETE, save.CANCEL), _ENDS_ONCE),
    **_cells("save", save.FINALIZED, (save.FAULT,), _RACE),
    **_cells("save", save.ABORTED, (save.STEP_END_COMPLETE, save.STEP_END_MISSING, save.CANCEL), _ENDS_ONCE),
    **_cells("load", load.FINALIZED, (load.CONFIRM,), "confirmed once, and again only as the last layer lands"),
    **_cells("load", load.LANDED, (load.FAULT,), _RACE),
    **_cells("save", save.ABORTED, (save.LANDED_AGAIN,), _BEHIND),
    **_cells("save", save.FAILED, (save.LANDED_AGAIN,), _BEHIND),
    **_cells("load", load.FAILED, (save.LANDED_AGAIN,), _BEHIND),
    **_cells("chunk", chunk.GROWING, (chunk.DRAINED,), _NOT_LET_GO),
    **dict.fromkeys((Cell("load", load.ABORTED, event) for event in load.LOAD.events), _SETTLED),
    **_cells("request", request.NEW, (request.PREEMPT,), "vLLM preempts only what it has admitted"),
    **_cells("request", request.ALLOCATED, (request.ADMIT_EMPTY, request.PREEMPT, request.FINISH), _SAME_SCHEDULE),
    **_cells("request", request.LOADING, (request.ADMIT_EMPTY,), "the job's report comes with the news that it ended"),
    **_cells("request", request.LOADING, (request.PREEMPT_LATE,), "the notice comes before the load is sent"),
    **dict.fromkeys(
        (Cell("request", state, request.ASKED_ANEW) for state in request.REQUEST.states if state != request.RUNNING),
        _ADMITTED,
    ),
    **_cells("request", request.LET_DOWN, (request.PREEMPT, request.PREEMPT_LATE), "it has no blocks to be taken"),
    **_cells("request", request.LET_DOWN, (request.LOADED, request.LOAD_FAILED), _NO_LOAD),
    **_cells("request", request.PREEMPTED, (request.PREEMPT,), "an admission lies between two preemptions"),
    **_cells("request", request.RUNNING, (request.LOAD_FAILED,), _OWN_STEP),
    **_cells("request", request.PREEMPTED, (request.LOAD_FAILED,), _OWN_STEP),
    **_cells("request", request.RECOMPUTING, (request.LOADED,), _JUDGED_ONCE),
    **_cells("request", request.DRAINING, (request.PREEMPT, request.PREEMPT_LATE, request.FINISH), _FORGOTTEN),
    **_cells("request", request.FINISHED, (request.PREEMPT, request.PREEMPT_LATE, request.FINISH), _FORGOTTEN),
    **_cells(
        "chunk", chunk.EVICTING, (chunk.LANDED_LAST, chunk.LANDED_MORE), "a piece of an evicted chunk ends as lost"
    ),
    **_cells("chunk", chunk.EVICTING, (chunk.EVICT_HELD,), "it is out of the index and of the policy"),
}


def why_unreachable(machine: Machine, cell: Cell) -> str:
    """Return why no sequence of vLLM's calls leads to `cell`; nothing for a cell that can be reached."""
    if machine.table[cell.state][cell.event].kind == "reject":
        return "it would be a bug of kvpipe, which is what the cell says"
    return _NEVER_SENT.get((cell.machine, cell.event)) or _UNREACHABLE.get(cell, "")


def counts() -> Counter[Cell]:
    """Return how often each cell was taken in this process so far, over all cursors."""
    taken: Counter[Cell] = Counter()
    for machine in MACHINES:
        for layers in _LAYERS if machine.layered else [0]:
            compiled = machine.compile(layers)
            for (state, event), times in compiled.taken().items():
                taken[Cell(machine.name, compiled.states[state].row, event)] += times
    return taken


def reachable() -> list[Cell]:
    """Return every cell that some sequence of vLLM's calls leads to."""
    cells = ((m, Cell(m.name, state, event)) for m in MACHINES for state in m.states for event in m.events)
    return [cell for machine, cell in cells if not why_unreachable(machine, cell)]


def report(taken: Counter[Cell]) -> tuple[int, int, list[Cell]]:
    """Return (cells reached, cells that can be, those that were not)."""
    can = reachable()
    missed = [cell for cell in can if not taken[cell]]
    return len(can) - len(missed), len(can), missed
