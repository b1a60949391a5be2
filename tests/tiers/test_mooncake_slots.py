"""Mooncake's client reads values straight into slots that engines share.

After a read was given up, the client writes no byte into its slot.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from kvpipe.config.settings import load_settings
from kvpipe.node.attach import NodeEngine, attach_rank
from kvpipe.node.connect import ask_status
from kvpipe.node.layout import READY
from kvpipe.node.processes import holder_of
from kvpipe.protocol.geometry import Geometry, Group, Layer
from kvpipe.testing.buffers import aligned, content, some_key
from kvpipe.testing.tier_conformance.worlds import run, tried
from kvpipe.testing.waiting import eventually
from kvpipe.tiers.base import Get, Put, Read, TierError, Written
from kvpipe.tiers.envelope import HEADER_BYTES, Sealer
from kvpipe.tiers.mooncake import fills
from kvpipe.tiers.mooncake.spec import MooncakeSpec
from kvpipe.tiers.mooncake.tier import MooncakeTier
from kvpipe.tiers.process import STEP_BYTES
from kvpipe.transfer.pool import SharedSlots
from tests.rigs.servers.mooncake import Master, master, node
from tests.rigs.tier_worlds.mooncake import spec_of
from tests.tiers.mooncake_clients import MIB, QUICK, fails

SLOTS, SLOT_BYTES = 8, 4 * MIB
GEOMETRY = Geometry((Group((Layer("a", SLOT_BYTES),), block_tokens=16),), 16, (SLOTS + 1) * SLOT_BYTES)


class Rank:
    """A rank of an engine on a node's memory, whose holder is a process of its own."""

    def __init__(self, folder: Path) -> None:
        """Attach the rank to a holder."""
        self.folder = folder
        settings = load_settings({"pool": "node", "pool_dir": str(folder), "keep_s": 600})
        self.memory, self.shared = attach_rank(settings, GEOMETRY, NodeEngine(b"e" * 16, 1), 0)
        words = self.memory.segment.words
        assert eventually(lambda: int(words[READY]) == self.memory.segment.layout.slots == SLOTS)

    def slot(self, index: int) -> memoryview:
        """Return the memory of a slot, without its note."""
        return self.memory.segment.slot(index)[:SLOT_BYTES]

    def filled(self, index: int, number: int) -> bytes:
        """Fill a slot with other bytes, and return these bytes."""
        self.slot(index)[:] = content(number, SLOT_BYTES)
        return content(number, SLOT_BYTES)

    def get(self, number: int, slot: int) -> Get:
        """Return the request to read a value into a slot."""
        return Get(some_key(number), (aligned(HEADER_BYTES), self.slot(slot)))

    @property
    def pids(self) -> set[int]:
        """The processes of all engines that the holder knows, by their numbers."""
        status = ask_status(self.folder)
        assert status is not None
        return {pid for memory in status.memories for client in memory.clients for pid in client.pids}


@pytest.fixture
def rank(short_path: Path) -> Iterator[Rank]:
    """Return a rank. End its holder afterwards."""
    made = Rank(short_path / "node")
    try:
        yield made
    finally:
        made.memory.close()
        if holder := holder_of(made.folder):
            os.kill(holder, signal.SIGKILL)


def _put(number: int) -> Put:
    raw = aligned(HEADER_BYTES + SLOT_BYTES)
    raw[:] = content(number, HEADER_BYTES + SLOT_BYTES)
    return Put(some_key(number), (raw[:HEADER_BYTES], raw[HEADER_BYTES:]))


def _holds(get: Get, number: int) -> bool:
    return b"".join(get.into) == content(number, HEADER_BYTES + SLOT_BYTES)


@asynccontextmanager
async def _filling(of: Master, shared: SharedSlots, *numbers: int, **keys: Any) -> AsyncIterator[MooncakeTier]:
    """Open a tier that fills slots, and store some values."""
    tier = spec_of(of, **keys).make("mooncake")
    tier.share(shared)
    await tried(tier.open)
    for number in numbers:
        assert await tried(tier.write, [_put(number)]) == [Written.STORED]
    try:
        yield tier
    finally:
        await tier.close()


def _pid(tier: MooncakeTier) -> int:
    assert tier._child is not None
    return tier._child._process.pid


def _mapped(client: int) -> int:
    """Return the number of slots that a client's process has mapped."""
    return Path(f"/proc/{client}/maps").read_text(encoding="ascii").count("memfd:kvpipe-node")


def _lane_bytes(tier: MooncakeTier) -> int:
    """Return the number of bytes of lanes that were mapped for reads."""
    assert tier._child is not None
    return max(lane.memory.nbytes for lane in tier._child.pools["read"]._free)


