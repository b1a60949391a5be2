"""How an engine's ranks divide a model: whose bytes a block has."""

from __future__ import annotations

from kvpipe.connectors.vllm.trial.mutants.base import Mutant, one

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
}
