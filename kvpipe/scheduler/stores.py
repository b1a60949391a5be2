"""Stores chunks in tiers. Chunks are offered, wait in a queue, and are stored by the ranks."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Reversible
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

from kvpipe.cache.chunks import Chunk, EvictedError, Owner, Piece
from kvpipe.cache.fair import FairShares
from kvpipe.protocol.messages import TierOrder
from kvpipe.scheduler.events import Subscriber
from kvpipe.statemachine import chunk as chunk_m
from kvpipe.statemachine.request import FINISHED
from kvpipe.tiers.finder import Finder
from kvpipe.tiers.namespace import Namespace
from kvpipe.tiers.prefix_keys import chunk_name
from kvpipe.trace.log import warn

if TYPE_CHECKING:
    from kvpipe.scheduler.context import Context
    from kvpipe.scheduler.records import Tracked
    from kvpipe.scheduler.tier_blocks import TierBlocks

STORE_SHARE: Final = 0.25
"""The largest share of the pool that chunks with a store under way may take."""
OFFERS_MAX: Final = 4096
"""The number of chunks that may wait to be stored.

If more chunks are offered, the tenant with the most offers loses its oldest offer.
"""
REST_STEPS: Final = 100
"""The number of steps without stores after a failed store. In these steps the ranks' breakers would refuse stores."""
STORES: Final = "\0store"
"""The request id in owners of leases on chunks with a store under way. No real request id has a zero byte."""
_NEVER: Final = float("inf")


class Offer(NamedTuple):
    """The offer to store a chunk up to one of its marks (`units`, `key`)."""

    chunk: Chunk
    units: int
    key: bytes

    @property
    def stands(self) -> bool:
        """Whether the chunk still has the mark of this offer."""
        if self.chunk.state.row not in {chunk_m.READY, chunk_m.GROWING}:
            return False
        return any(mark.key == self.key and mark.units == self.units for mark in self.chunk.marks)

    @property
    def waits(self) -> bool:
        """Whether the chunk cannot be leased yet, because a node's holder has yet to publish the chunk."""
        return not self.chunk.is_published and self.stands


_OfferKey = tuple[int, Chunk, bytes]
"""(index of the tier, chunk, key)."""


class _TierOffers:
    """The offers to one tier. All offers in `first` are stored before the offers in `others`. Both are in order of age.

    `under_way` has the stores that not all ranks have reported: it maps the store's order id to the owner of the
    store's lease. Nothing is stored before step `rests`.
    """

    __slots__ = ("first", "others", "rests", "under_way")

    def __init__(self) -> None:
        """Start without offers."""
        self.first: OrderedDict[_OfferKey, None] = OrderedDict()
        self.others: OrderedDict[_OfferKey, None] = OrderedDict()
        self.under_way: dict[int, Owner] = {}
        self.rests = 0

    def put(self, place: _OfferKey, *, first: bool) -> None:
        """Add an offer. An existing offer keeps its place in the queue, unless the offer moves to `first`."""
        if first:
            self.others.pop(place, None)
            self.first[place] = None
        elif place not in self.first:
            self.others[place] = None

    def remove(self, place: _OfferKey) -> None:
        """Remove an offer."""
        del (self.first if place in self.first else self.others)[place]


