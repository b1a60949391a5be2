"""Compares the Mooncake tier with direct calls of Mooncake's client, on one cluster over TCP on loopback."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

import anyio
import numpy as np

from benchmarks.report import Figure
from kvpipe.config.settings import load_settings
from kvpipe.node.attach import NodeEngine, attach_rank
from kvpipe.protocol.geometry import Geometry, Group, Layer
from kvpipe.testing.buffers import aligned, some_key
from kvpipe.testing.waiting import eventually
from kvpipe.tiers.base import Get, Put, Read, Tier, Written
from kvpipe.tiers.mooncake.tier import MooncakeTier
from tests.rigs.servers.mooncake import Master, master, node
from tests.rigs.tier_worlds.mooncake import spec_of

ROUNDS, VALUES, HEADER, LOOKUPS = 31, 8, 4096, 1000
MIB = 1 << 20
SLOT_BYTES = 8 * MIB


def run() -> list[Figure]:
    """Return the figures of reads, writes and lookups."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # log level of the client in this process
    with master() as cluster, node(cluster.address, 1 << 30):
        return anyio.run(_figures, cluster)


async def _figures(cluster: Master) -> list[Figure]:
    direct = _client(cluster.address)
    tier = spec_of(cluster).make("mooncake")
    await tier.open()
    try:
        out = []
        for size in (2, 4, 8):
            out += await _moves(direct, tier, size * MIB)
        with tempfile.TemporaryDirectory(dir="/tmp") as folder:
            out += await _fills(direct, cluster, Path(folder, "node"))
        return [*out, await _lookup(direct, tier)]
    finally:
        await tier.close()
        direct.close()


async def _fills(direct: Any, cluster: Master, folder: Path) -> list[Figure]:
    """Read values into the slots of a node's memory, by the client in this process and by the tier."""
    geometry = Geometry((Group((Layer("slot", SLOT_BYTES),), block_tokens=16),), 16, VALUES * SLOT_BYTES)
    settings = load_settings({"pool": "node", "pool_dir": str(folder), "keep_s": 5})
    memory, shared = attach_rank(settings, geometry, NodeEngine(b"bench" * 3 + b"!", 1), 0)
    assert shared.with_memory is not None
    assert eventually(lambda: shared.with_memory is not None and shared.with_memory() == VALUES)
    at = np.frombuffer(shared.memory, np.uint8).ctypes.data
    assert direct.register_buffer(at, VALUES * SLOT_BYTES) == 0
    tier = spec_of(cluster).make("mooncake")
    tier.share(shared)
    await tier.open()
    try:
        return [await _fill(direct, tier, shared.memory, at, size * MIB) for size in (2, 4, 8)]
    finally:
        await tier.close()
        direct.unregister_buffer(at)
        memory.close()


async def _fill(direct: Any, tier: MooncakeTier, slots: memoryview, at: int, size: int) -> Figure:
    keys = [some_key(i) for i in range(VALUES)]
    names, places, sizes = [key.text for key in keys], [at + i * SLOT_BYTES for i in range(VALUES)], [size] * VALUES
    bodies = [slots[i * SLOT_BYTES :][: size - HEADER] for i in range(VALUES)]
    for i, key in enumerate(keys):
        raw = aligned(size)
        np.frombuffer(raw, np.uint8)[:] = np.random.default_rng(i).integers(0, 256, size, np.uint8)
        await tier.write([Put(key, (raw[:HEADER], raw[HEADER:]))])

    async def get() -> None:
        assert direct.batch_get_into(names, places, sizes) == sizes

    gets = [Get(key, (aligned(HEADER), body)) for key, body in zip(keys, bodies, strict=True)]

    async def read() -> None:
        assert await tier.read(gets) == [Read.HIT] * VALUES

    plain_s, mine_s, ratio = await _in_turns(get, read)
    await tier.delete(keys)
    beside = f"{VALUES * size / mine_s / 1e9:.2f} of {VALUES * size / plain_s / 1e9:.2f} GB/s"
    return Figure(
        f"read {VALUES} values of {size // MIB} MiB into slots", ratio, 0.95, "of client", beside, at_least=True
    )


