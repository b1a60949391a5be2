"""Several engines on one memory with a tier make random calls."""

from __future__ import annotations

from typing import Any

import pytest

from kvpipe.cache.chunks import Chunk, Owner
from kvpipe.node.catalog import NodeCatalog
from kvpipe.scheduler.stores import STORES
from tests.node.test_catalog import RandomEngines
from tests.node.tiered_worlds import TieredWorld, TieredWorlds


class RandomTieredEngines(RandomEngines):
    """Three engines share few slots and a tier. Tier orders end in a random order, and some fetches fail."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.worlds.close()
        self.worlds: TieredWorlds = TieredWorlds(14)
        self.engines = [self.start() for _ in range(3)]

    def play(self, moves: int = 250) -> int:
        """Return how many chunks were fetched."""
        super().play(moves)
        return sum(world.side.counters["chunks_fetched"] for world in self.worlds.engines)

    def start(self) -> TieredWorld:
        """Start an engine some of whose fetches fail."""
        made = self.worlds.start(stock=3)
        made.lands = lambda: self.chance.random() < 0.9
        return made

    def moves(self) -> dict[Any, int]:
        """Return the weight of each move."""
        return super().moves() | {self.carry: 40}

    def carry(self, at: int) -> None:
        """End one of the tier orders that have begun, chosen at random."""
        world: Any = self.engines[at]
        if world.begun:
            world.carry(at=self.chance.randrange(len(world.begun)), ok=world.lands())


def test_random_engines_with_a_tier_read_only_their_chunks() -> None:
    """Leases, stock and bytes are consistent after each move, and fetches happen."""
    assert sum(RandomTieredEngines(seed).play() for seed in range(2)) > 0


def test_random_engines_find_a_store_without_a_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """With this bug, the holder reuses the slot during the store, so the store reads another chunk."""
    lease = NodeCatalog.lease

    def leased(catalog: NodeCatalog, owner: Owner, chunks: list[Chunk], **more: Any) -> None:
        if owner.request != STORES:
            lease(catalog, owner, chunks, **more)

    monkeypatch.setattr(NodeCatalog, "lease", leased)
    with pytest.raises(AssertionError, match="a store has read another chunk's bytes"):
        _play_seeds()


def _play_seeds() -> None:
    for seed in range(40):
        RandomTieredEngines(seed).play()
