"""Collects the facts, besides tokens, on which an engine's chunks depend, and derives the namespaces in tiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvpipe.connectors.vllm.identity import engine_facts, shares
from kvpipe.connectors.vllm.identity.source import loaded_from
from kvpipe.tiers.envelope import VERSION

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvpipe.connectors.vllm.metadata import Introduction
    from kvpipe.protocol.geometry import Geometry


class Spaces:
    """The namespaces of one engine, on its scheduler side. All digests of weights have the form of `Weights.digest`."""

    def __init__(
        self,
        config: VllmConfig,
        cache: KVCacheConfig,
        geometry: Geometry,
        *,
        tiers: bool,
        bound: Callable[[str, str], object],
    ) -> None:
        """Collect the facts that are known before ranks report. `tiers` says whether the engine has tiers.

        `bound` is called with the arguments `common` and `source` of `shares.bound_by` whenever a namespace is derived.

        Raises:
            UnsupportedError: the engine has tiers, and other processes would give a prefix another hash.
        """
        self._config, self._bound, self._common = config, bound, ""
        self._facts = engine_facts.identity(config, cache, geometry)
        if tiers:
            engine_facts.check_hashes(config)
            self._facts["values"] = VERSION

    @property
    def agreed(self) -> bool:
        """Whether every rank has reported the layout of its chunks."""
        return "layouts" in self._facts

    def agree(self, reported: Sequence[Introduction]) -> bool:
        """Process the ranks' introductions, in the order of ranks. Returns whether every rank has tiers."""
        self._facts.pop("layouts", None)
        if len([one for one in reported if one.digest]) == self._config.parallel_config.world_size:
            self._facts["layouts"] = [(one.rank, one.digest) for one in reported]
        how = [one.numerics for one in reported]
        self._facts["numerics"] = how[0] if len({*how}) == 1 else how
        common = {(one.common, one.numerics) for one in reported}
        self._common = common.pop()[0] if len(common) == 1 else ""
        return self.agreed

    def of_layout(self, digest: str) -> dict[str, Any]:
        """Return all facts as plain data, including the digests of the weights in the ranks' memory."""
        return self._facts | {"weights": loaded_from(digest).memory}

    def space(self, digest: str) -> str:
        """Return the namespace of chunks that these weights compute, or "" before every rank has reported."""
        if not self.agreed:
            return ""
        source = loaded_from(digest).source
        self._bound(self._common, source)
        if self._common and source:
            return engine_facts.fingerprint(
                shares.without_layout(self._facts) | {"common": self._common, "source": source}
            )
        return self.also(digest)

    def also(self, digest: str) -> str:
        """Return the namespace of this layout only, or "" before every rank has reported.

        This namespace depends on the weights in each rank's memory.
        """
        return engine_facts.fingerprint(self.of_layout(digest)) if self.agreed else ""
