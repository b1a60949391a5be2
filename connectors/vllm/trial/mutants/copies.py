"""Bugs in copies on a device: too early, too many at once, by a slow mover, or after a fatal error."""

from __future__ import annotations

from kvpipe.connectors.vllm.trial.mutants.base import COPIES, PIPELINE, Mutant, one

_ENGINE, _TABLES = "kvpipe.transfer.cuda:CudaEngine", "kvpipe.transfer.tables:RowTables"
_CUDA, _WAVES = "tests/transfer/test_cuda.py", "tests/transfer/test_waves.py"

MUTANTS: dict[str, Mutant] = {
    "every_async_load_is_under_way": Mutant(
        "Loads that no forward waits for fill the bus, so a load that a forward waits for is late.",
        one(_ENGINE, "_go_on", "if ahead >= WAVES_AHEAD:", "if ahead >= len(self._layout.views) * WAVES_AHEAD:"),
        test=f"{_WAVES}::test_loads_with_readers_are_queued_before_loads_without",
    ),
    "async_loads_are_forgotten": Mutant(
        "A load that no forward waits for stops after its first waves have landed.",
        one(_ENGINE, "_look", "self._go_on()", "pass"),
        test=f"{_WAVES}::test_a_load_without_readers_is_queued_two_waves_ahead_of_the_bus",
    ),
    "a_save_waits_for_later_compute": Mutant(
        "A save that the completion thread queues waits for compute that was enqueued after the save was submitted.",
        one(_ENGINE, "_launch", "computed[1] if computed is not None", "None if computed is not None"),
        test=f"{_WAVES}::test_a_save_waits_for_the_compute_before_its_submission_only",
    ),
    "a_wave_beyond_its_event": Mutant(
        "A wave includes a layer that was submitted after the event for which the wave waits.",
        one("kvpipe.transfer.waves:PlanQueue", "take", "if self.computed is None else self.computed[0]", ""),
        test=f"{_WAVES}::test_a_wave_ends_with_the_last_layer_that_its_event_covers",
    ),
    "a_fence_before_its_save": Mutant(
        "The fence does not wait for a save that the completion thread has not queued yet.",
        one(_ENGINE, "fence", "self._reach(ticket)", "ticket.mark if isinstance(ticket.mark, OrderingPoint) else None"),
        test=f"{_WAVES}::test_fence_queues_a_save_before_the_completion_thread_does",
    ),
    "landings_at_once_may_have_a_gap": Mutant(
        "A cursor that takes several landings at once ignores a gap among them.",
        one(COPIES, "_path", "edge.moves and edge.event == m.LANDED_NEXT", "edge.moves"),
        test="tests/worker/test_copy_failures.py::test_completions_out_of_order_fail_the_job",
    ),
    "a_step_that_is_over_is_not_reported": Mutant(
        "A step whose copies have ended does not report the outcomes of its jobs.",
        one(PIPELINE, "_report_if_over", "if last.over or batch.stuck:", "if False:"),
        test="tests/worker/test_unhooked_steps.py::test_step_end_waits_for_the_loop_thread_only_when_the_steps_copies_are_complete",
    ),
    "a_table_in_use_is_overwritten": Mutant(
        "A later plan overwrites the table of rows that a kernel still reads, so the kernel copies wrong pages.",
        one(_TABLES, "upload", "self._lent[0].table() is None", "len(self._lent) > 1"),
        test="tests/transfer/test_tables.py::test_table_in_use_keeps_its_bytes",
    ),
    "slots_that_are_not_pinned": Mutant(
        "Slots that could not be pinned are used, and every copy with such a slot blocks the forward.",
        one("kvpipe.transfer.ready:Readier", "_make_ready", "self._claim(pool.base + at, size)",
            "self._claim(pool.base + at, size) or True"),
        test=f"{_CUDA}::test_slots_that_cannot_be_pinned_are_not_used",
    ),
    "the_watchdog_asks_the_device": Mutant(
        "The watchdog thread queries an event while a CUDA graph is captured, which invalidates the graph.",
        one(_ENGINE, "abandon", "return ticket.over",
            "return ticket.over or (isinstance(ticket.mark, OrderingPoint) and ticket.mark.landed.query())"),
        test=f"{_CUDA}::test_abandon_does_not_query_the_device",
    ),
    "a_dead_context_is_asked_again": Mutant(
        "After a sticky CUDA error every wave is tried again, and each failure is logged with a traceback.",
        one(_ENGINE, "_trouble", "self._lost = True", "pass"),
        test=f"{_CUDA}::test_a_dead_context_is_reported_once",
    ),
    "pinning_goes_on_at_the_end": Mutant(
        "A process ends, or a pool is freed, while the driver is still pinning memory.",
        one("kvpipe.transfer.pinning:Pins", "end", "self._ended = True", "pass"),
        test=f"{_CUDA}::test_nothing_is_pinned_after_the_end",
    ),
    "saves_by_when_they_land": Mutant(
        "A save uses the mover that lands first, though compute waits only until the save's blocks are read.",
        one("kvpipe.transfer.calibrate", "choose", "ways[mover].read.of(*counts[mover])", "landed[mover]"),
        test="tests/transfer/test_calibrate.py::test_save_uses_the_mover_that_first_reads_its_blocks",
    ),
}  # fmt: skip
