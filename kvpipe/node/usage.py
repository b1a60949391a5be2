"""The use of a node's memory, as every process that has mapped the memory can read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from kvpipe.node.layout import COUNTS, OWNED, READY, ROW_BYTES, STATES
from kvpipe.node.ledger import LedgerReader
from kvpipe.node.messages import ClientStatus
from kvpipe.node.segment import Segment
from kvpipe.statemachine.node_slot import FREE

if TYPE_CHECKING:
    from kvpipe.node.clients import NodeClient

_UNUSED: Final = bytes(2 * ROW_BYTES)
"""Both copies of a row that no engine has ever used. Most rows have these bytes, so most rows need no decoding."""


class NodeUsage(NamedTuple):
    """The use of the slots of one size. `slots` is the sum of all other counts.

    `unready` counts the slots without memory. `elsewhere` counts the slots whose memory another region owns.
    """

    slots: int
    unready: int
    elsewhere: int
    free: int
    granted: int
    published: int
    evicting: int
    quarantine: int

    @property
    def by_use(self) -> dict[str, int]:
        """The number of slots by use, without the sum."""
        return {use: count for use, count in self._asdict().items() if use != "slots"}


def engines_of(segment: Segment) -> int:
    """Return the number of engines that use the slots of this size."""
    reader, first, size = LedgerReader(segment), segment.layout.rows_at, len(_UNUSED)
    used = (
        row for row in range(segment.layout.rows)
        if bytes(segment.buffer[first + row * size : first + (row + 1) * size]) != _UNUSED
    )  # fmt: skip
    return sum(bool(reader.row(row).token) for row in used)


def status_of(segment: Segment, clients: Mapping[int, NodeClient]) -> tuple[ClientStatus, ...]:
    """Return the slots and leases that each of the holder's `clients` has, by row."""
    return tuple(
        ClientStatus(
            row, one.state.name, tuple(process.pid for process in sorted(one.processes - one.dead)), len(one.granted),
            sum(map(bool, segment.leases_of(row))), one.name, one.stock, one.published,
        )
        for row, one in sorted(clients.items())
    )  # fmt: skip


def usage_of(segment: Segment) -> NodeUsage:
    """Return how many slots are in each state.

    If the holder is writing a transition, only some of the counts include it.
    """
    slots = segment.layout.slots
    count = dict(zip(STATES, segment.words[COUNTS : COUNTS + len(STATES)], strict=True))
    ready, owned = int(segment.words[READY]), int(segment.words[OWNED])
    free = max(0, count.pop(FREE) - (slots - owned))
    return NodeUsage(slots, slots - ready, max(0, ready - owned), free, *count.values())
