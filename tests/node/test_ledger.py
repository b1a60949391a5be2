"""The tables of a node's memory: half-written records are not read, and interrupted transitions are completed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpipe.errors import ConfigError
from kvpipe.node.layout import (
    HEAD,
    PAGE_BYTES,
    RECORD_BYTES,
    ClientRow,
    NodeLayout,
    OtherVersionError,
    Process,
    SlotRecord,
    unpack_layout,
    unpack_row,
    unpack_slot,
)
from kvpipe.node.ledger import Ledger
from kvpipe.node.replica import NodeLeases, SlotPins
from kvpipe.node.segment import Segment, allocate, create, lock
from kvpipe.statemachine.node_slot import EVICTING, FREE, GRANTED, PUBLISHED
from tests.rigs.node_replica import Replica
from tests.rigs.node_world import DyingLedger, Killed

SLOTS = 4
RECORDS = st.builds(
    SlotRecord,
    seq=st.integers(0, 2**64 - 1),
    slot=st.integers(0, 2**32 - 1),
    state=st.sampled_from([FREE, GRANTED, PUBLISHED]),
    generation=st.integers(0, 2**64 - 1),
    owner=st.integers(0, 2**32 - 1),
    namespace=st.integers(0, 255),
    group=st.integers(0, 2**16 - 1),
    behind=st.just(b"") | st.binary(min_size=8, max_size=8).filter(any),
    units=st.integers(0, 2**32 - 1),
    key=st.binary(max_size=64),
)


@pytest.fixture
def fd() -> Iterator[int]:
    """Return the descriptor of a small memory."""
    made = create(SLOTS, 64, rows=2, ring=8)
    yield made
    os.close(made)


@given(record=RECORDS, at=st.integers(0, RECORD_BYTES - 9), byte=st.integers(1, 255))
def test_record_is_read_as_written_and_not_when_damaged(record: SlotRecord, at: int, byte: int) -> None:
    """A change of any byte is detected."""
    raw = record.pack()
    assert len(raw) == RECORD_BYTES
    assert unpack_slot(raw) == record
    damaged = bytearray(raw)
    damaged[at] ^= byte
    assert unpack_slot(bytes(damaged)) is None


@given(old=RECORDS, new=RECORDS, cut=st.integers(1, RECORD_BYTES - 1))
def test_half_written_record_is_not_read(old: SlotRecord, new: SlotRecord, cut: int) -> None:
    """The second half of a half-written record still belongs to an older record."""
    mixed = new.pack()[:cut] + old.pack()[cut:]
    assert unpack_slot(mixed) in {None, old, new}


def test_row_of_64_processes_fits() -> None:
    """The row of a client with 64 processes is as long as the room for one copy of a row."""
    processes = tuple(Process(n, 2**60 + n) for n in range(64))
    row = ClientRow(3, b"\1" * 15 + b"\0", 7, processes, processes[:9])
    assert unpack_row(row.pack()) == row
    assert len(row.pack()) == 1024


@pytest.mark.parametrize("at", [0, 8, 40])
def test_header_of_another_version_is_refused(at: int) -> None:
    """A header is refused if its checksum, magic number or version is wrong."""
    raw = bytearray(NodeLayout(1, 64, 1, 8, b"t" * 16).pack())
    raw[at] += 1
    with pytest.raises(OtherVersionError):
        unpack_layout(bytes(raw))


def test_memory_that_is_not_sealed_is_refused() -> None:
    """The owner of an unsealed memory could crash all other processes by shrinking the memory."""
    fd = os.memfd_create("other")
    os.ftruncate(fd, NodeLayout(1, 64, 1, 8, b"t" * 16).size)
    os.pwrite(fd, NodeLayout(1, 64, 1, 8, b"t" * 16).pack(), 0)
    with pytest.raises(ConfigError, match="sealed"):
        Segment(fd)
    os.close(fd)


def test_size_of_the_memory_cannot_be_changed(fd: int) -> None:
    """The memory can be neither shrunk nor enlarged."""
    for size in (0, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)


def test_one_process_holds_the_memory(fd: int) -> None:
    """The lock belongs to a separate open file description. So a client with the memory's descriptor has no lock."""
    first = lock(fd)
    assert first is not None
    assert lock(fd) is None
    shared = os.dup(fd)
    os.close(first)
    again = lock(shared)
    assert again is not None
    os.close(again)
    os.close(shared)


def test_tables_do_not_overlap(fd: int) -> None:
    """The tables are disjoint, and the slots begin at a page."""
    layout = Segment(fd).layout
    places = [
        0, PAGE_BYTES, layout.generations_at, layout.leases_at, layout.table_at, layout.journal_at, layout.rows_at,
        layout.namespaces_at, layout.slots_at, layout.size,
    ]  # fmt: skip
    assert places == sorted(set(places))
    assert layout.slots_at % PAGE_BYTES == 0
    allocate(fd, layout, 0, SLOTS)


@pytest.mark.parametrize("fuse", range(1, 9))
def test_interrupted_transition_is_completed_or_undone(fd: int, fuse: int) -> None:
    """A holder dies at the `fuse`-th step of a transition. Afterwards table, generation and journal agree."""
    segment = Segment(fd)
    ledger = DyingLedger(segment)
    ledger.recover()
    before = ledger.commit(SlotRecord(0, 1, GRANTED, 0, owner=1))
    ledger.fuse = fuse
    with contextlib.suppress(Killed):
        ledger.commit(SlotRecord(0, 1, PUBLISHED, 1, key=b"k"))
    after = Ledger(Segment(fd))
    record = after.recover()[1]
    assert record in {before, SlotRecord(before.seq + 1, 1, PUBLISHED, 1, key=b"k")}
    assert segment.generations[1] == record.generation
    assert after.read(after.head) == record
    assert after.commit(SlotRecord(0, 2, GRANTED, 0)).seq == record.seq + 1


