"""A pool with quotas: how many slots the requests of a salt are guaranteed, and how many they may hold at most.

Every used slot counts for the account of its chunk's tenant, no matter which request reads or writes the chunk.
Accounts get free slots in the order in which they ask, up to their limits. An account at its limit evicts one of its
own chunks. If an account below its limit asks and no slot is free, the account that exceeds its guaranteed share the
most evicts one of its chunks. An account within its share loses no slot to another account. Each account has its own
policy, which chooses the chunk to evict.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from kvpipe.cache.catalog import Catalog
from kvpipe.cache.chunks import Chunk
from kvpipe.cache.policy.base import AnsweredPolicy, Evictable, Policy, RememberingPolicy, SessionPolicy, SizedPolicy
from kvpipe.cache.policy.guard import RescuedPolicy, takes_hints
from kvpipe.cache.policy.hints import Hint
from kvpipe.cache.tenants import ANYBODY, Tenant, kept_salt
from kvpipe.inputs.quota_spec import OTHERS, QuotaSpec, salts
from kvpipe.trace.log import Counters

_NO_LIMIT: Final = QuotaSpec.model_validate({"name": OTHERS})


class PolicyCall(NamedTuple):
    """The arguments of the last call of `SessionPolicy.request`.

    `answer` is the argument of `AnsweredPolicy.answered`, or None.
    """

    now_s: float
    over: bool
    answer: int | None = None


_NEVER: Final = PolicyCall(0.0, over=False)


class Account:
    """The slots of one quota. `used` is the number of used slots, `sure` the guaranteed number, and `most` the limit.

    `evicted` counts the evictions of the account's chunks. `refused` counts how often the account got no slot.
    """

    __slots__ = (
        "answered", "evicted", "hint", "most", "notified", "policy", "refused", "request", "spec", "sure", "used",
    )  # fmt: skip

    def __init__(self, spec: QuotaSpec, slots: int, make: Callable[[int], Policy]) -> None:
        """Start without used slots. The pool has `slots` slots. `make(n)` returns a policy for n slots."""
        self.spec = spec
        self.used = self.evicted = self.refused = 0
        self.sure, self.most = spec.slots(slots)
        self.policy, self.notified = make(self.most), _NEVER
        self.request = self.policy.request if isinstance(self.policy, SessionPolicy) else None
        self.answered = self.policy.answered if isinstance(self.policy, AnsweredPolicy) else None
        self.hint = self.policy.hint if takes_hints(self.policy) else None

    @property
    def full(self) -> bool:
        """Whether the account is at its limit."""
        return self.used >= self.most


class Accounts:
    """The accounts of a pool. As the pool's policy, this object passes each call to the policy of the chunk's account.

    `victim` compares all accounts. Every other call takes one dict lookup.
    """

    def __init__(self, specs: Sequence[QuotaSpec], slots: int, make: Callable[[int], Policy]) -> None:
        """Create an account for each of `specs`. `make(n)` returns a policy for n slots.

        Raises `ConfigError` if a salt cannot be read, or if two quotas have the same salt.
        """
        self._by_salt = {kept_salt(salt): Account(spec, slots, make) for salt, spec in salts(specs).items()}
        others = next((spec for spec in specs if spec.name == OTHERS), _NO_LIMIT)
        self.others = Account(others, slots, make)
        self.all = (*self._by_salt.values(), self.others)
        self.asks = self.others
        """The account that needs a slot."""
        self._last_call = _NEVER

    def of(self, tenant: Tenant) -> Account:
        """Return a tenant's account."""
        return self._by_salt.get(tenant.salt, self.others)

    def resize(self, slots: int) -> None:
        """Compute shares and limits for a pool of `slots` slots. No slot may be used yet."""
        for account in self.all:
            account.sure, account.most = account.spec.slots(slots)

    def secure(self, ready: int) -> None:
        """Compute the guaranteed shares of the `ready` slots that are in memory."""
        for account in self.all:
            account.sure, _ = account.spec.slots(ready)
            if isinstance(account.policy, SizedPolicy):
                account.policy.sized(min(account.most, ready))

    # ---- the policy ------------------------------------------------------------------------------------------------

    def request(self, now_s: float, *, over: bool) -> None:
        """See `SessionPolicy.request`. The policy of an account receives this call before any later call."""
        self._last_call = PolicyCall(now_s, over)

    def answered(self, tokens: int) -> None:
        """See `AnsweredPolicy.answered`. The policy of an account receives this call together with `request`."""
        self._last_call = self._last_call._replace(answer=tokens)

    def insert(self, chunk: Evictable, *, hit: bool) -> None:
        """See `Policy.insert`."""
        self._account(chunk).policy.insert(chunk, hit=hit)

    def remove(self, chunk: Evictable) -> None:
        """See `Policy.remove`."""
        self._account(chunk).policy.remove(chunk)

    def dropped(self, chunk: Evictable) -> None:
        """See `RememberingPolicy.dropped`."""
        policy = self._account(chunk).policy
        if isinstance(policy, RememberingPolicy):
            policy.dropped(chunk)

    def refresh(self, chunk: Evictable) -> None:
        """See `Policy.refresh`."""
        self._account(chunk).policy.refresh(chunk)

    def hint(self, chunk: Evictable, hint: Hint) -> None:
        """See `HintedPolicy.hint`."""
        account = self._account(chunk)
        if account.hint is not None:
            account.hint(chunk, hint)

    def victim(self) -> Evictable | None:
        """Remove and return the chunk to evict for the account in `asks`.

        Returns None if no account may lose a chunk.
        """
        giver = self._giver()
        return self._notify(giver).policy.victim() if giver is not None else None

    def __len__(self) -> int:
        """See `Policy.__len__`."""
        return sum(len(account.policy) for account in self.all)

    def _giver(self) -> Account | None:
        asks = self.asks
        if asks.full:
            return asks if len(asks.policy) else None
        best, above = None, 0
        for account in self.all:
            more = account.used - account.sure
            if more > above and len(account.policy):
                best, above = account, more
        return best if best is not None or not len(asks.policy) else asks

    def _account(self, chunk: Evictable) -> Account:
        assert isinstance(chunk, Chunk)  # noqa: S101  (no other objects are inserted)
        return self._notify(self.of(chunk.tenant))

    def _notify(self, account: Account) -> Account:
        """Pass the last call to the account's policy once, if the policy is a `SessionPolicy`.

        Returns the account.
        """
        call = self._last_call
        if account.notified is not call:
            account.notified = call
            if account.request is not None:
                account.request(call.now_s, over=call.over)
                if account.answered is not None and call.answer is not None:
                    account.answered(call.answer)
        return account


