"""The eviction protocol. A policy sees only chunks that are evictable now: held ones are taken out and put back."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol, runtime_checkable

from kvpipe.cache.hints import Hint


class Evictable(Protocol):
    """What a policy may read of a chunk, and one attribute that it may write."""

    place: int
    """The policy's own, and read by nobody else: where it keeps the chunk. 0 until the policy sets it."""

    @property
    def identity(self) -> Hashable:
        """Identifies the chunk's content: equal for the same content, also after an eviction."""

    @property
    def before(self) -> Hashable:
        """The `identity` of the chunk before it in the prefix; falsy for the first, and if it is not known."""


class Policy(Protocol):
    """Decides which chunk goes when a slot is needed. Every operation is O(1) amortised."""

    def insert(self, chunk: Evictable, *, hit: bool) -> None:
        """`chunk` became evictable: it was written (`hit` False), or released after a load (`hit` True)."""

    def remove(self, chunk: Evictable) -> None:
        """`chunk` is not evictable any more: it is held, or gone. Unknown chunks are ignored."""

    def refresh(self, chunk: Evictable) -> None:
        """`chunk` was used without being loaded. It orders equals; it is no evidence of popularity."""

    def victim(self) -> Evictable | None:
        """Remove and return the next chunk to evict, or None if none is evictable."""

    def __len__(self) -> int:
        """Return how many chunks are evictable."""


@runtime_checkable
class SessionPolicy(Policy, Protocol):
    """A policy that wants to know when chunks are used, and when a request is over. It has no clock of its own."""

    def request(self, now_s: float, *, over: bool) -> None:
        """The calls that follow belong to one request, at `now_s`: seconds of a clock that never goes back.

        `over`: the request has ended. Then `refresh` is called for all its chunks, the last one of the prefix first,
        and `insert` for each save of it that lands later.
        """


@runtime_checkable
class AnsweredPolicy(SessionPolicy, Protocol):
    """A `SessionPolicy` that wants to know how long answers are."""

    def answered(self, tokens: int) -> None:
        """The request that is over has decoded `tokens` tokens: called between `request` and `refresh`, if known."""


@runtime_checkable
class BatchPolicy(Policy, Protocol):
    """A policy that takes all chunks of a request at once: each call means its namesake for each chunk, in order."""

    def insert_all(self, chunks: Sequence[Evictable], *, hit: bool) -> None:
        """`chunks` became evictable; the last chunk of the prefix is first."""

    def remove_all(self, chunks: Sequence[Evictable]) -> None:
        """`chunks` are held, or gone; the first chunk of the prefix is first."""

    def refresh_all(self, chunks: Sequence[Evictable]) -> None:
        """`chunks` were used; the last chunk of the prefix is first."""


@runtime_checkable
class RememberingPolicy(Policy, Protocol):
    """A policy that remembers chunks while they are held, and so needs to know which of them do not come back."""

    def dropped(self, chunk: Evictable) -> None:
        """`chunk`, for which `remove` was called, is gone, and not by `victim`. Unknown chunks are ignored."""


@runtime_checkable
class SizedPolicy(Policy, Protocol):
    """A policy that wants to know how many slots may be used; while some are not ready, fewer than it was made for."""

    def sized(self, slots: int) -> None:
        """`slots` may be used from now on. More may become ready, and a rank may have fewer than it was asked for."""


@runtime_checkable
class HintedPolicy(Policy, Protocol):
    """A policy that takes hints. They may be wrong, even intentionally: the policy decides how far to follow them."""

    def hint(self, chunk: Evictable, hint: Hint) -> None:
        """Take a client's hint on `chunk`, which may be evictable or held. Unknown chunks are ignored."""
