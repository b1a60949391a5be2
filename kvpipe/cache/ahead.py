"""Chunks that are in memory for requests that have not come: were they of use?

Those of announced resumes take a part of the pool that is the larger the more of them were of use before. So clients
that announce what never comes cost the others no more than a pool that is smaller by that part. With quotas each has a
part of its own, of what it may hold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvpipe.cache.catalog import Chunk
    from kvpipe.cache.tenants import Tenant
    from kvpipe.trace.log import Counters

ANNOUNCED_SHARE: Final = 0.5
"""Of the pool, at most, that is in memory for announced resumes and was not used since."""
FIRST: Final = 1 / 64
"""Of the pool: as if so much had been of use before anything is known."""
DOUBT: Final = 1 / 16
"""Of the pool: as if so much had been of no use."""

BROUGHT, ANNOUNCED = 1, 2


class Part:
    """What is in memory for announced resumes of one account: `announced` chunks."""

    __slots__ = ("_used", "_wasted", "announced")

    def __init__(self) -> None:
        """There is nothing."""
        self.announced = 0
        self._used = self._wasted = 0.0  # the older for less

    def over(self, *, used: bool) -> None:
        """One of the chunks was of use, or cannot be found any more."""
        self.announced -= 1
        if used:
            self._used += 1
        else:
            self._wasted += 1

    def room(self, slots: int) -> int:
        """Return how many more chunks there may be, of an account that may hold `slots` slots.

        By the square of the share that was of use: some of what is announced in vain is used by others all the same.
        """
        if self._used + self._wasted > slots:
            self._used, self._wasted = self._used / 2, self._wasted / 2
        first = max(1.0, slots * FIRST)
        trust = (self._used + first) / (self._used + self._wasted + first + slots * DOUBT)
        return max(0, max(1, int(slots * ANNOUNCED_SHARE * trust**2)) - self.announced)


class Ahead:
    """One per catalog. `chunks`: what is in memory for nobody yet; not to be changed. `parts`: by account."""

    def __init__(self, counters: Counters, account: Callable[[Tenant], object]) -> None:
        """There is nothing. `account(tenant)` returns whose slots the tenant's chunks take: something hashable."""
        self.chunks: dict[Chunk, int] = {}
        self.parts = defaultdict[object, Part](Part)
        self._counters, self._account = counters, account

    def part(self, tenant: Tenant) -> Part:
        """Return that of a tenant's account."""
        return self.parts[self._account(tenant)]

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
                self.part(chunk.tenant).announced += 1

    def count_anew(self, chunks: Iterable[Chunk]) -> None:
        """Of these, what is there for an announced resume is not any more."""
        for chunk in chunks:
            kind = self.chunks.get(chunk, 0)
            if kind & ANNOUNCED:
                self.part(chunk.tenant).announced -= 1
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
                self.part(chunk.tenant).over(used=True)

    def dropped(self, chunk: Chunk) -> None:
        """One of `chunks` was evicted, and nobody has come for it."""
        kind = self.chunks.pop(chunk)
        if kind & BROUGHT:
            self._counters["prefetch_wasted"] += 1
        if kind & ANNOUNCED:
            self.part(chunk.tenant).over(used=False)

    def forget(self, chunk: Chunk) -> None:
        """A reset has forgotten one of `chunks`: that is nobody's fault who has announced it, and no waste."""
        if self.chunks.pop(chunk) & ANNOUNCED:
            self.part(chunk.tenant).announced -= 1
