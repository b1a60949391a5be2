"""How fast a tier is read."""

from __future__ import annotations

import pytest

from kvpipe.testing.held_tier import HeldTier
from kvpipe.tiers.guard import READ
from kvpipe.tiers.rate import PERIODS, ReadRate
from tests.tiers.test_carrier import rank_of


def _read(rate: ReadRate, now_s: float, took_s: float, size: int) -> None:
    rate.begin(now_s)
    rate.end(now_s + took_s, size)


def test_only_time_in_which_something_is_read_counts() -> None:
    """Two reads at once take as long as both together."""
    rate = ReadRate()
    assert rate.bytes_per_s == 0.0
    rate.begin(10.0)
    rate.begin(10.1)
    rate.end(10.2, 100)
    assert rate.bytes_per_s == 0.0
    rate.end(10.4, 100)
    assert rate.bytes_per_s == pytest.approx(200 / 0.4)
    _read(rate, 60.0, 0.4, 200)
    assert rate.bytes_per_s == pytest.approx(200 / 0.4), "nothing was read in between"


def test_what_was_not_there_says_nothing() -> None:
    """A miss takes no time to speak of, and a read that failed is the breaker's business."""
    rate = ReadRate()
    _read(rate, 0.0, 5.0, 0)
    assert rate.bytes_per_s == 0.0
    _read(rate, 10.0, 0.1, 100)
    assert rate.bytes_per_s == pytest.approx(1000.0)


def test_one_that_takes_long_is_none_of_many() -> None:
    """The first read of a connection: the next ones, of more bytes, count."""
    rate = ReadRate()
    _read(rate, 0.0, 5.0, 100)
    assert rate.bytes_per_s == pytest.approx(20.0)
    _read(rate, 10.0, 0.5, 500)
    assert rate.bytes_per_s == pytest.approx(1000.0)


def test_reads_without_end_are_measured() -> None:
    """One begins before the last has ended, for ever."""
    rate = ReadRate()
    rate.begin(0.0)
    for at in range(1, 50):
        rate.begin(at * 0.1)
        rate.end(at * 0.1, 100)
    assert rate.bytes_per_s == pytest.approx(1000.0)


@pytest.mark.parametrize("faster", [4.0, 0.25])
def test_it_follows_the_tier(faster: float) -> None:
    """What was measured long ago is forgotten."""
    rate, now_s = ReadRate(), 0.0
    for bytes_per_s in (1000.0, 1000.0 * faster):
        for _ in range(PERIODS):
            _read(rate, now_s, 0.2, int(bytes_per_s * 0.2))
            now_s += 1.0
        assert rate.bytes_per_s == pytest.approx(bytes_per_s)


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
