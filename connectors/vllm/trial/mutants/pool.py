"""Bugs in which slots are used before their memory is allocated, or take memory that does not exist."""

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
        one(_READIER, "_make_ready", "all(self._touch(at, at + size) for at, size in parts)", "True"),
        test=f"{_READY}::test_slots_become_ready_in_order",
    ),
    "a_pool_larger_than_memory": Mutant(
        "The pool is brought into memory although there is not enough memory for it.",
        one(_READIER, "_has_room", "return not is_short", "return True"),
        test=f"{_READY}::test_a_pool_that_does_not_fit_stops_growing",
    ),
    "touched_while_in_use": Mutant(
        "Pages are touched after their slots count as ready, which overwrites chunks that were saved there.",
        one(_READIER, "_make_ready", "self._is_short, self._at = False, stop",
            "self._is_short, self._at = False, stop\n    self._touch(0, stop * pool.slot_bytes)"),
        test=f"{_READY}::test_a_slot_is_not_touched_once_it_is_ready",
    ),
    "touched_after_it_was_handed_out": Mutant(
        "The thread that touches pages also touches slots that were handed out on demand.",
        one(_READIER, "use", "with self._lock:\n        self.used = stop", "pass"),
        test=f"{_READY}::test_slots_are_used_before_they_are_in_memory_where_nothing_is_pinned",
    ),
    "ready_slots_are_taken_back": Mutant(
        "Two threads count the ready slots, and one thread overwrites the count of the other.",
        one(_READIER, "_offer", "with self._lock:", "if True:"),
        test=f"{_READY}::test_slots_are_counted_under_a_lock",
    ),
    "handed_out_without_memory": Mutant(
        "Slots are used on demand, however little memory is left.",
        one(_READIER, "_offer", "min(max(0, room.spare), demand)", "demand"),
        test=f"{_READY}::test_slots_used_on_demand_are_bounded_by_the_free_memory",
    ),
    "registers_slots_without_memory": Mutant(
        "A rank registers slots of a node's memory that have no memory yet, so the memory is taken as the rank's.",
        one("kvpipe.transfer.pool:HostPool", "with_memory", "min(self._with_memory(), self.slots)", "self.slots"),
        test="tests/node/test_memory_of_slots.py::test_rank_registers_its_part_of_slots_that_have_memory",
    ),
    "evicts_before_the_pool_is_in_memory": Mutant(
        "A pool that has free slots evicts chunks while its memory is still being prepared.",
        one("kvpipe.worker.side:WorkerSide", "_make_readier", 'if device == "cpu" else 0', 'if device == "no" else 0'),
        test="tests/engine/test_pool.py::"
        "test_no_chunk_is_evicted_while_the_pool_becomes_ready",
    ),
}  # fmt: skip
