"""Tests of the drafting methods that are served, and of the number of later tokens on which a drafter's KV depends."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvpipe.cache.catalog import Catalog
from kvpipe.cache.policy import make_policy
from kvpipe.cache.prefixes import Prefixes
from kvpipe.connectors.vllm import hooks
from kvpipe.connectors.vllm.identity import drafters
from kvpipe.errors import UnsupportedError
from kvpipe.protocol.geometry import Geometry, Group, Layer
from kvpipe.trace.log import Counters


def config(method: str | None, *, modules: int = 1, drafts: int = 3, dynamic: bool = False) -> Any:
    """Return vLLM's configuration with a drafter, as far as kvpipe reads it."""
    model = SimpleNamespace(hf_config=SimpleNamespace(num_nextn_predict_layers=modules), is_hybrid=False)
    model.hf_config.to_json_string = lambda: "{}"
    model.dtype = model.quantization = "auto"
    speculative = SimpleNamespace(
        method=method,
        num_speculative_tokens=drafts,
        draft_model_config=model,
        uses_dynamic_speculative_decoding=lambda: dynamic,
        use_heterogeneous_vocab=False,
        kv_cache_dtype=None,
        use_multi_module_mtp=lambda: method == "mtp" and min(modules, drafts) > 1,
    )
    return SimpleNamespace(
        speculative_config=None if method is None else speculative,
        use_v2_model_runner=True,
        cache_config=SimpleNamespace(use_replayssm=False, prefix_cache_retention_interval=0),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
    )


@pytest.mark.parametrize(
    ("method", "modules", "drafts", "ahead"),
    [
        (None, 1, 3, 0), ("ngram", 1, 3, 0), ("suffix", 1, 3, 0), ("draft_model", 1, 3, 0), ("eagle", 1, 3, 1),
        ("eagle3", 1, 5, 1), ("mtp", 1, 3, 1), ("mtp", 3, 3, 3), ("mtp", 3, 2, 2), ("dflash", 1, 3, 0),
        ("dspark", 1, 3, 0),
    ],
)  # fmt: skip
def test_tokens_ahead_are_one_per_module_or_none(method: str | None, modules: int, drafts: int, ahead: int) -> None:
    """The number is None if the drafter reads no hidden states, or only those of its own position.

    In all other cases the number is one per module.
    """
    made = config(method, modules=modules, drafts=drafts)
    drafters.check_drafter(made)
    assert drafters.ahead_tokens(made) == ahead
    assert drafters.has_kv(made) == (method not in (None, *drafters.WITHOUT_KV))


@pytest.mark.parametrize("method", ["medusa", "mlp_speculator", "extract_hidden_states", "custom_class"])
def test_untested_drafting_method_is_refused(method: str) -> None:
    """A drafting method that no engine test covers is refused. The message names the methods that are served."""
    served = "eagle, eagle3, mtp, dflash, dspark, draft_model"
    with pytest.raises(UnsupportedError, match=f"'{method}' is not supported; use one of {served}"):
        drafters.check_drafter(config(method))


def test_gaps_in_a_drafters_kv_are_refused() -> None:
    """If the number of drafts depends on the batch size, some steps have no drafts.

    In a step without drafts the drafter computes no KV, so its KV has gaps.
    """
    with pytest.raises(UnsupportedError, match=r"num_speculative_tokens_per_batch_size.*; unset it"):
        drafters.check_drafter(config("eagle", dynamic=True))
    drafters.check_drafter(config("ngram", dynamic=True))


def test_layers_of_a_step_with_a_drafter_have_no_hooks() -> None:
    """A drafter's layers run several times per step.

    If the configuration requires hooks, the engine is refused with a message.
    """
    made = config("eagle")
    made.compilation_config = SimpleNamespace(cudagraph_mode=None, static_forward_context={}, splitting_ops=())
    assert hooks.unhooked(made, ["a", "b"], "auto") == {"a", "b"}
    with pytest.raises(UnsupportedError, match="set mode to 'auto'"):
        hooks.unhooked(made, ["a", "b"], "layerwise")


