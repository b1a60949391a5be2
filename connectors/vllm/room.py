"""Whether there is room for another asynchronous load, so that none waits for another's blocks for ever.

vLLM preempts nobody who waits for a load, or whose load has ended and who has not run since. If each of those holds
some blocks and needs more than are left, nothing runs ever again. vLLM's own reservation takes blocks outside of a
sliding window for held, and does not count that a request whose load has failed needs all its blocks once more.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import TYPE_CHECKING

from kvpipe.geometry import Geometry

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


class Room:
    """Knows who holds blocks for an asynchronous load and has not run since."""

    def __init__(self, geometry: Geometry, step_tokens_max: int) -> None:
        """`step_tokens_max` is the most that a step computes, in tokens."""
        self._groups, self._step_tokens_max = geometry.groups, step_tokens_max
        self._parked: dict[str, Request] = {}

    def __bool__(self) -> bool:
        """Whether anybody does."""
        return bool(self._parked)

    def park(self, request: Request) -> None:
        """Blocks were allocated for a load of `request`."""
        self._parked[request.request_id] = request

    def leave(self, request_ids: Collection[str]) -> None:
        """These run, and can be preempted from now on, or are over."""
        for request_id in self._parked.keys() & request_ids:
            del self._parked[request_id]

    def fits(self, request: Request, manager: KVCacheManager) -> bool:
        """Whether all that `request` needs is free beside all that the others may still need."""
        others = sum(self.needed(one, manager) for one in self._parked.values() if one is not request)
        return others == 0 or others + self.needed(request, manager) <= manager.block_pool.get_num_free_blocks()

    def needed(self, request: Request, manager: KVCacheManager) -> int:
        """Blocks that `request` may take beyond those that it holds, until all its tokens are computed."""
        needed = 0
        for group, blocks in zip(self._groups, manager.coordinator.single_type_managers, strict=True):
            table = blocks.req_to_blocks.get(request.request_id, [])
            more = -(-request.num_tokens // group.block_tokens) - len(table)
            if group.window_tokens is not None:  # what it reads and what a step computes, at any alignment
                most = -(-(group.window_tokens - 1 + self._step_tokens_max) // group.block_tokens) + 1
                held = sum(1 for _ in itertools.takewhile(lambda block: not block.is_null, reversed(table)))
                more = min(more, most - held)
            needed += max(0, more)
        return needed
