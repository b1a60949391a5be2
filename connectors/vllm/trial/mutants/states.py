"""Bugs with recurrent states: their boundaries, the states that a hit needs, and when states are final."""

from __future__ import annotations

from kvpipe.connectors.vllm.trial.mutants.base import (
    LOADING,
    PREFIXES,
    REMEDIES,
    SAVING,
    WORKER_ROLE,
    Mutant,
    Patch,
    one,
)

MUTANTS: dict[str, Mutant] = {
    "state_of_the_boundary_before": Mutant(
        "A request is loaded with the state of the boundary before its own if memory holds that earlier state.",
        one(
            PREFIXES,
            "holding",
            "return self._catalog.find(group, self.state_key(hashes, stop))",
            "keys = (self.state_key(hashes, n) for n in (stop - 1 or 1, stop))\n"
            "        return next(filter(None, (self._catalog.find(group, key) for key in keys)), None)",
        ),
        shape="states",
        by="every_read_is_right",
    ),
    "no_state_beside_a_local_hit": Mutant(
        "After a hit in vLLM's own cache only attention is loaded, so the recurrent state stays the initial state.",
        one(
            LOADING,
            "_group_rows",
            "first = base = stop - 1\n",
            "if first:\n            return [], ()\n        first = base = stop - 1\n",
        ),
        shape="states",
        by="every_read_is_right",
    ),
    "hit_without_its_state": Mutant(
        "A hit is as long as the held attention, though the state at the hit's end is missing.",
        one(PREFIXES, "_longest", "while best and self._states", "while False"),
        shape="states",
    ),
    "state_before_it_is_final": Mutant(
        "The state of a boundary is saved before a step has reached the boundary.",
        (
            Patch(SAVING, "_plan_state", "divmod(tokens,", "divmod(tokens + self._unit,"),
            Patch(SAVING, "_plan_state", "state_units(request, tokens)", "state_units(request, request.num_tokens)"),
            Patch(SAVING, "_plan_state", "if not self.blocks.knows(", "if False and not self.blocks.knows("),
        ),
        shape="states",
        by="findable_chunks_are_whole_and_true",
    ),
    "states_of_who_sits_out_are_lost": Mutant(
        "A state is not saved if its request is not scheduled in the step in which vLLM offers the state.",
        one(SAVING, "plan_step", "if request_id in tracked_of:", "if request_id in step.num_scheduled_tokens:"),
        test="tests/scheduler/test_states.py::test_state_is_saved_when_its_request_is_not_in_the_step",
    ),
    "state_saved_before_its_step": Mutant(
        "States are saved before the forward that computes them, when layers without hooks are loaded.",
        one(
            WORKER_ROLE,
            "start_load_kv",
            "self.worker.start_loads(",
            "_ = [self.worker.save_layer(name) for name in list(self.worker._index)]\n        self.worker.start_loads(",
        ),
        shape="states",
        by="findable_chunks_are_whole_and_true",
    ),
    "drafted_state_saved_before_sampling": Mutant(
        "A step's saves end with its forward, when the state of a boundary among drafts is not yet in its block.",
        one(
            WORKER_ROLE,
            "start_load_kv",
            "self.worker.start_loads(",
            "self.worker.end_step()\n        self.worker.start_loads(",
        ),
        shape="states-drafter",
        by="findable_chunks_are_whole_and_true",
    ),
    "state_by_the_tokens_ahead": Mutant(
        "A state is saved under the key of a later boundary, as if the state depended on the tokens ahead.",
        one(SAVING, "_plan_state", "key = self._prefixes.state_key(", "key = self._prefixes.key("),
        shape="states-drafter",
        by="findable_chunks_are_whole_and_true",
    ),
    "state_of_a_block_that_was_given_away": Mutant(
        "A state is saved from a block that vLLM has since freed and given to another request.",
        one(SAVING, "_plan_state", "if not self.blocks.knows(", "if False and not self.blocks.knows("),
        shape="async-scheduler-states-drafter",
        by="findable_chunks_are_whole_and_true",
    ),
    "state_within_a_block_by_where_it_begins": Mutant(
        "A state at a position within a block is saved under the key of the block's beginning.",
        one(
            SAVING,
            "_plan_state",
            "key = self._prefixes.state_key(self._prefixes.hashes(request), units)",
            "kept = units - units % self._branches or units\n"
            "    key = self._prefixes.state_key(self._prefixes.hashes(request), kept)",
        ),
        shape="states-exported",
        by="findable_chunks_are_whole_and_true",
    ),
    "a_unit_taken_for_a_block_of_states": Mutant(
        "The block of a state is computed as if each unit had its own block of states.",
        one(
            LOADING,
            "_group_rows",
            "table[first // self._geometry.units_per_block[group]].is_null",
            "table[first].is_null",
        ),
        shape="states-exported",
    ),
    "states_of_no_boundary_are_kept": Mutant(
        "vLLM's cache keeps a state under the key of a boundary though the step has run past the boundary.",
        one(
            REMEDIES,
            "begin_step",
            "if self._states and (wrong",
            "if False and (wrong",
        ),
        shape="states-exported",
        by="findable_chunks_are_whole_and_true",
    ),
}