def _client(address: str) -> Any:
    from mooncake.store import MooncakeDistributedStore  # type: ignore[import-untyped]

    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, MIB, "tcp", "", address) == 0
    return store


async def _moves(direct: Any, tier: Tier, size: int) -> list[Figure]:
    """Write and read `VALUES` values, by the client with registered memory and by the tier with kvpipe's memory."""
    whole = memoryview(aligned(VALUES * size))
    at = np.frombuffer(whole, np.uint8).ctypes.data
    np.frombuffer(whole, np.uint8)[:] = np.random.default_rng(0).integers(0, 256, VALUES * size, np.uint8)
    assert direct.register_buffer(at, VALUES * size) == 0
    keys = [some_key(i) for i in range(VALUES)]
    names, places, sizes = [key.text for key in keys], [at + i * size for i in range(VALUES)], [size] * VALUES
    parts = [(aligned(HEADER), whole[i * size + HEADER : (i + 1) * size]) for i in range(VALUES)]

    async def put() -> None:
        assert direct.batch_put_from(names, places, sizes) == [0] * VALUES

    async def get() -> None:
        assert direct.batch_get_into(names, places, sizes) == sizes

    async def write() -> None:
        puts = [Put(key, part) for key, part in zip(keys, parts, strict=True)]
        assert await tier.write(puts) == [Written.STORED] * VALUES

    async def read() -> None:
        gets = [Get(key, part) for key, part in zip(keys, parts, strict=True)]
        assert await tier.read(gets) == [Read.HIT] * VALUES

    async def drop() -> None:
        await tier.delete(keys)

    out = []
    for name, plain, mine, before in (("write", put, write, drop), ("read", get, read, None)):
        plain_s, mine_s, ratio = await _in_turns(plain, mine, before)
        beside = f"{VALUES * size / mine_s / 1e9:.2f} of {VALUES * size / plain_s / 1e9:.2f} GB/s"
        label = f"{name} {VALUES} values of {size // MIB} MiB"
        out.append(Figure(label, ratio, 0.8, "of client", beside, at_least=True))
    await drop()
    direct.unregister_buffer(at)
    return out


async def _in_turns(
    plain: Callable[[], Awaitable[None]],
    mine: Callable[[], Awaitable[None]],
    before: Callable[[], Awaitable[None]] | None = None,
) -> tuple[float, float, float]:
    """Run both calls alternately. Returns the median seconds of each call, and the median of the rounds' ratios.

    The first round is the warm-up. `before` runs before each call, and is not measured.
    """
    took: dict[Any, list[float]] = {plain: [], mine: []}
    for turn in range(ROUNDS + 1):
        for call in (plain, mine) if turn % 2 else (mine, plain):
            if before:
                await before()
            begin = time.perf_counter()
            await call()
            took[call].append(time.perf_counter() - begin)
    quotients = [a / b for a, b in zip(took[plain][1:], took[mine][1:], strict=True)]
    return median(took[plain][1:]), median(took[mine][1:]), median(quotients)


async def _lookup(direct: Any, tier: Tier) -> Figure:
    keys = [some_key(i) for i in range(LOOKUPS)]
    await tier.write([Put(key, (aligned(HEADER),)) for key in keys[::2]])

    async def plain() -> None:
        assert sum(direct.batch_is_exist([key.text for key in keys])) == LOOKUPS // 2

    async def mine() -> None:
        assert await tier.exists(keys) == [i % 2 == 0 for i in range(LOOKUPS)]

    plain_s, mine_s, _ = await _in_turns(plain, mine)
    await tier.delete(keys)
    return Figure(f"lookup of {LOOKUPS} keys", mine_s * 1e3, 3, "ms", f"{plain_s * 1e3:.2f} ms: the client")
