"""What every tier must keep of the protocol of `kvpipe/tiers/base.py`: one claim each.

A test module of a tier has a subclass of `TierConformance`, whose fixture `world` sets up one empty store:

    class TestShed(TierConformance):
        @pytest.fixture
        def world(self, tmp_path):
            spec = ShedSpec(path=tmp_path)
            yield TierWorld(lambda: spec.make("shed"), spec)

Every claim is a method that takes a `TierWorld`, so it can also be called without pytest's fixtures.
"""

from __future__ import annotations

import gc
import math
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import anyio
import pytest

from kvpipe.testing.buffers import NAMESPACE, aligned, content, data, filled, get, put, some_key, value
from kvpipe.testing.overriding import not_overridden
from kvpipe.testing.waiting import WAIT_S, eventually
from kvpipe.tiers.base import Entry, Get, Key, Put, Read, Tier, TierError, Written
from kvpipe.tiers.spec import TierSpec

__all__ = ["Limit", "TierConformance", "TierWorld", "client", "run"]

KIB, MIB = 1 << 10, 1 << 20
_Args = ParamSpec("_Args")
_One = TypeVar("_One")
CANCEL_S = (math.inf, 0, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02)
"""When calls are cancelled: never, at once, and, on most machines, while they are at work."""
SPLITS = {
    "smallest": (4096,),
    "header and body": (4096, 124 * KIB),
    "one part of 1 MiB": (MIB,),
    "unequal parts": (4096, 60 * KIB, 4096, 256 * KIB, 8192),
    "8 MiB": (4096, 8 * MIB - 4096),
}
WAITING = (time.sleep, os.fdatasync, os.fsync, os.pread, os.preadv, os.pwrite, os.pwritev)

Limit = Literal[
    "exact_sizes",  # a read of another length than was written need not be DAMAGED; it is no HIT of whole buffers
    "delete_at_once",  # a deleted value may be found for some seconds more
    "scan",  # values cannot be listed: scan and capacity raise TierError, or return what they know
    "reopened",  # values are gone when the last client is closed
    "refuses_closed",  # it may be used when it is not open
]


@dataclass(frozen=True)
class TierWorld:
    """One store. `make` returns a new client of it, not yet opened; `limits`: what the store cannot do."""

    make: Callable[[], Tier]
    spec: TierSpec
    limits: frozenset[Limit] = frozenset()


@asynccontextmanager
async def client(world: TierWorld) -> AsyncIterator[Tier]:
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


def with_world(
    claim: Callable[[Any, TierWorld, Tier], Coroutine[Any, Any, None]],
) -> Callable[[Any, TierWorld], None]:
    """Make a test of `claim`, which is given an empty store and an open client of it."""

    def test(self: object, world: TierWorld) -> None:
        async def opened() -> None:
            async with client(world) as tier:
                await claim(self, world, tier)

        run(opened)

    test.__doc__ = claim.__doc__
    return test


def with_client(claim: Callable[[Any, Tier], Coroutine[Any, Any, None]]) -> Callable[[Any, TierWorld], None]:
    """Make a test of `claim`, which is given an open client of an empty store."""

    async def opened(self: object, _world: TierWorld, tier: Tier) -> None:
        await claim(self, tier)

    opened.__doc__ = claim.__doc__
    return with_world(opened)


async def with_open(world: TierWorld, play: Callable[[Tier], Coroutine[Any, Any, None]]) -> None:
    """Run `play` with an open client of `world`."""
    async with client(world) as tier:
        await play(tier)


async def listed(tier: Tier) -> list[Entry]:
    """Return the listing, by key."""
    return sorted([entry async for entry in tier.scan()])


async def tried(call: Callable[_Args, Awaitable[_One]], *args: _Args.args, **kwargs: _Args.kwargs) -> _One:
    """Make `call`, whose limit may be too short for this machine, until it raises no `TierError`, for `WAIT_S`."""
    limit = time.monotonic() + WAIT_S
    while True:
        try:
            return await call(*args, **kwargs)
        except TierError:
            if time.monotonic() > limit:
                raise
            await anyio.sleep(0.02)


