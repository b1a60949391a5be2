"""What of vLLM's world kvpipe can serve correctly: geometry and identity of an engine, and refusals at start-up."""

from __future__ import annotations

import contextlib
import hashlib
import json
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvpipe.config import Settings
from kvpipe.errors import UnsupportedError
from kvpipe.geometry import Geometry, Group, Layer

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

FORMAT_VERSION = 1
"""Of the bytes in a slot. A change makes every older chunk a miss."""

_SPECS = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec)
_DRAFTERS = ("ngram", "ngram_gpu", "suffix")
_WEIGHT_SAMPLES = 16
_SAMPLE_BYTES = 65_536


def _refuse(what: str, remedy: str) -> None:
    msg = f"kvpipe: {what} is not supported; {remedy}"
    raise UnsupportedError(msg)


def check_engine(config: VllmConfig) -> None:
    """Raise `UnsupportedError` for engine settings under which kvpipe could not be right."""
    parallel = config.parallel_config
    for name, remedy in (
        ("pipeline_parallel_size", "use tensor parallelism instead"),
        ("decode_context_parallel_size", "set it to 1"),
        ("prefill_context_parallel_size", "set it to 1"),
    ):
        size = getattr(parallel, name, 1)
        if size > 1:
            _refuse(f"{name}={size}", remedy)
    if getattr(parallel, "use_ubatching", False):
        _refuse("microbatching (enable_dbo or ubatch_size: a layer's hooks run once per microbatch)", "switch it off")
    if parallel.world_size > 1 and parallel.distributed_executor_backend == "external_launcher":
        _refuse("distributed_executor_backend='external_launcher' with several ranks", "use 'mp' or 'ray'")
    if getattr(config.model_config, "enable_sleep_mode", False):
        _refuse("enable_sleep_mode=True (it remaps the KV cache under registered addresses)", "set it to False")
    drafts = config.speculative_config
    if drafts is not None and drafts.method not in _DRAFTERS:
        _refuse(
            f"speculative method={drafts.method!r} (its draft layers' KV depends on a token beyond the prefix)",
            f"use one of {', '.join(_DRAFTERS)}",
        )
    if config.model_config is not None and config.model_config.is_encoder_decoder:
        _refuse("an encoder-decoder model", "serve it without a KV connector")


def make_geometry(cache: KVCacheConfig, settings: Settings) -> Geometry:
    """Describe the engine's cache groups.

    Raises:
        UnsupportedError: a group's cache is of a kind that kvpipe does not know.
        ConfigError: chunk or pool size do not fit the engine.

    """
    groups = []
    for i, group in enumerate(cache.kv_cache_groups):
        per_layer = _layer_specs(group.kv_cache_spec, group.layer_names)
        windows = set()
        for name, spec in per_layer.items():
            if type(spec) not in _SPECS or not spec.prefix_cacheable or not group.enable_kv_transfer:
                _refuse(
                    f"the KV cache of layer {name!r} ({type(spec).__name__}, group {i})",
                    "kvpipe knows full, sliding-window and MLA attention",
                )
            windows.add(spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None)
        if len(windows) != 1 or group.host_resident or group.is_eagle_group:
            _refuse(f"KV cache group {i} (mixed windows, host resident or of a drafter)", "serve it without kvpipe")
        layers = tuple(Layer(name, spec.page_size_bytes) for name, spec in per_layer.items())
        groups.append(Group(layers, group.kv_cache_spec.block_size, windows.pop()))
    if not groups:
        _refuse("a model without KV cache", "serve it without kvpipe")
    return Geometry(tuple(groups), settings.chunk_tokens, int(settings.pool_bytes_max))


def _layer_specs(spec: KVCacheSpec, names: list[str]) -> dict[str, KVCacheSpec]:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return {name: spec.kv_cache_specs[name] for name in names}
    return dict.fromkeys(names, spec)


def hash_tokens(cache: KVCacheConfig, geometry: Geometry) -> int:
    """Return the tokens per block hash. Raises `UnsupportedError` unless a unit is a whole number of hashes."""
    size = cache.hash_block_size or geometry.unit_tokens
    if geometry.unit_tokens % size:
        _refuse(f"hash_block_size={size} with blocks of {geometry.unit_tokens} tokens", "unset prefix_match_unit")
    return int(size)


def identity(config: VllmConfig, cache: KVCacheConfig, geometry: Geometry) -> dict[str, Any]:
    """Everything that a chunk's bytes depend on beside its token prefix, as plain data. A difference is a miss."""
    model, cc, parallel = config.model_config, config.cache_config, config.parallel_config
    return {
        "format": FORMAT_VERSION,
        "weights": weights_digest(str(model.model), model.revision, str(config.load_config.load_format), model.seed),
        "model_config": hashlib.sha256(model.hf_config.to_json_string().encode()).hexdigest(),
        "model_dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "kv_cache_dtype": str(cc.cache_dtype),
        "kv_cache_layout": str(cache.kv_cache_layout),
        "prefix_hash": str(cc.prefix_caching_hash_algo),
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "chunk_tokens": geometry.chunk_tokens,
        "groups": [
            [g.block_tokens, g.window_tokens or 0, [[layer.name, layer.page_bytes] for layer in g.layers]]
            for g in geometry.groups
        ],
    }


def fingerprint(facts: dict[str, Any]) -> str:
    """Return the namespace of `facts`: 32 hex digits."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def weights_digest(model: str, revision: str | None, load_format: str, seed: int | None) -> str:
    """Identify the weights without reading them all: names, sizes and samples of every weight file.

    A model that is not a local folder is identified by its name and revision; dummy weights by their seed.
    """
    digest = hashlib.sha256(json.dumps([model if not Path(model).is_dir() else "", revision, load_format]).encode())
    if "dummy" in load_format:
        digest.update(str(seed).encode())
        return digest.hexdigest()[:32]
    folder = Path(model)
    files = sorted(p for p in folder.glob("*") if p.suffix in {".safetensors", ".bin", ".pt", ".gguf"})
    for path in files if folder.is_dir() else ():
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        with path.open("rb") as f:
            for i in range(_WEIGHT_SAMPLES):
                f.seek(max(0, size - _SAMPLE_BYTES) * i // (_WEIGHT_SAMPLES - 1))
                digest.update(f.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def engine_name(engine_id: str) -> str:
    """Return what traces call an engine: vLLM's id of it, a random one by its first part, and which replica it is."""
    head, replica, number = engine_id.partition("_dp")
    with contextlib.suppress(ValueError):  # not of the user's own making
        head = str(uuid.UUID(head))[:8]
    return head + replica + number


def refuse_sync_with_groups(groups: int) -> None:
    """VLLM cannot be told of a failed sync load of a model with several cache groups: it would stop."""
    _refuse(f"load='sync' for a model with {groups} KV cache groups", "set load to 'auto' or 'async'")
