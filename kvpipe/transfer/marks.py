"""The marks of a rank's part of each shared slot.

A mark has 16 bytes: a digest of the part, and the generation that the slot has while its chunk can be found. The top
bit of the generation says whether the mark has a digest, so that every digest is valid. The rank
that writes a part clears the generation before its first copy, and writes the mark when its last copy has landed. A
rank that reads a part compares the generation before its first copy and after its last copy. If the rank finds the
expected generation after the last copy, then no other rank had begun to write the part.

A digest is written only if the writer's engine computes digests, and is compared only if the reader's engine does.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

MARK_BYTES: Final = 16
STAMP_BYTES: Final = 16
"""The size of a stamp: a slot and the generation of the slot's chunk, as two words."""
_HAS_DIGEST: Final = np.uint64(1 << 63)
"""The bit of the generation's word that says that the mark has a digest."""
_NO_GENERATION: Final = 0
"""No chunk has this generation, because generations of published chunks are odd."""
_Words = npt.NDArray[np.uint64]


class MarkPlace(NamedTuple):
    """Where the marks and parts of one rank lie in each slot of `slot_bytes` bytes. A part has `part_bytes` bytes."""

    slot_bytes: int
    marks_at: int
    part_at: int
    part_bytes: int


class SlotMarks:
    """The marks of one rank. Several threads may call its methods at once, for different slots.

    `digests` says whether the rank computes digests. A *stamp* names a slot and the generation of its chunk, see
    `Job.stamps`.
    """

    def __init__(self, memory: memoryview, place: MarkPlace, *, digests: bool) -> None:
        """Use the marks at `place` in each slot of `memory`."""
        slots = np.frombuffer(memory, np.uint8).reshape(-1, place.slot_bytes)
        words = slots[:, place.marks_at : place.marks_at + MARK_BYTES].view(np.uint64)
        self._parts = slots[:, place.part_at : place.part_at + place.part_bytes]
        self._digests, self._generations = words[:, 0], words[:, 1]
        self.digests = digests
        self._found: deque[tuple[int, int]] = deque()

    def clear(self, stamps: bytes) -> None:
        """Clear the generations of slots that this rank is about to write."""
        self._generations[_split(stamps)[0]] = _NO_GENERATION

    def write(self, stamps: bytes, *, digests: bool = True) -> None:
        """Write the marks of slots whose copies have landed.

        The marks have digests if this rank computes digests and the argument `digests` is True. This reads the whole
        parts.
        """
        slots, generations = _split(stamps)
        if self.digests and digests:
            self._digests[slots] = [self._digest(slot) for slot in slots.tolist()]
            generations = generations | _HAS_DIGEST
        self._generations[slots] = generations  # last, because other ranks trust the digest from now on

    def other_chunk(self, stamps: bytes) -> str:
        """Compare the generations. Return why a slot must not be used, or "" if all slots have these generations."""
        slots, generations = _split(stamps)
        wrong = self._found_in(slots) != generations
        return self._note(slots[wrong], generations[wrong], "has the bytes of another chunk") if wrong.any() else ""

    def damage(self, stamps: bytes) -> str:
        """Compare the digests, which reads the whole parts. Return why a slot must not be used, or "".

        Slots of other generations are left out, because another rank may be writing them.
        """
        slots, generations = _split(stamps)
        wrong = np.array([self._is_damaged(slot) for slot in slots.tolist()], bool)
        wrong &= self._found_in(slots) == generations
        return self._note(slots[wrong], generations[wrong], "has changed since it was saved") if wrong.any() else ""

    def take_found(self) -> dict[int, int]:
        """Return the generations of the slots that must not be used, by slot. Each slot is returned only once."""
        found = dict[int, int]()
        while self._found:
            slot, generation = self._found.popleft()
            found[slot] = generation
        return found

    def _is_damaged(self, slot: int) -> bool:
        if not self._generations[slot] & _HAS_DIGEST:
            return False
        written = int(self._digests[slot])
        return written != self._digest(slot)

    def _found_in(self, slots: _Words) -> _Words:
        """Return the generations in the marks of `slots`."""
        return self._generations[slots] & ~_HAS_DIGEST

    def _digest(self, slot: int) -> int:
        return xxhash.xxh3_64_intdigest(self._parts[slot])

    def _note(self, slots: _Words, generations: _Words, why: str) -> str:
        self._found.extend(zip(slots.tolist(), generations.tolist(), strict=True))
        return f"slot {slots[0]} {why}"


def _split(stamps: bytes) -> tuple[_Words, _Words]:
    """Return the slots and the generations of joined stamps."""
    words = np.frombuffer(stamps, np.uint64)
    return words[::2], words[1::2]
