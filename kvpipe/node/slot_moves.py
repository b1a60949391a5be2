"""Reads the latest moves of slots from the journal of a node's memory, for operators. The holder is not asked."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from kvpipe.errors import ConfigError
from kvpipe.node.layout import REGIONS_MAX, OtherVersionError
from kvpipe.node.ledger import LedgerReader
from kvpipe.node.processes import holder_of, memory_of_holder
from kvpipe.node.segment import Segment

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
        self._ledger, self._next = LedgerReader(segment), 1
        self._states: dict[int, str] = {}

    def read(self) -> Iterator[SlotMove]:
        """Yield the moves since the last call. Moves that the journal has lost meanwhile are left out."""
        ledger, region, head = self._ledger, self._ledger.layout.region, self._ledger.head
        for seq in range(max(self._next, head - ledger.layout.ring + 1), head + 1):
            one = ledger.read(seq)
            if one is not None:
                was, self._states[one.slot] = self._states.get(one.slot, ""), one.state
                yield SlotMove(
                    region, seq, one.slot, was, one.state, one.generation, one.owner, one.namespace, one.group,
                    one.units, one.key.hex(),
                )  # fmt: skip
        self._next = head + 1


def moves_of(folder: Path) -> list[SlotMoves]:
    """Return the moves of the slots in each region of the memory that the folder's holder has.

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
    made = []
    try:
        for number in range(REGIONS_MAX):
            try:
                made.append(SlotMoves(Segment(fd, region=number, whole=False)))
            except OtherVersionError as error:
                if not number:
                    raise ConfigError(f"kvpipe: {error}") from None
    finally:
        os.close(fd)
    return made
