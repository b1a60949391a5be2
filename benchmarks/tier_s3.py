"""Compares the S3 tier with direct calls of the tier's client. A real server on loopback limits the speed of both."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio

from benchmarks.report import Figure
from kvpipe.testing.buffers import aligned, get, put, some_key
from kvpipe.tiers.s3.child import Client
from kvpipe.tiers.s3.tier import S3Tier
from tests.rigs.servers.s3 import shared
from tests.rigs.tier_worlds.s3 import spec_of

REPEATS = 7
BODY_BYTES = (1 << 20, 8 << 20, 32 << 20)
LIMIT = 3.0
"""The limit on the time of a call through the tier, as a multiple of the time of a direct call."""

_Call = Callable[[], Awaitable[Any]]


def run() -> list[Figure]:
    """Return all figures: the time of a call through the tier, relative to the time of the client's call."""
    return anyio.run(_run)


async def _run() -> list[Figure]:
    tier = spec_of(shared()).make("s3")
    await tier.open()
    figures = [figure for size in BODY_BYTES for figure in await _values(tier, size)]
    figures.append(await _questions(tier, 200))
    await tier.close()
    return figures


async def _values(tier: S3Tier, size: int) -> list[Figure]:
    client = Client(tier.settings())
    api, ask, send = client.api, client.asks, client.puts
    numbers = iter(range(size, size + 10_000))
    one, wanted = put(size - 1, size), get(size - 1, size)
    await tier.write([one])

    async def write() -> None:
        await tier.write([one._replace(key=some_key(next(numbers)))])

    async def write_directly() -> None:
        await api.put_async(send, f"direct-{next(numbers)}", list(one.parts), mode="create", use_multipart=False)

    async def read_directly() -> None:
        target[:] = await (await api.get_async(ask, one.key.text)).bytes_async()

    target = aligned(size)
    pairs: dict[str, tuple[_Call, _Call]] = {
        "write": (write, write_directly),
        "read": (partial(tier.read, [wanted]), read_directly),
    }
    return [_figure(f"{what} {size >> 20} MiB", size, await _pair(*pair)) for what, pair in pairs.items()]


async def _questions(tier: S3Tier, count: int) -> Figure:
    keys, client = [some_key(i) for i in range(count)], Client(tier.settings())

    async def directly() -> None:
        async with anyio.create_task_group() as group:
            for key in keys:
                group.start_soon(_head, client, key.text)

    mine, alone = await _pair(partial(tier.exists, keys), directly)
    return Figure(f"exists, {count} keys", mine / alone, LIMIT, "of client", f"{mine / count * 1e6:.0f} us per key")


async def _head(client: Client, name: str) -> None:
    try:
        await client.api.head_async(client.asks, name)
    except FileNotFoundError:
        return


async def _pair(*calls: _Call) -> list[float]:
    """Return the least seconds of each call. The calls alternate."""
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(REPEATS):
        for call, took in zip(calls, seconds, strict=True):
            begin = time.perf_counter()
            await call()
            took.append(time.perf_counter() - begin)
    return [min(took) for took in seconds]


def _figure(name: str, size: int, seconds: list[float]) -> Figure:
    mine, alone = seconds
    beside = f"{size / mine / 1e6:.0f} of {size / alone / 1e6:.0f} MB/s"
    return Figure(name, mine / alone, LIMIT, "of client", beside)
