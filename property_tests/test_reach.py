"""Every cell of every state machine is reached.

This test runs late, because it reads the trials of `test_trials.py`.
"""

from __future__ import annotations

from collections import Counter

from kvpipe.connectors.vllm.trial import reach
from kvpipe.connectors.vllm.trial.shapes import SHAPES
from kvpipe.statemachine.diagram import MACHINES as ALL_MACHINES
from property_tests.runs import FIRST_SEEDS, REGRESSIONS, Runs


def test_every_machine_is_counted() -> None:
    """Trials count all machines except seven.

    Clocks and threads drive three of the seven; tests in `tests/tiers` and `tests/transfer` take each cell of these
    three. Processes drive the other four, the machines of a node's memory; `tests/node/test_every_cell.py` takes each
    cell of these four.
    """
    others = {one.name for one in ALL_MACHINES} - {one.name for one in reach.MACHINES}
    nodes = {"node_client", "node_grant", "node_link", "node_slot"}
    assert others == {"breaker", "carry", "ticket"} | nodes


def test_every_cell_is_reached(runs: Runs) -> None:
    """The seeds and the kept sequences take every cell that vLLM's calls can lead to."""
    taken: Counter[reach.CellPlace] = Counter()
    seeds = (runs.of_seed(shape, seed) for shape in SHAPES for seed in FIRST_SEEDS)
    for ran in (*seeds, *map(runs.of_sequence, REGRESSIONS)):
        taken += ran.cells
    _, _, missed = reach.coverage(taken)
    assert not missed, [str(cell) for cell in missed]
