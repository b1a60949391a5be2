"""Finds how each cache group's KV is divided among tensor-parallel ranks, and the facts of the common namespace.

Engines with different numbers of ranks share chunks in that namespace. If a group's division is not known for certain,
only engines with the same layout share the engine's chunks. The number of heads is read from the model's own layer that
computes queries, keys and values, not from a configuration. As in vLLM's own canonical mapping
(`kv_connector/v1/offloading/canonical_mapping.py`), pages keep the order and encoding of their attention backend. The
namespace depends on this order and encoding.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from vllm import envs
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvpipe.connectors.vllm.identity import models
from kvpipe.connectors.vllm.identity.source import tensor_parallel_only
from kvpipe.protocol.geometry import Geometry, Layer
from kvpipe.tiers.parts import Share, split_of
from kvpipe.transfer.layouts import Paged

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

_SPREAD: Final = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)
_OF_THE_LAYOUT: Final = ("tensor_parallel_size", "ranks", "groups", "layouts", "weights", "settings_of_ranks")
"""The facts of an engine that depend on its number of ranks."""

_BOUND: Final = Share()


BOUND_BY: Final = {
    "parallelism": "ranks divide not only heads, but also layers, tokens or experts",
    "batch_invariant": "VLLM_BATCH_INVARIANT requires equal bits, and another number of ranks adds up in another order",
    "lora": "LoRA layers hide how ranks divide the heads",
    "caches": "ranks do not divide some cache by heads in a known way (states, drafters, padding, scales per token, "
    "heads that cannot be divided evenly), or ranks differ in their caches or in how they compute",
    "quantized": "scales of quantized weights may depend on the number of ranks",
    "weights": "kvpipe did not read all weights while they were loaded, or the weights have changed since",
}
"""By reason, why engines with different numbers of ranks cannot use each other's chunks in tiers."""


class CacheLayer(NamedTuple):
    """One layer's cache on this rank. `order` is vLLM's name of the order of the cache's dimensions."""

    layer: Layer
    spec: KVCacheSpec
    cache: Paged
    order: str

    @property
    def rows(self) -> int:
        """The number of rows per page (`Share.rows`), or 0 if this number is not known."""
        if self.order.endswith("HNC") and self.cache.lies(1, 2, 3):
            return self.cache.split
        if self.order.endswith("NHC") and self.cache.lies(2, 1, 3):
            return self.cache.split * self.cache.shape[2]
        return 0

    @property
    def dense(self) -> bool:
        """Whether a page contains only the KV of its heads."""
        return self.cache.page * self.cache.split * self.cache.itemsize == self.layer.page_bytes


def shares(
    config: VllmConfig,
    cache: KVCacheConfig,
    geometry: Geometry,
    caches: dict[str, torch.Tensor],
    roots: Iterable[torch.nn.Module],
) -> tuple[Share, ...]:
    """Return the share of each cache group.

    `caches` has this rank's caches by layer. `roots` has this rank's models.
    """
    parallel, out = config.parallel_config, []
    ranks, made = parallel.tensor_parallel_size, config.compilation_config.static_forward_context
    parents = {id(child): one for root in roots for one in root.modules() for child in one._modules.values()}  # noqa: SLF001
    for group, kind in zip(geometry.groups, cache.kv_cache_groups, strict=True):
        specs = models.layer_specs(kind.kv_cache_spec, kind.layer_names)
        order, layers = str(cache.kv_cache_layout), list[CacheLayer]()
        for layer in group.layers:
            there = caches[layer.name]
            paged = Paged(tuple(there.shape), there.stride(), there.element_size(), cache.num_blocks)
            layers.append(CacheLayer(layer, specs[layer.name], paged, order))
        if not tensor_parallel_only(parallel):
            out.append(_BOUND)
        elif all(is_alike(one.spec) for one in layers):
            out.append(Share(1, (1,) * len(layers)))
        else:
            heads = {_heads(one, parents.get(id(made.get(one.layer.name))), ranks, parallel.rank) for one in layers}
            total = heads.pop()
            bound = heads or not total or not all(one.rows for one in layers)
            out.append(_BOUND if bound else Share(total, tuple(one.rows for one in layers)))
    return tuple(out)


def is_alike(spec: KVCacheSpec) -> bool:
    """Whether all tensor-parallel ranks hold the same bytes, as for MLA latents with one latent per token."""
    return isinstance(spec, MLAAttentionSpec) and spec.tokens_per_state == 1 and not _scaled(spec)


def _scaled(spec: AttentionSpec) -> bool:
    """Whether pages also contain scales per token and head."""
    return bool(spec.kv_quant_mode.is_per_token_head)


def _heads(one: CacheLayer, parent: torch.nn.Module | None, ranks: int, rank: int) -> int:
    """Return the number of KV heads of all ranks together, or 0 if this rank may not hold an equal part."""
    spec = one.spec
    if type(spec) not in _SPREAD or _scaled(spec) or parent is None or not one.dense:
        return 0
    if spec.num_head_slots is not None or spec.state_content_bytes is not None:  # these heads are not KV heads
        return 0
    made = [child for child in parent.children() if isinstance(child, QKVParallelLinear)]
    if len(made) != 1 or (made[0].tp_size, made[0].tp_rank) != (ranks, rank):
        return 0
    total: int = made[0].total_num_kv_heads
    split = split_of(total, ranks)
    fits = split and one.cache.heads == spec.num_kv_heads == made[0].num_kv_heads == total // split
    return total if fits else 0


def common_facts(
    found: tuple[Share, ...], geometry: Geometry, caches: dict[str, torch.Tensor], layout: list[Any], ranks: int
) -> dict[str, Any]:
    """Return the facts of the pages that do not depend on the number of ranks, or {} if a group is bound to the layout.

    `layout` is the result of `engine_facts.layout_facts` for this rank's caches.
    """
    splits = [split_of(share.heads, ranks) for share in found]
    if not all(splits) or envs.VLLM_BATCH_INVARIANT:  # batch invariance holds within one layout only
        return {}
    backends = {fact[0]: [fact[1], fact[2]] for fact in layout if isinstance(fact, list)}
    groups = [
        [
            [group.block_tokens, group.window_tokens, group.local, share.heads],
            [
                [layer.name, layer.page_bytes * split, rows, str(caches[layer.name].dtype), *backends[layer.name]]
                for layer, rows in zip(group.layers, share.rows, strict=True)
            ],
        ]
        for group, share, split in zip(geometry.groups, found, splits, strict=True)
    ]
    return {"platform": [fact for fact in layout if not isinstance(fact, list)], "groups": groups}


def bound_by(config: VllmConfig, common: str, source: str) -> str:
    """Return why only engines of this layout share chunks, as a key of `BOUND_BY`, or "" if other layouts share.

    `common` is the digest that does not depend on the number of ranks. `source` is the digest of the loaded weights. An
    unknown digest is "".
    """
    if common and source:
        return ""
    if not tensor_parallel_only(config.parallel_config):
        return "parallelism"
    if envs.VLLM_BATCH_INVARIANT:
        return "batch_invariant"
    if not common:
        return "lora" if config.lora_config is not None else "caches"
    return "quantized" if config.model_config.quantization is not None else "weights"


def without_layout(facts: dict[str, Any]) -> dict[str, Any]:
    """Return an engine's facts without the facts that depend on the number of ranks."""
    return {name: fact for name, fact in facts.items() if name not in _OF_THE_LAYOUT}
