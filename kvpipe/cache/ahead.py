"""Counts the chunks that are in memory ahead of requests, and the number of these chunks that requests have used.

A client's hint can announce that a prompt will be resumed, and the prompt's chunks are then held in memory. Such chunks
may take a limited share of the pool's slots. The limit grows with the share of announced chunks that requests have
used. If a client announces requests that never come, other clients lose at most these slots. With quotas, each quota
has its own limit, a share of the slots that the quota may hold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvpipe.cache.chunks import Chunk
    from kvpipe.cache.tenants import Tenant
    from kvpipe.trace.log import Counters

ANNOUNCED_SHARE: Final = 0.5
"""The largest share of the pool that announced resumes may take before any request has used their chunks."""
FIRST: Final = 1 / 64
"""The number of used chunks with which an account starts, as a share of the pool's slots."""
DOUBT: Final = 1 / 16
"""The number of wasted chunks with which an account starts, as a share of the pool's slots."""

BROUGHT, ANNOUNCED = 1, 2


class AccountAhead:
    """The chunks in memory for announced resumes of one account. `announced` is the number of these chunks."""

    __slots__ = ("_used", "_wasted", "announced")

    def __init__(self) -> None:
        """Start without chunks."""
        self.announced = 0
        self._used = self._wasted = 0.0  # numbers of chunks; older chunks count less

    def over(self, *, used: bool) -> None:
        """Remove one chunk. `used` says that a request has used the chunk. Otherwise the chunk was evicted unused."""
        self.announced -= 1
        if used:
            self._used += 1
        else:
            self._wasted += 1

    def room(self, slots: int) -> int:
        """Return how many more chunks may be added, for an account that may hold `slots` slots.

        The limit is proportional to the square of the used share. A limit proportional to the used share itself would
        be too high. The reason is that other requests use some of the announced chunks even if the announced request
        never comes.
        """
        if self._used + self._wasted > slots:
            self._used, self._wasted = self._used / 2, self._wasted / 2
        first = max(1.0, slots * FIRST)
        trust = (self._used + first) / (self._used + self._wasted + first + slots * DOUBT)
        return max(0, max(1, int(slots * ANNOUNCED_SHARE * trust**2)) - self.announced)


class Ahead:
    """The chunks that one catalog holds ahead of requests.

    `chunks` has the chunks that no request has used yet. Callers must not change `chunks`. `by_account` has an
    `AccountAhead` for each account.
    """

    def __init__(self, counters: Counters, account: Callable[[Tenant], object]) -> None:
        """Start without chunks.

        `account(tenant)` returns the account whose slots the tenant's chunks take, as a hashable object.
        """
        self.chunks: dict[Chunk, int] = {}
        self.by_account = defaultdict[object, AccountAhead](AccountAhead)
        self._counters, self._account = counters, account

    def of_account(self, tenant: Tenant) -> AccountAhead:
        """Return the counts of a tenant's account."""
        return self.by_account[self._account(tenant)]

    def brought(self, chunk: Chunk) -> None:
        """Count a chunk that was fetched from a tier and can be found, but for which no request waits."""
        self.chunks[chunk] = self.chunks.get(chunk, 0) | BROUGHT
        self._counters["chunks_prefetched"] += 1

    def keep(self, chunks: Iterable[Chunk]) -> None:
        """Count `chunks` as held for announced resumes: they were fetched, or are protected from early eviction."""
        for chunk in chunks:
            kind = self.chunks.get(chunk, 0)
            if not kind & ANNOUNCED:
                self.chunks[chunk] = kind | ANNOUNCED
                self.of_account(chunk.tenant).announced += 1

    def count_anew(self, chunks: Iterable[Chunk]) -> None:
        """Stop counting `chunks` as held for announced resumes."""
        for chunk in chunks:
            kind = self.chunks.get(chunk, 0)
            if kind & ANNOUNCED:
                self.of_account(chunk.tenant).announced -= 1
                if kind & BROUGHT:
                    self.chunks[chunk] = BROUGHT
                else:
                    del self.chunks[chunk]

    def used(self, chunks: Iterable[Chunk]) -> None:
        """A request uses `chunks`. Count each of them that was in memory ahead of requests as used."""
        for chunk in chunks:
            kind = self.chunks.pop(chunk, 0)
            if kind & BROUGHT:
                self._counters["prefetch_used"] += 1
            if kind & ANNOUNCED:
                self.of_account(chunk.tenant).over(used=True)

    def dropped(self, chunk: Chunk) -> None:
        """Count `chunk`, one of `self.chunks`, as wasted, because it was evicted before any request used it."""
        kind = self.chunks.pop(chunk)
        if kind & BROUGHT:
            self._counters["prefetch_wasted"] += 1
        if kind & ANNOUNCED:
            self.of_account(chunk.tenant).over(used=False)

    def forget(self, chunk: Chunk) -> None:
        """Remove `chunk`, one of `self.chunks`, after a reset.

        The chunk is not counted as wasted, because the reset, and not a wrong announcement, removed the chunk.
        """
        if self.chunks.pop(chunk) & ANNOUNCED:
            self.of_account(chunk.tenant).announced -= 1
