"""With any events in any order, no quota exceeds its limit, and no quota loses slots of its share to another quota."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpipe.cache.chunks import Chunk, Owner, Piece
from kvpipe.cache.policy import make_policy
from kvpipe.cache.quotas import Account, Accounts, SharedCatalog
from kvpipe.cache.tenants import ANYBODY, Tenant
from kvpipe.inputs.quota_spec import parse_quotas
from kvpipe.testing.catalog_integrity import check_integrity
from kvpipe.trace.log import Counters
from property_tests.profiles import examples

SLOTS = 8
TENANTS = (ANYBODY, *map(Tenant, "abcd"))
SHARES = st.integers(0, SLOTS)


class QuotaModel(RuleBasedStateMachine):
    """Saves, leases, evictions, resets and a growing pool, for tenants with and without quotas."""

    policy, sweep_slots = "lru", 64

    @initialize(
        shares=st.lists(SHARES, min_size=2, max_size=4), limits=st.lists(SHARES, min_size=4, max_size=4),
        ready=st.sampled_from([0, 2, SLOTS]),
    )  # fmt: skip
    def begin(self, shares: list[int], limits: list[int], ready: int) -> None:
        """Start with any quotas that fit into the pool."""
        quotas: list[dict[str, Any]] = []
        left, names = SLOTS, ("others", "a", "b", "c")
        for name, share, limit in zip(names, shares, limits, strict=False):
            sure = min(share, left)
            left -= sure
            one = {"name": name, "share": sure / SLOTS, "limit": max(sure, limit, 1) / SLOTS}
            quotas.append(one if name == "others" else one | {"salt": name})
        self.accounts = Accounts(parse_quotas(quotas), SLOTS, lambda slots: make_policy(self.policy, slots))
        self.catalog = SharedCatalog(SLOTS, 1, self.accounts, Counters(), ready=ready, clock=lambda: self.now_s)
        self.catalog.sweep_slots = self.sweep_slots
        self.pieces: list[Piece] = []
        self.owners: list[Owner] = []
        self.now_s, self.number = 0.0, 0

    def _found(self) -> list[Chunk]:
        return list(self.catalog.index(0).values())

    @rule(tenant=st.sampled_from(TENANTS), lands=st.booleans())
    def put(self, tenant: Tenant, *, lands: bool) -> None:
        """Save a chunk if there is room for it."""
        before = {account: account.used for account in self.accounts.all}
        asks, free = self.accounts.of(tenant), self.catalog.used < self.catalog.ready
        others = [one for one in self.accounts.all if one is not asks]
        above = {one: one.used - one.sure for one in self.accounts.all if self._idle(one)}
        could = asks in above or (not asks.full and (free or any(above.get(one, 0) > 0 for one in others)))
        chunk = self.catalog.reserve(0, tenant)
        assert (chunk is not None) == could, "refused, though somebody could give, or the other way round"
        for one in others:
            assert one.used >= min(one.sure, before[one]), "it lost to another what is within its share"
            if one.used < before[one]:
                assert not free, "it lost for nothing"
                assert before[asks] < asks.most, "who asks should have given its own"
                assert above[one] == max(above.values()), "another is further above its share"
        if chunk is None:
            return
        assert chunk.tenant is tenant
        self.number += 1
        piece = self.catalog.write(chunk, 1, str(self.number).encode(), keep=False)
        if lands:
            self.catalog.landed(piece)
        else:
            self.pieces.append(piece)

    def _idle(self, account: Account) -> int:
        return sum(1 for chunk in self._found() if not chunk.held and self.accounts.of(chunk.tenant) is account)

    @precondition(lambda self: self.pieces)
    @rule(at=st.integers(0, 99), lands=st.booleans())
    def end(self, at: int, *, lands: bool) -> None:
        """Land or lose a piece."""
        piece = self.pieces.pop(at % len(self.pieces))
        if lands:
            self.catalog.landed(piece)
        else:
            self.catalog.lost(piece)

    @precondition(lambda self: self._found())
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        """Let a request or a pin lease some of the findable chunks."""
        self.number += 1
        self.owners.append(Owner(str(self.number), 1))
        self.catalog.lease(
            self.owners[-1], data.draw(st.lists(st.sampled_from(self._found()), max_size=4, unique_by=id))
        )

    @precondition(lambda self: self.owners)
    @rule(at=st.integers(0, 99), over=st.booleans())
    def release(self, at: int, *, over: bool) -> None:
        """Release the leases. The request may have finished."""
        self.catalog.release(self.owners.pop(at % len(self.owners)))
        self.now_s += 1
        self.catalog.refresh(self._found()[:3], over=over)

    @precondition(lambda self: self._found())
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """Evict a chunk, held or not, as an operator does."""
        assert self.catalog.evict(data.draw(st.sampled_from(self._found())))

    @rule()
    def reset(self) -> None:
        """Reset the catalog."""
        self.catalog.reset()

    @rule(ready=st.integers(0, SLOTS))
    def use_more(self, ready: int) -> None:
        """Make more of the pool ready."""
        self.catalog.use_more(ready)

    @rule(tenant=st.sampled_from(TENANTS))
    def reserve_in_vain(self, tenant: Tenant) -> None:
        """Reserve a slot and release it unwritten."""
        chunk = self.catalog.reserve(0, tenant)
        if chunk is not None:
            self.catalog.abandon(chunk)

    @invariant()
    def slots_are_counted(self) -> None:
        """Every used slot belongs to one account, no account exceeds its limit, and all counts agree."""
        check_integrity(self.catalog)
        held = Counter(self.accounts.of(chunk.tenant) for chunk in self.catalog.chunks())
        for account in self.accounts.all:
            assert account.used == held[account] <= account.most
            stale = [one for one in self.catalog._chunks if one is not None and one.era is not self.catalog._era]
            forgotten = sum(1 for one in stale if self.accounts.of(one.tenant) is account)
            assert len(account.policy) == self._idle(account) + forgotten
        assert sum(account.used for account in self.accounts.all) == self.catalog.used
        assert sum(account.sure for account in self.accounts.all) <= SLOTS


class SessionsQuotaModel(QuotaModel):
    """The same test with a policy that is notified of time and of the ends of requests."""

    policy = "sessions"


class StaleQuotaModel(QuotaModel):
    """The same test, but most of the chunks that a reset drops are removed much later."""

    sweep_slots = 1


TestStaleQuotas = StaleQuotaModel.TestCase
TestStaleQuotas.settings = examples(150, 40)
TestQuotas = QuotaModel.TestCase
TestQuotas.settings = examples(150, 40)
TestSessionsQuotas = SessionsQuotaModel.TestCase
TestSessionsQuotas.settings = examples(100, 40)
