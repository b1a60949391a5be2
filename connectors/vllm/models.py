"""Models and engines whose KV cannot be reused by prefixes: kvpipe refuses them, as vLLM does.

VLLM refuses by switching its own prefix cache off, in several places; each is an entry of `STATEMENTS` here. The switch
itself is no sign of that: users switch the prefix cache off, too, and kvpipe serves them. `tests/contract/places.py`
finds the places in vLLM's sources, so that one which a release adds fails a test until it has an entry.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, NoReturn

from vllm import envs
from vllm.platforms import CpuArchEnum, current_platform
from vllm.v1.kv_cache_interface import KVCacheSpec, UniformTypeKVCacheSpecs

from kvpipe.connectors.vllm.media import NOT_OF_BYTES
from kvpipe.errors import UnsupportedError

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

SERVE_WITHOUT: Final = "serve it without a KV connector"


def refuse(what: str, remedy: str) -> NoReturn:
    """Raise `UnsupportedError`: one sentence that names what, and the remedy."""
    msg = f"kvpipe: {what} is not supported; {remedy}"
    raise UnsupportedError(msg)


def _uncut(model: ModelConfig) -> str:
    """Name what `ModelConfig.is_prefix_caching_supported` denies, however the user has set enable_prefix_caching."""
    if model.is_prefix_caching_supported:
        return ""
    pooler = model.pooler_config
    if pooler is None:
        return f"a model whose attn_type is {model.attn_type!r}"
    if model.attn_type != "decoder":
        return f"pooling by a model whose attn_type is {model.attn_type!r}"
    return (
        f"pooling with seq_pooling_type={pooler.seq_pooling_type!r} and tok_pooling_type={pooler.tok_pooling_type!r} "
        "(it needs all tokens of a prompt in one step)"
    )


def _unfit(_: VllmConfig) -> str:
    riscv = current_platform.is_cpu() and current_platform.get_cpu_architecture() == CpuArchEnum.RISCV
    return "vLLM's CPU backend on RISC-V (a prefill has no context there)" if riscv else ""


STATEMENTS: Final[dict[str, Callable[[VllmConfig], str]]] = {
    "encoder_decoder": lambda config: (
        "an encoder-decoder model (its cross-attention's KV depends on the encoder's input, which no block hash "
        "covers; those of a decoder such as Qwen2-Audio, whose prompt has the input, do)"
        if config.model_config.is_encoder_decoder
        else ""
    ),
    "is_prefix_caching_supported": lambda config: _uncut(config.model_config),
    "rswa": lambda config: "reference sliding window attention (R-SWA)" if config.model_config.rswa_window else "",
    "diffusion": lambda config: "a diffusion language model" if config.model_config.is_diffusion else "",
    "mm_encoder_only": lambda config: (
        "an engine that runs only the encoder of a model" if config.is_mm_encoder_only else ""
    ),
    "riscv": _unfit,
}
"""By place in vLLM: a function from the engine's configuration to what it refuses there; "": it refuses nothing."""

NON_CAUSAL: Final = "non_causal"
"""What follows from the specification of a layer's cache: its tokens attend to later ones of the same prompt."""

VARIANT_BACKENDS: Final = frozenset({"FLASHINFER", "TRITON_MLA"})
"""Attention backends after whose hits vLLM's batch invariance does not hold."""


def check_model(config: VllmConfig) -> None:
    """Raise `UnsupportedError` where, by its configuration, the engine's KV cannot be reused by prefixes."""
    if config.model_config is None:
        return
    for statement in STATEMENTS.values():
        if what := statement(config):
            refuse(what, SERVE_WITHOUT)


def config_digest(config: PretrainedConfig) -> str:
    """Return a digest of a model's configuration without the keys of `NOT_OF_BYTES`."""
    facts: dict[str, Any] = json.loads(config.to_json_string())
    known = {key: value for key, value in facts.items() if key not in NOT_OF_BYTES}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def check_specs(cache: KVCacheConfig) -> None:
    """Raise `UnsupportedError` for layers in which a token's KV depends on later tokens of its prompt."""
    for group in cache.kv_cache_groups:
        if any(
            getattr(spec, NON_CAUSAL, False) for spec in layer_specs(group.kv_cache_spec, group.layer_names).values()
        ):
            refuse(f"non-causal attention (prefix-LM; layer {group.layer_names[0]!r})", SERVE_WITHOUT)


def check_backends(backends: Iterable[str]) -> None:
    """Raise `UnsupportedError` for attention backends with which vLLM promises batch invariance without hits only."""
    unfit = sorted(VARIANT_BACKENDS.intersection(backends)) if envs.VLLM_BATCH_INVARIANT else ()
    if unfit:
        refuse(f"VLLM_BATCH_INVARIANT=1 with the attention backend {unfit[0]}", "choose another attention_backend")


def backends(config: VllmConfig, layers: Iterable[str]) -> dict[str, str]:
    """Return the name of each layer's attention backend, or nothing where there is none."""
    made = config.compilation_config.static_forward_context
    found = {name: getattr(made.get(name), "attn_backend", None) for name in layers}
    return {name: backend.get_name() if backend is not None else "" for name, backend in found.items()}


def layer_specs(spec: KVCacheSpec, names: list[str]) -> dict[str, KVCacheSpec]:
    """Return the specification of each layer of a group."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return {name: spec.kv_cache_specs[name] for name in names}
    return dict.fromkeys(names, spec)
