"""A tier without room refuses stores, but is still read."""

from __future__ import annotations

from kvpipe.statemachine import breaker as m
from kvpipe.testing.held_tier import HeldTier
from kvpipe.tiers.base import TierFullError
from kvpipe.tiers.guard import FAULTS_MAX, READ, WRITE
from tests.tiers.test_carrier import rank_of


class FullTier(HeldTier):
    """A tier whose probes write a value, so that probes fail while the tier is full.

    `probes` is the number of probes.
    """

    probes = 0

    async def health(self) -> None:
        """See `Tier.health`."""
        self.probes += 1
        await super().health()
        if self.trouble == "full":
            raise TierFullError("it is full")


def test_full_tier_is_read_again_when_it_was_down_before() -> None:
    """The tier was down, so neither reads nor writes used it.

    When the tier answers again, it is full. So reads begin again, and writes wait until there is room.
    """
    tier = FullTier()
    with rank_of(tier) as rank:
        reads, writes = (rank.tiers[0].breakers[use] for use in (READ, WRITE))
        rank.carry(stores=True, slot=0)
        assert rank.ended() == [True]
        tier.trouble = "down"
        for stores in (False, True):
            for _ in range(FAULTS_MAX):
                rank.carry(stores=stores, slot=0)
                assert rank.ended() == [False]
        assert (reads.state.row, writes.state.row) == (m.OPEN, m.OPEN)
        tier.trouble, probed = "full", tier.probes
        rank.probe_until(lambda: tier.probes >= probed + 3)  # at least one more probe has begun and ended
        assert (reads.state.row, writes.state.row) == (m.HALF_OPEN, m.OPEN)
        rank.carry(stores=False, slot=1)
        assert rank.ended() == [True]
        assert (reads.state.row, writes.state.row) == (m.CLOSED, m.OPEN)
        tier.trouble = "none"
        rank.probe_until(lambda: writes.allows)
        rank.carry(stores=True, slot=0)
        assert rank.ended() == [True]
        assert writes.state.row == m.CLOSED
