"""The scheduler side of slower tiers: asks them for waiting requests, plans what ranks fetch and store.

A fetched chunk is reserved and published like a saved one, so a lookup only ever looks at memory. Work on the
scheduler's thread is what is new: a lookup's keys when it is asked, its answer when it has come, one order per chunk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from kvpipe.cache import miss_reasons
from kvpipe.cache.catalog import Catalog, Chunk, Owner, Piece
from kvpipe.cache.prefixes import Prefixes
from kvpipe.geometry import Geometry
from kvpipe.messages import Tally, TierOrder
from kvpipe.scheduler.jobs import awaited
from kvpipe.scheduler.patience import Patience
from kvpipe.scheduler.stages import AHEAD_S_MAX, FIRST, Stage, TierTransfer
from kvpipe.scheduler.stores import Offer, Storing
from kvpipe.statemachine import job as job_m
from kvpipe.statemachine import stage as m
from kvpipe.statemachine.core import Watch
from kvpipe.tiers.finder import Finder, Place, TierLookup, chunk_name
from kvpipe.tiers.namespace import Namespace
from kvpipe.trace.log import Counters

if TYPE_CHECKING:
    from kvpipe.scheduler.base import Request, Turn

SHARE: Final = 0.75
"""Of the pool, at most, that waiting requests hold."""
ORDERS_PER_LANE: Final = 4
"""Fetches that are with the ranks at once, for each of a tier's lanes: the others wait here, and can be given up."""
AHEAD_SHARE: Final = 0.25
"""Of the pool, at most, that is held while it is brought ahead of requests. It is part of `SHARE`."""
AGAIN_S: Final = 0.02
"""How long after an answer a consumer asks tiers again for what a producer may be storing."""
PATIENCE_S: Final = 5.0
"""How long an outstanding tier order keeps an otherwise idle engine stepping. An older one waits for the next step."""


