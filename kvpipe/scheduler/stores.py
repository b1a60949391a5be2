"""Stores chunks in tiers: chunks are offered, wait in a queue, and are stored by the ranks."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from kvpipe.cache.catalog import Catalog, Chunk, Owner
from kvpipe.cache.fair import FairShares
from kvpipe.geometry import Geometry
from kvpipe.messages import TierOrder
from kvpipe.statemachine import chunk as chunk_m
from kvpipe.statemachine.request import FINISHED
from kvpipe.tiers.finder import chunk_name
from kvpipe.tiers.namespace import Namespace
from kvpipe.trace.log import Counters, warn

if TYPE_CHECKING:
    from kvpipe.scheduler.records import Tracked

STORE_SHARE: Final = 0.25
"""The largest share of the pool that chunks on their way to tiers hold."""
OFFERS_MAX: Final = 4096
"""How many chunks may wait to be stored. If there are more, the tenant with most loses its oldest one."""
REST_STEPS: Final = 100
"""For how many steps nothing is stored in a tier after a failed store: the ranks' breakers would refuse it."""
STORES: Final = "\0store"
"""The owner of leases of chunks on their way to a tier; no request id has a zero byte."""
_NEVER: Final = float("inf")


class Offer(NamedTuple):
    """A chunk to be stored up to its mark (`units`, `key`)."""

    chunk: Chunk
    units: int
    key: bytes

    @property
    def stands(self) -> bool:
        """Whether the chunk still has that mark."""
        if self.chunk.state.row not in {chunk_m.READY, chunk_m.GROWING}:
            return False
        return any(mark.key == self.key and mark.units == self.units for mark in self.chunk.marks)


_OfferKey = tuple[int, Chunk, bytes]
"""(index of the tier, chunk, key)."""


