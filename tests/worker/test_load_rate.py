"""The rate of loads over time: both of its sums are halved together, so that old copies count less and less."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvpipe.worker.copies import RATE_BYTES, LoadRate

SIZE, TOOK_NS = RATE_BYTES // 4, 1_000_000
RATE = SIZE * 1e9 / TOOK_NS


class Bus:
    """A bus on which layers land one after the other, each queued before the layer before it has landed."""

    def __init__(self) -> None:
        """Let the first layer land, which measures no speed."""
        self.rate, self._now_ns, self._queued_ns = LoadRate(), TOOK_NS, 0
        self.land(TOOK_NS)

    def land(self, took_ns: int) -> float:
        """Let a layer land that took so long, and return the rate."""
        self._now_ns, self._queued_ns = self._now_ns + took_ns, self._queued_ns + 1
        ticket: Any = SimpleNamespace(begun_ns=self._queued_ns, done_ns=self._now_ns)
        self.rate.landed(ticket, SIZE)
        return self.rate.bytes_per_s


def test_rate_of_an_even_bus_stays_when_its_sums_are_halved() -> None:
    """A rate that halves one of its sums only is wrong from the first halving on, by half and more."""
    bus = Bus()
    assert [bus.land(TOOK_NS) for _ in range(40)] == pytest.approx([RATE] * 40)


def test_rate_follows_a_bus_that_becomes_faster() -> None:
    """After four times the bytes of its window, the copies before count for less than a tenth."""
    bus = Bus()
    for _ in range(200):
        bus.land(TOOK_NS)
    for _ in range(16):
        bus.land(TOOK_NS // 2)
    assert bus.rate.bytes_per_s == pytest.approx(2 * RATE, rel=0.1)
