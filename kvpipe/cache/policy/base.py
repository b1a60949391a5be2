"""The eviction protocol. A policy sees only chunks that are evictable now: held ones are taken out and put back."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol, runtime_checkable

from kvpipe.cache.hints import Hint


class Evictable(Protocol):
    """What a policy may look at."""

    @property
    def identity(self) -> Hashable:
        """What the chunk holds: equal for the same content, also after an eviction."""

    @property
    def before(self) -> Hashable:
        """The identity of the chunk that it follows in its prefix; falsy for the first, and where it is not known."""


class Policy(Protocol):
    """Decides which chunk goes when a slot is needed. Every operation is O(1) amortised."""

    def insert(self, chunk: Evictable, *, hit: bool) -> None:
        """A chunk became evictable: first written (`hit` False), or given back after a load (`hit` True)."""

    def remove(self, chunk: Evictable) -> None:
        """A chunk is held, or gone. Unknown chunks are ignored."""

    def refresh(self, chunk: Evictable) -> None:
        """A chunk was of use without being loaded: order among equals, not evidence of popularity."""

    def victim(self) -> Evictable | None:
        """Take out the next chunk to evict, or None when nothing is evictable."""

    def __len__(self) -> int:
        """How many chunks are evictable."""


@runtime_checkable
class SessionPolicy(Policy, Protocol):
    """A policy that wants to know when chunks are used, and when a request is over. It has no clock of its own."""

    def request(self, now_s: float, *, over: bool) -> None:
        """The calls that follow are of one request, at `now_s`: seconds of a clock that never goes back.

        `over`: it has ended. The refreshes that follow are of all its chunks, the last one first; what is inserted is a
        save of its that has landed since.
        """


@runtime_checkable
class BatchPolicy(Policy, Protocol):
    """A policy that takes a request's chunks at once. Each call is as its namesake of each chunk, in this order."""

    def insert_all(self, chunks: Sequence[Evictable], *, hit: bool) -> None:
        """These became evictable, the last chunk of the prefix first."""

    def remove_all(self, chunks: Sequence[Evictable]) -> None:
        """These are held, or gone; the first chunk of the prefix first."""

    def refresh_all(self, chunks: Sequence[Evictable]) -> None:
        """These were of use, the last chunk of the prefix first."""


@runtime_checkable
class RememberingPolicy(Policy, Protocol):
    """A policy that remembers what is held, and so wants to know what does not come back."""

    def dropped(self, chunk: Evictable) -> None:
        """A chunk that was removed is gone, and not by `victim`. Unknown chunks are ignored."""


@runtime_checkable
class HintedPolicy(Policy, Protocol):
    """A policy that takes hints. They may be wrong, also by intent: it decides how far to believe them."""

    def hint(self, chunk: Evictable, hint: Hint) -> None:
        """A client's hint is for this chunk, whether it may go now or is held. Unknown chunks are ignored."""
