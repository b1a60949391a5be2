"""The scheduler side of tiers: looks up chunks for waiting requests, and plans the ranks' fetches and stores.

A fetched chunk is reserved and published like a saved chunk, so an engine's lookup searches memory only. The
scheduler's thread makes the keys of each new lookup, processes each answer once, and makes one order per chunk.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvpipe.cache.chunks import Chunk, EvictedError, Owner
from kvpipe.cache.prefixes import Prefixes
from kvpipe.protocol.limits import NO_LIMITS, RequestLimits
from kvpipe.protocol.messages import Tally, TierOrder
from kvpipe.scheduler.events import Subscriber
from kvpipe.scheduler.jobs import PATIENCE_S
from kvpipe.scheduler.lacking import lacking, lacking_states, lease_needed, needed_chunks
from kvpipe.scheduler.patience import Patience
from kvpipe.scheduler.reported import awaited
from kvpipe.scheduler.stages import (
    AHEAD_S_MAX,
    FIRST,
    AheadStage,
    RequestStage,
    Stage,
    TierFetch,
    TierStore,
    WantedPrompt,
)
from kvpipe.scheduler.stores import Offer, Storing
from kvpipe.scheduler.tier_blocks import TierBlocks
from kvpipe.scheduler.unpublished import UnpublishedFetches
from kvpipe.statemachine import job as job_m
from kvpipe.statemachine import stage as m
from kvpipe.statemachine.core import Watch
from kvpipe.tiers.finder import Finder, Place, TierLookup
from kvpipe.tiers.namespace import Namespace
from kvpipe.tiers.prefix_keys import PrefixKeys, chunk_name
from kvpipe.trace import miss_reasons

if TYPE_CHECKING:
    from kvpipe.protocol.engine import Precedence, Request
    from kvpipe.scheduler.context import Context
    from kvpipe.scheduler.hooks import Published

SHARE: Final = 0.75
"""The largest share of the pool that the chunks of waiting requests may take."""
ORDERS_PER_LANE: Final = 4
"""The number of fetches per lane of a tier that ranks have at once. Further fetches wait here and can be cancelled."""
AHEAD_SHARE: Final = 0.25
"""The largest share of the pool for chunks that are fetched ahead of requests. `SHARE` includes this share."""
AGAIN_S: Final = 0.02
"""Seconds until a consumer asks tiers again for missing chunks, because a producer may be storing them."""


class Staging(Subscriber):
    """The stages, fetches and stores of an engine that has tiers."""

    def __init__(
        self,
        context: Context,
        finder: Finder,
        *,
        ranks: int,
        new_id: Callable[[], int],
        stores: bool,
        loads: bool = True,
        published: Published | None = None,
    ) -> None:
        """Start without stages. No tier is asked before `space`, the namespace, has a name.

        If `stores` is False, this engine is a consumer and does not write to tiers. The consumer's prompts are computed
        by a producer, which may still be storing the chunks. If `loads` is False, this engine is a producer, and
        consumers wait for the chunks that the producer stores. `published` is notified of the chunks that tiers have.
        """
        settings, geometry = context.settings, context.geometry
        self.finder, self._context, self._catalog, self._geometry = finder, context, context.catalog, geometry
        self._ranks, self._skipped_s, self._planned_s = ranks, 0.0, 0.0
        slow_ms_max = settings.lookup_slow_ms_max if stores else settings.lookup_ms_max
        self.patience = Patience(geometry.whole_token_bytes, settings.lookup_ms_max, slow_ms_max)
        self._again_s = self.patience.lookup_s_max  # seconds until a request that got too few chunks asks tiers again
        self._counters, self._new_id = context.counters, new_id
        self._consumes = not stores
        self.watch: Watch | None = None  # the watch of each stage that begins from now on
        self.watch_transfer: Watch | None = None
        self.space = Namespace()
        self.stores = Storing(context, finder, self.space, new_id=new_id, stores=stores, loads=loads)
        self.tier_blocks = TierBlocks(context, finder, self.space, published) if published is not None else None
        self.stores.tier_blocks = self.tier_blocks
        self.machine, self.transfer_machine = m.STAGE.compile(), job_m.JOB.compile()
        self.names = tuple(tier.name for tier in finder.tiers)
        self._per_chunk = geometry.units_per_chunk
        self._fetches_max = [tier.spec.lanes * ORDERS_PER_LANE for tier in finder.tiers]
        self._fetches = [0] * len(self.names)  # fetches that the ranks carry out, by tier
        self._leased = 0  # chunks that stages lease
        self._unpublished = UnpublishedFetches(context.catalog)
        self._due: list[TierOrder] = []
        self._transfers: dict[int, TierStore | TierFetch] = {}
        self._fetching: dict[tuple[int, bytes], TierFetch] = {}
        self._asking: list[RequestStage] = []  # stages of requests, in the order of their lookups
        self._asked = 0  # the number of stages in `_asking` that began before the last plan
        self._found: list[Stage] = []
        self._stages: set[Stage] = set()
        self._ahead: set[AheadStage] = set()  # the stages for which no request waits
        self._latest = FIRST  # no stage with a later precedence holds chunks
        self._unreadable: dict[int, frozenset[int]] = {}  # the tiers that a rank cannot read, by rank
        self._numbers = 0
        self._growing = [group for group in range(len(geometry.groups)) if group not in geometry.states]
        self._full = [group for group in self._growing if geometry.groups[group].window_tokens is None]
        self._states = sorted(geometry.states)
        self._counted = self._full[0] if self._full else 0  # fetched tokens are counted in this group only

    # ---- waiting requests -----------------------------------------------------------------------------------------

    def ask(
        self, stage: RequestStage | None, request: Request, local: int, step: int, *, precedence: Precedence,
        limits: RequestLimits = NO_LIMITS,
    ) -> tuple[RequestStage | None, bool]:  # fmt: skip
        """Return (the request's stage, whether the request waits). Within a step, the result stays the same.

        `local` is the number of units that the engine's own cache holds. The stage with the lowest `precedence` is
        served first.
        """
        units_max = limits.load_units_max(local * (unit := self._geometry.unit_tokens), unit)
        if stage is not None and self._asks_again(stage, step):
            self.end(stage)
            self._counters["tier_lookup_again"] += 1
            stage = None
        if stage is None:
            wanted = WantedPrompt(request, self._context.prefixes, request, units_max, self.finder.asked(limits))
            lookup = self._asks(wanted, local, continued=False)
            if lookup is None:
                return None, False
            stage = RequestStage(
                self.machine, self._numbers, self.watch, wanted, lookup, precedence=precedence, step=step,
                now_s=self._now_s(),
            )  # fmt: skip
            self._stages.add(stage)
            self.finder.look_up(lookup)
            self._asking.append(stage)
        stage.local = local
        if stage.wanted.units_max != units_max:
            stage.wanted = stage.wanted._replace(units_max=units_max)
        if stage.asked_step != step:
            stage.waited_s += self._now_s() - self._planned_s  # not since the last lookup: lookups may be skipped
            stage.asked_step = step
            self.look(stage)
        return stage, stage.holds_up

    def _asks_again(self, stage: RequestStage, step: int) -> bool:
        """Whether to ask tiers again, because the stage got too few chunks, has waited, and may hold more now."""
        if stage.short_at_s + self._again_s > self._now_s() or stage.holds_up or stage.asked_step == step:
            return False
        return stage.precedence < self._latest or self._leased + len(self._fetching) < self._held_max

    def ahead(
        self, asked: Request, prefixes: Prefixes, request: Request | None, *, announced: bool = False
    ) -> AheadStage | None:
        """Begin to fetch a prompt's chunks for which no request waits. Returns None if tiers need not be asked.

        Waiting requests have priority: this stage uses only free lanes, and room that no waiting request needs. If a
        hint has `announced` a request, the chunks count towards the share of announced requests.
        """
        catalog = self._catalog
        room = max(1, int(catalog.slots * AHEAD_SHARE))
        if announced:
            room = min(room, catalog.room_ahead(prefixes.tenant(asked)))
        wanted = WantedPrompt(asked, prefixes, request)
        lookup = self._asks(wanted, 0, continued=True) if room else None
        if lookup is None:
            return None
        stage = AheadStage(
            self.machine, self._numbers, self.watch, wanted, lookup, room=room, announced=announced, now_s=self._now_s()
        )
        self._stages.add(stage)
        self._ahead.add(stage)
        self.finder.look_up(lookup)
        return stage

    def _asks(self, wanted: WantedPrompt, local: int, *, continued: bool) -> TierLookup | None:
        """Return a lookup in tiers for a new stage, and count the stage in `_numbers`.

        Returns None if tiers need not be asked.
        """
        usable = self.space.name and self.finder.usable and self._unpublished.may_end
        if not usable or wanted.tiers == frozenset():
            return None
        units, stop = max(wanted.prefixes.longest(wanted.asked, continued=continued), local), wanted.stop
        if units >= stop or (units and stop - units < self._per_chunk):
            return None  # computing a few tokens is faster than fetching them
        self._numbers += 1
        self._counters["tier_lookup"] += 1
        return self._lookup(wanted, units)

    def _lookup(self, wanted: WantedPrompt, units: int) -> TierLookup:
        """Return a lookup of the chunks that memory lacks. Memory has the prompt's first `units` units."""
        stop, prefixes = wanted.stop, wanted.prefixes
        keys, states = prefixes.unit_keys(wanted.asked)[:stop], prefixes.state_keys(wanted.asked)
        whole = range(self._per_chunk, stop + 1, self._per_chunk)
        places = [(group, end) for group in self._growing for end in lacking(self._catalog, group, keys, whole)]
        places += lacking_states(self._catalog, self._states, states, range(units + 1, stop + 1))
        lookup = TierLookup(
            PrefixKeys(keys, self._growing, states, self._states, self._full), tuple(places), tiers=wanted.tiers,
            space=self.space.name, also=self.space.also, seconds_max=self.patience.lookup_s_max,
        )  # fmt: skip
        return lookup if self.tier_blocks is None else self.tier_blocks.watch(lookup)

    def look(self, stage: Stage) -> None:
        """Process the tiers' answer to the stage's lookup, if there is one. After the deadline, stop waiting."""
        row = stage.state.row
        if row == m.ASKING and stage.lookup.done:
            self._take_answer(stage)
        elif row != m.FOUND and stage.holds_up and self._late(stage):
            self._came_short(stage, miss_reasons.TIER_SLOW if stage.slow else miss_reasons.TIER_LATE)
            if row == m.FETCHING:
                stage.todo.clear()
                stage.fire(m.DEADLINE)
            else:
                self._end(stage, m.DEADLINE)

    def _late(self, stage: Stage) -> bool:
        """Whether the stage is past its deadline, or the stage's request has waited for `wait_s_max`."""
        wait_s_max = self.patience.wait_s_max(sum(stage.taken.values()), slow=stage.slow)
        over = isinstance(stage, AheadStage) and self._now_s() >= stage.deadline_at_s
        return over or stage.waited_s >= wait_s_max

    def _came_short(self, stage: Stage, why: str) -> None:
        stage.why = why
        if isinstance(stage, RequestStage):
            stage.short_at_s = self._now_s()
            self._counters["tier_lookup_slow" if why == miss_reasons.TIER_SLOW else "tier_lookup_late"] += 1
        else:
            self._counters["prefetch_late"] += 1

    def _awaits(self, stage: Stage) -> bool:
        """Whether to ask tiers again, because a producer may store missing chunks before this engine computes them."""
        if not self._consumes or not isinstance(stage, RequestStage) or stage.lookup.down:
            return False
        stop, units, now_s = stage.wanted.stop, max(self._reach(stage), stage.local), self._now_s()
        wait_s_max = self.patience.await_s_max(
            (stop - units) * self._geometry.unit_tokens, whole=stop - units >= self._per_chunk
        )
        if units >= stop or now_s - stage.begun_at_s >= wait_s_max:
            return False
        if now_s >= stage.again_at_s:
            stage.again_at_s, stage.waited_s = now_s + AGAIN_S, 0.0
            stage.lookup = self._lookup(stage.wanted, max(stage.prefixes.longest(stage.asked), stage.local))
            self._counters["tier_lookup_awaiting"] += 1
            self.finder.look_up(stage.lookup)
        return True

    def _take_answer(self, stage: Stage) -> None:
        lookup = stage.lookup
        if self.tier_blocks is not None:
            self.tier_blocks.missed(lookup)
        if self._awaits(stage):
            return
        if isinstance(stage, RequestStage):
            slow = {tier for tier in {*lookup.found.values()} if self.patience.slow(tier)}
            if slow and self.patience.passes(asked=stage.asked_step == self._context.steps.planned):
                lookup.found = {place: tier for place, tier in lookup.found.items() if tier not in slow}
                self._came_short(stage, miss_reasons.TIER_SLOW)
            else:
                stage.slow = bool(slow)
        if self._reach(stage) > max(stage.prefixes.longest(stage.asked, continued=stage.ahead), stage.local):
            stage.fire(m.SOME)
            self._found.append(stage)
        else:
            stage.why = miss_reasons.TIER_DOWN if lookup.down else stage.why
            self._end(stage, m.NOTHING)

    def _take_answers(self) -> None:
        """Process the tiers' answers in each step, because the engine may repeat its lookups only seconds later."""
        for stage in self._asking[: self._asked]:
            if stage.state.row == m.ASKING and stage.lookup.done:
                self._planned(self._take_answer, stage)
        self._asking = [stage for stage in self._asking if stage.state.row == m.ASKING]
        self._asked = len(self._asking)

    def _reach(self, stage: Stage) -> int:
        """Return the length in units of the longest prefix that memory and tiers hold together."""
        extra: tuple[dict[bytes, object], ...] = tuple({} for _ in self._geometry.groups)
        for place in stage.lookup.found:
            extra[place[0]][stage.lookup.key(place)] = stage
        return stage.prefixes.longest(stage.asked, extra, continued=stage.ahead, units_max=stage.wanted.units_max)

    def why(self, stage: Stage | None, why: str) -> str:
        """Return the reason of a miss, as far as tiers know a reason. Otherwise return `why`, the reason in memory."""
        if why in {"", miss_reasons.BELOW_MINIMUM}:
            return why
        if stage is not None:
            return stage.why or why
        return why if self.finder.usable or why == miss_reasons.BEING_SAVED else miss_reasons.TIER_DOWN

    def brought(self, stage: Stage | None, tokens: int) -> tuple[tuple[str, int], ...]:
        """Return pairs (tier's name, number of tokens): how many of a hit's `tokens` tokens came from each tier."""
        return () if stage is None else stage.brought(self.names, tokens)

    def end(self, stage: Stage | None) -> None:
        """End the stage, because its request was admitted, preempted or finished, or because the cache was reset."""
        if stage is not None and not stage.state.final:
            self._end(stage, m.END)

    def _end(self, stage: Stage, event: str) -> None:
        stage.fire(event)
        stage.todo.clear()
        self._stages.discard(stage)
        if isinstance(stage, AheadStage):
            self._ahead.discard(stage)
        self._leased -= self._catalog.release(stage.owner, hit=False)

    # ---- fetching -------------------------------------------------------------------------------------------------

    def plan(self, *, stores: bool, idle: bool = False) -> tuple[TierOrder, ...]:
        """Plan a step's orders: fetches for stages whose lookup found chunks, then stores, as far as lanes are free.

        `idle` says that the step computes nothing. Every exception is contained here, and costs only misses. Raising
        would lose the step's loads, and the orders that were already made, on which the ranks rely.
        """
        self._planned_s = self._now_s()
        self._take_answers()
        waiting, self._found = self._found, []
        waiting.sort(key=lambda stage: (stage.ahead, stage.precedence))
        for stage in waiting:
            self._planned(self._fetch, stage)
        if not stores:
            self.stores.clear()
        begun = len(self._due)
        try:
            self.stores.plan(self._due, idle=idle)
        except Exception as e:  # noqa: BLE001
            self._counters.fault("store_not_planned", error=repr(e))
        for order in self._due[begun:]:
            self._transfers[order.id] = TierStore(self.transfer_machine, order, self.space.name, self.watch_transfer)
        due, self._due = self._due, []
        return tuple(due)

    def _planned(self, part: Callable[[Stage], None], stage: Stage) -> None:
        try:
            part(stage)
        except Exception as e:  # noqa: BLE001
            self._counters.fault("fetch_not_planned", request=stage.owner.request, error=repr(e))
            self.end(stage)

    def _fetch(self, stage: Stage) -> None:
        """Order the chunks that a stage still needs, as far as lanes are free. Later steps order the other chunks."""
        if stage.state.row == m.FOUND:
            self._unpublished.count_engines()
            needed = lease_needed(  # before the fetches, because a fetch may evict chunks that are not leased
                lambda: needed_chunks(self._catalog, self._geometry, stage, self._reach(stage)),
                lambda chunks: self._lease(stage, chunks),
            )
            if needed is None:
                stage.why = miss_reasons.TIER_LOST
                if isinstance(stage, RequestStage):
                    stage.short_at_s = self._now_s()
                self._end(stage, m.END)
                return
            stage.todo.extend(place for place, chunk in needed if chunk is None)
            stage.fire(m.SENT if stage.todo else m.NO_ROOM)
        while stage.state.row == m.FETCHING and stage.todo and self._order(stage, stage.todo[0]):
            stage.todo.popleft()
        if stage.todo:
            self._found.append(stage)
        elif stage.state.row == m.FETCHING and not stage.waits:
            stage.fire(m.NO_ROOM)

    def _order(self, stage: Stage, place: Place) -> bool:
        """Order one chunk, or join another stage's order of the same chunk.

        Returns False if no lane is free yet, or if a node's holder has yet to grant more slots.
        """
        group, key, tier = place[0], stage.lookup.key(place), stage.lookup.found[place]
        transfer = self._fetching.get((group, key))
        if transfer is None:
            there = self._catalog.find(group, key)
            if there is not None:
                self._lease(stage, [there])  # if the chunk was evicted, the catalog does not know it, and it is fetched
            if self._catalog.known(group, key):
                return True  # the chunk has arrived meanwhile, or is being saved
            lanes = self._fetches_max[tier]
            if self._fetches[tier] >= (max(1, lanes // ORDERS_PER_LANE) if stage.ahead else lanes):
                return False
            room = self._room(stage, 1)
            transfer = self._reserve(stage, place, key) if room else None
            if transfer is None and room and not stage.ahead and self._unpublished.gets_slots:
                return False  # ending other stages would free no slot
            while transfer is None and not stage.ahead and not self._unpublished.node and self._give_way(stage):
                transfer = self._reserve(stage, place, key)
            if transfer is None:
                if isinstance(stage, RequestStage):
                    self._counters["tier_no_room"] += 1
                    stage.short_at_s = self._now_s()
                stage.todo.clear()
                stage.todo.append(place)  # the caller removes the first place of `todo`, so that it is empty then
                return True
        transfer.stages.append(stage)
        stage.waits.add(transfer.order.id)
        return True

    @property
    def _held_max(self) -> int:
        """The number of chunks that waiting requests may hold. The number changes with the size of the pool."""
        held_max = self._unpublished.held_max
        return max(1, int(self._catalog.slots * SHARE) if held_max is None else held_max)

    def _room(self, stage: Stage, chunks: int) -> int:
        """Return how many more chunks the stage may hold.

        For a waiting request, other stages are ended until `chunks` chunks fit or no more stages can be ended.
        """
        room = self._held_max - self._leased - len(self._fetching)
        if isinstance(stage, AheadStage):
            return max(0, min(room, stage.room - stage.leased - len(stage.waits)))
        while room < chunks and self._give_way(stage):
            room = self._held_max - self._leased - len(self._fetching)
        return max(0, room)

    def _give_way(self, stage: Stage) -> bool:
        """Make room for `stage`, whose request waits. Returns whether any stage was ended.

        If stages fetch ahead of requests, all of them are ended. Otherwise the stage with the last precedence is ended.
        """
        if self._ahead:
            for one in [*self._ahead]:
                self._counters["prefetch_gave_way"] += 1
                self._end(one, m.END)
            return True
        if stage.precedence >= self._latest:  # a quick check, so that most calls do not search thousands of stages
            return False
        holding = (one for one in self._stages if one.leased and isinstance(one, RequestStage))
        last = max(holding, key=lambda one: one.precedence, default=None)
        self._latest = last.precedence if last is not None else stage.precedence
        if last is None or last.precedence <= stage.precedence:
            return False
        self._counters["tier_gave_way"] += 1
        last.short_at_s = self._now_s()
        self._end(last, m.END)
        return True

    def _lease(self, stage: Stage, chunks: list[Chunk]) -> bool:
        """Lease `chunks`, as far as the stage may hold more chunks.

        Returns False, and leases nothing, if the holder of a node's memory has evicted one of the chunks.
        """
        chunks = chunks[: self._room(stage, len(chunks))]
        if not chunks:
            return True
        try:
            self._catalog.lease(stage.owner, chunks)
        except EvictedError:
            return False
        self._leased += len(chunks)
        stage.leased += len(chunks)
        self._latest = max(self._latest, stage.precedence)
        if isinstance(stage, AheadStage) and stage.announced:
            self._catalog.ahead.keep(chunks)
        return True

    def _reserve(self, stage: Stage, place: Place, key: bytes) -> TierFetch | None:
        group, units = place
        chunk = self._catalog.reserve(group, stage.tenant) if self._unpublished.has_slot else None
        if chunk is None:
            return None
        base = units - 1 if group in self._geometry.states else (units - 1) // self._per_chunk * self._per_chunk
        lookup, name = stage.lookup, chunk_name(key)
        follows = lookup.key((group, base)) if base and group not in self._geometry.states else b""
        if follows and not self._full and not self._catalog.known(group, follows):
            follows = b""  # the window begins here, so no earlier chunk is needed
        keep = units - base < self._per_chunk
        piece = self._catalog.write(chunk, units - base, key, keep=keep, base=base, before=follows)
        space, split = lookup.elsewhere.get(place, ("", self.finder.split(group)))
        at = lookup.found[place], chunk.slot, group, units - base
        order = TierOrder(self._new_id(), False, *at, name, split, space, chunk.stamp)  # noqa: FBT003
        transfer = TierFetch(self.transfer_machine, order, lookup.space, self.watch_transfer, piece)
        self._transfers[order.id] = self._fetching[group, key] = transfer
        self._fetches[order.tier] += 1
        self._due.append(order)
        self._counters["chunks_fetching"] += 1
        return transfer

    # ---- reports --------------------------------------------------------------------------------------------------

    def reported(self, order_id: int, tally: Tally) -> bool:
        """Count the ranks' reports on a tier order. Returns whether the order exists."""
        transfer = self._transfers.get(order_id)
        if transfer is None:
            return False
        if transfer.count(tally, self._ranks):
            del self._transfers[order_id]
            if isinstance(transfer, TierFetch):
                self._landed(transfer)
            else:
                self._stored(transfer)
        return True

    def _stored(self, transfer: TierStore) -> None:
        order = transfer.order
        done = transfer.state.row == job_m.DONE
        self.stores.over(order, ok=done)
        if done:
            self.finder.stored(order.tier, transfer.space, order.chunk, order.group)
        if self.tier_blocks is not None:
            self.tier_blocks.stored(order, transfer.space, ok=done)

    def _landed(self, transfer: TierFetch) -> None:
        order, piece, done = transfer.order, transfer.piece, transfer.state.row == job_m.DONE
        self._fetches[order.tier] -= 1
        self._fetching.pop((order.group, piece.key), None)
        landed = False
        if done:
            landed = self._catalog.landed(piece)
            self._counters["chunks_fetched"] += 1
            if landed:
                self._context.events.fetched(transfer.request, piece)
        else:
            self._catalog.lost(piece)
            self._counters["chunks_not_fetched"] += 1
        if landed and not piece.chunk.is_published:
            self._fetching[order.group, piece.key] = transfer
            self._unpublished.add(transfer)
        else:
            self._end_fetch(transfer)

    def settle(self) -> None:
        """End the fetches whose chunks a node's holder has published since the last step, or will not publish."""
        for transfer in self._unpublished.take_settled():
            self._end_fetch(transfer)

    def _end_fetch(self, transfer: TierFetch) -> None:
        """Notify the stages that wait for a fetch: the chunk was published, or will never be published."""
        order, piece, done = transfer.order, transfer.piece, transfer.state.row == job_m.DONE
        self._fetching.pop((order.group, piece.key), None)
        there = self._catalog.find(order.group, piece.key)
        for stage in transfer.stages:
            stage.waits.discard(order.id)
            self._brought(stage, transfer, there)
        if there is piece.chunk and done:
            if all(stage.ahead for stage in transfer.stages):
                self._catalog.ahead.brought(piece.chunk)
            self.stores.brought(order.tier, Offer(piece.chunk, order.units, piece.key))
        if done and self.tier_blocks is not None:  # last, because stages must end even if this call raises
            self.tier_blocks.fetched(order, transfer.space, there or piece.chunk, piece.key)

    def _brought(self, stage: Stage, transfer: TierFetch, chunk: Chunk | None) -> None:
        """Tell `stage` that `transfer` has ended. `chunk` can be found now. It is None after a failure."""
        done = transfer.state.row == job_m.DONE
        if not stage.holds_up:
            stage.fire(m.CAME if done else m.LOST)
            return
        if not done or chunk is None or not self._lease(stage, [chunk]):
            stage.why = miss_reasons.TIER_LOST
            stage.todo.clear()
            stage.fire(m.LOST)
            return
        if transfer.order.group == self._counted:
            tier, tokens = transfer.order.tier, transfer.order.units * self._geometry.unit_tokens
            stage.taken[tier] = stage.taken.get(tier, 0) + tokens
        stage.fire(m.CAME if stage.waits or stage.todo else m.CAME_LAST)

    # ---- time, resets and what is pending -------------------------------------------------------------------------

    def expire(self) -> None:
        """For tests: move this clock forward, so that no stage waits, and tiers are asked again for short hits."""
        self._skipped_s += AHEAD_S_MAX + self.patience.lookup_s_max

    def _now_s(self) -> float:
        return time.monotonic() + self._skipped_s

    def reset(self) -> None:
        """Forget all chunks that tiers have or were offered, because another namespace is used from now on."""
        self.stores.clear()
        self._found, self._asking, self._asked = [], [], 0
        for stage in list(self._stages):
            self._end(stage, m.END)
        if self.tier_blocks is not None:  # last, because stages must end even if this call raises
            self.tier_blocks.reset()

    def ranks_read(self, rates: dict[int, float], unreadable: dict[int, frozenset[int]]) -> None:
        """Record the read rates of tiers and, by rank, the unreadable tiers, which are not asked from now on."""
        self.patience.rates |= rates
        self._unreadable |= unreadable
        self.finder.unreadable = frozenset().union(*self._unreadable.values())

    @property
    def pending(self) -> bool:
        """Whether ranks should report on tier orders soon, or chunks wait to be stored."""
        return self.stores.pending or awaited(self._transfers, PATIENCE_S)

    @property
    def owners(self) -> set[Owner]:
        """All owners that may hold leases for a stage or a store."""
        return {*self.stores.owners, *(stage.owner for stage in self._stages)}

    @property
    def orders(self) -> int:
        """The number of tier orders on which not all ranks have reported."""
        return len(self._transfers)
