"""Computes the geometry of an engine, and refuses at start-up the engines that kvpipe cannot serve correctly."""

from __future__ import annotations

import dataclasses
from math import gcd, lcm
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from kvpipe.config.settings import Settings
from kvpipe.connectors.vllm.identity import drafters, models
from kvpipe.connectors.vllm.identity.models import refuse
from kvpipe.protocol.geometry import Geometry, Group, Layer, rounded_up

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec


_SPECS = (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SlidingWindowMLASpec,
    ChunkedLocalAttentionSpec,
    MambaSpec,
)
_STATES = ("GDN_ATTN", "MAMBA1", "MAMBA2", "SHORT_CONV")
"""The names in vLLM of the kinds of recurrent states with which kvpipe is tested."""
_MAMBA2_TENSORS = 2
"""The number of tensors of a complete Mamba 2 state. ReplaySSM has more tensors: an older state and later inputs."""
_SLEEP_BACKEND = "cumem"
"""The sleep backend that kvpipe supports. This backend keeps addresses, and releases only its allocator's memory."""
_MADE_UP_KV = "DecodeBenchConnector"
"""A connector of vLLM for benchmarks, which fills the caches with made-up KV."""
_DRAFTED_STATES = ("GDN_ATTN",)
"""The kinds of recurrent states with which kvpipe is tested under speculative decoding."""


def check_engine(config: VllmConfig) -> None:
    """Raise `UnsupportedError` for engine settings with which kvpipe could give wrong outputs."""
    parallel = config.parallel_config
    if parallel.prefill_context_parallel_size > 1:
        refuse(f"prefill_context_parallel_size={parallel.prefill_context_parallel_size}", "set it to 1")
    if getattr(parallel, "use_ubatching", False):
        refuse("microbatching (enable_dbo or ubatch_size: a layer's hooks run once per microbatch)", "disable it")
    if parallel.world_size > 1 and parallel.distributed_executor_backend == "external_launcher":
        refuse("distributed_executor_backend='external_launcher' with several ranks", "use 'mp' or 'ray'")
    if parallel.pipeline_parallel_size > 1:
        _check_stages(config)
    backend = getattr(config.model_config, "sleep_mode_backend", _SLEEP_BACKEND)
    if getattr(config.model_config, "enable_sleep_mode", False) and backend != _SLEEP_BACKEND:
        refuse(
            f"sleep_mode_backend={backend!r} (kvpipe does not know which memory, streams and threads it takes away)",
            f"set it to {_SLEEP_BACKEND!r}, or enable_sleep_mode to False",
        )
    if getattr(parallel, "enable_fault_tolerance", False):
        refuse(
            "enable_fault_tolerance=True (vLLM continues with blocks that a failed step has not computed, and drops "
            "the step's reports of loads)",
            "set it to False",
        )
    if (transfer := config.kv_transfer_config) is not None and transfer.has_connector(_MADE_UP_KV):
        refuse(f"{_MADE_UP_KV} beside kvpipe (it writes made-up KV, which kvpipe would keep)", "remove it, or kvpipe")
    _check_hits(config)
    drafters.check_drafter(config)
    dcp = parallel.decode_context_parallel_size
    if dcp > 1 and drafters.has_kv(config) and not config.use_v2_model_runner:
        refuse(
            f"speculative method={config.speculative_config.method!r} with decode_context_parallel_size={dcp} and "
            "vLLM's runner V1 (whose drafters write as if one rank held all tokens)",
            "set VLLM_USE_V2_MODEL_RUNNER=1",
        )
    models.check_model(config)


def _check_hits(config: VllmConfig) -> None:
    """Raise `UnsupportedError` if vLLM needs more than KV for a prompt's tokens, because a hit loads only KV."""
    outputs, media = getattr(config, "aux_output_config", None), getattr(config.model_config, "multimodal_config", None)
    if outputs is not None and outputs.enabled:
        refuse(
            "enable_return_routed_experts=True (vLLM has no experts for loaded tokens, and ends the engine)",
            "set it to False",
        )
    if media is not None and media.is_multimodal_pruning_enabled() and config.model_config.uses_mrope:
        refuse(
            f"video_pruning_rate={media.video_pruning_rate} with M-RoPE (positions after a video depend on "
            "the video's embeddings, which are not computed after a hit)",
            "set it to 0",
        )


