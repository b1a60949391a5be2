"""The places of the chunks in a node's memory, for tests that use the memory without a catalog."""

from __future__ import annotations

import msgspec

from kvpipe.node.keeper import Keeper
from kvpipe.node.layout import SlotRecord
from kvpipe.node.replica import Follower, stamp_of


class NodeChunkPlace(msgspec.Struct, frozen=True, gc=False):
    """The place of a chunk of `units` units: a slot, as long as the slot has this generation."""

    slot: int
    generation: int
    units: int

    @property
    def stamp(self) -> bytes:
        """See `stamp_of`."""
        return stamp_of(self.slot, self.generation)


class Replica(Follower[NodeChunkPlace]):
    """The places of the chunks of one namespace, as an engine knows them."""

    def _made(self, record: SlotRecord) -> NodeChunkPlace:
        return NodeChunkPlace(record.slot, record.generation, record.units)


def evict_all(keeper: Keeper) -> int:
    """Let the holder evict every chunk. Returns the number of evicted chunks."""
    chunks = list(keeper._chunks.values())
    keeper._evict_chunks(chunks)
    return len(chunks)
