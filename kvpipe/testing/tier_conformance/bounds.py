"""Tests of room and age: a bounded tier stays within its bound, and evicts the least recently used values."""

from __future__ import annotations

from contextlib import suppress

import pytest

from kvpipe.testing.buffers import content, data, get, put, some_key
from kvpipe.testing.tier_conformance.worlds import KIB, MIB, TierWorld, list_entries, run, with_world
from kvpipe.tiers.base import Read, Tier, TierFullError, Written

BOUND_BYTES, VALUE_BYTES = 4 * MIB, 256 * KIB


async def _assert_within(tier: Tier) -> None:
    """Assert that the bound holds for the capacity that the tier reports and for the values that the tier lists."""
    capacity = await tier.capacity()
    assert capacity.bytes_max == BOUND_BYTES
    assert capacity.bytes_used <= BOUND_BYTES
    assert sum(entry.bytes for entry in await list_entries(tier)) <= BOUND_BYTES


class BoundClaims:
    """The tests of `bytes_max` and of the order of eviction."""

    @with_world
    async def test_capacity_counts(self, world: TierWorld, tier: Tier) -> None:
        """`capacity` returns the number of held values, and a size that is at least the sum of the values' sizes."""
        before = await tier.capacity()
        await tier.write([put(i, 64 * KIB) for i in range(5)])
        held = await tier.capacity()
        assert "scan" in world.limits or (before.items, held.items) == (0, 5)
        assert "scan" in world.limits or held.bytes_used >= 5 * 64 * KIB
        assert held.bytes_max is None or held.bytes_max >= held.bytes_used

    def test_the_bound_holds(self, world: TierWorld) -> None:
        """Values never exceed `bytes_max`. New values are stored and old values are evicted, singly or in a batch."""
        if not world.is_bounded:
            return

        async def play() -> None:
            tier = world.bounded(BOUND_BYTES)
            await tier.open()
            fit = BOUND_BYTES // VALUE_BYTES
            for i in range(2 * fit):
                assert await tier.write([put(i, VALUE_BYTES)]) == [Written.STORED]
                await _assert_within(tier)
            newest = get(2 * fit - 1, VALUE_BYTES)
            assert await tier.read([newest, get(0, VALUE_BYTES)]) == [Read.HIT, Read.MISS]
            assert data(newest.into) == content(2 * fit - 1, VALUE_BYTES)
            with suppress(TierFullError):  # the batch is larger than the bound
                await tier.write([put(100 + i, VALUE_BYTES) for i in range(2 * fit)])
            await _assert_within(tier)
            with pytest.raises(TierFullError):
                await tier.write([put(200, 2 * BOUND_BYTES)])
            await _assert_within(tier)
            assert await tier.write([put(201, VALUE_BYTES)]) == [Written.STORED]
            await tier.close()

        run(play)

    def test_the_oldest_are_dropped_first(self, world: TierWorld) -> None:
        """Writing a value again makes the value the newest. Values written between the two writes are evicted first."""
        if not world.is_bounded or "age" in world.limits:
            return

        async def play() -> None:
            tier = world.bounded(BOUND_BYTES)
            await tier.open()
            await tier.write([put(0, VALUE_BYTES)])
            await world.grow_old()
            others = range(1, BOUND_BYTES // VALUE_BYTES - 1)
            await tier.write([put(i, VALUE_BYTES) for i in others])
            await list_entries(tier)  # list twice, because a tier may cache the ages of a listing
            await world.grow_old()
            await list_entries(tier)
            assert await tier.write([put(0, VALUE_BYTES)]) == [Written.PRESENT]
            for i in range(100, 103):
                await tier.write([put(i, VALUE_BYTES)])
            assert await tier.exists([some_key(0)]) == [True]
            assert not all(await tier.exists([some_key(i) for i in others]))
            await tier.close()

        run(play)

    @with_world
    async def test_present_renews_the_age(self, world: TierWorld, tier: Tier) -> None:
        """A value that is written again is younger in a listing than a value written between the two writes."""
        if "age" in world.limits:
            return
        for i in range(2):
            await tier.write([put(i, 4096)])
        await world.grow_old()
        assert await tier.write([put(0, 4096)]) == [Written.PRESENT]
        ages_s = {entry.key: entry.age_s for entry in await list_entries(tier)}
        again, once = ages_s[some_key(0)], ages_s[some_key(1)]
        if again is not None and once is not None:
            assert again < once
        elif not world.is_bounded:  # the age of a bounded tier's values is tested by the order of eviction
            pytest.fail('it lists no ages: return them, or add "age" to TierWorld.limits', pytrace=False)
