"""Tests of the settings, variables and results of an engine's computation that are part of its chunks' names."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from vllm import envs
from vllm.config import CacheConfig, KVEventsConfig, LoRAConfig
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils

from kvpipe.config.settings import load_settings
from kvpipe.connectors.vllm.doctor_facts import first_hash
from kvpipe.connectors.vllm.identity import numerics
from kvpipe.connectors.vllm.identity.computed import Computed, settings
from kvpipe.connectors.vllm.identity.spaces import Spaces
from kvpipe.connectors.vllm.metadata import Introduction
from kvpipe.connectors.vllm.support import make_geometry
from kvpipe.connectors.vllm.trial.shapes import SHAPES, make_configs

CPU = torch.device("cpu")


def _config() -> Any:
    return copy.deepcopy(make_configs(SHAPES["sync"])[0])


def _of(change: Callable[[Any], object]) -> Computed:
    config = _config()
    change(config)
    return settings(config)


@pytest.mark.parametrize(
    "change",
    [
        lambda config: setattr(config, "additional_config", {"fast": 1}),
        lambda config: setattr(config.attention_config, "flash_attn_version", 2),
        lambda config: setattr(config.compilation_config, "backend", "eager"),
        lambda config: setattr(config.kernel_config.ir_op_priority, "rms_norm", ["vllm_c"]),
        lambda config: setattr(config.model_config, "model_impl", "transformers"),
        lambda config: setattr(config.cache_config, "kv_sharing_fast_prefill", True),
    ],
    ids=["additional_config", "attention", "compilation", "kernels", "model_impl", "cache"],
)
def test_a_field_counts_when_it_changes_what_is_computed(change: Callable[[Any], object]) -> None:
    """This includes a field of a nested configuration."""
    assert _of(change).alone != settings(_config()).alone


@pytest.mark.parametrize(
    "change",
    [
        lambda config: setattr(config, "instance_id", "another"),
        lambda config: setattr(config.model_config, "served_model_name", "another"),
        lambda config: setattr(config.scheduler_config, "max_num_seqs", 99),
        lambda config: setattr(config.parallel_config, "data_parallel_master_port", 4711),
        lambda config: setattr(config.compilation_config, "cudagraph_capture_sizes", [1, 2]),
        lambda config: setattr(config, "kv_events_config", KVEventsConfig()),
        lambda config: setattr(config, "lora_config", LoRAConfig()),
    ],
    ids=["instance", "name", "batch", "port", "graphs", "events", "lora"],
)
def test_a_field_does_not_count_when_it_is_irrelevant(change: Callable[[Any], object]) -> None:
    """Engines that differ in such fields share chunks."""
    assert _of(change) == settings(_config())


def test_sums_over_ranks_are_part_of_the_namespace_of_one_layout() -> None:
    """Settings of the sums over ranks are left out of the common namespace.

    Engines with another number of ranks always add up in another order.
    """
    changed = _of(lambda config: setattr(config.compilation_config.pass_config, "fuse_allreduce_rms", True))
    plain = settings(_config())
    assert changed.alone == plain.alone
    assert changed.of_ranks != plain.of_ranks


def test_a_field_counts_when_it_is_unknown() -> None:
    """A newer vLLM may have fields that were not reviewed. Such a field is part of the namespace."""
    made = dataclasses.make_dataclass("Newer", [("new", int, 1)], bases=(CacheConfig,))

    def change(config: Any) -> None:
        config.cache_config.__class__ = made
        config.cache_config.new = 2

    assert {name for name in _of(change).alone if name not in settings(_config()).alone} == {"cache_config.new"}


def test_a_variable_counts_when_it_is_unknown_and_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable's value may be a secret, so only its digest is kept. An unset variable does not count."""
    monkeypatch.setitem(envs.environment_variables, "VLLM_NEW", lambda: "a default")
    assert "VLLM_NEW" not in settings(_config()).alone
    monkeypatch.setenv("VLLM_NEW", "secret")
    found = settings(_config()).alone["VLLM_NEW"]
    assert len(found) == 64
    assert "secret" not in found


