"""Races and failures."""

from __future__ import annotations

from kvpipe.connectors.vllm.trial.mutants.base import (
    CONNECTOR,
    COPIES,
    INVALID_BLOCKS,
    LAYER_CURSOR,
    LOADING,
    LOOKUPS,
    PIPELINE,
    WORKER,
    Mutant,
    Patch,
    one,
)

MUTANTS: dict[str, Mutant] = {
    "load_not_waited_for": Mutant(
        "Attention reads a layer before its copy has landed.",
        one(PIPELINE, "_guard", "elif not self._timed(self._engine.guard_read, ticket):", "elif False:"),
    ),
    "load_waited_for_by_count": Mutant(
        "The k-th wait waits for layer k, whatever its name.",
        one(
            WORKER,
            "wait_layer",
            "self._index.get(name)",
            "len(self.pipeline._sync.waited) % len(self._index) if self.pipeline._sync else None",
        ),
    ),
    "step_mode_without_wait": Mutant(
        "Without hooks between layers nobody waits for loads.",
        one(PIPELINE, "_start_loads", "self.wait_layer(layer)", "pass"),
        shape="step-mode",
    ),
    "source_reused_before_the_copy": Mutant(
        "The step ends before its copies have read their blocks.",
        one(PIPELINE, "fence", "if batch is not None and batch.last", "if False and batch.last"),
    ),
    "fence_left_to_the_next_step": Mutant(
        "The next step sets the fence of the last one's saves, also where that comes after blocks are zeroed.",
        one(PIPELINE, "_end", "if not self._fences_late:", "if False:"),
        test="tests/worker/test_pipeline.py::test_the_fence_is_set_when_the_step_ends",
    ),
    "source_reused_before_the_next_step": Mutant(
        "Where the next step sets the fence of the last one's saves, it does so when its blocks are zeroed already.",
        one(WORKER, "handle_preemptions", "self.pipeline.fence()", "pass"),
        test="tests/worker/test_pipeline.py::test_the_next_steps_first_hook_sets_the_fence",
    ),
    "unhooked_layer_not_waited_for": Mutant(
        "A layer whose attention calls no hook is read before its copy has landed.",
        one(PIPELINE, "_start_loads", "else self._unhooked:", "else self._unhooked[1:]:"),
        test="tests/worker/test_unhooked_steps.py::test_a_layer_without_a_hook_is_loaded_first",
    ),
    "replayed_step_not_waited_for": Mutant(
        "In a step that is replayed from a CUDA graph, loads are left to hooks that do not come.",
        one(PIPELINE, "_start_loads", "replayed = ", "replayed = False and "),
        shape="graphs",
    ),
    "replayed_step_not_saved": Mutant(
        "In a step that is replayed from a CUDA graph, saves are left to hooks that do not come.",
        one(PIPELINE, "_end", "(self._replayed is not None or not self._computes)", "not self._computes"),
        shape="graphs",
    ),
    "hooks_believed_in": Mutant(
        "Every layer is taken for one whose attention calls its hooks.",
        one("kvpipe.connectors.vllm.hooks", "is_hooked", "return forward is Attention.forward", "return True"),
        shape="unhooked",
    ),
    "unwaited_layer_believed": Mutant(
        "A load counts as good though attention has read a layer without waiting.",
        one(PIPELINE, "_settle_loads", "elif len(batch.waited) == len(self._layers):", "elif was != m.GIVEN_UP:"),
        by="every_read_is_right",
    ),
    "uncomputed_blocks_are_offered": Mutant(
        "Who is preempted in the pass that has scheduled it leaves blocks in vLLM's cache that nobody computes.",
        one("kvpipe.connectors.vllm.remedies.uncomputed", "_uncomputed", "table[computed // size :]", "table[:0]"),
        test="tests/vllm/test_uncomputed.py::test_nobody_reads_what_no_step_has_computed",
    ),
    "failed_sync_load_not_reported": Mutant(
        "Blocks that hold garbage are not reported to vLLM.",
        one(WORKER, "_account", "self._bad_blocks |= job.blocks()", "pass"),
    ),
    "failed_async_load_not_reported": Mutant(
        "A failed asynchronous load is reported to vLLM as ended, not as failed.",
        one(WORKER, "_account", "self._failed.add(job.request)", "pass"),
        shape="async-load",
    ),
    "lost_load_not_reported": Mutant(
        "A load that was waited for in vain is not reported.",
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
                "report",
                "batch.closed and batch.settled",
                "batch.closed",
            ),
        ),
        shape="async-load",
    ),
    "lost_load_reported_again": Mutant(
        "Blocks of a load that was reported in its step are reported again when its copies end.",
        one(WORKER, "_account", " and why != REPORTED_EARLY", ""),
    ),
    "garbage_left_in_the_prefix_cache": Mutant(
        "After a failed load its blocks stay hits of vLLM's own prefix cache.",
        one(INVALID_BLOCKS, "failed", "blocks.forget(resting)", "pass"),
        shape="device-order",
    ),
    "spoiled_block_left_to_another": Mutant(
        "A block that a failed load has spoiled is left to the first of those that share it, aborted or not.",
        one(INVALID_BLOCKS, "failing_loads", "return self.spoiled.readers(parts)", "return {}"),
    ),
    "failed_load_tried_for_ever": Mutant(
        "A request whose load has failed is promised the same hit again.",
        one(LOOKUPS, "_why_not", "row == m.RECOMPUTING or", ""),
    ),
    "asked_anew_unnoticed": Mutant(
        "A request that lost its blocks with another connector's load, and is asked for anew, counts as running.",
        one(LOOKUPS, "_answer", "tracked.fire(m.ASK)", "tracked.state.row == m.RUNNING or tracked.fire(m.ASK)"),
        shape="sibling",
    ),
    "let_down_and_loaded_between_steps": Mutant(
        "After another connector's failed load a hit is loaded between steps, which vLLM may never admit.",
        (
            *one(LOOKUPS, "_why_not", " or (row == m.LET_DOWN and between)", ""),
            *one(LOOKUPS, "_held", "tracked.state.row != m.LET_DOWN and", ""),
        ),
        shape="sibling-async-load",
    ),
    "windows_load_within_the_step": Mutant(
        "Models with a sliding window load within the step, where vLLM cannot recover from a load that fails.",
        one("kvpipe.geometry:Geometry", "loads_between_steps", " or self.windows", ""),
        shape="window",
        by="every_read_is_right",
    ),
    "stages_load_within_the_step": Mutant(
        "A pipeline's stages load within the step, though vLLM computes the next ones before a failure is reported.",
        one(LOADING, "__init__", " or stages > 1", ""),
        test="tests/trials/test_stall.py::test_stages_load_between_steps",
    ),
    "settled_by_the_last_ticket": Mutant(
        "A job is reported when the last copy that was asked for is over, though earlier ones are not.",
        one(
            "kvpipe.worker.batch:Batch",
            "settled",
            "while self.open and self.open[0].state in QUIET:",
            "while self.open and self.open[-1].state in QUIET:",
        ),
        test="tests/worker/test_timeouts.py::test_no_job_is_reported_while_a_layer_before_the_refused_one_is_copied",
    ),
    "async_loads_hold_what_others_need": Mutant(
        "Asynchronous loads are taken whether or not there is room for all who hold blocks.",
        one(
            LOOKUPS,
            "_answer",
            " and not self._recovery.may_wait(request, waiting | self._requests.sessions)",
            " and False",
        ),
        shape="hybrid",
    ),
    "session_waits_for_its_own_load": Mutant(
        "A session whose own load has failed is put off until no load needs the room: also its own.",
        one(LOOKUPS, "_unknown", " and request.request_id not in waiting", ""),
        shape="states",
    ),
    "promise_not_kept": Mutant(
        "A hit that was promised between steps is loaded in its step, or the other way round.",
        one(LOADING, "admit", "waits = asking.waits", "waits = self.between_steps"),
        shape="either-load",
    ),
    "reports_not_waited_for": Mutant(
        "The engine stops stepping while ranks still owe reports.",
        one(CONNECTOR, "has_pending_push_work", "self.scheduler.pending", "False"),
        shape="device-order",
    ),
    "moves_not_traced": Mutant(
        "A machine's move is not traced.",
        one(
            LAYER_CURSOR, "fire", "if self.watch is not None:", "if self.watch is not None and event != 'landed_next':"
        ),
    ),
}
