"""Requests that go on with KV of weights that are gone, and what of it vLLM would offer to others.

vLLM keeps what was computed before a change of weights in its own prefix cache until somebody resets that, and what its
running requests hold in any case. A request that takes such blocks over would have its KV saved under the new weights'
name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from kvpipe.scheduler.base import Blocks, Tables


class CachedBlocks(Blocks, Protocol):
    """Blocks of an engine whose prefix cache can be asked, too."""

    @property
    def groups(self) -> int:
        """How many cache groups there are."""

    def cached(self, request_id: str, group: int) -> int:
        """Return how many blocks at the beginning of a request's table the prefix cache holds or has held."""

    def forget_all(self) -> None:
        """Take every block out of the prefix cache."""


class Stale:
    """One per engine."""

    def __init__(self) -> None:
        """Nothing is stale."""
        self.requests: dict[str, dict[int, int]] = {}
        """Those that go on with old KV: how many of their blocks, by group, were taken out."""

    def begin(self, requests: Iterable[str], blocks: CachedBlocks | None) -> None:
        """The weights are others: whatever vLLM holds was computed with the old ones."""
        self.requests = {request: {} for request in requests}
        if blocks is not None:
            blocks.forget_all()

    def rests_on(self, request: str, tables: Tables, blocks: CachedBlocks) -> bool:
        """Whether a request that is being admitted takes over blocks of one that is stale; it is stale, too, then."""
        self.requests.pop(request, None)  # preempted since: it computes anew
        if not self.requests:
            return False
        mine = {block.block_id for table in tables for block in table if not block.is_null}
        theirs = (blocks.table(one, group) for one in self.requests for group in range(blocks.groups))
        if mine.isdisjoint({block.block_id for table in theirs for block in table}):
            return False
        self.requests[request] = {}
        return True

    def plan_step(self, preempted: Iterable[str], blocks: CachedBlocks) -> None:
        """Take out of vLLM's prefix cache what stale requests have put into it in this step."""
        if any(request in self.requests for request in preempted):  # their blocks are theirs no more
            blocks.forget_all()
            return
        new: set[int] = set()
        for group in range(blocks.groups):
            for request, done in self.requests.items():
                first, done[group] = done.get(group, 0), blocks.cached(request, group)
                table = blocks.table(request, group)
                new.update(table[i].block_id for i in range(first, min(done[group], len(table))))
        if new:
            blocks.forget(new)

    def leave(self, request: str) -> None:
        """The request is over."""
        self.requests.pop(request, None)
