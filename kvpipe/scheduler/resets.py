"""Forgets all chunks: at a reset, and when the weights have changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpipe.trace.events import CacheReset

if TYPE_CHECKING:
    from kvpipe.node.catalog import NodeCatalog
    from kvpipe.scheduler.context import Context
    from kvpipe.scheduler.fetches import Staging
    from kvpipe.scheduler.hooks import EngineHooks
    from kvpipe.scheduler.requests import Requests
    from kvpipe.scheduler.weights import Weights


class Resets:
    """Forgets the chunks of one scheduler side."""

    def __init__(
        self,
        context: Context,
        hooks: EngineHooks,
        *,
        requests: Requests,
        staging: Staging | None,
        weights: Weights,
        node: NodeCatalog | None = None,
    ) -> None:
        """Keep the parts that a reset changes. `staging` is None without tiers, `node` without a node's memory."""
        self._context, self._requests, self._staging, self._weights = context, requests, staging, weights
        self._node = node
        self._space_of, self._also_of, self._recovery = hooks.space_of, hooks.also_of, hooks.recovery

    def reset(self) -> None:
        """Forget every chunk permanently, including the chunks in tiers."""
        self._context.counters["reset"] += 1
        self._forget()
        if self._staging is not None:
            self._staging.space.renew()
        if self._node is not None:
            self._node.renew()

    def weights_changed(self) -> None:
        """Forget every chunk.

        Save nothing more of running requests, because their KV was computed with other weights.
        """
        self._forget()
        self._recovery.weights_changed(self._requests.tracked)
        self.name_space()

    def name_space(self) -> None:
        """Set the names of the namespaces in tiers and in a node's memory for the present weights.

        If the weights are unknown, tiers are not used, and no other engine finds this engine's chunks in a node's
        memory.
        """
        digest = self._weights.digest
        own = self._also_of(digest) if digest else ""  # the second namespace, which only engines of this layout use
        if self._node is not None:
            self._node.name_space(own)
        if self._staging is not None:
            self._staging.space.base = self._space_of(digest) if digest else ""
            self._staging.space.second = own

    def _forget(self) -> None:
        """Forget every chunk. Saves in flight will not be published."""
        self._context.events.reset()
        dropped = self._context.catalog.reset()
        self._context.trace.put(CacheReset(*self._context.trace.of("", 0), chunks=dropped))
        for tracked in self._requests.tracked.values():
            tracked.saving.give_up()  # the request's further KV depends on KV that the reset must forget
            tracked.epoch = self._requests.new_epoch()
        self._context.counters["reset_chunks"] += dropped
