"""A running engine, as the management interface reads and changes it. It never blocks the scheduler's thread.

Reads take no lock: they read single objects, and dicts that are copied in one operation. So the parts of a state are
read at slightly different times, and a lookup's answer may be out of date when it is sent. Switches are set by one
assignment each. Changes of the catalog are orders: the engine's next steps carry them out, or, while the engine has
nothing to do, the management thread.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from heapq import nlargest
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import anyio
import numpy as np

from kvpipe import __version__
from kvpipe.cache import miss_reasons
from kvpipe.cache.leases import holders, oldest_lease_s
from kvpipe.cache.quotas import SharedCatalog
from kvpipe.cache.tenants import AdapterIdentity
from kvpipe.manage import models
from kvpipe.manage.bell import Bell
from kvpipe.manage.holders import PoolHolders, selecting
from kvpipe.manage.survey import TierSurvey
from kvpipe.messages import Kind
from kvpipe.scheduler.orders import Order, Work
from kvpipe.scheduler.pins import EPOCHS, EvictedPrompt, PinnedPrompt
from kvpipe.scheduler.prefetch import KnownPrompt, WarmedPrompt
from kvpipe.tiers.guard import FIND
from kvpipe.trace.log import bounded

if TYPE_CHECKING:
    from kvpipe.scheduler.base import Request
    from kvpipe.scheduler.records import Tracked
    from kvpipe.scheduler.side import SchedulerSide

_T = TypeVar("_T")
TRIES: Final = 50
"""Attempts to copy a dict that another thread changes meanwhile."""
PAUSE_S: Final = 0.0005
"""Pause between two slices of hashing, in which other threads get the interpreter."""
WAIT_S_MAX: Final = 5.0
"""How long to wait for an order to be carried out before the answer is `Pending`."""
PENDING_MAX: Final = 256
"""Pending orders whose results are kept; the oldest are forgotten first."""
_NO_ADAPTER: Final = "adapter: not all ranks hold it, or hold the same"


class BadRequestError(ValueError):
    """A request that contradicts itself or the engine's configuration. The text is the reason, for the operator."""


class EndedError(Exception):
    """An order cannot be carried out: the engine shuts down, or too many orders wait. The text is the reason."""


class PromptHasher(Protocol):
    """Hashes the blocks of prompts as the engine does."""

    def __call__(self, prompt: models.Prompt) -> Iterator[Sequence[bytes]]:
        """Yield the hashes of the prompt's first blocks, more with each iteration, finally those of all full blocks.

        Each iteration takes less than a millisecond. Raises `BadRequestError` if the engine would refuse the prompt.
        """


