"""Tests of the Redis tier with servers that stop, restart, move or do not exist, with TLS, and with a cluster."""

from __future__ import annotations

import itertools
import re
import signal
import socket
import threading
from pathlib import Path
from unittest.mock import Mock

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpipe.testing.buffers import aligned, content, data, get, put, some_key
from kvpipe.testing.tier_conformance.worlds import run, tried
from kvpipe.testing.waiting import WAIT_S
from kvpipe.tiers.base import Entry, Get, Read, Tier, TierError, Written
from kvpipe.tiers.redis.resp import ReplyBounds, ServerConnection
from tests.rigs.servers.proxy import Proxy
from tests.rigs.servers.redis import RedisServer, certificates, polite, pretending, serving
from tests.rigs.servers.sockets import LOCAL, free_port
from tests.rigs.tier_worlds.redis import OTHER, client, guarded, guarded_spec, name, refused, single, spec, three

MIB = 1 << 20


async def begun(buffer: memoryview) -> None:
    """Wait until something has been read into a buffer of zeroes."""
    while not any(buffer[:16]):  # noqa: ASYNC110  (nothing notifies)
        await anyio.sleep(0.001)


# ---- TLS ----------------------------------------------------------------------------------------------------------


def test_tls_verifies(tmp_path: Path) -> None:
    """The right authority is accepted.

    Another authority, a missing name, or TLS on only one side raises a TierError.
    """
    server, port, _ = guarded()

    async def play() -> None:
        tier = guarded_spec(host=LOCAL).make("redis")
        await tier.open()
        await tier.close()

    run(play)
    other = certificates(tmp_path)
    assert "certificate verify failed" in refused(guarded_spec(tls_ca_file=other.ca))
    assert "certificate verify failed" in refused(guarded_spec(tls_ca_file=None))
    assert "mismatch" in refused(guarded_spec(host=OTHER))
    assert "no connection" in refused(guarded_spec(port=server.port, timeout_ms_max=500))
    assert "127.0.0.1" in refused(spec(port, timeout_ms_max=500))
    assert "no connection" in refused(guarded_spec(tls_cert_file=None, tls_key_file=None))


# ---- servers that go away -----------------------------------------------------------------------------------------


def test_a_killed_server_is_used_again_when_it_is_back() -> None:
    """After a kill -9 of the server, calls raise TierErrors. After its restart the next call works."""
    with serving("valkey") as server:

        async def play() -> None:
            async with client(server.port) as tier:
                for down in (True, False):
                    await tier.write([put(i, 65536) for i in range(8)])
                    await tier.read([get(i, 65536) for i in range(8)])
                    server.send(signal.SIGKILL)
                    for call in (tier.exists([some_key(1)]), tier.read([get(1, 65536)])) if down else ():
                        with pytest.raises(TierError, match=re.escape(LOCAL)):
                            await call
                    server.start()
                    assert await tier.read([get(1, 65536)]) == [Read.MISS]
                    assert await tier.write([put(1, 65536)]) == [Written.STORED]
                    assert await tier.exists([some_key(1)]) == [True]

        run(play)


def test_a_stopped_server_costs_no_more_than_the_limit() -> None:
    """While the server is stopped, each call raises a TierError that names timeout_ms_max, even for a new connection.

    Afterwards the tier works again.
    """
    with serving("redis") as server:

        async def play() -> None:
            async with client(server.port, timeout_ms_max=400) as tier:
                await tried(tier.write, [put(1, MIB)])
                server.send(signal.SIGSTOP)
                with anyio.fail_after(WAIT_S):
                    for call in (
                        tier.exists([some_key(1)]),
                        tier.read([get(1, MIB)]),
                        tier.write([put(2, MIB)]),
                        tier.health(),
                    ):
                        with pytest.raises(TierError, match="no answer within timeout_ms_max"):
                            await call
                server.send(signal.SIGCONT)
                assert await tried(tier.read, [get(1, MIB)]) == [Read.HIT]

        run(play)


def test_a_connection_cut_in_a_value_is_an_error() -> None:
    """If a connection is cut or stalls within a value, the read raises a TierError. The next read is complete."""
    server = single("redis")

    async def play() -> None:
        with Proxy(server.port) as proxy:
            async with client(proxy.port, timeout_ms_max=800) as tier:
                await tried(tier.write, [put(1, 4 * MIB)])
                for spoil in ("cut", "stall"):
                    proxy.cut_after = MIB if spoil == "cut" else None
                    proxy.rate_bytes_s = 20 * MIB
                    wanted = get(1, 4096, 4 * MIB - 4096)
                    async with anyio.create_task_group() as group:
                        if spoil == "stall":
                            group.start_soon(stall, proxy, wanted)
                        with pytest.raises(TierError):
                            await tier.read([wanted])
                    proxy.cut_after, proxy.stalled, proxy.rate_bytes_s = None, False, None
                    assert await tried(tier.read, [wanted]) == [Read.HIT]
                    assert data(wanted.into) == content(1, 4 * MIB)

    async def stall(proxy: Proxy, wanted: Get) -> None:
        await begun(wanted.into[0])
        proxy.stalled = True

    run(play)


