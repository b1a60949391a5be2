"""Durations for histograms. Any thread adds durations. The engine's thread takes all durations with its metrics."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

MEMORY: Final = "memory"
"""The label of durations of host memory. Durations of a tier have the tier's name as label."""
KEPT_MAX: Final = 10_000
"""The largest number of durations that one histogram and label keep until `take`.

The oldest durations are dropped first.
"""

BUCKETS_S: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
"""The upper bounds of the buckets of every histogram, in seconds."""

LOOKUP_WAIT, LOOKUP, LOAD, STORE = "lookup_wait_seconds", "lookup_seconds", "load_seconds", "store_seconds"
"""The names of the histograms."""
_OF_USE: Final = {"find": LOOKUP, "read": LOAD, "write": STORE}

Taken = dict[str, dict[str, list[float]]]
"""Durations in seconds, by histogram and by label value. The label value "" stands for a histogram without label."""


class Durations:
    """The durations that one side has measured and not yet reported."""

    def __init__(self) -> None:
        """Start without durations."""
        self._new: dict[tuple[str, str], deque[float]] = {}

    def of(self, histogram: str, label: str = "") -> Callable[[float], object]:
        """Return a function that adds a duration in seconds.

        Any thread may call this function, which appends to a deque.
        """
        return self._new.setdefault((histogram, label), deque(maxlen=KEPT_MAX)).append

    def of_tier(self, tier: str, use: str) -> Callable[[float], object]:
        """Return a function that adds the seconds of a call of `tier`. `use` is one of `kvpipe.tiers.guard.USES`."""
        return self.of(_OF_USE[use], tier)

    def take(self) -> Taken:
        """Return all durations since the last call. Only one thread may call this method."""
        out: Taken = {}
        for (histogram, label), new in self._new.items():
            if new:
                out.setdefault(histogram, {})[label] = [new.popleft() for _ in range(len(new))]
        return out
