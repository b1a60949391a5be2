"""Stale requests: they continue with KV of old weights, which vLLM's prefix cache would offer to others.

vLLM keeps what was computed before a change of weights in its own prefix cache until somebody resets that, and what its
running requests hold in any case. A request that takes such blocks over would have its KV saved under the new weights'
name.

Where hashes are shorter than blocks vLLM also keeps the block that a prompt ends in, and offers it anew in every step
of its answer (`FullAttentionManager._cache_partial_tail_block`). Who takes that over has a copy of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from kvpipe.scheduler.base import Blocks, Request, Tables


class CachedBlocks(Blocks, Protocol):
    """Blocks of an engine whose prefix cache can be asked, too."""

    @property
    def groups(self) -> int:
        """The number of cache groups."""

    def cached(self, request_id: str, group: int) -> int:
        """Return how many blocks at the beginning of a request's table the prefix cache holds or has held."""

    def copied(self) -> Iterable[tuple[int, int]]:
        """Yield (source, copy) of the blocks that vLLM will copy for requests admitted since the last step."""

    def forget_all(self) -> None:
        """Take every block out of the prefix cache."""


class Stale:
    """One per engine."""

    def __init__(self, block_tokens: Sequence[int]) -> None:
        """Start without stale requests. `block_tokens`: tokens per block, by group."""
        self._sizes = block_tokens
        self.requests: dict[str, dict[int, int]] = {}
        """By stale request, by group: how many of its blocks were taken out of the prefix cache."""

    def begin(self, requests: Iterable[str], blocks: CachedBlocks | None) -> None:
        """The weights have changed: all that vLLM holds was computed with the old ones. All `requests` are stale."""
        self.requests = {request: {} for request in requests}
        if blocks is not None:
            blocks.forget_all()

    def rests_on(self, request: str, tables: Tables, blocks: CachedBlocks) -> bool:
        """Whether a request that is being admitted gets blocks of a stale request. Then it is stale, too."""
        self.requests.pop(request, None)  # preempted since: it computes anew
        if not self.requests:
            return False
        mine = {block.block_id for table in tables for block in table if not block.is_null}
        mine |= {source for source, copy in blocks.copied() if copy in mine}
        theirs = (blocks.table(one, group) for one in self.requests for group in range(blocks.groups))
        if mine.isdisjoint({block.block_id for table in theirs for block in table}):
            return False
        self.requests[request] = {}
        return True

    def plan_step(self, preempted: Iterable[str], living: Iterable[Request], blocks: CachedBlocks) -> None:
        """Take the blocks that stale requests have added to vLLM's prefix cache in this step out of it."""
        if any(request in self.requests for request in preempted):  # their blocks are theirs no more
            blocks.forget_all()
            return
        new: set[int] = set()
        for request in living:
            if (done := self.requests.get(request.request_id)) is None:
                continue
            for group, size in enumerate(self._sizes):
                first, done[group] = done.get(group, 0), blocks.cached(request.request_id, group)
                table, ends_in = blocks.table(request.request_id, group), (request.num_prompt_tokens - 1) // size
                at = {*range(first, done[group]), done[group], ends_in}  # the block behind may have a state within it
                new.update(table[i].block_id for i in at if i < len(table) and not table[i].is_null)
        if new:
            blocks.forget(new)

    def leave(self, request: str, blocks: CachedBlocks | None) -> None:
        """The request is over, and still has its blocks: take what it has added to the prefix cache out of it."""
        if self.requests.pop(request, None) is not None and blocks is not None:
            tables = (blocks.table(request, group) for group in range(blocks.groups))
            blocks.forget({block.block_id for table in tables for block in table if not block.is_null})
