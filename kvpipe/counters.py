"""What is counted: every name, with a sentence. `kvpipe.trace.log.Counters` takes no other, as a type checker knows.

`FAULTS` went wrong and were contained; `COUNTS` are part of the ordinary course. Both are listed in `docs/counters.md`,
which `python -m kvpipe.counters` writes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from kvpipe import doc_tables

Fault = Literal[
    "adapter_changed",
    "adapter_not_read",
    "carrier_lost",
    "carry_failed",
    "chunk_damaged",
    "contained_error",
    "copy_timeout",
    "engine_failed",
    "fetch_not_planned",
    "foreign_metadata",
    "hit_vanished",
    "hook_for_unknown_layer",
    "id_reused_before_finish",
    "illegal_transition",
    "job_failed",
    "layers_never_submitted",
    "layers_read_without_waiting",
    "load_failed",
    "load_not_planned",
    "loads_never_started",
    "loads_started_by_hook",
    "loop_did_not_settle",
    "loop_lost",
    "order_not_landed",
    "orders_without_tiers",
    "plan_after_shutdown",
    "poisoned_plan",
    "policy_failed",
    "save_failed",
    "save_not_planned",
    "scheduled_unknown_request",
    "spoiled_blocks_not_reported",
    "step_end_skipped",
    "step_never_ended",
    "store_not_planned",
    "stuck",
    "submit_failed",
    "tier_failed",
    "tiers_not_on_all_ranks",
    "weights_not_on_all_ranks",
    "weights_not_read",
]
Count = Literal[
    "adapter_late",
    "chunks_fetched",
    "chunks_fetching",
    "chunks_not_fetched",
    "chunks_not_stored",
    "chunks_stored",
    "evicted",
    "freeze_off",
    "freeze_on",
    "handle_preemptions",
    "lookup_gave_up",
    "lookup_hit",
    "lookup_later",
    "lookup_miss",
    "no_op_transitions",
    "pieces_published",
    "preempted",
    "reported_again",
    "reset",
    "reset_chunks",
    "save_dropped_pool_full",
    "save_known",
    "save_out_of_window",
    "save_repeated",
    "shared_layer_hooks",
    "spoiled_blocks_reported",
    "step_end_empty",
    "store_dropped_evicted",
    "store_dropped_queue_full",
    "store_dropped_tier_failed",
    "tier_lookup",
    "tier_lookup_late",
    "tier_no_room",
    "tokens_loaded",
    "units_saved",
    "wait_repeated",
    "weights_changed",
    "weights_suspected",
    "weights_unchanged",
]
CounterName = Fault | Count

FAULTS: Final[Mapping[Fault, str]] = {
    "adapter_changed": "A job failed because the adapter of its request changed under it.",
    "adapter_not_read": "The files of an adapter could not be read, so its requests are not cached.",
    "carrier_lost": "The thread that moves chunks to and from tiers ended; all it had under way failed.",
    "carry_failed": "A transfer to or from a tier raised what no tier should raise.",
    "chunk_damaged": "A tier gave back bytes that are not those that were written; the chunk counts as missed.",
    "contained_error": "An exception was stopped at the border to vLLM; the hook did nothing instead.",
    "copy_timeout": "A copy did not end within `wait_ms_max`; its jobs failed.",
    "engine_failed": "A transfer engine of another package raised; its copies fail from then on.",
    "fetch_not_planned": "Planning what to fetch from tiers raised; the request computes instead.",
    "foreign_metadata": "vLLM handed over another connector's metadata; the step ran without a plan.",
    "hit_vanished": "A chunk that a lookup had promised was gone at admission.",
    "hook_for_unknown_layer": "vLLM called a hook for a layer that has no cache here.",
    "id_reused_before_finish": "A request was added under the id of one that was not over.",
    "illegal_transition": "A state machine met an event that its table rejects: a bug of kvpipe.",
    "job_failed": "A rank failed a job.",
    "layers_never_submitted": "A step ended before all of its layers were saved; the saves failed.",
    "layers_read_without_waiting": "A layer was computed before its load was waited for; the loads failed.",
    "load_failed": "A load failed on some rank; its tokens are computed instead.",
    "load_not_planned": "Planning a load raised; its tokens are computed instead.",
    "loads_never_started": "A step with loads ended before they were started; they failed.",
    "loads_started_by_hook": "vLLM had not started a step's loads when the first layer was reached; the hook did.",
    "loop_did_not_settle": "The loop thread did not handle its inbox in time.",
    "loop_lost": "The loop thread ended; what was under way failed.",
    "order_not_landed": "Taking in the report of a tier order raised.",
    "orders_without_tiers": "A plan had orders for tiers that this rank does not have.",
    "plan_after_shutdown": "A plan came after the end of the pipeline; its jobs failed.",
    "poisoned_plan": "A plan named a block, slot or layer that does not exist; the job failed.",
    "policy_failed": "An eviction policy failed; the least recently used chunk goes from then on.",
    "save_failed": "A save failed on some rank; its chunks are not published.",
    "save_not_planned": "Planning a save raised; the tokens are not saved in this step.",
    "scheduled_unknown_request": "vLLM scheduled a request that was never looked up.",
    "spoiled_blocks_not_reported": "Planning the report of blocks that a failed load has spoiled raised.",
    "step_end_skipped": "A step began before the end of the one before was called.",
    "step_never_ended": "A step's jobs were still open when the next step was bound.",
    "store_not_planned": "Planning what to store in tiers raised.",
    "stuck": "A job did not move for `stuck_ms_max` and failed.",
    "submit_failed": "The transfer engine refused a copy; its jobs failed.",
    "tier_failed": "A call to a tier failed or took too long.",
    "tiers_not_on_all_ranks": "Some rank has other tiers, so none is used.",
    "weights_not_on_all_ranks": "Some rank did not report its weights, so nothing is shared.",
    "weights_not_read": "The weights could not be digested.",
}
COUNTS: Final[Mapping[Count, str]] = {
    "adapter_late": "A lookup went on without the digest of its adapter, which took too long to read.",
    "chunks_fetched": "Chunks that came from a tier.",
    "chunks_fetching": "Chunks that were asked of a tier.",
    "chunks_not_fetched": "Chunks that were asked of a tier and did not come.",
    "chunks_not_stored": "Chunks that were to be stored in a tier and were not.",
    "chunks_stored": "Chunks that were stored in a tier.",
    "evicted": "Chunks evicted from the pool.",
    "freeze_off": "Saving was resumed.",
    "freeze_on": "Saving was stopped.",
    "handle_preemptions": "Steps in which vLLM reported preemptions to the worker.",
    "lookup_gave_up": "Lookups that answered with what had come when `lookup_ms_max` was over.",
    "lookup_hit": "Lookups that found tokens.",
    "lookup_later": "Lookups that asked vLLM to ask again.",
    "lookup_miss": "Lookups that found nothing.",
    "no_op_transitions": "Events that changed nothing in a rank's machines.",
    "pieces_published": "Pieces of chunks that every rank has saved.",
    "preempted": "Requests that were preempted, each time.",
    "reported_again": "Reports about jobs that were over.",
    "reset": "Resets of the prefix cache that reached the connector.",
    "reset_chunks": "Chunks that resets dropped.",
    "save_dropped_pool_full": "Chunks that were not saved because nothing in the pool could be evicted.",
    "save_known": "Chunks that need not be saved because they are held already.",
    "save_out_of_window": "Chunks that were not saved because their blocks had left the sliding window.",
    "save_repeated": "Save hooks called again for a layer of the same step.",
    "shared_layer_hooks": "Hooks of layers that share another's cache.",
    "spoiled_blocks_reported": "Blocks reported to vLLM because a failed load has spoiled them.",
    "step_end_empty": "Ends of steps that had no jobs, or had ended.",
    "store_dropped_evicted": "Stores that were dropped because their chunk was evicted first.",
    "store_dropped_queue_full": "Stores that were dropped because `tier_bytes_in_flight_max` was reached.",
    "store_dropped_tier_failed": "Stores that were dropped because their tier is left alone.",
    "tier_lookup": "Lookups in tiers.",
    "tier_lookup_late": "Lookups in tiers that took longer than `lookup_ms_max`.",
    "tier_no_room": "Chunks that were not fetched because nothing in the pool could be evicted.",
    "tokens_loaded": "Tokens that were loaded instead of computed.",
    "units_saved": "Units of tokens that saves were planned for.",
    "wait_repeated": "Load hooks called again for a layer of the same step.",
    "weights_changed": "Questions about the weights that were answered with others than before.",
    "weights_suspected": "Calls that may have changed the weights.",
    "weights_unchanged": "Questions about the weights that were answered with the same as before.",
}
DOCS: Final = Path(__file__).parents[1] / "docs" / "counters.md"


def fill(text: str) -> str:
    """Return the page's text with its tables as the code has them."""
    return doc_tables.fill(text, {"faults": _table(FAULTS), "counts": _table(COUNTS)})


def _table(names: Mapping[Any, str]) -> str:
    rows = [f"| `{name}` | {names[name]} |" for name in sorted(names)]
    return "\n".join(["| name | what is counted |", "|---|---|", *rows]) + "\n"


if __name__ == "__main__":
    DOCS.write_text(fill(DOCS.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"{DOCS}\n")
