"""Tests of a pool with quotas: which quota loses a slot, which quota gets no slot, and which policy is notified."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kvpipe.cache.chunks import Chunk, Owner, Piece
from kvpipe.cache.policy import Lru, Sessions
from kvpipe.cache.policy.base import Evictable, Policy
from kvpipe.cache.policy.hints import Action, Hint
from kvpipe.cache.quotas import Accounts, SharedCatalog
from kvpipe.cache.tenants import ANYBODY, Tenant
from kvpipe.config.settings import load_settings
from kvpipe.connectors.vllm.metrics import Meter
from kvpipe.errors import ConfigError
from kvpipe.inputs.quota_spec import parse_quotas
from kvpipe.manage import reads
from kvpipe.scheduler.gauges import quota_totals, totals
from kvpipe.testing.catalog_integrity import check_integrity
from kvpipe.trace.log import Counters
from tests.rigs.scheduler_world import SchedulerWorld

SLOTS = 8
ALICE, BOB, EVE = Tenant("a"), Tenant("b"), Tenant("e")
QUOTAS = [
    {"name": "alice", "salt": "a", "share": 0.5},
    {"name": "bob", "salt": "b", "share": 0.25, "limit": 0.5},
]


class _Pool:
    """A catalog with `SLOTS` slots, and the chunks that the test has saved."""

    def __init__(self, quotas: list[dict[str, Any]] = QUOTAS, make: Callable[[int], Policy] = Lru) -> None:
        self.accounts = Accounts(parse_quotas(quotas), SLOTS, make)
        self.catalog = SharedCatalog(SLOTS, 1, self.accounts, Counters(), clock=lambda: 1.0)
        self.puts = 0

    def put(self, tenant: Tenant, count: int = 1, *, land: bool = True) -> list[Chunk]:
        """Save `count` chunks. Returns the chunks that got a slot."""
        out = []
        for _ in range(count):
            chunk = self.catalog.reserve(0, tenant)
            if chunk is not None:
                self.puts += 1
                piece = self.catalog.write(chunk, 1, str(self.puts).encode(), keep=False)
                assert not land or self.catalog.landed(piece)
                out.append(chunk)
        check_integrity(self.catalog)
        return out

    @property
    def used(self) -> dict[str, int]:
        """The used slots of each account."""
        return {account.spec.name: account.used for account in self.accounts.all}


def test_quota_furthest_above_its_share_loses_slots() -> None:
    """Any quota may take free slots.

    When no slot is free, the quota furthest above its share loses slots, until it has only its share.
    """
    pool = _Pool()
    pool.put(EVE, SLOTS)
    assert pool.used == {"alice": 0, "bob": 0, "others": SLOTS}
    pool.put(BOB, 2)
    pool.put(ALICE, 6)
    assert pool.used == {"alice": 5, "bob": 2, "others": 1}, "of equals the first that is configured gives: itself"
    pool.put(EVE, 5)
    assert pool.used == {"alice": 4, "bob": 2, "others": 2}
    pool.put(BOB, 2)
    assert pool.used == {"alice": 4, "bob": 3, "others": 1}
    assert pool.catalog.counters["evicted"] == 15
    assert len(list(pool.catalog.chunks())) == SLOTS


def test_quota_within_its_share_loses_no_slot_to_another_quota() -> None:
    """If all other quotas are within their shares, a quota loses its own chunk or gets no slot."""
    pool = _Pool([{"name": "alice", "salt": "a", "share": 0.5}, {"name": "bob", "salt": "b", "share": 0.5}])
    first = pool.put(ALICE, 4)
    pool.put(BOB, 4)
    assert pool.put(EVE) == []
    assert pool.catalog.counters["save_dropped_pool_full"] == 1
    pool.put(ALICE)
    assert pool.used == {"alice": 4, "bob": 4, "others": 0}
    assert first[0] not in pool.catalog.chunks(), "its oldest one went"


def test_limit_of_a_quota_is_not_exceeded() -> None:
    """At its limit a quota loses its own chunk even if slots are free.

    If all its chunks are leased, the quota gets no slot.
    """
    pool = _Pool()
    assert len(pool.put(BOB, 6)) == 6
    assert pool.used == {"alice": 0, "bob": 4, "others": 0}
    pool.catalog.lease(Owner("r", 1), [chunk for chunk in pool.catalog.chunks() if chunk.tenant is BOB])
    assert pool.put(BOB) == []
    assert pool.catalog.counters["save_dropped_at_limit"] == 1
    assert len(pool.put(EVE, 4)) == 4
    pool.catalog.release(Owner("r", 1))
    assert len(pool.put(BOB)) == 1
    assert pool.used == {"alice": 0, "bob": 4, "others": 4}


def test_held_chunks_count_as_used_slots() -> None:
    """Leased chunks, and chunks that are being written, count as used and are not evicted.

    An evicted chunk counts until the copy that reads it has ended.
    """
    pool = _Pool()
    held = pool.put(EVE, 4, land=False)
    pool.put(EVE, 1)
    pool.put(ALICE, 3)
    assert len(pool.put(ALICE)) == 1, "of those that are above their share one has something to give"
    assert pool.used == {"alice": 4, "bob": 0, "others": 4}
    assert pool.put(BOB) == [], "all that is above its share is being written"
    pool.catalog.evict(held[0])
    assert pool.used["others"] == 4
    pool.catalog.lost(next(_piece(one) for one in held))
    assert pool.used["others"] == 3
    pool.catalog.reset()
    assert pool.used == {"alice": 0, "bob": 0, "others": 3}
    reserved = pool.catalog.reserve(0, BOB)
    assert reserved is not None
    pool.catalog.abandon(reserved)
    assert pool.used["bob"] == 0


def _piece(chunk: Chunk) -> Any:
    return Piece(chunk, 0, 1, chunk.tail, keep=False)


def test_shares_follow_the_size_of_the_pool() -> None:
    """If a rank's pool is smaller than expected, shares and limits are smaller, too.

    Slots that are not ready belong to no quota.
    """
    pool = _Pool()
    pool.catalog.limit(4)
    assert [(one.sure, one.most) for one in pool.accounts.all] == [(2, 4), (1, 2), (0, 4)]
    late = SharedCatalog(SLOTS, 1, Accounts(parse_quotas(QUOTAS), SLOTS, Lru), Counters(), ready=0)
    assert late.reserve(0, ALICE) is None
    late.use_more(2)
    assert late.reserve(0, ALICE) is not None
    assert late.reserve(0, ALICE) is not None
    assert late.reserve(0, BOB) is None
    assert late.accounts.of(ALICE).used == 2


def test_shares_are_of_the_ready_slots() -> None:
    """While only some slots are ready, a share is a share of the ready slots."""
    late = SharedCatalog(SLOTS, 1, Accounts(parse_quotas(QUOTAS), SLOTS, Lru), Counters(), ready=4)
    for tenant, puts in ((ALICE, 4), (BOB, 2)):
        for put in range(puts):
            chunk = late.reserve(0, tenant)
            assert chunk is not None
            late.landed(late.write(chunk, 1, f"{tenant.salt}/{put}".encode(), keep=False))
    assert [(one.used, one.sure) for one in late.accounts.all] == [(2, 2), (2, 1), (0, 0)]
    late.use_more(SLOTS)
    assert [one.sure for one in late.accounts.all] == [4, 2, 0], "shares grow with the slots that become ready"


class _Told(Lru):
    """A policy that records its calls."""

    def __init__(self, slots: int) -> None:
        super().__init__()
        self.slots, self.noted = slots, list[object]()

    def request(self, now_s: float, *, over: bool) -> None:
        self.noted.append((now_s, over))

    def answered(self, tokens: int) -> None:
        self.noted.append(tokens)

    def hint(self, chunk: Evictable, hint: Hint) -> None:
        del chunk
        self.noted.append(hint)


def test_each_quota_has_its_own_policy() -> None:
    """Each policy is notified of its own chunks only.

    Before a notification, the policy gets the time and the end of the request.
    """
    pool = _Pool(make=_Told)
    noted: dict[str, _Told] = {one.spec.name: one.policy for one in pool.accounts.all}  # type: ignore[misc]
    assert [one.slots for one in noted.values()] == [8, 4, 8]
    (mine,), (yours,) = pool.put(ALICE), pool.put(ANYBODY)
    hint = Hint(Action.DEMOTE)
    pool.catalog.refresh([mine], over=True, answer=5)
    pool.catalog.hint([yours], hint)
    assert noted["alice"].noted == [(1.0, False), (1.0, True), 5]
    assert noted["others"].noted == [(1.0, False), (1.0, False), hint]
    assert noted["bob"].noted == []
    assert [len(one) for one in noted.values()] == [1, 0, 1]
    pool.put(ALICE, 6)
    noted["alice"].noted.clear()
    pool.catalog.refresh([yours], over=True)
    pool.put(EVE)
    assert noted["alice"].noted == [(1.0, True)], "before it says who goes"


def test_a_policy_that_wants_no_hints_gets_none() -> None:
    """If the policy takes no hints, a client's hints are reported as ignored. This is so with and without quotas."""
    assert not _Pool().catalog.takes_hints
    assert _Pool().catalog._request is None
    assert _Pool().catalog._answered is None
    assert _Pool(make=Sessions).catalog.takes_hints
    assert _Pool(make=Sessions).catalog._request is not None
    assert _Pool(make=Sessions).catalog._answered is not None


