"""A rank's carrier reads values of other splits, and does not judge its tier by chunks that another rank stores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import anyio
import pytest
import torch

from kvpipe.protocol.geometry import Geometry, Group, Layer
from kvpipe.protocol.messages import TierOrder
from kvpipe.testing.held_tier import HeldTier
from kvpipe.testing.waiting import WAIT_S, eventually
from kvpipe.tiers import carrier
from kvpipe.tiers.base import Get, Put, Read, TierError, Written
from kvpipe.tiers.bodies import Bodies
from kvpipe.tiers.carrier import OTHER_FAULTS_MAX
from kvpipe.tiers.envelope import HEADER_BYTES
from kvpipe.tiers.guard import FAULTS_MAX, READ, WRITE
from kvpipe.tiers.parts import Share, mark_key, slices
from kvpipe.transfer.pool import HostPool
from tests.tiers.test_carrier import CHUNK, GEOMETRY, PAGE, SPACE, Rank, rank_of

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
    """A tier that cannot read a value that is a whole chunk."""

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
    """The failed read is reported, and is a miss.

    After several failures the other split is not read for some time. The engine's own values are still read.
    """
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
            # one successful read has ended the pause, so the values are read again
            monkeypatch.setattr(carrier, "OTHER_PAUSE_S", 60.0)


def test_misses_of_other_splits_do_not_reset_the_count_of_failures() -> None:
    """A missing or incomplete chunk of another split does not prove that the tier works."""
    with _rank(HeldTier(), HEADS, ranks=2) as rank:
        breaker = rank.tiers[0].breakers[READ]
        rank.carrier.loop.put(lambda: breaker.fault("it is odd"))
        for split in (1, 3):
            rank.carry(stores=False, slot=1, split=split)
            assert rank.ended() == [False]
        assert breaker.faults == 1


def test_tier_is_not_judged_by_stores_of_another_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """If another rank stores the chunk, this rank counts neither a success nor a failure of the tier."""
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


def test_marker_is_written_again_in_an_earlier_namespace() -> None:
    """Only the last namespace of each tier is remembered, because each change of the weights begins a new namespace."""
    near, far, other = HeldTier("near"), HeldTier("far"), "1" * 32
    with rank_of(near, far, shares=HEADS) as rank:
        stores = [(1, SPACE), (0, SPACE), (0, other), (0, SPACE), (1, SPACE)]
        for number, (tier, space) in enumerate(stores):
            rank.carrier.carry_out([TierOrder(number, True, tier, number, 0, 4, CHUNK, 1)], space, 1)
            assert rank.ended() == [True]
            marker = (near, far)[tier].values.pop(mark_key(space, (1, 1)).text, None)
            assert (marker is not None) == (number < 4)
        assert rank.carrier._marked.keys() == {(0, SPACE), (1, SPACE)}


def test_memory_for_other_splits_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory is kept between orders, and released after a time without chunks of other splits."""
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
def test_missing_part_of_another_split_is_a_miss(trouble: str) -> None:
    """A chunk with a missing or damaged part is a miss. The damaged part is deleted."""
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
                assert not any(value[HEADER_BYTES + used // 2 :]), "the padding has bytes of another chunk"
        second = next(key for key in tier.values if key.endswith("-g0-r1of4"))
        value = tier.values.pop(second)
        if trouble == "spoilt":
            tier.values[second] = value[:-1] + bytes([value[-1] ^ 1])
        rank.carry(stores=False, slot=1, split=4)
        assert rank.ended() == [False]
        assert second not in tier.values
        assert rank.counters.faults == ({"chunk_damaged": 1} if trouble == "spoilt" else {})
        assert rank.tiers[0].breakers[READ].faults == 0


def test_failures_to_read_own_parts_open_the_breaker() -> None:
    """An engine that stores more parts than it has ranks reads several parts per rank.

    All of them count as the engine's own parts.
    """
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
    """A tier that counts the values in each call of write."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[int] = []

    async def write(self, puts: Sequence[Put]) -> list[Written]:
        self.written.append(len(puts))
        return await super().write(puts)


def test_parts_for_more_ranks_are_written_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank stores for four ranks.

    The rank writes all four parts in one call after the marker, and reuses their memory.
    """
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


def test_heads_of_whole_blocks_are_found_in_every_layer() -> None:
    """A part of whole blocks is ``[page][layer]``.

    So a rank of two takes half of the heads of each layer of each page.
    """
    pages, layers, rows, heads, size = 3, 2, 2, 4, 8
    chunk = torch.arange(pages * layers * rows * heads * size).to(torch.uint8).view(pages, layers, rows, heads, size)
    share = Share(heads, (rows,) * layers).whole
    for rank in range(2):
        mine = chunk[..., 2 * rank : 2 * rank + 2, :]
        block = Group((Layer("block", mine[0].numel()),), 16)
        geometry = Geometry((block,), 16 * pages, 1 << 13)
        pool = HostPool(geometry)
        order = TierOrder(1, False, 0, 0, 0, pages, CHUNK, 1)
        (wanted,) = slices(heads, 2, 1, rank)
        Bodies(geometry, pool).move_heads(chunk.flatten().numpy().data, order, share, 2, wanted)
        assert torch.equal(pool.tensor[0, : mine.numel()], mine.flatten())
