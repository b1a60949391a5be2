"""How an engine's ranks divide a model: whose bytes a block has."""

from __future__ import annotations

from kvpipe.connectors.vllm.trial.mutants.base import GEOMETRY, LOADING, SAVING, Mutant, one

_SUPPORT = "kvpipe.connectors.vllm.support"

MUTANTS: dict[str, Mutant] = {
    "block_of_one_rank": Mutant(
        "Under decode context parallelism a block is taken for as long as one rank's share of it.",
        one(_SUPPORT, "make_geometry", "resolve_dcp_kv_block_size(group.kv_cache_spec, dcp)", "spec.block_size"),
        test="tests/vllm/test_geometry.py::test_a_block_is_as_long_as_all_ranks_shares_of_it",
    ),
    "tokens_of_a_rank_are_not_in_the_name": Mutant(
        "Engines whose ranks hold other tokens of a block share a namespace.",
        one(_SUPPORT, "_context_facts", "if ranks > 1", "if False"),
        test="tests/vllm/test_geometry.py::test_a_block_is_as_long_as_all_ranks_shares_of_it",
    ),
    "stretch_of_the_scheduler_alone": Mutant(
        "The stretch that ranks hold is what the scheduler was configured with, though vLLM changes it on ranks.",
        one(_SUPPORT, "layout_facts", "if context := _context_facts(config)", "if context := {}"),
        test="tests/vllm/test_geometry.py::test_a_rank_reports_which_tokens_it_holds",
    ),
    "last_page_of_a_hit_is_not_loaded": Mutant(
        "Of a hit that ends within a block of attention whole blocks are loaded alone.",
        one(
            LOADING,
            "_group_rows",
            "stored, page = paging.stored(table, first, stop),",
            "stop = stop - stop % self._geometry.units_per_block[group] or stop\n"
            "    stored, page = paging.stored(table, first, stop),",
        ),
        shape="states-context-parallel",
        by="every_read_is_right",
    ),
    "page_filled_in_part_is_written_on": Mutant(
        "A chunk that ends within a block is continued behind the page that has the beginning of that block.",
        one(SAVING, "_claim", "if low > base and not low % self._whole", "if low > base"),
        shape="states-context-parallel",
        by="findable_chunks_are_whole_and_true",
    ),
    "attention_ends_with_the_last_whole_block": Mutant(
        "Of attention whole blocks are saved alone: no state within a block is of use.",
        one(
            SAVING,
            "_worth_a_page",
            "return max(whole, min(units, saved), *(end for end in self._boundaries(request) if end <= units))",
            "return max(whole, min(units, saved))",
        ),
        shape="states-context-parallel",
    ),
    "drafter_of_every_rank_is_divided": Mutant(
        "Under decode context parallelism a drafter's attention is divided, though every rank holds all of it.",
        one(
            _SUPPORT,
            "make_geometry",
            "resolve_dcp_kv_block_size(group.kv_cache_spec, dcp)",
            "group.kv_cache_spec.block_size * (dcp if isinstance(spec, FullAttentionSpec) else 1)",
        ),
        shape="async-scheduler-context-parallel-masks",
    ),
    "pages_are_counted_by_the_longest_block": Mutant(
        "Where a block is several units in some group, it is in all of them.",
        one(GEOMETRY, "paging", "self.units_per_block", "[self.whole_units] * len(self.groups)"),
        shape="async-scheduler-states-context-parallel-masks",
    ),
    "drafted_state_ends_in_no_page": Mutant(
        "Where blocks of attention are several units, a drafted prompt's page is kept as far as vLLM keeps no state.",
        one(SAVING, "_boundaries", "self._geometry.states_back", "self._geometry.states_back * (self._whole == 1)"),
        shape="states-context-parallel-masks",
    ),
    "state_kept_behind_what_is_dropped_never": Mutant(
        "A prompt's attention ends a block before its state, as if vLLM dropped a hit's last block for every drafter.",
        one("kvpipe.connectors.vllm.drafters", "states_back", "drafts.use_eagle_block_drop()", "drafts.use_eagle()"),
        shape="states-masks-undropped",
    ),
}
