"""Chunks that are in memory for requests that have not come: were they of use?

Those of announced resumes take a part of the pool that is the larger the more of them were of use before. So clients
that announce what never comes cost the others no more than a pool that is smaller by that part.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvpipe.cache.catalog import Chunk
    from kvpipe.trace.log import Counters

ANNOUNCED_SHARE: Final = 0.5
"""Of the pool, at most, that is in memory for announced resumes and was not used since."""
FIRST: Final = 1 / 64
"""Of the pool: as if so much had been of use before anything is known."""

BROUGHT, ANNOUNCED = 1, 2


class Ahead:
    """One per catalog. `chunks`: what is in memory for nobody yet; not to be changed. `announced`: how many of them."""

    def __init__(self, counters: Counters) -> None:
        """There is nothing."""
        self.chunks: dict[Chunk, int] = {}
        self._counters = counters
        self.announced = 0
        self._used = self._wasted = 0.0  # of what was announced, the older for less

    def brought(self, chunk: Chunk) -> None:
        """A chunk that can be found was brought from a tier, and no request waits for it."""
        self.chunks[chunk] = self.chunks.get(chunk, 0) | BROUGHT
        self._counters["chunks_prefetched"] += 1

    def keep(self, chunks: Iterable[Chunk]) -> None:
        """These are held, or put behind others, for an announced resume."""
        for chunk in chunks:
            kind = self.chunks.get(chunk, 0)
            if not kind & ANNOUNCED:
                self.chunks[chunk] = kind | ANNOUNCED
                self.announced += 1

    def count_anew(self, chunks: Iterable[Chunk]) -> None:
        """Of these, what is there for an announced resume is not any more."""
        for chunk in chunks:
            kind = self.chunks.get(chunk, 0)
            if kind & ANNOUNCED:
                self.announced -= 1
                if kind & BROUGHT:
                    self.chunks[chunk] = BROUGHT
                else:
                    del self.chunks[chunk]

    def used(self, chunks: Iterable[Chunk]) -> None:
        """A request has come for these, as far as they are among `chunks`."""
        for chunk in chunks:
            kind = self.chunks.pop(chunk, 0)
            if kind & BROUGHT:
                self._counters["prefetch_used"] += 1
            if kind & ANNOUNCED:
                self.announced -= 1
                self._used += 1

    def dropped(self, chunk: Chunk) -> None:
        """One of `chunks` cannot be found any more, and nobody has come for it."""
        kind = self.chunks.pop(chunk)
        if kind & BROUGHT:
            self._counters["prefetch_wasted"] += 1
        if kind & ANNOUNCED:
            self.announced -= 1
            self._wasted += 1

    def room(self, slots: int) -> int:
        """Return how many more chunks of a pool of `slots` slots may be there for announced resumes."""
        if self._used + self._wasted > slots:
            self._used, self._wasted = self._used / 2, self._wasted / 2
        first = max(1.0, slots * FIRST)
        trust = (self._used + first) / (self._used + self._wasted + first)
        return max(0, max(1, int(slots * ANNOUNCED_SHARE * trust)) - self.announced)
