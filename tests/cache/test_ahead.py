"""Chunks that are in memory ahead of requests count once.

The share of these that requests use limits the room for more.
"""

from __future__ import annotations

import pytest

from kvpipe.cache.ahead import ANNOUNCED_SHARE, AccountAhead
from kvpipe.cache.catalog import Catalog
from kvpipe.cache.chunks import Chunk, Owner
from kvpipe.cache.policy.lru import Lru
from kvpipe.cache.quotas import Accounts, SharedCatalog
from kvpipe.cache.tenants import ANYBODY, Tenant
from kvpipe.inputs.quota_spec import QuotaSpec
from kvpipe.testing.catalog_integrity import check_integrity
from kvpipe.trace.log import Counters

SLOTS = 128
MOST = int(SLOTS * ANNOUNCED_SHARE)


def _catalog() -> Catalog:
    return Catalog(SLOTS, 1, Lru(), Counters())


def _saved(catalog: Catalog, count: int, name: str = "k", tenant: Tenant = ANYBODY) -> list[Chunk]:
    """Return chunks that were just saved."""
    out = []
    for number in range(count):
        chunk = catalog.reserve(0, tenant)
        assert chunk is not None
        catalog.landed(catalog.write(chunk, 1, f"{name}{number}".encode(), keep=True))
        out.append(chunk)
    check_integrity(catalog)
    return out


def test_each_chunk_counts_once() -> None:
    """A chunk counts once as used or wasted, for any number of announcements and fetches."""
    catalog = _catalog()
    chunks, ahead = _saved(catalog, 6), catalog.ahead
    for chunk in chunks[:4]:
        ahead.brought(chunk)
    ahead.keep(chunks[2:])
    ahead.keep(chunks[2:])
    assert ahead.of_account(ANYBODY).announced == 4
    check_integrity(catalog)
    catalog.lease(Owner("a", 1), chunks[:3])
    assert len(ahead.chunks) == 6, "it is held, and may be for nobody who has come"
    catalog.release(Owner("a", 1))
    catalog.refresh(chunks[:4])
    for chunk in chunks[3:]:
        catalog.evict(chunk)
    assert not ahead.chunks
    assert ahead.of_account(ANYBODY).announced == 0
    counters = catalog.counters
    assert (counters["chunks_prefetched"], counters["prefetch_used"], counters["prefetch_wasted"]) == (4, 4, 0)
    check_integrity(catalog)


def test_chunk_counted_in_several_turns_is_neither_used_nor_wasted() -> None:
    """Each turn of a prompt with several turns counts the prompt's chunks again.

    A fetched chunk stays in the counts until a request uses the chunk or the chunk is evicted.
    """
    catalog = _catalog()
    chunks, ahead = _saved(catalog, 2), catalog.ahead
    ahead.brought(chunks[0])
    ahead.keep(chunks)
    room = catalog.room_ahead(ANYBODY)
    ahead.count_anew(chunks)
    assert catalog.room_ahead(ANYBODY) == room + 2
    assert list(ahead.chunks) == chunks[:1]
    catalog.evict(chunks[0])
    assert catalog.counters["prefetch_wasted"] == 1


@pytest.mark.parametrize("held", [True, False], ids=["held", "idle"])
def test_reset_drops_announced_chunks_and_leaves_each_client_its_room(*, held: bool) -> None:
    """Resets are made by operators, so a reset does not reduce the room of any client.

    Each dropped chunk leaves the counts when the sweep reaches the chunk.
    """
    catalog = _catalog()
    room, chunks = catalog.room_ahead(ANYBODY), _saved(catalog, 8)
    catalog.ahead.keep(chunks)
    for chunk in chunks:
        catalog.ahead.brought(chunk)
    if held:
        catalog.lease(Owner("a", 1), chunks)
    catalog.reset()
    check_integrity(catalog)
    while catalog.stale:
        catalog.sweep()
    assert not catalog.ahead.chunks
    assert catalog.room_ahead(ANYBODY) == room
    assert catalog.counters["prefetch_wasted"] == 0
    check_integrity(catalog)


def test_announcements_used_half_of_the_time_get_a_quarter_of_the_room() -> None:
    """If half of the announced chunks were unused, they get at most a quarter of the largest possible room."""
    catalog = _catalog()
    account = catalog.ahead.of_account(ANYBODY)
    account._used = account._wasted = SLOTS / 2
    assert 0.2 * MOST < catalog.room_ahead(ANYBODY) <= MOST / 4


