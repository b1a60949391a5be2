"""An engine that uses a node's memory as real engines do, for tests that kill the engine.

The engine saves chunks whose bytes can be computed, and reads chunks of other engines while they are pinned. If the
engine reads bytes of another chunk, it ends with status `WRONG`. `die` is "" or "EVENT:N": the process kills itself at
the N-th such event of one of its machines. The process dies after the machine has moved, and before other code reacts.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from kvpipe.node.client import NodePool, NodePoolOptions
from kvpipe.node.ledger import Ledger
from kvpipe.node.replica import SlotPins
from kvpipe.statemachine.core import Cursor, Edge, State
from tests.rigs.node_replica import NodeChunkPlace, Replica

SLOTS: Final = 64
SLOT_BYTES: Final = 8192
KEYS: Final = 150
NAMESPACE: Final = b"n" * 32
WRONG: Final = 3


def options(
    folder: Path, *, keep_s: float = 2.0, wait_s_max: float = 60.0, slot_bytes: int = SLOT_BYTES
) -> NodePoolOptions:
    """Return the options of all engines of a test."""
    return NodePoolOptions(
        folder, NAMESPACE, SLOTS, slot_bytes, stock=6, silent_s=1.0, wait_s_max=wait_s_max, keep_s=keep_s
    )


def content(key: bytes, slot_bytes: int = SLOT_BYTES) -> bytes:
    """Return the `size` bytes of a chunk. Another size gives other bytes."""
    return hashlib.blake2b(b"%d " % slot_bytes + key).digest() * (slot_bytes // 64)


class Suicide:
    """A watch that kills its process at the N-th event of a kind."""

    def __init__(self, die: str) -> None:
        self._event, _, count = die.partition(":")
        self._left = int(count or 0)

    def __call__(self, _: Cursor, __: State, edge: Edge, ___: str) -> None:
        """Count an event."""
        if edge.event == self._event:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


class BusyEngine:
    """Saves and reads at random."""

    def __init__(self, folder: Path, seed: int, die: str = "", slot_bytes: int = SLOT_BYTES) -> None:
        self.pool = NodePool(options(folder, slot_bytes=slot_bytes), watch=Suicide(die) if die else None)
        self._slot_bytes = slot_bytes
        self.chance = random.Random(seed)
        self.saved = self.hits = self.wrong = self.slow = 0
        self.poll_s_max = 0.0
        self.replica: Replica | None = None
        self._writing: dict[int, bytes] = {}
        self._pinned: list[tuple[NodeChunkPlace, bytes, SlotPins]] = []

    def step(self) -> None:
        """Do the work of one step of an engine."""
        began = time.perf_counter()
        self.pool.poll()
        if self.replica is not None:
            self.replica.poll()
        self.poll_s_max = max(self.poll_s_max, time.perf_counter() - began)
        if self.pool.segment is None:
            time.sleep(0.005)
            return
        if self.replica is None:
            names = Ledger(self.pool.segment).namespaces()
            self.replica = Replica(self.pool.segment, names[NAMESPACE], 1)
        key = b"key %d" % self.chance.randrange(KEYS)
        self._save(key)
        self._read(b"key %d" % self.chance.randrange(KEYS))

    def _save(self, key: bytes) -> None:
        pool, chance, half = self.pool, self.chance, self._slot_bytes // 2
        assert pool.segment is not None
        assert self.replica is not None
        for slot, was in list(self._writing.items()):
            if chance.random() < 0.5:
                pool.segment.slot(slot)[half:] = content(was, self._slot_bytes)[half:]
                del self._writing[slot]
                pool.stock.landed(slot, 0, was, 1)
                self.saved += 1
        free = None if key in self.replica.index(0) else pool.stock.take()
        if free is not None:
            pool.segment.slot(free)[:half] = content(key, self._slot_bytes)[:half]
            self._writing[free] = key

    def _read(self, key: bytes) -> None:
        pool = self.pool
        assert pool.segment is not None
        assert self.replica is not None
        assert pool.leases is not None
        place = self.replica.index(0).get(key)
        if place is not None and (pins := pool.leases.pin(place.stamp)) is not None:
            self.hits += 1
            self._pinned.append((place, key, pins))
            pool.stock.used([place])
        while len(self._pinned) > 4:
            place, key, pins = self._pinned.pop(0)
            self.wrong += bytes(pool.segment.slot(place.slot)) != content(key, self._slot_bytes)
            pool.leases.unpin(pins)


def main(folder: Path, seed: int, die: str, slot_bytes: int, busy: Connection) -> None:
    """Run one engine until it is killed.

    The engine reports its first hit, and whether it has read bytes of another chunk.
    """
    engine = BusyEngine(folder, seed, die, slot_bytes)
    told = False
    while not engine.wrong:
        engine.step()
        if not told and engine.hits:
            told = True
            busy.send("busy")
        if engine.chance.random() < 0.1:
            time.sleep(0.001)
    os._exit(WRONG)
