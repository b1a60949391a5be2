"""Requests that go on with KV of weights that are gone, and what of it vLLM would offer to others.

vLLM keeps what was computed before a change of weights in its own prefix cache until somebody resets that, and what its
running requests hold in any case. A request that takes such blocks over would have its KV saved under the new weights'
name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager


class Stale:
    """One per engine. `manager` is vLLM's cache manager, once it is bound."""

    def __init__(self) -> None:
        """Nothing is stale."""
        self._requests: dict[str, dict[int, int]] = {}  # how many blocks of each group were taken out
        self.manager: KVCacheManager | None = None

    def begin(self, requests: Iterable[str]) -> None:
        """The weights are others: whatever vLLM holds was computed with the old ones."""
        self._requests = {request: {} for request in requests}
        self._evict_all()

    def rests_on(self, request: str, blocks: KVCacheBlocks) -> bool:
        """Whether a request that is being admitted takes over blocks of one that is stale; it is stale, too, then."""
        self._requests.pop(request, None)  # preempted since: it computes anew
        if not self._requests:
            return False
        mine = {block.block_id for table in blocks.blocks for block in table if not block.is_null}
        if mine.isdisjoint(self._blocks()):
            return False
        self._requests[request] = {}
        return True

    def plan_step(self, preempted: Iterable[str]) -> None:
        """Take out of vLLM's prefix cache what stale requests have put into it in this step."""
        if not self._requests or self.manager is None:
            return
        if any(request in self._requests for request in preempted):  # their blocks are theirs no more
            self._evict_all()
            return
        new: set[int] = set()
        for group, one in enumerate(self.manager.coordinator.single_type_managers):
            for request, done in self._requests.items():
                first, done[group] = done.get(group, 0), one.num_cached_block.get(request, 0)
                table = one.req_to_blocks.get(request, ())
                new.update(table[i].block_id for i in range(first, min(done[group], len(table))))
        if new:
            self.manager.evict_blocks(new)

    def leave(self, request: str) -> None:
        """The request is over."""
        self._requests.pop(request, None)

    def _blocks(self) -> set[int]:
        if self.manager is None:
            return set()
        tables = [one.req_to_blocks for one in self.manager.coordinator.single_type_managers]
        return {block.block_id for table in tables for one in self._requests for block in table.get(one, ())}

    def _evict_all(self) -> None:
        if self.manager is not None:
            self.manager.evict_blocks(set(range(self.manager.block_pool.num_gpu_blocks)))
