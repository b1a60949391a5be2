"""Checks that the data structures of a node's memory, and of an engine's catalog on it, are consistent."""

from __future__ import annotations

import itertools
from collections import Counter

from kvpipe.node.catalog import NodeCatalog
from kvpipe.node.layout import OWNED, READY
from kvpipe.node.memory import NodeMemory
from kvpipe.node.owners import NOBODY
from kvpipe.node.replica import SlotPins, stamp_of
from kvpipe.node.shared import SharedChunk
from kvpipe.statemachine import chunk as m
from kvpipe.statemachine import node_grant as g
from kvpipe.statemachine import node_slot as s


def check_node_integrity(catalog: NodeCatalog) -> None:
    """Raise AssertionError unless the catalog's index, leases and grants equal those of the node's memory."""
    chunks = [chunk for chunk in catalog.chunks() if isinstance(chunk, SharedChunk)]
    writing = {chunk.slot for chunk in chunks if chunk.writers}
    assert {chunk.slot for chunk in catalog._writing} == writing, (
        "the recorded writers differ from the chunks with writers"
    )
    granted = {slot for slot, grant in catalog.pool.stock.grants.items() if grant.state.name == g.WRITING}
    assert granted == writing.union(catalog._open), "slots are written without a grant, or granted slots are lost"
    assert catalog.stale == sum(map(len, catalog._before)), "chunks that a reset has forgotten are not counted"
    assert catalog._landed.keys() <= catalog.pool.stock.reports.keys(), "a landed chunk is not reported"
    leases: dict[int, int] = {}
    for owned in catalog.leased.values():
        for chunk in owned:
            leases[id(chunk)] = leases.get(id(chunk), 0) + 1
    assert leases == {id(c): c.leases for c in chunks if c.leases}, "leases differ"
    assert catalog._pinned.keys() == catalog.leased.keys(), "leases without pins, or pins without leases"
    for owner, owned in catalog.leased.items():
        pinned = Counter(slot for pins in catalog._pinned[owner] for slot in pins.tolist())
        assert pinned == Counter(chunk.slot for chunk in owned), f"the pins of {owner} differ from its leases"
    asked = (pins for pins, _ in catalog._asked)
    every: list[SlotPins] = [*asked, *itertools.chain.from_iterable(catalog._pinned.values())]
    pinned = Counter(slot for pins in every for slot in pins.tolist())
    row = dict(enumerate(catalog._pins._row.tolist()))
    assert {slot: count for slot, count in row.items() if count} == pinned, "the row of leases differs from the pins"
    for index, stamps in zip(catalog._index, catalog._stamps, strict=True):
        made = {key: stamp_of(chunk.slot, chunk.generation) for key, chunk in index.items()}  # type: ignore[attr-defined]
        assert stamps == made, "the stamps differ from the chunks"
    for group, index in enumerate(catalog._index):
        for key, chunk in index.items():
            assert catalog.at(chunk.slot) is chunk, "a chunk can be found that is not in its slot"
            assert (chunk.group, chunk.tail, chunk.state.row) == (group, key, m.READY), f"chunk {chunk.slot} is found"


def check_regions(memory: NodeMemory) -> None:
    """Raise AssertionError unless each byte of a holder's memory has at most one use, in one region."""
    owners = memory._owners
    used: list[tuple[int, int]] = []
    for number, (segment, keeper) in memory.regions.items():
        layout, name = segment.layout, f"region {number}"
        assert layout.region == number, f"{name}: the header has another number"
        usable = {slot for slot in range(segment.words[READY]) if owners.owns(layout, slot)}
        assert keeper._usable == usable, f"{name}: the usable slots differ from the owners of the pieces"
        assert segment.words[OWNED] == len(usable), f"{name}: the number of usable slots differs"
        free = {slot for slot in usable if keeper._slots[slot].state.name == s.FREE}
        assert sorted(keeper._free) == sorted(free), f"{name}: a usable slot was lost, or would be granted twice"
        busy = [slot for slot, cursor in enumerate(keeper._slots) if cursor.state.name != s.FREE]
        assert usable.issuperset(busy), f"{name}: a slot is used whose bytes another region owns"
        used += [(slot * layout.slot_bytes, (slot + 1) * layout.slot_bytes) for slot in busy]
    used.sort()
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(used)), "two slots use the same bytes"
    known = {*memory.regions, NOBODY}
    assert all(owners[piece] in known for piece in range(owners.count)), "a region that does not exist owns a piece"
