"""Bugs that forget one half of something: a field to reset, a side of a ratio, one of several facts or limits."""

from __future__ import annotations

from kvpipe.connectors.vllm.trial.mutants.base import RESETS, STAGING, STORING, Mutant, one

_STAGED, _RATES, _FACTS = "tests/scheduler/test_staging.py", "tests/worker/test_load_rate.py", "tests/vllm"
_RATE = "kvpipe.worker.copies:LoadRate"

MUTANTS: dict[str, Mutant] = {
    "deadline_of_another_pin": Mutant(
        "A pin with the earliest deadline lasts until the next later deadline of another pin.",
        one("kvpipe.features.pins:PromptPins", "pin", "self._first_s = 0.0", "pass"),
        test="tests/scheduler/test_orders.py::test_a_pin_ends_at_its_own_deadline_when_an_earlier_pin_lasts_longer",
    ),
    "second_namespace_of_old_weights": Mutant(
        "After a change of the weights, chunks of the old weights are found in the second namespace.",
        one(
            RESETS,
            "name_space",
            "self._staging.space.second = own",
            "self._staging.space.second = self._staging.space.second or own",
        ),
        test=f"{_STAGED}::test_both_namespaces_follow_the_weights",
    ),
    "late_end_is_not_stored": Mutant(
        "The last chunk of a request is stored in no tier if it lands after the request's end.",
        one(STORING, "landed", " or tracked.state.row == FINISHED", ""),
        test=f"{_STAGED}::test_last_chunk_of_a_request_is_stored_when_its_save_lands",
    ),
    "failed_store_rests_all_tiers": Mutant(
        "After a store has failed in one tier, nothing is stored in any other tier for a while.",
        one(
            STORING,
            "over",
            "queue.rests = self._context.steps.planned + REST_STEPS",
            "[setattr(one, 'rests', self._context.steps.planned + REST_STEPS) for one in self._queues]",
        ),
        test=f"{_STAGED}::test_tier_gets_its_stores_when_a_store_in_another_tier_fails",
    ),
    "failed_store_drops_all_offers": Mutant(
        "After a store has failed in one tier, the offers to all other tiers are dropped.",
        one(STORING, "over", "[*chain(queue.first, queue.others)]", "[*self._offers]"),
        test=f"{_STAGED}::test_tier_gets_its_stores_when_a_store_in_another_tier_fails",
    ),
    "hanging_tier_takes_all_stores": Mutant(
        "A tier that hangs uses up the limit of stores in flight, so nothing is stored in other tiers.",
        one(STORING, "_next", "len(queue.under_way) >= self._max", "len(self.owners) >= self._max * self._written"),
        test=f"{_STAGED}::test_tier_gets_all_its_stores_when_another_tier_hangs",
    ),
    "finished_requests_wait_their_turn": Mutant(
        "A prefill engine stores the chunks of finished requests last, so a decode engine waits for them.",
        one(STORING, "_put_first", "queue.put(place, first=True)", "pass"),
        test=f"{_STAGED}::test_producer_stores_chunks_of_finished_requests_first",
    ),
    "prefetches_take_all_lanes": Mutant(
        "Prefetches take all lanes of a tier, so requests wait for them.",
        one(STAGING, "_order", "max(1, lanes // ORDERS_PER_LANE) if stage.ahead else lanes", "lanes"),
        test=f"{_STAGED}::test_prefetches_leave_lanes_of_a_tier_to_requests",
    ),
    "rate_of_half_the_bytes": Mutant(
        "The rate of loads halves its sum of bytes but not its sum of seconds, and is too low from then on.",
        one(_RATE, "landed", "self._of_late[1] // 2", "self._of_late[1]"),
        test=f"{_RATES}::test_rate_of_an_even_bus_stays_when_its_sums_are_halved",
    ),
    "rate_of_all_time": Mutant(
        "The rate of loads is the mean since the start, so it does not follow a change.",
        one(_RATE, "landed", "> RATE_BYTES", "> RATE_BYTES << 20"),
        test=f"{_RATES}::test_rate_follows_a_bus_that_becomes_faster",
    ),
    "useless_announcements_are_not_halved": Mutant(
        "The count of useful announcements is halved over time, but the count of useless announcements is not.",
        one(
            "kvpipe.cache.ahead:AccountAhead",
            "room",
            "self._used / 2, self._wasted / 2",
            "self._used / 2, self._wasted",
        ),
        test="tests/cache/test_ahead.py::test_share_of_useful_chunks_stays_when_counts_are_halved",
    ),
    "full_tier_is_not_read": Mutant(
        "A full tier that recovers from a failure is not read until it has room.",
        one("kvpipe.tiers.guard:GuardedTier", "_probe", "why and (breaker.use == WRITE or not full)", "why"),
        test="tests/tiers/test_full_tier.py::test_full_tier_is_read_again_when_it_was_down_before",
    ),
    "drafters_quantization_is_no_fact": Mutant(
        "KV of a drafter is found by an engine whose drafter has another quantization.",
        one("kvpipe.connectors.vllm.identity.drafters", "facts", '"quantization": str(model.quantization),', ""),
        test=f"{_FACTS}/test_drafters.py::test_facts_of_two_drafters_differ_when_one_field_differs",
    ),
    "adapter_replaced_while_it_is_read": Mutant(
        "An adapter has the digest of its old files, though vLLM may have read the new files.",
        one("kvpipe.connectors.vllm.held_adapters", "_load", " and before == held.read(folder)", ""),
        test=f"{_FACTS}/test_held_adapters.py::test_loaded_adapter_is_unique_when_it_is_replaced_while_vllm_reads_it",
    ),
}
