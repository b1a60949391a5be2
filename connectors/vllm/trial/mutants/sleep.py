"""Bugs of sleep mode: a copy, a digest or an adapter ignores that memory was unmapped or mapped again."""

from __future__ import annotations

from kvpipe.connectors.vllm.trial.mutants.base import COPIES, Mutant, one

_SLEEP, _ENGINE = "kvpipe.connectors.vllm.identity.sleep", "tests/vllm/test_sleep.py"
_RANK = "tests/worker/test_sleep.py"
_ORDER = f"{_ENGINE}::test_ranks_release_before_memory_is_freed_and_return_when_it_is_restored"

MUTANTS: dict[str, Mutant] = {
    "weights_are_read_asleep": Mutant(
        "A rank is asked for the digest of its weights while their memory is unmapped.",
        one("kvpipe.scheduler.weights:Weights", "next_question", "self.asleep or ", ""),
        test=_ORDER,
    ),
    "every_reset_keeps": Mutant(
        "A pause that clears caches keeps kvpipe's chunks, as a sleep does.",
        one(f"{_SLEEP}:Sleep", "reset", "begins and self._falls > 0", "begins"),
        test=f"{_ENGINE}::test_only_the_reset_of_a_sleep_keeps_chunks",
    ),
    "a_second_sleep_is_forgotten": Mutant(
        "If vLLM resets twice for one sleep, only the first reset keeps the pool and the tiers.",
        one(f"{_SLEEP}:Sleep", "reset", "max(0, self._falls - 1)", "0"),
        test=f"{_ENGINE}::test_a_sleep_that_is_asked_for_twice_keeps_chunks",
    ),
    "copies_outlive_their_blocks": Mutant(
        "The memory of a rank's caches is unmapped while copies read it.",
        one(COPIES, "drain", "fence(last, left_s) and last.wait(max(0.0, until_s - time.monotonic()))",
            "last is not None"),
        test=f"{_RANK}::test_release_waits_for_copies_that_are_under_way",
    ),
    "old_addresses_are_copied": Mutant(
        "After a sleep, a kernel copies to the addresses that the caches had before the sleep.",
        one("kvpipe.transfer.movers:DirectionQueues", "move", "self.layout, self.places = layout, None",
            "self.layout = layout"),
        test=f"{_RANK}::test_a_device_copies_from_and_to_caches_that_have_moved",
    ),
    "adapters_outlive_their_bytes": Mutant(
        "KV that was computed with the bytes of a discarded adapter is kept under the adapter's name.",
        one(_SLEEP, "_release", "if discards else ()", "if False else ()"),
        test=_ORDER,
    ),
}  # fmt: skip
