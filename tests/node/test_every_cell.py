"""Tests take every cell of the four machines of a node's memory. The holder and the engines are in this process."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvpipe.node.client import NodePool
from kvpipe.node.holder import Holder
from kvpipe.node.layout import VERSION, Process
from kvpipe.node.messages import Goodbye, Hello, SlotBatch, Welcome
from kvpipe.node.processes import process_of
from kvpipe.node.segment import create
from kvpipe.statemachine import node_client, node_grant, node_link, node_slot
from kvpipe.statemachine.core import Cursor, Edge, Machine, State
from kvpipe.testing.waiting import eventually
from tests.node.test_holder import Caller
from tests.rigs.node_engine import NAMESPACE, SLOT_BYTES, SLOTS, options
from tests.rigs.node_replica import evict_all

SOON_S = 0.1


class TakenCells:
    """A watch that records every taken cell."""

    def __init__(self) -> None:
        self._cells: set[tuple[str, str, str]] = set()

    def __call__(self, cursor: Cursor, was: State, edge: Edge, _: str) -> None:
        """Record a taken cell."""
        self._cells.add((cursor.machine.machine.name, was.row, edge.event))

    def missed(self, machine: Machine) -> list[str]:
        """Return the cells of `machine` that do not reject and were not taken."""
        return [
            f"{state} x {event}"
            for state, row in machine.table.items()
            for event, cell in row.items()
            if cell.kind != "reject" and (machine.name, state, event) not in self._cells
        ]


class OneNode:
    """A folder, its holder, and processes that stand in for the processes of engines."""

    def __init__(self, folder: Path, taken: TakenCells) -> None:
        self.folder, self.taken = folder, taken
        self._children: dict[Process, subprocess.Popen[bytes]] = {}
        self._next: list[Process] = []
        self._engines = 0
        self.holder = self.hold()

    def hold(self, fd: int | None = None) -> Holder:
        """Start a holder. With `fd`, the holder takes this memory over."""
        self.holder = Holder(self.folder, adopt_s=0, keep_s=600, fd=fd)
        return self.holder

    def peer(self, _: object) -> tuple[Process, int]:
        """Stand in for `processes.peer_of`: return the process that was named last, or else this process."""
        process = self._next.pop() if self._next else process_of(os.getpid())
        return process, os.pidfd_open(process.pid)

    def process(self) -> Process:
        """Start a process that does nothing, as a process of an engine."""
        child = subprocess.Popen(["/bin/sleep", "600"])
        process = process_of(child.pid)
        self._children[process] = child
        return process

    def connects(self, process: Process) -> None:
        """Let the next connection be one of `process`."""
        self._next.append(process)

    def kill(self, process: Process) -> None:
        """Kill a process, and let the holder see its exit."""
        child = self._children.pop(process)
        child.kill()
        child.wait()
        assert eventually(lambda: self._stepped() and process not in self.holder._watched)

    def _stepped(self) -> bool:
        self.holder.step()
        return True

    def engine(self) -> FakeEngine:
        """Return an engine without processes."""
        self._engines += 1
        return FakeEngine(self, b"%016d" % self._engines)

    def pool(self, *, slot_bytes: int = SLOT_BYTES, wait_s_max: float = 60.0) -> NodePool:
        """Return an engine whose scheduler's process is this process."""
        return NodePool(options(self.folder, slot_bytes=slot_bytes, wait_s_max=wait_s_max), self.taken)

    def until(self, pool: NodePool, true: Callable[[NodePool], object]) -> None:
        """Let the holder and an engine make steps until something holds."""

        def stepped() -> object:
            self.holder.step()
            pool.poll()
            return true(pool)

        assert eventually(stepped)

    def until_state(self, pool: NodePool, state: str) -> None:
        """Let the holder and an engine make steps until the engine's link is in a state."""
        self.until(pool, lambda one: one.state == state)

    def close(self) -> None:
        """End the holder and all started processes."""
        self.holder.close()
        for child in self._children.values():
            child.kill()
            child.wait()


class FakeEngine:
    """An engine whose processes speak the protocol. A process may be a rank or the scheduler."""

    def __init__(self, node: OneNode, token: bytes) -> None:
        self._node, self._token = node, token
        self.wires: dict[Process, Caller] = {}
        self._boot = 0

    def join(self, role: str = "rank", process: Process | None = None) -> Process:
        """Connect a process. If no process is given, start a process first."""
        process = process or self._node.process()
        self._node.connects(process)
        caller = Caller(self._node.holder, self._node.folder)
        welcome, fd = caller.ask(Hello(VERSION, role, self._token, NAMESPACE, SLOTS, SLOT_BYTES))  # type: ignore[arg-type]
        assert isinstance(welcome, Welcome)
        assert fd is not None
        os.close(fd)
        self._boot, self.wires[process] = welcome.boot, caller  # an earlier connection is closed only now
        return process

    def attach(self, process: Process | None = None) -> Process:
        """Connect a scheduler."""
        return self.join("scheduler", process)

    def send_batch(self, scheduler: Process) -> None:
        """Send the batch of a step."""
        self.wires[scheduler].ask(SlotBatch(self._boot, want=1))

    def hang_up(self, process: Process) -> None:
        """Close a connection."""
        self.wires.pop(process).wire.close()
        self._node.holder.step()

    def leave(self, process: Process) -> None:
        """Let a process say goodbye."""
        caller = self.wires.pop(process)
        with pytest.raises(ConnectionResetError):
            caller.ask(Goodbye(self._boot))  # type: ignore[arg-type]
        caller.wire.close()


