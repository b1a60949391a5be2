"""When what was saved can be found."""

from __future__ import annotations

from kvpipe.testing.mutants.base import CATALOG, PIPELINE, SCHEDULER, Mutant, Patch, one

MUTANTS: dict[str, Mutant] = {
    "published_before_the_last_layer": Mutant(
        "A save is reported when its step ends, before its last layer has landed.",
        (
            Patch(
                PIPELINE,
                "_told",
                "        batch.closed = True\n        whole",
                "        batch.closed = True\n"
                "        batch.ended += [Outcome(job, ok=True, why='') for job in batch.jobs]\n        whole",
            ),
            Patch(
                PIPELINE,
                "_report",
                "batch.closed and batch.settled",
                "batch.closed",
            ),
        ),
        by="every_read_is_right",
        shape="async-scheduler-device-order",
    ),
    "published_when_one_rank_has_landed": Mutant(
        "The first rank's report is enough.",
        one(SCHEDULER, "reported", "flight.ok + flight.bad >= self._ranks", "flight.ok + flight.bad"),
        shape="async-scheduler-hybrid",
        by="every_read_is_right",
    ),
    "one_good_rank_is_enough": Mutant(
        "A chunk is published that one rank has and another has failed.",
        one(SCHEDULER, "_land_save", "if not flight.bad and", "if flight.ok and"),
        shape="two-ranks",
        by="every_read_is_right",
    ),
    "published_with_a_hole": Mutant(
        "A piece is published though the piece before it was lost.",
        one(CATALOG, "landed", "chunk.ready == piece.start and", ""),
    ),
    "published_after_eviction": Mutant(
        "A piece that lands after its chunk was dropped can be found.",
        one(CATALOG, "landed", " and chunk.state.row != m.EVICTING", ""),
        shape="async-scheduler-drafts",
    ),
    "failed_copy_believed": Mutant(
        "A save whose copy has failed counts as landed.",
        one(
            PIPELINE,
            "_landed",
            "if job.id in ticket.failed:",
            "if job.id in ticket.failed and batch.kind is not Kind.SAVE:",
        ),
    ),
    "redelivery_counts": Mutant(
        "A completion that is delivered twice counts for two layers.",
        one("kvpipe.statemachine.save:LayerCursor", "landed", "if ahead == 1", "if ahead in (0, 1)"),
    ),
    "gap_tolerated": Mutant(
        "A completion beyond the next layer counts as the next.",
        one("kvpipe.statemachine.save:LayerCursor", "landed", "if ahead == 1", "if ahead >= 1"),
    ),
    "missing_layer_overlooked": Mutant(
        "A step end with missing layers counts as complete.",
        one(PIPELINE, "_told", "whole = batch.submitted == self._all", "whole = True"),
    ),
    "saves_beside_a_failed_load_believed": Mutant(
        "What is computed from a failed load is saved: neither the rank nor the scheduler's side drops it.",
        (
            Patch(PIPELINE, "_junk", "if self._save is not None:", "if False:"),
            Patch(SCHEDULER, "_distrust", "flight.distrusted = True", "pass"),
            Patch(SCHEDULER, "invalidated", "flight.distrusted = True", "pass"),
        ),
    ),
    "reset_does_not_stop_saves": Mutant(
        "Requests that live through a reset go on to be saved.",
        one(SCHEDULER, "_forget", "self._saving.give_up(tracked)", "pass"),
    ),
    "reset_spares_what_is_being_written": Mutant(
        "A reset drops what can be found, and not what is being written.",
        one(CATALOG, "reset", " | {id(c): c for c in self._reserved}", ""),
        shape="async-scheduler-drafts",
    ),
    "second_rank_overwrites_the_first": Mutant(
        "Ranks' reports of one step are not added up.",
        one(
            "kvpipe.connectors.vllm.metadata:ReportMetadata",
            "aggregate",
            "Tally(mine.ok + tally.ok, mine.bad + tally.bad)",
            "tally",
        ),
        shape="two-ranks",
    ),
    "old_marks_stay": Mutant(
        "A chunk that has grown can still be found by what it was, when that is no mark of it any more.",
        one(CATALOG, "_mark", "if old not in kept and", "if False and"),
    ),
}
