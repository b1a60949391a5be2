"""Tests that no call of a tier blocks the event loop, so that other calls can continue."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import count, pairwise
from typing import Any

import anyio
import anyio.lowlevel

from kvpipe.testing.buffers import content, filled, get, put, some_key
from kvpipe.testing.tier_conformance.cancelling import quick_switches
from kvpipe.testing.tier_conformance.worlds import MIB, TierWorld, client, list_entries, with_world
from kvpipe.tiers.base import Put, Tier

WAITING = (time.sleep, os.fdatasync, os.fsync, os.pread, os.preadv, os.pwrite, os.pwritev)
PARTS = (MIB,) * 8
"""The sizes of a large value's buffers. Between two buffers, a thread that copies the value gives the loop a turn."""
HELD_SHARE, TRIES = 0.8, 30
"""A call blocks the loop if, in each of `TRIES` tries, the loop has no turn for `HELD_SHARE` of the call's duration.

A single try proves nothing, because a busy machine may suspend the loop's thread during the call.
"""


def _waits(function: Any) -> bool:
    """Whether the C function `function` may wait for time, for a file, for SQLite or for a blocking socket."""
    of = getattr(function, "__self__", None)
    if isinstance(of, socket.socket):
        return of.gettimeout() != 0 and function.__name__.startswith(("accept", "connect", "recv", "send"))
    if type(of).__module__ == "sqlite3":
        return function.__name__.startswith(("commit", "execute", "fetch"))
    return function in WAITING


async def _standstill(call: Callable[[], Awaitable[object]]) -> tuple[float, float]:
    """Make `call`. Returns the longest time without a turn of the loop, and the call's duration, both in seconds."""
    beats_s: list[float] = []

    async def beat() -> None:
        while True:
            beats_s.append(time.perf_counter())
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as group:
        group.start_soon(beat)
        await anyio.lowlevel.checkpoint()
        beats_s[:] = [time.perf_counter()]
        await call()
        beats_s.append(time.perf_counter())
        group.cancel_scope.cancel()
    return max(end_s - begin_s for begin_s, end_s in pairwise(beats_s)), beats_s[-1] - beats_s[0]


def _copy_s() -> float:
    """Return the seconds in which this machine copies a value. The tests ignore shorter times without a turn."""
    source, least_s = bytearray(sum(PARTS)), float("inf")
    for _ in range(5):
        begin_s = time.perf_counter()
        bytes(source)
        least_s = min(least_s, time.perf_counter() - begin_s)
    return least_s


class LoopClaims:
    """The tests that no call blocks the loop's thread."""

    @with_world
    async def test_the_loop_is_not_held_up(self, world: TierWorld, tier: Tier) -> None:
        """The loop's thread calls no function that is known to wait for a disk, a database or a peer."""
        waited: list[str] = []

        def watch(_frame: object, event: str, function: Any) -> None:
            if event == "c_call" and _waits(function):
                waited.append(function.__qualname__)

        before = sys.getprofile()
        sys.setprofile(watch)
        try:
            async with client(world) as other:
                await other.write([put(i, MIB) for i in range(4)])
                await tier.read([get(i, MIB) for i in range(5)])
                await tier.exists([some_key(i) for i in range(5)])
                await tier.health()
                await list_entries(tier)
                await tier.delete([some_key(0)])
        finally:
            sys.setprofile(before)
        assert waited == []

    @with_world
    async def test_the_loop_runs_during_calls(self, world: TierWorld, tier: Tier) -> None:
        """While a call moves a large value or waits for the store, the loop has turns.

        This test detects every client that blocks. Each call is repeated until the loop has had turns during a call. A
        short call passes, because it may be answered from memory.
        """
        if "blocks" in world.limits:
            return
        numbers, least_s, size = count(2), _copy_s() / 2, sum(PARTS)
        parts = filled(content(1, size), PARTS)
        await tier.write([Put(some_key(0), parts), put(1, 4096)])
        wanted = get(0, *PARTS)
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "read": lambda: tier.read([wanted]),
            "write": lambda: tier.write([Put(some_key(next(numbers)), parts)]),
            "exists": lambda: tier.exists([some_key(1)]),
            "delete": lambda: tier.delete([some_key(next(numbers))]),
            "capacity": tier.capacity,
            "health": tier.health,
            "scan": partial(list_entries, tier),
        }
        held = []
        with quick_switches():
            for name, call in calls.items():
                for _ in range(TRIES):
                    longest_s, took_s = await _standstill(call)
                    if longest_s < max(HELD_SHARE * took_s, least_s):
                        break
                else:
                    held.append(f"{name}: {longest_s * 1000:.1f} of {took_s * 1000:.1f} ms")
        assert held == [], "the loop did not run; move the work to a thread, with kvpipe.tiers.base.blocking"
