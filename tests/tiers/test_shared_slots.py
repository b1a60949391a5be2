"""Transfers between tiers and slots that several engines share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from kvpipe.config.settings import load_settings
from kvpipe.node.replica import stamp_of
from kvpipe.protocol.geometry import Geometry, Group, Layer
from kvpipe.protocol.messages import ONE_BAD, TierOrder
from kvpipe.testing.held_tier import DictSpec, HeldTier
from kvpipe.testing.waiting import PATIENT, eventually
from kvpipe.tiers import slot_writer
from kvpipe.tiers.base import blocking
from kvpipe.tiers.carrier import Carried, Carrier
from kvpipe.tiers.envelope import Sealer
from kvpipe.tiers.guard import READ, WRITE, GuardedTier, guarded
from kvpipe.tiers.parts import RankParts
from kvpipe.trace.log import Counters
from kvpipe.transfer.pool import HostPool, SharedSlots
from kvpipe.worker.caches import PagedCaches
from kvpipe.worker.context import RankContext
from kvpipe.worker.side import WorkerSide
from tests.rigs.pipeline_rig import FakeEngine, make_caches, plan, small_geometry

GEOMETRY = Geometry((Group((Layer("a", 512), Layer("b", 1024)), 32),), 128, 8 * 8192)
SPACE, CHUNK = "0" * 32, bytes(range(32))
SLOTS, SLOT_BYTES, USED = 4, GEOMETRY.slot_bytes, 4 * (512 + 1024)


def _guarded(tier: HeldTier) -> list[GuardedTier]:
    return guarded([(tier.name, DictSpec.model_validate(PATIENT), tier)], (READ, WRITE))


@contextmanager
def _carrier(tier: HeldTier, pool: HostPool, *, fetches: bool = True) -> Iterator[Carrier]:
    made = Carrier(_guarded(tier), GEOMETRY, pool, RankParts(0, 1, (), 1, fetches), counters=Counters())
    try:
        yield made
    finally:
        made.shutdown()


def _carry(carrier: Carrier, *, stores: bool, slot: int, stamp: bytes = b"") -> bool:
    """Carry out an order. Return whether the order has succeeded."""
    carrier.carry_out([TierOrder(1, stores, 0, slot, 0, 4, CHUNK, 0, "", stamp)], SPACE, 1)
    ended = list[Carried]()
    assert eventually(lambda: ended.extend(carrier.collect()) or ended)  # type: ignore[func-returns-value]
    return ended[0].ok


@pytest.fixture
def pool() -> HostPool:
    """Return a pool of shared slots with random bytes."""
    made = HostPool(GEOMETRY, SharedSlots(memoryview(bytearray(SLOTS * SLOT_BYTES)), SLOT_BYTES, 0, b"token"))
    made.flat[:] = torch.randint(0, 256, made.flat.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return made


def test_store_changes_no_byte_of_a_shared_slot(pool: HostPool) -> None:
    """Another engine may have written bytes behind the chunk in the slot.

    The stored value still has zeros as padding.
    """
    before, tier = pool.flat.clone(), HeldTier()
    with _carrier(tier, pool) as carrier:
        assert _carry(carrier, stores=True, slot=1)
    assert torch.equal(pool.flat, before)
    (value,) = tier.values.values()
    body = value[-SLOT_BYTES:]
    assert body[:USED] == before[SLOT_BYTES : SLOT_BYTES + USED].numpy().tobytes()
    assert not any(body[USED:])


def test_rank_leaves_a_slot_alone_that_another_rank_fetches(pool: HostPool) -> None:
    """If all ranks have equal bytes, one rank writes the slot. The other ranks report success without a read."""
    tier = HeldTier()
    with _carrier(tier, pool) as carrier:
        assert _carry(carrier, stores=True, slot=1)
    before = pool.flat.clone()
    with _carrier(tier, pool, fetches=False) as carrier:
        assert _carry(carrier, stores=False, slot=2)
        assert _carry(carrier, stores=True, slot=1)
    assert torch.equal(pool.flat, before)
    with _carrier(tier, pool) as carrier:
        assert _carry(carrier, stores=False, slot=2)
    assert torch.equal(pool.slot(2)[:USED], pool.slot(1)[:USED])


@pytest.mark.parametrize("fetches", [False, True])
def test_only_ranks_that_fetch_forbid_a_tier(pool: HostPool, *, fetches: bool) -> None:
    """A rank that cannot read a tier reports the tier as unreadable, unless the rank never fetches."""
    with _carrier(HeldTier(), pool, fetches=fetches) as carrier:
        carrier.shutdown()
        assert bool(carrier.unreadable) == fetches


def test_rank_fails_tier_orders_for_another_pool() -> None:
    """The order names a slot of the scheduler's memory.

    In another pool, the slot with this number holds another chunk.
    """
    geometry, tier = small_geometry(), HeldTier()
    caches = PagedCaches(geometry, make_caches(geometry, 8), 8)
    side = WorkerSide(RankContext(load_settings()), caches, engine=FakeEngine(), tiers=_guarded(tier))
    try:
        orders = tuple(TierOrder(number, number == 1, 0, 0, 0, 1, CHUNK, 0) for number in (1, 2))
        side.bind(plan()._replace(orders=orders, space=SPACE, pool=b"another memory"))
        side.unbind()
        report = side.take_report()
        assert report is not None
        assert report.tallies == {1: ONE_BAD, 2: ONE_BAD}
        assert not tier.values
    finally:
        side.shutdown()


class FillingTier(HeldTier):
    """A tier that can fill shared slots."""

    def __init__(self) -> None:
        """Start without slots."""
        super().__init__()
        self.slots: SharedSlots | None = None

    def share(self, slots: SharedSlots) -> None:
        """See `FillsSlots`."""
        assert self.slots is None
        self.slots = slots


@pytest.mark.parametrize("is_shared", [False, True])
def test_rank_gives_its_tiers_the_shared_slots(*, is_shared: bool) -> None:
    """A tier that fills slots gets the file of shared slots. A private pool has no file, so no tier gets it."""
    geometry, tier = small_geometry(), FillingTier()
    size = geometry.slot_bytes
    shared = SharedSlots(memoryview(bytearray(geometry.slots * size)), size, 0, b"token") if is_shared else None
    caches = PagedCaches(geometry, make_caches(geometry, 8), 8)
    side = WorkerSide(RankContext(load_settings()), caches, engine=FakeEngine(), tiers=_guarded(tier), shared=shared)
    side.shutdown()
    assert tier.slots is shared


def _marked_pool(*, digests: bool) -> HostPool:
    """Return a pool of shared slots with marks."""
    size = SLOT_BYTES + 4096
    shared = SharedSlots(memoryview(bytearray(SLOTS * size)), size, 0, b"token", marks_at=SLOT_BYTES, digests=digests)
    return HostPool(GEOMETRY, shared)


@pytest.mark.parametrize("digests", [False, True])
def test_fetched_chunk_has_a_mark(*, digests: bool) -> None:
    """A load of the fetched chunk compares the mark. A fetch that fails leaves no mark."""
    pool, tier = _marked_pool(digests=digests), HeldTier()
    assert pool.marks is not None
    pool.slot(1)[:USED] = 7
    pool.marks.write(stamp_of(1, 5))
    with _carrier(tier, pool) as carrier:
        assert _carry(carrier, stores=True, slot=1, stamp=stamp_of(1, 5))
        assert _carry(carrier, stores=False, slot=2, stamp=stamp_of(2, 9))
        assert pool.marks.other_chunk(stamp_of(2, 9)) == ""
        assert pool.marks.damage(stamp_of(2, 9)) == ""
        pool.slot(2)[0] = 8
        assert bool(pool.marks.damage(stamp_of(2, 9))) == digests
        tier.values.clear()
        assert not _carry(carrier, stores=False, slot=2, stamp=stamp_of(2, 11))
        assert all(pool.marks.other_chunk(stamp_of(2, generation)) for generation in (9, 11))


@pytest.mark.parametrize("is_present", [False, True])
def test_slot_that_changes_while_a_tier_writes_it_is_deleted_from_the_tier(*, is_present: bool) -> None:
    """The tier reads the slot's own memory. A value that the tier had before stays."""
    pool, tier = _marked_pool(digests=False), HeldTier()
    assert pool.marks is not None
    pool.marks.write(stamp_of(1, 5))
    with _carrier(tier, pool) as carrier:
        if is_present:
            assert _carry(carrier, stores=True, slot=1, stamp=stamp_of(1, 5))
        before = dict(tier.values)
        tier.hold()
        carrier.carry_out([TierOrder(2, True, 0, 1, 0, 4, CHUNK, 0, "", stamp_of(1, 5))], SPACE, 1)
        assert eventually(lambda: tier.waiting)
        pool.marks.clear(stamp_of(1, 7))
        tier.let_go()
        ended = list[Carried]()
        assert eventually(lambda: ended.extend(carrier.collect()) or ended)  # type: ignore[func-returns-value]
        assert not ended[0].ok
        assert carrier.counters["slot_damaged"] == 1
    assert tier.values == before
    assert pool.marks.take_found() == {1: 5}


