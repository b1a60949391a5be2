"""Spans of tokens that attend to each other in both directions, as images do in some models.

An engine computes such a span in one step. If a step ends inside a span, the span's tokens in that step have not
attended to the rest of the span. The KV of these tokens is wrong, and so is all KV of the request that is computed from
this KV. Wrong KV is not saved, and the engine's own prefix cache does not offer wrong KV to other requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvpipe.cache.prefixes import uncut
from kvpipe.scheduler.records import BEYOND_TOKENS, Tracked

if TYPE_CHECKING:
    from kvpipe.protocol.engine import Blocks, Request, SpansOf, Step, Tables, WholeSpan
    from kvpipe.protocol.geometry import Geometry
    from kvpipe.trace.log import Counters


class Cut:
    """A request whose KV is wrong from token `first` on. `blocks` are the ids of the blocks with wrong KV."""

    def __init__(self, first: int) -> None:
        """Start without blocks."""
        self.first, self.blocks = first, set[int]()


class WholeSpans:
    """Finds the requests of one engine whose spans were cut.

    `cut` maps the ids of unfinished requests with wrong KV to their `Cut`.
    """

    def __init__(self, of: SpansOf, geometry: Geometry, counters: Counters) -> None:
        """Start without requests. `of` returns the spans of a request."""
        self._of, self._counters = of, counters
        self._sizes = [group.block_tokens for group in geometry.groups]
        self.blocks: Blocks | None = None
        # spans of unfinished requests, until the request's last span is computed
        self._ahead: dict[str, Sequence[WholeSpan]] = {}
        self.cut: dict[str, Cut] = {}

    def admitted(self, request: Request, tables: Tables) -> bool:
        """Return whether the request's new blocks contain wrong KV that the engine's own prefix cache has supplied."""
        self.forget(request.request_id)
        self.more(request)
        first = min((self._shared(one, tables) for one in self.cut.values()), default=None) if self.cut else None
        if first is None or first >= request.num_tokens:
            return False
        self._begin(request.request_id, first)
        return True

    def more(self, request: Request) -> None:
        """Read the spans of the request again, because the request may have got more tokens."""
        if spans := self._of(request):
            self._ahead[request.request_id] = spans

    def forget(self, request_id: str) -> None:
        """Drop the request's spans, and remove its blocks with wrong KV from the engine's prefix cache.

        Called when the request is admitted, is over, or has lost its blocks.
        """
        self._ahead.pop(request_id, None)
        cut = self.cut.pop(request_id, None)
        if cut is not None and cut.blocks and self.blocks is not None:
            self.blocks.forget(cut.blocks)

    def plan_step(self, step: Step, tracked_of: Mapping[str, Tracked]) -> list[tuple[Tracked, int]]:
        """Return (request, first token with wrong KV) for each request in which this step first cuts a span."""
        for request_id in step.preempted_req_ids or ():
            if request_id in self.cut:
                self.forget(request_id)
        found = []
        for request_id in self._ahead.keys() & step.num_scheduled_tokens.keys():
            tracked = tracked_of.get(request_id)
            if tracked is None:
                continue
            start = tracked.request.num_computed_tokens
            stop = start + step.num_scheduled_tokens[request_id]
            spans = self._ahead[request_id]
            whole = uncut(spans, stop)
            if request_id not in self.cut and whole < stop and start < stop:
                self._begin(request_id, first := max(start, whole))
                found.append((tracked, first))
            if stop >= spans[-1][1]:
                del self._ahead[request_id]
        for request_id in self.cut.keys() & step.num_scheduled_tokens.keys():
            if request_id in tracked_of:
                self._offer_none(request_id, tracked_of[request_id].request.num_computed_tokens)
        return found

    def _begin(self, request_id: str, first: int) -> None:
        self.cut[request_id] = Cut(first)
        self._counters["spans_cut"] += 1
        self._offer_none(request_id, first)

    def _offer_none(self, request_id: str, start: int) -> None:
        """Remove the request's blocks with wrong KV, from token `start` on, from the engine's prefix cache."""
        cut, blocks = self.cut[request_id], self.blocks
        if blocks is None:
            return
        found = {
            block.block_id
            for group, size in enumerate(self._sizes)
            for block in blocks.table(request_id, group)[max(cut.first, start) // size :]
            if not block.is_null
        }
        cut.blocks |= found
        blocks.forget(found)

    def _shared(self, cut: Cut, tables: Tables) -> int:
        """Return the first token of `tables` that lies in a block of `cut`, or `BEYOND_TOKENS` if no token does."""
        places = (
            place * size
            for table, size in zip(tables, self._sizes, strict=True)
            for place, block in enumerate(table)
            if block.block_id in cut.blocks
        )
        return min(places, default=BEYOND_TOKENS)
