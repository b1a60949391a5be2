"""The note at the end of each slot has the data that identify the slot's chunk besides the key, such as its tokens.

The engine that saves a chunk writes the note before it reports the chunk. Other engines read the note when the holder
has published the chunk. Only engines interpret a note's content.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Final, Protocol

from kvpipe.cache.chunks import Chunk
from kvpipe.node.layout import PAGE_BYTES
from kvpipe.node.segment import Segment

if TYPE_CHECKING:
    from kvpipe.node.shared import SharedChunk

TOKEN_BYTES: Final = 8
ROOM_BYTES: Final = 1024
"""The number of bytes in a note for everything but tokens."""
_HEAD: Final = struct.Struct("<II")


def note_bytes(tokens: int, marks_bytes: int = 0) -> int:
    """Return the size of the notes of chunks of `tokens` tokens, with `marks_bytes` bytes for other data before it."""
    return -(-(marks_bytes + _HEAD.size + tokens * TOKEN_BYTES + ROOM_BYTES) // PAGE_BYTES) * PAGE_BYTES


class NotedRouters(Protocol):
    """An object that is notified of the chunks of a node's memory that can be found, on behalf of routers."""

    def noted(self, chunk: Chunk, note: bytes) -> None:
        """`chunk` can be found from now on. Its note is `note`."""

    def announce(self) -> None:
        """Notify routers of noted chunks from now on, because all chunks before these chunks are known now."""

    def dropped(self, chunk: Chunk) -> None:
        """`chunk` can no longer be found."""


class SlotNotes:
    """The notes of the slots of a segment."""

    def __init__(self, segment: Segment, size: int) -> None:
        """Use the last `size` bytes of each slot. If `size` is 0, slots have no notes."""
        assert segment.slots is not None  # noqa: S101
        self._slots, self._slot_bytes, self._size = segment.slots, segment.layout.slot_bytes, size
        self.routers: NotedRouters | None = None
        self.on_report: Callable[[SharedChunk], object] = bool
        """Called with each chunk that has grown, before the chunk is reported."""

    def write(self, slot: int, key: bytes, note: bytes) -> bool:
        """Write the note of the chunk `key` into a granted slot. A note that is too long is not written.

        Returns whether the note was written.
        """
        if not note or _HEAD.size + len(note) > self._size:
            return False
        at = (slot + 1) * self._slot_bytes - self._size
        raw = _HEAD.pack(len(note), zlib.crc32(note, zlib.crc32(key))) + note
        self._slots[at : at + len(raw)] = raw
        return True

    def read(self, slot: int, key: bytes) -> bytes:
        """Return the note of the chunk `key`, or b"" if the slot has no whole note of this chunk.

        If the holder has evicted the chunk, another engine may be writing the slot now. In this case the checksum
        differs, because the checksum covers the key.
        """
        if not self._size:
            return b""
        at = (slot + 1) * self._slot_bytes - self._size
        length, check = _HEAD.unpack(self._slots[at : at + _HEAD.size])
        if not 0 < length <= self._size - _HEAD.size:
            return b""
        note = bytes(self._slots[at + _HEAD.size : at + _HEAD.size + length])
        return note if zlib.crc32(note, zlib.crc32(key)) == check else b""

    def published(self, chunk: Chunk) -> None:
        """Pass the note of a published chunk to the routers, if the engine has routers and the chunk has a note."""
        if self.routers is not None and (note := self.read(chunk.slot, chunk.tail)):
            self.routers.noted(chunk, note)

    def withdraw(self, indexes: Iterable[Mapping[bytes, Chunk]]) -> None:
        """Notify routers that the chunks in `indexes` can no longer be found."""
        if self.routers is not None:
            for chunk in chain.from_iterable(index.values() for index in indexes):
                self.routers.dropped(chunk)

    def announce(self) -> None:
        """Let routers be notified of the chunks that were published since the last call."""
        if self.routers is not None:
            self.routers.announce()