@pytest.mark.parametrize(("ahead", "hash_tokens"), [(0, 16), (1, 16), (17, 16), (1, 8)])
def test_a_key_covers_the_tokens_ahead(ahead: int, hash_tokens: int) -> None:
    """A unit has a key only when the hash after the unit is known.

    So only units whose next tokens are known can be saved and found.
    """
    geometry = Geometry((Group((Layer("l", 64),), 16),), 64, 1 << 20, ahead)
    hashes: Sequence[bytes] = [bytes([i]) for i in range(160 // hash_tokens)]
    prefixes = Prefixes(Catalog(4, 1, make_policy("lru", 4), Counters()), geometry, hash_tokens, lambda _: hashes)
    request: Any = SimpleNamespace(num_tokens=160)
    behind = -(-ahead // hash_tokens)
    units = (len(hashes) - behind) * hash_tokens // 16
    assert prefixes.final_units(request, 160) == units
    assert prefixes.final_units(request, 32) == 2
    assert prefixes.key(hashes, 2) == hashes[32 // hash_tokens - 1 + behind]
    assert list(prefixes.unit_keys(request)) == [prefixes.key(hashes, unit) for unit in range(1, units + 1)]
    assert prefixes.units_within(160) == units
    assert prefixes.units_within(15) == 0
    assert prefixes.units_within(prefixes.computed_tokens(request, units + 1)) == units + 1
    assert prefixes.computed_tokens(request, 2) == 32  # the tokens ahead of these 32 tokens are known
    assert prefixes.state_keys(request)[1] == prefixes.state_key(hashes, 2) == hashes[32 // hash_tokens - 1]
    assert prefixes.state_units(request, 160) == 10


def test_drafters_with_missing_kv_are_refused() -> None:
    """Runner V1 runs only the first of several modules, so the KV of the other modules is missing.

    A drafter with another vocabulary changes the tokens of a prefix.
    """
    several = config("mtp", modules=3)
    several.use_v2_model_runner = False
    with pytest.raises(UnsupportedError, match="several MTP modules with vLLM's runner V1"):
        drafters.check_drafter(several)
    mixed = config("draft_model")
    mixed.speculative_config.use_heterogeneous_vocab = True
    with pytest.raises(UnsupportedError, match="use_heterogeneous_vocab"):
        drafters.check_drafter(mixed)


def test_drafts_beside_recurrent_states() -> None:
    """A drafter with states of its own is refused.

    An engine is also refused if a repeated prompt would never find a state.
    """
    for method in (None, "mtp", "eagle", "eagle3", "dflash", "dspark"):
        drafters.check_states(config(method))
    for method in ("ngram", "draft_model"):
        with pytest.raises(UnsupportedError, match=f"'{method}' with recurrent states .*use one of eagle"):
            drafters.check_states(config(method))
    own = config("mtp")
    own.speculative_config.draft_model_config.is_hybrid = True
    with pytest.raises(UnsupportedError, match=r"drafter that has recurrent states itself .*use a drafter without"):
        drafters.check_states(own)
    kept = config("mtp")
    kept.speculative_config.disable_eagle_block_drop = True
    with pytest.raises(UnsupportedError, match=r"disable_eagle_block_drop .*unset it"):
        drafters.check_states(kept)
    kept.speculative_config.method = "dspark"  # a masked drafter, whose KV depends on no later token
    drafters.check_states(kept)
    for method in (None, "mtp"):
        behind = config(method)
        behind.cache_config.use_replayssm = True
        with pytest.raises(UnsupportedError, match=r"use_replayssm=True .*set it to False"):
            drafters.check_states(behind)


def test_states_of_answers_beside_drafts_in_stages_are_refused() -> None:
    """A stage before the last stage gets an answer's states some steps after vLLM finds and offers these states."""
    for method, stages, interval in (("mtp", 2, 0), ("dspark", 2, 0), ("mtp", 1, None), ("mtp", 1, 64), (None, 2, 64)):
        made = config(method)
        made.parallel_config.pipeline_parallel_size = stages
        made.cache_config.prefix_cache_retention_interval = interval
        drafters.check_states(made)
    for interval in (None, 64):
        made = config("mtp")
        made.parallel_config.pipeline_parallel_size = 2
        made.cache_config.prefix_cache_retention_interval = interval
        with pytest.raises(UnsupportedError, match=rf"interval={interval} .*pipeline_parallel_size=2 .*set it to 0$"):
            drafters.check_states(made)


@pytest.mark.parametrize(
    ("method", "v2", "stated"),
    [
        (None, True, ""),
        ("eagle", True, ""),
        ("dflash", False, ""),
        ("dflash", True, "dflash"),
        ("dspark", True, "dspark"),
    ],
)
def test_method_tested_on_schedulers_only_is_reported(method: str | None, stated: str, *, v2: bool) -> None:
    """If a method was tested only on vLLM's schedulers, the result names the method.

    DFlash with runner V1 was tested on an engine.
    """
    made = config(method)
    made.use_v2_model_runner = v2
    assert drafters.unproven(made) == stated


def test_the_type_of_a_drafters_cache_is_a_fact() -> None:
    """If the drafter's cache has another type than the model, the type is part of the identity.

    Two types may have one size.
    """
    known = []
    for dtype in (None, "fp8_e4m3", "fp8_e5m2"):
        made = config("dspark")
        made.speculative_config.kv_cache_dtype = dtype
        known.append(str(drafters.facts(made)))
    assert len(set(known)) == 3
    assert "kv_cache_dtype" not in known[0], "what is stored without one is still found"


@pytest.mark.parametrize(
    ("fact", "field", "value"),
    [
        ("method", "method", "eagle3"),
        ("ahead_tokens", "use_multi_module_mtp", lambda: True),
        ("model_config", "draft_model_config.hf_config.to_json_string", lambda: '{"hidden_size": 1}'),
        ("model_dtype", "draft_model_config.dtype", "float16"),
        ("quantization", "draft_model_config.quantization", "fp8"),
        ("kv_cache_dtype", "kv_cache_dtype", "fp8_e4m3"),
    ],
)
def test_facts_of_two_drafters_differ_when_one_field_differs(fact: str, field: str, value: object) -> None:
    """Drafters with different fields compute different KV.

    The test changes one field at a time, so that no other fact hides a missing fact.
    """
    one, other = config("eagle", modules=3), config("eagle", modules=3)
    *owners, name = field.split(".")
    setattr(functools.reduce(getattr, owners, other.speculative_config), name, value)
    facts, others = (drafters.facts(made)["drafter"] for made in (one, other))
    assert {key for key in {*facts, *others} if facts.get(key) != others.get(key)} == {fact}
