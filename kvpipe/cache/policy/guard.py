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
        self._one, self._all = policy, batches(policy)
        self._request = policy.request if isinstance(policy, SessionPolicy) else None  # once: such questions are slow
        self._hint = policy.hint if isinstance(policy, HintedPolicy) else None
        self._dropped = policy.dropped if isinstance(policy, RememberingPolicy) else None

    def request(self, now_s: float, *, over: bool) -> None:
        """See `SessionPolicy.request`."""
        if self._request is not None:
            self._ask(self._request, now_s, over=over)

    def insert(self, chunk: Evictable, *, hit: bool) -> None:
        """See `Policy.insert`."""
        super().insert(chunk, hit=hit)
        self._ask(self._one.insert, chunk, hit=hit)

    def remove(self, chunk: Evictable) -> None:
        """See `Policy.remove`."""
        super().remove(chunk)
        self._ask(self._one.remove, chunk)

    def refresh(self, chunk: Evictable) -> None:
        """See `Policy.refresh`."""
        super().refresh(chunk)
        self._ask(self._one.refresh, chunk)

    def insert_all(self, chunks: Sequence[Evictable], *, hit: bool) -> None:
        """See `BatchPolicy.insert_all`."""
        super().insert_all(chunks, hit=hit)
        self._ask(self._all.insert_all, chunks, hit=hit)

    def remove_all(self, chunks: Sequence[Evictable]) -> None:
        """See `BatchPolicy.remove_all`."""
        super().remove_all(chunks)
        self._ask(self._all.remove_all, chunks)

    def refresh_all(self, chunks: Sequence[Evictable]) -> None:
        """See `BatchPolicy.refresh_all`."""
        super().refresh_all(chunks)
        self._ask(self._all.refresh_all, chunks)

    def hint(self, chunk: Evictable, hint: Hint) -> None:
        """See `HintedPolicy.hint`."""
        if self._hint is not None:
            self._ask(self._hint, chunk, hint)

    def dropped(self, chunk: Evictable) -> None:
        """See `RememberingPolicy.dropped`."""
        if self._dropped is not None:
            self._ask(self._dropped, chunk)

    def victim(self) -> Evictable | None:
        """See `Policy.victim`."""
        chunk = self._ask(self._taken)
        return super().victim() if self._policy is None else chunk

    def _taken(self) -> Evictable | None:
        """Remove and return its victim. Raises LookupError if that is not evictable, or what the policy raises."""
        chunk = self._one.victim()
        if chunk not in self._order if chunk is not None else self._order:
            raise LookupError("its victim is no chunk that may go")
        if chunk is not None:
            del self._order[chunk]
        return chunk

    def _ask(self, call: Callable[..., Evictable | None], *args: object, **named: object) -> Evictable | None:
        if self._policy is None:
            return None
        try:
            return call(*args, **named)
        except (Exception, SystemExit) as error:  # noqa: BLE001  (a bug of the policy's: eviction goes on without it)
            self._leave(repr(error))
            return None

    def _leave(self, why: str) -> None:
        if self._policy is not None:
            self._policy = None
            self._fault("policy_failed", policy=self._name, why=why)
