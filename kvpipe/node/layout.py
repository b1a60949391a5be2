"""The layout and the records of a node's shared memory.

The memory begins with a header, followed by words of 8 bytes, tables, the journal and the slots. A word is written in
one store, so a reader never sees half of a word. Everything else is written as records with a checksum. A reader that
finds a half-written record returns None.

Each further slot size is another *region*, which has a header, words, tables and a journal behind the slots. All
regions divide the same bytes into slots, each region into slots of its own size. These bytes consist of `PIECES`
pieces. For each piece, `owners.py` records the region that may use the piece.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
import zlib
from typing import Final, NamedTuple

from kvpipe.statemachine import node_slot as m

MAGIC: Final = b"kvpipe01"
VERSION: Final = 4
"""The version of the memory and of the messages. Other versions are refused."""
PAGE_BYTES: Final = 4096
KEY_BYTES_MAX: Final = 64
LINK_BYTES: Final = 8
PROCESSES_MAX: Final = 64
"""The largest number of processes of one client: its scheduler's process, its ranks' processes, and their helpers."""
NAMESPACES_MAX: Final = 256
TOKEN_BYTES: Final = 16
NAMESPACE_BYTES: Final = 32
REGIONS_MAX: Final = 8
"""The largest number of slot sizes in one memory."""
REGION_SLOT_BYTES_MIN: Final = 8192
"""The smallest slot size, in bytes, of the second and later regions. The bytes reserved for tables follow from it."""
PIECES: Final = 4096
"""The number of pieces of the slots' memory. One region owns all bytes of a piece."""

HEAD, BEAT, READY, BOOT = 0, 8, 16, 24
"""Offsets of words: the journal's last position, the holder's clock, the number of slots with memory, the boot token.

Each of these words has its own cache line.
"""
COUNTS: Final = 32
"""The offset of the words with the number of slots in each state, in the order of `STATES`."""
OWNED: Final = 48
"""The offset of the word with the number of slots that have memory and of which no other region owns bytes."""
WORDS: Final = 64

STATES: Final = (m.FREE, m.GRANTED, m.PUBLISHED, m.EVICTING, m.QUARANTINE)

_HEADER: Final = struct.Struct("<8sIIQQIIQ16s")
_RECORD: Final = struct.Struct("<QQIIIIHBB64s8s")
_CHECK: Final = struct.Struct("<I")
RECORD_BYTES: Final = 112
_ROW: Final = struct.Struct("<Q16sIHH")
_PROCESS: Final = struct.Struct("<IQ")
ROW_BYTES: Final = 1024
"""The size in bytes of one copy of a client's row. Each row has two copies, so that one copy is always complete."""
NAMESPACE_RECORD_BYTES: Final = 64
STAMP: Final = struct.Struct("=qq")
"""A slot and its generation, as one stamp. Messages and arrays have joined stamps."""


def _checked(body: bytes, size: int) -> bytes:
    return (body + _CHECK.pack(zlib.crc32(body))).ljust(size, b"\0")


def _is_whole(raw: bytes | memoryview, size: int) -> bool:
    return bool(zlib.crc32(raw[:size]) == _CHECK.unpack_from(raw, size)[0])


class SlotRecord(NamedTuple):
    """The state of a slot from journal position `seq` on. The journal and the slot table have the same records.

    `generation` is odd while the slot is PUBLISHED. A slot's generation changes with the slot's content and is never
    reused. `owner` is the row of the client that was granted the slot last. All other fields name the chunk of a
    PUBLISHED slot. `behind` is `link_of` the key of the previous chunk of the prefix, or b"" if there is none.
    """

    seq: int
    slot: int
    state: str
    generation: int
    owner: int = 0
    namespace: int = 0
    group: int = 0
    units: int = 0
    key: bytes = b""
    behind: bytes = b""

    def pack(self) -> bytes:
        """Return the record's bytes."""
        body = _RECORD.pack(
            self.seq, self.generation, self.slot, self.units, self.namespace, self.owner, self.group,
            STATES.index(self.state), len(self.key), self.key, self.behind,
        )  # fmt: skip
        return _checked(body, RECORD_BYTES)


