"""How fast a tier is read."""

from __future__ import annotations

from typing import Final

RATE_S: Final = 2.0
"""Of the time in which something is read, the rate is measured over so much; then the sums are halved."""


class ReadRate:
    """Bytes per second of the time in which at least one value is being read."""

    def __init__(self) -> None:
        """Nothing has been read yet: `bytes_per_s` is 0."""
        self.bytes_per_s = 0.0
        self._open, self._since_s = 0, 0.0
        self._bytes = self._busy_s = 0.0

    def begin(self, now_s: float) -> None:
        """A value is being read from now on."""
        if not self._open:
            self._since_s = now_s
        self._open += 1

    def end(self, now_s: float, size: int) -> None:
        """One has been read: `size` bytes; 0 if it was not there, or could not be read."""
        self._open -= 1
        self._busy_s += now_s - self._since_s
        self._since_s = now_s
        self._bytes += size
        if self._busy_s and self._bytes:
            self.bytes_per_s = self._bytes / self._busy_s
        if self._busy_s > RATE_S:
            self._bytes /= 2
            self._busy_s /= 2
