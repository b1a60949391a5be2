"""Decides whether kvpipe asks vLLM for a cross-layer layout, in which the pages of all layers of a block are adjacent.

With this layout, `kvpipe.transfer.whole_blocks` copies a block of all layers as one run of bytes, if no layer's hook is
used. vLLM uses the layout that a connector asks for only if every attention backend supports the layout. The variable
`VLLM_KV_CACHE_LAYOUT` takes precedence over the connector.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Final

from vllm.platforms import current_platform

from kvpipe.connectors.vllm import hooks
from kvpipe.connectors.vllm.identity import drafters

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

_HEADS_FIRST: Final = "BLHNC"
_TOKENS_FIRST: Final = "BLNHC"
_BLACKWELL: Final = 10
"""The major compute capability of devices for which FlashInfer supports no page with tokens first."""
_SEVERAL_KINDS: Final = ("sliding_window", "attention_chunk_size", "index_topk")
"""Fields of a model's configuration that give layers windows, or pages of another size (an indexer's keys)."""


def wanted(config: VllmConfig, mode: str) -> str | None:
    """Return the cross-layer layout to ask vLLM for, or None if vLLM's own choice is better or kvpipe must not ask.

    kvpipe asks only if all layers are copied at once and probably are one cache group with pages of one size. kvpipe
    does not ask if the user chose the block size, because vLLM cannot divide a cross-layer block into the blocks of a
    kernel. On a CPU, vLLM's only backend does not support a cross-layer layout.
    """
    cache = config.cache_config
    if not current_platform.is_cuda() or cache.user_specified_block_size or cache.kv_cache_dtype_skip_layers:
        return None
    if not hooks.ignored(config, mode) or drafters.has_kv(config) or not _one_kind(config.model_config):
        return None
    if _asked_by_connector():
        return None
    capability = current_platform.get_device_capability()
    return _HEADS_FIRST if capability is not None and capability.major == _BLACKWELL else _TOKENS_FIRST


def _one_kind(model: ModelConfig) -> bool:
    """Whether all layers probably have pages of one size and one window.

    `whole_blocks` later checks the caches themselves.
    """
    text = model.hf_text_config
    kinds = set(getattr(text, "layer_types", None) or ())
    return not model.is_hybrid and len(kinds) <= 1 and not any(getattr(text, name, None) for name in _SEVERAL_KINDS)


def _asked_by_connector() -> bool:
    """Whether vLLM's `MultiConnector` asks. A `MultiConnector` refuses connectors that ask for different layouts.

    Only the call stack shows the caller. `MultiConnector` asks with a copy of the engine's configuration, and this copy
    names kvpipe as the engine's only connector. The engine's core asks before it makes connectors, and sets no current
    configuration.
    """
    return [frame.function for frame in inspect.stack(0)].count("get_required_kvcache_layout") > 1
