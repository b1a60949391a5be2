"""The store with which the suite tests a tier, and helpers that give a test clients of that store."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, TypeVar

import anyio
import pytest
from pydantic import ByteSize

from kvpipe.testing.waiting import WAIT_S
from kvpipe.tiers.base import Entry, Tier, TierError
from kvpipe.tiers.spec import TierSpec

KIB, MIB = 1 << 10, 1 << 20
_WAIT_S = 1.1
"""A wait in seconds that is longer than the unit of a store that counts whole seconds."""
_Args = ParamSpec("_Args")
_OneT = TypeVar("_OneT")

Limit = Literal[
    "exact_sizes",  # a read of another length than the value's need not return DAMAGED
    "delete_at_once",  # a deleted value may still be found for some seconds
    "scan",  # values cannot be listed: `scan` and `capacity` raise TierError, or return an incomplete result
    "reopened",  # values are lost when the last client is closed
    "refuses_closed",  # the tier may be used while it is not open
    "unbounded",  # no client bounds the store; the store evicts values by its own rules, or never
    "age",  # a value's age is unknown, or counts from the first write
    "unbroken",  # the suite cannot break the store; the tier's own tests cover a broken store
    "blocks",  # the tier's calls run on the loop's thread, because the tier is for tests only
]


@dataclass(frozen=True)
class TierWorld:
    """One store that the suite tests.

    `make` returns a new client of the store, which is not open yet. `limits` has the properties that the tier lacks.
    `broken` returns a context in which the store cannot be used, because its folder is moved or its server refuses.
    `older` makes all values at least two minutes older. Without `older` the suite waits for about a second instead.
    """

    make: Callable[[], Tier]
    spec: TierSpec
    limits: frozenset[Limit] = frozenset()
    broken: Callable[[], AbstractContextManager[object]] | None = None
    older: Callable[[], object] | None = None

    @property
    def is_bounded(self) -> bool:
        """Whether a client bounds the store. Fails the test if neither the specification nor `limits` says so."""
        if "unbounded" in self.limits:
            return False
        if "bytes_max" not in type(self.spec).model_fields:
            pytest.fail('its spec has no `bytes_max`: add one, or "unbounded" to TierWorld.limits', pytrace=False)
        return True

    def bounded(self, bytes_max: int) -> Tier:
        """Return a new client of a store that holds at most `bytes_max` bytes."""
        return self.spec.model_copy(update={"bytes_max": ByteSize(bytes_max)}).make("bounded")

    async def grow_old(self) -> None:
        """Make all values at least one second older."""
        if self.older is None:
            await anyio.sleep(_WAIT_S)
        else:
            self.older()


@asynccontextmanager
async def client(world: TierWorld) -> AsyncIterator[Tier]:
    """Yield a new open client, and close the client at the end."""
    tier = world.make()
    await tier.open()
    try:
        yield tier
    finally:
        await tier.close()


def run(play: Callable[..., Coroutine[Any, Any, None]], *args: object) -> None:
    """Run `play` on a new event loop, for at most `WAIT_S` seconds."""

    async def bounded() -> None:
        with anyio.fail_after(WAIT_S):
            await play(*args)

    anyio.run(bounded)


def with_world(
    claim: Callable[[Any, TierWorld, Tier], Coroutine[Any, Any, None]],
) -> Callable[[Any, TierWorld], None]:
    """Return a test that calls `claim` with an empty store and an open client of the store."""

    def test(self: object, world: TierWorld) -> None:
        async def opened() -> None:
            async with client(world) as tier:
                await claim(self, world, tier)

        run(opened)

    test.__name__, test.__doc__ = claim.__name__, claim.__doc__
    return test


def with_client(claim: Callable[[Any, Tier], Coroutine[Any, Any, None]]) -> Callable[[Any, TierWorld], None]:
    """Return a test that calls `claim` with an open client of an empty store."""

    async def opened(self: object, _world: TierWorld, tier: Tier) -> None:
        await claim(self, tier)

    opened.__name__, opened.__doc__ = claim.__name__, claim.__doc__
    return with_world(opened)


async def with_open(world: TierWorld, play: Callable[[Tier], Coroutine[Any, Any, None]]) -> None:
    """Run `play` with an open client of `world`."""
    async with client(world) as tier:
        await play(tier)


async def list_entries(tier: Tier) -> list[Entry]:
    """Return all entries of the tier's listing, sorted by key."""
    return sorted([entry async for entry in tier.scan()])


async def tried(call: Callable[_Args, Awaitable[_OneT]], *args: _Args.args, **kwargs: _Args.kwargs) -> _OneT:
    """Repeat `call` until it raises no `TierError`, for at most `WAIT_S` seconds.

    A slow machine may need several attempts, because a call has its own time limit.
    """
    limit = time.monotonic() + WAIT_S
    while True:
        try:
            return await call(*args, **kwargs)
        except TierError:
            if time.monotonic() > limit:
                raise
            await anyio.sleep(0.02)


async def soon(condition: Callable[[], Coroutine[Any, Any, bool]], *, at_once: bool) -> bool:
    """Whether `condition` becomes true within `WAIT_S` seconds, or, if `at_once`, is true now."""
    until = time.monotonic() + (0 if at_once else WAIT_S)
    while not await condition():
        if time.monotonic() > until:
            return False
        await anyio.sleep(0.1)
    return True
