"""Scales of single tokens and heads, which vLLM keeps beside what they scale, in the pages of the KV cache.

It sets all scales of a layer to 1 when the layer attends for the first time (`TritonAttentionImpl`). Where no warm-up
attends, as without CUDA graphs, that is in the first request's step: what was loaded by then, for it and for others,
would lose its scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def set_scales(layers: Mapping[str, object], caches: Mapping[str, torch.Tensor]) -> None:
    """Have vLLM set the scales of `caches` now, before anything is loaded. `layers`: vLLM's layers, by name."""
    for name, cache in caches.items():
        impl = getattr(layers.get(name), "impl", None)
        if getattr(impl, "_is_per_token_head_quant", False):
            impl._ensure_scale_caches(cache)  # type: ignore[union-attr]  # noqa: SLF001
