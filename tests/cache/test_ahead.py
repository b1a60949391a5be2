"""What is in memory for requests that have not come: counted once, and bounded by how much of it was of use before."""

from __future__ import annotations

import pytest

from kvpipe.cache.ahead import ANNOUNCED_SHARE, Part
from kvpipe.cache.catalog import Catalog, Chunk, Owner
from kvpipe.cache.policy.lru import Lru
from kvpipe.cache.quotas import Accounts, SharedCatalog
from kvpipe.cache.tenants import ANYBODY, Tenant
from kvpipe.quota_spec import QuotaSpec
from kvpipe.testing.catalog_integrity import check_integrity
from kvpipe.trace.log import Counters

SLOTS = 128
MOST = int(SLOTS * ANNOUNCED_SHARE)


def _catalog() -> Catalog:
    return Catalog(SLOTS, 1, Lru(), Counters())


def _saved(catalog: Catalog, count: int, name: str = "k", tenant: Tenant = ANYBODY) -> list[Chunk]:
    """Return chunks that have just been saved."""
    out = []
    for number in range(count):
        chunk = catalog.reserve(0, tenant)
        assert chunk is not None
        catalog.landed(catalog.write(chunk, 1, f"{name}{number}".encode(), keep=True))
        out.append(chunk)
    check_integrity(catalog)
    return out


def test_each_chunk_counts_once() -> None:
    """Used or wasted, whatever it is there for, and however often it was put there."""
    catalog = _catalog()
    chunks, ahead = _saved(catalog, 6), catalog.ahead
    for chunk in chunks[:4]:
        ahead.brought(chunk)
    ahead.keep(chunks[2:])
    ahead.keep(chunks[2:])
    assert ahead.part(ANYBODY).announced == 4
    check_integrity(catalog)
    catalog.lease(Owner("a", 1), chunks[:3])
    assert len(ahead.chunks) == 6, "it is held, and may be for nobody who has come"
    catalog.release(Owner("a", 1))
    catalog.refresh(chunks[:4])
    for chunk in chunks[3:]:
        catalog.evict(chunk)
    assert not ahead.chunks
    assert ahead.part(ANYBODY).announced == 0
    counters = catalog.counters
    assert (counters["chunks_prefetched"], counters["prefetch_used"], counters["prefetch_wasted"]) == (4, 4, 0)
    check_integrity(catalog)


def test_what_is_counted_anew_is_neither_used_nor_wasted() -> None:
    """A prompt may have several turns; what was brought is remembered."""
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
def test_a_reset_leaves_nothing_and_blames_nobody(*, held: bool) -> None:
    """As soon as what it forgets is taken apart. It is the operator's: no client is believed less for it."""
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


def test_what_is_right_half_of_the_time_has_a_quarter_of_the_room() -> None:
    """What is brought and not used costs what it evicts, so little is to be brought where little is used."""
    catalog = _catalog()
    part = catalog.ahead.part(ANYBODY)
    part._used = part._wasted = SLOTS / 2
    assert 0.2 * MOST < catalog.room_ahead(ANYBODY) <= MOST / 4


@pytest.mark.parametrize("used", [1, 3])
def test_share_of_useful_chunks_stays_when_counts_are_halved(used: int) -> None:
    """So many of each four announced chunks are of use."""
    part = Part()
    for number in range(20 * SLOTS):
        part.announced += 1
        part.over(used=number % 4 < used)
        part.room(SLOTS)
    assert part._used / (part._used + part._wasted) == pytest.approx(used / 4, abs=0.05)
    assert part._used + part._wasted <= SLOTS


def _come(catalog: Catalog, name: str) -> None:
    """All that is announced comes, until nearly all of the room is believed in."""
    for turn in range(200):
        chunks = _saved(catalog, catalog.room_ahead(ANYBODY), f"{name}{turn}+")
        catalog.ahead.keep(chunks)
        catalog.refresh(chunks)
    assert catalog.room_ahead(ANYBODY) >= 0.75 * MOST


def test_who_announces_what_never_comes_has_ever_less_room() -> None:
    """Down to a fiftieth of the pool, whatever came before; and gets it back as soon as what was announced comes."""
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


def test_all_that_is_there_for_what_was_announced_takes_its_room() -> None:
    """So that the rest of the pool is for the others, whatever is announced."""
    catalog = _catalog()
    chunks, ahead = _saved(catalog, SLOTS), catalog.ahead
    ahead.keep(chunks[:MOST])
    assert catalog.room_ahead(ANYBODY) == 0
    catalog.evict(chunks[0])
    assert catalog.room_ahead(ANYBODY) == 0, "one of them was of no use"
    catalog.refresh(chunks[1:MOST])
    assert catalog.room_ahead(ANYBODY) > 0


def test_a_tiny_pool_has_room_for_one() -> None:
    """Else nothing would ever be learned."""
    assert Catalog(2, 1, Lru(), Counters()).room_ahead(ANYBODY) == 1


def _shared() -> SharedCatalog:
    """Return a pool of which `a` has a quarter, `b` at most a quarter, and others what is left."""
    given = [{"name": "a", "salt": "a", "share": 0.25}, {"name": "b", "salt": "b", "limit": 0.25}]
    specs = [QuotaSpec.model_validate(one) for one in given]
    return SharedCatalog(SLOTS, 1, Accounts(specs, SLOTS, lambda _: Lru()), Counters())


def test_with_quotas_half_of_what_each_may_hold_is_for_what_it_announces() -> None:
    """So its other prompts have the other half, and nobody takes another's room."""
    catalog = _shared()
    a, b = (catalog.tenants.named(salt, None) for salt in "ab")
    for tenant in (a, b, ANYBODY):
        catalog.ahead.part(tenant)._used = SLOTS / 4
    rooms = [catalog.room_ahead(tenant) for tenant in (a, b, ANYBODY)]
    assert MOST > rooms[0] == rooms[2] > MOST // 4 > rooms[1] > MOST // 8
    catalog.ahead.keep(_saved(catalog, rooms[0], "a", a))
    catalog.ahead.keep(_saved(catalog, rooms[1], "b", b))
    assert [catalog.room_ahead(tenant) for tenant in (a, b, ANYBODY)] == [0, 0, rooms[2]]
    check_integrity(catalog)


def test_who_announces_what_never_comes_is_not_believed_for_others() -> None:
    """Nor does another take its room: each quota has its own."""
    catalog = _shared()
    a, b = (catalog.tenants.named(salt, None) for salt in "ab")
    catalog.ahead.part(b)._used = SLOTS / 4
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
