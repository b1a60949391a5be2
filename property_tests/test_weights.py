"""Weights change at any time: no request reads KV that other weights have computed, and no chunk keeps such KV."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator

import pytest

from kvpipe.connectors.vllm.trial.moves import trial_moves
from kvpipe.connectors.vllm.trial.nightly import run_moves
from kvpipe.connectors.vllm.trial.shapes import SHAPES
from kvpipe.connectors.vllm.trial.trial import Move

SEEDS = range(2)
WANTED = ("weights_changed", "weights_unchanged")
EVERY = 40
"""The mean number of moves between two changes."""


def _moves(name: str, seed: int) -> Iterator[Move]:
    rng = random.Random(f"{name} {seed}")
    for move in trial_moves(SHAPES[name], seed):
        yield move
        if not rng.randrange(EVERY):
            yield "weights", rng.randrange(3)


@pytest.mark.parametrize("name", sorted(name for name, shape in SHAPES.items() if shape.ranks))
def test_invariants_hold_when_weights_change(name: str) -> None:
    """Weights change, change back, or may have changed.

    If the first seed has not caused both a change and a doubt, a second seed follows.
    """
    counters: Counter[str] = Counter()
    for seed in SEEDS:
        ran = run_moves(SHAPES[name], seed, list(_moves(name, seed)))
        assert ran.broken == [], f"{name} {seed}: {json.dumps(ran.made)}"
        counters += ran.counters
        if all(map(counters.get, WANTED)):
            break
    assert [what for what in WANTED if not counters[what]] == []
