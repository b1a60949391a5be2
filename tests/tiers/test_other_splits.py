"""What a rank's carrier does with values of other splits, and with chunks that another rank stores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import anyio
import pytest
import torch

from kvpipe.testing.held_tier import HeldTier
from kvpipe.testing.waiting import WAIT_S, eventually
from kvpipe.tiers import carrier
from kvpipe.tiers.base import Get, Put, Read, TierError, Written
from kvpipe.tiers.carrier import OTHER_FAULTS_MAX
from kvpipe.tiers.envelope import HEADER_BYTES
from kvpipe.tiers.guard import FAULTS_MAX, READ, WRITE
from kvpipe.tiers.parts import Share
from tests.tiers.test_carrier import GEOMETRY, PAGE, Rank

HEADS, ALIKE = (Share(4, (1, 1)), Share(4, (1,))), (Share(1, (1, 1)), Share(1, (1,)))


@contextmanager
def _rank(tier: HeldTier, shares: tuple[Share, ...], ranks: int, most: int = 1) -> Iterator[Rank]:
    made = Rank([tier], shares, ranks=ranks, most=most)
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
    """Reported, and a miss: the engine's own are read as before. After some in a row it is not tried for a while."""
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


def test_misses_of_other_splits_show_nothing_of_its_own() -> None:
    """A chunk that cannot be put together, or is not there, hides no failures."""
    with _rank(HeldTier(), HEADS, ranks=2) as rank:
        breaker = rank.tiers[0].breakers[READ]
        rank.carrier.loop.put(lambda: breaker.fault("it is odd"))
        for split in (1, 3):
            rank.carry(stores=False, slot=1, split=split)
            assert rank.ended() == [False]
        assert breaker.faults == 1


def test_who_stores_nothing_shows_nothing_of_the_tier(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_memory_for_other_splits_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is kept from one order to the next, and given back when no more of them have come for a while."""
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
        monkeypatch.setattr(carrier, "SPARE_S", 0.0)
        assert 0 < len(rank.carrier._spare) <= 3
        rank.carry(stores=False, slot=0, units=1, group=1, split=1)
        assert rank.ended() == [True]
        assert eventually(lambda: not rank.carrier._spare)
        assert rank.carrier._apart_open == 0


@pytest.mark.parametrize("trouble", ["lost", "spoilt"])
def test_one_of_several_parts(trouble: str) -> None:
    """A chunk of which one part is not there, or not what was stored, is a miss; what is spoilt is dropped."""
    tier = HeldTier()
    with _rank(tier, HEADS, ranks=2) as rank:
        rank.fill(0, 1)
        for group in (0, 1):
            rank.carry(stores=True, slot=0, group=group, split=4)
            assert rank.ended() == [True]
            rank.carry(stores=False, slot=1, group=group, split=4)
            assert rank.ended() == [True]
            used = 4 * GEOMETRY.groups[group].bytes_per_block
            assert rank.pool.slot(0)[:used].equal(rank.pool.slot(1)[:used])
            for key in (f"-g{group}-r0of4", f"-g{group}-r1of4"):
                (value,) = [value for name, value in tier.values.items() if name.endswith(key)]
                assert not any(value[HEADER_BYTES + used // 2 :]), "what another chunk has left in the padding"
        second = next(key for key in tier.values if key.endswith("-g0-r1of4"))
        value = tier.values.pop(second)
        if trouble == "spoilt":
            tier.values[second] = value[:-1] + bytes([value[-1] ^ 1])
        rank.carry(stores=False, slot=1, split=4)
        assert rank.ended() == [False]
        assert second not in tier.values
        assert rank.counters.faults == ({"chunk_damaged": 1} if trouble == "spoilt" else {})
        assert rank.tiers[0].breakers[READ].faults == 0


def test_its_own_smaller_parts_are_its_own() -> None:
    """Failures to read what an engine stores in more parts than it has ranks are the tier's, and open its breaker."""
    tier = HeldTier()
    made = Rank([tier], HEADS, ranks=2, most=4)
    try:
        made.carry(stores=True, slot=0, split=4)
        assert made.ended() == [True]
        assert {key.rpartition("-")[2] for key in tier.values} == {"r0of4", "r1of4", "r0of1"}, (
            "two parts, and the marker"
        )
        tier.trouble = "down"
        for _ in range(FAULTS_MAX):
            made.carry(stores=False, slot=1, split=4)
            assert made.ended() == [False]
        assert not made.tiers[0].breakers[READ].allows
    finally:
        made.carrier.shutdown()


class _Counting(HeldTier):
    """Counts the values of each call that writes."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[int] = []

    async def write(self, puts: Sequence[Put]) -> list[Written]:
        self.written.append(len(puts))
        return await super().write(puts)


def test_parts_for_more_ranks_are_written_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored for four ranks by one: all four parts at once, behind the marker; memory for them is used again."""
    monkeypatch.setattr(carrier, "SPARE_S", WAIT_S * 10)
    tier = _Counting()
    with _rank(tier, HEADS, ranks=1, most=4) as rank:
        was = rank.fill(0, 1)
        for stores, slot in ((True, 0), (False, 5)):
            rank.carry(stores=stores, slot=slot, split=4)
            assert rank.ended() == [True]
        assert torch.equal(rank.pool.slot(5)[: 4 * PAGE], was[: 4 * PAGE])
        assert len(rank.carrier._spare) == 4
    assert tier.written == [1, 4]
