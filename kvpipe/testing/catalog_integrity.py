"""Whether a catalog's books agree with each other."""

from __future__ import annotations

from collections import Counter

from kvpipe.cache.ahead import ANNOUNCED
from kvpipe.cache.catalog import Catalog
from kvpipe.statemachine import chunk as m


def check_integrity(catalog: Catalog) -> None:
    """Raise AssertionError unless slots, index, leases, writers and policy agree with each other."""

    def check(ok: bool, what: str) -> None:  # noqa: FBT001
        if not ok:
            raise AssertionError(what)

    chunks = list(catalog.chunks())
    stale = [chunk for chunk in catalog._chunks if chunk is not None and chunk.era is not catalog._era]
    slots = [slot for slot, chunk in enumerate(catalog._chunks) if chunk is not None]
    free = [*catalog._free, *range(catalog.fresh, catalog.ready)]
    check(slots == sorted(c.slot for c in (*chunks, *stale)), "a chunk is not in its slot")
    check(catalog.stale == len(stale), f"{len(stale)} stale chunks, {catalog.stale} are counted")
    check(all(c.state.row == m.READY and not c.held for c in stale), "a stale chunk is in use")
    check(all(c.slot >= catalog._swept for c in stale), "a stale chunk is where nobody looks again")
    check(catalog.used == len(chunks), f"{len(chunks)} chunks, {catalog.used} are counted")
    check(set(catalog._writing) == {c for c in chunks if c.writers}, "it is not known what is written")
    check(len(set(free)) == len(free), "a slot is free twice")
    check(not set(slots) & set(free), "a chunk's slot is free")
    check(all(c.state.row != m.ABSENT for c in chunks), "an absent chunk has a slot")
    check(len(slots) + len(free) == catalog.ready, f"slots lost: {catalog.ready - len(slots) - len(free)}")
    check(all(slot < catalog.ready for slot in (*slots, *free)), "a slot is used that is not ready")
    check(catalog.writing == sum(c.writers for c in chunks), "pieces that are written are not counted")
    leased: dict[int, int] = {}
    for owned in catalog.leased.values():
        for c in owned:
            leased[id(c)] = leased.get(id(c), 0) + 1
    check(leased == {id(c): c.leases for c in chunks if c.leases}, "leases and their counts differ")
    for c in chunks:
        row = c.state.row
        check(0 <= c.ready <= c.written or row == m.EVICTING, f"chunk {c.slot}: ready {c.ready} of {c.written}")
        check((row in {m.RESERVED, m.GROWING}) <= (c.writers > 0), f"chunk {c.slot}: {row} without a writer")
        check(row != m.READY or c.writers == 0, f"chunk {c.slot}: READY with a writer")
        check(row != m.EVICTING or c.held, f"chunk {c.slot}: EVICTING but idle")
        check(all(mk.units <= c.ready for mk in c.marks), f"chunk {c.slot}: found further than it has landed")
    for g, index in enumerate(catalog._index):
        for key, c in index.items():
            check(catalog.at(c.slot) is c, "a chunk of before a reset can be found")
            check(c.group == g and any(mk.key == key for mk in c.marks), "an index entry has no mark")
            check(c.state.row in {m.READY, m.GROWING}, f"a {c.state.row} chunk can be found")
    check(all(c.state.row == m.READY and not c.held for c in catalog._spared), "a chunk goes first that is in use")
    ahead = catalog.ahead.chunks
    check(ahead.keys() <= {*chunks, *stale}, "a chunk is there ahead of requests that is not there")
    check(all(c.state.row in {m.READY, m.GROWING} for c in ahead), "a chunk is there ahead of requests, and not found")
    announced = Counter(catalog.account_of(c.tenant) for c, kind in ahead.items() if kind & ANNOUNCED)
    counted = {account: part.announced for account, part in catalog.ahead.parts.items() if part.announced}
    check(announced == counted, "what is announced is not counted")
    idle = sum(1 for c in chunks if not c.held and c.state.row == m.READY)
    check(idle + len(stale) == len(catalog._policy), f"{idle} idle chunks, {len(catalog._policy)} in the policy")
