"""Initializes the scales per token and head that vLLM keeps in the pages of a quantized KV cache.

vLLM sets all scales of a layer to 1 when the layer attends for the first time (`TritonAttentionImpl`). Without CUDA
graphs no warm-up attends, so vLLM sets the scales in the first request's step. KV that was loaded before that step
would lose its scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def set_scales(layers: Mapping[str, object], caches: Mapping[str, torch.Tensor]) -> None:
    """Make vLLM set the scales of `caches` now, before any KV is loaded. `layers`: vLLM's layers, by name."""
    for name, cache in caches.items():
        impl = getattr(layers.get(name), "impl", None)
        if getattr(impl, "_is_per_token_head_quant", False):
            impl._ensure_scale_caches(cache)  # type: ignore[union-attr]  # noqa: SLF001
