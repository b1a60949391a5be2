"""A rank's carrier: a thread that copies chunks from tiers into slots, and from slots to tiers.

The scheduler side orders each copy, and keeps the slot reserved until the carrier has reported the order. Each order
has a cursor on the loop thread. The carrier reports an order once, when no call touches the order's slot any more.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple

import anyio

from kvpipe.protocol.geometry import Geometry
from kvpipe.protocol.messages import TierOrder
from kvpipe.statemachine import carry as m
from kvpipe.statemachine.core import Cursor, Edge, State
from kvpipe.tiers.base import ALIGN_BYTES, Get, Key, Read, TierError, TierFullError, blocking
from kvpipe.tiers.bodies import Bodies
from kvpipe.tiers.envelope import HEADER_BYTES, DamagedError, pages
from kvpipe.tiers.first_hash import FirstHash
from kvpipe.tiers.guard import READ, WRITE, GuardedTier
from kvpipe.tiers.parts import BOUND, RankParts, Share, Slice, kept_splits, mark_key, part_of, slices, split_of, writes
from kvpipe.tiers.slot_writer import Fill, SlotWriter
from kvpipe.tiers.thread import TierThread
from kvpipe.trace.log import Counters
from kvpipe.trace.recorder import OFF, Recorder
from kvpipe.transfer.pool import HostPool

TIMEOUTS_MAX: Final = 10
"""The time limit for one order, in multiples of the tier's `timeout_ms_max`, even if its bytes still move."""
DRAIN_S_MAX, STOP_S_MAX = 5.0, 5.0
"""The longest waits of a shutdown, in seconds: for stores in progress, and then for tiers to close."""
SPARE_BODIES_MAX, SPARE_S = 32, 10.0
"""The number of spare buffers for parts of another split, and the time in seconds after which they are freed."""
OTHER_FAULTS_MAX, OTHER_PAUSE_S = 3, 60.0
"""If `OTHER_FAULTS_MAX` consecutive reads of another split fail, that split is not read for `OTHER_PAUSE_S` seconds."""
MARK_S: Final = 60.0
"""The time in seconds after which a store writes the marker of its split again."""

_QueuedOrder = tuple[TierOrder, str, int]  # (order, namespace, step)

_Other = tuple[int, str, int]  # values of another split: (index of the tier, namespace, number of parts of a chunk)

_Carry = Callable[[], Awaitable[tuple[str, int]]]


class _Got(NamedTuple):
    """The result of reading one value. `name` is the last of the value's names that was tried."""

    read: Read
    name: Key
    header: memoryview


class Carried(NamedTuple):
    """The result of one order on this rank."""

    order: TierOrder
    ok: bool