def test_values_go_straight_into_slots(rank: Rank) -> None:
    """Only headers pass through the lanes. Until the client ends, the holder counts it as a process of the engine."""

    async def play(of: Master) -> None:
        async with _filling(of, rank.shared, 1, 2, 3) as tier:
            assert rank.pids == {os.getpid()}
            for _ in range(2):
                gets = [rank.get(1, 4), rank.get(404, 5), rank.get(2, 6), rank.get(3, 0)]
                before = rank.filled(5, 9)
                assert await tier.read(gets) == [Read.HIT, Read.MISS, Read.HIT, Read.HIT]
                assert [_holds(get, number) for get, number in zip(gets, (1, 404, 2, 3), strict=True)] == [
                    True, False, True, True
                ]  # fmt: skip
                assert bytes(rank.slot(5)) == before
            assert _lane_bytes(tier) == STEP_BYTES
            assert rank.pids == {os.getpid(), _pid(tier)}
        assert eventually(lambda: rank.pids == {os.getpid()})

    with master() as of, node(of.address, 64 * MIB):
        run(play, of)


def test_values_of_another_length_are_damaged_and_buffers_elsewhere_are_copied(rank: Rank) -> None:
    """A value that is shorter or longer than its slot's buffer is no hit."""

    async def play(of: Master) -> None:
        async with _filling(of, rank.shared, 1, 3) as tier:
            short = Get(some_key(1), (aligned(HEADER_BYTES), rank.slot(1)[: 2 * MIB]))
            assert await tier.read([short]) == [Read.DAMAGED]
            other = rank.filled(3, 3)
            long = Put(some_key(2), (aligned(HEADER_BYTES), aligned(MIB)))
            assert await tier.write([long]) == [Written.STORED]
            assert await tier.read([rank.get(2, 2)]) == [Read.DAMAGED]
            assert bytes(rank.slot(3)) == other
            gets = [Get(some_key(1), (aligned(HEADER_BYTES), aligned(SLOT_BYTES))), rank.get(3, 1)]
            assert await tier.read(gets) == [Read.HIT] * 2
            assert [_holds(get, number) for get, number in zip(gets, (1, 3), strict=True)] == [True, True]

    with master() as of, node(of.address, 64 * MIB):
        run(play, of)


def test_encrypted_value_is_decrypted_in_its_slot(rank: Rank) -> None:
    """The header of an encrypted value passes through the lane, as the header of any value does."""
    sealer, key = Sealer([b"s" * 32]), some_key(1)
    plain = aligned(SLOT_BYTES)
    plain[:] = content(1, SLOT_BYTES)

    async def play(of: Master) -> None:
        async with _filling(of, rank.shared) as tier:
            (name,) = sealer.names(key)
            assert await tier.write([Put(name, sealer.seal(name, 1, plain))]) == [Written.STORED]
            header, body = aligned(HEADER_BYTES), rank.slot(1)
            assert await tier.read([Get(name, (header, body))]) == [Read.HIT]
            assert bytes(body) != bytes(plain)
            sealer.unseal(name, 1, header, body)
            assert bytes(body) == bytes(plain)

    with master() as of, node(of.address, 64 * MIB):
        run(play, of)


