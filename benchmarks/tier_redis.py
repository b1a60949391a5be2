"""The Redis tier on loopback beside a hand-written loop over one plain connection, in turns, with the same sizes."""

from __future__ import annotations

import socket
import time
from collections.abc import Awaitable, Callable
from functools import partial
from statistics import median

import anyio

from benchmarks.report import Figure
from kvpipe.testing.buffers import aligned, some_key, value
from kvpipe.testing.servers.redis import RedisServer, serving
from kvpipe.testing.servers.sockets import LOCAL
from kvpipe.tiers.base import Get, Put, Read, Tier, Written
from kvpipe.tiers.redis.spec import RedisSpec

MIB = 1 << 20
SIZES_MIB, VALUES, ROUNDS, LOOKUP_KEYS = (2, 8), 8, 15, 1000


def run() -> list[Figure]:
    """Every figure, of both servers."""
    out = []
    for kind in ("redis", "valkey"):
        with serving(kind) as server:
            out += anyio.run(_measure, kind, server)
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
    """Write and read `VALUES` values, by the tier and by hand in turns. A ratio above 1: the tier is quicker."""
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
