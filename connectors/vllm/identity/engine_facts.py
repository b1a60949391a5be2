"""Collects the facts, besides tokens, on which an engine's chunks depend, and computes their digest."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.kv_cache_interface import (
    MambaSpec,
)

from kvpipe.connectors.vllm import compat
from kvpipe.connectors.vllm.identity import computed, drafters, models
from kvpipe.connectors.vllm.identity.media import media_facts
from kvpipe.connectors.vllm.identity.models import refuse
from kvpipe.protocol.geometry import Geometry

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

FORMAT_VERSION = 1
"""The version of the format of a slot's bytes. After a change of the version, all older chunks are misses."""


def identity(config: VllmConfig, cache: KVCacheConfig, geometry: Geometry) -> dict[str, Any]:
    """Return all facts, besides tokens and weights, on which a chunk's bytes depend. Any difference causes misses."""
    model, cc, parallel = config.model_config, config.cache_config, config.parallel_config
    return {
        "format": FORMAT_VERSION,
        "vllm": compat.installed_version().partition("+")[0],
        "model_config": models.config_digest(model.hf_config),
        "model_dtype": str(model.dtype),
        # rotary factors (LongRoPE) and attention temperature (Llama 4) depend on the length; -1: vLLM chooses it
        "max_model_len": [model.max_model_len, getattr(model, "original_max_model_len", None) == -1],
        "quantization": str(model.quantization),
        **({"quantized": str(wanted)} if (wanted := model.quantization_config) else {}),
        "settings": (settings := computed.settings(config)).alone,
        "settings_of_ranks": settings.of_ranks,
        "media": media_facts(config),
        "kv_cache_dtype": str(cc.cache_dtype),
        "kv_cache_layout": str(cache.kv_cache_layout),
        "prefix_hash": str(cc.prefix_caching_hash_algo),
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "ranks": parallel.world_size,
        **({"pipeline_parallel_size": stages} if (stages := parallel.pipeline_parallel_size) > 1 else {}),
        "chunk_tokens": geometry.chunk_tokens,
        **({"match_tokens": geometry.match_tokens} if geometry.match_tokens else {}),
        "groups": [
            [
                g.block_tokens,
                "state" if g.state else ["local", g.window_tokens] if g.local else g.window_tokens or 0,
                [[layer.name, layer.page_bytes] for layer in g.layers],
            ]
            for g in geometry.groups
        ],
        **_context_facts(config),
        **drafters.facts(config),
        **_adapter_facts(config),
        **_state_facts(cache, geometry),
    }


def _context_facts(config: VllmConfig) -> dict[str, Any]:
    """Return the facts about how decode context parallelism divides a block's tokens.

    The result is empty without such parallelism.
    """
    parallel = config.parallel_config
    ranks = parallel.decode_context_parallel_size
    return {"context_parallel": [ranks, parallel.cp_kv_cache_interleave_size]} if ranks > 1 else {}


def _adapter_facts(config: VllmConfig) -> dict[str, Any]:
    """Return the LoRA settings that change an adapter's effect, as plain data.

    The result is empty for vLLM's defaults.
    """
    lora = config.lora_config
    if lora is None:
        return {}
    modules = None if lora.target_modules is None else sorted(lora.target_modules)
    layouts = lora.enable_mixed_moe_lora_format, lora.enable_moe_shared_loras
    dtype = "" if lora.lora_dtype in {config.model_config.dtype, "auto"} else str(lora.lora_dtype)
    facts = [dtype, modules, lora.enable_tower_connector_lora, *layouts]
    return {"adapters": facts} if facts != ["", None, False, False, False] else {}


def _state_facts(cache: KVCacheConfig, geometry: Geometry) -> dict[str, Any]:
    """Return the tensors of a page of states, in the order in the page, which also depends on vLLM's settings."""
    specs = [cache.kv_cache_groups[i] for i in sorted(geometry.states)]
    layers = [(n, one) for g in specs for n, one in models.layer_specs(g.kv_cache_spec, g.layer_names).items()]
    facts = [
        [name, str(spec.mamba_type), [list(shape) for shape in spec.shapes], [str(dtype) for dtype in spec.dtypes]]
        for name, spec in layers
        if isinstance(spec, MambaSpec)
    ]
    return {"states": [*facts, is_conv_state_dim_first()]} if facts else {}


def layout_facts(caches: dict[str, torch.Tensor], blocks: int, config: VllmConfig) -> list[Any]:
    """Return the facts about a block's bytes that only a rank with caches knows, as plain data.

    Attention backends with the same cache specification lay out the same KV differently. On a CPU the layout even
    depends on the instruction set.
    """
    facts: list[Any] = [platform.machine(), *sorted({cache.device.type for cache in caches.values()})]
    if "cpu" in facts:
        facts.append(torch.backends.cpu.get_cpu_capability())
        facts.append(torch.cpu._is_amx_tile_supported())  # noqa: SLF001  (torch has no public function for this)
    backends = models.backends(config, caches)
    for name, cache in sorted(caches.items()):
        split = cache.shape[0] // blocks if blocks else 0
        inside = [split, list(cache.shape[1:]), list(cache.stride()[1:]), str(cache.dtype)]
        facts.append([name, backends[name], *inside])
    if context := _context_facts(config):  # vLLM may change this setting in its ranks only
        facts.append(context)
    return facts


def check_hashes(config: VllmConfig, shared: str = "tiers") -> None:
    """Raise `UnsupportedError` if other processes would hash a prefix differently, or hash other prefixes equally.

    `shared` says where other processes keep chunks, for the error message.
    """
    multimodal = getattr(config.model_config, "multimodal_config", None)
    if (
        multimodal is not None
        and not multimodal.mm_processor_cache_gb
        and not config.cache_config.enable_prefix_caching
    ):
        refuse(  # vLLM then numbers images instead of hashing them, and each process starts at the same number
            f"a multimodal model with {shared}, without prefix caching and with mm_processor_cache_gb=0",
            "enable one of the two",
        )
    encoder = getattr(config, "ec_transfer_config", None)
    if encoder is not None and encoder.is_ec_consumer:
        refuse(
            f"{shared} with another engine's encoder, whose weights this engine does not know",
            "unset ec_transfer_config",
        )
    algorithm = str(config.cache_config.prefix_caching_hash_algo)
    if algorithm.startswith("xxhash") and "PYTHONHASHSEED" not in os.environ:
        refuse(
            f"prefix_caching_hash_algo={algorithm!r} with {shared} (its seed differs in every process)",
            "use sha256, or set the same PYTHONHASHSEED for all engines",
        )


def fingerprint(facts: dict[str, Any]) -> str:
    """Return the namespace of `facts`, a digest of 32 hex digits."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
