"""A node's memory with engines of several slot sizes in one process. A holder may die between any two stores."""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import pytest

from kvpipe.node.clients import NodeClient, RefusedError
from kvpipe.node.keeper import Keeper
from kvpipe.node.layout import VERSION, Process
from kvpipe.node.memory import NodeMemory
from kvpipe.node.messages import BatchAnswer, Hello
from kvpipe.node.owners import Owners
from kvpipe.node.replica import NodeLeases, SlotPins
from kvpipe.node.rules import NodeRules, write_rules
from kvpipe.node.segment import Segment, create, lock
from kvpipe.node.stock import Stock
from kvpipe.testing.node_integrity import check_regions
from tests.rigs.node_replica import NodeChunkPlace, Replica
from tests.rigs.node_world import DyingLedger, Killed

SIZES = (12288, 8192, 20480)
SLOTS = 48
"""The number of slots of the memory if all slots have the first size."""
MOVES = (
    ("save", 40), ("exchange", 30), ("pin", 20), ("unpin", 8), ("share", 12), ("die", 2), ("start", 4), ("fuse", 3),
    ("take_over", 1),
)  # fmt: skip
T = TypeVar("T")


class Fuse:
    """Kills the holder at its `left`-th step from now on. A negative `left` kills no holder."""

    left = -1

    def burn(self) -> None:
        """Take a step of the holder."""
        self.left -= 1
        if self.left == 0:
            raise Killed


FUSE = Fuse()
LOCKS: list[int] = []


def _lock(fd: int) -> int | None:
    own = lock(fd)
    LOCKS.append(-1 if own is None else own)
    return own


class FusedLedger(DyingLedger):
    """A ledger that burns `FUSE` at each of its writes."""

    def _burn(self) -> None:
        FUSE.burn()


class FusedOwners(Owners):
    """The owners of pieces. They burn `FUSE` before and after each store of an owner."""

    def give(self, pieces: object, region: int) -> None:
        """Store the owner of the pieces, one piece after the other."""
        for piece in pieces:  # type: ignore[attr-defined]
            FUSE.burn()
            super().give([piece], region)
            FUSE.burn()


