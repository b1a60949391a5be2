"""Moves of the engines and the holder of a `NodeWorld`. A move is a name and two numbers."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Final

from tests.rigs.node_replica import evict_all
from tests.rigs.node_world import NAMESPACES, ROWS, NodeWorld, WorldEngine

Move = tuple[str, int, int]

WEIGHTS: Final = {
    "save_whole": 12, "poll": 8, "pin": 10, "unpin": 4, "exchange": 8, "save": 8, "write": 6, "land": 3, "fail": 1,
    "kill": 1, "fire": 1, "leave": 1, "rescan": 2, "start": 4, "attach": 4, "drain": 2, "evict_all": 1, "fuse": 2,
    "take_over": 1, "lose": 1, "compare": 2,
}  # fmt: skip
NAMES: Final = [name for name, weight in WEIGHTS.items() for _ in range(weight)]
KEYS: Final = [b"k%d" % n for n in range(12)]


def moves_of(seed: int, count: int) -> list[Move]:
    """Return random moves."""
    chance = random.Random(seed)
    return [(chance.choice(NAMES), chance.randrange(100), chance.randrange(100)) for _ in range(count)]


class Mover:
    """Makes moves in a world. A move that is not possible is skipped."""

    def __init__(self, world: NodeWorld) -> None:
        self.world = world

    def play(self, moves: Iterable[Move]) -> None:
        """Make the moves, and check the world after each move. Then end all engines, and check that no slot is held."""
        self.world.start(NAMESPACES[0])
        for move in moves:
            self.move(*move)
            self.world.check()
        self.world.rest()
        self.world.close()

    def move(self, name: str, a: int, b: int) -> None:
        """Make one move."""
        if (common := getattr(self, f"common_{name}", None)) is not None:
            common(a, b)
            return
        engines = [one for one in self.world.engines if one.replica is not None]
        if not engines:
            return
        engine = engines[a % len(engines)]
        if (process := getattr(self, f"process_{name}", None)) is not None:
            process(engine, b)
        elif engine.scheduler in engine.running:
            getattr(self, f"scheduler_{name}")(engine, b)

    def common_start(self, a: int, _: int) -> None:
        """Start an engine."""
        if len(self.world.engines) < ROWS:
            self.world.start(NAMESPACES[a % 4 == 0])

    def common_attach(self, _: int, __: int) -> None:
        """Connect engines that have lost their holder."""
        for engine in self.world.engines:
            if engine.client is None and len(engine.running) == 2:
                self.world.attach(engine)

    def common_drain(self, _: int, __: int) -> None:
        """Free evicted slots without leases."""
        self.world.holding(self.world.keeper.drain)

    def common_evict_all(self, a: int, _: int) -> None:
        """Evict everything."""
        if a % 4 == 0:
            self.world.holding(lambda: evict_all(self.world.keeper))

    def common_fuse(self, _: int, b: int) -> None:
        """Let the holder die within the next 40 steps."""
        self.world.ledger.fuse = 1 + b % 40

    def common_take_over(self, _: int, __: int) -> None:
        """Let another holder take over."""
        self.world.take_over()

    def process_write(self, engine: WorldEngine, b: int) -> None:
        """Let the rank write.

        It may write after it was killed, until its pidfd fires, because a DMA outlives its process.
        """
        if engine.writing and engine.rank not in engine.fired:
            self.world.write(engine, sorted(engine.writing)[b % len(engine.writing)], half=b % 2 == 0)

    def process_leave(self, engine: WorldEngine, b: int) -> None:
        """Let the rank say goodbye and end."""
        if b % 4 == 0 and not engine.pinned and not engine.writing:
            self.world.leave(engine, engine.rank)

    def process_kill(self, engine: WorldEngine, b: int) -> None:
        """Kill the rank or the scheduler."""
        self.world.kill(engine, (engine.rank, engine.scheduler)[b % 2])

    def process_fire(self, engine: WorldEngine, _: int) -> None:
        """Let the pidfd of a killed process fire."""
        for process in sorted({engine.scheduler, engine.rank} - engine.running - engine.fired)[:1]:
            self.world.fire(engine, process)

    def scheduler_save_whole(self, engine: WorldEngine, b: int) -> None:
        """Save a chunk, let it land, and send the batch."""
        if engine.rank in engine.running:
            if (slot := self.world.save(engine, KEYS[b % len(KEYS)])) is not None:
                self.world.land(engine, slot)
            self.world.exchange(engine)

    def scheduler_save(self, engine: WorldEngine, b: int) -> None:
        """Begin a save."""
        self.world.save(engine, KEYS[b % len(KEYS)])

    def scheduler_land(self, engine: WorldEngine, _: int) -> None:
        """Let a save land."""
        if engine.writing and engine.rank in engine.running:
            self.world.land(engine, min(engine.writing))

    def scheduler_fail(self, engine: WorldEngine, _: int) -> None:
        """Let a save fail."""
        if engine.writing:
            slot = min(engine.writing)
            del engine.writing[slot]
            engine.stock.failed(slot)

    def scheduler_poll(self, engine: WorldEngine, b: int) -> None:
        """Read some records of the journal."""
        assert engine.replica is not None
        engine.replica.poll((1, 1, 2, 3, 100)[b % 5])

    def scheduler_rescan(self, engine: WorldEngine, _: int) -> None:
        """Begin another scan of the table."""
        assert engine.replica is not None
        engine.replica._scan()

    def scheduler_pin(self, engine: WorldEngine, b: int) -> None:
        """Pin up to three hits at once."""
        self.world.pin(engine, (KEYS[(b + n) % len(KEYS)] for n in range(1 + b % 3)))

    def scheduler_unpin(self, engine: WorldEngine, _: int) -> None:
        """End the leases of a pin."""
        if engine.pinned:
            self.world.unpin(engine)

    def scheduler_exchange(self, engine: WorldEngine, _: int) -> None:
        """Send a batch."""
        self.world.exchange(engine)

    def scheduler_lose(self, engine: WorldEngine, _: int) -> None:
        """Send a batch whose answer is lost."""
        self.world.exchange(engine, lost=True)

    def scheduler_compare(self, engine: WorldEngine, _: int) -> None:
        """Compare the engine's dict with the table."""
        if engine.client is not None:
            self._compare(engine)

    def _compare(self, engine: WorldEngine) -> None:
        """An engine that has read the whole journal has exactly the published chunks of its namespace in its dict."""
        world, replica = self.world, engine.replica
        assert replica is not None
        for _ in range(100):
            replica.poll(5)
        records = [record for slot in range(world.tables.layout.slots) if (record := world.ledger.entry(slot))]
        published = {
            record.key: record.slot
            for record in records
            if record.state == "PUBLISHED" and world.ledger.namespace(record.namespace) == engine.namespace
        }
        found = {key: place.slot for key, place in replica.index(0).items()}
        assert found == published
