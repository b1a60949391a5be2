"""What an engine's chunks depend on beside tokens, as all ranks report it, and their namespaces in tiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvpipe.connectors.vllm import shares, support
from kvpipe.connectors.vllm.source import loaded_from
from kvpipe.tiers.envelope import VERSION

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvpipe.connectors.vllm.metadata import Introduction
    from kvpipe.geometry import Geometry


class Spaces:
    """One per engine, beside its scheduler side. All digests of weights are those of `Weights.digest`."""

    def __init__(
        self,
        config: VllmConfig,
        cache: KVCacheConfig,
        geometry: Geometry,
        *,
        tiers: bool,
        bound: Callable[[str, str], object],
    ) -> None:
        """`tiers`: there are any. `bound`: called with `common` and `source` of `shares.bound_by`, at each new name.

        Raises:
            ConfigError: with tiers, vLLM's block hashes are other ones in every process.

        """
        self._config, self._bound, self._common = config, bound, ""
        self._facts = support.identity(config, cache, geometry)
        if tiers:
            support.check_hashes(config)
            self._facts["values"] = VERSION

    @property
    def agreed(self) -> bool:
        """Whether every rank has reported the layout of its chunks."""
        return "layouts" in self._facts

    def agree(self, reported: Sequence[Introduction]) -> bool:
        """Take the reports of ranks, in their order. Returns whether every rank has tiers; else they are not used."""
        self._facts.pop("layouts", None)
        if len([one for one in reported if one.digest]) == self._config.parallel_config.world_size:
            self._facts["layouts"] = [(one.rank, one.digest) for one in reported]
        how = [one.numerics for one in reported]
        self._facts["numerics"] = how[0] if len({*how}) == 1 else how
        common = {(one.common, one.numerics) for one in reported}
        self._common = common.pop()[0] if len(common) == 1 else ""
        return self.agreed

    def of_layout(self, digest: str) -> dict[str, Any]:
        """Return all facts, as plain data, with the weights as the ranks hold them in memory."""
        return self._facts | {"weights": loaded_from(digest).memory}

    def space(self, digest: str) -> str:
        """Return the namespace of chunks computed with these weights; "" before every rank has reported."""
        if not self.agreed:
            return ""
        source = loaded_from(digest).source
        self._bound(self._common, source)
        if self._common and source:
            return support.fingerprint(shares.without_layout(self._facts) | {"common": self._common, "source": source})
        return self.also(digest)

    def also(self, digest: str) -> str:
        """Return the namespace of this layout only, which depends on the weights as the ranks hold them in memory."""
        return support.fingerprint(self.of_layout(digest))
