"""Bugs in which kvpipe serves models and requests for which vLLM itself caches no prefixes."""

from __future__ import annotations

from kvpipe.connectors.vllm.trial.mutants.base import LOOKUPS, Mutant, one

_MODELS = "kvpipe.connectors.vllm.identity.models"
_UNIT = "tests/vllm/test_models.py"

MUTANTS: dict[str, Mutant] = {
    "pooling_is_taken_for_generation": Mutant(
        "kvpipe serves prefixes of every pooling model, so prompts with MEAN and CLS pooling get hits.",
        one(
            _MODELS,
            "_uncut",
            "if model.is_prefix_caching_supported:",
            "if model.is_prefix_caching_supported or model.pooler_config is not None:",
        ),
        test=f"{_UNIT}::test_each_unsupported_feature_is_refused",
    ),
    "only_the_first_layer_is_asked": Mutant(
        "A cache group is served if its first layer attends to no later token, whatever its other layers do.",
        one(_MODELS, "check_specs", "group.layer_names).values()", "group.layer_names[:1]).values()"),
        test=f"{_UNIT}::test_one_layer_that_looks_ahead_is_enough",
    ),
    "batch_invariance_is_not_asked_for": Mutant(
        "kvpipe serves attention backends with which hits break vLLM's batch invariance, although batch "
        "invariance is on.",
        one(_MODELS, "check_backends", "if envs.VLLM_BATCH_INVARIANT else ()", "if False else ()"),
        test=f"{_UNIT}::test_batch_invariance_is_refused_with_hits",
    ),
    "the_longest_prompt_is_not_in_the_name": Mutant(
        "Engines share a namespace though their max_model_len differs, which may change their rotary factors.",
        one("kvpipe.connectors.vllm.identity.engine_facts", "identity", "model.max_model_len,", "0,"),
        test="tests/engine/test_tiers.py::test_the_longest_prompt_is_part_of_the_name",
    ),
    "how_images_are_prepared_is_not_in_the_name": Mutant(
        "Engines of one model share a namespace though they prepare images in different ways.",
        one("kvpipe.connectors.vllm.identity.engine_facts", "identity", "media_facts(config)", '""'),
        test="tests/engine/test_images.py::test_changed_image_processor_finds_nothing",
    ),
    "requests_that_read_nothing_are_looked_up": Mutant(
        "A request whose prompt vLLM computes in full is still looked up, and its chunks are fetched from tiers.",
        one(LOOKUPS, "_why_not", "if tracked.request.skip_reading_prefix_cache:", "if False:"),
        test="tests/scheduler/test_side.py::test_a_request_that_reads_no_cache_is_not_looked_up",
    ),
    "requests_that_read_nothing_are_put_off": Mutant(
        "A lookup is postponed though vLLM admits the request without waiting for the answer.",
        one(LOOKUPS, "_answer", "and not request.skip_reading_prefix_cache:", "and True:"),
        test="tests/scheduler/test_side.py::test_a_request_that_reads_no_cache_waits_for_nothing",
    ),
}
