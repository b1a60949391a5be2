"""A simulated processor. vLLM decides as on a CPU with AMX, with AVX-512 but without AMX, or with neither.

`processor(kind)` is the context in which torch reports the features of this processor. `plan` runs an engine's start
without kernels: configuration, backends, block sizes and kvpipe's geometry. `complete(kind)` is for engines that
compute. `complete` replaces the kernels that this machine lacks by kernels that run on every processor.
"""

from __future__ import annotations

import functools
import importlib.util
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple
from unittest.mock import patch

import torch

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

Processor = Literal["amx", "avx512", "plain"]

_AVX512: Final = frozenset(
    f"avx512_{name}" for name in ("f", "cd", "dq", "bw", "vl", "ifma", "vbmi", "vbmi2", "bitalg", "vnni", "bf16")
)
_FEATURES: Final[dict[Processor, frozenset[str]]] = {
    "amx": _AVX512 | {"amx_tile", "amx_bf16", "amx_int8"},
    "avx512": _AVX512,
    "plain": frozenset(),
}
PROCESSORS: Final[tuple[Processor, ...]] = tuple(_FEATURES)
MLA_BLOCK: Final = 16
"""The number of tokens of the only block size that the kernel of latent attention accepts on a CPU without AMX."""


def _features() -> frozenset[str]:
    """Return the AMX and AVX-512 instructions that torch reports to this process."""
    told = torch.cpu.get_capabilities()
    return frozenset(name for name, here in told.items() if here is True and name.startswith(("amx_", "avx512_")))


def runs_here(kind: Processor) -> bool:
    """Whether this machine's processor has every instruction of `kind`."""
    return _features() >= _FEATURES[kind]


@contextmanager
def _told(features: frozenset[str]) -> Iterator[None]:
    """Make torch report exactly these AMX and AVX-512 instructions."""
    import vllm._custom_ops  # noqa: F401  (the kernels are those of this machine, and are loaded once)
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention import selector

    told = dict(torch.cpu.get_capabilities())
    told |= {name: False for name in told if name.startswith(("amx_", "avx512_"))} | dict.fromkeys(features, True)
    level = "AVX512" if "avx512_f" in features else "AVX2"
    selector._cached_get_attn_backend.cache_clear()  # noqa: SLF001  (it keeps the backends of another processor)
    try:
        with (
            patch.object(torch.cpu, "get_capabilities", lambda: MappingProxyType(told)),
            patch.object(torch.backends.cpu, "get_cpu_capability", lambda: level),
            patch.object(
                CpuPlatform, "import_kernels", lambda *_: None
            ),  # loading a second library of kernels would crash the process
        ):
            yield
    finally:
        selector._cached_get_attn_backend.cache_clear()  # noqa: SLF001


@contextmanager
def processor(kind: Processor) -> Iterator[None]:
    """Make vLLM and kvpipe treat this machine's processor as a processor of `kind`."""
    from vllm.platforms.cpu import CpuPlatform

    with (
        _told(_FEATURES[kind]),
        # for the case that `lent` has replaced the function
        patch.object(CpuPlatform, "check_and_update_config", _decides()),
    ):
        yield


@functools.cache
def _decides() -> classmethod[Any, Any, None]:
    """Return the function with which vLLM's own platform decides, without any replacement."""
    from vllm.platforms.cpu import CpuPlatform

    return CpuPlatform.__dict__["check_and_update_config"]  # type: ignore[no-any-return]


@contextmanager
def lent(kind: Processor) -> Iterator[None]:
    """Make vLLM's platform decide as on `kind`, while layers compute with this machine's kernels without AMX.

    Without AMX, the kernel of latent attention accepts only one block size, so engines with latent attention get this
    block size.
    """
    from vllm.platforms.cpu import CpuPlatform

    _decides()  # keeps vLLM's own function before it is replaced

    def decided(vllm_config: VllmConfig) -> None:
        with processor(kind):
            CpuPlatform.check_and_update_config(vllm_config)
        model = vllm_config.model_config
        if model is not None and model.use_mla and model.hf_config.model_type != "deepseek_v4":
            vllm_config.cache_config.block_size = MLA_BLOCK

    with (
        _told(frozenset(name for name in _features() if not name.startswith("amx_"))),
        patch.object(CpuPlatform, "check_and_update_config", staticmethod(decided)),
    ):
        yield


@contextmanager
def complete(kind: Processor | None) -> Iterator[None]:
    """Make engines run as on `kind`.

    If this machine can run the kernels of `kind`, engines use these kernels, otherwise the kernels of `lent`.

    An engine with lent kernels still makes the platform's decisions: block size, prefix caching, types of states. If
    `kind` is None, engines run as on this machine's own processor.
    """
    with nullcontext() if kind is None else processor(kind) if runs_here(kind) else lent(kind):
        yield


