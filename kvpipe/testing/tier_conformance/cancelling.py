"""Tests of cancelled calls: after a call has returned, no work of the call continues."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from operator import eq

import anyio
import anyio.lowlevel

from kvpipe.testing.buffers import aligned, content, data, filled, get, put, some_key, value
from kvpipe.testing.tier_conformance.worlds import KIB, MIB, with_client
from kvpipe.tiers.base import Get, Put, Read, Tier, Written

CANCEL_S = (math.inf, 0, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02)
"""Delays in seconds after which calls are cancelled: never, at once, and times that mostly are during the work."""
VALUES, VALUE_BYTES = 64, 256 * KIB
"""The number and the size of values. With these values a cancellation usually meets a thread during its work."""
TURNS = (4, 16, 64, 256, 1024)
"""Turns of the loop after which writes are cancelled. On any machine a thread is working in one of these turns."""


@contextmanager
def quick_switches() -> Iterator[None]:
    """Shorten the interpreter's switch interval, so that the loop observes another thread's work in progress."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


async def cut(call: Callable[[], Awaitable[object]], due: Callable[[int], bool]) -> None:
    """Make `call`, and cancel the call once `due(turn)` returns True for the number of the loop's turn."""
    async with anyio.create_task_group() as group:

        async def watch() -> None:
            for turn in count(1):
                if due(turn):
                    group.cancel_scope.cancel()
                await anyio.lowlevel.checkpoint()

        group.start_soon(watch)
        await call()
        group.cancel_scope.cancel()


class CancelClaims:
    """The tests that a tier does not use buffers after the call has returned."""

    @with_client
    async def test_a_read_gives_its_buffers_back(self, tier: Tier) -> None:
        """After a read has returned or was cancelled, the tier does not touch its buffers. Later reads succeed."""
        size, filling = 2 * MIB, b"\xa5" * MIB
        await tier.write([put(i, size) for i in range(4)])
        buffers = [aligned(MIB) for _ in range(8)]
        gets = [Get(some_key(i), (buffers[2 * i], buffers[2 * i + 1])) for i in range(4)]
        for delay_s in CANCEL_S:
            with anyio.move_on_after(delay_s):
                await tier.read(gets)
            for buffer in buffers:
                buffer[:] = filling
            await anyio.sleep(0.05)
            assert all(bytes(buffer) == filling for buffer in buffers), f"touched after it ended in {delay_s} s"
        assert await tier.read(gets) == [Read.HIT] * 4
        assert [data(g.into) for g in gets] == [content(i, size) for i in range(4)]

    @with_client
    async def test_a_write_gives_its_buffers_back(self, tier: Tier) -> None:
        """After a write has returned or was cancelled, the tier reads no buffer. A value is complete or absent."""
        size, other = 2 * MIB, content(99, MIB)
        for i, delay_s in enumerate(CANCEL_S):
            key, buffers = some_key(i), filled(content(i, size), (MIB, MIB))
            with anyio.move_on_after(delay_s):
                await tier.write([Put(key, buffers), Put(some_key(100 + i), buffers)])
            for buffer in buffers:
                buffer[:] = other
            await anyio.sleep(0.05)
            for which in (i, 100 + i):
                wanted = get(which, size)
                (read,) = await tier.read([wanted])
                assert read is Read.MISS or (read is Read.HIT and data(wanted.into) == content(i, size)), delay_s
            assert (await tier.write([Put(key, value(i, size))]))[0] in Written
            assert await tier.read([get(i, size)]) == [Read.HIT]

    @with_client
    async def test_a_read_ends_when_it_is_cancelled(self, tier: Tier) -> None:
        """A read is cancelled after its first buffer was filled. A read that has returned fills no more buffers."""
        filling = b"\xa5" * 8
        await tier.write([put(i, VALUE_BYTES) for i in range(VALUES)])
        gets = [get(i, VALUE_BYTES) for i in range(VALUES)]
        ends = [one.into[0][-8:] for one in reversed(gets)]  # the buffer that is filled last is checked first
        begin_s = time.monotonic()
        assert await tier.read(gets) == [Read.HIT] * VALUES
        whole_s = time.monotonic() - begin_s  # a cancelled call has ended its work after this time
        with quick_switches():
            for _ in range(4):
                for end in ends:
                    end[:] = filling
                await cut(lambda: tier.read(gets), lambda _: ends[-1] != filling)
                returned = [bytes(end) for end in ends]
                await anyio.sleep(whole_s)
                assert [bytes(end) for end in ends] == returned, "filled after the cancelled read had returned"
        assert await tier.read(gets) == [Read.HIT] * VALUES

    @with_client
    async def test_a_write_ends_when_it_is_cancelled(self, tier: Tier) -> None:
        """A write that is cancelled during its work reads no buffer after it has returned."""
        whole = content(1, VALUE_BYTES)
        puts = [Put(some_key(i), filled(whole, (VALUE_BYTES,))) for i in range(VALUES)]
        begin_s = time.monotonic()
        assert await tier.write(puts) == [Written.STORED] * VALUES
        whole_s = time.monotonic() - begin_s  # a cancelled call has ended its work after this time
        with quick_switches():
            for turns in TURNS:
                numbers = range(turns * VALUES, (turns + 1) * VALUES)
                puts = [Put(some_key(i), one.parts) for i, one in zip(numbers, puts, strict=True)]
                for one in puts:
                    one.parts[0][:] = whole
                await cut(partial(tier.write, puts), partial(eq, turns))
                for one in reversed(puts):
                    one.parts[0][:] = bytes(VALUE_BYTES)
                await anyio.sleep(whole_s)
                gets = [get(i, VALUE_BYTES) for i in numbers[-VALUES // 4 :]]
                for read, wanted in zip(await tier.read(gets), gets, strict=True):
                    found = read is Read.MISS or (read is Read.HIT and data(wanted.into) == whole)
                    assert found, f"{read}: stored after the write was cancelled in turn {turns}"
