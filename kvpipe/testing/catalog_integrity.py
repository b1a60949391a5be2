"""A check that the data structures of a catalog are consistent."""

from __future__ import annotations

from collections import Counter

from kvpipe.cache.ahead import ANNOUNCED
from kvpipe.cache.catalog import Catalog
from kvpipe.node.catalog import NodeCatalog
from kvpipe.statemachine import chunk as m
from kvpipe.testing.node_integrity import check_node_integrity


def check_integrity(catalog: Catalog) -> None:
    """Raise AssertionError unless the catalog's slots, index, leases, writers and policy are consistent."""
    if isinstance(catalog, NodeCatalog):
        check_node_integrity(catalog)
        return
    chunks = list(catalog.chunks())
    stale = [chunk for chunk in catalog._chunks if chunk is not None and chunk.era is not catalog._era]
    slots = [slot for slot, chunk in enumerate(catalog._chunks) if chunk is not None]
    free = [*catalog._free, *range(catalog.fresh, catalog.ready)]
    assert slots == sorted(c.slot for c in (*chunks, *stale)), "a chunk is not in its slot"
    assert catalog.stale == len(stale), f"{len(stale)} stale chunks, {catalog.stale} are counted"
    assert all(c.state.row == m.READY and not c.held for c in stale), "a stale chunk is in use"
    assert all(c.slot >= catalog._swept for c in stale), "a stale chunk is in a slot that was swept already"
    assert catalog.used == len(chunks), f"{len(chunks)} chunks, {catalog.used} are counted"
    assert set(catalog._writing) == {c for c in chunks if c.writers}, (
        "`_writing` does not have exactly the chunks with writers"
    )
    assert len(set(free)) == len(free), "a slot is in the free list twice"
    assert not set(slots) & set(free), "a chunk's slot is free"
    assert all(c.state.row != m.ABSENT for c in chunks), "an absent chunk has a slot"
    assert len(slots) + len(free) == catalog.ready, f"slots lost: {catalog.ready - len(slots) - len(free)}"
    assert all(slot < catalog.ready for slot in (*slots, *free)), "a slot that is not ready is used or free"
    assert catalog.writing == sum(c.writers for c in chunks), "`writing` is not the number of writers"
    leased: dict[int, int] = {}
    for owned in catalog.leased.values():
        for c in owned:
            leased[id(c)] = leased.get(id(c), 0) + 1
    assert leased == {id(c): c.leases for c in chunks if c.leases}, "leases and their counts differ"
    for c in chunks:
        row = c.state.row
        assert 0 <= c.ready <= c.written or row == m.EVICTING, f"chunk {c.slot}: ready {c.ready} of {c.written}"
        assert row not in {m.RESERVED, m.GROWING} or c.writers > 0, f"chunk {c.slot}: {row} without a writer"
        assert row != m.READY or c.writers == 0, f"chunk {c.slot}: READY with a writer"
        assert row != m.EVICTING or c.held, f"chunk {c.slot}: EVICTING but idle"
        found = max([mk.units for mk in c.marks], default=0)
        assert found <= c.ready, f"chunk {c.slot}: can be found beyond its landed units"
    for g, index in enumerate(catalog._index):
        for key, c in index.items():
            assert catalog.at(c.slot) is c, "an index entry has a chunk that is not in its slot"
            assert c.group == g, "an index entry of another group"
            assert key in [mk.key for mk in c.marks], "an index entry has no mark"
            assert c.state.row in {m.READY, m.GROWING}, f"a {c.state.row} chunk can be found"
    ahead = catalog.ahead.chunks
    assert ahead.keys() <= {*chunks, *stale}, "`ahead` has a chunk that the catalog lacks"
    assert all(c.state.row in {m.READY, m.GROWING} for c in ahead), "`ahead` has a chunk that cannot be found"
    announced = Counter(catalog.account_of(c.tenant) for c, kind in ahead.items() if kind & ANNOUNCED)
    counted = {account: part.announced for account, part in catalog.ahead.by_account.items() if part.announced}
    assert announced == counted, "the number of announced chunks is wrong"
    idle = sum(1 for c in chunks if not c.held and c.state.row == m.READY)
    assert idle + len(stale) == len(catalog._policy), f"{idle} idle chunks, {len(catalog._policy)} in the policy"
