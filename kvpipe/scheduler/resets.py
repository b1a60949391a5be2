"""Forgets everything: at a reset, and when the weights have changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvpipe.trace.events import CacheReset

if TYPE_CHECKING:
    from kvpipe.cache.catalog import Catalog
    from kvpipe.scheduler.announced import Announcements
    from kvpipe.scheduler.base import Recovery
    from kvpipe.scheduler.fetches import Staging
    from kvpipe.scheduler.pins import PromptPins
    from kvpipe.scheduler.requests import Requests
    from kvpipe.scheduler.weights import Weights
    from kvpipe.trace.log import Counters
    from kvpipe.trace.recorder import Recorder


class Resets:
    """One per scheduler side."""

    def __init__(
        self,
        catalog: Catalog,
        requests: Requests,
        staging: Staging | None,
        *,
        pins: PromptPins,
        announced: Announcements,
        weights: Weights,
        space_of: Callable[[str], str],
        also_of: Callable[[str], str],
        recovery: Recovery,
        counters: Counters,
        trace: Recorder,
    ) -> None:
        """`space_of`: from a digest of the weights to the namespace in tiers; "": not known yet.

        `also_of`: from the same to a second namespace, whose chunks have the same bytes; "": there is none.
        """
        self._also_of, self._pins, self._announced = also_of, pins, announced
        self._catalog, self._requests, self._staging, self._weights = catalog, requests, staging, weights
        self._space_of, self._recovery, self._counters, self._trace = space_of, recovery, counters, trace

    def reset(self) -> None:
        """Forget every chunk, for good: what tiers hold is not found again either."""
        self._counters["reset"] += 1
        self._forget()
        if self._staging is not None:
            self._staging.space.renew()

    def weights_changed(self) -> None:
        """Forget every chunk, and save nothing more of running requests: their KV is of other weights."""
        self._forget()
        self._recovery.weights_changed(self._requests.tracked)
        self.name_space()

    def name_space(self) -> None:
        """Name the namespaces in tiers by the present weights. If these are not known, tiers are not used."""
        if self._staging is not None:
            digest = self._weights.digest
            self._staging.space.base = self._space_of(digest) if digest else ""
            self._staging.space.second = self._also_of(digest) if digest else ""

    def _forget(self) -> None:
        """Forget every chunk. Jobs in flight are not published any more."""
        self._pins.forget()
        self._announced.clear()
        dropped = self._catalog.reset()
        self._trace.put(CacheReset(*self._trace.of("", 0), chunks=dropped))
        for tracked in self._requests.tracked.values():
            tracked.saving.give_up()  # the KV that it goes on with may be what the reset was meant to forget
            tracked.epoch = self._requests.new_epoch()
        if self._staging is not None:
            self._staging.forget()
        self._counters["reset_chunks"] += dropped