def test_variables_of_libraries_count() -> None:
    """Variables of precision, instruction set and kernels count. Variables of logs, caches and threads do not."""
    counts = {
        "ONEDNN_DEFAULT_FPMATH_MODE": "BF16", "DNNL_MAX_CPU_ISA": "AVX2", "NVIDIA_TF32_OVERRIDE": "0",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1", "MKL_CBWR": "COMPATIBLE", "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "ATEN_CPU_CAPABILITY": "avx2", "TORCHINDUCTOR_MAX_AUTOTUNE": "1", "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    }  # fmt: skip
    other = {
        "ONEDNN_VERBOSE": "1", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "9", "MKL_NUM_THREADS": "3", "MKL_DYNAMIC": "TRUE",
        "TORCHINDUCTOR_CACHE_DIR": "/a", "TRITON_CACHE_DIR": "/b", "TORCHINDUCTOR_COMPILE_THREADS": "1", "HOME": "/c",
        "NVIDIA_VISIBLE_DEVICES": "all", "TORCH_HOME": "/d", "ONEDNN_MAX_CPU_ISA": "",
    }  # fmt: skip
    assert numerics.variables(other | counts) == counts


@pytest.fixture
def _precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("_precision")
def test_switches_of_torch_count() -> None:
    """The switches are read when the facts are computed, because an engine sets some of them while it starts."""
    before = numerics.switches()
    assert not [name for name, value in before.items() if value.endswith("Error")]
    torch.set_float32_matmul_precision("medium")
    assert numerics.switches() != before


def test_results_are_equal_for_any_number_of_threads() -> None:
    """Engines with more ranks have fewer threads per rank, and share chunks."""
    before, found = torch.get_num_threads(), set()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.add(numerics.measured(CPU, [torch.bfloat16]))
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1


@pytest.mark.parametrize("name", ["linear", "matmul", "softmax", "norm", "silu", "tiny"])
def test_one_other_bit_of_a_result_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each operation, a changed bit in a result changes the fact."""
    usual, operations = numerics.measured(CPU, [torch.bfloat16]), numerics._operations

    def changed(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        for one, compute in operations(device, dtype):
            found = compute()
            if one == name and dtype == torch.bfloat16:
                found.view(-1).view(torch.uint8)[5] ^= 1
            yield one, functools.partial(torch.clone, found)

    monkeypatch.setattr(numerics, "_operations", changed)
    assert numerics.measured(CPU, [torch.bfloat16]) != usual


def test_an_operation_that_fails_counts_by_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine starts. The engine shares chunks with engines in which the operation fails with the same error."""

    def fails(*_: object, error: type[Exception]) -> torch.Tensor:
        raise error(str(object()))

    found = [numerics.measured(CPU, [])]
    for error in (RuntimeError, RuntimeError, ValueError):
        monkeypatch.setattr(numerics, "_linear", functools.partial(fails, error=error))
        found.append(numerics.measured(CPU, []))
    assert found[1] == found[2]
    assert len({*found}) == 3


def _spaces(*how: str, memory: str = "m") -> str:
    """Return the namespace of an engine with one rank per entry of `how`. Each entry is the rank's result."""
    config, cache = copy.deepcopy(make_configs(SHAPES["sync"]))
    config.parallel_config.world_size = len(how)
    geometry = make_geometry(cache, load_settings())
    spaces = Spaces(config, cache, geometry, tiers=True, bound=lambda *_: None)
    assert spaces.also("weights") == ""  # no rank has reported its layout yet
    spaces.agree([Introduction(i, "digest", "m=s", 8, common="c", numerics=one) for i, one in enumerate(how)])
    return spaces.space(":".join(f"{memory}{i}=s" for i in range(len(how))))


def test_ranks_with_equal_results_share_a_namespace() -> None:
    """If all ranks have equal results, an engine shares chunks with engines of any number of ranks."""
    assert _spaces("a") == _spaces("a") == _spaces("a", "a")
    assert _spaces("a") != _spaces("b")


def test_ranks_that_differ_share_with_their_own_layout_only() -> None:
    """If ranks compute different results, the namespace has the weights and the results of each rank."""
    assert len({_spaces("a"), _spaces("a", "b"), _spaces("b", "a"), _spaces("b")}) == 4
    assert _spaces("a", "b") != _spaces("a", "b", memory="other")
    assert _spaces("a", "a") == _spaces("a", "a", memory="other")


def test_the_first_hash_is_seeded_for_every_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hash chains begin with this hash.

    Its seed is an environment variable, so this variable decides which engines share, also with sha256.
    """
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"", raising=False)
    monkeypatch.setattr(kv_cache_utils, "_NONE_HASH_SEED", None)
    for algorithm in ("sha256", "xxhash"):
        found, seeds = set(), [None, "", "0", "11"][algorithm == "xxhash" :]
        for seed in seeds:
            monkeypatch.delenv("PYTHONHASHSEED", raising=False)
            if seed is not None:
                monkeypatch.setenv("PYTHONHASHSEED", seed)
            kv_cache_utils.init_none_hash(get_hash_fn_by_name(algorithm))
            digest = hashlib.sha256(kv_cache_utils.NONE_HASH).hexdigest()[:32]
            assert first_hash(algorithm) == f"{algorithm} {digest}"
            found.add(digest)
        assert len(found) == len(seeds)
