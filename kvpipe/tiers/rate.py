"""The measured rate of reads from a tier."""

from __future__ import annotations

from collections import deque
from typing import Final

PERIODS: Final = 15
PERIOD_S_MAX: Final = 1.0
"""If a period is longer than this number of seconds, it ends when a read ends, even if other reads are in progress."""


class ReadRate:
    """The median read rate of the last `PERIODS` periods, weighted by the bytes of each period.

    During a period, at least one read is always in progress. A median ignores a single slow read, such as the first
    read of a connection. The loop of a tier's thread measures the rate. Any thread may read `bytes_per_s`, because the
    loop replaces the number in one assignment.
    """

    def __init__(self) -> None:
        """Start with a `bytes_per_s` of 0, because nothing has been read yet."""
        self.bytes_per_s = 0.0
        self._periods: deque[tuple[float, int]] = deque(maxlen=PERIODS)  # (bytes per second, bytes) of each period
        self._open, self._since_s = 0, 0.0
        self._bytes = 0

    def begin(self, now_s: float) -> None:
        """Record that a read begins at `now_s`."""
        if not self._open:
            self._since_s, self._bytes = now_s, 0
        self._open += 1

    def end(self, now_s: float, size: int) -> None:
        """Record that a read of `size` bytes ends at `now_s`. `size` is 0 if no value was read."""
        self._open -= 1
        self._bytes += size
        took_s = now_s - self._since_s
        if self._bytes and took_s > 0 and (not self._open or took_s >= PERIOD_S_MAX):
            self._periods.append((self._bytes / took_s, self._bytes))
            self._since_s, self._bytes = now_s, 0
            self.bytes_per_s = self._median()

    def _median(self) -> float:
        """Return the rate that is the median of all periods, each weighted by its bytes."""
        half = sum(size for _, size in self._periods) / 2
        for rate, size in sorted(self._periods):
            half -= size
            if half <= 0:
                return rate
        return 0.0
