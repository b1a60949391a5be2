"""What of vLLM's world kvpipe can serve correctly: geometry and identity of an engine, and refusals at start-up."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import uuid
from math import gcd
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from kvpipe.config import Settings
from kvpipe.connectors.vllm import compat, computed, drafters, models
from kvpipe.connectors.vllm.media import media_facts
from kvpipe.connectors.vllm.models import refuse
from kvpipe.geometry import Geometry, Group, Layer

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

FORMAT_VERSION = 1
"""Version of the format of a slot's bytes. A change makes every older chunk a miss."""

_SPECS = (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SlidingWindowMLASpec,
    ChunkedLocalAttentionSpec,
    MambaSpec,
)
_STATES = ("GDN_ATTN", "MAMBA1", "MAMBA2", "SHORT_CONV")
"""VLLM's names for the kinds of recurrent states that are tested."""
_MAMBA2_TENSORS = 2
"""Tensors of a complete state; with ReplaySSM a state lags behind, and more tensors hold what it lacks."""
_DRAFTED_STATES = ("GDN_ATTN",)
"""Those that are tested with drafts."""


def check_engine(config: VllmConfig) -> None:
    """Raise `UnsupportedError` for engine settings under which kvpipe could not be right."""
    parallel = config.parallel_config
    if parallel.prefill_context_parallel_size > 1:
        refuse(f"prefill_context_parallel_size={parallel.prefill_context_parallel_size}", "set it to 1")
    if getattr(parallel, "use_ubatching", False):
        refuse("microbatching (enable_dbo or ubatch_size: a layer's hooks run once per microbatch)", "switch it off")
    if parallel.world_size > 1 and parallel.distributed_executor_backend == "external_launcher":
        refuse("distributed_executor_backend='external_launcher' with several ranks", "use 'mp' or 'ray'")
    if parallel.pipeline_parallel_size > 1:
        _check_stages(config)
    if getattr(config.model_config, "enable_sleep_mode", False):
        refuse("enable_sleep_mode=True (it remaps the KV cache under registered addresses)", "set it to False")
    if getattr(parallel, "enable_fault_tolerance", False):
        refuse(
            "enable_fault_tolerance=True (vLLM goes on with blocks that a failed step has not computed, and without "
            "its reports of loads)",
            "set it to False",
        )
    _check_hits(config)
    drafters.check(config)
    dcp = parallel.decode_context_parallel_size
    if dcp > 1 and drafters.has_kv(config) and not config.use_v2_model_runner:
        refuse(
            f"speculative method={config.speculative_config.method!r} with decode_context_parallel_size={dcp} and "
            "vLLM's runner V1 (whose drafters write as if one rank held all tokens)",
            "set VLLM_USE_V2_MODEL_RUNNER=1",
        )
    models.check_model(config)


def _check_hits(config: VllmConfig) -> None:
    """Raise `UnsupportedError` where vLLM needs more of a prompt's tokens than their KV: a hit brings nothing else."""
    outputs, media = getattr(config, "aux_output_config", None), getattr(config.model_config, "multimodal_config", None)
    if outputs is not None and outputs.enabled:
        refuse(
            "enable_return_routed_experts=True (vLLM knows no experts of tokens that are loaded, and ends the engine)",
            "set it to False",
        )
    if media is not None and media.is_multimodal_pruning_enabled() and config.model_config.uses_mrope:
        refuse(
            f"video_pruning_rate={media.video_pruning_rate} with M-RoPE (what follows a video has its positions from "
            "the video's embeddings, which nobody computes after a hit)",
            "set it to 0",
        )


def _check_stages(config: VllmConfig) -> None:
    """Raise `UnsupportedError` where not all reports of a pipeline's stages would reach the scheduler."""
    if config.parallel_config.distributed_executor_backend == "ray":
        refuse("pipeline parallelism with distributed_executor_backend='ray' (only the last stage reports)", "use 'mp'")
    if config.speculative_config is None:
        return
    if not config.use_v2_model_runner:  # V1 neither ends nor clears a step on a stage that is not the last
        refuse("pipeline parallelism with speculative decoding by vLLM's runner V1", "unset speculative_config")
    if not config.scheduler_config.async_scheduling:  # vLLM's scheduler gets the next step's drafts
        refuse(
            "pipeline parallelism with speculative decoding without asynchronous scheduling",
            "set async_scheduling to True",
        )