@pytest.fixture
def taken() -> TakenCells:
    """Return a watch."""
    return TakenCells()


@pytest.fixture
def node(short_path: Path, taken: TakenCells, monkeypatch: pytest.MonkeyPatch) -> Iterator[OneNode]:
    """Return a folder with a holder."""
    monkeypatch.setattr("kvpipe.node.memory.log_client", taken)
    monkeypatch.setattr("kvpipe.node.holder.BEAT_S", 0.001)
    monkeypatch.setattr("kvpipe.node.holder.BUSY_S", 0.001)
    monkeypatch.setattr("kvpipe.node.connect.start_holder", lambda *_, **__: time.sleep(0.001))
    made = OneNode(short_path / "node", taken)
    monkeypatch.setattr("kvpipe.node.holder.peer_of", made.peer)
    yield made
    made.close()


def test_every_cell_of_a_client_is_taken(node: OneNode, taken: TakenCells) -> None:
    """The processes of engines connect, send, hang up, say goodbye and die, in every order that takes another cell."""
    for first, second in (("kill", "kill"), ("leave", "leave")):  # no scheduler has connected yet
        engine = node.engine()
        one, two = engine.join(), engine.join()
        getattr(node if first == "kill" else engine, first)(one)
        getattr(node if second == "kill" else engine, second)(two)
    engine = node.engine()
    node.kill(engine.join())
    engine = node.engine()
    engine.leave(engine.join())

    engine = node.engine()  # in this part a rank dies while the scheduler works
    scheduler = engine.attach()
    engine.attach(scheduler)
    rank = engine.join()
    engine.send_batch(scheduler)
    engine.hang_up(scheduler)
    engine.attach(scheduler)
    node.kill(rank)
    engine.send_batch(scheduler)
    engine.hang_up(scheduler)
    node.kill(scheduler)

    engine = node.engine()
    scheduler = engine.attach()
    node.kill(scheduler)
    engine.hang_up(scheduler)

    engine = node.engine()
    scheduler, *ranks = engine.attach(), engine.join(), engine.join(), engine.join()
    engine.leave(ranks[0])
    engine.leave(ranks[1])
    node.kill(ranks[2])
    engine.leave(scheduler)

    engine = node.engine()
    engine.leave(engine.attach())
    assert taken.missed(Machine.of(node_client.NODE_CLIENT)) == []


def test_every_cell_of_a_slot_and_of_a_grant_is_taken(node: OneNode, taken: TakenCells) -> None:
    """Two engines save the same chunk, a save fails, a chunk is evicted, and engines end."""
    pools = [node.pool() for _ in range(2)]
    for pool in pools:
        node.until(pool, _has_stock)
        _save(pool)
        node.until(pool, lambda one: not one.stock.reports)
    slot = pools[0].stock.take()
    assert slot is not None
    pools[0].stock.failed(slot)
    memory = node.holder._memory
    assert memory is not None
    keeper = memory.regions[0].keeper
    assert (keeper.counts["published"], keeper.counts["late"]) == (1, 1)
    assert evict_all(keeper) == 1
    pools[0].leave()
    node.holder.step()
    engine = node.engine()
    scheduler = engine.attach()
    engine.send_batch(scheduler)
    node.kill(scheduler)
    pools[1].close()
    for machine in (Machine.of(node_slot.NODE_SLOT), node_grant.NODE_GRANT):
        assert taken.missed(machine) == []


def _has_stock(pool: NodePool) -> bool:
    return pool.stock.free > 0


def _save(pool: NodePool) -> None:
    slot = pool.stock.take()
    assert slot is not None
    assert pool.stock.landed(slot, 0, b"k", 1)


def test_every_cell_of_a_link_is_taken(node: OneNode, taken: TakenCells) -> None:
    """An engine finds a holder, no holder, a holder that refuses, or another memory. The engine closes at any time."""
    pool, other = node.pool(), node.pool()
    for one in (pool, other):
        node.until(one, _has_stock)
    refused = node.pool(slot_bytes=64)
    node.until_state(refused, node_link.REFUSED)
    refused.close()

    node.holder.close()
    for one in (pool, other):
        one._options = dataclasses.replace(one._options, wait_s_max=SOON_S)
        _poll_until(one, node_link.ORPHANED)
    other.close()
    assert eventually(lambda: _polled(pool) and "within" in pool.why)
    unheard = node.pool(wait_s_max=SOON_S)
    _poll_until(unheard, node_link.REFUSED)
    early = node.pool(wait_s_max=SOON_S)
    early.close()
    early._thread.join()  # otherwise the thread would connect to the next holder, which would give it a new memory

    node.hold()
    node.until_state(pool, node_link.ATTACHED)
    node.holder.close()
    _poll_until(pool, node_link.ORPHANED)
    node.hold(create(SLOTS, SLOT_BYTES))
    node.until_state(pool, node_link.STRANDED)
    for _ in range(2):
        pool.close()
    third = node.pool()
    node.until_state(third, node_link.ATTACHED)
    third.close()
    assert taken.missed(node_link.NODE_LINK) == []


def _poll_until(pool: NodePool, state: str) -> None:
    assert eventually(lambda: _polled(pool) == state)


def _polled(pool: NodePool) -> str:
    pool.poll()
    return pool.state
