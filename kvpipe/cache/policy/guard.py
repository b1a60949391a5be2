"""A guard for policies of other packages: victims are checked, and a policy that misbehaves is used no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeGuard

from kvpipe.cache.hints import Hint
from kvpipe.cache.policy.base import Evictable, HintedPolicy, Policy, RememberingPolicy, SessionPolicy
from kvpipe.cache.policy.batches import batches
from kvpipe.cache.policy.lru import Lru


def takes_hints(policy: Policy) -> TypeGuard[HintedPolicy]:
    """Whether a policy, or the one behind its guard, takes hints."""
    return isinstance(policy._policy if isinstance(policy, GuardedPolicy) else policy, HintedPolicy)  # noqa: SLF001


class GuardedPolicy(Lru):
    """Evicts the victims of `policy`, until it raises or names a chunk that is not evictable; from then on by LRU."""

    def __init__(self, policy: Policy, name: str, fault: Callable[..., object], slots: int = 0) -> None:
        """`fault("policy_failed", policy=name, why=...)` is called once, when LRU takes over. `slots`: of the pool."""
        super().__init__(slots)
        self._policy: Policy | None = policy
        self._name, self._fault = name, fault

    def request(self, now_s: float, *, over: bool) -> None:
        """See `SessionPolicy.request`."""
        self._ask(lambda policy: policy.request(now_s, over=over) if isinstance(policy, SessionPolicy) else None)

    def insert(self, chunk: Evictable, *, hit: bool) -> None:
        """See `Policy.insert`."""
        super().insert(chunk, hit=hit)
        self._ask(lambda policy: policy.insert(chunk, hit=hit))

    def remove(self, chunk: Evictable) -> None:
        """See `Policy.remove`."""
        super().remove(chunk)
        self._ask(lambda policy: policy.remove(chunk))

    def refresh(self, chunk: Evictable) -> None:
        """See `Policy.refresh`."""
        super().refresh(chunk)
        self._ask(lambda policy: policy.refresh(chunk))

    def insert_all(self, chunks: Sequence[Evictable], *, hit: bool) -> None:
        """See `BatchPolicy.insert_all`."""
        for chunk in chunks:
            super().insert(chunk, hit=hit)
        self._ask(lambda policy: batches(policy).insert_all(chunks, hit=hit))

    def remove_all(self, chunks: Sequence[Evictable]) -> None:
        """See `BatchPolicy.remove_all`."""
        for chunk in chunks:
            super().remove(chunk)
        self._ask(lambda policy: batches(policy).remove_all(chunks))

    def refresh_all(self, chunks: Sequence[Evictable]) -> None:
        """See `BatchPolicy.refresh_all`."""
        for chunk in chunks:
            super().refresh(chunk)
        self._ask(lambda policy: batches(policy).refresh_all(chunks))

    def hint(self, chunk: Evictable, hint: Hint) -> None:
        """See `HintedPolicy.hint`."""
        self._ask(lambda policy: policy.hint(chunk, hint) if isinstance(policy, HintedPolicy) else None)

    def dropped(self, chunk: Evictable) -> None:
        """See `RememberingPolicy.dropped`."""
        self._ask(lambda policy: policy.dropped(chunk) if isinstance(policy, RememberingPolicy) else None)

    def victim(self) -> Evictable | None:
        """See `Policy.victim`."""
        chunk = self._ask(self._taken)
        return super().victim() if self._policy is None else chunk

    def _taken(self, policy: Policy) -> Evictable | None:
        """Remove and return the policy's victim. Raises LookupError if it is not evictable, or what `policy` raises."""
        chunk = policy.victim()
        if chunk not in self._order if chunk is not None else self._order:
            raise LookupError("its victim is no chunk that may go")
        if chunk is not None:
            del self._order[chunk]
        return chunk

    def _ask(self, call: Callable[[Policy], Evictable | None]) -> Evictable | None:
        if self._policy is None:
            return None
        try:
            return call(self._policy)
        except (Exception, SystemExit) as error:  # noqa: BLE001  (a bug of the policy's: eviction goes on without it)
            self._leave(repr(error))
            return None

    def _leave(self, why: str) -> None:
        if self._policy is not None:
            self._policy = None
            self._fault("policy_failed", policy=self._name, why=why)
