"""Refuses models and engines whose KV cannot be reused by prefixes. vLLM does not cache the prefixes of such models.

For these models, vLLM switches its own prefix cache off in several places, and each place is an entry of `STATEMENTS`.
kvpipe does not check the switch itself, because users may switch the prefix cache off too, and kvpipe serves such
engines. `tests/contract/places.py` finds these places in vLLM's sources. If a release adds a place, a test fails until
the place has an entry.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, NoReturn

from vllm import envs
from vllm.platforms import CpuArchEnum, current_platform
from vllm.v1.kv_cache_interface import KVCacheSpec, UniformTypeKVCacheSpecs

from kvpipe.connectors.vllm.identity.media import NOT_OF_BYTES
from kvpipe.errors import UnsupportedError

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

SERVE_WITHOUT: Final = "serve it without a KV connector"


def refuse(what: str, remedy: str) -> NoReturn:
    """Raise `UnsupportedError` with a sentence that names the unsupported thing `what` and the remedy."""
    msg = f"kvpipe: {what} is not supported; {remedy}"
    raise UnsupportedError(msg)


def _uncut(model: ModelConfig) -> str:
    """Return why `ModelConfig.is_prefix_caching_supported` is false, or "" if it is true.

    The property does not depend on the user's setting of enable_prefix_caching.
    """
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
        "covers; decoders such as Qwen2-Audio work, because their prompt contains the input)"
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
"""By place in vLLM's sources, a function from an engine's configuration to the refused feature, or to ""."""

NON_CAUSAL: Final = "non_causal"
"""The attribute of a layer's cache specification that is true if tokens attend to later tokens of the same prompt."""

VARIANT_BACKENDS: Final = frozenset({"FLASHINFER", "TRITON_MLA"})
"""Attention backends with which vLLM's batch invariance does not hold after a hit."""


def check_model(config: VllmConfig) -> None:
    """Raise `UnsupportedError` if the engine's configuration shows that its KV cannot be reused by prefixes."""
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
    """Raise `UnsupportedError` for a backend of `VARIANT_BACKENDS` if vLLM's batch invariance is switched on."""
    unfit = sorted(VARIANT_BACKENDS.intersection(backends)) if envs.VLLM_BATCH_INVARIANT else ()
    if unfit:
        refuse(f"VLLM_BATCH_INVARIANT=1 with the attention backend {unfit[0]}", "choose another attention_backend")


def backends(config: VllmConfig, layers: Iterable[str]) -> dict[str, str]:
    """Return the name of each layer's attention backend, or "" for a layer without a backend."""
    made = config.compilation_config.static_forward_context
    found = {name: getattr(made.get(name), "attn_backend", None) for name in layers}
    return {name: backend.get_name() if backend is not None else "" for name, backend in found.items()}


def layer_specs(spec: KVCacheSpec, names: list[str]) -> dict[str, KVCacheSpec]:
    """Return the specification of each layer of a group."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return {name: spec.kv_cache_specs[name] for name in names}
    return dict.fromkeys(names, spec)
