"""Tests of several clients of one store, and of concurrent calls."""

from __future__ import annotations

import anyio

from kvpipe.testing.buffers import content, data, filled, get, put, some_key
from kvpipe.testing.tier_conformance.worlds import (
    KIB,
    MIB,
    TierWorld,
    client,
    list_entries,
    run,
    soon,
    with_world,
)
from kvpipe.tiers.base import Key, Put, Read, Tier, Written


class SharingClaims:
    """The tests of two clients, and of concurrent calls of one client."""

    @with_world
    async def test_another_client_finds_it(self, world: TierWorld, tier: Tier) -> None:
        """Two clients find each other's values at once. A value that one client has deleted is a miss for both."""
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
        """The same client finds its values after it is opened again. A new client also finds these values."""

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
        """A scan yields every key of every writer once, with the value's size. An age is not negative."""
        wanted = {some_key(i): 4096 * (i % 5 + 1) for i in range(40)}
        async with client(world) as other:
            for start, writer in ((0, tier), (20, other)):
                await writer.write([put(i, wanted[some_key(i)]) for i in range(start, start + 20)])
        if "scan" in world.limits:
            assert {entry.key: entry.bytes for entry in await list_entries(tier)}.items() <= wanted.items()
            return
        entries = await list_entries(tier)
        assert [(entry.key, entry.bytes) for entry in entries] == sorted(wanted.items())
        assert all(entry.age_s is None or 0 <= entry.age_s < 60 for entry in entries)
        await tier.delete([some_key(0)])
        assert len(await list_entries(tier)) == 39

    @with_world
    async def test_a_scan_runs_beside_writes(self, world: TierWorld, tier: Tier) -> None:
        """A scan during writes and deletions yields every value that exists throughout the scan, and no value twice."""
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
        """Concurrent calls read and write more different keys than the tier has lanes. All calls end correctly."""
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
        """If two clients write different values under one key at once, one of the values is stored completely."""
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
