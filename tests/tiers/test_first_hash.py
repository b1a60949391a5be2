"""An engine stores its first hash in a tier. An engine with another first hash can then report the difference."""

from __future__ import annotations

import hashlib

import anyio

from kvpipe.protocol.messages import TierOrder
from kvpipe.testing.held_tier import HeldTier
from kvpipe.tiers.envelope import Sealer
from kvpipe.tiers.first_hash import ANY, read_first_hash
from tests.tiers.test_carrier import CHUNK, SPACE, rank_of


def test_first_hash_is_stored_before_the_first_chunk() -> None:
    """Before its first chunk, rank 0 stores its first hash under two keys: for the namespace, and for the whole tier.

    The first hash of another engine is overwritten.
    """
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


def test_key_of_the_first_hash_is_fixed() -> None:
    """The key of the first hash, for a namespace and for the whole tier, is the same in all releases."""
    tier, space, name = HeldTier(), "1" * 32, hashlib.sha256(b"kvpipe first hash").hexdigest()
    with rank_of(tier) as rank:
        rank.carrier.first_hash.text = "a"
        rank.carrier.carry_out([TierOrder(1, True, 0, 0, 0, 4, CHUNK, 0)], space, 1)
        assert rank.ended() == [True]
    assert [key for key in tier.values if name in key] == [f"{one}-{name}-g0-r0of1" for one in (space, "0" * 32)]
