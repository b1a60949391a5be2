"""Other engines read the note in a chunk's slot as a whole, or they read no note."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvpipe.node.notes import SlotNotes
from kvpipe.node.segment import Segment, create

SLOT_BYTES, NOTE_BYTES = 192, 64
KEY, NOTE = b"k" * 32, b"tokens and parent"


@pytest.fixture
def notes() -> Iterator[SlotNotes]:
    """Return the notes of a memory of two slots."""
    fd = create(2, SLOT_BYTES, rows=1, ring=8)
    yield SlotNotes(Segment(fd), NOTE_BYTES)
    os.close(fd)


def test_note_is_read_under_its_chunk_s_key_alone(notes: SlotNotes) -> None:
    """If a slot has another chunk by now, the note of the first chunk is not read.

    Other bytes of the slot do not change.
    """
    assert notes.write(1, KEY, NOTE)
    assert notes.read(1, KEY) == NOTE
    assert notes.read(1, b"other") == notes.read(0, KEY) == b""
    assert not any(notes._slots[: 2 * SLOT_BYTES - NOTE_BYTES])


def test_half_written_note_is_not_read(notes: SlotNotes) -> None:
    """The note is cut at each byte. The rest of the slot still has the earlier chunk's note."""
    at = 2 * SLOT_BYTES - NOTE_BYTES
    assert notes.write(1, b"new", b"n" * 40)
    raw = bytes(notes._slots[at:])
    for cut in range(NOTE_BYTES):
        notes.write(1, KEY, NOTE)
        notes._slots[at : at + cut] = raw[:cut]
        assert notes.read(1, b"new") in {b"", b"n" * 40}, cut
        assert notes.read(1, KEY) in {b"", NOTE}, cut


def test_note_without_room_is_not_written(notes: SlotNotes) -> None:
    """The chunk then has no note: the earlier chunk's note in this slot has another key."""
    assert notes.write(0, KEY, NOTE)
    assert not notes.write(0, b"new", bytes(NOTE_BYTES - 7))
    assert notes.write(0, b"new", b"n" * (NOTE_BYTES - 8))
    assert not notes.write(0, b"newer", b"")
    assert notes.read(0, b"newer") == b""
    assert not any(notes._slots[SLOT_BYTES:])


def test_garbage_is_no_note(notes: SlotNotes) -> None:
    """A note whose length goes beyond the slot is refused, so the next slot is not read."""
    notes._slots[SLOT_BYTES - NOTE_BYTES : SLOT_BYTES] = b"\xff" * NOTE_BYTES
    assert notes.read(0, KEY) == b""
