"""Every cell of every machine is reached. This test runs late, because it reads the trials of `test_trials.py`."""

from __future__ import annotations

from collections import Counter

from kvpipe.connectors.vllm.trial import reach
from kvpipe.connectors.vllm.trial.nightly import SEEDS
from kvpipe.connectors.vllm.trial.shapes import SHAPES
from kvpipe.statemachine.diagram import MACHINES as ALL_MACHINES
from property_tests.runs import REGRESSIONS, Runs


def test_every_machine_is_counted() -> None:
    """Trials count all machines but three, which clocks and threads move: `tests/tiers` and `transfer` test those."""
    others = {one.name for one in ALL_MACHINES} - {one.name for one in reach.MACHINES}
    assert others == {"breaker", "carry", "ticket"}


def test_every_cell_is_reached(runs: Runs) -> None:
    """The seeds and the kept sequences take every cell that vLLM's calls can lead to."""
    taken: Counter[reach.Cell] = Counter()
    seeds = (runs.of_seed(shape, seed) for shape in SHAPES for seed in SEEDS)
    for ran in (*seeds, *map(runs.of_sequence, REGRESSIONS)):
        taken += ran.cells
    _, _, missed = reach.report(taken)
    assert not missed, [str(cell) for cell in missed]
