"""How fast a tier is read."""

from __future__ import annotations

from collections import deque
from typing import Final

PERIODS: Final = 15
PERIOD_S_MAX: Final = 1.0
"""A period in which something is read ends with a read after so long, even if others go on."""


class ReadRate:
    """Bytes per second of the time in which any value is being read: of the last periods, by half of their bytes.

    A read that takes long once, as the first of a connection may, says nothing about the others. The loop of a tier's
    thread measures; any thread may read `bytes_per_s`, a number that is replaced.
    """

    def __init__(self) -> None:
        """Nothing has been read yet: `bytes_per_s` is 0."""
        self.bytes_per_s = 0.0
        self._periods: deque[tuple[float, int]] = deque(maxlen=PERIODS)  # bytes per second, and bytes
        self._open, self._since_s = 0, 0.0
        self._bytes = 0

    def begin(self, now_s: float) -> None:
        """A value is being read from now on."""
        if not self._open:
            self._since_s, self._bytes = now_s, 0
        self._open += 1

    def end(self, now_s: float, size: int) -> None:
        """One has been read: `size` bytes; 0 if it was not there, or could not be read."""
        self._open -= 1
        self._bytes += size
        took_s = now_s - self._since_s
        if self._bytes and took_s > 0 and (not self._open or took_s >= PERIOD_S_MAX):
            self._periods.append((self._bytes / took_s, self._bytes))
            self._since_s, self._bytes = now_s, 0
            self.bytes_per_s = self._median()

    def _median(self) -> float:
        """Return a rate that half of the bytes have reached, and half have not exceeded."""
        half = sum(size for _, size in self._periods) / 2
        for rate, size in sorted(self._periods):
            half -= size
            if half <= 0:
                return rate
        return 0.0
