"""Facts of a rank that has its caches: their layout, its weights, how it computes, how KV lies over ranks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from kvpipe.connectors.vllm import numerics, shares, support
from kvpipe.connectors.vllm.model import LoadedModel
from kvpipe.connectors.vllm.source import loaded_from, sees_a_part
from kvpipe.connectors.vllm.weights import suspect
from kvpipe.names import NameClaim
from kvpipe.tiers.parts import Share

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvpipe.config import Settings
    from kvpipe.geometry import Geometry


class RankFacts(NamedTuple):
    """What could be found; nothing is shared of what is not known."""

    layout: str
    """A digest of what this rank's pages are."""
    weigh: Callable[[], str]
    """Which weights it has."""
    shares: tuple[Share, ...]
    """How each group's KV lies over the ranks."""
    common: str
    """A digest of what pages are, however many ranks there are."""
    numerics: Callable[[], str]
    """How it computes now: see `numerics.report`."""


def find(
    config: VllmConfig,
    cache: KVCacheConfig,
    geometry: Geometry,
    caches: dict[str, torch.Tensor],
    contain: Callable[[str, Exception], object],
) -> RankFacts:
    """Return the facts of a rank with these caches. `contain(where, error)` takes what is raised by an unknown model.

    Raises:
        UnsupportedError: a layout that kvpipe does not know.

    """
    layout = support.layout_facts(caches, cache.num_blocks, config)
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
        found, common = lie, support.fingerprint(facts) if facts else ""
    except Exception as error:  # noqa: BLE001  (the border: the engine serves, and shares nothing)
        contain("rank_facts", error)
    devices = {one.device.type: one.device for one in caches.values()}
    how = functools.partial(numerics.report, list(devices.values()), _dtypes(config))
    return RankFacts(support.fingerprint({"layout": layout}), weigh, found, common, how)


def _dtypes(config: VllmConfig) -> list[torch.dtype]:
    """Return in which types the model and its drafter compute."""
    drafts = config.speculative_config
    models = [config.model_config, getattr(drafts, "draft_model_config", None)]
    return [one.dtype for one in models if one is not None]


def claim(
    settings: Settings, config: VllmConfig, cache: KVCacheConfig, geometry: Geometry, rank: int, found: RankFacts
) -> NameClaim | None:
    """Claim the configured name for a rank with these facts, before the engine serves; None: no name is configured.

    Raises:
        ConfigError: the same rank of a living engine with another layout, or other weights, has the name.

    """
    if not settings.name:
        return None
    weights = ""
    with contextlib.suppress(Exception):  # the first report reads them again, and counts what is wrong
        weights = loaded_from(found.weigh()).memory
    facts = support.identity(config, cache, geometry) | {"layouts": [(rank, found.layout)], "weights": weights}
    facts["numerics"] = found.numerics()
    return NameClaim(settings.name, facts, settings.state_dir, rank=rank)
