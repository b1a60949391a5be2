"""Guards between the catalog and a policy.

If a policy raises or returns a wrong victim, LRU replaces it permanently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeGuard

from kvpipe.cache.policy.base import (
    AnsweredPolicy,
    BatchPolicy,
    Evictable,
    HintedPolicy,
    Policy,
    RememberingPolicy,
    SessionPolicy,
    SizedPolicy,
)
from kvpipe.cache.policy.batches import OneByOne, batches
from kvpipe.cache.policy.hints import Hint
from kvpipe.cache.policy.lru import Lru


def takes_hints(policy: Policy) -> TypeGuard[HintedPolicy]:
    """Whether a policy, or the policy that its guard uses now, takes hints."""
    return policy.takes_hints if isinstance(policy, RescuedPolicy) else isinstance(policy, HintedPolicy)


class RescuedPolicy:
    """Guards a policy of kvpipe. When the policy raises, LRU replaces it.

    The guard itself tracks no chunks. After the policy has raised, the guard asks the pool which chunks may be evicted.
    """

    def __init__(self, policy: Policy, name: str, fault: Callable[..., object], slots: int = 0) -> None:
        """Guard `policy`, for a pool of `slots` slots.

        `fault("policy_failed", policy=name, why=...)` is called once, when LRU replaces the policy.
        """
        self._evictable: Callable[[], Iterable[Evictable]] = tuple
        self._name, self._fault, self._slots = name, fault, slots
        self._one: Policy = policy
        self._all: BatchPolicy | OneByOne = batches(policy)
        self._request = policy.request if isinstance(policy, SessionPolicy) else None  # stored: the check is slow
        self._answered = policy.answered if isinstance(policy, AnsweredPolicy) else None
        self._hint = policy.hint if isinstance(policy, HintedPolicy) else None
        self._dropped = policy.dropped if isinstance(policy, RememberingPolicy) else None

    def bind(self, evictable: Callable[[], Iterable[Evictable]]) -> None:
        """Keep the pool's function that returns the chunks that may be evicted now, the least recently used first."""
        self._evictable = evictable

    @property
    def takes_hints(self) -> bool:
        """Whether the policy takes hints."""
        return self._hint is not None

    def sized(self, slots: int) -> None:
        """See `SizedPolicy.sized`."""
        if isinstance(self._one, SizedPolicy):
            try:
                self._one.sized(slots)
            except (Exception, SystemExit) as error:  # noqa: BLE001  (a bug of the policy: LRU evicts from now on)
                self._rescue(error)

    def request(self, now_s: float, *, over: bool) -> None:
        """See `SessionPolicy.request`."""
        if self._request is not None:
            try:
                self._request(now_s, over=over)
            except (Exception, SystemExit) as error:  # noqa: BLE001  (a bug of the policy: LRU evicts from now on)
                self._rescue(error)

    def answered(self, tokens: int) -> None:
        """See `AnsweredPolicy.answered`."""
        if self._answered is not None:
            try:
                self._answered(tokens)
            except (Exception, SystemExit) as error:  # noqa: BLE001  (as above)
                self._rescue(error)

    def insert(self, chunk: Evictable, *, hit: bool) -> None:
        """See `Policy.insert`."""
        try:
            self._one.insert(chunk, hit=hit)
        except (Exception, SystemExit) as error:  # noqa: BLE001  (as above)
            self._rescue(error).insert(chunk, hit=hit)

    def remove(self, chunk: Evictable) -> None:
        """See `Policy.remove`."""
        try:
            self._one.remove(chunk)
        except (Exception, SystemExit) as error:  # noqa: BLE001  (as above)
            self._rescue(error).remove(chunk)

    def refresh(self, chunk: Evictable) -> None:
        """See `Policy.refresh`."""
        try:
            self._one.refresh(chunk)
        except (Exception, SystemExit) as error:  # noqa: BLE001  (as above)
            self._rescue(error).refresh(chunk)

    def insert_all(self, chunks: Sequence[Evictable], *, hit: bool) -> None:
        """See `BatchPolicy.insert_all`."""
        try:
            self._all.insert_all(chunks, hit=hit)
        except (Exception, SystemExit) as error:  # noqa: BLE001  (as above)
            self._rescue(error).insert_all(chunks, hit=hit)

    def remove_all(self, chunks: Sequence[Evictable]) -> None:
        """See `BatchPolicy.remove_all`."""
        try:
            self._all.remove_all(chunks)
        except (Exception, SystemExit) as error:  # noqa: BLE001  (as above)
            self._rescue(error).remove_all(chunks)

    def refresh_all(self, chunks: Sequence[Evictable]) -> None:
        """See `BatchPolicy.refresh_all`."""
        try:
            self._all.refresh_all(chunks)
        except (Exception, SystemExit) as error:  # noqa: BLE001  (as above)
            self._rescue(error).refresh_all(chunks)

    def hint(self, chunk: Evictable, hint: Hint) -> None:
        """See `HintedPolicy.hint`."""
        if self._hint is not None:
            try:
                self._hint(chunk, hint)
            except (Exception, SystemExit) as error:  # noqa: BLE001  (as above)
                self._rescue(error)

    def dropped(self, chunk: Evictable) -> None:
        """See `RememberingPolicy.dropped`."""
        if self._dropped is not None:
            try:
                self._dropped(chunk)
            except (Exception, SystemExit) as error:  # noqa: BLE001  (as above)
                # the new LRU was filled from the pool, which has not removed the chunk yet
                self._rescue(error).remove(chunk)

    def victim(self) -> Evictable | None:
        """See `Policy.victim`."""
        try:
            return self._one.victim()
        except (Exception, SystemExit) as error:  # noqa: BLE001  (as above)
            return self._rescue(error).victim()

    def __len__(self) -> int:
        """See `Policy.__len__`."""
        try:
            return len(self._one)
        except (Exception, SystemExit) as error:  # noqa: BLE001  (as above)
            return len(self._rescue(error))

    def _rescue(self, error: BaseException) -> Lru:
        """Replace the policy by an LRU of all chunks that may be evicted, and return the LRU."""
        lru = Lru(self._slots)
        lru.insert_all([*self._evictable()], hit=False)
        self._one = self._all = lru
        self._request = self._answered = self._hint = self._dropped = None
        self._fault("policy_failed", policy=self._name, why=repr(error))
        return lru


