"""An engine's own dict of the chunks in a node's memory, updated from the journal, and the engine's leases.

A lookup is a dict probe. The dict may lag by one step, so a hit counts only after its chunks were pinned. A few calls
of numpy pin all chunks of a hit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Mapping, MutableMapping
from typing import Final, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvpipe.cache.policy.large import by_key
from kvpipe.node.layout import HEAD, STAMP, SlotRecord
from kvpipe.node.ledger import LedgerReader
from kvpipe.node.segment import Segment
from kvpipe.statemachine.node_slot import PUBLISHED

RECORDS_MAX: Final = 256
"""The number of table slots that one `poll` scans, and of journal records that it reads. Each takes about 0.5 ms.

With KV events, the notes of 256 chunks take about 2 ms more. A poll that finds more records than this
number reads up to twice as many.
"""
UNREADABLE_MAX: Final = 64
"""The number of polls after which `poll` gives up on an unreadable record, and scans the table instead."""

STAMP_BYTES: Final = STAMP.size
_ONE: Final = np.uint32(1)
SlotPins: TypeAlias = NDArray[np.int64]
"""The slots that one call of `NodeLeases.pin` has pinned."""


def stamp_of(slot: int, generation: int) -> bytes:
    """Return a slot and its generation as two words, so that `NodeLeases.pin` joins stamps and converts no numbers."""
    return STAMP.pack(slot, generation)


def split(stamps: bytes) -> list[tuple[int, bytes]]:
    """Return slot and stamp of each of the joined stamps."""
    parts = (stamps[at : at + STAMP_BYTES] for at in range(0, len(stamps), STAMP_BYTES))
    return [(STAMP.unpack(stamp)[0], stamp) for stamp in parts]


class Placed(Protocol):
    """A chunk in a slot, while the slot has this generation."""

    @property
    def slot(self) -> int:
        """The number of the slot."""

    @property
    def generation(self) -> int:
        """The slot's generation."""


P = TypeVar("P", bound=Placed)


