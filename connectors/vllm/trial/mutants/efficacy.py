"""Bugs that lose hits, though no answer is wrong: saved chunks are not found, or are found only in part."""

from __future__ import annotations

from kvpipe.connectors.vllm.trial.mutants.base import (
    INVALID_BLOCKS,
    LOADING,
    LOOKUPS,
    PREFIXES,
    SAVING,
    SCHEDULER,
    Mutant,
    one,
)

MUTANTS: dict[str, Mutant] = {
    "load_rounded_down": Mutant(
        "The last partial unit of a load is rounded down.",
        one(
            LOOKUPS,
            "_answer",
            "tokens = min(tokens, request.num_tokens - 1)",
            "tokens = min(tokens, request.num_tokens - 1) // self._unit * self._unit",
        ),
    ),
    "local_hits_taken_for_saved": Mutant(
        "Blocks that vLLM's own prefix cache holds count as saved.",
        one(
            LOADING,
            "admit",
            "asking.units if stands else 0",
            "max(asking.units, asking.local // self._unit) if stands else 0",
        ),
    ),
    "only_failed_blocks_forgotten": Mutant(
        "After a failed load only the load's own blocks leave vLLM's prefix cache, not the blocks computed from them.",
        one(INVALID_BLOCKS, "failed", "for request_id in requests:", "for request_id in ():"),
    ),
    "aborted_before_its_load_failed": Mutant(
        "Blocks that an aborted request has computed from a failed load stay in vLLM's prefix cache.",
        one(INVALID_BLOCKS, "failed", "block_ids | self.left", "set(block_ids)"),
    ),
    "shared_tail_not_kept": Mutant(
        "When another request continues a chunk, the mark at the first request's end is dropped.",
        (
            *one(LOADING, "_group_rows", "self._catalog.keep_mark(last, end)", "pass"),
            *one(SAVING, "_claim", "self._catalog.keep_mark(found, before)", "pass"),
            *one(SAVING, "ended", "self._catalog.keep_mark(chunk, key)", "pass"),
        ),
    ),
    "end_of_a_request_not_kept": Mutant(
        "When a concurrent request continues a chunk, the mark at the first request's end is dropped.",
        one(SAVING, "ended", "self._catalog.keep_mark(chunk, key)", "pass"),
    ),
    "window_one_unit_too_wide": Mutant(
        "A hit needs one unit more of a sliding window than attention reads.",
        one(
            PREFIXES,
            "__init__",
            "self._unit - 2) // self._unit, g.local)",
            "self._unit - 2) // self._unit + 1, g.local)",
        ),
        shape="window",
    ),
    "last_chunk_all_or_nothing": Mutant(
        "A chunk that holds only a part of the requested tokens counts as a miss.",
        one(PREFIXES, "_longest_in_last_chunk", "return self._shorter(index, hashes, base, best - 1)", "return base"),
    ),
    "nothing_beyond_local_hits": Mutant(
        "A request is promised nothing if vLLM's own prefix cache holds its beginning.",
        one(LOOKUPS, "_answer", "external = max(0, tokens - local_tokens)", "external = 0 if local_tokens else tokens"),
    ),
    "preempted_and_never_loaded": Mutant(
        "A preempted request computes the tokens that it had saved again.",
        one(LOOKUPS, "_why_not", "row == m.RECOMPUTING or", "row in {m.RECOMPUTING, m.PREEMPTED} or"),
        shape="device-order",
    ),
    "let_down_and_never_loaded": Mutant(
        "After another connector's load has failed, the request is promised neither a sync nor an async load.",
        one(LOOKUPS, "_why_not", "(row == m.LET_DOWN and between)", "row == m.LET_DOWN"),
        shape="sibling",
    ),
    "local_hits_not_of_use": Mutant(
        "A hit in vLLM's own prefix cache does not count as a use of kvpipe's chunk, so kvpipe evicts the chunk.",
        one(SCHEDULER, "admitted", "if asking.local:", "if False:"),
        test="tests/scheduler/test_side.py::test_the_tail_of_a_request_does_not_evict_its_head",
    ),
    "later_input_not_saved": Mutant(
        "If answers are not saved, later inputs of a session are not saved either.",
        one(SAVING, "plan", " and not request.resumable", ""),
        test="tests/contract/test_scheduler_versions.py::test_later_input_of_a_session_is_saved_when_save_decode_is_off",
    ),
    "a_block_has_one_hash": Mutant(
        "A unit is looked up as if it had one hash, though vLLM computes several hashes per unit.",
        one(PREFIXES, "key", "hashes[units * self._hashes_per_unit - 1 + self._ahead]", "hashes[units - 1]"),
        shape="hash-blocks",
    ),
}
