"""The policy that evicts the least recently used chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvpipe.cache.policy.base import Evictable
from kvpipe.cache.policy.large import Ordered, order


class Lru:
    """Evicts the least recently used chunk."""

    def __init__(self, slots: int = 0) -> None:
        """Start without chunks, for a pool of `slots` slots."""
        self._order: Ordered[Evictable, None] = order(slots)

    def insert(self, chunk: Evictable, *, hit: bool) -> None:  # noqa: ARG002  (LRU treats all uses alike)
        """See `Policy.insert`."""
        self._order[chunk] = None

    def remove(self, chunk: Evictable) -> None:
        """See `Policy.remove`."""
        self._order.pop(chunk, None)

    def refresh(self, chunk: Evictable) -> None:
        """See `Policy.refresh`."""
        if chunk in self._order:
            self._order.move_to_end(chunk)

    def insert_all(self, chunks: Sequence[Evictable], *, hit: bool) -> None:  # noqa: ARG002  (as above)
        """See `BatchPolicy.insert_all`."""
        mine = self._order
        for chunk in chunks:
            mine[chunk] = None

    def remove_all(self, chunks: Sequence[Evictable]) -> None:
        """See `BatchPolicy.remove_all`."""
        mine = self._order
        for chunk in chunks:
            mine.pop(chunk, None)

    def refresh_all(self, chunks: Sequence[Evictable]) -> None:
        """See `BatchPolicy.refresh_all`."""
        mine = self._order
        for chunk in chunks:
            if chunk in mine:
                mine.move_to_end(chunk)

    def victim(self) -> Evictable | None:
        """See `Policy.victim`."""
        return self._order.popitem(last=False)[0] if self._order else None

    def __len__(self) -> int:
        """See `Policy.__len__`."""
        return len(self._order)

    def __contains__(self, chunk: object) -> bool:
        """Whether `chunk` may be evicted."""
        return chunk in self._order

    def __iter__(self) -> Iterator[Evictable]:
        """Yield the chunks that may be evicted, the next victim first."""
        return iter(self._order)
