"""Bugs that are races, or that mishandle failures."""

from __future__ import annotations

from kvpipe.connectors.vllm.trial.mutants.base import (
    COPIES,
    FAILED_LOADS,
    INVALID_BLOCKS,
    LAYER_CURSOR,
    LOADING,
    LOOKUPS,
    PIPELINE,
    SCHEDULER_ROLE,
    WORKER,
    WORKER_ROLE,
    Mutant,
    Patch,
    one,
)

_LATE = "world: scheduler=async failure=fail load=sync hooks=device saved=every-step"
_SPOILED = (
    "tests/cache/test_held_blocks.py::test_block_is_not_reported_when_another_request_has_it_before_the_load_fails"
)

MUTANTS: dict[str, Mutant] = {
    "load_not_waited_for": Mutant(
        "Attention reads a layer before its copy has landed.",
        one(PIPELINE, "_guard", "elif not self._timed(self._engine.guard_read, ticket):", "elif False:"),
    ),
    "load_waited_for_by_count": Mutant(
        "The k-th wait waits for layer k, whatever layer it names.",
        one(
            WORKER,
            "wait_layer",
            "self._index.get(name)",
            "len(self.pipeline._sync.waited) % len(self._index) if self.pipeline._sync else None",
        ),
    ),
    "step_mode_without_wait": Mutant(
        "If no hook is called between layers, no call waits for loads.",
        one(PIPELINE, "_start_loads", "self.wait_layer(layer)", "pass"),
        shape="step-mode",
    ),
    "source_reused_before_the_copy": Mutant(
        "The step ends before its copies have read their blocks.",
        one(PIPELINE, "fence", "if not batch.last.done:", "if False:"),
    ),
    "fence_left_to_the_next_step": Mutant(
        "The fence after a step's saves is left to the next step, even if that step zeroes blocks before its fence.",
        one(PIPELINE, "_end", "if not self._hooks.fences_late:", "if False:"),
        test="tests/worker/test_pipeline.py::test_the_fence_is_set_when_the_step_ends",
    ),
    "source_reused_before_the_next_step": Mutant(
        "The next step sets the fence for the last step's saves, but zeroes its own blocks before that.",
        one(WORKER, "handle_preemptions", "self.pipeline.fence()", "pass"),
        test="tests/worker/test_pipeline.py::test_the_next_steps_first_hook_sets_the_fence",
    ),
    "unhooked_layer_not_waited_for": Mutant(
        "A layer whose attention calls no hook is read before its copy has landed.",
        one(PIPELINE, "_start_loads", "else self._unhooked:", "else self._unhooked[1:]:"),
        test="tests/worker/test_unhooked_steps.py::test_a_layer_without_a_hook_is_loaded_first",
    ),
    "replayed_step_not_waited_for": Mutant(
        "In a step that is replayed from a CUDA graph, loads wait for hooks that are never called.",
        one(PIPELINE, "_start_loads", "replayed = ", "replayed = False and "),
        shape="graphs",
    ),
    "replayed_step_not_saved": Mutant(
        "In a step that is replayed from a CUDA graph, saves wait for hooks that are never called.",
        one(PIPELINE, "_end", "(self._hooks.replayed is not None or not self._computes)", "not self._computes"),
        shape="graphs",
    ),
    "hooks_believed_in": Mutant(
        "Every layer is treated as if its attention called its hooks.",
        one("kvpipe.connectors.vllm.hooks", "is_hooked", "return forward is Attention.forward", "return True"),
        shape="unhooked",
    ),
    "unwaited_layer_believed": Mutant(
        "A load counts as successful though attention has read a layer without waiting for it.",
        one(PIPELINE, "_settle_loads", "elif len(batch.waited) == len(self._layers):", "elif was != m.GIVEN_UP:"),
        by="every_read_is_right",
    ),
    "uncomputed_blocks_are_offered": Mutant(
        "A request that is scheduled and preempted in one pass leaves blocks in vLLM's cache that are never computed.",
        one("kvpipe.connectors.vllm.remedies.uncomputed", "_uncomputed", "table[computed // size :]", "table[:0]"),
        test="tests/vllm/test_uncomputed.py::test_prefix_cache_keeps_no_block_that_no_step_has_computed",
    ),
    "failed_sync_load_not_reported": Mutant(
        "The blocks of a failed load, which hold garbage, are not reported to vLLM.",
        one(WORKER, "_account", "self._bad_blocks |= job.blocks()", "pass"),
    ),
    "failed_async_load_not_reported": Mutant(
        "A failed asynchronous load is reported to vLLM as ended, not as failed.",
        one(WORKER, "_account", "self._failed.add(job.request)", "pass"),
        shape="async-load",
    ),
    "lost_load_not_reported": Mutant(
        "A load whose wait timed out is not reported.",
        one("kvpipe.worker.outcomes:Outcomes", "suspect", "self._suspects |= job.blocks()", "pass"),
    ),
    "async_load_reported_twice": Mutant(
        "The end of a load is reported to vLLM twice.",
        one(
            WORKER,
            "collect",
            "self._received = self._received, set()",
            "self._received = self._received, self._received",
        ),
        shape="async-load",
    ),
    "load_reported_before_it_ends": Mutant(
        "An asynchronous load is reported when it is submitted.",
        (
            Patch(
                COPIES,
                "_news",
                "        batch.closed = True\n        return\n",
                "        batch.closed = True\n        if batch.kind is Kind.LOAD_ASYNC:\n"
                "            batch.ended += [Outcome(job, ok=True, why='') for job in batch.jobs]\n        return\n",
            ),
            Patch(
                COPIES,
                "put_outcomes",
                "batch.closed and batch.settled",
                "batch.closed",
            ),
        ),
        shape="async-load",
    ),
    "lost_load_reported_again": Mutant(
        "Blocks of a load that was reported in its step are reported again when its copies end.",
        one(WORKER, "_account", " and why != REPORTED_EARLY", ""),
        test="tests/worker/test_side.py::test_blocks_of_a_load_are_reported_once_when_it_was_given_up_in_its_step",
    ),
    "late_load_reported_by_its_blocks": Mutant(
        "Blocks of a load that fails after its step are reported to vLLM, though another request may have them.",
        one(WORKER_ROLE, "get_block_ids_with_load_errors", "take_bad_blocks(late=False)", "take_bad_blocks()"),
        shape=_LATE,
        by="only_failed_blocks_are_reported",
    ),
    "block_spoiled_for_its_next_owner": Mutant(
        "A block of a failed load is reported after its next owner has written it, so that owner fails or recomputes.",
        one(FAILED_LOADS, "load_failed", "if given := blocks - self._held_since(load):", "if given := set[int]():"),
        test=_SPOILED,
    ),
    "block_not_spoiled_for_who_shares_it": Mutant(
        "After a failed load whose request has finished, requests that share its blocks read garbage.",
        one(FAILED_LOADS, "_held_since", "if key in keys", "if False"),
        test=_SPOILED,
    ),
    "garbage_left_in_the_prefix_cache": Mutant(
        "vLLM's prefix cache still offers the blocks of a failed load as hits.",
        one(INVALID_BLOCKS, "failed", "blocks.forget(resting)", "pass"),
        shape="device-order",
    ),
    "spoiled_block_left_to_another": Mutant(
        "Of several requests that share a failed load's block, only the first recomputes it, even if it was aborted.",
        one(INVALID_BLOCKS, "failing_loads", "return self.spoiled.readers(parts)", "return {}"),
    ),
    "failed_load_tried_for_ever": Mutant(
        "A request whose load has failed is promised the same hit again, without end.",
        one(LOOKUPS, "_why_not", "row == m.RECOMPUTING or", ""),
    ),
    "asked_anew_unnoticed": Mutant(
        "A request that lost its blocks because another connector's load failed counts as running at its next lookup.",
        one(LOOKUPS, "_answer", "tracked.fire(m.ASK)", "tracked.state.row == m.RUNNING or tracked.fire(m.ASK)"),
        shape="sibling",
    ),
    "let_down_and_loaded_between_steps": Mutant(
        "After another connector's load has failed, a hit is loaded asynchronously, and vLLM may never admit the "
        "request.",
        (
            *one(LOOKUPS, "_why_not", " or (row == m.LET_DOWN and between)", ""),
            *one(LOOKUPS, "_held", "tracked.state.row != m.LET_DOWN and", ""),
        ),
        shape="sibling-async-load",
    ),
    "windows_load_within_the_step": Mutant(
        "Models with a sliding window load within the step, though vLLM cannot recover from a failure there.",
        one("kvpipe.protocol.geometry:Geometry", "loads_between_steps", " or self.windows", ""),
        shape="window",
        by="every_read_is_right",
    ),
    "stages_load_within_the_step": Mutant(
        "A pipeline's stages load within the step, though vLLM computes later steps before a failure is reported.",
        one(LOADING, "__init__", " or pipeline_stages > 1", ""),
        test="tests/trials/test_stall.py::test_stages_load_between_steps",
    ),
    "settled_by_the_last_ticket": Mutant(
        "A job is reported when its last submitted copy has ended, though earlier copies have not.",
        one(
            "kvpipe.worker.batch:Batch",
            "settled",
            "while self.open and self.open[0].state in QUIET:",
            "while self.open and self.open[-1].state in QUIET:",
        ),
        test="tests/worker/test_timeouts.py::test_no_job_is_reported_while_a_layer_before_the_refused_one_is_copied",
    ),
    "async_loads_hold_what_others_need": Mutant(
        "Asynchronous loads are admitted even if they take room that requests with blocks need to finish.",
        one(
            LOOKUPS,
            "_answer",
            " and not self._recovery.may_wait(request, waiting | self._requests.sessions)",
            " and False",
        ),
        shape="hybrid",
    ),
    "session_waits_for_its_own_load": Mutant(
        "A session whose load has failed is admitted only if it fits beside its own load, so it waits for ever.",
        one(LOOKUPS, "_unknown", " and request.request_id not in waiting", ""),
        shape="states",
    ),
    "promise_not_kept": Mutant(
        "A hit that was promised as asynchronous is loaded within the step, or the reverse.",
        one(LOADING, "admit", "waits = asking.waits", "waits = self.between_steps"),
        shape="either-load",
    ),
    "reports_not_waited_for": Mutant(
        "The engine stops stepping while ranks still owe reports.",
        one(SCHEDULER_ROLE, "has_pending_push_work", "self.scheduler.pending", "False"),
        shape="device-order",
    ),
    "moves_not_traced": Mutant(
        "A transition of a state machine is not traced.",
        one(
            LAYER_CURSOR, "fire", "if self.watch is not None:", "if self.watch is not None and event != 'landed_next':"
        ),
    ),
}
