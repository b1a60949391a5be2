"""Compares the Redis tier on loopback with a hand-written loop over one plain connection, with the same sizes.

The connections of the tier are also compared with two clients, redis-py and valkey-glide, on one thread each. Both
clients must read a value into a given buffer, as the tier does. If valkey-glide is not installed, its rows are left
out.
"""

from __future__ import annotations

import importlib
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from statistics import median

import anyio
import redis

from benchmarks.report import Figure
from kvpipe.testing.buffers import aligned, content, filled, some_key, value
from kvpipe.tiers.base import Get, Put, Read, Tier, Written
from kvpipe.tiers.redis.dial import dialling
from kvpipe.tiers.redis.resp import command
from kvpipe.tiers.redis.spec import RedisSpec
from tests.rigs.servers.redis import RedisServer, serving
from tests.rigs.servers.sockets import LOCAL

MIB = 1 << 20
SIZES_MIB, VALUES, ROUNDS, LOOKUP_KEYS = (2, 8), 8, 15, 1000
CLIENTS_MIB, CLIENTS_RATIO_MIN = 2, 1.2
"""The size of a value in MiB, and how many times as fast as a client the tier's own connections must be at this size.

A smaller ratio would not justify their code.
"""
_Move = Callable[[bytes, memoryview], object]


def run() -> list[Figure]:
    """Return all figures of both servers."""
    out = []
    for kind in ("redis", "valkey"):
        with serving(kind) as server:
            out += anyio.run(_measure, kind, server)
            out += _clients(kind, server)
    return out


async def _measure(kind: str, server: RedisServer) -> list[Figure]:
    tier = RedisSpec.model_validate({"host": LOCAL, "port": server.port}).make(kind)
    await tier.open()
    out = []
    with socket.create_connection((LOCAL, server.port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for mib in SIZES_MIB:
            out += await _values(kind, tier, sock, mib)
    keys = [some_key(i) for i in range(LOOKUP_KEYS)]
    took_s = []
    for _ in range(100):
        began = time.perf_counter()
        assert sum(await tier.exists(keys)) == VALUES
        took_s.append(time.perf_counter() - began)
    await tier.close()
    return [*out, Figure(f"{kind}: lookup of {LOOKUP_KEYS} keys", median(took_s) * 1e3, 3, "ms")]


async def _values(kind: str, tier: Tier, sock: socket.socket, mib: int) -> list[Figure]:
    """Write and read `VALUES` values, by the tier and by hand alternately. With a ratio above 1, the tier is faster."""
    size = mib * MIB
    puts = [Put(some_key(i), value(i, size)) for i in range(VALUES)]
    gets = [Get(put.key, tuple(aligned(part.nbytes) for part in put.parts)) for put in puts]
    hand = {b"hand:%d" % i: aligned(size) for i in range(VALUES)}
    moves: dict[str, Callable[[], Awaitable[object]]] = {
        "write": partial(tier.write, puts),
        "write by hand": partial(_by_hand, _set, sock, hand),
        "read": partial(tier.read, gets),
        "read by hand": partial(_by_hand, _get, sock, hand),
    }
    seconds: dict[str, list[float]] = {what: [] for what in moves}
    for number in range(ROUNDS):
        await tier.delete([put.key for put in puts])
        for pair in (("write", "write by hand"), ("read", "read by hand")):
            for what in pair if number % 2 else pair[::-1]:
                began = time.perf_counter()
                done = await moves[what]()
                seconds[what].append(time.perf_counter() - began)
                assert done in (None, [Written.STORED] * VALUES, [Read.HIT] * VALUES)
    assert all(get.into == put.parts for put, get in zip(puts, gets, strict=True))

    def figure(what: str, least: float) -> Figure:
        ratio = median(hand / mine for mine, hand in zip(seconds[what], seconds[f"{what} by hand"], strict=True))
        rates = [VALUES * size / median(seconds[which]) / 1e9 for which in (what, f"{what} by hand")]
        beside = f"{rates[0]:.2f} GB/s, {rates[1]:.2f} by hand"
        return Figure(f"{kind}: {what} {VALUES} values of {mib} MiB", ratio, least, "of by hand", beside, at_least=True)

    return [figure("read", 0.8), figure("write", 0)]


async def _by_hand(
    move: Callable[[socket.socket, bytes, memoryview], None], sock: socket.socket, values: dict[bytes, memoryview]
) -> None:
    for name, buffer in values.items():
        move(sock, name, buffer)


def _set(sock: socket.socket, name: bytes, data: memoryview) -> None:
    sock.sendall(b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, data.nbytes))
    sock.sendall(data)
    sock.sendall(b"\r\n")
    assert sock.recv(64) == b"+OK\r\n"


def _get(sock: socket.socket, name: bytes, into: memoryview) -> None:
    sock.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name))
    head = b"$%d\r\n" % into.nbytes
    first = sock.recv(len(head))
    assert first == head
    at = 0
    while at < into.nbytes:
        at += sock.recv_into(into[at:])
    assert sock.recv(2) == b"\r\n"


