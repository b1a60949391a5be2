"""A node's memory with several engines in one process. Engines end, and holders die between any two stores."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Literal

from kvpipe.cache.policy.lru import Lru
from kvpipe.node.clients import NodeClient, RefusedError
from kvpipe.node.keeper import Keeper
from kvpipe.node.layout import STATES, VERSION, ClientRow, Process
from kvpipe.node.ledger import Ledger
from kvpipe.node.messages import BatchAnswer, Hello
from kvpipe.node.replica import NodeLeases, SlotPins
from kvpipe.node.segment import Segment, create
from kvpipe.node.stock import Stock
from kvpipe.node.usage import NodeUsage, usage_of
from tests.rigs.node_replica import NodeChunkPlace, Replica

SLOTS, SLOT_BYTES, ROWS, RING = 8, 64, 3, 16
NAMESPACES = (b"a" * 32, b"b" * 32)


class Killed(BaseException):
    """This exception means that the holder was killed between two stores."""


class DyingLedger(Ledger):
    """A ledger whose holder dies at the `fuse`-th step. If the holder dies in a store, half of the store is done."""

    fuse = -1

    def _burn(self) -> None:
        self.fuse -= 1
        if self.fuse == 0:
            raise Killed

    def _append(self, seq: int, raw: bytes) -> None:
        self._burn()
        self._tear(self._journal_at(seq), raw)
        super()._append(seq, raw)
        self._burn()

    def _put(self, slot: int, raw: bytes) -> None:
        self._burn()
        self._tear(self.layout.table_at + slot * len(raw), raw)
        super()._put(slot, raw)
        self._burn()

    def _tear(self, at: int, raw: bytes) -> None:
        half = len(raw) // 2
        self._buffer[at : at + half] = raw[:half]
        self._burn()

    def _raise(self, slot: int, generation: int) -> None:
        super()._raise(slot, generation)
        self._burn()

    def set_row(self, row: int, client: ClientRow) -> ClientRow:
        """Write a row. The holder may die before or after."""
        self._burn()
        made = super().set_row(row, client)
        self._burn()
        return made


def content(namespace: bytes, key: bytes) -> bytes:
    """Return the bytes that a slot with this chunk has."""
    return (namespace[:1] + key).ljust(16, b".") * (SLOT_BYTES // 16)


class WorldEngine:
    """An engine: a scheduler and one rank.

    `running`: the living processes. `fired`: the processes whose pidfd has fired.
    """

    def __init__(self, fd: int, number: int, namespace: bytes) -> None:
        self.fd, self.namespace = fd, namespace
        self.token = number.to_bytes(2, "big") * 8
        self.scheduler, self.rank = Process(2 * number, number), Process(2 * number + 1, number)
        self.running, self.fired = {self.scheduler, self.rank}, set[Process]()
        self.segment = Segment(fd)
        self.stock = Stock(2)
        self.client: NodeClient | None = None
        self.replica: Replica | None = None
        self.leases: NodeLeases | None = None
        self.pinned: list[tuple[SlotPins, list[tuple[NodeChunkPlace, bytes]]]] = []
        self.writing: dict[int, bytes] = {}

    def hello(self, role: Literal["scheduler", "rank"]) -> Hello:
        """Return the greeting of one of the engine's processes."""
        held = self.stock.held if role == "scheduler" else ()
        token = self.segment.layout.token
        return Hello(VERSION, role, self.token, self.namespace, SLOTS, SLOT_BYTES, token, held)


