"""Bugs that use stored bytes of another computation: weights change, or a reset does not last."""

from __future__ import annotations

from kvpipe.connectors.vllm.trial.mutants.base import LOOKUPS, REMEDIES, REQUESTS, RESETS, Mutant, one

_DIGEST, _WEIGHTS, _MODEL = (
    "kvpipe.connectors.vllm.identity.digest",
    "kvpipe.connectors.vllm.identity.weights",
    "kvpipe.connectors.vllm.identity.model",
)
_STALE = "kvpipe.connectors.vllm.remedies.stale:Stale"
_UNIT, _OLD = "tests/vllm/test_weights.py", "tests/vllm/test_old_weights.py"
_TRIAL = "property_tests/test_weights.py"
_COMPUTED, _NUMERICS = "kvpipe.connectors.vllm.identity.computed", "tests/vllm/test_numerics.py"
_LIBRARIES = "kvpipe.connectors.vllm.identity.numerics"

MUTANTS: dict[str, Mutant] = {
    "weights_are_sampled": Mutant(
        "The digest of a large tensor covers only the first part of the tensor.",
        one(_DIGEST, "tensor_digest", "digest.update(data)", "digest.update(data)\n        break"),
        test="tests/unit/test_digest.py::test_every_bit_counts[tensor_digest]",
    ),
    "places_do_not_count": Mutant(
        "A device's digest does not change when two rows of a weight are exchanged.",
        one(_DIGEST, "add_words", "_mixed(words ^ (places * _signed(seed)))", "_mixed(words)"),
        test="tests/unit/test_digest.py::test_positions_of_values_count[device_digest]",
    ),
    "packed_weights_do_not_count": Mutant(
        "Weights are not digested before vLLM repacks them.",
        one(_MODEL, "_named", "if module in _PACKED:", "if False:"),
        test=f"{_UNIT}::test_weights_that_are_packed_away",
    ),
    "a_reset_is_undone": Mutant(
        "After a reset, old chunks are found again as soon as the weights are known.",
        one("kvpipe.tiers.namespace:Namespace", "name", "not self.base or not self._own", "True"),
        test="tests/trials/test_fetches.py::test_a_reset_before_the_weights_are_known",
    ),
    "callables_are_harmless": Mutant(
        "A function that is sent to the workers is assumed not to change the weights.",
        one(
            _WEIGHTS,
            "_notice",
            "method not in HARMLESS",
            'method not in HARMLESS and method != "callable"',
        ),
        test=f"{_UNIT}::test_calls_of_the_executor",
    ),
    "answers_are_overtaken": Mutant(
        "A change of the weights that is undone within a few steps is not noticed.",
        one(
            "kvpipe.scheduler.weights:Weights",
            "answered",
            "changed = not digest or digest != before",
            "changed = not digest",
        ),
        test=f"{_UNIT}::test_weights_are_in_doubt_until_every_rank_has_answered",
    ),
    "doubt_is_served": Mutant(
        "Hits are served while it is unknown whether the weights have changed.",
        one(LOOKUPS, "_unknown", "self._weights.doubtful and", "False and"),
        test=f"{_TRIAL}::test_invariants_hold_when_weights_change",
    ),
    "a_change_is_not_forgotten": Mutant(
        "Chunks in memory are still found after the weights have changed.",
        one(RESETS, "weights_changed", "self._forget()", "pass"),
        test=f"{_TRIAL}::test_invariants_hold_when_weights_change[two-ranks]",
    ),
    "old_kv_is_handed_on": Mutant(
        "A request that shares blocks with a request of the old weights saves them under the name of the new weights.",
        one(_STALE, "rests_on", "self.requests[request] = {}\n    return True", "return False"),
        test=f"{_OLD}::test_requests_with_old_kv_are_stale_until_their_kv_is_computed_again",
    ),
    "a_later_input_is_believed": Mutant(
        "An image in a later input of a session is treated as encoded with the present weights.",
        one(REQUESTS, "go_on", "if self._recovery.continued(tracked.request.request_id):", "if False:"),
        test=f"{_OLD}::test_an_image_in_a_later_input_of_a_session",
    ),
    "an_adapters_name_is_believed": Mutant(
        "An encoded image counts for the adapter that has the name now, not for the adapter that it was encoded with.",
        one(REMEDIES, "continued", "self.encoded.unknown(request_id)", "False"),
        test=f"{_OLD}::test_embeddings_of_an_adapters_encoder",
    ),
    "what_an_old_prompt_ends_in_is_offered": Mutant(
        "vLLM's cache keeps the block in which a prompt ends, although its KV was computed with old weights.",
        one(_STALE, "plan_step", "done[group]), done[group], ends_in}", "done[group])}"),
        test=f"{_OLD}::test_vllm_keeps_no_block_of_stale_requests[states-exported-3]",
    ),
    "the_end_of_an_old_answer_is_offered": Mutant(
        "When a request with KV of old weights ends, vLLM's cache keeps the blocks that it caches at that time.",
        one(
            _STALE,
            "leave",
            "if self.requests.pop(request, None) is not None and",
            "self.requests.pop(request, None)\n    if False and",
        ),
        test=f"{_OLD}::test_vllm_keeps_no_block_of_stale_requests[async-scheduler-states-exported-3]",
    ),
    "a_copy_of_old_kv_is_handed_on": Mutant(
        "A request with a copy of a block of the old weights saves the KV that it computes from that copy.",
        one(_STALE, "rests_on", "if copy in mine}", "if False}"),
        test=f"{_OLD}::test_last_block_of_a_stale_prompt_is_evicted",
    ),
    "libraries_do_not_count": Mutant(
        "Variables that set the precision of libraries are not part of the key.",
        one(_LIBRARIES, "variables", "if value and", "if False and"),
        test=f"{_NUMERICS}::test_variables_of_libraries_count",
    ),
    "results_do_not_count": Mutant(
        "The results that ranks measure are not part of the key.",
        one(
            "kvpipe.connectors.vllm.identity.spaces:Spaces",
            "agree",
            "how[0] if len({*how}) == 1 else how",
            '""',
        ),
        test=f"{_NUMERICS}::test_ranks_with_equal_results_share_a_namespace",
    ),
    "ranks_that_differ_share_with_all": Mutant(
        "Ranks of one engine that compute differently share chunks with engines of any number of ranks.",
        one(
            "kvpipe.connectors.vllm.identity.spaces:Spaces",
            "agree",
            "(one.common, one.numerics) for",
            "(one.common, '') for",
        ),
        test=f"{_NUMERICS}::test_ranks_that_differ_share_with_their_own_layout_only",
    ),
    "additional_config_does_not_count": Mutant(
        "The option `additional_config` is not part of the key.",
        one(_COMPUTED, "_usual", "return type(value)", "return field.name == 'additional_config' or type(value)"),
        test=f"{_NUMERICS}::test_a_field_counts_when_it_changes_what_is_computed[additional_config]",
    ),
    "unknown_variables_do_not_count": Mutant(
        "An environment variable that only a newer vLLM has is not part of the key.",
        one(_COMPUTED, "settings", "name not in _VARIABLES and name in os.environ", "False"),
        test=f"{_NUMERICS}::test_a_variable_counts_when_it_is_unknown_and_set",
    ),
    "errors_of_kernels_do_not_count": Mutant(
        "The failure of a rank's kernel is not part of the key.",
        one(_LIBRARIES, "measured", "digest.update(f", "isinstance(found, str) or digest.update(f"),
        test=f"{_NUMERICS}::test_an_operation_that_fails_counts_by_its_error",
    ),
    "another_first_hash_is_silent": Mutant(
        "An engine does not report that its first hash differs from the one in the tier.",
        one("kvpipe.tiers.finder:Finder", "_compare", 'found not in {"", self.first_hash}', "False"),
        test="tests/tiers/test_finder.py::test_another_first_hash_is_reported_once[sha256 b-1.0-1]",
    ),
    "an_old_first_hash_stays": Mutant(
        "The first hash of an engine that is gone stays in the tier for ever.",
        one("kvpipe.tiers.first_hash", "leave_first_hash", "await tier.delete(list(names))", "pass"),
        test="tests/tiers/test_first_hash.py::test_first_hash_is_stored_before_the_first_chunk",
    ),
    "a_first_hash_without_seed": Mutant(
        "A first hash that PYTHONHASHSEED seeds is treated as if PYTHONHASHSEED did not seed it.",
        one(
            "kvpipe.connectors.vllm.doctor_facts",
            "first_hash",
            "function(resolve_none_hash_seed(function))",
            "function(b'')",
        ),
        test=f"{_NUMERICS}::test_the_first_hash_is_seeded_for_every_algorithm",
    ),
    "doctor_trusts_every_first_hash": Mutant(
        "`doctor` treats every first hash as one of its own environment.",
        one(
            "kvpipe.cli.doctor.storage",
            "check_first_hash",
            "first != machine.first_hash",
            "not machine.first_hash",
        ),
        test="tests/cli/test_doctor_storage.py::test_the_first_hash_of_another_engine_is_named",
    ),
}
