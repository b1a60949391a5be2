"""Weights that change in the middle of everything: nobody reads, and nothing keeps, what others have computed."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator

import pytest

from kvpipe.connectors.vllm.trial.moves import trial_moves
from kvpipe.connectors.vllm.trial.nightly import run
from kvpipe.connectors.vllm.trial.shapes import SHAPES
from kvpipe.connectors.vllm.trial.trial import Move

SEEDS = range(4)
EVERY = 40
"""So many moves lie between two changes, about."""


def _moves(name: str, seed: int) -> Iterator[Move]:
    rng = random.Random(f"{name} {seed}")
    for move in trial_moves(SHAPES[name], seed):
        yield move
        if not rng.randrange(EVERY):
            yield "weights", rng.randrange(3)


@pytest.mark.parametrize("name", sorted(name for name, shape in SHAPES.items() if shape.ranks))
def test_weights_change(name: str) -> None:
    """Every invariant holds while weights change, come back, and only might have changed."""
    counters: Counter[str] = Counter()
    for seed in SEEDS:
        ran = run(SHAPES[name], seed, list(_moves(name, seed)))
        assert ran.broken == [], f"{name} {seed}: {json.dumps(ran.made)}"
        counters += ran.counters
    for what in ("weights_changed", "weights_unchanged"):
        assert counters[what], f"never reached: {what}"