class GuardedPolicy(RescuedPolicy):
    """Guards a policy from another package. LRU also replaces a policy that returns a wrong victim.

    A victim is wrong if it may not be evicted, or if it is None although some chunk may be evicted. The guard tracks
    all chunks that may be evicted in an LRU of its own.
    """

    def __init__(self, policy: Policy, name: str, fault: Callable[..., object], slots: int = 0) -> None:
        """See `RescuedPolicy`."""
        super().__init__(policy, name, fault, slots)
        self._followed = Lru(slots)
        self._evictable = self._followed.__iter__

    def bind(self, evictable: Callable[[], Iterable[Evictable]]) -> None:
        """See `RescuedPolicy.bind`. This guard does not need the function."""

    def insert(self, chunk: Evictable, *, hit: bool) -> None:
        """See `Policy.insert`."""
        self._followed.insert(chunk, hit=hit)
        super().insert(chunk, hit=hit)

    def remove(self, chunk: Evictable) -> None:
        """See `Policy.remove`."""
        self._followed.remove(chunk)
        super().remove(chunk)

    def refresh(self, chunk: Evictable) -> None:
        """See `Policy.refresh`."""
        self._followed.refresh(chunk)
        super().refresh(chunk)

    def insert_all(self, chunks: Sequence[Evictable], *, hit: bool) -> None:
        """See `BatchPolicy.insert_all`."""
        self._followed.insert_all(chunks, hit=hit)
        super().insert_all(chunks, hit=hit)

    def remove_all(self, chunks: Sequence[Evictable]) -> None:
        """See `BatchPolicy.remove_all`."""
        self._followed.remove_all(chunks)
        super().remove_all(chunks)

    def refresh_all(self, chunks: Sequence[Evictable]) -> None:
        """See `BatchPolicy.refresh_all`."""
        self._followed.refresh_all(chunks)
        super().refresh_all(chunks)

    def victim(self) -> Evictable | None:
        """See `Policy.victim`."""
        try:
            chunk = self._checked(self._one.victim())
        except (Exception, SystemExit) as error:  # noqa: BLE001  (as above)
            chunk = self._rescue(error).victim()
        if chunk is not None:
            self._followed.remove(chunk)
        return chunk

    def __len__(self) -> int:
        """See `Policy.__len__`."""
        return len(self._followed)

    def _checked(self, chunk: Evictable | None) -> Evictable | None:
        """Return `chunk`, a victim of the policy.

        Raises LookupError if `chunk` may not be evicted, or is None although some chunk may be evicted.
        """
        if chunk not in self._followed if chunk is not None else len(self._followed):
            raise LookupError("the policy's victim may not be evicted")
        return chunk
