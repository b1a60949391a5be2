"""Scales per token and head in the pages of a quantized KV cache: vLLM's first step keeps loaded scales."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

from kvpipe.connectors.vllm.remedies.scales import set_scales

HEAD_SIZE, SCALE_BYTES = 32, 4
LOADED = slice(1, 3)


def _impl(*, scaled: bool) -> TritonAttentionImpl:
    """Return the attention of a layer that has not attended yet."""
    impl: TritonAttentionImpl = object.__new__(TritonAttentionImpl)
    impl._is_per_token_head_quant = scaled
    return impl


def _cache(order: str) -> torch.Tensor:
    """Return a cache of four blocks. A block has 16 tokens and 2 heads, with heads or tokens first in memory."""
    content = 2 * (HEAD_SIZE + SCALE_BYTES)
    if order == "HND":
        return torch.zeros(4, 2, 16, content, dtype=torch.int8)
    return torch.zeros(4, 16, 2, content, dtype=torch.int8).transpose(1, 2)


def _load(cache: torch.Tensor) -> torch.Tensor:
    """Load two blocks, and return their content."""
    cache[LOADED] = torch.randint(-100, 100, cache[LOADED].shape, dtype=torch.int8)
    return cache[LOADED].clone()


@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_kv_loaded_before_the_first_step_keeps_its_scales(order: str) -> None:
    """The layer attends for the first time after the load, and finds the loaded scales."""
    impl, cache = _impl(scaled=True), _cache(order)
    set_scales({"layer": SimpleNamespace(impl=impl)}, {"layer": cache})
    assert cache.any()
    loaded = _load(cache)
    impl._ensure_scale_caches(cache)  # the layer's first step makes this call
    assert torch.equal(cache[LOADED], loaded)


def test_vllm_sets_scales_in_the_first_step() -> None:
    """Without the remedy, vLLM's first step overwrites loaded scales.

    When this test fails, the remedy is not needed any more.
    """
    impl, cache = _impl(scaled=True), _cache("HND")
    loaded = _load(cache)
    impl._ensure_scale_caches(cache)
    assert not torch.equal(cache[LOADED], loaded)


def test_layers_without_scales_are_not_changed() -> None:
    """Layers without scales, or without attention, are not changed.

    Layers of other backends, and layers with names that vLLM does not know, are not changed either.
    """
    caches = {name: _cache("HND") for name in ("unscaled", "other backend", "a state", "unknown")}
    other = SimpleNamespace(impl=SimpleNamespace())
    layers = {"unscaled": SimpleNamespace(impl=_impl(scaled=False)), "other backend": other, "a state": object()}
    set_scales(layers, caches)
    assert not any(cache.any() for cache in caches.values())
