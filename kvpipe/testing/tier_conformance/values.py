"""Tests of values: a value is read back unchanged, and only under its own key."""

from __future__ import annotations

import pytest

from kvpipe.testing.buffers import NAMESPACE, aligned, content, data, filled, get, put, some_key, value
from kvpipe.testing.tier_conformance.worlds import (
    KIB,
    MIB,
    TierWorld,
    list_entries,
    run,
    soon,
    with_client,
    with_open,
    with_world,
)
from kvpipe.tiers.base import Get, Put, Read, Tier, Written

SPLITS = {
    "smallest": (4096,),
    "header and body": (4096, 124 * KIB),
    "one part of 1 MiB": (MIB,),
    "unequal parts": (4096, 60 * KIB, 4096, 256 * KIB, 8192),
    "8 MiB": (4096, 8 * MIB - 4096),
}


class ValueClaims:
    """The tests of one client that handles single values and batches."""

    @pytest.mark.parametrize("split", SPLITS)
    def test_what_was_written_is_read_back(self, world: TierWorld, split: str) -> None:
        """A value from one or several buffers is read back unchanged, also into buffers of other sizes."""
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
        """Reading a value into more or fewer bytes than the value has returns DAMAGED."""
        await tier.write([put(1, 128 * KIB)])
        for size in (64 * KIB, 4096, 132 * KIB, MIB):
            (read,) = await tier.read([get(1, 4096, size)])
            assert read is Read.DAMAGED or "exact_sizes" in world.limits, size

    @with_client
    async def test_what_was_not_written_is_a_miss(self, tier: Tier) -> None:
        """For a key that was never written, `read` returns MISS and `exists` returns False."""
        assert await tier.read([get(1, 4096)]) == [Read.MISS]
        assert await tier.exists([some_key(1)]) == [False]

    @with_client
    async def test_a_batch_keeps_its_order(self, tier: Tier) -> None:
        """A batch mixes hits and misses and contains a key twice. The results are in the order of the batch."""
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
        """A second write of a key returns PRESENT and keeps the first value, for new values of any length."""
        await tier.write([put(1, 64 * KIB)])
        for n in (64 * KIB, 4096, 256 * KIB):
            assert await tier.write([Put(some_key(1), value(2, n))]) == [Written.PRESENT]
        wanted = get(1, 64 * KIB)
        assert await tier.read([wanted]) == [Read.HIT]
        assert data(wanted.into) == content(1, 64 * KIB)

    @with_world
    async def test_delete_counts_and_makes_a_miss(self, world: TierWorld, tier: Tier) -> None:
        """`delete` returns how many values existed. Deleted values are misses and can be rewritten. Others stay."""
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
        """`exists` returns True exactly for the keys that `read` hits, for more keys than any batch or page has."""
        there = range(0, 1010, 100)
        await tier.write([put(i, 4096) for i in there])
        assert await tier.exists([some_key(i) for i in range(1010)]) == [i in there for i in range(1010)]
        sample = range(0, 1010, 50)
        reads = await tier.read([get(i, 4096) for i in sample])
        assert reads == [Read.HIT if i in there else Read.MISS for i in sample]

    @with_client
    async def test_nothing_may_be_asked(self, tier: Tier) -> None:
        """Empty batches return empty results, and an empty store lists no keys."""
        assert await tier.exists([]) == []
        assert await tier.read([]) == []
        assert await tier.write([]) == []
        assert await tier.delete([]) == 0
        assert await list_entries(tier) == []

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