class NodeWorld:
    """Up to `ROWS` engines and one holder over one memory."""

    def __init__(self, *, keeper: type[Keeper] = Keeper) -> None:
        self._keeper_class, self._numbers = keeper, itertools.count(1)
        self.fd = create(SLOTS, SLOT_BYTES, rows=ROWS, ring=RING)
        self.tables = Segment(self.fd, whole=False)
        self.engines: list[WorldEngine] = []
        self.takeovers = 0
        self.keeper = self._new_keeper()

    def _new_keeper(self) -> Keeper:
        self.ledger = DyingLedger(self.tables)
        keeper = self._keeper_class(self.ledger, Lru(), fence=lambda: None)
        keeper.use_more(SLOTS)
        return keeper

    def holding(self, call: Callable[[], object]) -> object:
        """Return the result of the holder's `call`.

        If the holder dies, let another holder take over, and return None.
        """
        try:
            return call()
        except Killed:
            self.take_over()
            return None

    def take_over(self) -> None:
        """Let another holder take over, and report to it again which processes have ended."""
        self.takeovers += 1
        for engine in self.engines:
            engine.client = None
        self.keeper = self._new_keeper()
        for client in list(self.keeper.clients.values()):
            engine = next(one for one in self.engines if one.token == client.token)
            for process in engine.fired & client.processes:
                self.keeper.died(client, process)

    def start(self, namespace: bytes) -> WorldEngine:
        """Start an engine."""
        engine = WorldEngine(self.fd, next(self._numbers), namespace)
        self.engines.append(engine)
        self.attach(engine)
        return engine

    def attach(self, engine: WorldEngine) -> None:
        """Connect the engine's processes, for the first time or again."""

        def greet() -> NodeClient | None:
            try:
                self.keeper.greet(engine.hello("rank"), engine.rank)
                return self.keeper.greet(engine.hello("scheduler"), engine.scheduler)
            except RefusedError:
                return None

        client = self.holding(greet)
        if not isinstance(client, NodeClient):
            return
        engine.client = client
        assert set(client.granted.items()) <= set(engine.stock.held)
        if engine.replica is None:
            engine.replica = Replica(engine.segment, client.namespace, 1)
            engine.leases = NodeLeases(engine.segment, client.row)

    def exchange(self, engine: WorldEngine, *, lost: bool = False) -> None:
        """Send a step's batch. With `lost`, the holder dies after it has carried out the batch."""
        if engine.client is None or (batch := engine.stock.batch(self.ledger.boot)) is None:
            return
        client = engine.client
        answer = self.holding(lambda: self.keeper.batch(client, batch))
        if lost and isinstance(answer, BatchAnswer):
            self.take_over()
        elif isinstance(answer, BatchAnswer):
            engine.stock.answered(answer)

    def save(self, engine: WorldEngine, key: bytes) -> int | None:
        """Begin a save."""
        if (slot := engine.stock.take()) is not None:
            engine.writing[slot] = key
        return slot

    def write(self, engine: WorldEngine, slot: int, *, half: bool) -> None:
        """Let a rank write a slot, or half of a slot. The rank may write after the death of its process."""
        raw = content(engine.namespace, engine.writing[slot])
        size = SLOT_BYTES // 2 if half else SLOT_BYTES
        engine.segment.slot(slot)[:size] = raw[:size]

    def land(self, engine: WorldEngine, slot: int) -> None:
        """Report a save as landed."""
        self.write(engine, slot, half=False)
        engine.stock.landed(slot, 0, engine.writing.pop(slot), 1)

    def pin(self, engine: WorldEngine, keys: Iterable[bytes]) -> None:
        """Look keys up in the engine's present dict, which may be outdated. Pin all hits at once."""
        assert engine.replica is not None
        assert engine.leases is not None
        index = engine.replica.index(0)
        hits = [(index[key], key) for key in keys if key in index]
        if hits and (pins := engine.leases.pin(b"".join(place.stamp for place, _ in hits))) is not None:
            engine.pinned.append((pins, hits))
            engine.stock.used(place for place, _ in hits)

    def unpin(self, engine: WorldEngine) -> None:
        """End the oldest leases."""
        assert engine.leases is not None
        pins, _ = engine.pinned.pop(0)
        engine.leases.unpin(pins)

    def kill(self, engine: WorldEngine, process: Process) -> None:
        """Kill a process. The holder does not see its end yet."""
        engine.running.discard(process)

    def fire(self, engine: WorldEngine, process: Process) -> None:
        """Let the pidfd of an ended process fire."""
        engine.fired.add(process)
        client = next((one for one in self.keeper.clients.values() if one.token == engine.token), None)
        if client is not None:
            self.holding(lambda: self.keeper.died(client, process))
        if len(engine.fired) == 2:
            self.engines.remove(engine)

    def leave(self, engine: WorldEngine, process: Process) -> None:
        """Let a process say that it will not touch the memory again, and end."""
        if engine.client is not None and process in engine.running:
            client = engine.client
            self.kill(engine, process)
            self.holding(lambda: self.keeper.left(client, process))

    def check(self) -> None:
        """Check that no reader sees bytes of another chunk, and that every slot is accounted for."""
        for engine in self.engines:
            for place, key in itertools.chain.from_iterable(hits for _, hits in engine.pinned):
                assert bytes(engine.segment.slot(place.slot)) == content(engine.namespace, key)
        records = [self.ledger.entry(slot) for slot in range(SLOTS)]
        count = Counter(record.state for record in records if record is not None)
        assert usage_of(self.tables) == NodeUsage(SLOTS, 0, 0, *(count[state] for state in STATES))
        tokens = [engine.token for engine in self.engines]
        assert all(client.token in tokens for client in self.keeper.clients.values())

    def rest(self) -> None:
        """End every engine, and check that no slot stays leased or granted."""
        self.ledger.fuse = -1
        for engine in list(self.engines):
            for process in (engine.scheduler, engine.rank):
                if process not in engine.fired:
                    self.kill(engine, process)
                    self.fire(engine, process)
        self.keeper.drain()
        usage = self.keeper.usage()
        assert (usage.granted, usage.evicting, usage.quarantine, len(self.keeper.clients)) == (0, 0, 0, 0)
        assert usage.free + usage.published == usage.slots
        assert not any(self.tables.leases)
        survivors = WorldEngine(self.fd, 99, NAMESPACES[0])
        for slot in range(SLOTS):
            record = self.ledger.entry(slot)
            assert record is not None
            assert self.tables.generations[slot] == record.generation
            if record.state == "PUBLISHED":
                namespace = self.ledger.namespace(record.namespace)
                assert namespace is not None
                assert bytes(survivors.segment.slot(slot)) == content(namespace, record.key)

    def close(self) -> None:
        """Close the memory."""
        os.close(self.fd)
