"""Removes blocks from vLLM's prefix cache that have a key although no step computes them.

vLLM gives blocks their keys when it allocates them. Under the priority policy, vLLM may then preempt a request that is
already part of the same step (`Scheduler.schedule`). That request leaves the step, but the blocks that the step was to
compute stay in vLLM's prefix cache. Any request that reuses these blocks, including the preempted request when it
resumes, reads wrong KV and would then save it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

from kvpipe.connectors.vllm.wrapping import wrap

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

    from kvpipe.protocol.engine import Blocks
    from kvpipe.trace.log import Counters


def forget_uncomputed(manager: KVCacheManager, blocks: Blocks, block_tokens: Sequence[int], counters: Counters) -> None:
    """From now on, remove a preempted request's blocks that are not fully computed from the prefix cache.

    `blocks` gives the blocks of `manager`. `block_tokens` has the number of tokens per block, of each group.
    """

    def free(freed: Callable[[Request], None], request: Request) -> None:
        if request.status == RequestStatus.RUNNING:  # any other request has ended or has no keys yet
            try:
                blocks.forget(_uncomputed(request, blocks, block_tokens))
            except Exception as error:  # noqa: BLE001  (vLLM's call must continue)
                counters.fault("uncomputed_blocks_not_forgotten", request=request.request_id, error=repr(error))
        freed(request)

    wrap(manager, "free", free)


def _uncomputed(request: Request, blocks: Blocks, block_tokens: Sequence[int]) -> set[int]:
    """Return the request's blocks with tokens that no earlier step has computed."""
    computed = request.num_computed_tokens
    tables = ((blocks.table(request.request_id, group), size) for group, size in enumerate(block_tokens))
    return {block.block_id for table, size in tables for block in table[computed // size :] if not block.is_null}