def content(key: bytes, slot_bytes: int) -> bytes:
    """Return the bytes of a chunk."""
    return (b"%d %s" % (slot_bytes, key)).ljust(64, b".") * (slot_bytes // 64)


class SizedEngine:
    """An engine with slots of `slot_bytes` bytes."""

    def __init__(self, number: int, slot_bytes: int) -> None:
        self.slot_bytes, self.process = slot_bytes, Process(number, number)
        self.stock = Stock(4)
        self.token = number.to_bytes(16, "big")
        self.segment: Segment | None = None
        self.client: NodeClient | None = None
        self.keeper: Keeper | None = None
        self.pinned: list[tuple[SlotPins, NodeChunkPlace, bytes]] = []

    def attach(self, memory: NodeMemory) -> None:
        """Greet the holder, for the first time or after a takeover."""
        token = b"" if self.segment is None else self.segment.layout.token
        held = self.stock.held
        hello = Hello(VERSION, "scheduler", self.token, b"n" * 32, SLOTS, self.slot_bytes, token, held)
        region = memory.region_for(hello)
        self.client = memory.greet(region, hello, self.process)
        self.keeper = region.keeper
        self.stock.resumed(tuple(self.client.granted.items()))
        if self.segment is None:
            self.segment = Segment(memory.fd, region=region.segment.layout.region)
            self.replica = Replica(self.segment, self.client.namespace, 1)
            self.leases = NodeLeases(self.segment, self.client.row)

    def index(self) -> dict[bytes, NodeChunkPlace]:
        """Return the chunks that this engine finds now."""
        while True:
            before = self.replica._at, self.replica._scanned
            self.replica.poll()
            if before == (self.replica._at, self.replica._scanned):
                return dict(self.replica.index(0))

    def save(self, key: bytes) -> bool:
        """Save a chunk. Returns False if the stock is empty."""
        assert self.segment is not None
        slot = None if key in self.index() else self.stock.take()
        if slot is None:
            return False
        self.segment.slot(slot)[:] = content(key, self.slot_bytes)
        self.stock.landed(slot, 0, key, 1)
        return True

    def pin(self, key: bytes) -> bool:
        """Pin a chunk if it is found."""
        place = self.replica.index(0).get(key)
        pins = None if place is None else self.leases.pin(place.stamp)
        if place is None or pins is None:
            return False
        self.pinned.append((pins, place, key))
        self.stock.used([place])
        return True

    def unpin(self) -> None:
        """End the oldest lease."""
        if self.pinned:
            self.leases.unpin(self.pinned.pop(0)[0])

    def check(self) -> None:
        """Compare the bytes of pinned chunks."""
        for _, place, key in self.pinned:
            assert self.segment is not None
            assert bytes(self.segment.slot(place.slot)) == content(key, self.slot_bytes), f"{key!r} was overwritten"


class RegionsWorld:
    """A holder's memory, and engines with slots of several sizes."""

    def __init__(self) -> None:
        self.fd = create(SLOTS, SIZES[0], rows=4, ring=64)
        self.engines: list[SizedEngine] = []
        self.counts: Counter[str] = Counter()
        self._numbers = itertools.count(1)
        self.memory = self._held()

    @property
    def usable(self) -> list[int]:
        """The number of slots that each region may grant."""
        return [len(region.keeper._usable) for region in self.memory.regions.values()]

    def _held(self) -> NodeMemory:
        fd = os.dup(self.fd)
        try:
            write_rules(fd, NodeRules("lru"))
            memory = NodeMemory(fd, 1)
        except Killed:
            os.close(fd)
            os.close(LOCKS[-1])
            raise
        memory._allocator._thread.join()
        try:
            memory.step()
        except Killed:
            memory.close()
            raise
        return memory

    def take_over(self) -> None:
        """Replace the holder. If the new holder dies while it takes over, replace it, too."""
        for _, keeper in self.memory.regions.values():
            self.counts += keeper.counts
        self.memory.close()
        while not self._has_taken_over():
            self.counts["killed"] += 1
        self.counts["takeovers"] += 1

    def _has_taken_over(self) -> bool:
        try:
            self.memory = self._held()
        except Killed:
            return False
        try:
            for engine in list(self.engines):
                self._attach(engine)
        except Killed:
            self.memory.close()
            return False
        return True

    def _attach(self, engine: SizedEngine) -> None:
        try:
            engine.attach(self.memory)
        except RefusedError:
            assert engine.segment is None
            self.engines.remove(engine)
            self.counts["refused"] += 1

    def holding(self, call: Callable[[], T]) -> T | None:
        """Return the result of a call of the holder.

        If the holder dies, let another holder take over, and return None.
        """
        try:
            return call()
        except Killed:
            self.counts["killed"] += 1
            self.take_over()
            return None

    def start(self, slot_bytes: int) -> SizedEngine:
        """Start an engine. The holder may refuse it."""
        engine = SizedEngine(next(self._numbers), slot_bytes)
        self.engines.append(engine)
        self.holding(lambda: self._attach(engine))
        self.holding(self.memory.step)
        return engine

    def end(self, engine: SizedEngine) -> None:
        """Kill an engine. The engine's leases end when the holder sees its exit."""
        self.engines.remove(engine)
        while any(client.token == engine.token for _, client in self.memory.clients):
            self.holding(lambda: self.memory.died(engine.process))

    def exchange(self, engine: SizedEngine) -> None:
        """Send an engine's batch. If the holder lives, take its answer."""
        keeper, client, batch = engine.keeper, engine.client, engine.stock.batch(1)
        if batch is None or keeper is None or client is None:
            return
        answer = self.holding(lambda: keeper.batch(client, batch))
        if isinstance(answer, BatchAnswer):
            engine.stock.answered(answer)

    def saves(self, engine: SizedEngine, keys: range) -> int:
        """Let an engine save chunks. Between two saves the holder takes its steps. Returns the number of saves."""
        saved = 0
        for key in keys:
            self.exchange(engine)
            saved += engine.save(b"%d" % key)
            self.exchange(engine)
            self.memory.share()
        self.check()
        return saved

    def check(self) -> None:
        """Check the holder's tables, and the bytes of all pinned chunks."""
        check_regions(self.memory)
        for engine in self.engines:
            engine.check()

    def close(self) -> None:
        """End all engines. Then every slot is free or has a published chunk with the right bytes."""
        FUSE.left = -1
        self.take_over()
        for engine in list(self.engines):
            self.end(engine)
        for _, keeper in self.memory.regions.values():
            keeper.drain()
        self.check()
        for segment, keeper in self.memory.regions.values():
            usage = keeper.usage()
            assert usage.granted == usage.quarantine == usage.evicting == 0
            assert not keeper.clients
            assert not any(segment.leases)
            whole = Segment(self.memory.fd, region=segment.layout.region)
            for chunk in keeper._chunks.values():
                assert bytes(whole.slot(chunk.slot)) == content(chunk.found_by[2], whole.layout.slot_bytes)
        self.memory.close()
        os.close(self.fd)

    def play(self, seed: int, moves: int) -> None:
        """Make random moves."""
        chance = random.Random(seed)
        names = [name for name, weight in MOVES for _ in range(weight)]
        self.start(SIZES[0])
        for _ in range(moves):
            self._move(chance.choice(names), chance)
            self.check()

    def _move(self, name: str, chance: random.Random) -> None:
        key = b"%d" % chance.randrange(80)
        if name == "start" and len(self.engines) < 5:
            self.start(chance.choice(SIZES))
        elif name == "fuse":
            FUSE.left = chance.randrange(1, 60)
        elif name == "take_over":
            self.take_over()
        elif name == "share":
            self.holding(self.memory.share)
        elif engines := [one for one in self.engines if one.segment is not None]:
            self._move_of(chance.choice(engines), name, key)

    def _move_of(self, engine: SizedEngine, name: str, key: bytes) -> None:
        if name == "die":
            self.end(engine)
        elif name == "exchange":
            self.exchange(engine)
            self.holding(self.memory.step)
        elif name == "save":
            engine.save(key)
        elif name == "pin":
            engine.pin(key)
        elif name == "unpin":
            engine.unpin()


def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `FUSE` decide at which change of a table a holder dies.

    The slots' memory is divided into 128 pieces instead of 4096 (`owners.PIECES`), and the bounds of these pieces
    differ from the bounds of slots.
    """
    FUSE.left = -1
    monkeypatch.setattr("kvpipe.node.memory.Ledger", FusedLedger)
    monkeypatch.setattr("kvpipe.node.memory.Owners", FusedOwners)
    monkeypatch.setattr("kvpipe.node.memory.lock", _lock)
    monkeypatch.setattr("kvpipe.node.owners.PIECES", 128)
