"""An engine's uses of chunks, on their way to the holder's eviction policy."""

from __future__ import annotations

from collections import deque
from typing import Final

import msgspec

from kvpipe.node.messages import USES_BYTES_MAX, Use
from kvpipe.node.replica import STAMP_BYTES

WAITING_BYTES_MAX: Final = 1 << 20
"""The largest size of the stamps that wait for a holder. If more uses wait, the oldest uses are dropped."""


class UseQueue:
    """The uses that the holder has not got yet, the oldest first. The holder gets them after the chunks' reports."""

    def __init__(self) -> None:
        """Begin without a use."""
        self._waiting: deque[Use] = deque()
        self._bytes = 0

    def add(self, use: Use) -> None:
        """Add a use. A use without chunks is ignored."""
        if not use.stamps:
            return
        self._waiting.append(use)
        self._bytes += len(use.stamps)
        while self._bytes > WAITING_BYTES_MAX and len(self._waiting) > 1:
            self._bytes -= len(self._waiting.popleft().stamps)

    def take(self) -> tuple[Use, ...]:
        """Return the uses of the next batch, which are removed. A use with too many chunks is divided."""
        taken, room = list[Use](), USES_BYTES_MAX
        while self._waiting and room > 0:
            use = self._waiting.popleft()
            if len(use.stamps) > room:
                rest = msgspec.structs.replace(use, stamps=use.stamps[room:])
                use = msgspec.structs.replace(use, stamps=use.stamps[:room], more=True)
                self._waiting.appendleft(rest)
            room -= max(STAMP_BYTES, len(use.stamps))
            self._bytes -= len(use.stamps)
            taken.append(use)
        return tuple(taken)

    def __len__(self) -> int:
        """Return the number of waiting uses."""
        return len(self._waiting)
