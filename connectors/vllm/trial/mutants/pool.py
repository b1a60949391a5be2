"""What is used before its memory is there, or takes memory that is not."""

from __future__ import annotations

from kvpipe.connectors.vllm.trial.mutants.base import SCHEDULER, Mutant, one

_READIER, _READY = "kvpipe.transfer.ready:Readier", "tests/transfer/test_ready.py"

MUTANTS: dict[str, Mutant] = {
    "slots_that_one_rank_has_ready": Mutant(
        "Slots are used as soon as one rank has them in memory.",
        one(SCHEDULER, "slots_ready", "min(self._ready.values())", "max(self._ready.values())"),
        test="tests/scheduler/test_side.py::test_slots_are_used_when_every_rank_has_them_ready",
    ),
    "ready_but_not_in_memory": Mutant(
        "Slots count as ready before their pages are touched.",
        one(_READIER, "_next", "self._has_room(high - low) and self._touch(low, high)", "self._has_room(high - low)"),
        test=f"{_READY}::test_all_of_the_pool_comes_into_memory",
    ),
    "a_pool_larger_than_memory": Mutant(
        "The pool is brought into memory that is not there.",
        one(_READIER, "_has_room", "return not is_short", "return True"),
        test=f"{_READY}::test_a_pool_that_does_not_fit_stops_growing",
    ),
    "touched_while_in_use": Mutant(
        "Pages are touched once their slots are ready, and what was saved there is lost.",
        one(_READIER, "_next", "self._is_short, self._at = False, stop",
            "self._is_short, self._at = False, stop\n    self._touch(0, high)"),
        test=f"{_READY}::test_a_slot_is_not_touched_once_it_is_ready",
    ),
    "touched_after_it_was_handed_out": Mutant(
        "The thread does not learn which slots were handed out on demand, and touches them.",
        one(_READIER, "use", "with self._lock:\n        self.used = stop", "pass"),
        test=f"{_READY}::test_slots_are_used_before_they_are_in_memory_where_nothing_is_pinned",
    ),
    "ready_slots_are_taken_back": Mutant(
        "Two threads count the slots that are ready, and one overwrites what the other has counted.",
        one(_READIER, "_offer", "with self._lock:", "if True:"),
        test=f"{_READY}::test_slots_are_counted_under_a_lock",
    ),
    "handed_out_without_memory": Mutant(
        "Slots are used on demand, however little memory is left.",
        one(_READIER, "_offer", "min(max(0, room.spare), demand)", "demand"),
        test=f"{_READY}::test_no_more_slots_are_used_on_demand_than_there_is_memory_for",
    ),
    "evicts_before_the_pool_is_in_memory": Mutant(
        "A pool with room evicts chunks when its memory is not there yet.",
        one("kvpipe.worker.side:WorkerSide", "_make_readier", 'if device == "cpu" else 0', 'if device == "no" else 0'),
        test="tests/engine/test_pool.py::"
        "test_nothing_is_evicted_from_a_pool_with_room_when_saves_are_faster_than_it_becomes_ready",
    ),
}  # fmt: skip