class SharedCatalog(Catalog):
    """A catalog whose slots are counted by account."""

    def __init__(
        self, slots: int, groups: int, accounts: Accounts, counters: Counters, *, ready: int | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:  # fmt: skip
        """Create an empty catalog. `accounts` are made for `slots` slots.

        The other parameters are explained in `Catalog`.
        """
        super().__init__(slots, groups, accounts, counters, ready=ready, clock=clock)
        self.accounts = accounts
        for account in accounts.all:
            if isinstance(account.policy, RescuedPolicy):
                account.policy.bind(functools.partial(self._evictable_of, account))
        accounts.secure(self.ready)
        if accounts.others.request is None:
            self._request = None
        if accounts.others.answered is None:
            self._answered = None
        if accounts.others.hint is None:
            self._hint = None

    def limit(self, slots: int) -> None:
        """See `Catalog.limit`."""
        super().limit(slots)
        self.accounts.resize(self.slots)
        self.accounts.secure(self.ready)

    def use_more(self, ready: int) -> None:
        """See `Catalog.use_more`."""
        super().use_more(ready)
        self.accounts.secure(self.ready)

    def reserve(self, group: int, tenant: Tenant = ANYBODY) -> Chunk | None:
        """See `Catalog.reserve`. Also returns None if every chunk that may be evicted for `tenant` is held."""
        account = self.accounts.asks = self.accounts.of(tenant)
        if account.full and not self._evict_of(account):
            self.counters["save_dropped_at_limit"] += 1
            account.refused += 1
            return None
        chunk = super().reserve(group, tenant)
        if chunk is not None:
            account.used += 1
        else:
            account.refused += 1
        return chunk

    def evict(self, chunk: Chunk, *, taken: bool = False) -> bool:
        """See `Catalog.evict`."""
        evicted = super().evict(chunk, taken=taken)
        self.accounts.of(chunk.tenant).evicted += evicted
        return evicted

    @property
    def takes_hints(self) -> bool:
        """See `Catalog.takes_hints`. True if the policy of any account takes hints."""
        return self._hint is not None and any(takes_hints(account.policy) for account in self.accounts.all)

    def account_of(self, tenant: Tenant) -> object:
        """See `Catalog.account_of`."""
        return self.accounts.of(tenant)

    def room_ahead(self, tenant: Tenant) -> int:
        """See `Catalog.room_ahead`. The room is a part of the slots that the tenant's account may hold."""
        return self.ahead.of_account(tenant).room(self.accounts.of(tenant).most)

    def _evictable_of(self, account: Account) -> list[Chunk]:
        """Return the chunks of `account` that may be evicted, the least recently used first."""
        return [chunk for chunk in self._evictable() if self.accounts.of(chunk.tenant) is account]

    def _evict_of(self, account: Account) -> bool:
        """Evict a chunk of `account`, which needs a slot and is at its limit.

        Returns False if no chunk of the account may be evicted.
        """
        while account.full and self._evict_victim():  # `used` does not count chunks that a reset has forgotten
            pass
        return not account.full

    def _begin_era(self, held: Sequence[Chunk]) -> None:
        super()._begin_era(held)
        for account in self.accounts.all:
            account.used = 0
        for chunk in held:
            self.accounts.of(chunk.tenant).used += 1

    def _vacate(self, chunk: Chunk) -> None:
        super()._vacate(chunk)
        if chunk.era is self._era:
            self.accounts.of(chunk.tenant).used -= 1
