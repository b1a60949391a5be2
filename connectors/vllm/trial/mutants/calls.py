"""Bugs in the calls of a step, in leases, and in preemption."""

from __future__ import annotations

from kvpipe.connectors.vllm.trial.mutants.base import (
    CATALOG,
    COPIES,
    JOBS,
    LOADING,
    LOOKUPS,
    PIPELINE,
    REQUESTS,
    SAVE_PROGRESS,
    SAVING,
    SCHEDULER,
    SCHEDULER_ROLE,
    SWITCHES,
    WORKER,
    Mutant,
    Patch,
    one,
)

MUTANTS: dict[str, Mutant] = {
    # ---- the pump that died ------------------------------------------------------------------------------------------
    "storers_not_cleared": Mutant(
        "A step's saves are still open when the next step begins.",
        (
            *one(PIPELINE, "end_step", "if self.step.fire(m.STEP_END).moves:", "if was != m.IDLE:"),
            *one(PIPELINE, "_end", "batch, self._save = self._save, NO_BATCH", "batch = self._save"),
        ),
    ),
    "step_never_withdrawn": Mutant(
        "A step that was never ended continues in the next step.",
        one(PIPELINE, "begin", '.fault("step_never_ended")\n', '.fault("step_never_ended")\n            return\n'),
    ),
    "finalize_counted_by_calls": Mutant(
        "A save counts as complete when a hook was called as often as there are layers.",
        (
            Patch(
                PIPELINE,
                "save_layer",
                'self.counters["save_repeated"] += 1',
                "batch.tickets[min(set(self._layers) - set(batch.tickets), default=layer)] = batch.tickets[layer]",
            ),
            Patch(
                COPIES,
                "_news",
                "    for job in batch.jobs:\n        self.fire",
                "    if event == m.CONFIRM and batch.kind is Kind.SAVE:\n"
                "        batch.ended += [Outcome(job, ok=True, why='') for job in batch.jobs]\n"
                "    for job in batch.jobs:\n        self.fire",
            ),
        ),
    ),
    "layer_counter_not_reset": Mutant(
        "The layer numbers of a batch continue from those of the last batch instead of starting at 0.",
        one(
            PIPELINE,
            "_submit_layers",
            "len(batch.tickets), self._landed, layers)\n",
            "self.__dict__.setdefault('number', 0), self._landed, layers)\n    self.number += len(layers)\n",
        ),
    ),
    "layer_by_count": Mutant(
        "The k-th call of a hook is taken for layer k, whatever layer it names.",
        (
            Patch(
                WORKER,
                "save_layer",
                "self._index.get(name)",
                "len(self.pipeline._save.tickets) % len(self._index) if self.pipeline._save.jobs else None",
            ),
            Patch(WORKER, "save_layer", "self._unknown(name)", "pass"),
        ),
        by="every_read_is_right",
        shape="device-order",
    ),
    "freeze_one_step_short": Mutant(
        "Every second frozen step saves.",
        one(
            SWITCHES,
            "saving",
            "(self.freeze or",
            "(self.freeze and not vars(self).update(turn=vars(self).get('turn', 0) + 1) and self.turn % 2 or",
        ),
    ),
    "freeze_ignored": Mutant(
        "A frozen engine saves.",
        one(SWITCHES, "saving", "self.freeze or ", ""),
    ),
    "bypass_saves": Mutant(
        "A bypassed engine saves.",
        one(SWITCHES, "saving", " or self.bypass", ""),
    ),
    # ---- leases ------------------------------------------------------------------------------------------------------
    "leased_by_lookup": Mutant(
        "A lookup takes leases, and a request that is not admitted never releases them.",
        one(
            LOOKUPS,
            "_answer",
            "    return Hit(external, waits)",
            "    from kvpipe.cache.catalog import Owner\n"
            "    self._loading._catalog.lease(Owner(request.request_id, -1), [])\n    return Hit(external, waits)",
        ),
    ),
    "released_only_for_requests_in_metadata": Mutant(
        "The leases of a load are not released if its request has ended.",
        one(
            JOBS,
            "reported",
            "self._catalog.release(job.owner)",
            "job.tracked.state.row not in {'DRAINING', 'FINISHED'} and self._catalog.release(job.owner)",
        ),
    ),
    "released_when_sent": Mutant(
        "The leases of a load are released when the load is sent to the ranks, not when it has ended.",
        one(
            LOADING,
            "plan_step",
            "jobs.append(load.job)",
            "jobs.append(load.job)\n        self._catalog.release(load.owner)",
        ),
    ),
    "leased_chunk_evicted": Mutant(
        "A leased chunk may be evicted, and its slot is reused at once.",
        (
            Patch(CATALOG, "lease", "self._batches.remove_all(idle)", "pass"),
            Patch(CATALOG, "_drop", "if chunk.held:", "if chunk.writers:"),
        ),
        by="every_read_is_right",
        shape="async-load",
    ),
    "written_chunk_evicted": Mutant(
        "A chunk that is being written may be evicted, and its slot is reused at once.",
        one(CATALOG, "_drop", "if chunk.held:", "if chunk.leases:"),
    ),
    "failed_load_of_a_request_that_is_over": Mutant(
        "A failed load fires an event at a request that has finished. This raises, so the step's other reports "
        "are lost.",
        (
            Patch(REQUESTS, "finish", "tracked.load_job_id = 0", "pass"),
            Patch(
                SCHEDULER,
                "invalidated",
                'self._alone("invalidated", self.jobs.fail_load, load)',
                "self.jobs.fail_load(load)",
            ),
            Patch(
                SCHEDULER_ROLE,
                "update_connector_output",
                "finally:",
                "except ZeroDivisionError:\n        pass\n    else:",
            ),
        ),
        test="tests/trials/test_lost_reports.py"
        "::test_reports_of_a_step_are_processed_when_a_request_with_a_failed_load_has_ended",
    ),
    "aborted_request_forgets_its_load": Mutant(
        "An aborted request's load is forgotten while its copies run.",
        one(
            REQUESTS,
            "finish",
            "if tracked.fire(m.FINISH).to.final:",
            "from kvpipe.cache.catalog import Owner\n"
            "                self._jobs.in_flight.pop(tracked.load_job_id, None)\n"
            "                self._jobs._catalog.release(Owner(request_id, tracked.epoch))\n"
            "                if tracked.fire(m.FINISH).to.final:",
        ),
    ),
    # ---- preemption --------------------------------------------------------------------------------------------------
    "block_ids_extended_on_resume": Mutant(
        "A resumed request's new blocks are appended to the list of its old blocks, which it no longer has.",
        one(
            SAVING,
            "_table",
            "return self.blocks.table(tracked.request.request_id, group)",
            "table = self.blocks.table(tracked.request.request_id, group)\n"
            "    held = self.__dict__.setdefault('tables', {}).setdefault((tracked, group), [])\n"
            "    held += table[len(held):]\n    return held",
        ),
    ),
    "saved_count_kept_across_preemption": Mutant(
        "A resumed request treats every chunk that it had saved as still saved, although some are evicted.",
        one(
            SAVE_PROGRESS,
            "admit",
            "self.saved_units = held_units",
            "self.saved_units = max(self.saved_units, held_units)",
        ),
        shape="async-scheduler-device-order",
    ),
    "saving_ends_with_a_preemption": Mutant(
        "A resumed request saves nothing more, as if it had to pass a test for `input_len == prompt_len`.",
        one(
            REQUESTS,
            "begin_admission",
            "tracked.saving.admit(held_units)",
            "tracked.saving.admit(held_units)\n        if tracked.preemptions:\n            tracked.saving.give_up()",
        ),
    ),
    "preemption_unnoticed": Mutant(
        "kvpipe does not notice that a request was preempted.",
        one(REQUESTS, "notice_preemption", "if now != tracked.preemptions:", "if False:"),
    ),
    "late_notice_believed": Mutant(
        "If the notice of a preemption comes after the request's next admission, it counts as a second preemption.",
        one(
            REQUESTS,
            "notice_preemption",
            "tracked.fire(m.PREEMPT_LATE)",
            "tracked.fire(m.PREEMPT)\n        tracked.saving.preempted()",
        ),
    ),
    "lookup_not_idempotent": Mutant(
        "The first lookup of a request promises a hit, and a repeated lookup promises none.",
        one(
            LOOKUPS,
            "_answer",
            "tracked.fire(m.ASK)\n",
            "tracked.fire(m.ASK)\n    asking = tracked.asking\n"
            "    if asking.state.row == 'ASKED' and asking.asked_step == step:\n        return MISS\n",
        ),
    ),
    "hit_seen_and_not_loaded": Mutant(
        "A resumed request is promised a hit, and no load is planned for it.",
        one(LOADING, "admit", "if external_tokens <= 0:", "if external_tokens <= 0 or tracked.preemptions:"),
    ),
    "id_of_an_aborted_request_reused": Mutant(
        "A new request gets the cursor of an earlier request with the same id.",
        (
            Patch(REQUESTS, "add", "if old.request is request:", "if True:"),
            Patch(REQUESTS, "finish", "del self.tracked[request_id]", "pass"),
        ),
    ),
    "epochs_start_anew": Mutant(
        "Epochs are counted per request, so a request with a reused id gets the epochs of the earlier request.",
        one(REQUESTS, "new_epoch", "return self._epochs", "return 1"),
    ),
}
