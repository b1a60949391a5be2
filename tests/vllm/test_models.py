"""vLLM's configuration states how a model treats prefixes. These statements decide whether kvpipe serves the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms import CpuArchEnum, current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, UniformTypeKVCacheSpecs

from kvpipe.connectors.vllm.identity import models
from kvpipe.errors import UnsupportedError

PLAIN = {
    "attn_type": "decoder",
    "is_diffusion": False,
    "is_encoder_decoder": False,
    "is_prefix_caching_supported": True,
    "pooler_config": None,
    "rswa_window": None,
}


def _config(*, mm_encoder_only: bool = False, **model: Any) -> Any:
    return SimpleNamespace(model_config=SimpleNamespace(**PLAIN | model), is_mm_encoder_only=mm_encoder_only)


def test_a_plain_model_is_served() -> None:
    """A decoder is served, and so is an engine without a model."""
    models.check_model(_config())
    models.check_model(SimpleNamespace(model_config=None))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (
            _config(is_encoder_decoder=True, is_prefix_caching_supported=False),
            r"an encoder-decoder model \(its cross-attention's KV .* no block hash covers; .* Qwen2-Audio",
        ),
        (_config(attn_type="attention_free", is_prefix_caching_supported=False), "attn_type is 'attention_free'"),
        (
            _config(
                attn_type="encoder_only",
                is_prefix_caching_supported=False,
                pooler_config=SimpleNamespace(seq_pooling_type="LAST", tok_pooling_type="ALL"),
            ),
            "pooling by a model whose attn_type is 'encoder_only'",
        ),
        (
            _config(
                is_prefix_caching_supported=False,
                pooler_config=SimpleNamespace(seq_pooling_type="LAST", tok_pooling_type="STEP"),
            ),
            "tok_pooling_type='STEP'",
        ),
        (_config(rswa_window=128), "R-SWA"),
        (_config(is_diffusion=True), "a diffusion language model"),
        (_config(mm_encoder_only=True), "only the encoder"),
    ],
)
def test_each_unsupported_feature_is_refused(config: Any, named: str) -> None:
    """The message names the feature of vLLM and the remedy, whether the prefix cache is on or off."""
    with pytest.raises(UnsupportedError, match=named) as caught:
        models.check_model(config)
    assert str(caught.value).startswith("kvpipe: ")
    assert str(caught.value).endswith("is not supported; serve it without a KV connector")


def test_riscv_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """On RISC-V, vLLM's CPU backend cannot compute a prefill with context."""
    monkeypatch.setattr(type(current_platform), "get_cpu_architecture", classmethod(lambda _: CpuArchEnum.RISCV))
    with pytest.raises(UnsupportedError, match="RISC-V"):
        models.check_model(_config())


def _cache(*non_causal: bool) -> Any:
    specs = [
        FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=size, dtype=torch.float32, non_causal=tagged)
        for size, tagged in enumerate(non_causal, 32)
    ]
    names = [f"l{i}" for i in range(len(specs))]
    one = (
        specs[0]
        if len(specs) == 1
        else UniformTypeKVCacheSpecs(32, kv_cache_specs=dict(zip(names, specs, strict=True)))
    )
    return SimpleNamespace(kv_cache_groups=[KVCacheGroupSpec(names, one)])


@pytest.mark.parametrize("tags", [(True,), (False, True), (True, False)])
def test_one_layer_that_looks_ahead_is_enough(tags: tuple[bool, ...]) -> None:
    """A non-causal layer is found alone, and in a group with other layers."""
    models.check_specs(_cache(*(False for _ in tags)))
    with pytest.raises(UnsupportedError, match="non-causal attention"):
        models.check_specs(_cache(*tags))


def test_batch_invariance_is_refused_with_hits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some backends are batch invariant only without hits.

    Such backends are refused if batch invariance is switched on.
    """
    models.check_backends(["FLASHINFER", "TRITON_MLA"])
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    models.check_backends(["FLASH_ATTN", "CPU_ATTN", ""])
    with pytest.raises(UnsupportedError, match="VLLM_BATCH_INVARIANT=1 with the attention backend FLASHINFER"):
        models.check_backends(["FLASH_ATTN", "FLASHINFER"])
