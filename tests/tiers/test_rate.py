"""Tests of the measured read rate of a tier."""

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
    """The time during which two reads overlap counts once."""
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


def test_misses_and_failures_do_not_count_in_the_rate() -> None:
    """Misses and failed reads do not count in the rate."""
    rate = ReadRate()
    _read(rate, 0.0, 5.0, 0)
    assert rate.bytes_per_s == 0.0
    _read(rate, 10.0, 0.1, 100)
    assert rate.bytes_per_s == pytest.approx(1000.0)


def test_slow_first_read_does_not_decide_the_rate() -> None:
    """The first read of a connection is slow. Later reads have more bytes, so they decide the rate."""
    rate = ReadRate()
    _read(rate, 0.0, 5.0, 100)
    assert rate.bytes_per_s == pytest.approx(20.0)
    _read(rate, 10.0, 0.5, 500)
    assert rate.bytes_per_s == pytest.approx(1000.0)


def test_reads_without_end_are_measured() -> None:
    """The rate is also measured if there is never a moment without a read."""
    rate = ReadRate()
    rate.begin(0.0)
    for at in range(1, 50):
        rate.begin(at * 0.1)
        rate.end(at * 0.1, 100)
    assert rate.bytes_per_s == pytest.approx(1000.0)


@pytest.mark.parametrize("faster", [4.0, 0.25])
def test_rate_follows_the_tier(faster: float) -> None:
    """The rate follows the tier, because old reads are forgotten."""
    rate, now_s = ReadRate(), 0.0
    for bytes_per_s in (1000.0, 1000.0 * faster):
        for _ in range(PERIODS):
            _read(rate, now_s, 0.2, int(bytes_per_s * 0.2))
            now_s += 1.0
        assert rate.bytes_per_s == pytest.approx(bytes_per_s)


def test_a_rank_reports_how_fast_it_reads() -> None:
    """A rank reports the read rate, in bytes per second, of each tier that it has read.

    Writes and misses do not count.
    """
    with rank_of(HeldTier("first"), HeldTier("second")) as rank:
        for stores, slot in ((True, 0), (False, 5)):
            rank.carry(stores=stores, slot=slot, tier=1)
            assert rank.ended() == [True]
            assert bool(rank.carrier.rates) is not stores
        took = rank.carrier.counters.durations.take()
        assert {name: {tier: len(some) for tier, some in by.items()} for name, by in took.items()} == {
            "store_seconds": {"second": 1},
            "load_seconds": {"second": 1},
        }
        assert took["load_seconds"]["second"] == [rank.carrier.seconds["second", READ]]
        rank.carry(stores=False, slot=6, tier=0)
        assert rank.ended() == [False]
        assert rank.carrier.counters.durations.take() == {}, "a chunk that is not there is not loaded"
        ((place, rate),) = rank.carrier.rates.items()
        assert place == 1
        assert rate >= rank.carrier.bytes["second", READ] / rank.carrier.seconds["second", READ]