# ---- up to an engine's start -------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """The decisions of vLLM and kvpipe before an engine's first step."""

    backends: tuple[str, ...]
    block_tokens: int
    unit_tokens: int | None
    """The number of tokens in a unit of kvpipe; None without kvpipe."""
    caches_prefixes: bool
    caches: tuple[tuple[str, int, int], ...]
    """For each kind of cache: (kind, tokens per block, bytes per block)."""


def plan(model: Path | str, kvpipe: dict[str, Any] | None, **options: Any) -> Plan:  # noqa: ANN401
    """Return what an engine of `model` would decide on the present processor. Nothing is allocated or computed.

    Raises the errors that the engine's start would raise, for example if there is no common block size, or if a chunk
    does not fit the unit.
    """
    from vllm.engine.arg_utils import EngineArgs

    from kvpipe.connectors.vllm.tiny.engine import models_inspected_here, register_kernels_once

    register_kernels_once()
    transfer: Any = None if kvpipe is None else {"kv_connector": "KVPipeConnector", "kv_role": "kv_both"}
    arguments = EngineArgs(
        str(model), skip_tokenizer_init=True, enforce_eager=True, kv_transfer_config=transfer, **options
    )
    with models_inspected_here(), _groups_of_ranks():
        config = arguments.create_engine_config()
        config.cache_config.kv_cache_layout = "LBHNC"
        build(config)
        return _decided(config, kvpipe)


@contextmanager
def _groups_of_ranks() -> Iterator[None]:
    """Release the groups of ranks that a plan creates, unless an engine in this process has created them before."""
    from vllm.distributed import parallel_state

    before = parallel_state.model_parallel_is_initialized()
    try:
        yield
    finally:
        if not before:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


def _planning() -> Any:  # noqa: ANN401  (a module)
    """Return the module that forms cache groups. In vLLM 0.33 the code is in a file of its own."""
    places = (f"vllm.v1.core.kv_cache_{name}" for name in ("planning", "utils"))
    return importlib.import_module(next(place for place in places if importlib.util.find_spec(place)))


def _decided(config: VllmConfig, kvpipe: dict[str, Any] | None) -> Plan:
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvpipe.config.settings import Settings
    from kvpipe.connectors.vllm import support

    with set_current_vllm_config(config):
        current_platform.update_block_size_for_backend(config)
        backends, specs = _caches(config)
        groups = _planning().get_kv_cache_groups(config, specs)
    unit = None
    if kvpipe is not None:
        cache = KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=groups)
        settings = {"pool_bytes_max": "1TiB"} | {k: v for k, v in kvpipe.items() if k == "chunk_tokens"}
        unit = support.make_geometry(cache, Settings.model_validate(settings)).unit_tokens
    kinds = {(type(spec).__name__, spec.block_size, spec.page_size_bytes) for spec in specs.values()}
    caching = bool(config.cache_config.enable_prefix_caching)
    return Plan(tuple(sorted(backends)), config.cache_config.block_size, unit, caching, tuple(sorted(kinds)))


def build(config: VllmConfig) -> None:
    """Build the model of `config` without memory for its weights.

    When this function returns, the configuration contains the model's layers.
    """
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_current_vllm_config(config):
        if not parallel_state.model_parallel_is_initialized():
            with tempfile.NamedTemporaryFile(delete=False) as meeting:
                parallel_state.init_distributed_environment(1, 0, f"file://{meeting.name}.met", 0, "gloo")
            parallel_state.ensure_model_parallel_initialized(1, 1)
        with (
            set_default_torch_dtype(config.model_config.dtype),
            torch.device("meta"),
            patch.dict(rotary_embedding._ROPE_DICT, clear=True),  # noqa: SLF001  (models share these tensors)
        ):
            initialize_model(config)


def _caches(config: VllmConfig) -> tuple[set[str], dict[str, KVCacheSpec]]:
    """Return the built layers' backends and caches.

    Raises:
        ValueError: no kernel accepts a block.

    """
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.kv_cache_interface import AttentionSpec
    from vllm.v1.worker.utils import select_common_block_size

    backends, specs = set(), {}
    for name, layer in config.compilation_config.static_forward_context.items():
        if not isinstance(layer, AttentionLayerBase) or (spec := layer.get_kv_cache_spec(config)) is None:
            continue
        backend = layer.get_attn_backend()
        if isinstance(spec, AttentionSpec):
            select_common_block_size(spec.block_size, [backend], [spec])
        backends.add(backend.get_name())
        specs[name] = spec
    return backends, specs
