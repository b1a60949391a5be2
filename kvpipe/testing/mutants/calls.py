"""The pump that died, and who ends what: calls of a step, leases, preemption."""

from __future__ import annotations

from kvpipe.testing.mutants.base import CATALOG, PIPELINE, SAVING, SCHEDULER, WORKER, Mutant, Patch, one

MUTANTS: dict[str, Mutant] = {
    # ---- the pump that died ------------------------------------------------------------------------------------------
    "storers_not_cleared": Mutant(
        "The step's saves are still there when the next step begins.",
        one(PIPELINE, "end_step", "batch, self._save = self._save, None", "batch = self._save"),
    ),
    "step_never_withdrawn": Mutant(
        "A step that was never ended goes on in the next one.",
        one(PIPELINE, "begin", "self._withdraw()", "return"),
    ),
    "finalize_counted_by_calls": Mutant(
        "A save is final when a hook was called as often as there are layers.",
        (
            Patch(
                PIPELINE,
                "save_layer",
                "        return\n    self._submit",
                "        batch.submitted |= batch.submitted + 1 & self._all\n        return\n    self._submit",
            ),
            Patch(
                PIPELINE,
                "_told",
                "        whole = batch.submitted == self._all\n",
                "        whole = batch.submitted == self._all\n        if whole:\n"
                "            batch.ended += [Outcome(job, ok=True, why='') for job in batch.jobs]\n",
            ),
        ),
    ),
    "layer_counter_not_reset": Mutant(
        "Layers are numbered on from the last batch.",
        one(
            PIPELINE,
            "_submit",
            "batch.submitted.bit_count(), self._loop.put)\n",
            "self.__dict__.setdefault('number', 0), self._loop.put)\n    self.number += 1\n",
        ),
    ),
    "layer_by_count": Mutant(
        "The k-th call of a hook is taken for layer k, whatever its name.",
        (
            Patch(
                WORKER,
                "save_layer",
                "self._index.get(name)",
                "self.pipeline._save.submitted.bit_count() % len(self._index) if self.pipeline._save else None",
            ),
            Patch(WORKER, "save_layer", "self._unknown(name)", "pass"),
        ),
        by="every_read_is_right",
        shape="device-order",
    ),
    "freeze_one_step_short": Mutant(
        "Every second frozen step saves.",
        one(SCHEDULER, "_plan_saves", "or self.freeze", "or (self.freeze and self._step % 2)"),
    ),
    "freeze_ignored": Mutant(
        "A frozen engine saves.",
        one(SCHEDULER, "_plan_saves", " or self.freeze", ""),
    ),
    "bypass_saves": Mutant(
        "A bypassed engine saves.",
        one(SCHEDULER, "_plan_saves", " or self.bypass", ""),
    ),
    # ---- leases ------------------------------------------------------------------------------------------------------
    "leased_by_lookup": Mutant(
        "A lookup takes leases; a request that is not admitted never gives them back.",
        one(
            SCHEDULER,
            "lookup",
            "tracked.fire(m.LOOKUP_HIT)",
            "tracked.fire(m.LOOKUP_HIT)\n    self.catalog.lease(Owner(request.request_id, -1), [])",
        ),
    ),
    "released_only_for_requests_in_metadata": Mutant(
        "The leases of a load whose request has ended are kept.",
        one(
            SCHEDULER,
            "_land",
            "self.catalog.release(flight.owner)",
            "flight.job.request in self._tracked and self.catalog.release(flight.owner)",
        ),
    ),
    "released_when_sent": Mutant(
        "Leases end when the load is sent, not when it has ended.",
        one(
            SCHEDULER,
            "_plan_loads",
            "jobs = [flight.job for flight in due]",
            "jobs = [flight.job for flight in due]\n    [self.catalog.release(flight.owner) for flight in due]",
        ),
    ),
    "leased_chunk_evicted": Mutant(
        "A leased chunk may be evicted, and its slot is free at once.",
        (
            Patch(CATALOG, "lease", "self._policy.remove(chunk)", "pass"),
            Patch(CATALOG, "_drop", "if chunk.held:", "if chunk.writers:"),
        ),
        by="every_read_is_right",
        shape="async-load",
    ),
    "written_chunk_evicted": Mutant(
        "A chunk that is being written may be dropped, and its slot is free at once.",
        one(CATALOG, "_drop", "if chunk.held:", "if chunk.leases:"),
    ),
    "aborted_request_forgets_its_load": Mutant(
        "An aborted request's load is forgotten while its copies run.",
        (
            Patch(
                SCHEDULER,
                "_finish",
                "for f in self._loads_due if f.tracked is tracked",
                "for f in self._flights.values() if f.tracked is tracked and f.owner",
            ),
            Patch(
                SCHEDULER,
                "_finish",
                "self._loads_due.remove(flight)",
                "flight in self._loads_due and self._loads_due.remove(flight)",
            ),
        ),
    ),
    # ---- preemption --------------------------------------------------------------------------------------------------
    "block_ids_extended_on_resume": Mutant(
        "A resumed request's new blocks are put behind those that it has lost.",
        one(
            SAVING,
            "_table",
            "return table",
            "held = self.__dict__.setdefault('tables', {}).setdefault((tracked, group), [])\n"
            "    held += table[len(held):]\n    return held",
        ),
    ),
    "saved_count_kept_across_preemption": Mutant(
        "A resumed request counts as saved what it had saved before, evicted or not.",
        one(
            SCHEDULER,
            "_begin_admission",
            "tracked.saved = held_units",
            "tracked.saved = max(tracked.saved, held_units)",
        ),
        shape="async-scheduler-device-order",
    ),
    "saving_ends_with_a_preemption": Mutant(
        "A resumed request saves nothing any more, as with a test for `input_len == prompt_len`.",
        one(
            SCHEDULER,
            "_begin_admission",
            "tracked.next_at = tracked.retries = 0",
            "tracked.retries = 0\n    tracked.next_at = NEVER if tracked.preemptions else 0",
        ),
    ),
    "preemption_unnoticed": Mutant(
        "Nobody notices a preemption.",
        one(SCHEDULER, "_notice_preemption", "if now != tracked.preemptions:", "if False:"),
    ),
    "late_notice_believed": Mutant(
        "A preemption's notice that a new admission has overtaken counts as one more.",
        one(
            SCHEDULER,
            "_notice_preemption",
            "tracked.fire(m.PREEMPT_LATE)",
            "tracked.fire(m.PREEMPT)\n        tracked.next_at = NEVER",
        ),
    ),
    "lookup_not_idempotent": Mutant(
        "A request's hit is promised once; asked again it has none.",
        one(
            SCHEDULER,
            "lookup",
            "tracked.match = None\n",
            "if tracked.match and tracked.match.step == self._step:\n        return 0, False\n"
            "    tracked.match = None\n",
        ),
    ),
    "hit_seen_and_not_loaded": Mutant(
        "A resumed request is promised its hit, and nothing is loaded.",
        one(SCHEDULER, "admitted", "if external_tokens <= 0:", "if external_tokens <= 0 or tracked.preemptions:"),
    ),
    "id_of_an_aborted_request_reused": Mutant(
        "A request gets the cursor of the earlier one with its id.",
        (
            Patch(SCHEDULER, "on_new_request", "if old.request is request:", "if True:"),
            Patch(SCHEDULER, "_finish", "del self._tracked[tracked.request.request_id]", "pass"),
        ),
    ),
    "epochs_start_anew": Mutant(
        "Epochs count per request, so those of a reused id come again.",
        one(SCHEDULER, "_new_epoch", "return self._epochs", "return 1"),
    ),
}
