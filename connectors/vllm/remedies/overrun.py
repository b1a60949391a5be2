"""States that vLLM keeps under the key of a boundary at which no step has ended.

Where layers write a state from within a step, a prefill's step that begins within a block need not end with it
(`use_internal_checkpoint` in `Scheduler._mamba_block_aligned_split`). That block counts as full all the same
(`SingleTypeKVCacheManager.cache_blocks`): where prompts branch behind it, or all states are kept, it gets the key of
its end, and has the state of where the step began.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvpipe.geometry import Geometry
from kvpipe.scheduler.base import OfferedStates, Request, Step


def overrun(step: Step, requests: Iterable[Request], geometry: Geometry) -> set[int]:
    """Return the state blocks that `step` offers for a boundary at which it leaves no state.

    Steps of a decode leave the states after each of their tokens.
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
