"""What of a request is to be saved in a step, and into which chunks. Claims pieces in the catalog; keeps nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from kvpipe.catalog import Catalog, Chunk, Piece
from kvpipe.config import Settings
from kvpipe.connectors.vllm.prefixes import Prefixes
from kvpipe.connectors.vllm.tracked import OpenChunk, Tracked
from kvpipe.geometry import Geometry
from kvpipe.trace.log import Counters

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

NEVER: Final = 1 << 60
"""A token count that no request reaches."""

ENDS: Final = 2
"""The last units of a request of which one is saved as its end: of the very last one not all may be final."""

Row = tuple[int, int, int, int]
"""Group, slot, page, block: see `kvpipe.plan`."""


class Saving:
    """One per scheduler side. `manager` is vLLM's cache manager, once it is bound."""

    def __init__(
        self, settings: Settings, geometry: Geometry, catalog: Catalog, prefixes: Prefixes, counters: Counters
    ) -> None:
        """Of the settings, what to save counts: decoded tokens, chunks that are not full."""
        self._settings, self._geometry, self._catalog = settings, geometry, catalog
        self._prefixes, self._counters = prefixes, counters
        self._unit, self._per_chunk = geometry.unit_tokens, geometry.units_per_chunk
        self.manager: KVCacheManager | None = None

    @staticmethod
    def give_up(tracked: Tracked) -> None:
        """Save nothing more of this request before its next admission."""
        tracked.next_at = NEVER
        tracked.opened = [None] * len(tracked.opened)

    def ended(self, request: Request) -> None:
        """The request is over: whoever continues it shall find where it ended, though others write on in that chunk."""
        units = self._prefixes.final_units(request, request.num_tokens)
        for group in range(len(self._geometry.groups)):
            for ended in range(units, max(0, units - ENDS), -1):
                key = self._prefixes.key(self._prefixes.hashes(request), ended)
                chunk = self._catalog.find(group, key) or self._catalog.pending(group).get(key)
                if chunk is not None:
                    self._catalog.keep_mark(chunk, key)
                    break

    def plan(self, tracked: Tracked, end: int, pieces: list[Piece]) -> tuple[list[Row], int]:
        """Claim what of the first `end` tokens is final and not yet saved, piece by piece, into `pieces`.

        Returns the rows that save the pieces, and the first unit of all of them.
        """
        request = tracked.request
        units = self._prefixes.final_units(request, end)
        prompt_units = request.num_prompt_tokens // self._unit
        if not self._settings.save_decode:
            units = min(units, prompt_units)
        if not self._settings.save_partial:
            units -= units % self._per_chunk
        if units < tracked.saved:  # a streaming session cut its tokens
            tracked.saved = units
            tracked.opened = [None] * len(tracked.opened)
        done_with = not self._settings.save_decode and units >= prompt_units
        step = self._unit if self._settings.save_partial else self._per_chunk * self._unit
        tracked.next_at = NEVER if done_with else units * self._unit + step
        if units == tracked.saved:
            return [], units
        hashes = self._prefixes.hashes(request)
        rows: list[Row] = []
        first, tracked.saved = tracked.saved, units
        for group in range(len(self._geometry.groups)):
            for base in range(first // self._per_chunk * self._per_chunk, units, self._per_chunk):
                low, high = max(base, first), min(base + self._per_chunk, units)
                key = self._prefixes.key(hashes, high)
                if self._catalog.known(group, key):
                    tracked.opened[group] = None
                    self._counters["save_known"] += 1
                    continue
                piece = self._claim(tracked, group, base, low, high, keep=high == prompt_units)
                if piece is not None:
                    pieces.append(piece)
                    rows += self._save_rows(tracked, group, base, piece)
        self._counters["units_saved"] += sum(p.stop - p.start for p in pieces)
        return rows, first

    def _claim(self, tracked: Tracked, group: int, base: int, low: int, high: int, *, keep: bool) -> Piece | None:
        """Claim units [low, high) of the chunk that starts at unit `base`, in the chunk where they continue best."""
        hashes = self._prefixes.hashes(tracked.request)
        key = self._prefixes.key(hashes, high)
        opened = tracked.opened[group]
        chunk: Chunk | None = None
        if low > base:
            before = self._prefixes.key(hashes, low)
            if opened is not None and opened.base == base and opened.key == before:
                chunk = opened.chunk if opened.chunk.tail == before else None
            if chunk is None:  # where another request, or an earlier admission, has left off
                found = self._catalog.find(group, before)
                if found is not None and found.tail == before:
                    self._catalog.keep_mark(found, before)
                    chunk = found
            if chunk is not None and chunk.state.row in {"EVICTING", "ABSENT"}:
                chunk = None
        start = low if chunk is not None else base
        pages = self._geometry.pages_per_unit[group]
        if self._any_null(tracked, group, start * pages, high * pages):
            self._counters["save_out_of_window"] += 1
            tracked.opened[group] = None
            return None
        if chunk is None:
            chunk = self._catalog.reserve(group)
            if chunk is None:
                tracked.opened[group] = None
                return None
        piece = self._catalog.write(chunk, high - base, key, keep=keep, base=base)
        tracked.opened[group] = OpenChunk(base, chunk, high - base, key)
        return piece

    def _table(self, tracked: Tracked, group: int) -> Sequence[Any]:
        """VLLM's own block table of the request, as it is now. Never kept."""
        assert self.manager is not None  # noqa: S101  (bound before the first step)
        manager = self.manager.coordinator.single_type_managers[group]
        table: Sequence[Any] = manager.req_to_blocks[tracked.request.request_id]
        return table

    def _any_null(self, tracked: Tracked, group: int, first: int, stop: int) -> bool:
        table = self._table(tracked, group)
        return len(table) < stop or any(table[i].is_null for i in range(first, stop))

    def _save_rows(self, tracked: Tracked, group: int, base: int, piece: Piece) -> list[Row]:
        pages = self._geometry.pages_per_unit[group]
        table, slot, offset = self._table(tracked, group), piece.chunk.slot, base * pages
        return [
            (group, slot, page, table[offset + page].block_id)
            for page in range(piece.start * pages, piece.stop * pages)
        ]
