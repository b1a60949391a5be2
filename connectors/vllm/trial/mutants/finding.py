"""Bugs in finding, loading and saving the blocks of a prefix."""

from __future__ import annotations

from kvpipe.connectors.vllm.trial.mutants.base import (
    GROUP,
    LOADING,
    LOOKUPS,
    PAGING,
    PREFIXES,
    SAVE_PROGRESS,
    SAVING,
    Mutant,
    one,
)

MUTANTS: dict[str, Mutant] = {
    "window_not_needed": Mutant(
        "A hit counts though the sliding window before the hit's end is not held.",
        one(PREFIXES, "_longest_windows", "while best and self._windows:", "while False:"),
        shape="hybrid",
    ),
    "nothing_left_to_compute": Mutant(
        "A load inside a step may cover the whole prompt.",
        one(LOOKUPS, "_answer", "min(tokens, request.num_tokens - 1)", "tokens"),
        shape="device-order",
    ),
    "loaded_from_the_chunk_before": Mutant(
        "Blocks in the middle of a chunk are loaded from the chunk's beginning.",
        one(LOADING, "_group_rows", "BROKEN, pages, blocks)", "BROKEN, [0] * len(blocks), blocks)"),
    ),
    "loaded_over_local_hits": Mutant(
        "A load overwrites blocks that vLLM's own prefix cache holds, though other requests read them.",
        one(LOADING, "admit", "first = asking.local // self._unit", "first = 0"),
        shape="async-load",
    ),
    "window_blocks_saved": Mutant(
        "Blocks that have left a sliding window are saved, though vLLM has freed them.",
        one(SAVING, "_claim", " if not block.is_null]", "]"),
        shape="hybrid",
    ),
    "head_for_tail": Mutant(
        "If a window reaches into the middle of a unit, the unit's first blocks are stored instead of its last ones.",
        one(PAGING, "stored", "table[end - pages : end]", "table[end - blocks : end - blocks + pages]"),
        shape="tails",
    ),
    "tail_too_short": Mutant(
        "If a window reaches into the middle of a unit, one block too few of that unit is stored.",
        one(
            GROUP,
            "blocks_back",
            "-(-(self.window_tokens - 1) // self.block_tokens)",
            "self.window_tokens // 2 // self.block_tokens",
        ),
        shape="tails",
    ),
    "retried_without_end": Mutant(
        "A save that fails is tried again without end.",
        one(SAVE_PROGRESS, "lost", "self.retries < SAVE_RETRIES_MAX and", ""),
    ),
    "whole_prompt_every_step": Mutant(
        "Every step saves the whole prefix again.",
        one(
            SAVING,
            "plan",
            "first, progress.saved_units = progress.saved_units, units",
            "first, progress.saved_units = 0, units\n    self._catalog._pending[0].clear()",
        ),
    ),
}
