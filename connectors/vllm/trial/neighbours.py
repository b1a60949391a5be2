"""The memory of a node in a trial.

The memory's engines are trials in one process, and the holder is called directly.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

from kvpipe.connectors.vllm import pooled
from kvpipe.node.attach import node_note_bytes, node_slot_bytes, rank_slots
from kvpipe.node.rules import DEFAULT_POLICY
from kvpipe.node.segment import Segment
from kvpipe.testing.direct_node import DirectNode, DirectPool

if TYPE_CHECKING:
    from kvpipe.node.attach import NodeEngine, PoolKeys
    from kvpipe.protocol.geometry import Geometry
    from kvpipe.transfer.pool import SharedSlots

STOCK: Final = 8
MOVES_PER_HOLDER: Final = 20


class TrialMemory:
    """The memory that the engines of a trial share. The first engine makes the memory."""

    def __init__(self) -> None:
        """Begin without a memory."""
        self._node: DirectNode | None = None
        self._moves = 0

    def attaching(self, rank: int) -> AbstractContextManager[Any]:
        """Return a context in which new connectors use this memory. All ranks of a trial are configured equally."""
        attach_rank = functools.partial(self._rank, index=rank)
        return patch.multiple(pooled, attach_scheduler=self._scheduler, attach_rank=attach_rank)

    def _scheduler(self, _settings: object, geometry: Geometry, engine: NodeEngine) -> DirectPool:
        size = node_slot_bytes(geometry, engine.parts)
        if self._node is None:
            # the number of chunks in the shape's pool
            slots = geometry.pool_bytes_max // (geometry.slot_bytes * engine.parts)
            note_bytes = node_note_bytes(geometry, engine.parts)
            self._node = DirectNode(slots, size, note_bytes, policy=engine.policy or DEFAULT_POLICY)
        return DirectPool(self._node, STOCK)

    def _rank(
        self, settings: PoolKeys, geometry: Geometry, engine: NodeEngine, _rank: int, *, index: int
    ) -> tuple[None, SharedSlots]:
        assert self._node is not None  # noqa: S101
        segment = Segment(self._node.fd)
        return None, rank_slots(segment, geometry, engine.parts, index, digests=settings.pool_checksums)

    def count_move(self) -> None:
        """Count a move. After every `MOVES_PER_HOLDER` moves, another holder takes over."""
        self._moves += 1
        if self._node is not None and not self._moves % MOVES_PER_HOLDER:
            self._node.take_over()

    def close(self) -> None:
        """Close the memory's descriptor."""
        if self._node is not None:
            self._node.close()
            self._node = None
