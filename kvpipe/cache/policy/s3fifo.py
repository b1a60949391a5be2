"""S3-FIFO: a scan of one-time prompts cannot evict chunks that are used again.

Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023. A small queue (10 % of the cache) holds new
chunks, and a main queue holds chunks that were hit. A ghost list has the identities of chunks that the small queue has
evicted. If such a chunk is inserted again, it goes into the main queue.
"""

from __future__ import annotations

from collections.abc import Hashable

from kvpipe.cache.policy.base import Evictable
from kvpipe.cache.policy.large import Ordered, order

SMALL_SHARE = 0.10  # share of the slots, as in the paper
FREQ_MAX = 3  # two bits, as in the paper


class S3Fifo:
    """Evicts new chunks without a hit before chunks with a hit."""

    def __init__(self, slots: int) -> None:
        """Start without chunks. `slots`, the number of the pool's slots, limits the ghost list and the small queue."""
        self._small: Ordered[Evictable, int] = order(slots)
        self._main: Ordered[Evictable, int] = order(slots)
        self._ghost: Ordered[Hashable, None] = order(slots)
        self._small_max = max(1, int(slots * SMALL_SHARE))
        self._ghost_max = max(1, slots)

    def insert(self, chunk: Evictable, *, hit: bool) -> None:
        """See `Policy.insert`. A chunk that was loaded is inserted into the main queue."""
        ghost = chunk.identity in self._ghost
        if ghost:
            del self._ghost[chunk.identity]
        if hit or ghost:
            self._main[chunk] = int(hit)
        else:
            self._small[chunk] = 0

    def remove(self, chunk: Evictable) -> None:
        """See `Policy.remove`."""
        self._small.pop(chunk, None)
        self._main.pop(chunk, None)

    def refresh(self, chunk: Evictable) -> None:
        """See `Policy.refresh`."""
        for queue in (self._small, self._main):
            if chunk in queue:
                queue.move_to_end(chunk)

    def victim(self) -> Evictable | None:
        """See `Policy.victim`."""
        if self._small and (len(self._small) > self._small_max or not self._main):
            chunk, _ = self._small.popitem(last=False)
            self._ghost[chunk.identity] = None
            if len(self._ghost) > self._ghost_max:
                self._ghost.popitem(last=False)
            return chunk
        while self._main:
            chunk, freq = self._main.popitem(last=False)
            if freq == 0:
                return chunk
            self._main[chunk] = min(freq, FREQ_MAX) - 1
        return self._small.popitem(last=False)[0] if self._small else None

    def __len__(self) -> int:
        """See `Policy.__len__`."""
        return len(self._small) + len(self._main)
