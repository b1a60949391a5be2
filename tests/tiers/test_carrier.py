"""Tests of a rank's carrier: transfers between slots and tiers, and orders for tiers that fail."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import anyio
import pytest
import torch

from kvpipe.protocol.geometry import Geometry, Group, Layer
from kvpipe.protocol.messages import TierOrder
from kvpipe.testing.held_tier import DictSpec, HeldTier
from kvpipe.testing.waiting import PATIENT, WAIT_S, eventually
from kvpipe.tiers import carrier
from kvpipe.tiers.base import Tier, blocking
from kvpipe.tiers.carrier import Carried, Carrier
from kvpipe.tiers.guard import FAULTS_MAX, READ, WRITE, GuardedTier, guarded
from kvpipe.tiers.parts import RankParts, Share, mark_key
from kvpipe.trace.log import Counters
from kvpipe.trace.recorder import OFF, Recorder
from kvpipe.transfer.pool import HostPool

PAGE = 512
GEOMETRY = Geometry(
    (Group((Layer("a", PAGE), Layer("b", 2 * PAGE)), 32), Group((Layer("c", PAGE),), 32, 64)), 128, 8 * 8192
)
SPACE, CHUNK = "0" * 32, bytes(range(32))


class Rank:
    """The pool and the carrier of one rank, with tiers that the test controls."""

    def __init__(
        self, tiers: Sequence[Tier], shares: tuple[Share, ...] = (), place: int = 0, ranks: int = 1, *, most: int = 1,
        trace: Recorder = OFF, probe_s: float = WAIT_S, **spec: Any,
    ) -> None:  # fmt: skip
        """`spec`: keys of every tier. `most`: `share_ranks_max`. `probe_s`: seconds until a failed tier is probed."""
        self.pool, self.counters, self._ids = HostPool(GEOMETRY), Counters(), 0
        reported = DictSpec.model_validate(PATIENT | spec)
        self.tiers: list[GuardedTier] = guarded([(tier.name, reported, tier) for tier in tiers], (READ, WRITE), trace)
        for one in self.tiers:
            one.probe_s = probe_s
        parts = RankParts(place, ranks, shares, most)
        self.carrier = Carrier(self.tiers, GEOMETRY, self.pool, parts, counters=self.counters, trace=trace)

    def carry(
        self, *, stores: bool, slot: int, units: int = 4, tier: int = 0, group: int = 0, split: int = 0
    ) -> TierOrder:
        """Order the transfer of one chunk between a slot and a tier."""
        self._ids += 1
        order = TierOrder(self._ids, stores, tier, slot, group, units, CHUNK, split)
        self.carrier.carry_out([order], SPACE, 1)
        return order

    def ended(self, count: int = 1) -> list[bool]:
        """Wait until `orders` orders have ended, and return whether each order has succeeded."""
        out: list[Carried] = []
        limit = time.monotonic() + WAIT_S
        while len(out) < count:
            assert time.monotonic() < limit, out
            out += self.carrier.collect()
            time.sleep(0.001)
        return [one.ok for one in out]

    def probe_until(self, true: Callable[[], bool]) -> None:
        """Probe failed tiers until `true` returns true."""
        assert eventually(lambda: self.carrier.probe_now() or true(), every_s=0.01)  # type: ignore[func-returns-value]

    def fill(self, slot: int, seed: int) -> torch.Tensor:
        """Give a slot random bytes, and return a copy of them."""
        slot_bytes = self.pool.slot(slot)
        slot_bytes[:] = torch.randint(0, 256, slot_bytes.shape, dtype=torch.uint8, generator=_seeded(seed))
        return slot_bytes.clone()


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@contextmanager
def rank_of(*tiers: HeldTier, **spec: Any) -> Iterator[Rank]:
    """Yield a rank with `tiers`, or with one tier."""
    made = Rank(tiers or (HeldTier(),), **spec)
    try:
        yield made
        assert not made.carrier.loop.errors
    finally:
        made.carrier.shutdown()


@pytest.mark.parametrize("units", [1, 3, 4])
@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("encrypted", [False, True])
def test_fetched_chunk_equals_stored(units: int, group: int, encrypted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that was stored from one slot is fetched into another byte for byte, and no other page changes."""
    monkeypatch.setenv("TEST_SECRET", base64.b64encode(bytes(32)).decode())
    tier = HeldTier()
    with rank_of(tier, **({"encryption_key_env": "TEST_SECRET"} if encrypted else {})) as rank:
        was, other = rank.fill(0, 1), rank.fill(5, 2)
        rank.carry(stores=True, slot=0, units=units, group=group)
        assert rank.ended() == [True]
        rank.carry(stores=False, slot=5, units=units, group=group)
        assert rank.ended() == [True]
        at = 0
        for layer, offset in zip(GEOMETRY.groups[group].layers, GEOMETRY.layer_offsets[group], strict=True):
            used, size = layer.page_bytes * units, layer.page_bytes * 4
            assert torch.equal(rank.pool.slot(5)[offset : offset + used], was[offset : offset + used])
            if units < 4:
                assert torch.equal(
                    rank.pool.slot(5)[offset + used : offset + size], other[offset + used : offset + size]
                )
            at += used
        (value,) = tier.values.values()
        assert len(value) == 4096 + -(-at // 4096) * 4096
        assert (bytes(was[:PAGE].numpy().tobytes()) in value) == (not encrypted)
        if not encrypted:
            assert not any(value[4096 + at :]), "somebody else's bytes in the padding"


def test_part_of_another_layout_is_not_published() -> None:
    """The carrier reads parts of another layout.

    A part that is missing or cannot be divided is a miss. A part of a wrong length is reported as damaged.
    """
    tier = HeldTier()
    knows, does_not = (Share(4, (1, 1)), Share(4, (1,))), ()
    for split, shares in ((1, knows), (1, does_not), (3, knows)):
        with rank_of(tier, shares=shares, ranks=2) as rank:
            rank.carry(stores=False, slot=0, split=split)
            assert rank.ended() == [False]
            assert not rank.counters.faults
    with rank_of(tier, shares=knows, ranks=1) as rank:
        was = rank.fill(0, 1)
        rank.carry(stores=True, slot=0, split=1)
        assert rank.ended() == [True]
        assert len(tier.values) == 2
        assert mark_key(SPACE, (1, 1)).text in tier.values
    with rank_of(tier, shares=(Share(8, (1, 1)), Share(8, (1,))), ranks=2) as rank:
        rank.carry(stores=False, slot=0, split=1)
        assert rank.ended() == [False]
        assert rank.counters.faults == {"chunk_damaged": 1}
    assert was.any()


def test_marker_is_written_again_after_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 writes its split's marker before the first store in a namespace, and again after `MARK_S` seconds."""
    tier, key = HeldTier(), mark_key(SPACE, (1, 1)).text
    shares = Share(4, (1, 1)), Share(4, (1,))
    with rank_of(tier, shares=shares) as rank:
        for number, seconds in enumerate((60.0, 60.0, 0.0)):
            monkeypatch.setattr(carrier, "MARK_S", seconds)
            rank.carry(stores=True, slot=number, split=1)
            assert rank.ended() == [True]
            assert (tier.values.pop(key, None) is not None) == (number != 1)
    with rank_of(tier, shares=(Share(1, (1, 1)), Share(1, (1,))), ranks=2, place=1) as rank:
        rank.carry(stores=True, slot=0, split=1)
        assert rank.ended() == [True]
        assert mark_key(SPACE, (1, 1)).text not in tier.values


def test_missing_chunk_is_a_miss() -> None:
    """A chunk that the tier does not have is a miss, not a failure of the tier."""
    with rank_of() as rank:
        for _ in range(2 * FAULTS_MAX):
            rank.carry(stores=False, slot=0)
            assert rank.ended() == [False]
        assert rank.tiers[0].breakers[READ].allows
        assert not rank.counters.faults


@pytest.mark.parametrize("trouble", ["damages", "cuts"])
def test_damaged_bytes_are_deleted_and_not_published(trouble: str) -> None:
    """Damaged bytes are never published, and the value is deleted from the tier."""
    tier = HeldTier()
    with rank_of(tier) as rank:
        rank.carry(stores=True, slot=0)
        assert rank.ended() == [True]
        tier.trouble = trouble
        rank.carry(stores=False, slot=1)
        assert rank.ended() == [False]
        assert rank.counters.faults == {"chunk_damaged": 1}
        assert not tier.values


def test_chunk_of_another_length_is_not_published() -> None:
    """A value is damaged if its header has fewer units than requested, even if its length is right."""
    with rank_of() as rank:
        rank.carry(stores=True, slot=0, units=1)
        assert rank.ended() == [True]
        rank.carry(stores=False, slot=1, units=2)
        assert rank.ended() == [False]
        assert rank.counters["chunk_damaged"] == 1


def test_failing_tier_is_not_used_until_a_probe_succeeds() -> None:
    """After several failed reads in a row, reads stop until a probe succeeds. Writes stop in the same way."""
    tier = HeldTier()
    with rank_of(tier) as rank:
        tier.trouble = "full"
        for _ in range(FAULTS_MAX):
            rank.carry(stores=True, slot=0)
            assert rank.ended() == [False]
        assert not rank.tiers[0].breakers[WRITE].allows
        assert rank.tiers[0].breakers[READ].allows
        assert rank.counters.faults == {"tier_full": FAULTS_MAX}, "by its own name: the first of each is logged"
        rank.carry(stores=True, slot=0)
        assert rank.ended() == [False]
        assert rank.counters["tier_full"] == FAULTS_MAX, "it was tried"
        tier.trouble = "none"
        rank.probe_until(lambda: rank.tiers[0].breakers[WRITE].allows)
        rank.carry(stores=True, slot=0)
        assert rank.ended() == [True]
        assert rank.tiers[0].breakers[WRITE].state.name == "CLOSED"


def test_a_tier_that_hangs() -> None:
    """Orders for a hanging tier, and orders that wait for its lanes, fail within their time limits.

    Then their slots are free.
    """
    tier = HeldTier()
    with rank_of(tier, lanes=1) as rank:
        rank.carry(stores=True, slot=0)
        assert rank.ended() == [True]
        patience_s, rank.tiers[0].timeout_s = rank.tiers[0].timeout_s, 0.02
        tier.hold()
        for slot in range(3):
            rank.carry(stores=False, slot=slot)
        assert rank.ended(3) == [False] * 3
        assert rank.carrier.open == 0
        assert not rank.tiers[0].breakers[READ].allows
        assert rank.carrier.unreadable == frozenset({0})
        rank.tiers[0].timeout_s = patience_s
        tier.let_go()
        rank.probe_until(lambda: not rank.carrier.unreadable)
        rank.carry(stores=False, slot=0)
        assert rank.ended() == [True]


def test_a_queue_that_is_too_long() -> None:
    """If no lane becomes free in time, an order fails. This failure is not counted as a failure of the tier."""
    tier = HeldTier()
    with rank_of(tier, lanes=1) as rank:
        patience_s, rank.tiers[0].timeout_s = rank.tiers[0].timeout_s, 0.03
        taken = rank.carrier._turns[0][READ]
        rank.carrier.loop.put(lambda: taken.acquire_on_behalf_of_nowait("somebody"))
        rank.carry(stores=False, slot=0)
        assert rank.ended() == [False]
        assert rank.tiers[0].breakers[READ].allows
        rank.carrier.loop.put(lambda: taken.release_on_behalf_of("somebody"))
        rank.tiers[0].timeout_s = patience_s
        rank.carry(stores=True, slot=0)
        assert rank.ended() == [True]
        rank.carry(stores=False, slot=0)
        assert rank.ended() == [True]


def test_an_order_that_no_rank_can_carry() -> None:
    """An order for a tier that the rank does not have fails. The rank carries out its other orders."""
    with rank_of() as rank:
        rank.carry(stores=False, slot=0, tier=7)
        assert rank.ended() == [False]
        rank.carry(stores=True, slot=0)
        assert rank.ended() == [True]


def test_values_of_another_encryption_key_are_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of another encryption key, or without encryption, are misses. No engine deletes such values as damaged."""
    tier = HeldTier()
    for i in range(2):
        monkeypatch.setenv(f"TEST_SECRET_{i}", base64.b64encode(bytes([i]) * 32).decode())
    specs: list[dict[str, Any]] = [{}, {"encryption_key_env": "TEST_SECRET_0"}, {"encryption_key_env": "TEST_SECRET_1"}]
    for i, spec in enumerate(specs):
        with rank_of(tier, **spec) as rank:
            rank.carry(stores=False, slot=0)
            assert rank.ended() == [False]
            assert not rank.counters.faults
            rank.carry(stores=True, slot=0)
            assert rank.ended() == [True]
        assert len(tier.values) == i + 1


def test_shutdown_completes_stores_in_flight() -> None:
    """The engine stops while chunks are being stored. These chunks still arrive in the tier."""
    tier = HeldTier()
    with rank_of(tier) as rank:
        for _ in range(4):
            rank.carry(stores=True, slot=0)
    assert len(tier.values) == 1
    assert rank.ended(4) == [True] * 4


def test_carrier_without_its_thread_fails_each_order_once() -> None:
    """If the carrier's thread has ended, the carrier reports each order as failed, once."""
    tier = HeldTier()
    with rank_of(tier) as rank:
        tier.hold()
        rank.carry(stores=False, slot=0)
        rank.carrier.loop.stop()
        rank.carry(stores=False, slot=1)
        assert rank.ended(2) == [False, False]
        assert rank.carrier.collect() == []
        tier.let_go()


def test_tiers_do_not_wait_for_each_other() -> None:
    """A tier that hangs delays no transfer to or from another tier."""
    slow, quick = HeldTier("slow"), HeldTier("quick")
    with rank_of(slow, quick) as rank:
        slow.hold()
        for _ in range(20):
            rank.carry(stores=True, slot=0, tier=0)
        for stores in (True, False):
            rank.carry(stores=stores, slot=1, tier=1)
            assert rank.ended() == [True]
        slow.let_go()
        assert rank.ended(20) == [True] * 20


@pytest.mark.parametrize("after_s", [0.0, 0.00005, 0.01])
def test_a_cancelled_thread_is_asked_to_stop(after_s: float) -> None:
    """However early a blocking call is cancelled: when the call returns, its thread was asked to stop and has ended."""

    async def play() -> None:
        for _ in range(50):
            begun, stopped, ended = threading.Event(), threading.Event(), threading.Event()

            def work(begun: Any = begun, stopped: Any = stopped, ended: Any = ended) -> None:
                begun.set()
                assert stopped.wait(WAIT_S)
                ended.set()

            with anyio.move_on_after(after_s):
                await blocking(limiter, work, stopped.set)
            assert begun.is_set() == ended.is_set()

    limiter = anyio.CapacityLimiter(2)
    anyio.run(play)