def test_late_write_hits_no_slot(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped member answers only after the engine has given the slots to other chunks.

    Two reads are given up: the first is in progress, and the second has not begun.
    """
    monkeypatch.setenv("MC_TCP_PROGRESS_TIMEOUT_SEC", "600")
    monkeypatch.setenv("MC_TCP_STATUS_TIMEOUT_SEC", "600")

    async def play(of: Master, member: subprocess.Popen[str]) -> None:
        async with _filling(of, rank.shared, 1, 2, 3, **QUICK) as tier:
            assert await tried(tier.read, [rank.get(3, 0)]) == [Read.HIT]
            client = _pid(tier)
            member.send_signal(signal.SIGSTOP)
            try:
                async with anyio.create_task_group() as group:
                    for number in (1, 2):
                        group.start_soon(fails, lambda number=number: tier.read([rank.get(number, number)]))
                others = [rank.filled(number, 10 + number) for number in (1, 2)]
            finally:
                member.send_signal(signal.SIGCONT)
            get = rank.get(3, 3)
            assert await tried(tier.read, [get]) == [Read.HIT]  # this read uses the connection of an abandoned read
            await anyio.sleep(0.5)
            assert [bytes(rank.slot(number)) for number in (1, 2)] == others
            assert _holds(get, 3)
            again = rank.get(1, 1)
            assert await tried(tier.read, [again]) == [Read.HIT]
            assert _holds(again, 1)
            assert _pid(tier) == client

    with master() as of, node(of.address, 64 * MIB) as member:
        run(play, of, member)


def test_client_that_cannot_revoke_a_read_is_ended(rank: Rank) -> None:
    """A stopped client may write as soon as it continues.

    So the client's process ends before its slots are used again.
    """

    async def play(of: Master) -> None:
        async with _filling(of, rank.shared, 1, **QUICK) as tier:
            assert await tried(tier.read, [rank.get(1, 0)]) == [Read.HIT]
            client = _pid(tier)
            os.kill(client, signal.SIGSTOP)
            await fails(lambda: tier.read([rank.get(1, 1)]))
            with pytest.raises(ProcessLookupError):
                os.kill(client, 0)
            await tier.health()  # starts another client
            assert await tried(tier.read, [get := rank.get(1, 1)]) == [Read.HIT]
            assert _holds(get, 1)
            assert eventually(lambda: rank.pids == {os.getpid(), _pid(tier)})
            os.kill(_pid(tier), signal.SIGSTOP)
            await fails(lambda: tier.read([rank.get(1, 1)]))
            await tier.close()

    with master() as of, node(of.address, 64 * MIB):
        run(play, of)


def test_failed_read_does_not_end_the_client(rank: Rank) -> None:
    """A failed read writes no more into its slot, so the client can continue.

    Ending it would lose the memory that it lends.
    """

    async def play(of: Master, member: subprocess.Popen[str]) -> None:
        async with _filling(of, rank.shared, 1, **QUICK) as tier:
            assert await tried(tier.read, [rank.get(1, 1)]) == [Read.HIT]
            client = _pid(tier)
            member.kill()
            member.wait()
            assert _mapped(client) == 1
            with pytest.raises(TierError):
                await tier.read([rank.get(1, 1)])
            assert _mapped(client) == 0
            with node(of.address, 64 * MIB):
                assert await tried(tier.write, [_put(2)]) == [Written.STORED]
                assert await tried(tier.read, [get := rank.get(2, 1)]) == [Read.HIT]
            assert _holds(get, 2)
            assert _pid(tier) == client

    with master() as of, node(of.address, 64 * MIB) as member:
        run(play, of, member)


def test_values_are_copied_while_the_holder_is_gone(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that the holder does not know fills no slots, so values are copied. The next try succeeds."""
    monkeypatch.setattr(fills, "RETRY_S", 0.0)
    shared = rank.shared
    assert shared.file is not None
    gone = shared._replace(file=shared.file._replace(socket=str(rank.folder / "nothing")))

    async def play(of: Master) -> None:
        async with _filling(of, gone, 1) as tier:
            assert await tier.read([get := rank.get(1, 1)]) == [Read.HIT]
            assert _holds(get, 1)
            assert _lane_bytes(tier) > SLOT_BYTES
            assert rank.pids == {os.getpid()}
            tier.share(shared)
            assert await tier.read([get := rank.get(1, 2)]) == [Read.HIT]
            assert _holds(get, 1)
            assert rank.pids == {os.getpid(), _pid(tier)}

    with master() as of, node(of.address, 64 * MIB):
        run(play, of)


def test_network_cards_fill_no_slots(rank: Rank) -> None:
    """With RDMA, the tier copies values into slots: a network card's own transfer into a slot could not be stopped."""
    tier = MooncakeSpec.model_validate({"master": "host:1", "protocol": "rdma"}).make("mooncake")
    tier.share(rank.shared)
    assert not tier._fills._fits(rank.get(1, 1))
    tier = MooncakeSpec.model_validate({"master": "host:1"}).make("mooncake")
    tier.share(rank.shared)
    assert tier._fills._fits(rank.get(1, 1))


ENGINE = textwrap.dedent(
    """
    import sys, time
    from pathlib import Path
    import anyio
    from kvpipe.config.settings import load_settings
    from kvpipe.node.attach import NodeEngine, node_options
    from kvpipe.node.client import NodePool
    from kvpipe.tiers.mooncake.spec import MooncakeSpec
    from tests.tiers.test_mooncake_slots import GEOMETRY, Rank

    async def play():
        rank = Rank(Path(sys.argv[1]))
        settings = load_settings({"pool": "node", "pool_dir": sys.argv[1]})
        pool = NodePool(node_options(settings, GEOMETRY, NodeEngine(b"e" * 16, 1)))
        while not pool.stock.free:
            pool.poll()
            time.sleep(0.01)
        keys = {"master": sys.argv[2], "segment_bytes": 0, "timeout_ms_max": 120_000}
        tier = MooncakeSpec.model_validate(keys).make("mooncake")
        tier.share(rank.shared)
        await tier.open()
        await tier.read([rank.get(1, 1)])
        print(tier._child._process.pid, flush=True)
        await anyio.sleep(600)

    anyio.run(play)
    """
)


def test_slots_of_a_killed_engine_wait_for_its_client(short_path: Path) -> None:
    """The client may still write into the killed engine's slots. The slots wait until the client has ended."""
    folder = short_path / "node"

    def state() -> tuple[set[int], bool]:
        status = ask_status(folder)
        assert status is not None
        (memory,) = status.memories
        return {pid for one in memory.clients for pid in one.pids}, memory.slots["quarantine"] > 0

    with master() as of:
        engine = subprocess.Popen(
            [sys.executable, "-c", ENGINE, str(folder), of.address], stdout=subprocess.PIPE, text=True
        )
        try:
            assert engine.stdout is not None
            client = int(engine.stdout.readline())
            os.kill(client, signal.SIGSTOP)
            assert state() == ({engine.pid, client}, False)
            engine.kill()
            assert eventually(lambda: state() == ({client}, True))
            time.sleep(0.5)
            assert state() == ({client}, True)
            os.kill(client, signal.SIGCONT)
            assert eventually(lambda: state() == (set(), False))
        finally:
            engine.kill()
            engine.communicate()
            if holder := holder_of(folder):
                os.kill(holder, signal.SIGKILL)
