"""Bugs in how an engine's ranks divide a model: which rank's bytes a block has."""

from __future__ import annotations

from kvpipe.connectors.vllm.trial.mutants.base import GEOMETRY, LOADING, SAVING, Mutant, one

_SUPPORT = "kvpipe.connectors.vllm.support"
_FACTS = "kvpipe.connectors.vllm.identity.engine_facts"
_WHOLE = "kvpipe.transfer.whole_blocks"

MUTANTS: dict[str, Mutant] = {
    "layers_swapped_in_a_block": Mutant(
        "A block is copied whole though its layers are not in the order of a slot.",
        one(_WHOLE, "_side_by_side", "view.base == first.base + number * size", "view.base >= memory"),
        test="tests/transfer/test_whole_blocks.py::test_layers_in_another_order_within_a_block_are_copied_by_layer",
    ),
    "last_layer_of_a_whole_block_is_not_copied": Mutant(
        "A whole block is copied without the pages of its last layer.",
        one(_WHOLE, "whole_blocks", "mine[0].page_bytes * len(mine)", "mine[0].page_bytes * (len(mine) - 1)"),
        shape="whole-blocks",
        by="every_read_is_right",
    ),
    "slots_of_whole_blocks_are_found_by_others": Mutant(
        "Engines that copy whole blocks and engines that copy by layer share a namespace.",
        one("kvpipe.connectors.vllm.identity.rank_facts", "find_rank_facts", "[WHOLE] * whole", "[]"),
        test="tests/engine/test_whole_blocks.py::test_whole_blocks_are_saved_loaded_and_stored_apart_from_others",
    ),
    "block_of_one_rank": Mutant(
        "Under decode context parallelism, one rank's share of a block is taken for the whole block.",
        one(_SUPPORT, "make_geometry", "resolve_dcp_kv_block_size(group.kv_cache_spec, dcp)", "spec.block_size"),
        test="tests/vllm/test_geometry.py::test_a_block_is_as_long_as_all_ranks_shares_of_it",
    ),
    "tokens_of_a_rank_are_not_in_the_name": Mutant(
        "Engines whose ranks hold different tokens of a block share a namespace.",
        one(_FACTS, "_context_facts", "if ranks > 1", "if False"),
        test="tests/vllm/test_geometry.py::test_a_block_is_as_long_as_all_ranks_shares_of_it",
    ),
    "stretch_of_the_scheduler_alone": Mutant(
        "The tokens that a rank holds are taken from the scheduler's configuration, though vLLM changes it on ranks.",
        one(_FACTS, "layout_facts", "if context := _context_facts(config)", "if context := {}"),
        test="tests/vllm/test_geometry.py::test_a_rank_reports_which_tokens_it_holds",
    ),
    "last_page_of_a_hit_is_not_loaded": Mutant(
        "If a hit ends within a block of attention, only whole blocks are loaded.",
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
        "A chunk that ends within a block is continued at the next page, not within the block's own page.",
        one(SAVING, "_claim", "if low > base and not low % self._whole", "if low > base"),
        shape="states-context-parallel",
        by="findable_chunks_are_whole_and_true",
    ),
    "attention_ends_with_the_last_whole_block": Mutant(
        "Only whole blocks of attention are saved, so a state within a block can never be used.",
        one(
            SAVING,
            "_worth_a_page",
            "return max(whole, min(units, saved), *(end for end in self._boundaries(request) if end <= units))",
            "return max(whole, min(units, saved))",
        ),
        shape="states-context-parallel",
    ),
    "drafter_of_every_rank_is_divided": Mutant(
        "Under decode context parallelism a drafter's attention is divided among ranks, though every rank holds "
        "all of it.",
        one(
            _SUPPORT,
            "make_geometry",
            "resolve_dcp_kv_block_size(group.kv_cache_spec, dcp)",
            "group.kv_cache_spec.block_size * (dcp if isinstance(spec, FullAttentionSpec) else 1)",
        ),
        shape="async-scheduler-context-parallel-masks",
    ),
    "pages_are_counted_by_the_longest_block": Mutant(
        "If a block is several units in one group, it is taken for several units in every group.",
        one(GEOMETRY, "paging", "self.units_per_block", "[self.whole_units] * len(self.groups)"),
        shape="async-scheduler-states-context-parallel-masks",
    ),
    "drafted_state_ends_in_no_page": Mutant(
        "If a block of attention is several units, a prompt with drafts keeps a page that ends where there is no "
        "state.",
        one(SAVING, "_boundaries", "self._geometry.states_back", "self._geometry.states_back * (self._whole == 1)"),
        shape="states-context-parallel-masks",
    ),
    "state_kept_behind_what_is_dropped_never": Mutant(
        "A prompt's attention ends one block before its state, as if vLLM dropped a hit's last block for every "
        "drafter.",
        one(
            "kvpipe.connectors.vllm.identity.drafters",
            "states_back",
            "drafts.use_eagle_block_drop()",
            "drafts.use_eagle()",
        ),
        shape="states-masks-undropped",
    ),
}
