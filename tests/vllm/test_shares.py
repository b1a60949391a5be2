"""Tests of how KV is divided over ranks. If the division is unknown, only engines of one layout share the KV."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import envs
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, MLAAttentionSpec

from kvpipe.connectors.vllm.identity.shares import BOUND_BY, bound_by, common_facts, shares, without_layout
from kvpipe.protocol.geometry import Geometry, Group, Layer
from kvpipe.tiers.parts import Share

TOKENS, SIZE, BLOCKS = 16, 8, 3
BOUND = (Share(),)


class _Attention(torch.nn.Module):
    """A stand-in for vLLM's class of attention layers."""


def _block(total: int, ranks: int, rank: int) -> Any:
    """An attention block of a rank: the attention layer, and the layer that computes its queries, keys and values."""
    qkv = QKVParallelLinear.__new__(QKVParallelLinear)
    torch.nn.Module.__init__(qkv)
    qkv.tp_size, qkv.tp_rank = ranks, rank
    qkv.total_num_kv_heads, qkv.num_kv_heads = total, max(1, total // ranks)
    block = torch.nn.Module()
    block.qkv_proj, block.attn = qkv, _Attention()
    return block


def _spec(heads: int) -> dict[str, Any]:
    return {"block_size": TOKENS, "num_kv_heads": heads, "head_size": SIZE, "dtype": torch.float32}


class World:
    """One rank of an engine with one layer."""

    def __init__(self, total: int = 4, ranks: int = 2, rank: int = 1, order: str = "LBHNC", **spec: Any) -> None:
        """Create a rank. `total` is the number of KV heads of the layer."""
        heads = max(1, total // ranks)
        self.block, self.order, self.rank = _block(total, ranks, rank), order, rank
        self.ranks = self.world = ranks
        self.dcp = self.pcp = 1
        self.spec: Any = FullAttentionSpec(**_spec(heads), **spec)
        self.caches = {"a": torch.zeros(BLOCKS, heads, TOKENS, 2 * SIZE)}
        if order.endswith("NHC"):
            self.caches = {"a": torch.zeros(BLOCKS, TOKENS, heads, 2 * SIZE).transpose(1, 2)}

    @property
    def geometry(self) -> Geometry:
        """Return the geometry of the rank's layer, as kvpipe's core has it."""
        return Geometry((Group((Layer("a", self.spec.page_size_bytes),), TOKENS),), 64, 1 << 20)

    def found(self) -> tuple[Share, ...]:
        """Return how the layer's KV is divided over ranks."""
        parallel = SimpleNamespace(
            tensor_parallel_size=self.ranks, world_size=self.world, rank=self.rank,
            decode_context_parallel_size=self.dcp, prefill_context_parallel_size=self.pcp,
            enable_expert_parallel=False, data_parallel_size=1,
        )  # fmt: skip
        compiled = SimpleNamespace(static_forward_context={"a": self.block.attn})
        config: Any = SimpleNamespace(parallel_config=parallel, compilation_config=compiled)
        group = KVCacheGroupSpec(["a"], self.spec)
        cache: Any = SimpleNamespace(kv_cache_groups=[group], num_blocks=BLOCKS, kv_cache_layout=self.order)
        return shares(config, cache, self.geometry, self.caches, [self.block])

    def facts(self) -> dict[str, Any]:
        """Return the facts of the pages, which do not depend on the number of ranks."""
        return common_facts(self.found(), self.geometry, self.caches, ["x86", ["a", "CPU", 1, [], []]], self.ranks)


def test_heads_of_all_ranks_are_counted() -> None:
    """Heads of all ranks are counted. The bytes of a head are one run in a page, or one run per token."""
    assert World().found() == (Share(4, (1,)),)
    assert World(order="LBNHC").found() == (Share(4, (TOKENS,)),)
    assert World(total=2, ranks=4, rank=3).found() == (Share(2, (1,)),)
    halves = World()
    halves.caches = {"a": torch.zeros(2 * BLOCKS, 2, TOKENS // 2, 2 * SIZE)}
    assert halves.found() == (Share(4, (2,)),)


def test_latents_count_as_one_head() -> None:
    """Latents need no layer of queries, keys and values, because every rank holds the same latents."""
    latents = World()
    latents.spec = MLAAttentionSpec(**_spec(1))
    latents.block = torch.nn.Module()
    latents.block.attn = _Attention()
    assert latents.found() == (Share(1, (1,)),)


@pytest.mark.parametrize(
    "total_ranks",
    [(4, 1), (4, 2), (4, 4), (4, 8), (1, 1), (1, 2)],
    ids=lambda some: f"{some[0]} heads, {some[1]} ranks",
)
def test_the_facts_of_every_number_of_ranks_are_the_same(total_ranks: tuple[int, int]) -> None:
    """If order and encoding are equal, engines with different layouts have the same names for the same bytes."""
    total, ranks = total_ranks
    assert World(total, ranks, ranks - 1).facts() == World(total, 1, 0).facts() != {}
    assert World(total, ranks, ranks - 1, "LBNHC").facts() != World(total, 1, 0).facts()


def _other_rank(world: World) -> None:
    world.block.qkv_proj.tp_rank = 0


def _stages(world: World) -> None:
    world.world = 4


def _tokens_spread(world: World) -> None:
    world.dcp = 2


def _prefills_spread(world: World) -> None:
    world.pcp = 2


def _latents_of_some_tokens(world: World) -> None:
    world.spec, world.dcp = MLAAttentionSpec(**_spec(1)), 2


def _two_projections(world: World) -> None:
    world.block.other = _block(4, 2, 1).qkv_proj


def _no_projection(world: World) -> None:
    del world.block.qkv_proj


def _of_all_heads(world: World) -> None:
    world.block.qkv_proj.tp_size, world.block.qkv_proj.tp_rank = 1, 0


def _uneven(world: World) -> None:
    world.block.qkv_proj.total_num_kv_heads = 3


def _other_heads(world: World) -> None:
    world.block.qkv_proj.total_num_kv_heads = 8


def _unknown_order(world: World) -> None:
    world.order = "None"


def _another_order(world: World) -> None:
    world.order = "LBNHC"  # the setting has this order, but the cache has heads first


def _gaps(world: World) -> None:
    world.spec = FullAttentionSpec(**_spec(2), page_size_padded=1 << 14)


def _of_no_model(world: World) -> None:
    world.block.attn, world.block.other = _Attention(), torch.nn.Module()
    world.block = torch.nn.Module()
    world.block.attn = _Attention()


@pytest.mark.parametrize(
    "spoil",
    [
        _other_rank, _stages, _two_projections, _no_projection, _of_all_heads, _uneven, _other_heads, _unknown_order,
        _tokens_spread, _prefills_spread, _latents_of_some_tokens, _another_order, _gaps, _of_no_model,
    ],
)  # fmt: skip
def test_group_with_an_unknown_layout_is_shared_with_one_layout_only(spoil: Any) -> None:
    """If kvpipe does not recognise how a layer divides its heads, only engines of one layout share the group's chunks.

    Such a layer has no facts for the common namespace.
    """
    world = World()
    spoil(world)
    assert world.found() == BOUND
    assert world.facts() == {}


def test_engines_with_batch_invariance_share_with_equal_layouts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several ranks add up in another order than one rank.

    So with batch invariance, engines share only if their layouts are equal.
    """
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True)
    assert World().facts() == {}
    assert World().found() == (Share(4, (1,)),)


def test_facts_without_layout_show_nothing_of_the_ranks() -> None:
    """The facts without layout show nothing of the ranks of an engine."""
    facts = {"model_dtype": "x", "tensor_parallel_size": 2, "ranks": 2, "groups": [], "layouts": [], "weights": ""}
    assert without_layout(facts) == {"model_dtype": "x"}


def _config(*, ranks: int = 2, world: int = 2, lora: object = None, quantization: str | None = None) -> Any:
    parallel = SimpleNamespace(
        tensor_parallel_size=ranks, world_size=world, decode_context_parallel_size=1,
        prefill_context_parallel_size=1, enable_expert_parallel=False, data_parallel_size=1,
    )  # fmt: skip
    return SimpleNamespace(
        parallel_config=parallel, lora_config=lora, model_config=SimpleNamespace(quantization=quantization)
    )


def test_reason_for_sharing_with_one_layout_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reason has a name and a sentence. If several reasons apply, the first reason in the list is reported."""
    noted = {
        bound_by(_config(world=4), "", "s"),
        bound_by(_config(lora=object()), "", ""),
        bound_by(_config(), "", "s"),
        bound_by(_config(quantization="fp8"), "c", ""),
        bound_by(_config(), "c", ""),
    }
    assert bound_by(_config(quantization="fp8", lora=object()), "c", "s") == ""
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True)
    assert noted | {bound_by(_config(), "", "")} == BOUND_BY.keys()