def unpack_slot(raw: bytes) -> SlotRecord | None:
    """Return the record in `raw`, or None if it is half-written or was never written."""
    if not _is_whole(raw, _RECORD.size):
        return None
    seq, generation, slot, units, namespace, owner, group, state, length, key, behind = _RECORD.unpack_from(raw)
    behind = behind if any(behind) else b""
    return SlotRecord(seq, slot, STATES[state], generation, owner, namespace, group, units, key[:length], behind)


def link_of(key: bytes) -> bytes:
    """Return a digest of a chunk's key, by which the next chunk of the prefix names its previous chunk.

    The digest only orders evictions, so 8 bytes are enough.
    """
    return hashlib.blake2b(key, digest_size=LINK_BYTES).digest()


class Process(NamedTuple):
    """One process.

    `started` is the process's start time in the kernel, which distinguishes processes that reuse a `pid`.
    """

    pid: int
    started: int


class ClientRow(NamedTuple):
    """A client that the memory knows. `token` is b"" in a free row. `version` increases with each change of the row.

    `helpers` are the `processes` whose exit does not end the client.
    """

    version: int
    token: bytes
    namespace: int
    processes: tuple[Process, ...]
    helpers: tuple[Process, ...] = ()

    def pack(self) -> bytes:
        """Return the row's bytes."""
        processes = [*self.helpers, *(one for one in self.processes if one not in self.helpers)]
        body = _ROW.pack(self.version, self.token, self.namespace, len(processes), len(self.helpers))
        body += b"".join(_PROCESS.pack(*process) for process in processes)
        return _checked(body.ljust(ROW_BYTES - _CHECK.size, b"\0"), ROW_BYTES)


FREE_ROW: Final = ClientRow(0, b"", 0, ())


def unpack_row(raw: bytes) -> ClientRow | None:
    """Return the row in `raw`, or None if it is half-written or was never written."""
    if not _is_whole(raw, ROW_BYTES - _CHECK.size):
        return None
    version, token, namespace, count, helpers = _ROW.unpack_from(raw)
    at = _ROW.size
    processes = [Process(*_PROCESS.unpack_from(raw, at + n * _PROCESS.size)) for n in range(count)]
    return ClientRow(version, token if any(token) else b"", namespace, tuple(processes), tuple(processes[:helpers]))


def pack_namespace(digest: bytes) -> bytes:
    """Return the record of a namespace."""
    return _checked(digest, NAMESPACE_RECORD_BYTES)


def unpack_namespace(raw: bytes) -> bytes | None:
    """Return the digest of a namespace, or None if the record is half-written or was never written."""
    return bytes(raw[:NAMESPACE_BYTES]) if _is_whole(raw, NAMESPACE_BYTES) else None