class Storing(Subscriber):
    """Plans the stores of an engine that has tiers."""

    def __init__(
        self,
        context: Context,
        finder: Finder,
        space: Namespace,
        *,
        new_id: Callable[[], int],
        stores: bool,
        loads: bool,
    ) -> None:
        """Start without offers. Nothing is offered before `space` has a name.

        `stores` says whether this engine writes to tiers. `loads` says whether this engine loads. If `loads` is False,
        chunks of finished requests are stored before other chunks, because another engine waits for these chunks.
        """
        geometry, settings = context.geometry, context.settings
        self._context, self._split = context, finder.split
        self._catalog, self._space, self._counters, self._new_id = context.catalog, space, context.counters, new_id
        self._policies = policies = [tier.spec.store if stores else "never" for tier in finder.tiers]
        self._per_chunk, self._states, self._unit = geometry.units_per_chunk, geometry.states, geometry.unit_tokens
        self._in_flight_max = int(settings.tier_bytes_in_flight_max) // geometry.slot_bytes
        self._queues = [_TierOffers() for _ in policies]  # one queue for each tier
        self._offers: dict[_OfferKey, Offer] = {}  # the offers of all queues
        self._shares = FairShares[_OfferKey](context.catalog.account_of)  # the tenants' shares of `_offers`
        self._written = max(1, sum(policy != "never" for policy in policies))
        self._names = [tier.name for tier in finder.tiers]
        self._finished_first = not loads
        self.tier_blocks: TierBlocks | None = None  # set if the engine has routers
        self.idle_s_max, self._stops_s, self._rested = settings.store_idle_s_max, _NEVER, False

    @property
    def _max(self) -> int:
        """The number of stores that may be under way for each tier.

        The number changes when ranks report the size of the pool.

        Each tier has the same limit of its own, so that a tier that hangs does not delay other tiers.
        """
        return max(1, min(int(self._catalog.slots * STORE_SHARE), self._in_flight_max) // self._written)

    @property
    def owners(self) -> list[Owner]:
        """The owners of the leases on chunks with a store under way."""
        return [owner for queue in self._queues for owner in queue.under_way.values()]

    # ---- offers ---------------------------------------------------------------------------------------------------

    def landed(self, tracked: Tracked, piece: Piece) -> None:
        """Offer the piece's chunk if the chunk is whole, or if this request will not add units to the chunk."""
        chunk, units = piece.chunk, piece.stop
        ended = units == self._per_chunk or chunk.group in self._states or tracked.state.row == FINISHED
        ended = ended or not (chunk.writers or self._catalog.grows(chunk))
        # A chunk that the request will fill further is offered only up to the mark of a state. The state is useless
        # without the attention KV before it.
        if ended or self._states:
            for mark in chunk.marks:
                if mark.units == units and (ended or mark.keep):
                    self._offer("all", chunk, units, mark.key, finished=tracked.state.row == FINISHED)

    def finished(self, tracked: Tracked, chunks: dict[Chunk, None]) -> None:
        """Offer the chunk in which the request ended, as far as the chunk is filled."""
        if self._finished_first:
            self._put_first(chunks)
        for opened in tracked.saving.opened:
            if opened is not None and opened.filled < self._per_chunk:
                for mark in opened.chunk.marks:
                    self._offer("all", opened.chunk, mark.units, mark.key, finished=True)

    def _put_first(self, chunks: Reversible[Chunk]) -> None:
        """Move the waiting offers of `chunks` to the offers that are stored first.

        The prefix's last chunk is first in `chunks`.
        """
        waiting = [(tier, queue) for tier, queue in enumerate(self._queues) if queue.others]
        for chunk in reversed(chunks) if waiting else ():
            for mark in chunk.marks:
                for tier, queue in waiting:
                    if (place := (tier, chunk, mark.key)) in queue.others:
                        queue.put(place, first=True)

    def leased(self, tracked: Tracked, chunks: list[Chunk]) -> None:
        """A second request uses `chunks`: offer them to the tiers with `store=second_use`.

        Chunks that end behind the request's limit are not offered.
        """
        if "second_use" not in self._policies:
            return
        units_max, request = tracked.limits.save_units_max(self._unit), tracked.request
        allowed: set[bytes] | None = None
        if units_max is not None:
            keys, states = self._context.prefixes.unit_keys(request), self._context.prefixes.state_keys(request)
            allowed = {*keys[:units_max], *states[:units_max]}
        for chunk in chunks:
            for mark in chunk.marks[-1:]:
                if allowed is not None and mark.key not in allowed:
                    continue
                self._offer("second_use", chunk, mark.units, mark.key)

    def brought(self, tier: int, offer: Offer) -> None:
        """Offer a chunk that was fetched from the tier with index `tier` to the nearer tiers."""
        self._put_off([nearer for nearer in range(tier) if self._policies[nearer] != "never"], offer)

    def _offer(self, policy: str, chunk: Chunk, units: int, key: bytes, *, finished: bool = False) -> None:
        if self._space.name:
            tiers = [tier for tier, theirs in enumerate(self._policies) if theirs == policy]
            self._put_off(tiers, Offer(chunk, units, key), first=finished and self._finished_first)

    def _put_off(self, tiers: list[int], offer: Offer, *, first: bool = False) -> None:
        for tier in tiers:
            queue = self._queues[tier]
            if queue.rests > self._context.steps.planned:
                self._counters["store_dropped_tier_failed"] += 1
            else:
                place = tier, offer.chunk, offer.key
                self._offers[place] = offer
                queue.put(place, first=first)
                self._shares.put(place, offer.chunk.tenant)
        while len(self._offers) > OFFERS_MAX:
            self._take(self._shares.most())
            self._counters["store_dropped_queue_full"] += 1

    def _take(self, place: _OfferKey) -> Offer:
        self._shares.pop(place)
        self._queues[place[0]].remove(place)
        return self._offers.pop(place)

    # ---- stores ---------------------------------------------------------------------------------------------------

    def plan(self, due: list[TierOrder], *, idle: bool = False) -> None:
        """Append a step's store orders to `due`, as many as may be under way.

        `idle` says that the step computes nothing.
        """
        if not idle:
            self._stops_s, self._rested = _NEVER, False
        elif self._stops_s == _NEVER:
            self._stops_s = time.monotonic() + self.idle_s_max
        if self._offers:
            for queue in self._queues:
                while (place := self._next(queue)) is not None:
                    self._store(place, due)

    def _next(self, queue: _TierOffers) -> _OfferKey | None:
        """Return the offer of `queue` that the next step can store or drop first, or None."""
        if len(queue.under_way) >= self._max or time.monotonic() >= self._stops_s:
            return None
        return next((place for place in chain(queue.first, queue.others) if not self._offers[place].waits), None)

    def _store(self, place: _OfferKey, due: list[TierOrder]) -> None:
        """Remove an offer from its queue. Append its order to `due` if the pool still holds the chunk."""
        offer = self._take(place)
        if not (offer.stands and self._catalog.holds(offer.chunk)):
            self._counters["store_dropped_evicted"] += 1
            return
        chunk, tier, name = offer.chunk, place[0], chunk_name(offer.key)
        at = tier, chunk.slot, chunk.group, offer.units
        order = TierOrder(self._new_id(), True, *at, name, self._split(chunk.group), "", chunk.stamp)  # noqa: FBT003
        owner = Owner(STORES, order.id)
        try:
            self._catalog.lease(owner, [chunk])
        except EvictedError:
            self._counters["store_dropped_evicted"] += 1
            return
        self._queues[tier].under_way[order.id] = owner
        due.append(order)
        if self.tier_blocks is not None:
            self.tier_blocks.ordered(order, chunk, offer.key)

    def over(self, order: TierOrder, *, ok: bool) -> None:
        """End a store that every rank has reported. `ok` says that the store has succeeded on all ranks.

        A chunk that was evicted during its store may have been in a damaged slot, so its failure says nothing about the
        tier.
        """
        queue = self._queues[order.tier]
        owner = queue.under_way.pop(order.id)
        stands = all(map(self._catalog.holds, self._catalog.leased.get(owner, ())))
        self._catalog.release(owner, hit=False)
        self._counters["chunks_stored" if ok else "chunks_not_stored"] += 1
        if not ok and stands:
            queue.rests = self._context.steps.planned + REST_STEPS
            for place in [*chain(queue.first, queue.others)]:
                self._take(place)
                self._counters["store_dropped_tier_failed"] += 1

    def clear(self) -> None:
        """Drop all offers."""
        for place in [*self._offers]:
            self._take(place)

    @property
    def pending(self) -> bool:
        """Whether the next step can store any offer."""
        return bool(self._offers) and any(self._next(queue) is not None for queue in self._queues)

    def rest(self) -> None:
        """Record once that offers wait, because the engine makes no more steps for the offers alone."""
        if self._offers and not self._rested:
            self._rested = True
            why = f"store_idle_s_max={self.idle_s_max:g}" if time.monotonic() >= self._stops_s else "no answer"
            # with a holder, the engine would go on making steps for such offers
            if any(offer.waits for offer in self._offers.values()):
                why = "no holder"
            self._counters["stores_put_off"] += len(self._offers)
            self._counters.fault("stores_too_slow", chunks=len(self._offers), tiers=self._waited_for, why=why)

    def end(self) -> None:
        """Drop and report all offers, because the engine ends."""
        if self._offers:
            self._counters["store_dropped_engine_ended"] += len(self._offers)
            warn("stores_lost", chunks=len(self._offers), tiers=self._waited_for, why="the engine is shutting down")
            self.clear()

    @property
    def _waited_for(self) -> str:
        """The names of the tiers to which chunks are offered, separated by commas."""
        return ", ".join(self._names[tier] for tier in sorted({place[0] for place in self._offers}))
