"""Bugs in the marks of shared slots, which show that a slot has the bytes of its chunk."""

from __future__ import annotations

from kvpipe.connectors.vllm.trial.mutants.base import COPIES, SCHEDULER, Mutant, one

_MARKS = "kvpipe.transfer.marks:SlotMarks"
_CHECKS = "kvpipe.worker.checks:SlotChecks"
_CARRIER = "kvpipe.tiers.carrier:Carrier"
_WRITER = "kvpipe.tiers.slot_writer:SlotWriter"
_TESTS = "tests/node/test_damaged_slots.py"
_TIERS = "tests/tiers/test_shared_slots.py"
_MISS = f"{_TESTS}::test_damaged_slot_is_a_miss_for_every_engine"

MUTANTS: dict[str, Mutant] = {
    "generation_of_a_slot_not_compared": Mutant(
        "A load does not compare the generation, so it reads the bytes of another chunk.",
        one(_MARKS, "other_chunk", "!= generations", "!= self._generations[slots]"),
        test=f"{_MISS}[False-4104-cpu]",
    ),
    "generation_compared_before_the_copies_alone": Mutant(
        "A load does not notice a process that writes the slot during the load.",
        one(_CHECKS, "failed", "if self._marks.other_chunk(batch.stamps):", "if False:"),
        test=f"{_TESTS}::test_slot_that_another_process_overwrites_during_a_load_is_a_miss",
    ),
    "mark_stays_while_a_slot_is_written": Mutant(
        "A save leaves the mark of the slot's last chunk until the save has landed.",
        one(_CHECKS, "begin", "self._marks.clear(batch.stamps)", "pass"),
        test=f"{_TESTS}::test_mark_is_cleared_before_the_first_copy_of_a_save",
    ),
    "digest_of_a_slot_not_compared": Mutant(
        "A load computes the digest of a slot, and does not compare it.",
        one(_MARKS, "_is_damaged", "written != self._digest(slot)", "self._digest(slot) < 0"),
        test=f"{_MISS}[True-5-cpu]",
    ),
    "load_lands_before_its_digest": Mutant(
        "A load is reported before its digests are compared.",
        one(_CHECKS, "holds", "    batch.held = ticket\n    return True", "    return False"),
        test=f"{_TESTS}::test_load_that_lands_before_its_digests_waits_for_them",
    ),
    "digests_of_steps_last": Mutant(
        "A step waits for the digests of all saves before its loads are compared.",
        one(_CHECKS, "_next", "queue = self._urgent or self._others", "queue = self._others or self._urgent"),
        test="tests/worker/test_checks.py::test_slots_of_sync_loads_are_read_before_other_slots",
    ),
    "save_reported_before_its_digest": Mutant(
        "A save is reported, and its chunk published, before the chunk's digest is written.",
        one(COPIES, "put_outcomes", "self._checks.is_marked(batch)", "self._checks.is_marked(batch) or True"),
        test=f"{_TESTS}::test_save_is_reported_after_its_digest_is_written",
    ),
    "damaged_blocks_not_scrubbed": Mutant(
        "A load from a damaged slot leaves the slot's bytes in the paged blocks, perhaps a NaN.",
        one(COPIES, "_scrub_blocks", "self._scrub(batch.plan, jobs)", "pass"),
        test=f"{_TESTS}::test_blocks_of_a_load_from_a_damaged_slot_have_no_nan[False]",
    ),
    "damaged_chunk_stays": Mutant(
        "A damaged chunk is not evicted, so each load of it fails.",
        one(SCHEDULER, "_forget_damaged", "chunk.generation == generation", "chunk.generation != generation"),
        test=f"{_MISS}[False-4104-cpu]",
    ),
    "fetched_chunk_without_a_mark": Mutant(
        "A fetch from a tier leaves the slot without a mark, so no load reads the chunk.",
        one(_CARRIER, "_check", "self._bodies.write_mark(order)", "pass"),
        test=f"{_TIERS}::test_fetched_chunk_has_a_mark",
    ),
    "damaged_chunk_stored": Mutant(
        "A tier gets a damaged chunk, with a valid checksum.",
        one(_CARRIER, "_store", "if why := await", "if False and await"),
        test=f"{_TIERS}::test_damaged_chunk_is_not_stored",
    ),
    "slot_compared_before_a_store_alone": Mutant(
        "A tier gets a slot that another process overwrites while the slot is sealed.",
        one(_WRITER, "write", "work)\n    if order is not None", "work)\n    if False"),
        test=f"{_TIERS}::test_slot_that_changes_while_it_is_sealed_is_not_stored",
    ),
    "slot_not_compared_after_a_store": Mutant(
        "A tier keeps the value of a slot that another process has overwritten while the tier read the slot.",
        one(_WRITER, "write", "if stored:", "if False:"),
        test=f"{_TIERS}::test_slot_that_changes_while_a_tier_writes_it_is_deleted_from_the_tier[False]",
    ),
}
