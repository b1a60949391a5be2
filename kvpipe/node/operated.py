"""The catalog of an engine on a node's memory, with operators' orders and clients' hints.

A pin belongs to this engine and ends with this engine. An eviction removes the chunk for all engines of the node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

from kvpipe.cache.chunks import Chunk
from kvpipe.cache.policy.hints import Hint
from kvpipe.node.catalog import NodeCatalog
from kvpipe.node.layout import OWNED
from kvpipe.node.shared import NodeUses, SharedChunk
from kvpipe.node.usage import engines_of
from kvpipe.statemachine import node_link as link_m


class OperatedCatalog(NodeCatalog):
    """A `NodeCatalog` whose chunks operators pin and evict.

    `on_leased_evicted` is called for a chunk that the holder has evicted although this engine leases the chunk. Only
    an operator of another engine orders such an eviction.
    """

    on_leased_evicted: Callable[[Chunk], object] = staticmethod(bool)

    def evict(self, chunk: Chunk, *, taken: bool = False) -> bool:
        """Evict one chunk for all engines, with the arguments and the result of `Catalog.evict`.

        From now on, this engine does not find the chunk. Other engines find the chunk until the holder has the order.
        """
        slot, stock = chunk.slot, self._stock
        if self._landed.get(slot) is chunk and slot not in stock.grants:
            self.poll()  # the holder has answered, so the journal has the chunk's record
            if not chunk.is_published:
                return False
        if not self.holds(chunk):
            return False
        if chunk.is_published:
            stock.evictions[slot] = cast("SharedChunk", chunk).generation
        elif slot in stock.reports:
            stock.evictions[slot] = stock.grants[slot].generation + 1  # the holder publishes the chunk, then evicts it
        self._landed.pop(slot, None)
        self._open.pop(slot, None)
        self._unpend_chunk(cast("SharedChunk", chunk))
        return super().evict(chunk, taken=taken)

    @property
    def takes_hints(self) -> bool:
        """Whether the memory's policy takes hints."""
        return self.pool.takes_hints

    def hint(self, chunks: Iterable[Chunk], hint: Hint) -> None:
        """Pass a client's hint on a prompt's chunks to the holder, if the memory's policy takes hints."""
        if self.takes_hints:
            self._notify(over=False)
            cast("NodeUses", self._policy).hint_all([*chunks], hint)

    @property
    def evictions_wait(self) -> bool:
        """Whether the holder has yet to carry out evictions. False without a holder, for which evictions then wait."""
        return bool(self._stock.evictions) and self.pool.state == link_m.ATTACHED

    @property
    def slots_for_pins(self) -> int:
        """The number of slots of which pins may hold a share: the region's slots, divided equally among engines."""
        return int(self._segment.words[OWNED]) // max(1, engines_of(self._segment))

    def unpublished(self, chunk: SharedChunk) -> None:
        """Forget an evicted chunk, and call `on_leased_evicted` if this engine leases the chunk."""
        super().unpublished(chunk)
        if chunk.leases:
            self.on_leased_evicted(chunk)
