"""The eviction protocol.

A policy contains only chunks that may be evicted now. A chunk is removed from the policy when it is held, and is
inserted again when it is released.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol, runtime_checkable

from kvpipe.cache.policy.hints import Hint


class Evictable(Protocol):
    """A chunk as a policy sees it: properties to read, and one attribute to write."""

    place: int
    """A number for the policy's own use, such as the chunk's position. The number is 0 until the policy sets it."""

    @property
    def identity(self) -> Hashable:
        """The identity of the chunk's content. Equal content has an equal identity, also after an eviction."""

    @property
    def before(self) -> Hashable:
        """The `identity` of the previous chunk of the prefix.

        The value is falsy if this chunk is the first, or if the previous chunk is unknown.
        """


class Policy(Protocol):
    """Decides which chunk is evicted when a slot is needed. Every operation is O(1) amortised."""

    def insert(self, chunk: Evictable, *, hit: bool) -> None:
        """`chunk` may be evicted from now on. `hit` is True after a load, and False after a save."""

    def remove(self, chunk: Evictable) -> None:
        """`chunk` may not be evicted any more, because it is held or was dropped. Unknown chunks are ignored."""

    def refresh(self, chunk: Evictable) -> None:
        """`chunk` was used, but not loaded.

        This use changes the order only among chunks that the policy rates equally.
        """

    def victim(self) -> Evictable | None:
        """Remove and return the next chunk to evict, or None if no chunk may be evicted."""

    def __len__(self) -> int:
        """Return how many chunks may be evicted."""


@runtime_checkable
class SessionPolicy(Policy, Protocol):
    """A policy that needs to know when chunks are used, and when a request is over.

    Such a policy has no clock of its own.
    """

    def request(self, now_s: float, *, over: bool) -> None:
        """Announce that the following calls belong to one request.

        `now_s` is the present time in seconds of a clock that never decreases. `over` says that the request has ended.
        After a call with `over`, `refresh` is called for all chunks of the request, the last chunk of the prefix first.
        If a save of the request lands after the end, `insert` is called for the saved chunk.
        """


@runtime_checkable
class AnsweredPolicy(SessionPolicy, Protocol):
    """A `SessionPolicy` that needs to know how long answers are."""

    def answered(self, tokens: int) -> None:
        """The request that has ended has decoded `tokens` tokens.

        This method is called between `request` and `refresh`, if the number is known.
        """


@runtime_checkable
class BatchPolicy(Policy, Protocol):
    """A policy that handles all chunks of a request at once.

    A method with `_all` has the effect of the method without `_all`, called for each chunk in order.
    """

    def insert_all(self, chunks: Sequence[Evictable], *, hit: bool) -> None:
        """`chunks` may be evicted from now on. The last chunk of the prefix is first."""

    def remove_all(self, chunks: Sequence[Evictable]) -> None:
        """`chunks` may not be evicted any more, because they are held or were dropped.

        The first chunk of the prefix is first.
        """

    def refresh_all(self, chunks: Sequence[Evictable]) -> None:
        """`chunks` were used. The last chunk of the prefix is first."""


@runtime_checkable
class RememberingPolicy(Policy, Protocol):
    """A policy that remembers chunks while they are held.

    `dropped` names the held chunks that will never be inserted again.
    """

    def dropped(self, chunk: Evictable) -> None:
        """`chunk`, which `remove` has removed before, was dropped.

        This method is not called for victims. Unknown chunks are ignored.
        """


@runtime_checkable
class SizedPolicy(Policy, Protocol):
    """A policy that needs to know how many slots may be used.

    Until all slots are ready, this number is lower than the number at the policy's creation.
    """

    def sized(self, slots: int) -> None:
        """`slots` slots may be used from now on. The number may grow later.

        The final number may be lower than the number at the policy's creation, because a rank may get fewer slots than
        requested.
        """


@runtime_checkable
class HintedPolicy(Policy, Protocol):
    """A policy that takes hints.

    Hints may be wrong, even intentionally, so the policy decides how much weight hints get.
    """

    def hint(self, chunk: Evictable, hint: Hint) -> None:
        """Take a client's hint on `chunk`, which may be evictable or held. Unknown chunks are ignored."""