@pytest.mark.parametrize("used", [1, 3])
def test_share_of_useful_chunks_stays_when_counts_are_halved(used: int) -> None:
    """In each case, requests use `used` of every four announced chunks."""
    account = AccountAhead()
    for number in range(20 * SLOTS):
        account.announced += 1
        account.over(used=number % 4 < used)
        account.room(SLOTS)
    assert account._used / (account._used + account._wasted) == pytest.approx(used / 4, abs=0.05)
    assert account._used + account._wasted <= SLOTS


def _come(catalog: Catalog, name: str) -> None:
    """Announce requests that do arrive, until nearly all of the room is available."""
    for turn in range(200):
        chunks = _saved(catalog, catalog.room_ahead(ANYBODY), f"{name}{turn}+")
        catalog.ahead.keep(chunks)
        catalog.refresh(chunks)
    assert catalog.room_ahead(ANYBODY) >= 0.75 * MOST


def test_room_shrinks_when_announced_requests_never_arrive() -> None:
    """The room shrinks to a fiftieth of the pool. The room grows again as soon as announced requests arrive."""
    catalog = _catalog()
    ahead = catalog.ahead
    assert 1 < catalog.room_ahead(ANYBODY) < MOST / 16, "nothing is known yet"
    _come(catalog, "before")
    rooms = []
    for turn in range(400):
        room = catalog.room_ahead(ANYBODY)
        chunks = _saved(catalog, max(1, room), f"{turn}/")
        ahead.keep(chunks[:room])
        assert catalog.room_ahead(ANYBODY) == 0 or room == 0
        rooms.append(room)
        for chunk in chunks:
            catalog.evict(chunk)
    assert max(rooms[-100:]) <= SLOTS / 50
    assert min(rooms) >= 1, "else it would never be known that they are to be believed again"
    _come(catalog, "after")


def test_chunks_for_announced_requests_take_only_their_room() -> None:
    """The rest of the pool stays for other requests."""
    catalog = _catalog()
    chunks, ahead = _saved(catalog, SLOTS), catalog.ahead
    ahead.keep(chunks[:MOST])
    assert catalog.room_ahead(ANYBODY) == 0
    catalog.evict(chunks[0])
    assert catalog.room_ahead(ANYBODY) == 0, "one of them was of no use"
    catalog.refresh(chunks[1:MOST])
    assert catalog.room_ahead(ANYBODY) > 0


def test_a_tiny_pool_has_room_for_one() -> None:
    """With no room at all, no chunk could be counted as used, so the room could never grow."""
    assert Catalog(2, 1, Lru(), Counters()).room_ahead(ANYBODY) == 1


def _shared() -> SharedCatalog:
    """Return a pool. The salt `a` has a quarter of the pool, `b` at most a quarter, and other salts the rest."""
    given = [{"name": "a", "salt": "a", "share": 0.25}, {"name": "b", "salt": "b", "limit": 0.25}]
    specs = [QuotaSpec.model_validate(one) for one in given]
    return SharedCatalog(SLOTS, 1, Accounts(specs, SLOTS, lambda _: Lru()), Counters())


def test_announcements_of_a_quota_get_half_of_its_slots() -> None:
    """A quota's other prompts keep half of the quota's slots, and no quota takes another quota's room."""
    catalog = _shared()
    a, b = (catalog.tenants.named(salt, None) for salt in "ab")
    for tenant in (a, b, ANYBODY):
        catalog.ahead.of_account(tenant)._used = SLOTS / 4
    rooms = [catalog.room_ahead(tenant) for tenant in (a, b, ANYBODY)]
    assert MOST > rooms[0] == rooms[2] > MOST // 4 > rooms[1] > MOST // 8
    catalog.ahead.keep(_saved(catalog, rooms[0], "a", a))
    catalog.ahead.keep(_saved(catalog, rooms[1], "b", b))
    assert [catalog.room_ahead(tenant) for tenant in (a, b, ANYBODY)] == [0, 0, rooms[2]]
    check_integrity(catalog)


def test_false_announcements_of_one_quota_leave_the_room_of_another() -> None:
    """Each quota counts its own announced chunks."""
    catalog = _shared()
    a, b = (catalog.tenants.named(salt, None) for salt in "ab")
    catalog.ahead.of_account(b)._used = SLOTS / 4
    before = catalog.room_ahead(a), catalog.room_ahead(b)
    for turn in range(50):
        chunks = _saved(catalog, catalog.room_ahead(b), f"b{turn}/", b)
        catalog.ahead.keep(chunks)
        for chunk in chunks:
            catalog.evict(chunk)
        _saved(catalog, len(chunks), f"b{turn}+", b)
    assert catalog.room_ahead(b) == 1 < before[1]
    assert catalog.room_ahead(a) == before[0]
    check_integrity(catalog)
