"""Blocks that have a key in vLLM's prefix cache although no step computes them.

vLLM gives blocks their keys when it allocates them. By priority it may then preempt a request that is part of the same
step already (`Scheduler.schedule`): that leaves the step, and what the step was to compute of it stays in vLLM's prefix
cache. Who takes that over, as the request itself when it comes back, reads garbage, and would have it saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

from kvpipe.connectors.vllm.wrapping import wrap

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

    from kvpipe.scheduler.base import Blocks
    from kvpipe.trace.log import Counters


def forget_uncomputed(manager: KVCacheManager, blocks: Blocks, block_tokens: Sequence[int], counters: Counters) -> None:
    """When a request is preempted, take its blocks that are not fully computed out of the prefix cache, from now on.

    `blocks`: those of `manager`. `block_tokens`: tokens per block, of each group.
    """

    def free(freed: Callable[[Request], None], request: Request) -> None:
        if request.status == RequestStatus.RUNNING:  # else it is over, or has no keys yet
            try:
                blocks.forget(_uncomputed(request, blocks, block_tokens))
            except Exception as error:  # noqa: BLE001  (vLLM's call goes on)
                counters.fault("uncomputed_blocks_not_forgotten", request=request.request_id, error=repr(error))
        freed(request)

    wrap(manager, "free", free)


def _uncomputed(request: Request, blocks: Blocks, block_tokens: Sequence[int]) -> set[int]:
    """Return the blocks with tokens that no step before this one computes."""
    computed = request.num_computed_tokens
    tables = ((blocks.table(request.request_id, group), size) for group, size in enumerate(block_tokens))
    return {block.block_id for table, size in tables for block in table[computed // size :] if not block.is_null}
