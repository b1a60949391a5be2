"""Tests of the layers of vLLM that call the connector's hooks, and of the order of these calls.

`connectors/vllm/hooks.py` is compared with the sources.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from vllm.model_executor.layers.attention import Attention, MLAAttention, StaticSinkAttention
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.models.deepseek_v32.attention import DeepseekV32Attention
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
)

from kvpipe.config.settings import load_settings
from kvpipe.connectors.vllm.hooks import fences_late, is_hooked
from kvpipe.connectors.vllm.support import make_geometry
from kvpipe.errors import UnsupportedError
from tests.contract.test_scheduler_versions import FETCH_SECONDS_MAX, other_releases

HOOK = "maybe_transfer_kv_layer"
CALLED_BY = {
    "model_executor/layers/attention/attention.py": ("Attention", "unified_attention_with_output"),
    "model_executor/layers/attention/mla_attention.py": ("MLAAttention", "unified_mla_attention_with_output"),
}
"""For each file: the class whose `forward` calls an operator with hooks, and the name of the operator."""


def check(folder: Path) -> None:
    """Check that in vLLM's package in `folder` the two classes, and no others, call operators with hooks."""
    for name, (owner, operator) in CALLED_BY.items():
        tree = ast.parse((folder / name).read_text(encoding="utf-8"))
        hooked = [
            node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and HOOK in _decorators(node)
        ]
        assert hooked == [operator], name
        (made,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner)
        (forward,) = (node for node in made.body if isinstance(node, ast.FunctionDef) and node.name == "forward")
        assert f"torch.ops.vllm.{operator}(" in ast.unparse(forward), name


def check_orders(folder: Path) -> None:
    """Check the order of calls.

    V1 calls `handle_preemptions` before it touches blocks, and `wait_for_save` before it samples. V2 makes both calls
    later.
    """
    one = _function(folder / "v1/worker/gpu_model_runner.py", "GPUModelRunner", "execute_model")
    _in_order(one, "handle_preemptions(", "self._update_states(", "maybe_get_kv_connector_output(", "compute_logits(")
    assert "_zero_block_ids(" in _function(folder / "v1/worker/gpu_model_runner.py", "GPUModelRunner", "_update_states")
    assert "cudagraph_runtime_mode=cudagraph_mode" in one, "the context says which steps are replayed"
    two = folder / "v1/worker/gpu/model_runner.py"
    _in_order(
        _function(two, "GPUModelRunner", "execute_model"),
        "self.update_requests(",
        "batch_desc.cg_mode == CUDAGraphMode.FULL:",
        "kv_connector.pre_forward(",  # in a replayed step V2 makes this call without the model's context
        "run_fullgraph(",
        "with set_forward_context(attn_metadata",
    )
    assert "set_forward_context(None" in _function(
        folder / "v1/worker/gpu/kv_connector.py", "ActiveKVConnector", "_start_load_kv"
    )
    assert "zero_block_ids(" in _function(two, "GPUModelRunner", "update_requests")
    sampling = _function(two, "GPUModelRunner", "sample_tokens")
    assert sampling.index("self.sample(") < sampling.rindex("kv_connector.post_forward(")
    _in_order(_function(folder / "v1/worker/gpu/kv_connector.py", "ActiveKVConnector", "pre_forward"),
              "handle_preemptions(", "bind_connector_metadata(")  # fmt: skip


def _in_order(source: str, *signs: str) -> None:
    places = [source.index(sign) for sign in signs]
    assert places == sorted(places), signs


def _function(path: Path, owner: str, name: str) -> str:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (made,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner)
    (found,) = (node for node in made.body if isinstance(node, ast.FunctionDef) and node.name == name)
    return ast.unparse(found)


def _decorators(node: ast.FunctionDef) -> Iterator[str]:
    return (one.id for one in node.decorator_list if isinstance(one, ast.Name))


def test_classes_with_hooks_are_those_recorded() -> None:
    """In the installed vLLM only the two known classes have hooks, and its runners keep the order of calls."""
    check(Path(vllm.__file__).parent)
    check_orders(Path(vllm.__file__).parent)


@pytest.mark.slow
@pytest.mark.timeout(FETCH_SECONDS_MAX + 60)
def test_the_classes_with_hooks_of_other_supported_releases() -> None:
    """Each other recorded release has hooks in the same classes as this release, and the same order of calls."""
    for _, sources in other_releases():
        check(sources / "vllm")
        check_orders(sources / "vllm")


