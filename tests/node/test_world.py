"""Long random runs of several engines and holders that share one memory, one run per seed."""

from __future__ import annotations

from collections import Counter

from kvpipe.node.keeper import Keeper
from tests.rigs.node_moves import Mover, moves_of
from tests.rigs.node_world import NodeWorld

SEEDS = 20
MOVES = 1000


class CountingWorld(NodeWorld):
    """A world that adds up the counters of all its holders."""

    def __init__(self, total: Counter[str]) -> None:
        self._total = total
        super().__init__()

    def _new_keeper(self) -> Keeper:
        keeper = super()._new_keeper()
        keeper.counts = self._total
        return keeper


def test_random_engines_and_holders_lose_and_damage_no_chunk() -> None:
    """All runs together cause every kind of event, so the test cannot pass by doing nothing."""
    total: Counter[str] = Counter()
    for seed in range(SEEDS):
        world = CountingWorld(total)
        Mover(world).play(moves_of(seed, MOVES))
        total["takeovers"] += world.takeovers
    for name in ("published", "late", "stale", "evicted", "takeovers"):
        assert total[name] > SEEDS // 2, (name, total)