@pytest.mark.parametrize("states", [(), (1,)])
def test_scheduler_keeps_quotas(states: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Many requests of one salt do not take the other salt's share."""
    monkeypatch.setenv("KVPIPE_QUOTAS", '[{"name": "alice", "salt": "a", "share": 0.5}]')
    world = SchedulerWorld(windows=(None, None) if states else (None,), states=states, chunk_units=4, slots=16)
    mine = world.request("mine", 16)
    mine.cache_salt = "a"
    world.publish(mine)
    held = world.found(mine)
    for i in range(8):
        world.publish(world.request(f"other {i}", 16))
        assert world.found(mine) == held == 16
    assert world.side.catalog.used == 16
    order = world.side.orders.queue_read(lambda: reads.snapshot(world.side, 0))
    world.step()
    alice, others = order.result.totals.pool.quotas
    assert (alice.name, alice.slots_sure, alice.slots_max) == ("alice", 8, 16)
    assert (others.name, others.slots_sure, others.slots_max) == ("others", 0, 16)
    assert alice.slots + others.slots == 16
    monkeypatch.delenv("KVPIPE_QUOTAS")
    plain = SchedulerWorld(chunk_units=4, slots=16)
    assert type(plain.side.catalog).__name__ == "Catalog"
    assert type(plain.side.catalog._policy) is Lru


def test_quotas_are_reported_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics have one series per quota, and one series for all other salts together. No series shows a salt."""
    monkeypatch.setenv("KVPIPE_QUOTAS", '[{"name": "alice", "salt": "SECRET", "share": 0.5, "limit": 0.75}]')
    world = SchedulerWorld(chunk_units=4, slots=16)
    side, size = world.side, world.side.geometry.slot_bytes
    for i in range(40):
        request = world.request(f"r{i}", 16)
        request.cache_salt = "SECRET" if i < 4 else f"SECRET {i}"
        world.publish(request)
    noted = Meter(partial(totals, side), partial(quota_totals, side)).take()
    assert noted is not None
    quotas = {name: values for name, values in noted.data.items() if name.startswith("quota_")}
    assert quotas["quota_bytes"] == {"alice": 11 * size, "others": 5 * size}
    assert quotas["quota_sure_bytes"] == {"alice": 8 * size, "others": 0}
    assert quotas["quota_max_bytes"] == {"alice": 12 * size, "others": 16 * size}
    assert quotas["quota_evictions"] == {"alice": 4 * 4 - 11, "others": 36 * 4 - 5}
    assert side.counters["evicted"] == 40 * 4 - 16
    assert "SECRET" not in str(noted.data)
    monkeypatch.delenv("KVPIPE_QUOTAS")
    assert quota_totals(SchedulerWorld(chunk_units=4, slots=16).side) == {}


def test_refusals_are_counted_by_quota() -> None:
    """A slot is refused if the quota is at its limit, or if no quota has a chunk that can be evicted."""
    pool = _Pool()
    pool.put(BOB, 5, land=False)
    pool.put(EVE, 6, land=False)
    assert {one.spec.name: one.refused for one in pool.accounts.all} == {"alice": 0, "bob": 1, "others": 2}


REFUSED: dict[str, tuple[Any, str]] = {
    "no list": ({"name": "a"}, "quotas is of type dict, not a list; write a list such as"),
    "no JSON": ("alice", "quotas is not JSON (Expecting value at line 1, column 1); write"),
    "no table": (["a"], "entry 1 is of type str; write a table such as"),
    "a key": ([{"name": "a", "sallt": "SECRET"}], "entry 1: unknown key 'sallt'; did you mean 'salt'?"),
    "no name": ([{"salt": "SECRET"}], "entry 1: name is missing; name means:"),
    "a name": ([{"name": "a b", "salt": "SECRET"}], "entry 1: name='a b' is not valid (use letters, digits,"),
    "no salt": ([{"name": "a"}], "entry 1: set exactly one of salt and salt_env"),
    "two salts": ([{"name": "a", "salt": "SECRET", "salt_env": "X"}], "set exactly one of salt and salt_env"),
    "an empty salt": ([{"name": "a", "salt": ""}], "entry 1: salt='' is not valid ("),
    "a number": ([{"name": "a", "salt": 4711}], "entry 1: salt is not valid (Input should be a valid string)"),
    "others": ([{"name": "others", "salt": "SECRET"}], "others has no salt: remove salt and salt_env, or"),
    "a share": ([{"name": "others", "share": 1.5}], "share=1.5 is not valid (Input should be less than or equal to 1)"),
    "a truth": ([{"name": "others", "limit": True}], "limit=True is not valid (expected a number, not true or false)"),
    "a limit": ([{"name": "others", "share": 0.5, "limit": 0.4}], "limit=0.4 is less than share=0.5; raise limit"),
    "one name": ([{"name": "a", "salt": "SECRET"}] * 2, "quotas: two quotas have the name 'a'; give each its own name"),
    "too much": (
        [{"name": "a", "salt": "SECRET", "share": 0.7}, {"name": "others", "share": 0.4}],
        "quotas: the shares add up to 1.1 of the pool; lower them to at most 1",
    ),
    "too many": ([{}] * 257, "quotas has 257 entries; give at most 256"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_quota_is_refused_without_its_salt(name: str) -> None:
    """Each error is refused in one sentence with the remedy. The sentence shows no salt."""
    given, sentence = REFUSED[name]
    with pytest.raises(ConfigError) as refused:
        load_settings({"quotas": given})
    assert sentence in str(refused.value)
    assert "SECRET" not in str(refused.value)
    assert "4711" not in str(refused.value)


def test_salts_are_shown_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Printed settings and error messages show no salt.

    The name of a variable in the configuration may also be a salt.
    """
    monkeypatch.setenv("ALICE_SALT", "SECRET")
    one, two = {"name": "alice", "salt_env": "ALICE_SALT"}, {"name": "bob", "salt": "SECRET"}
    settings = load_settings({"quotas": [one, two]})
    assert "SECRET" not in f"{settings!r}{settings.model_dump()}{settings.model_dump_json()}"
    with pytest.raises(ConfigError, match="alice and bob have the same salt; remove one of them") as refused:
        Accounts(settings.quotas, 8, Lru)
    assert "SECRET" not in str(refused.value)
    assert Accounts(settings.quotas[:1], 8, Lru).of(Tenant("SECRET")).spec.name == "alice"
    monkeypatch.setenv("ALICE_SALT", "")
    with pytest.raises(ConfigError, match="alice: environment variable ALICE_SALT is not set, empty or longer than"):
        Accounts(settings.quotas[:1], 8, Lru)
    monkeypatch.delenv("ALICE_SALT")
    with pytest.raises(ConfigError, match="environment variable that salt_env names is not set"):
        Accounts(settings.quotas[:1], 8, Lru)


@pytest.mark.parametrize("others", ["refused", "live"])
def test_chunks_dropped_by_a_reset_are_evicted_first(others: str) -> None:
    """A chunk that a reset has dropped may still occupy its slot.

    The pool uses this slot first, so no chunk that can be found is evicted.
    """
    accounts = Accounts(parse_quotas([{"name": "a", "salt": "a"}]), 4, Lru)
    catalog = SharedCatalog(4, 1, accounts, Counters())
    catalog.sweep_slots = 1
    kept = [catalog.reserve(0) for _ in range(3)]
    assert all(kept)
    pieces = [catalog.write(chunk, 1, bytes([at]), keep=False) for at, chunk in enumerate(kept) if chunk is not None]
    old = catalog.reserve(0, Tenant("a"))
    assert old is not None
    catalog.landed(catalog.write(old, 1, b"old", keep=False))
    catalog.reset()
    if others == "live":
        catalog.lost(pieces.pop())
        live = catalog.reserve(0)
        assert live is not None
        catalog.landed(catalog.write(live, 1, b"live", keep=False))
    assert catalog.reserve(0, Tenant("a") if others == "live" else ANYBODY) is not None
    assert (catalog.find(0, b"live") is not None) == (others == "live")
