"""How fast a tier is read."""

from __future__ import annotations

import pytest

from kvpipe.testing.held_tier import HeldTier
from kvpipe.tiers.guard import READ
from kvpipe.tiers.rate import RATE_S, ReadRate
from tests.tiers.test_carrier import rank_of


def test_only_time_in_which_something_is_read_counts() -> None:
    """Two reads at once, one alone, and a long pause between them."""
    rate = ReadRate()
    assert rate.bytes_per_s == 0.0
    rate.begin(10.0)
    rate.begin(10.1)
    rate.end(10.2, 100)
    rate.end(10.4, 100)
    rate.begin(60.0)
    rate.end(60.1, 50)
    assert rate.bytes_per_s == pytest.approx(250 / 0.5)


def test_what_was_not_there_has_taken_its_time() -> None:
    """A tier of which nothing was read yet has no rate: a miss says little about it."""
    rate = ReadRate()
    rate.begin(0.0)
    rate.end(0.1, 0)
    assert rate.bytes_per_s == 0.0
    rate.begin(1.0)
    rate.end(1.1, 100)
    assert rate.bytes_per_s == pytest.approx(100 / 0.2)


@pytest.mark.parametrize("faster", [4.0, 0.25])
def test_it_follows_the_tier(faster: float) -> None:
    """What was measured long ago counts for less and less."""
    rate, now_s = ReadRate(), 0.0
    for bytes_per_s in (1000.0, 1000.0 * faster):
        for _ in range(100):
            rate.begin(now_s)
            rate.end(now_s + RATE_S / 10, int(bytes_per_s * RATE_S / 10))
            now_s += 1.0
    assert rate.bytes_per_s == pytest.approx(1000.0 * faster, rel=0.05)


def test_a_rank_reports_how_fast_it_reads() -> None:
    """Each tier that it has read, in bytes per second. Writes say nothing, nor what is not there."""
    with rank_of(HeldTier("first"), HeldTier("second")) as rank:
        for stores, slot in ((True, 0), (False, 5)):
            rank.carry(stores=stores, slot=slot, tier=1)
            assert rank.ended() == [True]
            assert bool(rank.carrier.rates) is not stores
        rank.carry(stores=False, slot=6, tier=0)
        assert rank.ended() == [False]
        ((place, rate),) = rank.carrier.rates.items()
        assert place == 1
        assert rate >= rank.carrier.bytes["second", READ] / rank.carrier.seconds["second", READ]
