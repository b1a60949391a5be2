"""Bugs in which lookups find saved chunks at a wrong time."""

from __future__ import annotations

from kvpipe.connectors.vllm.trial.mutants.base import (
    CATALOG,
    COPIES,
    JOBS,
    PIPELINE,
    REPORTED,
    RESETS,
    Mutant,
    Patch,
    one,
)

MUTANTS: dict[str, Mutant] = {
    "published_before_the_last_layer": Mutant(
        "A save is reported when its step ends, before its last layer has landed.",
        (
            Patch(
                COPIES,
                "_news",
                "    for job in batch.jobs:\n        self.fire",
                "    if event == m.CONFIRM and batch.kind is Kind.SAVE:\n"
                "        batch.ended += [Outcome(job, ok=True, why='') for job in batch.jobs]\n"
                "    for job in batch.jobs:\n        self.fire",
            ),
            Patch(
                COPIES,
                "put_outcomes",
                "batch.closed and batch.settled",
                "batch.closed",
            ),
        ),
        by="every_read_is_right",
        shape="async-scheduler-device-order",
    ),
    "published_when_one_rank_has_landed": Mutant(
        "The first rank's report is enough.",
        one(JOBS, "reported", "job.count(reports, self._ranks)", "job.count(reports, 1)"),
        shape="two-ranks",
        by="findable_chunks_are_whole_and_true",
    ),
    "published_when_one_stage_has_landed": Mutant(
        "A pipeline's chunk is published when as many ranks have landed it as one stage has, not all stages.",
        one(JOBS, "__init__", "tracer, ranks", "tracer, ranks // 2"),
        shape="pipeline-2",
        by="findable_chunks_are_whole_and_true",
    ),
    "stages_with_pools_of_one_size": Mutant(
        "A slot is used that the smaller pool of a stage with more layers does not have.",
        one(CATALOG, "limit", "min(self.slots, slots)", "self.slots"),
        test="tests/vllm/test_stages.py::test_the_catalog_is_as_large_as_the_smallest_pool[use]",
    ),
    "one_good_rank_is_enough": Mutant(
        "A chunk is published though only one rank has it and another rank has failed it.",
        one(REPORTED, "count", "m.NOT_ALL if self.bad else m.ALL", "m.ALL if self.ok else m.NOT_ALL"),
        shape="two-ranks",
        by="every_read_is_right",
    ),
    "published_with_a_hole": Mutant(
        "A piece is published though the piece before it was lost.",
        one(CATALOG, "landed", "chunk.ready == piece.start and", ""),
    ),
    "published_after_eviction": Mutant(
        "A piece can be found although its chunk was dropped before the piece landed.",
        one(CATALOG, "landed", " and chunk.state.row != m.EVICTING", ""),
        shape="async-scheduler-drafts",
    ),
    "failed_copy_believed": Mutant(
        "A save whose copy has failed counts as landed.",
        one(
            COPIES,
            "_landed",
            "if job.id in ticket.failed:",
            "if job.id in ticket.failed and batch.kind is not Kind.SAVE:",
        )
        + one(COPIES, "_landed", "elif job.id in failed:", "elif job.id in failed and batch.kind is not Kind.SAVE:"),
    ),
    "redelivery_counts": Mutant(
        "A completion that is delivered twice counts for two layers.",
        one("kvpipe.statemachine.copy:LayerCursor", "landed", "if ahead == 1", "if ahead in (0, 1)"),
    ),
    "gap_tolerated": Mutant(
        "A completion beyond the next layer counts as the next.",
        one("kvpipe.statemachine.copy:LayerCursor", "landed", "if ahead == 1", "if ahead >= 1"),
    ),
    "missing_layer_overlooked": Mutant(
        "A step end with missing layers counts as complete.",
        one(PIPELINE, "_end", "missing = len(self._layers) - len(batch.tickets)", "missing = 0"),
    ),
    "saves_beside_a_failed_load_believed": Mutant(
        "KV that was computed from a failed load is saved, because neither the rank nor the scheduler side drops "
        "the save.",
        (
            Patch(PIPELINE, "_fail_step_saves", "if self._save.jobs:", "if False:"),
            Patch(JOBS, "taint_saves", "job.fire(m.TAINTED)", "pass"),
        ),
    ),
    "reset_does_not_stop_saves": Mutant(
        "Requests that were running before a reset are still saved after it.",
        one(RESETS, "_forget", "tracked.saving.give_up()", "pass"),
    ),
    "reset_spares_what_is_being_written": Mutant(
        "A reset drops the chunks that lookups can find, but not the chunks that are being written.",
        one(CATALOG, "reset", "chunk.state.row != m.EVICTING", "chunk.state.row not in {m.EVICTING, m.RESERVED}"),
        shape="async-scheduler-drafts",
    ),
    "second_rank_overwrites_the_first": Mutant(
        "The reports of a step's ranks replace each other instead of being added up.",
        one(
            "kvpipe.protocol.messages:Report",
            "add",
            "Tally(mine.ok + tally.ok, mine.bad + tally.bad)",
            "tally",
        ),
        shape="two-ranks",
    ),
    "old_marks_stay": Mutant(
        "A chunk that has grown can still be found under the key of a mark that it no longer has.",
        one(CATALOG, "_mark", "if old not in kept and", "if False and"),
    ),
}