@pytest.mark.parametrize("cut", [1, 100, 1000])
def test_half_written_row_keeps_its_old_content(fd: int, cut: int) -> None:
    """The other copy of the row is complete."""
    segment = Segment(fd)
    ledger = Ledger(segment)
    old = ledger.set_row(1, ClientRow(0, b"a" * 16, 0, (Process(1, 1),)))
    new = ClientRow(old.version + 1, b"a" * 16, 0, (Process(1, 1), Process(2, 2)))
    at = segment.layout.rows_at + (2 + new.version % 2) * 1024
    segment.buffer[at : at + cut] = new.pack()[:cut]
    assert ledger.row(1) == old
    assert ledger.set_row(1, new) == ledger.row(1) == new


def test_damaged_table_is_not_adopted(fd: int) -> None:
    """A holder's crash cannot leave such a table, so it was damaged in another way."""
    segment = Segment(fd)
    ledger = Ledger(segment)
    ledger.commit(SlotRecord(0, 0, GRANTED, 0))
    ledger.commit(SlotRecord(0, 1, GRANTED, 0))
    segment.buffer[segment.layout.table_at + 3] ^= 255
    with pytest.raises(ValueError, match="slot 0"):
        ledger.recover()


def _replica(fd: int) -> tuple[Ledger, Replica]:
    return Ledger(Segment(fd)), Replica(Segment(fd), 0, 1)


def test_overwritten_journal_leads_to_a_scan(fd: int) -> None:
    """An engine that was stopped for a long time finds all chunks with its first polls."""
    ledger, replica = _replica(fd)
    replica.poll()
    for n in range(20):
        ledger.commit(SlotRecord(0, n % SLOTS, PUBLISHED, 2 * n + 1, key=b"%d" % n))
    for _ in range(3):
        replica.poll()
    assert set(replica.index(0)) == {b"16", b"17", b"18", b"19"}
    assert replica.scans == 2


def test_scan_prefers_the_newer_place_when_the_table_is_read_first(fd: int) -> None:
    """An old record of a key must not hide the key's new place."""
    ledger, replica = _replica(fd)
    replica._scan_more(1)
    ledger.commit(SlotRecord(0, 3, PUBLISHED, 1, key=b"k"))
    ledger.commit(SlotRecord(0, 3, EVICTING, 2))
    ledger.commit(SlotRecord(0, 0, PUBLISHED, 1, key=b"k"))
    replica._scanned = 0
    replica._scan_more(1)
    for _ in range(6):
        replica.poll(1)
    assert replica.index(0)[b"k"].slot == 0


def test_record_that_is_not_visible_yet_is_read_later(fd: int) -> None:
    """Some processors show the journal's head before they show the record."""
    ledger, replica = _replica(fd)
    replica.poll()
    segment = ledger.segment
    segment.words[HEAD] = 1
    replica.poll()
    assert replica.scans == 1
    segment.words[HEAD] = 0
    ledger.commit(SlotRecord(0, 0, PUBLISHED, 1, key=b"k"))
    replica.poll()
    assert b"k" in replica.index(0)


def test_pin_holds_nothing_when_one_chunk_is_evicted(fd: int) -> None:
    """A failed pin takes no leases, and earlier leases stay. A pin that names a slot twice leases it twice."""
    ledger, replica = _replica(fd)
    for slot, key in enumerate((b"k", b"l", b"m")):
        ledger.commit(SlotRecord(0, slot, PUBLISHED, 1, key=key))
    replica.poll()
    places = [replica.index(0)[key] for key in (b"k", b"l", b"m")]
    segment = Segment(fd)
    leases = NodeLeases(segment, 1)
    row = ledger.segment.leases_of(1)
    stamps = [place.stamp for place in places]
    pins = leases.pin(b"".join([*stamps, stamps[2]]))
    assert pins is not None
    ledger.commit(SlotRecord(0, 1, EVICTING, 2))
    assert leases.pin(b"".join(stamps)) is None
    assert [leases.is_there(place) for place in places] == [True, False, True]
    assert (row.tolist(), leases.count) == ([1, 1, 2, 0], 4)
    again = leases.pin(b"".join(stamps), held=stamps[:2])
    assert again is not None
    leases.unpin(again)
    leases.unpin(pins)
    assert not any(ledger.segment.leases)
    assert leases.count == 0


def test_pin_stores_every_lease_before_it_loads_a_generation(fd: int) -> None:
    """The holder raises a generation, and then reads the leases.

    So either the pin sees this, or the holder sees the lease.
    """
    ledger, replica = _replica(fd)
    for slot, key in enumerate((b"k", b"l")):
        ledger.commit(SlotRecord(0, slot, PUBLISHED, 1, key=key))
    replica.poll()
    leases, seen = NodeLeases(Segment(fd), 1), list[list[int]]()

    class Watched:
        """Generations that record the leases which are stored at the time of a load."""

        def __getitem__(self, slots: SlotPins) -> SlotPins:
            seen.append(ledger.segment.leases_of(1).tolist()[:2])
            return np.ones(len(slots), np.int64)

    leases._generations = Watched()  # type: ignore[assignment]
    assert leases.pin(b"".join(place.stamp for place in replica.index(0).values())) is not None
    assert seen == [[1, 1]]
