"""Reads the latest moves of slots from the journal of a node's memory, for operators. The holder is not asked."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from kvpipe.errors import ConfigError
from kvpipe.node.layout import REGIONS_MAX, OtherVersionError
from kvpipe.node.ledger import LedgerReader
from kvpipe.node.processes import holder_of, memory_of_holder
from kvpipe.node.segment import Segment, layout_of

SEARCHES: Final = 50
SEARCH_S: Final = 0.01


class SlotMove(msgspec.Struct, frozen=True, omit_defaults=True):
    """One move of a slot. `was` is "" if the journal does not have the slot's earlier move any more.

    `seq` is the position in the journal of the region. `generation` changes with the content of the slot. `row` is the
    row of the engine that was granted the slot last. `namespace`, `group`, `units` and `key` name a published chunk.
    """

    region: int
    seq: int
    slot: int
    was: str
    now: str
    generation: int
    row: int
    namespace: int
    group: int
    units: int
    key: str


class SlotMoves:
    """The moves of all slots of one region. The journal has the latest moves only."""

    def __init__(self, segment: Segment) -> None:
        """Begin with the oldest move that the journal has. `segment` needs no slots."""
        self.layout, self._ledger, self._next = segment.layout, LedgerReader(segment), 1
        self._states: dict[int, str] = {}

    def read(self) -> Iterator[SlotMove]:
        """Yield the moves since the last call. Moves that the journal has lost meanwhile are left out."""
        ledger, region, head = self._ledger, self.layout.region, self._ledger.head
        if head < self._next - 1:  # the region was made again
            self._next = 1
        first = max(self._next, head - self.layout.ring + 1)
        if first != self._next:
            self._states.clear()
        for seq in range(first, head + 1):
            one = ledger.read(seq)
            if one is None:
                self._states.clear()  # this move may be of any slot
                continue
            was, self._states[one.slot] = self._states.get(one.slot, ""), one.state
            yield SlotMove(
                region, seq, one.slot, was, one.state, one.generation, one.owner, one.namespace, one.group, one.units,
                one.key.hex(),
            )  # fmt: skip
        self._next = head + 1


class MemoryMoves:
    """The moves of the slots in all regions of one memory."""

    def __init__(self, fd: int) -> None:
        """Use the memory's descriptor, which the caller keeps open.

        Raises:
            ConfigError: the memory has another version.
        """
        self._fd, self._regions = fd, dict[int, SlotMoves]()
        try:
            layout_of(fd)
        except OtherVersionError as error:
            raise ConfigError(f"kvpipe: {error}") from None

    def read(self) -> Iterator[SlotMove]:
        """Yield the moves since the last call, also those of regions that were made since."""
        for number in range(REGIONS_MAX):
            try:
                layout = layout_of(self._fd, number)
                known = self._regions.get(number)
                if known is None or known.layout != layout:
                    self._regions[number] = SlotMoves(Segment(self._fd, region=number, whole=False))
            except OtherVersionError:
                self._regions.pop(number, None)
            else:
                yield from self._regions[number].read()


@contextmanager
def moves_of(folder: Path) -> Iterator[MemoryMoves]:
    """Open the memory that the folder's holder has.

    Raises:
        ConfigError: the folder has no holder, the holder has no memory yet, or /proc hides the holder's memory.
    """
    fd = memory_of_holder(folder)
    for _ in range(SEARCHES):  # a search fails if the holder closes a descriptor meanwhile
        if fd is None and holder_of(folder):
            time.sleep(SEARCH_S)
            fd = memory_of_holder(folder)
    if fd is None:
        raise ConfigError(f"kvpipe: no holder of {folder} has a memory that this process can read")
    try:
        yield MemoryMoves(fd)
    finally:
        os.close(fd)
