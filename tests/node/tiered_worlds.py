"""Engines on one memory with a tier below it. A test carries out their tier orders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvpipe.protocol.engine import LATER
from kvpipe.protocol.messages import Job, Report, Tally, TierOrder
from kvpipe.scheduler.stages import Stage
from kvpipe.testing.held_tier import DictSpec, HeldTier
from kvpipe.testing.waiting import PATIENT, eventually
from kvpipe.tiers.base import Key
from kvpipe.tiers.guard import FIND, guarded
from kvpipe.tiers.prefix_keys import chunk_name
from tests.node.test_catalog import CHUNK, TORN, NodeWorld, Worlds

SPACE = "1" * 32
UNIT_TOKENS = 16


class TieredWorld(NodeWorld):
    """An engine with a tier. The test carries out the tier orders, one after the other, as all ranks do."""

    def __init__(self, worlds: TieredWorlds, stock: int, **world: Any) -> None:
        self.tier, self.begun = worlds.tier, list[TierOrder]()
        self.lands: Callable[[], bool] = lambda: True
        spec = DictSpec.model_validate(PATIENT)
        tiers = guarded([(self.tier.name, spec, self.tier)], (FIND,))
        super().__init__(worlds.node, worlds.pages, stock, tiers=tiers, **world)
        assert self.side.staging is not None
        self.staging = self.side.staging
        self.staging.space.base = SPACE

    def step(self, *requests: Any, boundaries: tuple[int, ...] = ()) -> list[Job]:
        """Begin the copies and the tier orders of a step. Pages of fetches are torn until all ranks have reported."""
        jobs = super().step(*requests, boundaries=boundaries)
        for order in self.orders:
            self.begun.append(order)
            if not order.stores:
                self.pages.update(dict.fromkeys(_pages(order), TORN))
        return jobs

    def carry(self, *, ok: bool = True, at: int = 0) -> TierOrder:
        """End an order on all ranks, the oldest order by default."""
        order = self.begun.pop(at)
        self.copy(order, ok=ok)
        self.side.reported(Report({order.id: Tally(int(ok), int(not ok))}))
        self.check()
        return order

    def copy(self, order: TierOrder, *, ok: bool = True) -> None:
        """Copy the bytes of an order, and check the bytes that a store reads."""
        key = next(key for key in self.prefixes if chunk_name(key) == order.chunk)
        content = self.prefixes[key][-order.units :]
        if order.stores:
            assert [self.pages[page] for page in _pages(order)] == content, "a store has read another chunk's bytes"
            self.tier.values[Key(SPACE, order.chunk, 0, 0, 1).text] = b""
        elif ok:
            self.pages.update(zip(_pages(order), content, strict=True))

    def store_all(self) -> list[TierOrder]:
        """Make steps until all offered chunks are stored. Returns the orders."""
        orders = list[TierOrder]()
        while self.side.pending or self.begun:
            self.step()
            orders += [self.carry() for _ in range(len(self.begun))]
        return orders

    def want(self, request: Any) -> Stage:
        """Look up a request of which the tier has more chunks than memory. Returns its stage after the answer."""
        self.requests = [*self.requests, request]
        assert self.side.lookup(request, 0) is LATER
        stage = self._wait_for_tier(request)
        self.step()
        assert self.side.lookup(request, 0) is LATER
        return stage

    def _wait_for_tier(self, request: Any) -> Stage:
        stage = self.side.requests.tracked[request.request_id].stage
        assert stage is not None
        assert eventually(lambda: stage.lookup.done)
        return stage

    def in_tier(self, name: str, units: int) -> Any:
        """Return a request whose chunks the tier has, but the memory does not have."""
        request = self.request(name, units, extra=1)
        for end in range(CHUNK, units + 1, CHUNK):
            self.tier.values[Key(SPACE, chunk_name(request.block_hashes[end - 1]), 0, 0, 1).text] = b""
        return request

    def ask(self, request: Any, local: int = 0) -> int:
        """Look up a request. While it waits, fetches end. Returns the number of tokens of the hit."""
        while (answer := self.side.lookup(request, local)) is LATER:
            self._wait_for_tier(request)
            self.step()
            while (fetch := next((at for at, order in enumerate(self.begun) if not order.stores), None)) is not None:
                self.carry(at=fetch, ok=self.lands())
        return answer.tokens


def _pages(order: TierOrder) -> list[tuple[int, int]]:
    return [(order.slot, page) for page in range(order.units)]


class TieredWorlds(Worlds):
    """A memory, a tier, and the engines that use both."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.tier = HeldTier()

    def start(self, stock: int = 4, **world: Any) -> TieredWorld:
        """Start an engine."""
        made = TieredWorld(self, stock, **world)
        self.engines.append(made)
        made.prefixes = self.engines[0].prefixes
        return made

    def evict(self, key: bytes) -> None:
        """Let the holder evict the chunk with this key."""
        keeper = self.node.keeper
        keeper._evict_chunks([chunk for chunk in keeper._chunks.values() if chunk.found_by[2] == key])

    def close(self) -> None:
        """End the threads of all engines."""
        for engine in self.engines:
            assert engine.side.staging is not None
            engine.side.staging.finder.stop()
        super().close()