def _check_stages(config: VllmConfig) -> None:
    """Raise `UnsupportedError` if reports of some pipeline stages would not reach the scheduler."""
    if config.parallel_config.distributed_executor_backend == "ray":
        refuse("pipeline parallelism with distributed_executor_backend='ray' (only the last stage reports)", "use 'mp'")
    if config.speculative_config is None:
        return
    if not config.use_v2_model_runner:  # V1 ends and clears steps on the last stage only
        refuse("pipeline parallelism with speculative decoding by vLLM's runner V1", "unset speculative_config")
    if not config.scheduler_config.async_scheduling:  # without it, the scheduler receives the next step's drafts
        refuse(
            "pipeline parallelism with speculative decoding without asynchronous scheduling",
            "set async_scheduling to True",
        )


def make_geometry(
    cache: KVCacheConfig, settings: Settings, ahead_tokens: int = 0, dcp: int = 1, states_back: int = 0,
    *, branches: bool = False,
) -> Geometry:  # fmt: skip
    """Return the geometry of the engine's cache groups. `ahead_tokens` and `states_back` are as in `Geometry`.

    `branches` says that an engine which keeps states within blocks also keeps the states at which prompts branch. `dcp`
    is the number of ranks among which decode context parallelism divides the tokens of a block. A block of a divided
    group has `dcp` times the tokens, and each rank holds one page of the block.

    Raises:
        UnsupportedError: a group's cache is of a kind that kvpipe does not know.
        ConfigError: the chunk size or the pool size does not fit the engine.
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
            refuse(
                f"KV cache group {i} (its layers have different windows or kinds, or its KV is in host memory)",
                "serve the model without kvpipe",
            )
        sizes = {name: _page_bytes(spec) for name, spec in per_layer.items()}
        if len({placed.get(name, 0) for name in sizes}) > 1:  # the scheduler knows one layer's size for all layers
            sizes |= {name: placed[name] for name in sizes if name in placed}
        layers = tuple(Layer(name, size) for name, size in sizes.items())
        tokens = resolve_dcp_kv_block_size(group.kv_cache_spec, dcp)
        groups.append(Group(layers, tokens, *kinds.pop(), ranks=tokens // group.kv_cache_spec.block_size))
    if not groups:
        refuse("a model without KV cache", "serve the model without kvpipe")
    match_tokens = _match_tokens(cache, groups, states_back)
    chunk_tokens = rounded_up(settings.chunk_tokens, lcm(*(one.block_tokens for one in groups)))
    sizes_max = chunk_tokens, int(settings.pool_bytes_max)
    geometry = Geometry(
        tuple(groups), *sizes_max, ahead_tokens, states_back, match_tokens, branches and match_tokens > 0
    )
    _check_sizes(geometry, settings)
    return geometry


def _check_sizes(geometry: Geometry, settings: Settings) -> None:
    """Raise `UnsupportedError` if the sizes of blocks, chunks and attention windows do not fit together."""
    groups, by_blocks = geometry.groups, dataclasses.replace(geometry, match_tokens=0).unit_tokens
    for i in geometry.states:
        if (size := groups[i].block_tokens) != by_blocks:
            refuse(
                f"mamba_block_size={size}, which is no multiple of every group's block size",
                f"set mamba_block_size to {by_blocks}",
            )
    if geometry.states and geometry.units_per_chunk > 1 and not settings.save_partial:
        one = "" if geometry.whole_units > 1 else f", or chunk_tokens={geometry.unit_tokens}"
        refuse("save_partial=false with recurrent states", f"set it to true{one}")
    if all(group.local for group in groups):
        refuse(
            "chunked local attention in every layer (at a multiple of the chunk size a token reads no earlier KV)",
            "serve the model without kvpipe",
        )
    for group in groups:
        if group.local and (group.window_tokens or 0) % geometry.unit_tokens:
            what = f"attention_chunk_size={group.window_tokens} with blocks of {geometry.unit_tokens} tokens"
            refuse(what, "set block_size to a divisor of it")


def _window(spec: KVCacheSpec) -> int | None:
    """Return the largest number of tokens to which a token attends, or None if the token attends to all earlier tokens.

    A full-attention cache counts as full even if the model reads only a part of the cache.
    """
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return int(spec.attention_chunk_size)
    return int(spec.sliding_window + spec.extra_retained_tokens) if isinstance(spec, SlidingWindowSpec) else None


def _page_bytes(spec: KVCacheSpec) -> int:
    """Return the bytes of a block, without the padding that makes a state as large as other layers' pages."""
    size: int = spec.state_content_size_bytes if isinstance(spec, MambaSpec) else spec.page_size_bytes
    return size


