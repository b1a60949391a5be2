"""The test of a store that fails: the tier raises `TierError`, and works again when the store works again."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import pytest

from kvpipe.testing.buffers import get, put, some_key
from kvpipe.testing.tier_conformance.worlds import KIB, TierWorld, client, list_entries, run, tried
from kvpipe.tiers.base import Read, Tier, TierError, Written


class FailureClaims:
    """The test of a store that cannot be used for a while."""

    def test_a_broken_store_raises_tier_errors(self, world: TierWorld) -> None:
        """While the store cannot be used, calls raise only TierError. When the store works again, so does the tier."""
        if "unbroken" in world.limits:
            return
        broken = world.broken
        if broken is None:
            pytest.fail('TierWorld has no `broken`: add it, or "unbroken" to its limits', pytrace=False)

        async def play() -> None:
            async with client(world) as tier:
                await tier.write([put(1, 64 * KIB)])
                other = world.make()
                with broken():
                    with pytest.raises(TierError):
                        await tier.health()
                    await _assert_no_other_error(tier)
                    with suppress(TierError):  # `open` may succeed if the tier connects on first use
                        await other.open()
                        await other.health()
                    await other.close()
                await tried(tier.open)
                await tier.health()
                assert await tier.write([put(2, 64 * KIB)]) == [Written.STORED]
                assert await tier.read([get(2, 64 * KIB)]) == [Read.HIT]

        run(play)


async def _assert_no_other_error(tier: Tier) -> None:
    """Make every call twice. Any exception but TierError fails the test. A call may also succeed.

    The second call is needed because the first call may fail only because of an old connection.
    """
    for _ in range(2):
        for ask in (
            partial(tier.exists, [some_key(1)]),
            partial(tier.read, [get(1, 64 * KIB)]),
            partial(tier.write, [put(3, 64 * KIB)]),
            partial(tier.delete, [some_key(3)]),
            tier.capacity,
            tier.health,
            partial(list_entries, tier),
        ):
            with suppress(TierError):
                await ask()
