"""Finds states that vLLM keeps under the key of a boundary at which no step has ended.

If layers write states from within a step, a prefill step that begins within a block need not end at the block's end
(`use_internal_checkpoint` in `Scheduler._mamba_block_aligned_split`). vLLM still counts that block as full
(`SingleTypeKVCacheManager.cache_blocks`). If prompts branch after the block, or vLLM keeps all states, the block gets
the key of the block's end. But the block holds the state of the position at which the step began.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvpipe.protocol.engine import OfferedStates, Request, Step
from kvpipe.protocol.geometry import Geometry


def overrun(step: Step, requests: Iterable[Request], geometry: Geometry) -> set[int]:
    """Return the state blocks that `step` offers for a boundary at which the step leaves no state.

    Decode steps are not checked, because a decode step leaves a state after each token.
    """
    states: OfferedStates | None = getattr(step, "kv_connector_block_state", None)
    offered = states.boundary_state_offloads if states is not None else {}
    blocks: set[int] = set()
    for request in requests if offered else ():
        scheduled, start = step.num_scheduled_tokens.get(request.request_id, 0), request.num_computed_tokens
        if start >= max(request.num_prompt_tokens, request.num_tokens - 1):
            continue
        for group, block, tokens in offered.get(request.request_id, ()):
            size = geometry.groups[group].block_tokens
            if start < tokens < start + scheduled and (tokens - 1) // size == (start - 1) // size:
                blocks.add(block)
    return blocks