class Storing:
    """One per engine that has tiers."""

    def __init__(
        self,
        catalog: Catalog,
        geometry: Geometry,
        space: Namespace,
        *,
        policies: Sequence[str],
        bytes_in_flight_max: int,
        counters: Counters,
        new_id: Callable[[], int],
        split: Callable[[int], int] = lambda _: 0,
        idle_s_max: float = _NEVER,
        names: Sequence[str] = (),
    ) -> None:
        """`policies`: per tier, its configuration key `store`. Nothing is offered before `space` has a name.

        `idle_s_max`: how long stores are begun in steps that compute nothing. `names`: of the tiers, for the log.

        `bytes_in_flight_max`: of slots, per rank. `split(group)`: the number of parts in which a chunk is stored.
        """
        self._split = split
        self._catalog, self._space, self._policies = catalog, space, policies
        self._counters, self._new_id, self._per_chunk = counters, new_id, geometry.units_per_chunk
        self._states = geometry.states
        self._in_flight_max = bytes_in_flight_max // geometry.slot_bytes
        self._offers: OrderedDict[_OfferKey, Offer] = OrderedDict()
        self._shares = FairShares[_OfferKey](catalog.account_of)  # of `_offers`
        self._names = names
        self._rests = [0] * len(policies)  # until which step nothing is stored in a tier
        self._step = 0
        self.idle_s_max, self._stops_s, self._rested = idle_s_max, _NEVER, False
        self.under_way: dict[int, Owner] = {}
        """By order id, the owner of the lease, for each store that not all ranks have reported."""

    @property
    def _max(self) -> int:
        """How many stores may be under way, of a pool whose size ranks report later."""
        return max(1, min(int(self._catalog.slots * STORE_SHARE), self._in_flight_max))

    # ---- what is offered ------------------------------------------------------------------------------------------

    def landed(self, tracked: Tracked, chunk: Chunk, units: int) -> None:
        """A piece has landed: offer its chunk if it is whole, or if this request will not fill it any further."""
        ended = units == self._per_chunk or chunk.group in self._states or tracked.state.row == FINISHED
        if ended or self._states:  # else only where a state is kept: it is of no use without the attention up to there
            for mark in chunk.marks:
                if mark.units == units and (ended or mark.keep):
                    self._offer("all", chunk, units, mark.key)

    def ended(self, tracked: Tracked) -> None:
        """The request is over: offer the chunk that it ended in, as far as it is filled."""
        for opened in tracked.saving.opened:
            if opened is not None and opened.filled < self._per_chunk and opened.base < tracked.stored_units:
                for mark in opened.chunk.marks:
                    self._offer("all", opened.chunk, mark.units, mark.key)

    def used(self, chunks: list[Chunk]) -> None:
        """A second request uses `chunks`: offer them to tiers with `store=second_use`."""
        for chunk in chunks:
            for mark in chunk.marks[-1:]:
                self._offer("second_use", chunk, mark.units, mark.key)

    def brought(self, tier: int, offer: Offer) -> None:
        """A chunk was fetched from the tier with the index `tier`: offer it to the nearer tiers."""
        self._put_off([nearer for nearer in range(tier) if self._policies[nearer] != "never"], offer)

    def _offer(self, policy: str, chunk: Chunk, units: int, key: bytes) -> None:
        if self._space.name:
            tiers = [tier for tier, theirs in enumerate(self._policies) if theirs == policy]
            self._put_off(tiers, Offer(chunk, units, key))

    def _put_off(self, tiers: list[int], offer: Offer) -> None:
        for tier in tiers:
            if self._rests[tier] > self._step:
                self._counters["store_dropped_tier_failed"] += 1
            else:
                place = tier, offer.chunk, offer.key
                self._offers[place] = offer
                self._shares.put(place, offer.chunk.tenant)
        while len(self._offers) > OFFERS_MAX:
            self._take(self._shares.most())
            self._counters["store_dropped_queue_full"] += 1

    def _take(self, place: _OfferKey) -> Offer:
        self._shares.pop(place)
        return self._offers.pop(place)

    # ---- what is stored -------------------------------------------------------------------------------------------

    def plan(self, due: list[TierOrder], *, idle: bool = False) -> None:
        """Append a step's store orders to `due`, as many as may be under way. `idle`: the step computes nothing."""
        self._step += 1
        if not idle:
            self._stops_s, self._rested = _NEVER, False
        elif self._stops_s == _NEVER:
            self._stops_s = time.monotonic() + self.idle_s_max
        while self.pending:
            place = next(iter(self._offers))
            offer = self._take(place)
            if not (offer.stands and self._catalog.holds(offer.chunk)):
                self._counters["store_dropped_evicted"] += 1
            else:
                chunk, name = offer.chunk, chunk_name(offer.key)
                at = place[0], chunk.slot, chunk.group, offer.units
                order = TierOrder(self._new_id(), True, *at, name, self._split(chunk.group))  # noqa: FBT003
                owner = self.under_way[order.id] = Owner(STORES, order.id)
                due.append(order)
                self._catalog.lease(owner, [chunk])

    def over(self, order: TierOrder, *, ok: bool) -> None:
        """Every rank has reported a store. `ok`: it succeeded on all of them."""
        self._catalog.release(self.under_way.pop(order.id), hit=False)
        self._counters["chunks_stored" if ok else "chunks_not_stored"] += 1
        if not ok:
            self._rests[order.tier] = self._step + REST_STEPS
            for place in [place for place in self._offers if place[0] == order.tier]:
                self._take(place)
                self._counters["store_dropped_tier_failed"] += 1

    def clear(self) -> None:
        """Drop all offers."""
        for place in [*self._offers]:
            self._take(place)

    @property
    def pending(self) -> bool:
        """Whether an offer waits only for the next step."""
        return bool(self._offers) and len(self.under_way) < self._max and time.monotonic() < self._stops_s

    def rest(self) -> None:
        """The engine makes no more steps until it has other work: offers wait for that, and are counted once."""
        if self._offers and not self._rested:
            self._rested = True
            why = f"store_idle_s_max={self.idle_s_max:g}" if time.monotonic() >= self._stops_s else "no answer"
            self._counters["stores_put_off"] += len(self._offers)
            self._counters.fault("stores_too_slow", chunks=len(self._offers), tiers=self._waited_for, why=why)

    def end(self) -> None:
        """The engine ends: what is still offered is lost."""
        if self._offers:
            self._counters["store_dropped_engine_ended"] += len(self._offers)
            warn("stores_lost", chunks=len(self._offers), tiers=self._waited_for, why="the engine ends")
            self.clear()

    @property
    def _waited_for(self) -> str:
        """The names of the tiers that offers are for."""
        return ", ".join(self._names[tier] for tier in sorted({place[0] for place in self._offers}))
