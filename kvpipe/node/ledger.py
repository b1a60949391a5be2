"""The ledger of a node's memory: the journal, the slot table and the generations, over one buffer.

Only the holder writes. Each transition of a slot is written in three steps: into the journal, into the slot table, and
into the slot's generation, which is raised. A holder that is killed between any two stores leaves at most one record
unfinished, which `recover` applies again. Clients read the journal to learn what can be found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

from kvpipe.node.layout import (
    BEAT,
    BOOT,
    COUNTS,
    FREE_ROW,
    HEAD,
    NAMESPACE_RECORD_BYTES,
    NAMESPACES_MAX,
    RECORD_BYTES,
    ROW_BYTES,
    STATES,
    ClientRow,
    SlotRecord,
    pack_namespace,
    unpack_namespace,
    unpack_row,
    unpack_slot,
)
from kvpipe.node.segment import Segment
from kvpipe.statemachine import node_slot as m

BEAT_SLOTS: Final = 256
"""Every loop over slots advances the holder's clock after this many slots, because engines kill a silent holder."""
T = TypeVar("T")
_NOTHING: Final = bytes(RECORD_BYTES)


class LedgerReader:
    """Reads the tables of a segment, which every process may read."""

    def __init__(self, segment: Segment) -> None:
        """Read from `segment`, a mapping that outlives this reader."""
        self.segment, self.layout = segment, segment.layout
        self._buffer, self._words = segment.buffer, segment.words

    @property
    def head(self) -> int:
        """The position of the journal's last record. The first record has position 1."""
        return int(self._words[HEAD])

    @property
    def boot(self) -> int:
        """The boot token of the segment's holder."""
        return int(self._words[BOOT])

    def _journal_at(self, seq: int) -> int:
        return self.layout.journal_at + seq % self.layout.ring * RECORD_BYTES

    def read(self, seq: int) -> SlotRecord | None:
        """Return the journal's record at `seq`, or None if this record is not visible yet, or was overwritten."""
        at = self._journal_at(seq)
        record = unpack_slot(bytes(self._buffer[at : at + RECORD_BYTES]))
        return record if record is not None and record.seq == seq else None

    def entry(self, slot: int) -> SlotRecord | None:
        """Return the slot table's record of a slot, or None if the record is half-written."""
        at = self.layout.table_at + slot * RECORD_BYTES
        raw = bytes(self._buffer[at : at + RECORD_BYTES])
        record = SlotRecord(0, slot, m.FREE, 0) if raw == _NOTHING else unpack_slot(raw)
        return record if record is not None and record.slot == slot else None

    def row(self, row: int) -> ClientRow:
        """Return the row of a client, from the newer of the row's complete copies."""
        at = self.layout.rows_at + row * 2 * ROW_BYTES
        copies = [unpack_row(bytes(self._buffer[one : one + ROW_BYTES])) for one in (at, at + ROW_BYTES)]
        return max((copy for copy in copies if copy is not None), default=FREE_ROW, key=lambda copy: copy.version)

    def namespace(self, number: int) -> bytes | None:
        """Return the digest of namespace `number`, or None if no namespace has this number."""
        at = self.layout.namespaces_at + number * NAMESPACE_RECORD_BYTES
        return unpack_namespace(bytes(self._buffer[at : at + NAMESPACE_RECORD_BYTES]))


class Ledger(LedgerReader):
    """The holder's ledger. Call `recover` before all other methods."""

    def __init__(self, segment: Segment, beat: Callable[[], None] | None = None) -> None:
        """Write to `segment`, a mapping that outlives this ledger.

        `beat` advances the holder's clock. By default only the clock of `segment` advances.
        """
        super().__init__(segment)
        self._beat = beat or self._advance
        self._states = [m.FREE] * self.layout.slots  # by slot
        self._counts = Counter(self._states)

    def _advance(self) -> None:
        self._words[BEAT] += 1

    def beating(self, items: Iterable[T]) -> Iterator[T]:
        """Yield `items`, and show engines meanwhile that this holder is alive."""
        for count, item in enumerate(items):
            if count % BEAT_SLOTS == 0:
                self._beat()
            yield item

    def commit(self, record: SlotRecord) -> SlotRecord:
        """Move a slot to the state of `record`. Returns the record with its position in the journal.

        The record is written to the journal before the slot table and the generation change.
        """
        record = record._replace(seq=self.head + 1)
        slot, state, raw = record.slot, record.state, record.pack()
        self._append(record.seq, raw)
        self._words[HEAD] = record.seq
        self._put(slot, raw)
        self._raise(slot, record.generation)
        self._counts[self._states[slot]] -= 1
        self._counts[state] += 1
        self._show_counts(self._states[slot], state)
        self._states[slot] = state
        return record

    def _append(self, seq: int, raw: bytes) -> None:
        at = self._journal_at(seq)
        self._buffer[at : at + RECORD_BYTES] = raw

    def _put(self, slot: int, raw: bytes) -> None:
        at = self.layout.table_at + slot * RECORD_BYTES
        self._buffer[at : at + RECORD_BYTES] = raw

    def _raise(self, slot: int, generation: int) -> None:
        self.segment.generations[slot] = generation

    def _show_counts(self, *states: str) -> None:
        """Write the number of slots in each of `states` into the words, for the metrics of engines."""
        for state in states:
            self._words[COUNTS + STATES.index(state)] = self._counts[state]

    def recover(self) -> list[SlotRecord]:
        """Finish the last record that an earlier holder began, and return the record of every slot."""
        last = self.read(self.head)
        if last is not None:  # a record after the head was not applied yet, so the transition did not happen
            self._put(last.slot, last.pack())
        records = []
        for slot in self.beating(range(self.layout.slots)):
            record = self.entry(slot)
            if record is None:  # no holder's crash leaves this: a client has written to the tables
                raise ValueError(f"slot {slot} of the node's memory has no whole record")
            self._raise(slot, record.generation)
            records.append(record)
        self._states = [record.state for record in records]
        self._counts = Counter(self._states)
        self._show_counts(*STATES)
        return records

    def set_row(self, row: int, client: ClientRow) -> ClientRow:
        """Write the row of a client, with the next version.

        If the holder is killed meanwhile, the old copy stays valid.
        """
        client = client._replace(version=self.row(row).version + 1)
        at = self.layout.rows_at + (row * 2 + client.version % 2) * ROW_BYTES
        self._buffer[at : at + ROW_BYTES] = client.pack()
        return client

    def set_namespace(self, number: int, digest: bytes) -> None:
        """Give number `number` to the namespace of `digest`."""
        at = self.layout.namespaces_at + number * NAMESPACE_RECORD_BYTES
        self._buffer[at : at + NAMESPACE_RECORD_BYTES] = pack_namespace(digest)

    def namespaces(self) -> dict[bytes, int]:
        """Return the numbers of all namespaces, by digest."""
        found = ((self.namespace(number), number) for number in range(NAMESPACES_MAX))
        return {digest: number for digest, number in found if digest is not None}