class Staging:
    """One per engine that has tiers."""

    def __init__(
        self,
        finder: Finder,
        catalog: Catalog,
        prefixes: Prefixes,
        geometry: Geometry,
        *,
        ranks: int,
        lookup_ms_max: int,
        lookup_slow_ms_max: int = 0,
        bytes_in_flight_max: int,
        counters: Counters,
        new_id: Callable[[], int],
        stores: bool,
        store_idle_s_max: float = float("inf"),
        published: Callable[[Request | None, Piece], object],
    ) -> None:
        """`stores`: whether this engine writes to tiers. No tier is asked before `space` has a name.

        An engine that does not is a consumer: its prompts are computed by a producer, which may still be storing them.

        `store_idle_s_max`: see `Storing`.

        `published` is called with each piece that has come from a tier, and a request with that prefix or None.
        """
        self.finder, self._catalog, self._prefixes, self._geometry = finder, catalog, prefixes, geometry
        self._ranks, self._skipped_s, self._planned_s = ranks, 0.0, 0.0
        self.patience = Patience(geometry.whole_token_bytes, lookup_ms_max, lookup_slow_ms_max)
        self._again_s = self.patience.lookup_s_max  # that a request which came short waits until it is asked for again
        self._counters, self._new_id, self._published = counters, new_id, published
        self._consumes = not stores
        self.watch: Watch | None = None  # of stages that begin
        self.watch_transfer: Watch | None = None
        self.space = Namespace()
        self.stores = Storing(
            catalog,
            geometry,
            self.space,
            policies=[tier.spec.store if stores else "never" for tier in finder.tiers],
            bytes_in_flight_max=bytes_in_flight_max,
            counters=counters,
            new_id=new_id,
            split=finder.split,
            idle_s_max=store_idle_s_max,
            names=[tier.name for tier in finder.tiers],
        )
        self.machine, self.transfer_machine = m.STAGE.compile(), job_m.JOB.compile()
        self.names = tuple(tier.name for tier in finder.tiers)
        self._per_chunk = geometry.units_per_chunk
        self._fetches_max = [tier.spec.lanes * ORDERS_PER_LANE for tier in finder.tiers]
        self._fetches = [0] * len(self.names)  # with the ranks, by tier
        self._leased = 0  # by stages
        self._due: list[TierOrder] = []
        self._transfers: dict[int, TierTransfer] = {}
        self._fetching: dict[tuple[int, bytes], TierTransfer] = {}
        self._asking: list[Stage] = []  # of requests, in the order of their lookups
        self._asked = 0  # of these, how many have been asking for a step
        self._found: list[Stage] = []
        self._stages: set[Stage] = set()
        self._ahead: set[Stage] = set()  # of these, those for which no request waits
        self._latest = FIRST  # no stage with a later turn holds chunks
        self._unreadable: dict[int, frozenset[int]] = {}  # by rank
        self._numbers, self._step = 0, -1  # the step for which requests are being asked for
        self._growing = [group for group in range(len(geometry.groups)) if group not in geometry.states]
        self._full = [group for group in self._growing if geometry.groups[group].window_tokens is None]
        self._states = sorted(geometry.states)
        self._counted = self._full[0] if self._full else 0  # whose chunks are counted: others hold the same tokens

    # ---- waiting requests -----------------------------------------------------------------------------------------

    def ask(
        self, stage: Stage | None, request: Request, local: int, step: int, *, turn: Turn
    ) -> tuple[Stage | None, bool]:
        """Return (the request's stage, whether it waits). Answers the same within a step.

        `local`: units of the prefix that the engine holds itself. `turn`: the lowest comes first.
        """
        self._step = step
        if stage is not None and self._asks_again(stage, step):
            self.end(stage)
            self._counters["tier_lookup_again"] += 1
            stage = None
        if stage is None:
            stage = self._begin(request, local, self._prefixes, request)
            if stage is None:
                return None, False
            stage.asked_step = step  # the answer may be there already, but not twice the same in this step
            stage.turn = turn
            self._asking.append(stage)
        stage.local = local
        if stage.asked_step != step:
            stage.waited_s += self._now_s() - self._planned_s  # one step's: in others the engine may not have asked
            stage.asked_step = step
            self.look(stage)
        return stage, stage.holds_up

    def _asks_again(self, stage: Stage, step: int) -> bool:
        """Whether the engine has kept a request waiting since it came short, and there is room for it now."""
        if stage.short_at_s + self._again_s > self._now_s() or stage.holds_up or stage.asked_step == step:
            return False
        return stage.turn < self._latest or self._leased + len(self._fetching) < self._held_max

    def ahead(
        self, asked: Request, prefixes: Prefixes, request: Request | None, *, announced: bool = False
    ) -> Stage | None:
        """Begin to bring what tiers have of a prompt for which nobody waits; None: there is nothing to bring.

        Demand goes first: it takes what lanes are left, and no room that waiting requests need. See `look`, `end`.
        `announced`: a hint has announced a request: what is there for these has a share of its own.
        """
        catalog = self._catalog
        room = max(1, int(catalog.slots * AHEAD_SHARE))
        if announced:
            room = min(room, catalog.room_ahead(prefixes.tenant(asked)))
        return self._begin(asked, 0, prefixes, request, room=room, announced=announced) if room else None

    def _begin(
        self, asked: Request, local: int, prefixes: Prefixes, request: Request | None, *, room: int | None = None,
        announced: bool = False,
    ) -> Stage | None:  # fmt: skip
        if not self.space.name or not self.finder.usable:
            return None
        units = max(prefixes.longest(asked, continued=room is not None), local)
        stop = prefixes.final_units(asked, asked.num_tokens)
        if units >= stop or (units and stop - units < self._per_chunk):
            return None  # a few tokens are computed sooner than asked for
        lookup = self._lookup(asked, prefixes, units, stop)
        self._numbers += 1
        stage = Stage(
            self.machine, self._numbers, asked, lookup, self.watch, prefixes=prefixes, request=request,
            now_s=self._now_s(), room=room, announced=announced,
        )  # fmt: skip
        self._stages.add(stage)
        if stage.ahead:
            self._ahead.add(stage)
        self._counters["tier_lookup"] += 1
        self.finder.ask(lookup)
        return stage

    def _lookup(self, asked: Request, prefixes: Prefixes, units: int, stop: int) -> TierLookup:
        """Return a lookup of what memory lacks of a prompt of `stop` units, of which it has `units`."""
        keys, states = prefixes.unit_keys(asked), prefixes.state_keys(asked)
        whole = range(self._per_chunk, stop + 1, self._per_chunk)
        wanted = [(group, end) for group in self._growing for end in self._lacking(group, keys, whole)]
        wanted += self._lacking_states(states, range(units + 1, stop + 1))
        return TierLookup(
            keys, tuple(wanted), groups=self._growing, space=self.space.name, also=self.space.also,
            seconds_max=self.patience.lookup_s_max, states=states, state_groups=self._states, full=self._full,
        )  # fmt: skip

    def _lacking(self, group: int, keys: Sequence[bytes], ends: Iterable[int]) -> list[int]:
        """Return those of `ends` whose chunks of `group` are not in memory."""
        index = self._catalog.index(group)
        return [end for end in ends if keys[end - 1] not in index]

    def _lacking_states(self, keys: Sequence[bytes], ends: Sequence[int]) -> list[Place]:
        """Return which states to ask for at once: the first group's, and others' where memory has one of the first."""
        if not self._states:
            return []
        first, *others = self._states
        lacking = self._lacking(first, keys, ends)
        held = sorted({*ends} - {*lacking})
        return [(first, end) for end in lacking] + [
            (group, end) for group in others for end in self._lacking(group, keys, held)
        ]

    def look(self, stage: Stage) -> None:
        """Take the tiers' answer, if it has come, and give up what has not come in time."""
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
        """Whether what is asked for takes too long: for a request also longer than to compute what has come."""
        wait_s_max = self.patience.wait_s_max(sum(stage.taken.values()), slow=stage.slow)
        return stage.waited_s >= wait_s_max or self._now_s() >= stage.deadline_at_s

    def _came_short(self, stage: Stage, why: str) -> None:
        stage.why, stage.short_at_s = why, self._now_s()
        slow = why == miss_reasons.TIER_SLOW
        self._counters["prefetch_late" if stage.ahead else "tier_lookup_slow" if slow else "tier_lookup_late"] += 1

    def _awaits(self, stage: Stage) -> bool:
        """Whether the tiers are asked again: a producer may be storing what they lack, sooner than it is computed."""
        if not self._consumes or stage.ahead or stage.lookup.down:
            return False
        prefixes, asked, now_s = stage.prefixes, stage.asked, self._now_s()
        stop, units = prefixes.final_units(asked, asked.num_tokens), max(self._reach(stage), stage.local)
        wait_s_max = self.patience.await_s_max(
            (stop - units) * self._geometry.unit_tokens, whole=stop - units >= self._per_chunk
        )
        if units >= stop or now_s - stage.begun_at_s >= wait_s_max:
            return False
        if now_s >= stage.again_at_s:
            stage.again_at_s, stage.waited_s = now_s + AGAIN_S, 0.0
            stage.lookup = self._lookup(asked, prefixes, max(prefixes.longest(asked), stage.local), stop)
            self._counters["tier_lookup_awaiting"] += 1
            self.finder.ask(stage.lookup)
        return True

    def _take_answer(self, stage: Stage) -> None:
        lookup = stage.lookup
        if self._awaits(stage):
            return
        slow = {tier for tier in {*lookup.found.values()} if self.patience.slow(tier)} if not stage.ahead else ()
        if slow and self.patience.passes(asked=stage.asked_step == self._step):
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
        """Take what has been answered since the last step: the engine may ask for a request again seconds later."""
        for stage in self._asking[: self._asked]:
            if stage.state.row == m.ASKING and stage.lookup.done:
                self._planned(self._take_answer, stage)
        self._asking = [stage for stage in self._asking if stage.state.row == m.ASKING]
        self._asked = len(self._asking)

    def _reach(self, stage: Stage) -> int:
        """Return how many units of the prefix memory and tiers hold together."""
        extra: tuple[dict[bytes, object], ...] = tuple({} for _ in self._geometry.groups)
        for place in stage.lookup.found:
            extra[place[0]][stage.lookup.key(place)] = stage
        return stage.prefixes.longest(stage.asked, extra, continued=stage.ahead)

    def why(self, stage: Stage | None, why: str) -> str:
        """Return why tiers have not brought what memory does not have for the reason `why`, if that is the reason."""
        if why in {"", miss_reasons.BELOW_MINIMUM}:
            return why
        if stage is not None:
            return stage.why or why
        return why if self.finder.usable or why == miss_reasons.BEING_SAVED else miss_reasons.TIER_DOWN

    def brought(self, stage: Stage | None, tokens: int) -> tuple[tuple[str, int], ...]:
        """Return which tiers have brought how many of a hit's `tokens`."""
        out: list[tuple[str, int]] = []
        if stage is None:
            return ()
        for tier, some in sorted(stage.taken.items()):
            out.append((self.names[tier], min(some, tokens)))
            tokens -= out[-1][1]
        return tuple(one for one in out if one[1])

    def end(self, stage: Stage | None) -> None:
        """The request was admitted or preempted, is over, or the cache was reset."""
        if stage is not None and not stage.state.final:
            self._end(stage, m.END)

    def _end(self, stage: Stage, event: str) -> None:
        stage.fire(event)
        stage.todo.clear()
        self._stages.discard(stage)
        self._ahead.discard(stage)
        self._leased -= self._catalog.release(stage.owner, hit=False)

    # ---- fetching -------------------------------------------------------------------------------------------------

    def plan(self, *, stores: bool, idle: bool = False) -> tuple[TierOrder, ...]:
        """Plan a step's orders: fetches for whom something was found, then stores, as far as there is room.

        `idle`: the step computes nothing.

        What goes wrong costs misses: the loads of the step depend on the plan, and the ranks on every order in it.
        """
        self._planned_s = self._now_s()
        self._take_answers()
        self._step = -1
        waiting, self._found = self._found, []
        waiting.sort(key=lambda stage: (stage.ahead, stage.turn))
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
            self._begin_transfer(order, self.space.name)
        due, self._due = self._due, []
        return tuple(due)

    def _planned(self, part: Callable[[Stage], None], stage: Stage) -> None:
        try:
            part(stage)
        except Exception as e:  # noqa: BLE001
            self._counters.fault("fetch_not_planned", request=stage.owner.request, error=repr(e))
            self.end(stage)

    def _fetch(self, stage: Stage) -> None:
        """Order what a stage still needs, as far as there are lanes; it comes here again for the rest."""
        if stage.state.row == m.FOUND:
            needed = list(self._needed(stage))
            self._lease(stage, [chunk for _, chunk in needed if chunk is not None])  # first: a fetch may evict
            stage.todo.extend(place for place, chunk in needed if chunk is None)
            stage.fire(m.SENT if stage.todo else m.NO_ROOM)
        while stage.state.row == m.FETCHING and stage.todo and self._order(stage, stage.todo[0]):
            stage.todo.popleft()
        if stage.todo:
            self._found.append(stage)
        elif stage.state.row == m.FETCHING and not stage.waits:
            stage.fire(m.NO_ROOM)

    def _order(self, stage: Stage, place: Place) -> bool:
        """Order one chunk, or wait for somebody else's order. False: not yet."""
        group, key, tier = place[0], stage.lookup.key(place), stage.lookup.found[place]
        transfer = self._fetching.get((group, key))
        if transfer is None:
            there = self._catalog.find(group, key)
            if there is not None:
                self._lease(stage, [there])
            if self._catalog.known(group, key):
                return True  # it has come meanwhile, or is being saved
            lanes = self._fetches_max[tier]
            if self._fetches[tier] >= (max(1, lanes // ORDERS_PER_LANE) if stage.ahead else lanes):
                return False
            transfer = self._reserve(stage, place, key) if self._room(stage, 1) else None
            while transfer is None and not stage.ahead and self._give_way(stage):
                transfer = self._reserve(stage, place, key)
            if transfer is None:
                if not stage.ahead:
                    self._counters["tier_no_room"] += 1
                    stage.short_at_s = self._now_s()
                stage.todo.clear()
                stage.todo.append(place)  # the caller takes it away: this was the last
                return True
        transfer.stages.append(stage)
        stage.waits.add(transfer.order.id)
        return True

    @property
    def _held_max(self) -> int:
        """How many chunks waiting requests may hold, of a pool whose size ranks report later."""
        return max(1, int(self._catalog.slots * SHARE))

    def _room(self, stage: Stage, chunks: int) -> int:
        """Return how many more chunks the stage may hold, if it wants so many."""
        room = self._held_max - self._leased - len(self._fetching)
        if stage.room is not None:
            return max(0, min(room, stage.room - stage.leased - len(stage.waits)))
        while room < chunks and self._give_way(stage):
            room = self._held_max - self._leased - len(self._fetching)
        return max(0, room)

    def _give_way(self, stage: Stage) -> bool:
        """End what needs the room less: all that is brought ahead of requests, or what the last one in turn holds.

        `stage`: of a request that waits. Returns whether there was any.
        """
        if self._ahead:
            for one in [*self._ahead]:
                self._counters["prefetch_gave_way"] += 1
                self._end(one, m.END)
            return True
        if stage.turn >= self._latest:  # thousands may wait: they are not searched for each of them
            return False
        last = max((one for one in self._stages if one.leased), key=lambda one: one.turn, default=stage)
        self._latest = last.turn
        if last.turn <= stage.turn:
            return False
        self._counters["tier_gave_way"] += 1
        last.short_at_s = self._now_s()
        self._end(last, m.END)
        return True

    def _lease(self, stage: Stage, chunks: list[Chunk]) -> None:
        chunks = chunks[: self._room(stage, len(chunks))]
        self._catalog.lease(stage.owner, chunks)
        self._leased += len(chunks)
        stage.leased += len(chunks)
        if chunks and stage.turn > self._latest:
            self._latest = stage.turn
        if stage.announced:
            self._catalog.ahead.keep(chunks)

    def _needed(self, stage: Stage) -> Iterator[tuple[Place, Chunk | None]]:
        """Yield the places of the prefix that tiers and memory reach together, in the order of the prefix; then states.

        With the chunk that memory holds there, or None where a tier must bring it.
        """
        reach, per_chunk, keys = self._reach(stage), self._per_chunk, stage.lookup.keys
        for base in range(0, reach, per_chunk):
            high = min(base + per_chunk, reach)
            for group, kind in enumerate(self._geometry.groups):
                if kind.state:
                    continue
                window = kind.window_tokens
                if window is not None and (reach - high) * self._geometry.unit_tokens > window:
                    continue  # wholly outside of the window, seen from the end
                chunk = stage.prefixes.holding(group, stage.prefixes.hashes(stage.asked), base, high)
                if chunk is not None:
                    yield (group, high), chunk
                    continue
                ends = range(high, min(base + per_chunk, len(keys)) + 1)
                end = next((units for units in ends if (group, units) in stage.lookup.found), 0)
                if end:
                    yield (group, end), None
        for group in self._states if reach else ():  # of this boundary, and of no other
            yield (group, reach), self._catalog.find(group, stage.lookup.key((group, reach)))

    def _reserve(self, stage: Stage, place: Place, key: bytes) -> TierTransfer | None:
        group, units = place
        chunk = self._catalog.reserve(group, stage.tenant)
        if chunk is None:
            return None
        base = units - 1 if group in self._geometry.states else (units - 1) // self._per_chunk * self._per_chunk
        lookup, name = stage.lookup, chunk_name(key)
        follows = lookup.key((group, base)) if base and group not in self._geometry.states else b""
        if follows and not self._full and not self._catalog.known(group, follows):
            follows = b""  # the window begins here: nothing before it is read, or missing
        keep = units - base < self._per_chunk
        piece = self._catalog.write(chunk, units - base, key, keep=keep, base=base, before=follows)
        space, split = lookup.elsewhere.get(place, ("", self.finder.split(group)))
        at = lookup.found[place], chunk.slot, group, units - base
        order = TierOrder(self._new_id(), False, *at, name, split, space)  # noqa: FBT003
        transfer = self._fetching[group, key] = self._begin_transfer(order, lookup.space, piece)
        self._fetches[order.tier] += 1
        self._due.append(order)
        self._counters["chunks_fetching"] += 1
        return transfer

    def _begin_transfer(self, order: TierOrder, space: str, piece: Piece | None = None) -> TierTransfer:
        transfer = TierTransfer(self.transfer_machine, order, space, self.watch_transfer, piece)
        self._transfers[order.id] = transfer
        return transfer

    # ---- reports --------------------------------------------------------------------------------------------------

    def reported(self, order_id: int, tally: Tally) -> bool:
        """Ranks have ended an order. Returns whether it is one of ours."""
        transfer = self._transfers.get(order_id)
        if transfer is None:
            return False
        if transfer.count(tally, self._ranks):
            del self._transfers[order_id]
            if transfer.piece is not None:
                self._landed(transfer, transfer.piece)
            else:
                self._stored(transfer)
        return True

    def _stored(self, transfer: TierTransfer) -> None:
        order = transfer.order
        done = transfer.state.row == job_m.DONE
        self.stores.over(order, ok=done)
        if done:
            self.finder.stored(order.tier, transfer.space, order.chunk, order.group)

    def _landed(self, transfer: TierTransfer, piece: Piece) -> None:
        order, done = transfer.order, transfer.state.row == job_m.DONE
        self._fetches[order.tier] -= 1
        self._fetching.pop((order.group, piece.key), None)
        if done:
            if self._catalog.landed(piece):
                self._published(transfer.stages[0].request, piece)
            self._counters["chunks_fetched"] += 1
        else:
            self._catalog.lost(piece)
            self._counters["chunks_not_fetched"] += 1
        there = self._catalog.find(order.group, piece.key)
        for stage in transfer.stages:
            stage.waits.discard(order.id)
            self._brought(stage, transfer, there)
        if there is piece.chunk and done:
            if all(stage.ahead for stage in transfer.stages):
                self._catalog.ahead.brought(piece.chunk)
            self.stores.brought(order.tier, Offer(piece.chunk, order.units, piece.key))

    def _brought(self, stage: Stage, transfer: TierTransfer, chunk: Chunk | None) -> None:
        """A transfer that `stage` has asked for is over; `chunk` is what can be found now."""
        done = transfer.state.row == job_m.DONE
        if not stage.holds_up:
            stage.fire(m.CAME if done else m.LOST)
            return
        if not done or chunk is None:
            stage.why = miss_reasons.TIER_LOST
            stage.todo.clear()
            stage.fire(m.LOST)
            return
        self._lease(stage, [chunk])
        if transfer.order.group == self._counted:
            tier, tokens = transfer.order.tier, transfer.order.units * self._geometry.unit_tokens
            stage.taken[tier] = stage.taken.get(tier, 0) + tokens
        stage.fire(m.CAME if stage.waits or stage.todo else m.CAME_LAST)

    # ---- the truth about itself -----------------------------------------------------------------------------------

    def expire(self) -> None:
        """Let so much time pass that nobody waits any longer, and who has come short is asked for again. For tests."""
        self._skipped_s += AHEAD_S_MAX + self.patience.lookup_s_max

    def _now_s(self) -> float:
        return time.monotonic() + self._skipped_s

    def forget(self) -> None:
        """Forget what was found and offered: from now on chunks are kept under another name."""
        self.stores.clear()
        self._found.clear()
        self._asking.clear()
        self._asked = 0
        for stage in list(self._stages):
            self._end(stage, m.END)

    def ranks_read(self, rates: dict[int, float], unreadable: dict[int, frozenset[int]]) -> None:
        """Take how fast ranks read tiers (`Report.tier_rates`), and, by rank, the indices of those they read no more.

        A tier in any rank's set is asked no more.
        """
        self.patience.rates |= rates
        self._unreadable |= unreadable
        self.finder.unreadable = frozenset().union(*self._unreadable.values())

    @property
    def pending(self) -> bool:
        """Whether ranks owe reports that should come soon, or there is something to store."""
        return self.stores.pending or awaited(self._transfers, PATIENCE_S)

    @property
    def owners(self) -> set[Owner]:
        """Whose leases there may be."""
        return {*self.stores.under_way.values(), *(stage.owner for stage in self._stages)}

    @property
    def orders(self) -> int:
        """How many orders the ranks have not all reported."""
        return len(self._transfers)