class ManagedEngine:
    """Answers operators' requests. One per scheduler side; used by the management thread."""

    def __init__(
        self,
        side: SchedulerSide,
        engine: str,
        *,
        hash_tokens: int,
        hash_prompt: PromptHasher,
        request_of: Callable[[models.Prompt, Sequence[bytes]], Request] | None = None,
        set_freeze: Callable[[bool], None],
        set_bypass: Callable[[bool], None],
    ) -> None:
        """`engine`: its name, as in traces. `hash_tokens`: tokens per block hash. `hash_prompt`: as the engine hashes.

        `request_of(prompt, hashes)`: makes a request, for KV events, which contain its tokens; None: no KV events.
        """
        self._side, self._engine, self._hash, self._request_of = side, engine, hash_prompt, request_of
        self._prefixes = side.prefetching.prefixes
        self._holders = PoolHolders(side)
        self.survey = TierSurvey(side, hash_tokens)
        self._one = anyio.Lock()
        self._set_freeze, self._set_bypass = set_freeze, set_bypass
        self._began_s = time.monotonic()
        self.wait_s_max = WAIT_S_MAX
        self._pending: dict[int, Order] = {}
        self._bell = Bell()
        side.orders.wake = self._bell.ring

    def name_salts(self, token: bytes) -> None:
        """Set the operators' token, with which salts are digested. To be called before the first request."""
        self._holders.token = token

    async def holders(self, rows_max: int) -> models.Holders:
        """Return who uses the pool, and who holds leases, at most `rows_max` rows of each."""
        return await self._holders.report(rows_max, _again(lambda: holders(self._side.catalog)))

    def counters(self) -> dict[str, int]:
        """Return counters and gauges of the scheduler side, by name."""
        return _again(self._side.stats)

    def switches(self) -> models.SwitchStates:
        """Return the switches as they are now."""
        switches = self._side.switches
        return models.SwitchStates(freeze=switches.freeze, bypass=switches.bypass)

    def switch(self, wanted: models.SetSwitches) -> models.SwitchStates:
        """Set switches from the next step on, and return all. Raises `BadRequestError` for both freeze and bypass."""
        now = self.switches()
        freeze = now.freeze if wanted.freeze is None else wanted.freeze
        bypass = now.bypass if wanted.bypass is None else wanted.bypass
        if freeze and bypass:
            raise BadRequestError("bypass contradicts freeze (it serves no hits); switch one of them off")
        if now.freeze != freeze:
            self._set_freeze(freeze)
        if now.bypass != bypass:
            self._set_bypass(bypass)
        return self.switches()

    async def lookup(self, prompt: models.PromptLookup) -> models.HeldTokens:
        """Return how much of a prompt is in memory and, if it asks for them, in tiers. Raises `BadRequestError`."""
        async with self._one:
            asked = await self._hashed(prompt)
        tokens, held, why = asked.num_tokens, 0, miss_reasons.ADAPTER
        if asked.block_hashes or not asked.unknown:
            units = _again(lambda: self._prefixes.longest(asked))
            held = units * self._side.geometry.unit_tokens
            why = _again(lambda: self._prefixes.why_short(asked, units)) if held < tokens else ""
        answer = models.HeldTokens(tokens=tokens, held_tokens=held, why=why)
        if not prompt.tiers:
            return answer
        tiers, found = await self.survey.ask(asked, _NO_ADAPTER if asked.unknown else "")
        units = _again(lambda: self._prefixes.longest(asked, found))
        return answer.model_copy(update={"reach_tokens": units * self._side.geometry.unit_tokens, "tiers": tiers})

    # ---- orders ---------------------------------------------------------------------------------------------------

    async def pin(self, wanted: models.PinOrder) -> models.Pinned | models.Pending:
        """Pin what memory holds of a prompt. Returns `Pending` if that is not done within `wait_s_max` seconds.

        Raises:
            BadRequestError: the engine would not accept the prompt, or the order is refused.
            EndedError: the engine shuts down, or too many orders wait.

        """
        asked = await self._known(wanted)
        result: models.Pinned | models.Pending
        result = await self._ordered(lambda: self._side.pins.pin(self._prefixes, asked, wanted.seconds))
        return result

    async def unpin(self, number: int) -> models.Pinned | models.Pending:
        """End a pin. Returns and raises as `pin`."""
        result: models.Pinned | models.Pending = await self._ordered(lambda: self._side.pins.unpin(number))
        return result

    def pins(self) -> models.PinnedPrompts:
        """Return all pins."""
        pins = self._side.pins
        pinned = [models.Pinned(**one._asdict()) for one in _again(pins.listed)]
        return models.PinnedPrompts(pins=pinned, chunks=pins.chunks, chunks_max=pins.chunks_max)

    async def evict(self, wanted: models.EvictOrder) -> models.EvictedChunks | models.Pending:
        """Evict what memory holds of a prompt. Returns and raises as `pin`."""
        asked = await self._known(wanted)
        result: models.EvictedChunks | models.Pending
        result = await self._ordered(lambda: self._side.pins.evict(self._prefixes, asked, wanted.from_token))
        return result

    async def evict_matching(self, wanted: models.EvictMatching) -> models.EvictedChunks | models.Pending:
        """Evict what memory holds of the tenants that `wanted` selects. Returns and raises as `pin`."""
        try:
            selects = selecting(wanted, self._holders.token)
        except ValueError as error:
            raise BadRequestError(str(error)) from None
        result: models.EvictedChunks | models.Pending
        result = await self._ordered(lambda: self._side.pins.evict_those(selects, wanted.idle_s or 0.0))
        return result

    async def warm(self, wanted: models.WarmOrder) -> models.Warmed | models.Pending:
        """Fetch what tiers hold of a prompt into memory. Returns and raises as `pin`."""
        asked = await self._known(wanted)
        request = self._request_of(wanted, asked.hashes) if self._request_of is not None else None
        result: models.Warmed | models.Pending
        result = await self._ordered(lambda: self._side.prefetching.warm(asked, request, wanted.seconds))
        return result

    async def order(self, number: int) -> Any:  # noqa: ANN401  (whatever was ordered)
        """Return the result of an order that was pending, or `Pending` again. Raises as `pin`."""
        order = self._pending.get(number)
        if order is None:
            raise BadRequestError(f"order: no order {number} is remembered")
        return await self._outcome(order)

    async def _known(self, prompt: models.Prompt) -> HashedPrompt:
        async with self._one:
            asked = await self._hashed(prompt)
        if asked.unknown:
            raise BadRequestError(_NO_ADAPTER)
        return asked

    async def _ordered(self, make: Callable[[], Work]) -> Any:  # noqa: ANN401
        orders, idle = self._side.orders, True
        while idle and orders.full:
            idle = self._slice()
            await anyio.sleep(PAUSE_S)
        return await self._outcome(orders.put(make))

    def _slice(self) -> bool:
        """Carry out a slice of the due orders if the engine is idle. Returns whether anything was done."""
        orders = self._side.orders
        if not orders.due or not orders.turns.borrow():
            return False
        try:
            return orders.carry_out()
        finally:
            orders.turns.give_back()

    async def _outcome(self, order: Order) -> Any:  # noqa: ANN401
        """Return the result of `order`; `Pending` after `wait_s_max`. Carries out orders while the engine is idle."""
        with self._bell.listening() as rung, anyio.move_on_after(self.wait_s_max):
            while (more := self._slice()) or not order.over:
                await (anyio.sleep(PAUSE_S) if more else rung.wait())
                rung.clear()
        if not order.over:
            self._pending[order.number] = order
            while len(self._pending) > PENDING_MAX:
                del self._pending[next(iter(self._pending))]
            return models.Pending(order=order.number)
        if order.refused:
            raise (EndedError if order.failed else BadRequestError)(order.refused)
        kinds: dict[type, type] = {
            PinnedPrompt: models.Pinned, EvictedPrompt: models.EvictedChunks, WarmedPrompt: models.Warmed,
        }  # fmt: skip
        return kinds[type(order.result)](**order.result._asdict())

    # ---- state ----------------------------------------------------------------------------------------------------

    async def _hashed(self, prompt: models.Prompt) -> HashedPrompt:
        """Return the prompt with all its keys. Yields to other tasks between the hasher's turns."""
        hashes: Sequence[bytes] = ()
        for some in self._hash(prompt):
            hashes = some
            await anyio.sleep(PAUSE_S)
        if prompt.adapter is None:
            return HashedPrompt(prompt, hashes, hashes)
        digest = _again(self._side.adapters.agreed).get(prompt.adapter.number, b"")
        keys = [key + digest for key in hashes] if digest else []
        return HashedPrompt(prompt, keys, hashes, digest)

    def state(self, requests_max: int) -> models.EngineState:
        """Return the engine's state, with at most `requests_max` of its requests, the slowest."""
        side, namespace = self._side, ""
        if side.staging is not None:
            namespace = side.staging.space.name
        requests = _again(lambda: list(side.requests.tracked.values()))
        slowest = nlargest(requests_max, requests, key=lambda one: models.slowness(_age_s(one), _answer_tokens(one)))
        held = Counter[str]()
        for owner, chunks in _again(lambda: holders(side.catalog)):
            if owner.epoch < EPOCHS:  # a pin is no request
                held[owner.request] += chunks
        return models.EngineState(
            kvpipe=__version__,
            engine=self._engine,
            up_s=time.monotonic() - self._began_s,
            namespace=namespace,
            step=side.trace.step - 1,
            switches=self.switches(),
            saving=side.switches.saving,
            pool=self._pool(),
            requests=len(side.requests.tracked),
            requests_shown=[self._request(one, held[one.request.request_id]) for one in slowest],
            jobs=self._jobs(),
            traffic=self._traffic(),
            tiers=self._tiers(),
            adapters=[
                models.AdapterHeld(number=number, digest=digest.hex())
                for number, digest in sorted(_again(side.adapters.agreed).items())
            ],
        )

    def _pool(self) -> models.PoolState:
        catalog, slot_bytes = self._side.catalog, self._side.geometry.slot_bytes
        used = catalog.used
        return models.PoolState(
            slots=catalog.slots,
            slots_ready=catalog.ready,
            slots_used=used,
            slot_bytes=slot_bytes,
            bytes_used=used * slot_bytes,
            bytes_max=catalog.slots * slot_bytes,
            leases=_again(lambda: catalog.leases),
            oldest_lease_s=_again(lambda: oldest_lease_s(catalog)),
            pieces_writing=_again(lambda: catalog.writing),
            chunks_pinned=self._side.pins.chunks,
            quotas=[
                models.QuotaState(name=one.spec.name, slots=one.used, slots_sure=one.sure, slots_max=one.most)
                for one in (catalog.accounts.all if isinstance(catalog, SharedCatalog) else ())
            ],
        )

    def _jobs(self) -> models.JobCounts:
        side, geometry = self._side, self._side.geometry
        count, size = Counter[bool](), Counter[bool]()
        page_bytes = np.array([group.bytes_per_block for group in geometry.groups])
        for job in _again(lambda: tuple(side.jobs.in_flight.values())):
            saves = job.job.kind == Kind.SAVE
            count[saves] += 1
            size[saves] += int(page_bytes[job.job.table()[:, 0]].sum())
        orders = side.staging.orders if side.staging is not None else 0
        return models.JobCounts(
            saves=count[True],
            loads=count[False],
            tier_orders=orders,
            save_bytes=size[True],
            load_bytes=size[False],
            tier_bytes_max=orders * geometry.slot_bytes,
        )

    def _traffic(self) -> models.Traffic:
        report, counters = self._side.report, self._side.counters
        return models.Traffic(
            hit_tokens=_again(lambda: dict(report.hit_tokens)),
            missed_tokens=_again(lambda: dict(report.missed_tokens)),
            evicted=counters["evicted"],
            faults=_again(lambda: sum(counters.faults.values())),
        )

    def _request(self, tracked: Tracked, chunks: int) -> models.RequestHolds:
        stage = tracked.stage
        return models.RequestHolds(
            request=bounded(tracked.request.request_id),
            lived_s=_age_s(tracked),
            tokens=tracked.request.num_tokens,
            answer_tokens=_answer_tokens(tracked),
            preemptions=tracked.request.num_preemptions,
            state=tracked.state.row,
            saving=tracked.saving.state.row,
            saved_tokens=tracked.saving.saved_units * self._side.geometry.unit_tokens,
            chunks_held=chunks,
            waits_for_tiers=stage is not None and stage.holds_up,
        )

    def _tiers(self) -> list[models.TierState]:
        staging = self._side.staging
        if staging is None:
            return []
        return [
            models.TierState(
                name=tier.name,
                kind=tier.spec.kind,
                breaker=tier.breakers[FIND].state.row,
                left_by_ranks=place in staging.finder.unreadable,
                read_bytes_per_s=staging.patience.rates.get(place, 0.0),
                slow=staging.patience.slow(place),
            )
            for place, tier in enumerate(staging.finder.tiers)
        ]