def make_geometry(
    cache: KVCacheConfig, settings: Settings, ahead_tokens: int = 0, dcp: int = 1, states_back: int = 0,
    *, branches: bool = False,
) -> Geometry:  # fmt: skip
    """Describe the engine's cache groups. `ahead_tokens`, `states_back`: see `Geometry`.

    `branches`: whether the engine keeps states of branches within blocks, where it keeps any within blocks.
    `dcp`: among how many ranks decode context parallelism divides the tokens of a block, where a group's are divided.
    Such a block is as many times longer, and of the bytes of one page of each rank: what is in it is the rank's affair.

    Raises:
        UnsupportedError: a group's cache is of a kind that kvpipe does not know.
        ConfigError: chunk or pool size do not fit the engine.

    """
    models.check_specs(cache)
    groups = []
    placed = {name: min(t.layer_stride, t.block_stride) for t in cache.kv_cache_tensors for name in t.layers}
    for i, group in enumerate(cache.kv_cache_groups):
        per_layer = models.layer_specs(group.kv_cache_spec, group.layer_names)
        if not per_layer:
            refuse(f"a pipeline stage without a layer of KV cache group {i}", "use tensor parallelism instead")
        kinds = set()
        for name, spec in per_layer.items():
            if type(spec) not in _SPECS or not spec.prefix_cacheable or not group.enable_kv_transfer:
                refuse(
                    f"the KV cache of layer {name!r} ({type(spec).__name__}, group {i})",
                    "kvpipe knows full, sliding-window, chunked local and MLA attention, and recurrent states",
                )
            if isinstance(spec, MambaSpec):
                _check_state(name, spec)
            kinds.add((_window(spec), isinstance(spec, MambaSpec), isinstance(spec, ChunkedLocalAttentionSpec)))
        if len(kinds) != 1 or group.host_resident:
            refuse(f"KV cache group {i} (mixed windows, or host resident)", "serve it without kvpipe")
        sizes = {name: _page_bytes(spec) for name, spec in per_layer.items()}
        if len({placed.get(name, 0) for name in sizes}) > 1:  # the scheduler's side has one layer's for all of them
            sizes |= {name: placed[name] for name in sizes if name in placed}
        layers = tuple(Layer(name, size) for name, size in sizes.items())
        tokens = resolve_dcp_kv_block_size(group.kv_cache_spec, dcp)
        groups.append(Group(layers, tokens, *kinds.pop(), ranks=tokens // group.kv_cache_spec.block_size))
    if not groups:
        refuse("a model without KV cache", "serve it without kvpipe")
    match_tokens = _match_tokens(cache, groups, states_back)
    sizes_max = settings.chunk_tokens, int(settings.pool_bytes_max)
    geometry = Geometry(
        tuple(groups), *sizes_max, ahead_tokens, states_back, match_tokens, branches and match_tokens > 0
    )
    _check_sizes(geometry, settings)
    return geometry


def _check_sizes(geometry: Geometry, settings: Settings) -> None:
    """Raise `UnsupportedError` where blocks, chunks and what is read of a group do not go together."""
    groups, by_blocks = geometry.groups, dataclasses.replace(geometry, match_tokens=0).unit_tokens
    if any(groups[i].block_tokens != by_blocks for i in geometry.states):
        refuse("recurrent states every few blocks of attention", "set mamba_block_size to the size of a block")
    if geometry.states and geometry.units_per_chunk > 1 and not settings.save_partial:
        one = "" if geometry.whole_units > 1 else f", or chunk_tokens={geometry.unit_tokens}"
        refuse("save_partial=false with recurrent states", f"set it to true{one}")
    if all(group.local for group in groups):
        refuse("chunked local attention in every layer (at its multiples nothing is read)", "serve it without kvpipe")
    for group in groups:
        if group.local and (group.window_tokens or 0) % geometry.unit_tokens:
            what = f"attention_chunk_size={group.window_tokens} with blocks of {geometry.unit_tokens} tokens"
            refuse(what, "set block_size to a divisor of it")


def _window(spec: KVCacheSpec) -> int | None:
    """Return how many tokens a token reads back, at most; None: all. A full cache may be read in part, and is full."""
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return int(spec.attention_chunk_size)
    return int(spec.sliding_window + spec.extra_retained_tokens) if isinstance(spec, SlidingWindowSpec) else None


def _page_bytes(spec: KVCacheSpec) -> int:
    """Return the bytes of a block; those of a state end before the padding to the size of other layers' pages."""
    size: int = spec.state_content_size_bytes if isinstance(spec, MambaSpec) else spec.page_size_bytes
    return size


def _check_state(layer: str, spec: MambaSpec) -> None:
    """Raise `UnsupportedError` unless vLLM keeps the states of exact boundaries, each in a known block."""
    if spec.mamba_cache_mode != "align":
        refuse(
            f"the recurrent state of layer {layer!r} without prefix caching (mamba_cache_mode="
            f"{spec.mamba_cache_mode!r}: vLLM keeps no state of a boundary)",
            "set enable_prefix_caching=True",
        )
    if spec.mamba_type.name not in _STATES:
        refuse(f"the recurrent state of layer {layer!r} ({spec.mamba_type.name})", f"kvpipe knows {', '.join(_STATES)}")
    if spec.mamba_type.name == "MAMBA2" and len(spec.shapes) > _MAMBA2_TENSORS:
        refuse(f"the recurrent state of layer {layer!r} with use_replayssm=True", "set it to False")
    if spec.num_speculative_blocks and spec.mamba_type.name not in _DRAFTED_STATES:
        what = f"the recurrent state of layer {layer!r} ({spec.mamba_type.name}) with speculative decoding"
        refuse(what, f"unset speculative_config (with it kvpipe knows {', '.join(_DRAFTED_STATES)})")


def hash_tokens(cache: KVCacheConfig, geometry: Geometry) -> int:
    """Return the tokens per block hash.

    Raises `UnsupportedError` unless a unit is a whole number of hashes, and vLLM keeps states where units end: states
    that it keeps within a block are none of a unit's.
    """
    size = cache.hash_block_size or geometry.unit_tokens
    if geometry.states and size < geometry.unit_tokens:
        _check_within(cache, geometry, size)
    if geometry.unit_tokens % size:
        refuse(f"prefix_match_unit={size} with blocks of {geometry.unit_tokens} tokens", "unset it")
    return int(size)


def _check_within(cache: KVCacheConfig, geometry: Geometry, size: int) -> None:
    """Raise `UnsupportedError` where vLLM keeps states within blocks: a hash is of `size` tokens, less than a block."""
    if geometry.states_back:
        why = " and speculative decoding (vLLM then keeps a prompt's last state within a block, none at its end)"
    elif any(_checkpoints(cache.kv_cache_groups[i]) for i in geometry.states):
        why = " by layers that write one from within a step (within a block then, none at its end)"
    else:
        return
    beside = " beside a window" if geometry.windows else ""
    what = f"states every {geometry.unit_tokens} tokens{beside}{why}"
    sizes = sorted({group.block_tokens for group in geometry.groups})
    if size == gcd(*sizes):  # so it is where nobody has set it
        given = f"block hashes of {size} tokens (of KV cache groups with blocks of {', '.join(map(str, sizes))})"
        refuse(
            f"{given} with {what}", "unset speculative_config" if geometry.states_back else "serve it without kvpipe"
        )
    refuse(f"prefix_match_unit={size} with {what}", "unset it")


def _match_tokens(cache: KVCacheConfig, groups: list[Group], states_back: int) -> int:
    """Return the tokens of a hash where vLLM's hits end within blocks, and no state is kept where those end; else 0.

    Not with windows: of those vLLM's fine hits have not been tried.
    """
    states, size = [i for i, group in enumerate(groups) if group.state], cache.hash_block_size
    if not size or size != cache.cache_hit_alignment_tokens or any(group.window_tokens for group in groups):
        return 0
    within = bool(states_back) or any(_checkpoints(cache.kv_cache_groups[i]) for i in states)
    return int(size) if within and any(groups[i].block_tokens > size for i in states) else 0


def _checkpoints(group: KVCacheGroupSpec) -> bool:
    """Whether layers of states write one from within a step, wherever a block hash ends."""
    specs = models.layer_specs(group.kv_cache_spec, group.layer_names).values()
    return any(isinstance(spec, MambaSpec) and spec.num_prefill_checkpoint_blocks > 0 for spec in specs)


def identity(config: VllmConfig, cache: KVCacheConfig, geometry: Geometry) -> dict[str, Any]:
    """Everything that a chunk's bytes depend on beside tokens and weights, as plain data. A difference is a miss."""
    model, cc, parallel = config.model_config, config.cache_config, config.parallel_config
    return {
        "format": FORMAT_VERSION,
        "vllm": compat.installed_version().partition("+")[0],
        "model_config": models.config_digest(model.hf_config),
        "model_dtype": str(model.dtype),
        # rotary factors (LongRoPE) and the temperature of attention (Llama 4) follow from it; -1: fitted after
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
    """Return which of a block's tokens a rank holds."""
    parallel = config.parallel_config
    ranks = parallel.decode_context_parallel_size
    return {"context_parallel": [ranks, parallel.cp_kv_cache_interleave_size]} if ranks > 1 else {}


def _adapter_facts(config: VllmConfig) -> dict[str, Any]:
    """Return what an engine makes of its LoRA adapters: the same files are another model then. Empty: the usual."""
    lora = config.lora_config
    if lora is None:
        return {}
    modules = None if lora.target_modules is None else sorted(lora.target_modules)
    layouts = lora.enable_mixed_moe_lora_format, lora.enable_moe_shared_loras
    dtype = "" if lora.lora_dtype in {config.model_config.dtype, "auto"} else str(lora.lora_dtype)
    facts = [dtype, modules, lora.enable_tower_connector_lora, *layouts]
    return {"adapters": facts} if facts != ["", None, False, False, False] else {}


def _state_facts(cache: KVCacheConfig, geometry: Geometry) -> dict[str, Any]:
    """Return what is in a page of states: tensors one after the other, whose order depends on vLLM's settings, too."""
    specs = [cache.kv_cache_groups[i] for i in sorted(geometry.states)]
    layers = [(n, one) for g in specs for n, one in models.layer_specs(g.kv_cache_spec, g.layer_names).items()]
    facts = [
        [name, str(spec.mamba_type), [list(shape) for shape in spec.shapes], [str(dtype) for dtype in spec.dtypes]]
        for name, spec in layers
        if isinstance(spec, MambaSpec)
    ]
    return {"states": [*facts, is_conv_state_dim_first()]} if facts else {}


def layout_facts(caches: dict[str, torch.Tensor], blocks: int, config: VllmConfig) -> list[Any]:
    """Return what the bytes of a block depend on that is known only where the caches are, as plain data.

    Backends of one specification lay the same KV out differently, on a CPU even by its instruction set.
    """
    facts: list[Any] = [platform.machine(), *sorted({cache.device.type for cache in caches.values()})]
    if "cpu" in facts:
        facts.append(torch.backends.cpu.get_cpu_capability())
        facts.append(torch.cpu._is_amx_tile_supported())  # noqa: SLF001  (there is no other way to ask)
    backends = models.backends(config, caches)
    for name, cache in sorted(caches.items()):
        split = cache.shape[0] // blocks if blocks else 0
        inside = [split, list(cache.shape[1:]), list(cache.stride()[1:]), str(cache.dtype)]
        facts.append([name, backends[name], *inside])
    if context := _context_facts(config):  # vLLM changes it where ranks start, and not for its scheduler
        facts.append(context)
    return facts


def check_hashes(config: VllmConfig) -> None:
    """Raise `UnsupportedError` where another process would give a prefix another hash, or another prefix the same."""
    multimodal = getattr(config.model_config, "multimodal_config", None)
    if (
        multimodal is not None
        and not multimodal.mm_processor_cache_gb
        and not config.cache_config.enable_prefix_caching
    ):
        refuse(  # vLLM numbers images then instead of hashing them, anew in every process
            "a multimodal model with tiers, without prefix caching and with mm_processor_cache_gb=0",
            "switch one of the two on",
        )
    encoder = getattr(config, "ec_transfer_config", None)
    if encoder is not None and encoder.is_ec_consumer:
        refuse("tiers beside another engine's encoder, of whose weights nobody here knows", "unset ec_transfer_config")
    algorithm = str(config.cache_config.prefix_caching_hash_algo)
    if algorithm.startswith("xxhash") and "PYTHONHASHSEED" not in os.environ:
        refuse(
            f"prefix_caching_hash_algo={algorithm!r} with tiers (its seed differs in every process)",
            "use sha256, or set PYTHONHASHSEED to the same value everywhere",
        )


def fingerprint(facts: dict[str, Any]) -> str:
    """Return the namespace of `facts`: 32 hex digits."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def engine_name(engine_id: str) -> str:
    """Return what traces call an engine: vLLM's id of it, a random one by its first part, and which replica it is."""
    head, replica, number = engine_id.partition("_dp")
    with contextlib.suppress(ValueError):  # not of the user's own making
        head = str(uuid.UUID(head))[:8]
    return head + replica + number


def check_load(settings: Settings, geometry: Geometry, stages: int = 1) -> None:
    """Raise `UnsupportedError` where loads are to be sync, and vLLM could not recover from one that fails."""
    if settings.load == "sync" and stages > 1:  # further steps are computed when it fails, and are not taken back
        refuse(f"load='sync' with pipeline_parallel_size={stages}", "set load to 'auto' or 'async'")
    if settings.load == "sync" and geometry.loads_between_steps:
        what = f"a sliding window of {geometry.groups[0].window_tokens} tokens"
        if len(geometry.groups) > 1:
            what = f"{len(geometry.groups)} KV cache groups"
        refuse(f"load='sync' for a model with {what}", "set load to 'auto' or 'async'")
