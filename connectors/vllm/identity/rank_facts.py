"""Finds the facts of a rank with caches: their layout, the weights, the numerics, and the share of each rank."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from kvpipe.connectors.vllm.identity import engine_facts, numerics, shares
from kvpipe.connectors.vllm.identity.model import LoadedModel
from kvpipe.connectors.vllm.identity.source import loaded_from, sees_a_part
from kvpipe.connectors.vllm.identity.weights import suspect
from kvpipe.inputs.cache_names import NameClaim
from kvpipe.tiers.parts import Share

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvpipe.config.settings import Settings
    from kvpipe.protocol.geometry import Geometry


WHOLE: Final = "whole blocks"
"""The fact that a rank copies blocks whole. Its chunks are ``[page][layer]``, other chunks ``[layer][page]``."""


class RankFacts(NamedTuple):
    """The known facts of a rank. An unknown fact is empty, and chunks that depend on an unknown fact are not shared."""

    layout: str
    """A digest of the layout of this rank's pages."""
    weigh: Callable[[], str]
    """A function that returns the report of the rank's weights, or "" if the weights are not known."""
    shares: tuple[Share, ...]
    """How each group's KV is divided among the ranks."""
    common: str
    """A digest of the pages' layout that does not depend on the number of ranks."""
    numerics: Callable[[], str]
    """A function that returns a digest of how the rank computes now, see `numerics.numerics_digest`."""


def find_rank_facts(
    config: VllmConfig,
    cache: KVCacheConfig,
    geometry: Geometry,
    caches: dict[str, torch.Tensor],
    contain: Callable[[str, Exception], object],
    *,
    whole: bool = False,
) -> RankFacts:
    """Return the facts of a rank with these caches. `contain(where, error)` is called if the model raises an error.

    `whole` says that blocks are copied whole, so that chunks have other bytes (`kvpipe.transfer.whole_blocks`).

    Raises:
        UnsupportedError: the caches have a layout that kvpipe does not know.
    """
    layout = engine_facts.layout_facts(caches, cache.num_blocks, config) + [WHOLE] * whole
    weigh: Callable[[], str] = str
    found, common = tuple[Share, ...](), ""
    try:
        model = LoadedModel(
            config.compilation_config.static_forward_context, functools.partial(suspect, config, "loaded")
        )
        if code := model.code():
            layout.append(code)
        weigh = str if sees_a_part(config.parallel_config) else model.digest
        lie = shares.shares(config, cache, geometry, caches, model.roots)
        facts = shares.common_facts(lie, geometry, caches, layout, config.parallel_config.world_size)
        found, common = lie, engine_facts.fingerprint(facts) if facts else ""
    except Exception as error:  # noqa: BLE001  (the engine serves without sharing chunks)
        contain("rank_facts", error)
    devices = {one.device.type: one.device for one in caches.values()}
    how = functools.partial(numerics.numerics_digest, list(devices.values()), _dtypes(config))
    return RankFacts(engine_facts.fingerprint({"layout": layout}), weigh, found, common, how)


def _dtypes(config: VllmConfig) -> list[torch.dtype]:
    """Return the dtypes in which the model and its drafter compute."""
    drafts = config.speculative_config
    models = [config.model_config, getattr(drafts, "draft_model_config", None)]
    return [one.dtype for one in models if one is not None]


def claim(
    settings: Settings, config: VllmConfig, cache: KVCacheConfig, geometry: Geometry, rank: int, found: RankFacts
) -> NameClaim | None:
    """Lock the configured name for a rank before the engine serves. Returns None if no name is configured.

    Raises:
        ConfigError: another running engine uses the name, and its rank has another layout or other weights.
    """
    if not settings.name:
        return None
    weights = ""
    with contextlib.suppress(Exception):  # the first report reads the weights again and counts errors
        weights = loaded_from(found.weigh()).memory
    facts = engine_facts.identity(config, cache, geometry) | {"layouts": [(rank, found.layout)], "weights": weights}
    facts["numerics"] = found.numerics()
    return NameClaim(settings.name, facts, settings.state_dir, rank=rank)