def _check_state(layer: str, spec: MambaSpec) -> None:
    """Raise `UnsupportedError` unless vLLM keeps the states of exact boundaries, each in a block that kvpipe knows."""
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
    """Return the number of tokens per block hash.

    Raises `UnsupportedError` unless a unit is a whole number of hashes and vLLM keeps states at the ends of units. A
    state that vLLM keeps within a block is not at the end of a unit.
    """
    size = cache.hash_block_size or geometry.unit_tokens
    if geometry.states and size < geometry.unit_tokens:
        _check_within(cache, geometry, size)
    if geometry.unit_tokens % size:
        refuse(f"prefix_match_unit={size} with blocks of {geometry.unit_tokens} tokens", "unset it")
    return int(size)


def _check_within(cache: KVCacheConfig, geometry: Geometry, size: int) -> None:
    """Raise `UnsupportedError` if vLLM keeps states within blocks.

    `size` is the number of tokens per hash, which is lower than the number per block.
    """
    if geometry.states_back:
        why = " and speculative decoding (then vLLM keeps a prompt's last state within a block, not at its end)"
    elif any(_checkpoints(cache.kv_cache_groups[i]) for i in geometry.states):
        why = " by layers that write a state from within a step (then vLLM keeps it within a block, not at its end)"
    else:
        return
    beside = " beside a sliding window" if geometry.windows else ""
    what = f"recurrent states every {geometry.unit_tokens} tokens{beside}{why}"
    sizes = sorted({group.block_tokens for group in geometry.groups})
    if size == gcd(*sizes):  # vLLM's default
        given = f"block hashes of {size} tokens (of KV cache groups with blocks of {', '.join(map(str, sizes))})"
        refuse(
            f"{given} with {what}",
            "unset speculative_config" if geometry.states_back else "serve the model without kvpipe",
        )
    refuse(f"prefix_match_unit={size} with {what}", "unset it")


def _match_tokens(cache: KVCacheConfig, groups: list[Group], states_back: int) -> int:
    """Return the tokens per hash if hits end within blocks and vLLM keeps no state at a block's end, or else 0.

    The result is also 0 for engines with sliding windows, because hits within their blocks are not tested.
    """
    states, size = [i for i, group in enumerate(groups) if group.state], cache.hash_block_size
    if not size or size != cache.cache_hit_alignment_tokens or any(group.window_tokens for group in groups):
        return 0
    within = bool(states_back) or any(_checkpoints(cache.kv_cache_groups[i]) for i in states)
    return int(size) if within and any(groups[i].block_tokens > size for i in states) else 0


def _checkpoints(group: KVCacheGroupSpec) -> bool:
    """Whether layers with recurrent states write a state from within a step, wherever a block hash ends."""
    specs = models.layer_specs(group.kv_cache_spec, group.layer_names).values()
    return any(isinstance(spec, MambaSpec) and spec.num_prefill_checkpoint_blocks > 0 for spec in specs)


def check_load(settings: Settings, geometry: Geometry, stages: int = 1) -> None:
    """Raise `UnsupportedError` if loads are configured to be sync and vLLM could not recover from a failed load."""
    if settings.load == "sync" and stages > 1:  # vLLM computes further steps before it knows of a failed load
        refuse(f"load='sync' with pipeline_parallel_size={stages}", "set load to 'auto' or 'async'")
    if settings.load == "sync" and geometry.loads_between_steps:
        what = f"a sliding window of {geometry.groups[0].window_tokens} tokens"
        if len(geometry.groups) > 1:
            what = f"{len(geometry.groups)} KV cache groups"
        refuse(f"load='sync' for a model with {what}", "set load to 'auto' or 'async'")