async def soon(condition: Callable[[], Coroutine[Any, Any, bool]], *, at_once: bool) -> bool:
    """Ask until `condition` holds, for `WAIT_S` at most. `at_once`: ask once."""
    until = time.monotonic() + (0 if at_once else WAIT_S)
    while not await condition():
        if time.monotonic() > until:
            return False
        await anyio.sleep(0.1)
    return True


def _held() -> tuple[int, int, int]:
    """Count Python's threads, the system's, and sockets of this process."""
    gc.collect()
    sockets = 0
    for fd in Path("/proc/self/fd").iterdir():
        try:
            sockets += "socket:" in str(fd.readlink())
        except FileNotFoundError:  # the listing's own
            continue
    return threading.active_count(), len(list(Path("/proc/self/task").iterdir())), sockets


def _waits(function: Any) -> bool:
    """Whether a call of the C function `function` may wait: for time, for a file, for SQLite, for a blocking socket."""
    of = getattr(function, "__self__", None)
    if isinstance(of, socket.socket):
        return of.gettimeout() != 0 and function.__name__.startswith(("accept", "connect", "recv", "send"))
    if type(of).__module__ == "sqlite3":
        return function.__name__.startswith(("commit", "execute", "fetch"))
    return function in WAITING


class TierConformance:
    """The claims. Only what `TierWorld.limits` lists may be missing."""

    @pytest.fixture
    def world(self) -> Any:
        """Set up one empty store. Subclasses override it."""
        not_overridden(self, "world", "a `TierWorld` with an empty store")

    @pytest.mark.parametrize("split", SPLITS)
    def test_what_was_written_is_read_back(self, world: TierWorld, split: str) -> None:
        """A value of one or several parts is read back byte for byte, also into parts of other sizes."""
        sizes = SPLITS[split]

        async def play(tier: Tier) -> None:
            whole = content(1, sum(sizes))
            assert await tier.write([Put(some_key(1), filled(whole, sizes))]) == [Written.STORED]
            for into in (sizes, sizes[::-1], (sum(sizes),)):
                wanted = get(1, *into)
                assert await tier.read([wanted]) == [Read.HIT]
                assert data(wanted.into) == whole

        run(with_open, world, play)

    @with_world
    async def test_another_length_is_damage(self, world: TierWorld, tier: Tier) -> None:
        """Reading a value into more or fewer bytes than it has is no hit but DAMAGED."""
        await tier.write([put(1, 128 * KIB)])
        for size in (64 * KIB, 4096, 132 * KIB, MIB):
            (read,) = await tier.read([get(1, 4096, size)])
            assert read is Read.DAMAGED or "exact_sizes" in world.limits, size

    @with_client
    async def test_what_was_not_written_is_a_miss(self, tier: Tier) -> None:
        """A key that was never written is a MISS and does not exist."""
        assert await tier.read([get(1, 4096)]) == [Read.MISS]
        assert await tier.exists([some_key(1)]) == [False]

    @with_client
    async def test_a_batch_keeps_its_order(self, tier: Tier) -> None:
        """Results stand in the order of what was asked, hits and misses mixed, a key asked twice."""
        there = [1, 2, 5, 7, 11]
        assert await tier.write([put(i, 4096 * i) for i in there]) == [Written.STORED] * len(there)
        asked = [11, 3, 5, 1, 4, 2, 6, 7, 8, 5]
        assert await tier.exists([some_key(i) for i in asked]) == [i in there for i in asked]
        gets = [get(i, 4096 * i) for i in asked]
        assert await tier.read(gets) == [Read.HIT if i in there else Read.MISS for i in asked]
        for i, wanted in zip(asked, gets, strict=True):
            assert i not in there or data(wanted.into) == content(i, 4096 * i)
        assert await tier.write([put(i, 4096 * i) for i in (2, 3, 1, 4)]) == [
            Written.PRESENT, Written.STORED, Written.PRESENT, Written.STORED,
        ]  # fmt: skip

    @with_client
    async def test_the_first_value_is_kept(self, tier: Tier) -> None:
        """A second write of a key is PRESENT and changes nothing, whatever its length."""
        await tier.write([put(1, 64 * KIB)])
        for n in (64 * KIB, 4096, 256 * KIB):
            assert await tier.write([Put(some_key(1), value(2, n))]) == [Written.PRESENT]
        wanted = get(1, 64 * KIB)
        assert await tier.read([wanted]) == [Read.HIT]
        assert data(wanted.into) == content(1, 64 * KIB)

    @with_world
    async def test_delete_counts_and_makes_a_miss(self, world: TierWorld, tier: Tier) -> None:
        """Deleting returns how many were there; they are a miss, may be written anew, and others stay."""
        await tier.write([put(i, 8192) for i in range(4)])
        gone = [some_key(i) for i in (0, 2, 9)]

        async def none() -> bool:
            return not any(await tier.exists(gone))

        assert await tier.delete(gone) == 2
        assert await soon(none, at_once="delete_at_once" not in world.limits)
        assert await tier.read([get(0, 8192), get(1, 8192)]) == [Read.MISS, Read.HIT]
        assert await tier.delete(gone) == 0
        assert await tier.exists([some_key(i) for i in range(4)]) == [False, True, False, True]
        assert await tier.write([Put(some_key(0), value(7, 4096))]) == [Written.STORED]
        wanted = get(0, 4096)
        assert await tier.read([wanted]) == [Read.HIT]
        assert data(wanted.into) == content(7, 4096)

    @with_client
    async def test_exists_agrees_with_read(self, tier: Tier) -> None:
        """Exists returns True for what read hits and False for what it misses, for more keys than any batch or page."""
        there = range(0, 1010, 100)
        await tier.write([put(i, 4096) for i in there])
        assert await tier.exists([some_key(i) for i in range(1010)]) == [i in there for i in range(1010)]
        sample = range(0, 1010, 50)
        reads = await tier.read([get(i, 4096) for i in sample])
        assert reads == [Read.HIT if i in there else Read.MISS for i in sample]

    @with_world
    async def test_another_client_finds_it(self, world: TierWorld, tier: Tier) -> None:
        """What one client wrote, another finds at once, and it finds what that wrote and not what that deleted."""
        await tier.write([put(1, 128 * KIB), put(2, 4096)])
        async with client(world) as other:
            wanted = get(1, 128 * KIB)
            assert await other.read([wanted]) == [Read.HIT]
            assert data(wanted.into) == content(1, 128 * KIB)
            assert await other.exists([some_key(1)]) == [True]
            await other.write([put(3, 8192)])
            await other.delete([some_key(2)])
            again = get(3, 8192)
            assert await tier.read([again]) == [Read.HIT]
            assert data(again.into) == content(3, 8192)

            async def gone() -> bool:
                return await tier.read([get(2, 4096)]) == [Read.MISS]

            assert await soon(gone, at_once="delete_at_once" not in world.limits)

    def test_it_is_still_there_after_reopening(self, world: TierWorld) -> None:
        """What was written is found by the same client opened again and by a new one after the last was closed."""

        async def play() -> None:
            tier = world.make()
            await tier.open()
            await tier.write([put(i, 64 * KIB) for i in range(3)])
            await tier.close()
            if "reopened" in world.limits:
                async with client(world) as other:
                    assert set(await other.exists([some_key(0)])) <= {False, True}
                return
            await tier.open()
            assert await tier.exists([some_key(i) for i in range(4)]) == [True, True, True, False]
            await tier.close()
            async with client(world) as other:
                wanted = get(2, 64 * KIB)
                assert await other.read([wanted]) == [Read.HIT]
                assert data(wanted.into) == content(2, 64 * KIB)

        run(play)

    @with_world
    async def test_scan_lists_all(self, world: TierWorld, tier: Tier) -> None:
        """A scan yields every key once, with its size, whoever wrote it; an age is no negative number."""
        wanted = {some_key(i): 4096 * (i % 5 + 1) for i in range(40)}
        async with client(world) as other:
            for start, writer in ((0, tier), (20, other)):
                await writer.write([put(i, wanted[some_key(i)]) for i in range(start, start + 20)])
        if "scan" in world.limits:
            assert {entry.key: entry.bytes for entry in await listed(tier)}.items() <= wanted.items()
            return
        entries = await listed(tier)
        assert [(entry.key, entry.bytes) for entry in entries] == sorted(wanted.items())
        assert all(entry.age_s is None or 0 <= entry.age_s < 60 for entry in entries)
        await tier.delete([some_key(0)])
        assert len(await listed(tier)) == 39

    @with_world
    async def test_a_scan_runs_beside_writes(self, world: TierWorld, tier: Tier) -> None:
        """A scan while others write and delete yields every value that was there all the time, none twice."""
        await tier.write([put(i, 4096) for i in range(30)])
        seen, gone = list[Key](), set[Key]()
        async for entry in tier.scan():
            seen.append(entry.key)
            if len(seen) <= 3:
                await tier.write([put(100 + len(seen), 4096)])
                gone |= {entry.key, some_key(20 + len(seen))}
                await tier.delete(list(gone))
        stable = {some_key(i) for i in range(30)} - gone
        assert len(seen) == len(set(seen))
        assert stable <= set(seen) or "scan" in world.limits

    @with_world
    async def test_many_at_once(self, world: TierWorld, tier: Tier) -> None:
        """More reads and writes of different keys at once than there are lanes, in many calls, all end right."""
        count = world.spec.lanes * 6
        wrong = []

        async def one(i: int) -> None:
            size = 4096 * (1 + i % 7)
            if await tier.write([put(i, size)]) != [Written.STORED]:
                wrong.append(("write", i))
            wanted = get(i, size)
            if await tier.read([wanted]) != [Read.HIT] or data(wanted.into) != content(i, size):
                wrong.append(("read", i))

        async with anyio.create_task_group() as group:
            for i in range(count):
                group.start_soon(one, i)
            group.start_soon(tier.health)
            group.start_soon(tier.exists, [some_key(i) for i in range(count)])
        assert not wrong
        gets = [get(i, 4096 * (1 + i % 7)) for i in range(count)]
        assert await tier.read(gets) == [Read.HIT] * count

    @with_world
    async def test_two_writers_of_one_key_leave_one_value(self, world: TierWorld, tier: Tier) -> None:
        """When two clients write one key at once with different values, one of them is there, whole."""
        async with client(world) as other:
            for i in range(5):
                ends: list[Written] = []

                async def write(
                    writer: Tier, i: int, seed: int, sizes: tuple[int, ...], ends: list[Written] = ends
                ) -> None:
                    ends.extend(await writer.write([Put(some_key(i), filled(content(seed, sum(sizes)), sizes))]))

                async with anyio.create_task_group() as group:
                    group.start_soon(write, tier, i, 1, (4096, MIB))
                    group.start_soon(write, other, i, 2, (MIB, 4096))
                assert Written.STORED in ends
                for reader in (tier, other):
                    wanted = get(i, MIB + 4096)
                    assert await reader.read([wanted]) == [Read.HIT]
                    assert data(wanted.into) in (content(1, MIB + 4096), content(2, MIB + 4096))

    @with_client
    async def test_a_read_gives_its_buffers_back(self, tier: Tier) -> None:
        """After a read has returned or was cancelled nothing touches its buffers, and the tier reads on."""
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
        """After a write has returned or was cancelled nothing reads its buffers: a value is whole, or is not there."""
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

    def test_close_is_idempotent_and_open_follows(self, world: TierWorld) -> None:
        """Closing twice, closing what was never opened, opening again after each: all are fine."""

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
        """Before open and after close every operation raises TierError, and nothing else."""

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
                    partial(listed, tier),
                ):
                    if "refuses_closed" in world.limits:
                        await ask()
                    else:
                        with pytest.raises(TierError):
                            await ask()

        run(play)

    @with_world
    async def test_the_loop_is_not_held_up(self, world: TierWorld, tier: Tier) -> None:
        """On the loop's thread nothing is called that waits for a disk, a database or a peer, as far as is known."""
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
                await listed(tier)
                await tier.delete([some_key(0)])
        finally:
            sys.setprofile(before)
        assert waited == []

    @with_client
    async def test_health_returns(self, tier: Tier) -> None:
        """A store that can be used is healthy, also when it is asked again; the tier has a name."""
        for _ in range(3):
            await tier.health()
        assert tier.name

    @with_world
    async def test_capacity_counts(self, world: TierWorld, tier: Tier) -> None:
        """Capacity returns the number of values held, and no fewer bytes than they have."""
        before = await tier.capacity()
        await tier.write([put(i, 64 * KIB) for i in range(5)])
        held = await tier.capacity()
        assert "scan" in world.limits or (before.items, held.items) == (0, 5)
        assert "scan" in world.limits or held.bytes_used >= 5 * 64 * KIB
        assert held.bytes_max is None or held.bytes_max >= held.bytes_used

    @with_client
    async def test_nothing_may_be_asked(self, tier: Tier) -> None:
        """Empty batches return nothing, and an empty store lists nothing."""
        assert await tier.exists([]) == []
        assert await tier.read([]) == []
        assert await tier.write([]) == []
        assert await tier.delete([]) == 0
        assert await listed(tier) == []

    @with_client
    async def test_keys_do_not_meet(self, tier: Tier) -> None:
        """Keys that differ in namespace, chunk, group, rank or ranks are different values."""
        keys = [
            some_key(1),
            some_key(2),
            some_key(1, namespace=NAMESPACE[::-1]),
            some_key(1, namespace="0" * 32),
            some_key(1, group=1),
            some_key(1, group=11),
            some_key(1, rank=1, ranks=2),
            some_key(1, rank=0, ranks=2),
            some_key(1, rank=1, ranks=21),
            some_key(1, rank=11, ranks=21),
            some_key(1, group=1, rank=1, ranks=2),
            some_key(1)._replace(chunk=some_key(1).chunk[:16]),
            some_key(1)._replace(chunk=some_key(1).chunk * 2),
        ]
        assert await tier.write([Put(key, value(i, 4096)) for i, key in enumerate(keys)]) == [Written.STORED] * len(
            keys
        )
        gets = [Get(key, (aligned(4096),)) for key in keys]
        assert await tier.read(gets) == [Read.HIT] * len(keys)
        assert [data(g.into) for g in gets] == [content(i, 4096) for i in range(len(keys))]
        assert await tier.delete(keys[:1]) == 1
        assert await tier.exists(keys[1:]) == [True] * (len(keys) - 1)

    def test_nothing_is_left_after_close(self, world: TierWorld) -> None:
        """Closing leaves no socket and no thread of Python; a library's own do not become one more each time."""

        async def play() -> None:
            async with client(world) as tier, client(world) as other:
                await tier.write([put(i, 64 * KIB) for i in range(2)])
                await other.read([get(i, 64 * KIB) for i in range(2)])
                await other.delete([some_key(i) for i in range(2)])

        for _ in range(2):  # a library may start threads once per process
            run(play)
        before, times = _held(), 12
        for _ in range(times):
            run(play)

        def left() -> bool:
            python, system, sockets = _held()
            return python > before[0] or system >= before[1] + times or sockets > before[2]

        assert eventually(lambda: not left(), every_s=0.02), (before, _held())
