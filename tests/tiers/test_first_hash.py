"""An engine leaves its first hash in a tier, for engines whose hashes begin otherwise."""

from __future__ import annotations

import anyio

from kvpipe.testing.held_tier import HeldTier
from kvpipe.tiers.envelope import Sealer
from kvpipe.tiers.first_hash import ANY, read_first_hash
from tests.tiers.test_carrier import SPACE, rank_of


def test_the_first_hash_is_left_before_the_first_store() -> None:
    """Once, by rank 0, for the namespace and for the whole tier. Another engine's hash is replaced."""
    tier = HeldTier()

    def left() -> list[str]:
        return [anyio.run(read_first_hash, tier, Sealer([]), space) for space in (SPACE, ANY)]

    for first, place, expected in (("a", 1, ""), ("a", 0, "a"), ("b", 0, "b")):
        with rank_of(tier, ranks=2, place=place) as rank:
            rank.carrier.first_hash.text = first
            rank.carry(stores=False, slot=0)
            rank.ended()
            rank.carry(stores=True, slot=0)
            assert rank.ended() == [True]
            assert left() == [expected, expected]
            if first == "b":
                tier.values.clear()
                rank.carry(stores=True, slot=0)
                assert rank.ended() == [True]
                assert left() == ["", ""]