def _whole(size: int) -> int:
    """Return `size`, rounded up to a size that can be mapped alone."""
    unit = max(PAGE_BYTES, mmap.ALLOCATIONGRANULARITY)
    return -(-size // unit) * unit


class NodeLayout(NamedTuple):
    """The sizes of a region of a memory.

    `rows` is the largest number of clients. `ring` is the number of journal records that are kept.

    `token` identifies this memory. Region 0 has the slot size of the engine that made the memory. In all other regions,
    `data_at` and `data_bytes` are the place and the size of region 0's slots. Offsets of tables are relative to the
    region's header.
    """

    slots: int
    slot_bytes: int
    rows: int
    ring: int
    token: bytes
    region: int = 0
    data_at: int = 0
    data_bytes: int = 0

    def pack(self) -> bytes:
        """Return the header's bytes."""
        body = _HEADER.pack(
            MAGIC, VERSION, self.region, self.slots, self.slot_bytes, self.rows, RECORD_BYTES, self.ring, self.token
        )
        return _checked(body, PAGE_BYTES)

    @property
    def generations_at(self) -> int:
        """The offset of the slots' generations, one word per slot."""
        return PAGE_BYTES + WORDS * 8

    @property
    def leases_at(self) -> int:
        """The offset of the lease counters, 4 bytes per slot, row by row."""
        return self.generations_at + self.slots * 8

    @property
    def lease_row_bytes(self) -> int:
        """The size of one client's lease counters in bytes. No two rows share a cache line."""
        return -(-self.slots * 4 // 64) * 64

    @property
    def table_at(self) -> int:
        """The offset of the slot table."""
        return self.leases_at + self.rows * self.lease_row_bytes

    @property
    def journal_at(self) -> int:
        """The offset of the journal."""
        return self.table_at + self.slots * RECORD_BYTES

    @property
    def rows_at(self) -> int:
        """The offset of the clients' rows, two copies each."""
        return self.journal_at + self.ring * RECORD_BYTES

    @property
    def namespaces_at(self) -> int:
        """The offset of the namespace records."""
        return self.rows_at + self.rows * 2 * ROW_BYTES

    @property
    def owners_at(self) -> int:
        """The offset of the pieces' owners, one byte per piece. Only the owners in region 0 are used."""
        return self.namespaces_at + NAMESPACES_MAX * NAMESPACE_RECORD_BYTES

    @property
    def tables_bytes(self) -> int:
        """The size of the region without slots. The holder maps only these bytes."""
        return _whole(self.owners_at + PIECES)

    @property
    def slots_at(self) -> int:
        """The offset of slot 0 in the memory."""
        return self.data_at or self.tables_bytes

    @property
    def slots_bytes(self) -> int:
        """The size of all slots of the memory in bytes, which all regions share."""
        return self.data_bytes or self.slots * self.slot_bytes

    @property
    def at(self) -> int:
        """The offset of the region's header in the memory."""
        return self.tables_at(self.region)

    def tables_at(self, region: int) -> int:
        """Return the offset of the header of a region. All regions but the first lie behind the slots."""
        return self.slots_at + _whole(self.slots_bytes) + (region - 1) * self._reserved_bytes if region else 0

    @property
    def _reserved_bytes(self) -> int:
        """The number of bytes reserved for the tables of one region. They have memory only when the region is used."""
        return self.with_slots(1, REGION_SLOT_BYTES_MIN).tables_bytes

    def with_slots(self, region: int, slot_bytes: int) -> NodeLayout:
        """Return the sizes of another region of this memory."""
        return NodeLayout(
            self.slots_bytes // slot_bytes, slot_bytes, self.rows, self.ring, self.token, region, self.slots_at,
            self.slots_bytes,
        )  # fmt: skip

    @property
    def size(self) -> int:
        """The size of the memory's file in bytes. Most of the bytes behind the slots never have memory."""
        return self.tables_at(REGIONS_MAX)


HEADER_BYTES: Final = _HEADER.size + _CHECK.size


class OtherVersionError(ValueError):
    """The memory has another version of kvpipe's layout, or was not created by kvpipe."""


def unpack_layout(raw: bytes) -> NodeLayout:
    """Return the sizes in a header. Raises `OtherVersionError` if the header is not of this version."""
    if len(raw) < HEADER_BYTES or not _is_whole(raw, _HEADER.size):
        raise OtherVersionError("the memory has no whole header of kvpipe's")
    magic, version, region, slots, slot_bytes, rows, record, ring, token = _HEADER.unpack_from(raw)
    if (magic, version, record) != (MAGIC, VERSION, RECORD_BYTES):
        raise OtherVersionError(f"the memory is of version {version}; this release of kvpipe has version {VERSION}")
    return NodeLayout(slots, slot_bytes, rows, ring, token, region)
