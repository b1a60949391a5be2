"""The fetches whose chunks are in a node's memory, and are not yet published by the memory's holder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvpipe.cache.catalog import Catalog
    from kvpipe.scheduler.stages import TierFetch

NODE_SHARE: Final = 0.5
"""The largest share of a node's memory that the chunks of all engines' waiting requests may take."""


class UnpublishedFetches:
    """The fetches that have landed on all ranks, and that the holder has not published yet.

    A private pool has no such fetches.
    """

    def __init__(self, catalog: Catalog) -> None:
        """Start without fetches. `node` is the node's memory that has the catalog's slots, or None."""
        self._catalog, self.node = catalog, catalog.shared
        self._fetches: list[TierFetch] = []
        self._engines = 1

    @property
    def may_end(self) -> bool:
        """Whether fetched chunks can be found soon. A node's memory without a holder publishes nothing."""
        return self.node is None or self.node.answers

    def count_engines(self) -> None:
        """Read how many engines share the memory."""
        if self.node is not None:
            self._engines = max(1, self.node.engines)

    @property
    def held_max(self) -> int | None:
        """The number of a node's chunks that this engine's waiting requests may hold, or None for a private pool.

        Engines have equal shares of the slots that have memory and whose bytes no slot of another size uses.
        """
        return None if self.node is None else int(self.node.slots_usable * NODE_SHARE) // self._engines

    @property
    def gets_slots(self) -> bool:
        """Whether a holder refills the stock of slots. A private pool has no stock."""
        return self.node is not None and self.may_end

    @property
    def has_slot(self) -> bool:
        """Whether a slot can be reserved now. A private pool always tries, because it may evict a chunk to get a slot.

        With an empty stock, a fetch reserves no slot, because the catalog would count the failure as a dropped save.
        """
        return self.node is None or self.node.slots_free > 0

    def add(self, fetch: TierFetch) -> None:
        """Wait until the holder has published the chunk of `fetch`."""
        self._fetches.append(fetch)

    def take_settled(self) -> Iterator[TierFetch]:
        """Yield and remove the fetches that wait no longer.

        A fetch waits no longer if its chunk was published or dropped, or if there is no holder. A chunk is dropped by a
        reset, or because the holder has published another copy.
        """
        for fetch in [one for one in self._fetches if not self._waits(one)]:
            self._fetches.remove(fetch)
            yield fetch

    def _waits(self, fetch: TierFetch) -> bool:
        chunk = fetch.piece.chunk
        return self.may_end and not chunk.is_published and self._catalog.holds(chunk)
