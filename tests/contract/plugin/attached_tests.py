"""vLLM's own tests that cannot pass with kvpipe attached, each with the reason.

`tests/contract/test_vllm_tests.py` compares this list with the tests that failed.
"""

from __future__ import annotations

_MOCK = "reads fields of the metadata of vLLM's mock connector"
_RESET = "wants a request in the step after a reset: it waits until the ranks have said which weights they have now"

AFTER_RESET = (
    "test_reset_prefix_cache_with_inflight_output_under_kv_pressure[3]",
    "test_reset_prefix_cache_priority_does_not_over_admit_worker_slot",
    "test_reset_prefix_cache_same_step_resume_purges_then_re_adds",
)
"""Tests that pass if a reset does not put the weights in doubt. Another test checks this.

After the doubt, KV can be saved.
"""

EXPECTED: dict[str, str] = {
    "test_reset_connector_cache_no_connector_is_no_op_success": "asserts that there is no connector",
    "test_prefix_cache_stats_counted_once_for_retried_then_scheduled_request": _MOCK,
    "test_ec_connector_unable_to_allocate[False]": _MOCK,
    "test_block_drafters_cap_requests_instead_of_draft_slots": "its drafter's configuration is a mock without settings,"
    " of which kvpipe's identity is made",
    "test_no_spec_decode_padding_up_to_max_model_len": "sets num_computed_tokens by hand: nobody has computed that KV",
    **dict.fromkeys(AFTER_RESET, _RESET),
    "test_streaming_lookahead_hashes_follow_recomputed_kv": "wants hashes of the token ahead: vLLM has none with"
    " any connector, kvpipe its own",
    "test_kv_cache_release_after_keep_pause_preserves_requests": "waits as those do; in 0.33 its executor is a mock,"
    " too, which has no answer when vLLM shakes hands with a connector once more",
    "test_cpu_encoder_input_updates_resume_and_abort": "wants an image encoded anew after a reset of vLLM's own cache:"
    " kvpipe still holds the KV of its tokens, and loads it",
}
"""Why these tests of vLLM must fail with kvpipe.

A key is the name of a test, or the name and `[arguments]` of one case.
"""

BY_MACHINE: dict[str, str] = {
    "test_async_scheduling_pp_allows_rescheduling_with_output_placeholders": "needs Triton, for vLLM's second runner",
}
"""Tests that fail on some machines, with and without kvpipe."""

BLASTS = frozenset({
    "standard-None-True", "preemption-1-True", "standard-5-True", "preemption-None-False", "standard-1-False",
    "preemption-5-False",
})  # fmt: skip
"""Half of the cases of vLLM's test with thousands of steps. These cases have every pair of argument values."""
