"""Tests of the measured rate of loads.

The sums of bytes and of time are halved together from time to time, so that older copies count less.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvpipe.worker.copies import RATE_BYTES, SLOWER_SHARE, LoadRate

SIZE, TOOK_NS = RATE_BYTES // 4, 1_000_000
RATE = SIZE * 1e9 / TOOK_NS


class Bus:
    """A bus on which layers land one after the other, and each layer is queued before the previous layer has landed."""

    def __init__(self) -> None:
        """Let the first layer land. The first landing gives no measurement."""
        self.rate, self.now_ns, self._queued_ns = LoadRate(), TOOK_NS, 0
        self.land(TOOK_NS)

    def land(self, took_ns: int) -> float:
        """Let a layer land that took `took_ns` nanoseconds, and return the rate."""
        self.now_ns, self._queued_ns = self.now_ns + took_ns, self._queued_ns + 1
        ticket: Any = SimpleNamespace(begun_ns=self._queued_ns, done_ns=self.now_ns)
        self.rate.landed(ticket, SIZE)
        return self.rate.bytes_per_s


def test_rate_of_an_even_bus_stays_when_its_sums_are_halved() -> None:
    """If only one of the two sums (bytes, nanoseconds) were halved, the rate would be wrong by a third or more."""
    bus = Bus()
    assert [bus.land(TOOK_NS) for _ in range(40)] == pytest.approx([RATE] * 40)


def test_rate_follows_a_bus_that_becomes_faster() -> None:
    """After copies of four times `RATE_BYTES` bytes, earlier copies change the rate by less than a tenth."""
    bus = Bus()
    for _ in range(200):
        bus.land(TOOK_NS)
    for _ in range(16):
        bus.land(TOOK_NS // 2)
    assert bus.rate.bytes_per_s == pytest.approx(2 * RATE, rel=0.1)


def test_rate_of_copies_that_are_alone_follows_the_fastest() -> None:
    """A copy that took longer because it was queued behind compute lowers the rate only slightly."""
    rate, now_ns = LoadRate(), 0
    found = []
    for took_ns in (TOOK_NS, TOOK_NS // 2, 10 * TOOK_NS):
        ticket: Any = SimpleNamespace(begun_ns=now_ns + TOOK_NS, done_ns=now_ns + TOOK_NS + took_ns)
        rate.landed(ticket, SIZE, alone=True)
        found.append(rate.bytes_per_s / RATE)
        now_ns = ticket.done_ns
    assert found == pytest.approx([1, 2, 2 - 1.9 * SLOWER_SHARE])


def test_rate_is_right_when_the_landings_of_several_loads_are_noticed_together() -> None:
    """Three loads were queued one after the other. The landings of the first and second load are noticed late."""
    rate = LoadRate()
    for done_ns in (2 * TOOK_NS, 2 * TOOK_NS + TOOK_NS // 20, 3 * TOOK_NS):
        ticket: Any = SimpleNamespace(begun_ns=TOOK_NS // 1000, done_ns=done_ns)
        rate.landed(ticket, SIZE, alone=True)
    assert rate.bytes_per_s == pytest.approx(RATE, rel=0.01)


def test_rate_of_a_load_that_was_queued_behind_layers_counts_from_their_landing() -> None:
    """Layers of another load landed while this load was queued.

    The time of this load counts from the last of these landings.
    """
    bus = Bus()
    ticket: Any = SimpleNamespace(begun_ns=bus.now_ns - 1, done_ns=bus.now_ns + TOOK_NS)
    bus.rate.landed(ticket, SIZE, alone=True)
    assert bus.rate.bytes_per_s == pytest.approx(RATE)
