"""An engine that scans the slot table while the holder writes to it finds only whole records."""

from __future__ import annotations

import os

import pytest

from kvpipe.node.layout import RECORD_BYTES, SlotRecord
from kvpipe.node.ledger import Ledger
from kvpipe.node.segment import Segment, create
from kvpipe.statemachine.node_slot import EVICTING, PUBLISHED
from tests.rigs.node_replica import Replica

OLD, NEW = b"o" * 64, b"n" * 64


@pytest.mark.parametrize("before", [PUBLISHED, EVICTING])
def test_half_written_entry_is_not_found(before: str) -> None:
    """The record is cut at each byte: the rest belongs to the earlier record.

    The key of such a record would be a mixture of both keys.
    """
    fd = create(1, 64, rows=1, ring=8)
    segment = Segment(fd)
    known = Ledger(segment).commit(SlotRecord(0, 0, before, 1, key=OLD))
    raw = SlotRecord(known.seq + 1, 0, PUBLISHED, 3, key=NEW).pack()
    at = segment.layout.table_at
    for cut in range(1, RECORD_BYTES + 1):
        segment.buffer[at : at + cut] = raw[:cut]
        replica = Replica(segment, 0, 1)
        replica.poll()
        found = {(key, place.generation) for key, place in replica.index(0).items()}
        assert found in (set(), {(NEW, 3)}), cut
    os.close(fd)
    assert found
