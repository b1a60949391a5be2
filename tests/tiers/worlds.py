"""The stores that the common tests of tiers are run against: every kind registers its own here.

A world is one empty store, with its real server if it has one, for one test.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import anyio

from kvpipe.tiers.base import Tier
from kvpipe.tiers.spec import TierSpec

WAIT_S = 30.0
KINDS = ("dict", "disk", "redis", "s3", "mooncake")
"""The kinds of tiers; `tests/tiers/world_KIND.py` fills in `WORLDS`."""

Limit = Literal[
    "exact_sizes",  # a read of another length than was written need not say DAMAGED; it is no HIT of whole buffers
    "delete_at_once",  # a deleted value may be found for some seconds more
    "scan",  # values cannot be listed: scan and capacity raise TierError, or tell what they know
    "reopened",  # values are gone when the last client is closed
    "refuses_closed",  # it may be used when it is not open
]


@dataclass(frozen=True)
class World:
    """One store. `make` returns a new client of it, not yet opened; `limits` says what the store cannot do."""

    make: Callable[[], Tier]
    spec: TierSpec
    limits: frozenset[Limit] = frozenset()


WORLDS: dict[str, Callable[[Path], AbstractContextManager[World]]] = {}
"""What each is called, and how to set it up in an empty folder."""


@asynccontextmanager
async def client(world: World) -> AsyncIterator[Tier]:
    """Open a new client and close it."""
    tier = world.make()
    await tier.open()
    try:
        yield tier
    finally:
        await tier.close()


def run(play: Callable[..., Coroutine[Any, Any, None]], *args: object) -> None:
    """Run `play` on a loop of its own, not for ever."""

    async def bounded() -> None:
        with anyio.fail_after(WAIT_S):
            await play(*args)

    anyio.run(bounded)


for kind in KINDS:
    import_module(f"tests.tiers.world_{kind}")