class Follower(ABC, Generic[P]):
    """Follows the journal, and keeps the object that `_made` returns for each chunk of one namespace.

    `poll` is called in every step, on the thread of the lookups.
    """

    def __init__(self, segment: Segment, namespace: int, groups: int) -> None:
        """Begin with an empty dict. The first polls scan the slot table."""
        self._reader, self._words, self._namespace = LedgerReader(segment), segment.words, namespace
        self._index: tuple[MutableMapping[bytes, P], ...] = tuple(by_key(segment.layout.slots) for _ in range(groups))
        self._known: dict[int, tuple[int, bytes]] = {}  # by slot: group and key of the chunk in the dict
        self._seen = [0] * segment.layout.slots  # by slot: the journal position of the newest record
        self._unreadable = 0
        self.scans = 0
        """The number of table scans: one at the beginning, and one whenever unread records were overwritten."""
        self._scan()

    @abstractmethod
    def _made(self, record: SlotRecord) -> P:
        """Return the dict's value for a published chunk."""

    def _wanted(self, record: SlotRecord) -> bool:
        """Return whether the dict gets the chunk of a record."""
        known = record.namespace == self._namespace and record.group < len(self._index)
        return known and record.state == PUBLISHED

    def _gone(self, placed: P) -> None:
        """Note that a chunk was removed from the dict."""

    def index(self, group: int) -> Mapping[bytes, P]:
        """Return the dict of one cache group, for lookups that probe many keys. Callers must not change the dict."""
        return self._index[group]

    @property
    def indexes(self) -> tuple[MutableMapping[bytes, P], ...]:
        """The dicts of all cache groups."""
        return self._index

    @property
    def lag(self) -> int:
        """The number of journal records that were not read yet."""
        return int(self._words[HEAD]) - self._at

    @property
    def is_whole(self) -> bool:
        """Whether no scan of the table is under way."""
        return self._scanned == len(self._seen)

    def has_read(self, position: int) -> bool:
        """Whether the dict has all records up to this position of the journal."""
        return self._at >= position and self.is_whole

    def _scan(self) -> None:
        self._at, self._scanned, self._unreadable = self._reader.head, 0, 0
        self.scans += 1

    def poll(self, records_max: int = RECORDS_MAX) -> None:
        """Read the new records of the journal. If more than `records_max` records are new, read up to twice as many."""
        head = int(self._words[HEAD])
        if head == self._at and self._scanned == len(self._seen):
            return
        stop = min(head, self._at + (records_max if self.lag <= records_max else 2 * records_max))
        while self._at < stop:
            record = self._reader.read(self._at + 1)
            if record is None:
                self._miss(head)
                break
            self._at, self._unreadable = self._at + 1, 0
            self._apply(record)
        if self._scanned < len(self._seen):
            self._scan_more(records_max)

    def _miss(self, head: int) -> None:
        """Handle an unreadable record. The record was overwritten, or, on some processors, is not visible yet."""
        self._unreadable += 1
        if head - self._at >= self._reader.layout.ring or self._unreadable > UNREADABLE_MAX:
            self._scan()

    def _scan_more(self, records_max: int) -> None:
        stop = min(self._scanned + records_max, len(self._seen))
        while self._scanned < stop:
            record = self._reader.entry(self._scanned)
            self._scanned += 1
            if record is not None:  # else the journal, read from the scan's start on, has the record
                self._apply(record)

    def _apply(self, record: SlotRecord) -> None:
        """Apply a record, unless a newer record of the slot was applied before.

        Journal and table are read in parallel, so records may arrive out of order.
        """
        slot = record.slot
        if record.seq <= self._seen[slot]:
            return
        self._seen[slot] = record.seq
        if (known := self._known.pop(slot, None)) is not None:
            group, key = known
            place = self._index[group].get(key)
            if place is not None and place.slot == slot:
                del self._index[group][key]
                self._gone(place)
        if not self._wanted(record):
            return
        index = self._index[record.group]
        other = index.get(record.key)
        if other is None or self._seen[other.slot] < record.seq:  # false if the scan has found a newer copy
            self._known[slot] = record.group, record.key
            index[record.key] = self._made(record)
            if other is not None:
                self._gone(other)


class NodeLeases:
    """An engine's leases. One thread of one process writes the engine's row of counters."""

    def __init__(self, segment: Segment, row: int) -> None:
        """Use `row`, the row of counters that the holder has assigned to this engine."""
        self.row = row
        """The number of the row, or -1 after `lose`."""
        self._row = np.frombuffer(segment.leases_of(row), np.uint32)
        self._generations = np.frombuffer(segment.generations, np.int64)
        self.count = 0

    def pin(self, stamps: bytes, held: Container[bytes] = ()) -> SlotPins | None:
        """Lease all chunks with these joined stamps. Returns None, without a lease, if one of the chunks was evicted.

        All leases are stored before the first generation is loaded (`fence.py` has the reason). A slot that is named
        twice is leased twice. `held` has stamps of chunks that this engine leases already. These chunks keep their
        bytes even after an eviction, because the holder does not reuse leased slots.
        """
        if self.row < 0:
            return None
        words = np.frombuffer(stamps, np.int64)
        slots, generations = words[::2], words[1::2]
        np.add.at(self._row, slots, _ONE)
        self.count += len(slots)
        changed = self._generations[slots] != generations
        if changed.any() and any(stamp_of(*words[2 * at : 2 * at + 2]) not in held for at in np.flatnonzero(changed)):
            self.unpin(slots)
            return None
        return slots

    def is_there(self, place: Placed) -> bool:
        """Whether the slot has this generation.

        Without a lease, the slot may have another generation in the next moment.
        """
        return self.row >= 0 and bool(self._generations[place.slot] == place.generation)

    def unpin(self, pins: SlotPins) -> None:
        """End the leases of one call of `pin`."""
        np.subtract.at(self._row, pins, _ONE)
        self.count -= len(pins)

    def lose(self) -> None:
        """Lease nothing from now on, because the holder may have assigned the row to another engine."""
        self.row, self._row = -1, self._row.copy()
