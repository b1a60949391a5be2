"""Bugs with other connectors beside kvpipe, with first reports of ranks, and with prompts that a producer stores."""

from __future__ import annotations

from kvpipe.connectors.vllm.trial.mutants.base import CONNECTOR, LOOKUPS, SCHEDULER, SCHEDULER_ROLE, Mutant, one

_BEHIND = "sibling-behind"
_STAGING = "kvpipe.scheduler.fetches:Staging"
_AWAITING = "tests/trials/test_awaiting.py::test_"
_FIRST = "tests/vllm/test_first_reports.py::test_"

MUTANTS: dict[str, Mutant] = {
    "handshake_taken": Mutant(
        "kvpipe's ranks answer vLLM's handshake, so another connector gets no answer from its own ranks.",
        one(
            CONNECTOR,
            "get_handshake_metadata",
            "self.worker_role.get_handshake_metadata()",
            "return self.worker_role._introduce()",
        ),
        test=f"{_FIRST}ranks_leave_the_handshake_to_other_connectors",
    ),
    "keys_of_another_connector_returned": Mutant(
        "A finished request returns a parameter under one of NIXL's keys, so vLLM's scheduler raises `Key clash`.",
        one(SCHEDULER_ROLE, "request_finished", "return False, None", "return False, {'do_remote_prefill': False}"),
        shape=_BEHIND,
        by="nothing_raises",
    ),
    "part_of_a_remote_prefill_promised": Mutant(
        "kvpipe promises the part of a prompt that memory holds, so another connector's remote prefill is lost.",
        one(LOOKUPS, "_held", "if elsewhere and beyond > 0", "if False and beyond > 0"),
        shape=_BEHIND,
        by="a_lookup_promises_all_that_is_held",
    ),
    "remote_prefill_never_spared": Mutant(
        "Another connector transfers a prompt that kvpipe already has in memory.",
        one(LOOKUPS, "_held", " > self._unit:", " > -1:"),
        shape=_BEHIND,
        by="a_lookup_promises_all_that_is_held",
    ),
    "remote_prefill_put_off": Mutant(
        "A prompt that another connector would bring waits for kvpipe until the prefill engine's lease has run out.",
        one(LOOKUPS, "answer", "if answer is LATER and elsewhere:", "if False:"),
        shape=_BEHIND,
        by="a_lookup_promises_all_that_is_held",
    ),
    "ranks_not_waited_for": Mutant(
        "The first prompt of an engine is looked up before the ranks have reported what their bytes depend on.",
        one("kvpipe.scheduler.weights:Weights", "doubtful", "self.awaited or", ""),
        test=f"{_FIRST}first_prompt_hits_a_tier",
    ),
    "first_step_left_to_the_first_request": Mutant(
        "An idle engine makes no step before its ranks have reported, so the first request waits for the reports.",
        one(SCHEDULER, "pending", "if self.weights.awaited and", "if False and"),
        test=f"{_FIRST}idle_engine_steps_until_its_ranks_have_reported",
    ),
    "ranks_waited_for_for_ever": Mutant(
        "If ranks never report, every lookup is postponed, and an idle engine makes steps without end.",
        one(LOOKUPS, "_unknown", "if not self._weights.awaited or step < FIRST_STEPS_MAX:", "if True:"),
        test=f"{_FIRST}lookups_miss_when_ranks_never_report",
    ),
    "reports_of_one_rank_enough": Mutant(
        "Tiers are used as soon as one rank has reported.",
        one(
            "kvpipe.connectors.vllm.identity.spaces:Spaces",
            "agree",
            "== self._config.parallel_config.world_size",
            ">= 1",
        ),
        test="tests/trials/test_fetches.py::test_tiers_on_some_ranks_only",
    ),
    "consumer_computes_at_once": Mutant(
        "A decode engine computes chunks that the prefill engine is still storing.",
        one(_STAGING, "_awaits", "if units >= stop or", "if True or"),
        test=f"{_AWAITING}consumer_waits_for_chunks_of_the_producer",
    ),
    "consumer_waits_for_ever": Mutant(
        "A decode engine waits without a limit for chunks that no engine stores.",
        one(_STAGING, "_awaits", "or now_s - stage.begun_at_s >= wait_s_max", ""),
        test=f"{_AWAITING}consumer_computes_when_nothing_is_stored_in_time",
    ),
    "new_prompts_wait_for_a_producer": Mutant(
        "An engine that computes prompts itself waits for a producer to store them.",
        one(_STAGING, "_awaits", "not self._consumes or", ""),
        test=f"{_AWAITING}engine_that_stores_waits_for_no_producer",
    ),
}
