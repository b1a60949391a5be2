"""Helpers for the tests of the Mooncake tier: clients of a real cluster, and waiting for the cluster."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import pytest

from kvpipe.testing.buffers import get, put, some_key
from kvpipe.testing.tier_conformance.worlds import tried
from kvpipe.testing.waiting import WAIT_S
from kvpipe.tiers.base import Put, Tier, TierError, Written
from kvpipe.tiers.mooncake.tier import MooncakeTier
from tests.rigs.servers.mooncake import Master
from tests.rigs.tier_worlds.mooncake import spec_of

KIB, MIB = 1 << 10, 1 << 20
QUICK: dict[str, Any] = {"timeout_ms_max": 700}
LENDS: dict[str, Any] = {"segment_bytes": "64MiB"}
ALLOWED_S = WAIT_S / 2
"""A time in seconds that is longer than every limit of the tier, even on a slow machine."""


@asynccontextmanager
async def client(of: Master, *, writes: bool = True, **keys: object) -> AsyncIterator[MooncakeTier]:
    """Open a client and close it."""
    tier = spec_of(of, **keys).make("mooncake", writes=writes)
    await tried(tier.open)
    try:
        yield tier
    finally:
        await tier.close()


async def stored(tier: Tier, *puts: Put) -> None:
    """Write a value, even if this takes longer than the client's timeout.

    The next try may then find the value stored.
    """
    assert set(await tried(tier.write, puts)) <= {Written.STORED, Written.PRESENT}


async def fails(call: Callable[[], Awaitable[object]], words: str | None = None) -> None:
    """Check that a call ends soon with a TierError."""
    begin = time.monotonic()
    with pytest.raises(TierError, match=words):
        await call()
    assert time.monotonic() - begin < ALLOWED_S


async def every_call_fails(tier: Tier, keys: int) -> None:
    """Check that a call of every kind ends soon with a TierError."""
    await fails(partial(tier.exists, [some_key(i) for i in range(keys)]))
    await fails(partial(tier.read, [get(i, 64 * KIB) for i in range(keys)]))
    await fails(partial(tier.write, [put(100 + i, 64 * KIB) for i in range(keys)]))
    await fails(partial(tier.delete, [some_key(i) for i in range(keys)]))
    await fails(tier.health)


async def soon(call: Callable[[], Awaitable[object]], wanted: object) -> None:
    """Repeat a call until it returns the wanted result."""
    until = time.monotonic() + WAIT_S
    got: object = None
    while time.monotonic() < until:
        with contextlib.suppress(TierError):
            if (got := await call()) == wanted:
                return
        await anyio.sleep(0.1)
    raise AssertionError(f"{got} is not {wanted}")