def test_a_read_cancelled_in_a_value_stops() -> None:
    """A read that is cancelled while its value arrives does not write to the buffer any more.

    The next call makes a new connection.
    """
    server = single("redis")

    async def play() -> None:
        with Proxy(server.port) as proxy:
            async with client(proxy.port, lanes=1) as tier:
                await tier.write([put(1, 8 * MIB)])
                proxy.rate_bytes_s = 20 * MIB
                into = aligned(8 * MIB)
                connections = proxy.connections
                async with anyio.create_task_group() as group:
                    group.start_soon(tier.read, [Get(some_key(1), (into,))])
                    await begun(into)
                    group.cancel_scope.cancel()
                assert not any(into[-16:]), "it was in the middle"
                into[:] = b"\xa5" * len(into)
                await anyio.sleep(0.1)
                assert into == b"\xa5" * len(into)
                proxy.rate_bytes_s = None
                assert await tier.read([Get(some_key(1), (into,))]) == [Read.HIT]
                assert into == content(1, 8 * MIB)
                assert proxy.connections == connections + 1

    server.ask("FLUSHALL")
    run(play)


def test_address_without_a_server_is_reported_with_the_reason() -> None:
    """An unknown name, and a port that is closed, silent or speaks HTTP, raise TierErrors with the reason."""
    assert "no connection" in refused(spec(6379, host="no.such.host.invalid"))
    assert "Connection refused" in refused(spec(free_port()))
    with pretending(lambda _: b"") as port:
        assert "no answer within timeout_ms_max" in refused(spec(port, timeout_ms_max=100))
    with pretending(lambda _: b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        assert "does not speak the Redis protocol: 'HTTP/1.1 400 Bad Request'" in refused(spec(port))
    with pretending(lambda _: b"x" * 100_000) as port:
        assert "does not speak the Redis protocol: 'xxxx" in refused(spec(port))
    with pretending(lambda _: None) as port:
        assert "the server has closed the connection" in refused(spec(port))


@pytest.mark.parametrize(
    "reply",
    [
        b":abc",
        b"$999999999999",
        b"$5\r\nabcdefg",
        b"*-7",
        b"*1000000",
        b"*1\r\n" * 5000,
        b"$3\r\nabc",
        b"+",
        b":7",
        b"?",
        b"$-1",
    ],
)
def test_answers_of_another_shape_are_errors(reply: bytes) -> None:
    """An answer that does not fit its request raises a TierError or is no hit, for every method."""

    async def play() -> None:
        async with client(port, timeout_ms_max=1000) as tier:
            for call in (
                tier.exists([some_key(1)]),
                tier.write([put(1, 4096)]),
                tier.delete([some_key(1)]),
                tier.capacity(),
            ):
                try:
                    assert await call in ([False], [Written.STORED], [Written.PRESENT], 0)
                except TierError:
                    continue
            for read in (tier.read([get(1, 4096)]), listed(tier)):
                try:
                    assert await read in ([Read.MISS], [Read.DAMAGED])
                except TierError:
                    continue

    async def listed(tier: Tier) -> list[Entry]:
        return [entry async for entry in tier.scan()]

    with pretending(polite(lambda _: reply + b"\r\n")) as port:
        run(play)


@given(st.lists(st.integers(0, 60), max_size=12), st.sampled_from([0, 1, 5000, 20_000]), st.integers(1, 3))
def test_replies_may_come_in_any_pieces(cuts: list[int], size: int, parts: int) -> None:
    """Replies are read correctly for any division of their bytes into packets, and for any number of buffers."""
    value = content(size, size)
    message = b"$%d\r\n%b\r\n:1\r\n" % (size, value) + b":0\r\n:1\r\n-ERR no\r\n*2\r\n$-1\r\n$2\r\nab\r\n:1\r\n"
    near, far = socket.socketpair()
    lane = ServerConnection(lambda _: Mock())
    lane.on_connect(Mock(_sock=near))  # redis-py calls this method in the same way

    def trickle() -> None:
        at = 0
        for cut in cuts:
            far.sendall(message[at : at + cut])
            at += cut
        far.sendall(message[at:])

    with near, far:
        thread = threading.Thread(target=trickle)
        thread.start()
        edges = [size * i // parts for i in range(parts + 1)]
        into = [memoryview(bytearray(high - low)) for low, high in itertools.pairwise(edges)]
        assert lane.fetch(b"GET", into, more=1) == size
        assert b"".join(into) == value
        assert lane.ask(b"ASK", 5, ReplyBounds(items=2, bytes=2, depth=1)) == [0, 1, "ERR no", [None, b"ab"], 1]
        thread.join()


# ---- cluster ------------------------------------------------------------------------------------------------------


@pytest.fixture
def nodes() -> list[RedisServer]:
    """Return an empty cluster."""
    found = three("valkey")
    for server in found:
        server.ask("FLUSHALL")
    return found


def test_a_cluster_shares_the_values(nodes: list[RedisServer]) -> None:
    """Values are distributed over all primaries. Any client finds, counts and lists all values."""

    async def play() -> None:
        async with client(nodes[0].port, cluster=True) as tier, client(nodes[2].port, cluster=True) as other:
            await tier.write([put(i, 4096) for i in range(60)])
            assert all(await other.exists([some_key(i) for i in range(60)]))
            assert len([entry async for entry in other.scan()]) == (await other.capacity()).items == 60
            assert await other.delete([some_key(i) for i in range(60)]) == 60

    shares: list[int] = []

    async def shared() -> None:
        async with client(nodes[1].port, cluster=True) as tier:
            await tier.write([put(i, 4096) for i in range(60)])
            shares.extend(server.ask("DBSIZE") for server in nodes)

    run(play)
    run(shared)
    assert min(shares) > 5
    assert sum(shares) == 60


def test_a_slot_that_has_moved_is_found(nodes: list[RedisServer]) -> None:
    """When slots move to another primary, reads, lookups and writes use this primary, even with the old layout."""
    ids = [server.ask("CLUSTER", "MYID") for server in nodes]

    def give(slots: range, to: int) -> None:
        for slot in slots:
            for server in nodes:
                server.ask("CLUSTER", "SETSLOT", slot, "NODE", ids[to])

    async def play() -> None:
        async with client(nodes[0].port, cluster=True) as tier:
            assert await tier.write([put(1, 65536), put(2, 65536)]) == [Written.STORED] * 2
            slot = nodes[0].ask("CLUSTER", "KEYSLOT", name(some_key(1)))
            home = nodes.index(next(n for n in nodes if name(some_key(1)).encode() in n.ask("KEYS", "*")))
            nodes[home].ask("DEL", name(some_key(1)))
            give(range(slot, slot + 1), (home + 1) % 3)
            try:
                assert await tier.read([get(1, 65536), get(2, 65536)]) == [Read.MISS, Read.HIT]
                assert await tier.write([put(1, 65536)]) == [Written.STORED]
                assert await tier.read([get(1, 65536)]) == [Read.HIT]
                assert nodes[(home + 1) % 3].ask("EXISTS", name(some_key(1))) == 1
            finally:
                nodes[(home + 1) % 3].ask("DEL", name(some_key(1)))
                give(range(slot, slot + 1), home)

    run(play)


def test_a_cluster_without_one_server_serves_the_rest(nodes: list[RedisServer]) -> None:
    """When one primary is killed, calls for its keys raise errors, and the other keys are served.

    After its restart all keys are served.
    """

    async def play() -> None:
        async with client(nodes[0].port, cluster=True) as tier:
            await tier.write([put(i, 4096) for i in range(30)])
            lost = [
                i for i in range(30) if some_key(i).text in {entry.decode()[7:] for entry in nodes[2].ask("KEYS", "*")}
            ]
            kept = [i for i in range(30) if i not in lost]
            assert lost
            nodes[2].send(signal.SIGKILL)
            try:
                for i in lost[:2]:
                    with pytest.raises(TierError):
                        await tier.read([get(i, 4096)])
                assert await tier.read([get(i, 4096) for i in kept]) == [Read.HIT] * len(kept)
                assert await tier.exists([some_key(i) for i in kept]) == [True] * len(kept)
                slot = nodes[0].ask("CLUSTER", "KEYSLOT", name(some_key(lost[0])))
                heir = nodes[0].ask("CLUSTER", "MYID")
                for server in nodes[:2]:
                    server.ask("CLUSTER", "SETSLOT", slot, "NODE", heir)
                with pytest.raises(TierError):
                    await tier.exists([some_key(lost[0])])
                assert await tier.exists([some_key(lost[0])]) == [False], "another server has the slot now"
            finally:
                nodes[2].start()
            await found(tier, lost[0])

    async def found(tier: Tier, i: int) -> None:
        while True:  # the other servers need a moment to notice the restart
            try:
                assert await tier.write([put(i, 4096)]) == [Written.STORED]
            except TierError:
                await anyio.sleep(0.05)
            else:
                return

    run(play)


def test_cluster_and_single_are_distinguished(nodes: list[RedisServer]) -> None:
    """A cluster that is configured as one server, or the reverse, raises a TierError that names the remedy."""

    async def play() -> None:
        async with client(nodes[0].port) as tier:
            with pytest.raises(TierError, match="the server belongs to a cluster; set cluster to true"):
                await tier.exists([some_key(i) for i in range(30)])

    run(play)
    assert "cluster support disabled" in refused(spec(single("redis").port, cluster=True))
