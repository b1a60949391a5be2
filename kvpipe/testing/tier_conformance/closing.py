"""Tests of opening and closing: a closed tier refuses calls and holds no resources."""

from __future__ import annotations

import gc
import threading
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from kvpipe.testing.buffers import get, put, some_key
from kvpipe.testing.tier_conformance.worlds import KIB, TierWorld, client, list_entries, run, with_client
from kvpipe.testing.waiting import eventually
from kvpipe.tiers.base import Tier, TierError, Written


class _Holdings(NamedTuple):
    """The numbers of Python threads, system threads, sockets and all descriptors of this process."""

    threads: int
    tasks: int
    sockets: int
    descriptors: int


def _held() -> _Holdings:
    gc.collect()
    names = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            names.append(str(fd.readlink()))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    tasks = len(list(Path("/proc/self/task").iterdir()))
    return _Holdings(threading.active_count(), tasks, sum("socket:" in name for name in names), len(names))


def _grew(before: _Holdings, times: int) -> bool:
    """Whether Python threads or sockets are left, or other resources have grown with each of `times` runs."""
    now = _held()
    return (
        now.threads > before.threads
        or now.sockets > before.sockets
        or now.tasks >= before.tasks + times
        or now.descriptors >= before.descriptors + times
    )


class ClosingClaims:
    """The tests of opening and closing a tier."""

    def test_close_is_idempotent_and_open_follows(self, world: TierWorld) -> None:
        """A tier can be closed twice, closed without having been opened, and opened again after each close."""

        async def play() -> None:
            tier = world.make()
            await tier.close()
            for i in range(2):
                await tier.open()
                await tier.health()
                assert await tier.write([put(i, 4096)]) == [Written.STORED]
                await tier.close()
                await tier.close()

        run(play)

    def test_a_closed_tier_raises_at_once(self, world: TierWorld) -> None:
        """Before `open` and after `close` every operation raises TierError and no other exception."""

        async def play() -> None:
            tier = world.make()
            for opened in (False, True):
                if opened:
                    await tier.open()
                    await tier.close()
                for ask in (
                    partial(tier.exists, [some_key(1)]),
                    partial(tier.read, [get(1, 4096)]),
                    partial(tier.write, [put(1, 4096)]),
                    partial(tier.delete, [some_key(1)]),
                    tier.capacity,
                    tier.health,
                    partial(list_entries, tier),
                ):
                    if "refuses_closed" in world.limits:
                        await ask()
                    else:
                        with pytest.raises(TierError):
                            await ask()

        run(play)

    @with_client
    async def test_health_returns(self, tier: Tier) -> None:
        """`health` returns for a usable store, also in repeated calls, and the tier has a name."""
        for _ in range(3):
            await tier.health()
        assert tier.name

    def test_nothing_is_left_after_close(self, world: TierWorld) -> None:
        """`close` leaves no socket and no Python thread.

        The number of library threads and descriptors does not grow with the number of opened and closed clients. The
        test keeps the closed clients, because `close` must release the resources, not the garbage collector.
        """
        closed: list[Tier] = []

        async def play() -> None:
            async with client(world) as tier, client(world) as other:
                await tier.write([put(i, 64 * KIB) for i in range(2)])
                await other.read([get(i, 64 * KIB) for i in range(2)])
                await other.delete([some_key(i) for i in range(2)])
                closed.extend((tier, other))

        for _ in range(2):  # two runs first, because a library may start threads once per process
            run(play)
        before, ran = _held(), 0
        for times in (4, 12):  # a library may start threads late, but only a leak grows with every run
            while ran < times:
                run(play)
                ran += 1
            if not _grew(before, ran):
                return
        assert eventually(lambda: not _grew(before, ran), every_s=0.02), (before, _held())
