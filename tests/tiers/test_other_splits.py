"""What a rank's carrier does with values of other splits, and with chunks that another rank stores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import anyio
import pytest

from kvpipe.testing.held_tier import HeldTier
from kvpipe.tiers import carrier
from kvpipe.tiers.base import Get, Read, TierError
from kvpipe.tiers.carrier import OTHER_FAULTS_MAX
from kvpipe.tiers.guard import FAULTS_MAX, READ, WRITE
from kvpipe.tiers.parts import Share
from tests.tiers.test_carrier import Rank

HEADS, ALIKE = (Share(4, (1, 1)), Share(4, (1,))), (Share(1, (1, 1)), Share(1, (1,)))


@contextmanager
def _rank(tier: HeldTier, shares: tuple[Share, ...], ranks: int) -> Iterator[Rank]:
    made = Rank([tier], shares, ranks=ranks)
    try:
        yield made
        assert not made.carrier.loop.errors
    finally:
        made.carrier.shutdown()


class _Odd(HeldTier):
    """Cannot bring values that are a whole chunk."""

    def __init__(self, trouble: str) -> None:
        super().__init__()
        self.odd, self.asked = trouble, 0

    async def read(self, gets: Sequence[Get]) -> list[Read]:
        if gets[0].key.ranks == 1:
            self.asked += 1
            if self.odd == "fails":
                raise TierError("of this one")
            if self.odd == "hangs":
                await anyio.sleep_forever()
        return await super().read(gets)


@pytest.mark.parametrize("trouble", ["fails", "hangs"])
def test_another_splits_values_cannot_be_read(trouble: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told, and a miss: the engine's own are read as before. After some in a row it is not tried for a while."""
    tier = _Odd(trouble)
    with _rank(tier, HEADS, ranks=2) as rank:
        rank.carry(stores=True, slot=0, split=2)
        assert rank.ended() == [True]
        patience_s = rank.tiers[0].timeout_s
        for _ in range(OTHER_FAULTS_MAX + FAULTS_MAX):
            rank.tiers[0].timeout_s = 0.02 if trouble == "hangs" else patience_s
            rank.carry(stores=False, slot=1, split=1)
            assert rank.ended() == [False]
            assert rank.tiers[0].breakers[READ].faults == 0
            assert rank.tiers[0].breakers[READ].allows
        assert tier.asked == OTHER_FAULTS_MAX
        assert rank.counters.faults == {"tier_failed": OTHER_FAULTS_MAX}
        rank.tiers[0].timeout_s = patience_s
        rank.carry(stores=False, slot=1, split=2)
        assert rank.ended() == [True]
        monkeypatch.setattr(carrier, "OTHER_PAUSE_S", 0.0)
        tier.odd = "none"
        for count in (1, 2):
            rank.carry(stores=False, slot=1, split=1)
            assert rank.ended() == [False]
            assert tier.asked == OTHER_FAULTS_MAX + count
            monkeypatch.setattr(carrier, "OTHER_PAUSE_S", 60.0)  # an answer, of whatever kind: it is read again


def test_misses_of_other_splits_say_nothing_of_its_own() -> None:
    """A chunk that cannot be put together, or is not there, hides no failures."""
    with _rank(HeldTier(), HEADS, ranks=2) as rank:
        breaker = rank.tiers[0].breakers[READ]
        rank.carrier.loop.put(lambda: breaker.fault("it is odd"))
        for split in (1, 3):
            rank.carry(stores=False, slot=1, split=split)
            assert rank.ended() == [False]
        assert breaker.faults == 1


def test_who_stores_nothing_says_nothing_of_the_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank stores the chunk: that is no success of this rank's, and what this rank cannot do is no failure."""
    tier = HeldTier()
    with _rank(tier, ALIKE, ranks=2) as rank:
        rank.carry(stores=True, slot=0, split=1)
        assert rank.ended() == [True]
        assert len(tier.values) == 1, "the marker"
        tier.trouble, breaker = "down", rank.tiers[0].breakers[WRITE]
        for count in range(1, FAULTS_MAX + 1):
            rank.carrier.loop.put(lambda: breaker.fault("it is down"))
            rank.carry(stores=True, slot=0, split=1)
            assert rank.ended() == [True]
            assert breaker.faults == count
        assert not breaker.allows
        monkeypatch.setattr(carrier, "MARK_S", 0.0)
        rank.carry(stores=True, slot=0, split=1)
        assert rank.ended() == [True]
        assert not rank.counters.faults


def test_memory_for_other_splits_is_given_back() -> None:
    """It is kept from one order to the next, and no longer than there are such."""
    tier = HeldTier()
    with _rank(tier, HEADS, ranks=1) as rank:
        rank.carry(stores=True, slot=0, units=1, group=1, split=1)
        assert rank.ended() == [True]
    with _rank(tier, HEADS, ranks=2) as rank:
        tier.hold()
        for slot in range(3):
            rank.carry(stores=False, slot=slot, units=1, group=1, split=1)
        tier.let_go()
        assert rank.ended(3) == [True] * 3
        assert not rank.carrier._spare
        assert rank.carrier._others_open == 0
