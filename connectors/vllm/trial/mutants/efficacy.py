"""Nothing is wrong, and hits are lost: what was saved and not evicted is not found, or not in full."""

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
        "What vLLM's own prefix cache holds counts as saved.",
        one(
            LOADING,
            "admit",
            "asking.units if stands else 0",
            "max(asking.units, asking.local // self._unit) if stands else 0",
        ),
    ),
    "only_failed_blocks_forgotten": Mutant(
        "After a failed load only its own blocks leave vLLM's prefix cache, not what was computed from them.",
        one(INVALID_BLOCKS, "failed", "for request_id in requests:", "for request_id in ():"),
    ),
    "aborted_before_its_load_failed": Mutant(
        "What an aborted request has computed from a load that turns out to have failed stays in vLLM's prefix cache.",
        one(INVALID_BLOCKS, "failed", "block_ids | self.left", "set(block_ids)"),
    ),
    "shared_tail_not_kept": Mutant(
        "Where a request has ended is forgotten when another one writes on in that chunk.",
        (
            *one(LOADING, "_group_rows", "self._catalog.keep_mark(last, end)", "pass"),
            *one(SAVING, "_claim", "self._catalog.keep_mark(found, before)", "pass"),
            *one(SAVING, "ended", "self._catalog.keep_mark(chunk, key)", "pass"),
        ),
    ),
    "end_of_a_request_not_kept": Mutant(
        "Where a request has ended is forgotten when one that runs beside it goes on in the same chunk.",
        one(SAVING, "ended", "self._catalog.keep_mark(chunk, key)", "pass"),
    ),
    "window_one_unit_too_wide": Mutant(
        "A hit needs one unit more of a sliding window than anybody reads.",
        one(
            PREFIXES,
            "__init__",
            "self._unit - 2) // self._unit, g.local)",
            "self._unit - 2) // self._unit + 1, g.local)",
        ),
        shape="window",
    ),
    "last_chunk_all_or_nothing": Mutant(
        "A chunk that holds less than what is asked for holds nothing.",
        one(PREFIXES, "_longest_in_last_chunk", "return self._shorter(index, hashes, base, best - 1)", "return base"),
    ),
    "nothing_beyond_local_hits": Mutant(
        "A request of which vLLM's own prefix cache holds the beginning is promised nothing more.",
        one(LOOKUPS, "_answer", "external = max(0, tokens - local_tokens)", "external = 0 if local_tokens else tokens"),
    ),
    "preempted_and_never_loaded": Mutant(
        "A preempted request computes anew what it had saved.",
        one(LOOKUPS, "_why_not", "row == m.RECOMPUTING or", "row in {m.RECOMPUTING, m.PREEMPTED} or"),
        shape="device-order",
    ),
    "let_down_and_never_loaded": Mutant(
        "A request that another connector's failed load has let down is promised nothing, within a step or between.",
        one(LOOKUPS, "_why_not", "(row == m.LET_DOWN and between)", "row == m.LET_DOWN"),
        shape="sibling",
    ),
    "local_hits_not_of_use": Mutant(
        "What vLLM's own prefix cache holds is evicted from kvpipe's as if nobody used it.",
        one(SCHEDULER, "admitted", "if asking.local:", "if False:"),
        test="tests/scheduler/test_side.py::test_the_tail_of_a_request_does_not_evict_its_head",
    ),
    "later_input_not_saved": Mutant(
        "Where answers are not saved, nothing that comes to a session after its first answer is.",
        one(SAVING, "plan", " and not request.resumable", ""),
        test="tests/contract/test_scheduler_versions.py::test_what_a_session_gets_later_is_saved_where_answers_are_not",
    ),
    "a_block_has_one_hash": Mutant(
        "The prefix of so many units is known by as many hashes, though vLLM hashes blocks in parts.",
        one(PREFIXES, "key", "hashes[units * self._hashes_per_unit - 1 + self._ahead]", "hashes[units - 1]"),
        shape="hash-blocks",
    ),
}
