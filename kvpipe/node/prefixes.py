"""Lookups in a node's memory.

A lookup probes one dict of stamps, and joins the found stamps into one array of slots and generations. So a lookup
touches no chunk and calls no Python function per chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, cast

from kvpipe.cache.prefixes import KeyIndex, Prefixes
from kvpipe.node.catalog import NodeCatalog
from kvpipe.node.replica import STAMP_BYTES
from kvpipe.node.shared import SharedChunk

if TYPE_CHECKING:
    from kvpipe.protocol.engine import Request


class NodePrefixes(Prefixes):
    """Lookups in a node's memory. A found chunk stays pinned until the step is planned."""

    _catalog: NodeCatalog
    _walked: tuple[KeyIndex, bytes] = {}, b""
    """The dict that was probed last for all chunks of a prompt, and the joined stamps of the chunks that were found."""

    def longest(
        self, request: Request, extra: Sequence[dict[bytes, object]] = (), *, continued: bool = False,
        units_max: int | None = None,
    ) -> int:  # fmt: skip
        """Return the longest held prefix in units, as `Prefixes.longest` does. Evicted chunks are misses.

        With `extra` keys nothing is pinned, so the result may count chunks that the holder has evicted.
        """
        if extra:
            return super().longest(request, extra, continued=continued, units_max=units_max)
        while units := super().longest(request, continued=continued, units_max=units_max):
            hashes = self.hashes(request)
            for group in self._groups:
                if not self._catalog.hold(self._found(group, hashes, units)):
                    break
            else:
                return units
            if not self._catalog.forget_evicted(self.chunks(group, hashes, 0, units)):
                self._catalog.counters.fault("lookup_not_pinned")  # the next lookup would find the same chunks
                return 0
        return 0

    def _found(self, group: int, hashes: Sequence[bytes], units: int) -> bytes:
        """Return the joined stamps of the chunks of the first `units` units, which `longest` has just found."""
        index, stamps = self._walked
        first = 0
        if index is self._catalog.index(group):
            first = units - units % self._per_chunk
        stamps = stamps[: first // self._per_chunk * STAMP_BYTES]
        if first < units:
            chunks = cast("Iterable[SharedChunk]", filter(None, self.chunks(group, hashes, first, units)))
            stamps += b"".join([chunk.stamp for chunk in chunks])
        return stamps

    def _leading(self, index: KeyIndex, keys: Sequence[bytes]) -> int:
        known = self._catalog.stamps_of(index)
        if known is None:
            return super()._leading(index, keys)
        found = [*map(known.get, keys)]
        try:
            stamps = b"".join(found)  # type: ignore[arg-type]
        except TypeError:  # a key is missing
            stamps = b"".join(cast("Iterable[bytes]", takewhile(bool, found)))
        self._walked = index, stamps
        return len(stamps) // STAMP_BYTES
