"""A carrier outlives failures of tiers. It reports each order once when its thread ends."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence

import anyio
import anyio.to_thread
import pytest

from kvpipe.testing.held_tier import HeldTier
from kvpipe.testing.waiting import WAIT_S
from kvpipe.tiers import carrier, guard
from kvpipe.tiers.base import Get, Read
from kvpipe.tiers.guard import READ
from tests.tiers.test_carrier import rank_of


class _Rude(HeldTier):
    """A tier that raises exceptions that end tasks and threads: first from `open`, later from `read`."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[BaseException] = [asyncio.CancelledError(), SystemExit(1), KeyboardInterrupt()]
        self.reads = list(self.ends)

    async def open(self) -> None:
        if self.ends:
            raise self.ends.pop(0)

    async def read(self, gets: Sequence[Get]) -> list[Read]:
        if self.reads:
            raise self.reads.pop(0)
        return await super().read(gets)


def test_a_tier_ends_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception of a tier is a failure like any other, even if it would end the task or the process."""
    monkeypatch.setattr(guard, "FAULTS_MAX", 10)
    tier = _Rude()
    with rank_of(tier, probe_s=0.001) as rank:
        limit = time.monotonic() + WAIT_S
        while tier.ends or not rank.tiers[0].breakers[READ].allows:
            assert time.monotonic() < limit
            assert rank.carrier.alive
            rank.carrier.probe_now()
            time.sleep(0.001)
        while tier.reads:  # some orders make no read, because the tier is not used just after a failure
            assert time.monotonic() < limit
            rank.carry(stores=False, slot=0)
            assert rank.ended() == [False]
            rank.carrier.loop.put(rank.tiers[0].breakers[READ].ok)
            rank.carrier.probe_now()
        while not rank.tiers[0].breakers[READ].allows:
            assert time.monotonic() < limit
            rank.carrier.probe_now()
        rank.carry(stores=True, slot=0)
        assert rank.ended() == [True]
        rank.carry(stores=False, slot=0)
        assert rank.ended() == [True]


class _Shielded(HeldTier):
    """A tier whose reads write into their buffers until `over` is set, even if they are cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.over = threading.Event(), threading.Event()

    async def read(self, gets: Sequence[Get]) -> list[Read]:
        self.begun.set()
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.over.wait)
        return [Read.MISS for _ in gets]


def test_fetch_is_over_only_when_it_writes_no_more_after_a_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the fetch ended before its read, another chunk could be saved into the slot to which the read still writes."""
    monkeypatch.setattr(carrier, "STOP_S_MAX", 0.05)
    tier = _Shielded()
    with rank_of(tier) as rank:
        rank.carry(stores=False, slot=0)
        assert tier.begun.wait(WAIT_S)
        rank.carrier.shutdown()
        assert rank.carrier.collect() == []
        tier.over.set()
        assert rank.ended() == [False]


def test_lost_carrier_reports_each_order_once() -> None:
    """A lost carrier reports all its orders as failed. An order that ends later is not reported again."""
    tier = HeldTier()
    with rank_of(tier) as rank:
        tier.hold()
        rank.carry(stores=False, slot=0)
        limit = time.monotonic() + WAIT_S
        while not tier.waiting:
            assert time.monotonic() < limit
        rank.carrier._over = True
        assert rank.ended() == [False]
        tier.let_go()
        while rank.carrier.open:
            assert time.monotonic() < limit
        assert rank.carrier.collect() == []