# ---- clients --------------------------------------------------------------------------------------------------------


def _clients(kind: str, server: RedisServer) -> list[Figure]:
    """Read and write `VALUES` values with each client alternately, over one connection each."""
    size = CLIENTS_MIB * MIB
    values = {b"client:%d" % i: filled(content(i, size), (size,))[0] for i in range(VALUES)}
    readers, writers = _connections(server)
    for name, write in writers.items():
        server.ask("FLUSHALL")
        _each(write, values)
        for read in readers.values():
            rooms = {name: aligned(size) for name in values}
            _each(read, rooms)
            assert rooms == values, name
    return [*_beside(kind, "read", readers, rooms, CLIENTS_RATIO_MIN), *_beside(kind, "write", writers, values, 0)]


def _connections(server: RedisServer) -> tuple[dict[str, _Move], dict[str, _Move]]:
    """Return functions that read a value into a buffer, and functions that write a value, by client.

    The tier's own connection comes first.
    """
    lane = dialling(RedisSpec.model_validate({"host": LOCAL, "port": server.port}), "")(LOCAL, server.port)
    lane.connect()
    client = redis.Redis(LOCAL, server.port)

    def read(name: bytes, into: memoryview) -> None:
        found = client.get(name)
        assert isinstance(found, bytes)
        into[:] = found

    readers: dict[str, _Move] = {"kvpipe": lambda name, into: lane.fetch(command(b"GET", name), [into])}
    writers: dict[str, _Move] = {"kvpipe": lambda name, data: lane.store((b"SET", name), [data], ())}
    readers["redis-py"], writers["redis-py"] = read, client.set
    try:
        glide = importlib.import_module("glide_sync")
    except ImportError:
        print(
            "valkey-glide is not compared: pip install valkey-glide-sync, in an environment of its own", file=sys.stderr
        )
    else:
        at = glide.GlideClientConfiguration([glide.NodeAddress(LOCAL, server.port)], request_timeout=30_000)
        other = glide.GlideClient.create(at)
        readers["valkey-glide"] = lambda name, into: other.get(name, buffer=into)
        writers["valkey-glide"] = other.set
    return readers, writers


def _each(move: _Move, buffers: dict[bytes, memoryview]) -> None:
    for name, buffer in buffers.items():
        move(name, buffer)


def _beside(
    kind: str, what: str, moves: dict[str, _Move], buffers: dict[bytes, memoryview], least: float
) -> list[Figure]:
    """Compare the first of `moves` with each other move. With a ratio above 1, the first is faster."""
    wall_s: dict[str, list[float]] = {name: [] for name in moves}
    cpu_s: dict[str, list[float]] = {name: [] for name in moves}
    names = list(moves)
    for number in range(ROUNDS):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            began, busy = time.perf_counter(), time.process_time()
            _each(moves[name], buffers)
            wall_s[name].append(time.perf_counter() - began)
            cpu_s[name].append(time.process_time() - busy)
    count = VALUES * CLIENTS_MIB * MIB
    mine, *others = names
    out = []
    for name in others:
        ratio = median(other / own for own, other in zip(wall_s[mine], wall_s[name], strict=True))
        rates = [count / median(wall_s[which]) / 1e9 for which in (mine, name)]
        costs = [median(cpu_s[which]) / count * 1e9 for which in (mine, name)]
        beside = f"{rates[0]:.2f} and {rates[1]:.2f} GB/s; CPU {costs[0]:.2f} and {costs[1]:.2f} ns a byte"
        row = f"{kind}: {what} values of {CLIENTS_MIB} MiB over one connection"
        out.append(Figure(row, ratio, least, f"times {name}", beside, at_least=True))
    return out