class HashedPrompt(KnownPrompt):
    """An operator's prompt. `hashes`: the engine's block hashes. `unknown`: its adapter's digest is; it has no keys."""

    def __init__(
        self, prompt: models.Prompt, keys: Sequence[bytes], hashes: Sequence[bytes], digest: bytes = b""
    ) -> None:
        """`keys`: the hashes with the adapter's digest. `digest`: of its adapter's bytes; b"": not known."""
        one = prompt.adapter
        adapter = AdapterIdentity(one.name, one.path, digest) if one is not None else None
        super().__init__(keys, len(prompt.tokens), prompt.cache_salt or "", adapter)
        self.hashes, self.unknown = hashes, not digest and one is not None


def _age_s(tracked: Tracked) -> float:
    return (time.monotonic_ns() - tracked.life.added_ns) / 1e9


def _answer_tokens(tracked: Tracked) -> int:
    return max(0, tracked.request.num_tokens - tracked.request.num_prompt_tokens)


def _again(look: Callable[[], _T]) -> _T:
    """Return `look()`, called again if the scheduler's thread has changed what it reads meanwhile."""
    for _ in range(TRIES):
        try:
            return look()
        except (RuntimeError, StopIteration):  # a dict has changed its size, or what was there is gone
            continue
    return look()
