"""Tracks stale requests: requests that continue with KV of old weights after a change of weights.

After such a change vLLM's prefix cache keeps older KV until the prefix cache is reset, and running requests keep their
KV in any case. If another request reused such blocks, that request's KV would be saved as KV of the new weights.

If hashes are shorter than blocks, vLLM also keeps the block in which a prompt ends. vLLM offers that block again in
every step of the answer (`FullAttentionManager._cache_partial_tail_block`). A request that reuses this block gets a
copy-on-write copy, so the copies must be compared too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from kvpipe.protocol.engine import Blocks, Request, Tables


class CachedBlocks(Blocks, Protocol):
    """The block tables of an engine, and the contents of its prefix cache."""

    @property
    def groups(self) -> int:
        """The number of cache groups."""

    def cached(self, request_id: str, group: int) -> int:
        """Return how many blocks at the beginning of a request's table the prefix cache holds or has held."""

    def copied(self) -> Iterable[tuple[int, int]]:
        """Yield (source, copy) for each block that vLLM will copy for a request admitted since the last step."""

    def forget_all(self) -> None:
        """Remove every block from the prefix cache."""


class Stale:
    """Finds the stale requests of one engine, and takes their blocks out of vLLM's prefix cache."""

    def __init__(self, block_tokens: Sequence[int]) -> None:
        """Start without stale requests. `block_tokens` has the number of tokens per block, by group."""
        self._sizes = block_tokens
        self.requests: dict[str, dict[int, int]] = {}
        """By stale request, then by group: how many of the request's blocks were removed from the prefix cache."""

    def weights_changed(self, requests: Iterable[str], blocks: CachedBlocks | None) -> None:
        """Mark all `requests` as stale and empty the prefix cache, because old weights have computed all KV."""
        self.requests = {request: {} for request in requests}
        if blocks is not None:
            blocks.forget_all()

    def rests_on(self, request: str, tables: Tables, blocks: CachedBlocks) -> bool:
        """Whether an admitted request gets blocks of a stale request. If so, the admitted request becomes stale too."""
        self.requests.pop(request, None)  # a preempted request is computed again
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
        """Remove the blocks that stale requests have added in this step from vLLM's prefix cache."""
        if any(request in self.requests for request in preempted):  # vLLM has freed the stale blocks
            blocks.forget_all()
            return
        new: set[int] = set()
        for request in living:
            if (done := self.requests.get(request.request_id)) is None:
                continue
            for group, size in enumerate(self._sizes):
                first, done[group] = done.get(group, 0), blocks.cached(request.request_id, group)
                table, ends_in = blocks.table(request.request_id, group), (request.num_prompt_tokens - 1) // size
                at = {*range(first, done[group]), done[group], ends_in}  # block done[group] may hold a state
                new.update(table[i].block_id for i in at if i < len(table) and not table[i].is_null)
        if new:
            blocks.forget(new)

    def leave(self, request: str, blocks: CachedBlocks | None) -> None:
        """Remove the blocks of an ended stale request from the prefix cache. The request must still hold its blocks."""
        if self.requests.pop(request, None) is not None and blocks is not None:
            tables = (blocks.table(request, group) for group in range(blocks.groups))
            blocks.forget({block.block_id for table in tables for block in table if not block.is_null})