@pytest.mark.parametrize(
    ("kind", "hooked"),
    [
        (Attention, True),
        (MLAAttention, True),
        (type("Window", (Attention,), {}), True),
        (StaticSinkAttention, False),  # calls hooks through `Attention.forward`, but kvpipe does not rely on that
        (DeepseekV32Attention, False),
        (DeepseekV32IndexerCache, False),
        (object, False),
    ],
)
def test_layers_that_kvpipe_relies_on_are_recorded(kind: type, *, hooked: bool) -> None:
    """kvpipe uses the hooks of two classes, and of those subclasses that do not override the attention."""
    assert is_hooked(object.__new__(kind)) is hooked


@pytest.mark.parametrize(
    ("v2", "device", "late"), [(False, "meta", False), (False, "cuda", True), (True, "cuda", False)]
)
def test_the_fence_is_late_with_runner_v1_on_a_gpu_only(v2: bool, device: str, late: bool) -> None:
    """With runner V1 on a GPU, the next step's first hook sets the fence.

    In all other engines the same step sets it.
    """
    config: Any = SimpleNamespace(use_v2_model_runner=v2)
    caches: Any = {name: SimpleNamespace(is_cuda=device == "cuda") for name in "ab"}
    assert fences_late(config, caches) is late


def _cache(*layers: tuple[type, dict[str, Any]]) -> KVCacheConfig:
    """Return one group of `layers`, like vLLM's group of layers with several sizes. Layers are named by their order."""
    common: dict[str, Any] = {"block_size": 64, "num_kv_heads": 1, "dtype": torch.uint8}
    specs = {f"layer.{i}": kind(**common | asked) for i, (kind, asked) in enumerate(layers)}
    block = specs["layer.0"].block_size
    whole = UniformTypeKVCacheSpecs(block_size=block, kv_cache_specs=specs)
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(list(specs), whole)])


def test_the_caches_of_deepseek_v32_are_served() -> None:
    """The latents of DeepSeek V3.2, in records of 656 bytes, and its indexer's keys are in one group."""
    latents, keys = {"head_size": 576, "state_content_bytes": 656}, {"head_size": 132}
    made = make_geometry(_cache((MLAAttentionSpec, latents), (MLAAttentionSpec, keys)), load_settings())
    assert [layer.page_bytes for layer in made.groups[0].layers] == [64 * 656, 64 * 132]


def test_the_caches_of_deepseek_v4_are_served() -> None:
    """The caches are latents of several tokens, an indexer's keys, a window, and a compressor's last rows."""
    latents = {"head_size": 512, "state_content_bytes": 584, "tokens_per_state": 4, "alignment": 576}
    rows = {"head_size": 2048, "sliding_window": 8, "block_size": 4, "dtype": torch.float32, "alignment": 576}
    cache = _cache((MLAAttentionSpec, latents), (MLAAttentionSpec, {"head_size": 132, "tokens_per_state": 4}))
    cache.kv_cache_groups += _cache((SlidingWindowMLASpec, rows)).kv_cache_groups
    made = make_geometry(cache, load_settings())
    assert [layer.page_bytes for layer in made.groups[0].layers] == [9792, 16 * 132]
    assert (made.groups[1].window_tokens, made.pages_per_unit) == (8, (1, 2))


def test_a_window_that_replays_is_refused() -> None:
    """With DeepSeek V4.1, vLLM computes the window's tokens again after every hit, and keeps no KV of these tokens."""
    replayed = {"head_size": 512, "sliding_window": 128, "bounded_replay": True}
    with pytest.raises(UnsupportedError, match=r"layer 'layer.0' \(SlidingWindowMLASpec, group 0\) is not supported"):
        make_geometry(_cache((SlidingWindowMLASpec, replayed)), load_settings())


def test_the_scheduler_knows_the_sizes_of_all_layers() -> None:
    """The scheduler side gets the specification of a group's first layer, but the page offsets of all layers."""
    latents, keys = {"head_size": 576, "state_content_bytes": 656}, {"head_size": 132}
    cache = _cache((MLAAttentionSpec, latents), (MLAAttentionSpec, keys))
    pages = {"layer.0": 64 * 656, "layer.1": 64 * 132}
    cache.kv_cache_tensors = [
        KVCacheTensor(size=0, layers=[name], layer_stride=page, block_stride=sum(pages.values()))
        for name, page in pages.items()
    ]
    noted = generate_scheduler_kv_cache_config([cache])
    sides = [make_geometry(one, load_settings()) for one in (cache, noted)]
    assert sides[0].groups == sides[1].groups