class Carrier(TierThread[_QueuedOrder]):
    """Carries chunks between tiers and the slots of one rank."""

    def __init__(
        self, tiers: Sequence[GuardedTier], geometry: Geometry, pool: HostPool, parts: RankParts, *,
        counters: Counters, cpus: frozenset[int] = frozenset(), trace: Recorder = OFF,
    ) -> None:  # fmt: skip
        """Start the thread, bound to `cpus` if any are given. `geometry`, `pool` and `parts` belong to this rank."""
        rank, ranks = parts.rank, parts.ranks
        self.machine, self._fetches = m.CARRY.compile(), parts.fetches
        self._bodies = Bodies(geometry, pool)
        self._rank, self._ranks, self.counters, self._trace = rank, ranks, counters, trace
        self._shares = tuple(parts.shares) or (Share(),) * len(geometry.groups)
        heads = tuple(share.heads for share in self._shares)
        self._split = tuple(split_of(one, ranks) for one in heads)
        self._kept = kept_splits(heads, ranks, parts.share_ranks_max)
        self._spare: deque[memoryview] = deque(maxlen=SPARE_BODIES_MAX)
        self._apart_open = 0  # the number of orders in progress for parts of another split
        self._rest: anyio.CancelScope | None = None  # the scope of the task that frees the spare buffers
        self._other_faults: dict[_Other, tuple[int, float]] = {}  # (consecutive failures, monotonic time of the last)
        self.first_hash = FirstHash(leaves=rank == 0)
        self._marked: dict[tuple[int, str], float] = {}
        self._turns = [{use: anyio.CapacityLimiter(tier.spec.lanes) for use in (READ, WRITE)} for tier in tiers]
        self._threads, self._outbox = anyio.CapacityLimiter(4), deque[Carried]()
        self._writer = SlotWriter(self._bodies, self._threads, counters)
        self._open: dict[int, TierOrder] = {}  # orders that were begun and not yet reported, by id
        self._stores_begun = self._stores_ended = 0
        self.bytes = {(tier.name, use): 0 for tier in tiers for use in (READ, WRITE)}
        self.seconds = dict.fromkeys(self.bytes, 0.0)
        self._took = {one: counters.durations.of_tier(*one) for one in self.bytes}
        super().__init__("kvpipe-carrier", tiers, cpus)

    # ---- vLLM's thread --------------------------------------------------------------------------------------------

    def carry_out(self, orders: Sequence[TierOrder], space: str, step: int) -> None:
        """Begin the orders of step `step`. `space` is the namespace of orders without a namespace. Never blocks."""
        for order in orders:
            self._open[order.id] = order
            self._stores_begun += order.stores
            self._begin((order, order.space or space, step))

    def collect(self) -> list[Carried]:
        """Return the orders that ended since the last call. Every order is returned exactly once.

        An order that still runs after `shutdown` is not returned before it has ended, because it may write to its slot.
        """
        lost = self._over or self.loop.has_ended  # read first, so that the outbox then has all reports of an ended loop
        out = []
        while self._outbox:
            one = self._outbox.popleft()
            if self._open.pop(one.order.id, None) is not None:  # None if the order was already reported as lost
                out.append(one)
        if lost and self._open:
            self.counters.fault("carrier_lost")
            out += [Carried(order, ok=False) for order in self._open.values()]
            self._open.clear()
        return out

    @property
    def unreadable(self) -> frozenset[int]:
        """The indices of the tiers that this rank does not read now. The set is empty for a rank that never fetches."""
        tiers = enumerate(self.tiers if self._fetches else ())
        return frozenset(at for at, tier in tiers if not (self.alive and tier.breakers[READ].allows))

    @property
    def rates(self) -> dict[int, float]:
        """The recent read rate in bytes per second, by index of the tier, for tiers that were read."""
        return {place: rate for place, tier in enumerate(self.tiers) if (rate := tier.rate.bytes_per_s)}

    def shutdown(self) -> None:
        """Finish stores within `DRAIN_S_MAX`, cancel all other orders, and close the tiers. Idempotent."""
        deadline = time.monotonic() + DRAIN_S_MAX
        while self.alive and self._stores_begun > self._stores_ended and time.monotonic() < deadline:
            time.sleep(0.005)
        self.stop(STOP_S_MAX)

    # ---- the loop thread ------------------------------------------------------------------------------------------

    def _refuse(self, item: _QueuedOrder) -> None:
        self._end(item[0], ok=False)

    async def _work(self, item: _QueuedOrder) -> None:
        order, space, step = item
        cursor = Cursor(self.machine, order.id, self._watch(step))
        turns, has_turn, apart = None, False, False
        try:
            tier = self.tiers[order.tier]  # raises IndexError if this rank does not have the tier
            if not self._touches(tier, order, space):
                cursor.fire(m.BEGIN)
                cursor.fire(m.DONE, "another rank carries it out")
                return
            apart = order.split not in {BOUND, self._split[order.group]}
            self._apart_open += apart
            if apart and self._rest is not None:
                self._rest.cancel()
            use, move = (WRITE, self._store) if order.stores else (READ, self._fetch)
            turns = self._turns[order.tier][use]
            with anyio.move_on_after(tier.timeout_s * TIMEOUTS_MAX):
                await turns.acquire_on_behalf_of(cursor)
                has_turn = True
            if not has_turn:  # the tier has not failed: it may be busy with earlier orders
                cursor.fire(m.FAULT, "no lane has become free")
            elif not tier.breakers[use].allows:
                cursor.fire(m.REFUSE, "the breaker is open")
            else:
                cursor.fire(m.BEGIN)
                other = apart and not order.stores and order.split != self._kept[order.group]
                which = (order.tier, space, order.split) if other else None
                await self._try(cursor, tier, use, functools.partial(move, tier, order, space), which)
        except Exception as error:  # noqa: BLE001  (a bug here or in a tier must fail this order only)
            self.counters.fault("carry_failed", order=order.id, error=repr(error))
            if not cursor.state.final:
                cursor.fire(m.FAULT, repr(error))
        finally:
            if has_turn and turns is not None:
                turns.release_on_behalf_of(cursor)
            self._apart_open -= apart
            if apart and not self._apart_open and self._group is not None:
                self._rest = anyio.CancelScope()
                self._group.start_soon(self._give_back, self._rest)
            if not cursor.state.final:
                cursor.fire(m.CANCEL)
            self._end(order, ok=cursor.state.row == m.FINALIZED)

    async def _give_back(self, rest: anyio.CancelScope) -> None:
        """Free the spare buffers after `SPARE_S` seconds without an order for parts of another split."""
        with rest:
            await anyio.sleep(SPARE_S)
            self._spare.clear()

    def _end(self, order: TierOrder, *, ok: bool) -> None:
        self._outbox.append(Carried(order, ok))
        self._stores_ended, self._ended = self._stores_ended + order.stores, self._ended + 1

    async def _try(
        self, cursor: Cursor, tier: GuardedTier, use: str, move: _Carry, other: _Other | None = None
    ) -> None:
        began = time.monotonic()
        try:
            with anyio.fail_after(tier.timeout_s * TIMEOUTS_MAX):
                await tier.ready()
                why, moved = await move()
        except TimeoutError:
            self._failed(cursor, tier, use, "it took too long", slow=True, other=other)
            return
        except TierError as error:
            self._failed(cursor, tier, use, str(error), full=isinstance(error, TierFullError), other=other)
            return
        self.seconds[tier.name, use] += (took_s := time.monotonic() - began)
        if other is None or moved:
            tier.breakers[use].ok()
        if why:
            cursor.fire(m.MISS, why)
            return
        self.bytes[tier.name, use] += moved
        if moved:
            self._took[tier.name, use](took_s)
        cursor.fire(m.DONE)

    def _failed(
        self, cursor: Cursor, tier: GuardedTier, use: str, why: str, *, slow: bool = False, full: bool = False,
        other: _Other | None = None,
    ) -> None:  # fmt: skip
        self.counters.fault("tier_full" if full else "tier_failed", tier=tier.name, use=use, why=why)
        if other is None:
            cursor.fire(m.FAULT, why)
            tier.fault(use, why, slow=slow)
        else:  # another split: the failure says nothing about values of this engine's split
            cursor.fire(m.MISS, why)
            self._other_faults[other] = (self._other_faults.get(other, (0, 0.0))[0] + 1, time.monotonic())

    async def _fetch(self, tier: GuardedTier, order: TierOrder, space: str) -> tuple[str, int]:
        """Fetch a chunk into its slot. Returns (reason for a miss, or ""; bytes read)."""
        bodies, (slot, group, units) = self._bodies, (order.slot, order.group, order.units)
        bodies.clear_mark(order)
        if order.split not in {BOUND, self._split[group]}:
            return await self._fetch_parts(tier, order, space)
        whole = bodies.whole(units)
        body = bodies.of(slot, group, units) if whole else pages(bodies.size(group, units))
        move: Callable[[], object] = bool if whole else functools.partial(bodies.scatter, body, slot, group, units)
        found = await self._ask(tier, [self._key(order, space)], [body])
        return await self._check(tier, found, order, [body], [move]), body.nbytes

    async def _fetch_parts(self, tier: GuardedTier, order: TierOrder, space: str) -> tuple[str, int]:
        """Fetch all parts of a chunk of another split that share KV heads with this rank. Returns as `_fetch` does."""
        wanted = self._slices(order)
        if not wanted:
            return "another layout", 0
        which = (order.tier, space, order.split)
        faults, last_s = self._other_faults.get(which, (0, 0.0))
        if faults >= OTHER_FAULTS_MAX and time.monotonic() - last_s < OTHER_PAUSE_S:
            return "another split, which is passed over", 0
        keys = [Key(space, order.chunk, order.group, one.part, order.split) for one in wanted]
        bodies = [self._room(order) for _ in wanted]
        got = await self._ask(tier, keys, bodies)
        self._other_faults.pop(which, None)
        moves = [self._mover(body, order, one) for body, one in zip(bodies, wanted, strict=True)]
        why = await self._check(tier, got, order, bodies, moves)
        if why:
            return why, 0
        self._spare.extend(bodies)
        return "", sum(body.nbytes for body in bodies)

    def _slices(self, order: TierOrder) -> list[Slice]:
        """Return the heads that this rank shares with each part of the order, or [] if no part is a range of heads."""
        share, split = self._shares[order.group], self._split[order.group]
        if not split or share.heads % order.split:
            return []
        return slices(share.heads, split, order.split, part_of(split, self._rank, self._ranks)[0])

    def _mover(self, body: memoryview, order: TierOrder, one: Slice) -> Fill:
        """Return a function that copies heads between a part's body and the slot, in the order's direction."""
        share, split = self._shares[order.group], self._split[order.group]
        return functools.partial(self._bodies.move_heads, body, order, share, split, one)

    def _room(self, order: TierOrder) -> memoryview:
        """Return a buffer for a part's body, if possible a spare one, because a new one causes slow page faults."""
        size = self._bodies.size_of(order.group, order.units, self._split[order.group], order.split)
        while self._spare:
            body = self._spare.pop()
            if body.nbytes == size:
                return body
        return pages(size)

    async def _ask(self, tier: GuardedTier, keys: Sequence[Key], bodies: Sequence[memoryview]) -> list[_Got]:
        """Read each value under the first of its names that the tier has."""
        found = [_Got(Read.MISS, key, pages(HEADER_BYTES)) for key in keys]
        names = [tier.sealer.names(key) for key in keys]
        for way in range(tier.sealer.ways):
            left = [at for at, one in enumerate(found) if one.read is Read.MISS]
            gets = [Get(names[at][way], (found[at].header, bodies[at])) for at in left]
            for at, get, read in zip(left, gets, await tier.read(gets) if gets else [], strict=True):
                found[at] = found[at]._replace(read=read, name=get.key)
        return found

    async def _check(
        self, tier: GuardedTier, found: Sequence[_Got], order: TierOrder, bodies: Sequence[memoryview],
        moves: Sequence[Fill],
    ) -> str:  # fmt: skip
        """Check and decrypt values, then run their `moves`. Returns the reason why a value is unusable, or ""."""
        whys = ["" if got.read is Read.HIT else got.read.value for got in found]

        def work() -> None:
            for at, (got, body, move) in enumerate(zip(found, bodies, moves, strict=True)):
                try:
                    tier.sealer.unseal(got.name, order.units, got.header, body)
                except DamagedError as error:
                    whys[at] = f"damaged: {error}"
                    return
                move()
            self._bodies.write_mark(order)

        if not any(whys):
            await blocking(self._threads, work)
        for got, why in zip(found, whys, strict=True):
            if why and got.read is not Read.MISS:
                self.counters.fault("chunk_damaged", tier=tier.name, why=why)
                if WRITE in tier.breakers and tier.spec.store != "never":
                    await tier.delete([got.name])
        return next(filter(None, whys), "")

    async def _store(self, tier: GuardedTier, order: TierOrder, space: str) -> tuple[str, int]:
        """Store this rank's part of a chunk, unless another rank stores the same part. Returns ("", bytes written)."""
        if self.first_hash.is_due(order.tier, space):
            await self.first_hash.leave(tier, order.tier, space)
        if self._marks(order, space):
            await self._mark(tier, order.tier, space)
        if not writes(order.split, self._rank, self._ranks, order.chunk):
            return "", 0
        if why := await self._writer.damage(order):
            return why, 0
        if order.split not in {BOUND, self._split[order.group]}:
            return await self._store_parts(tier, order, space)
        body = self._bodies.gather(order.slot, order.group, order.units)
        why = await self._writer.write(tier, order.units, [(self._key(order, space), body)], order=order)
        return why, body.nbytes

    async def _store_parts(self, tier: GuardedTier, order: TierOrder, space: str) -> tuple[str, int]:
        """Store this rank's part of a chunk as several smaller parts, which engines with more ranks can read."""
        wanted, split = self._slices(order), self._split[order.group]
        if not wanted or order.split % split:
            return "another layout", 0
        bodies = [self._room(order) for _ in wanted]
        keys = [Key(space, order.chunk, order.group, one.part, order.split) for one in wanted]
        moves = [self._mover(body, order, one) for body, one in zip(bodies, wanted, strict=True)]
        why = await self._writer.write(tier, order.units, [*zip(keys, bodies, strict=True)], moves, order)
        self._spare.extend(bodies)
        return why, sum(body.nbytes for body in bodies)

    async def _mark(self, tier: GuardedTier, place: int, space: str) -> None:
        """Write the marker that tells engines of other splits that the tier has chunks of this engine's split."""
        now_s, others = time.monotonic(), {at: one for at, one in self._marked.items() if at[0] != place}
        await self._writer.write(tier, 0, [(mark_key(space, self._kept), pages(ALIGN_BYTES))])
        self._marked = others | {(place, space): now_s}

    def _marks(self, order: TierOrder, space: str) -> bool:
        """Whether this rank must write a marker now."""
        due = time.monotonic() - self._marked.get((order.tier, space), -MARK_S) >= MARK_S
        return due and self._rank == 0 and order.split != BOUND and all(self._split)

    def _touches(self, tier: GuardedTier, order: TierOrder, space: str) -> bool:
        """Whether this rank calls the tier for `order`: to fetch, or to write a part, a marker or the first hash."""
        if not order.stores:
            return self._fetches
        marks = self._marks(order, space) or self.first_hash.is_due(order.tier, space)
        return writes(order.split, self._rank, self._ranks, order.chunk) or (tier.breakers[WRITE].allows and marks)

    def _key(self, order: TierOrder, space: str) -> Key:
        return Key(space, order.chunk, order.group, *part_of(order.split, self._rank, self._ranks))

    # ---- reports --------------------------------------------------------------------------------------------------

    def _watch(self, step: int) -> Callable[[Cursor, State, Edge, str], object] | None:
        if not self._trace.detail:
            return None

        def moved(cursor: Cursor, was: State, edge: Edge, why: str) -> None:
            number = cursor.key
            assert isinstance(number, int)  # noqa: S101  (a cursor's key is the order's id)
            self._trace.took("", 0, step, cursor, number, was, edge, why)

        return moved