def test_slot_that_changes_while_it_is_sealed_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The value's checksum, or its tag, would be that of the other bytes."""
    pool, tier, seal = _marked_pool(digests=False), HeldTier(), Sealer.seal
    marks = pool.marks
    assert marks is not None
    marks.write(stamp_of(1, 5))

    def overwritten(*args: Any) -> tuple[memoryview, memoryview]:
        marks.clear(stamp_of(1, 7))
        return seal(*args)

    monkeypatch.setattr(Sealer, "seal", overwritten)
    with _carrier(tier, pool) as carrier:
        assert not _carry(carrier, stores=True, slot=1, stamp=stamp_of(1, 5))
    assert not tier.values
    assert not tier.dropped, "the tier had the value"
    assert marks.take_found() == {1: 5}


@pytest.mark.parametrize("digests", [False, True])
def test_store_waits_for_a_thread_to_compare_a_slot_only_with_digests(
    monkeypatch: pytest.MonkeyPatch, *, digests: bool
) -> None:
    """Generations are compared at once. Each store also waits for a thread that seals the value."""
    pool, calls = _marked_pool(digests=digests), list[Any]()

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return blocking(*arguments)

    assert pool.marks is not None
    pool.marks.write(stamp_of(1, 5))
    monkeypatch.setattr(slot_writer, "blocking", counted)
    with _carrier(HeldTier(), pool) as carrier:
        assert _carry(carrier, stores=True, slot=1, stamp=stamp_of(1, 5))
    assert len(calls) == 1 + digests


@pytest.mark.parametrize("digests", [False, True])
def test_damaged_chunk_is_not_stored(*, digests: bool) -> None:
    """The value would have a valid checksum, so engines of other nodes would read the damaged bytes."""
    pool, tier = _marked_pool(digests=digests), HeldTier()
    assert pool.marks is not None
    pool.marks.write(stamp_of(1, 5))
    wrong = stamp_of(1, 5 if digests else 3)
    pool.slot(1)[3] = 1
    with _carrier(tier, pool) as carrier:
        assert not _carry(carrier, stores=True, slot=1, stamp=wrong)
        assert carrier.counters["slot_damaged"] == 1
    assert not tier.values
    assert pool.marks.take_found() == {1: 5 if digests else 3}
