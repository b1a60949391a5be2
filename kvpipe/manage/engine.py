"""A running engine, as the management interface reads and changes it. No request blocks the scheduler's thread.

Orders read and change the data that the scheduler's thread owns. The engine's next steps carry the orders out. While
the engine is idle, the management thread carries out the orders. Only a switch is set directly, by one assignment.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import anyio
import numpy as np

from kvpipe import __version__
from kvpipe.cache.tenants import AdapterIdentity
from kvpipe.features.announced import KnownPrompt
from kvpipe.features.orders import Order, Work
from kvpipe.features.pins import EvictedPrompt, PinnedPrompt
from kvpipe.features.prefetch import WarmedPrompt
from kvpipe.manage import models, reads
from kvpipe.manage.bell import Bell
from kvpipe.manage.holders import PoolHolders, selecting
from kvpipe.manage.survey import TierSurvey
from kvpipe.protocol.messages import Job, Kind
from kvpipe.threads.loop import Task
from kvpipe.trace import miss_reasons

if TYPE_CHECKING:
    from kvpipe.protocol.engine import Request
    from kvpipe.scheduler.side import SchedulerSide

PAUSE_S: Final = 0.0005
"""The pause between two slices of hashing or of orders, in seconds.

During the pause, other threads get the interpreter.
"""
WAIT_S_MAX: Final = 5.0
"""The longest wait for a change, in seconds. After this time the answer is `Pending`."""
READ_S_MAX: Final = 4.0
"""The longest wait for a read, in seconds.

After this time the engine is reported as busy. `kvpipe top` waits 1 s longer.
"""
COUNT_S_MAX: Final = 20.0
"""The longest wait for a count of all slots, in seconds. This time is shorter than `CONNECTION_S_MAX`."""
EVICTIONS_S: Final = 0.3
"""The interval, in seconds, at which an idle engine repeats evictions that a node's holder has not answered."""
PENDING_MAX: Final = 256
"""The largest number of pending orders whose results are kept. The oldest orders are dropped first."""
_NO_ADAPTER: Final = "adapter: some rank does not hold it, or ranks hold different versions of it"


class BadRequestError(ValueError):
    """This error means that a request contradicts itself or the engine's configuration. Operators see the text."""


class UnavailableError(Exception):
    """This error means that the engine ends or is busy, or that too many orders wait. The text is the reason."""


class PromptHasher(Protocol):
    """Hashes the blocks of prompts as the engine does."""

    def __call__(self, prompt: models.Prompt) -> Iterator[Sequence[bytes]]:
        """Yield the hashes of the prompt's first blocks, more hashes each time. The last result has all full blocks.

        Each iteration takes less than a millisecond. Raises `BadRequestError` if the engine would refuse the prompt.
        """


class ManagedEngine:
    """Answers operators' requests. Each scheduler side has one `ManagedEngine`, used by the management thread."""

    def __init__(
        self,
        side: SchedulerSide,
        name: str,
        *,
        hash_tokens: int,
        hash_prompt: PromptHasher,
        request_of: Callable[[models.Prompt, Sequence[bytes]], Request] | None = None,
        set_freeze: Callable[[bool], None],
        set_bypass: Callable[[bool], None],
    ) -> None:
        """Serve `side`, the engine named `name`. `hash_tokens` is the number of tokens per block hash.

        `hash_prompt` hashes as the engine does. `request_of(prompt, hashes)` makes a request whose tokens KV events
        contain. If `request_of` is None, there are no KV events.
        """
        self._side, self.name, self._hash, self._request_of = side, name, hash_prompt, request_of
        self._prefixes = side.prefetching.prefixes
        self._holders = PoolHolders(side.geometry.slot_bytes)
        self.survey = TierSurvey(side, hash_tokens)
        self._one = anyio.Lock()
        self._set_freeze, self._set_bypass = set_freeze, set_bypass
        self._began_s = time.monotonic()
        self.wait_s_max, self.read_s_max, self.count_s_max = WAIT_S_MAX, READ_S_MAX, COUNT_S_MAX
        self._pending: dict[int, Order] = {}
        self._bell = Bell()
        side.orders.wake = self._bell.ring

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks of the management thread besides the answers to requests."""
        return () if self._side.node is None else (self.send_evictions,)

    def name_salts(self, token: bytes) -> None:
        """Set the operators' token, with which salts are digested. Call this before the first request."""
        self._holders.token = token

    async def holders(self, rows_max: int) -> models.Holders:
        """Return at most `rows_max` tenants that use the pool, and at most `rows_max` holders of leases.

        Raises as `state`.
        """
        users: reads.PoolUsers = await self._read(lambda: reads.pool_users(self._side), self.count_s_max)
        return self._holders.holders(users, rows_max)

    async def counters(self) -> dict[str, int]:
        """Return counters and gauges of the scheduler side, by name. Raises as `state`."""
        counted: dict[str, int] = await self._look(self._side.stats)
        return counted

    def switches(self) -> models.SwitchStates:
        """Return the present states of the switches."""
        switches = self._side.switches
        return models.SwitchStates(freeze=switches.freeze, bypass=switches.bypass)

    def switch(self, wanted: models.SetSwitches) -> models.SwitchStates:
        """Set switches from the next step on, and return all switches.

        Raises `BadRequestError` if both freeze and bypass would be on.
        """
        now = self.switches()
        freeze = now.freeze if wanted.freeze is None else wanted.freeze
        bypass = now.bypass if wanted.bypass is None else wanted.bypass
        if freeze and bypass:
            raise BadRequestError(
                "bypass contradicts freeze (bypass serves no hits, freeze does); switch one of them off"
            )
        if now.freeze != freeze:
            self._set_freeze(freeze)
        if now.bypass != bypass:
            self._set_bypass(bypass)
        return self.switches()

    async def lookup(self, prompt: models.PromptLookup) -> models.HeldTokens:
        """Return how much of `prompt` is in memory and, if `prompt.tiers` is set, in tiers.

        Raises:
            BadRequestError: the engine would not accept the prompt.
            UnavailableError: as `state`.

        """
        asked = await self._hashed(prompt)
        prefixes, unit_tokens = self.survey.prefixes, self._side.geometry.unit_tokens
        keys, states = prefixes.unit_keys(asked), prefixes.state_keys(asked)
        memory: reads.HeldKeys = await self._read(lambda: reads.held_keys(self._side, keys, states))
        tokens, held, why = asked.num_tokens, 0, miss_reasons.ADAPTER
        if not asked.unknown:
            units = prefixes.longest(asked, memory.found)
            held, why = units * unit_tokens, ""
            if held < tokens:
                why = await self._look(lambda: self._prefixes.why_short(asked, units))
        answer = models.HeldTokens(tokens=tokens, held_tokens=held, why=why)
        if not prompt.tiers:
            return answer
        tiers, found = await self.survey.ask(asked, memory, _NO_ADAPTER if asked.unknown else "")
        reach_tokens = prefixes.longest(asked, found) * unit_tokens
        return answer.model_copy(update={"reach_tokens": reach_tokens, "tiers": tiers})

    # ---- orders ---------------------------------------------------------------------------------------------------

    async def pin(self, wanted: models.PinOrder) -> models.Pinned | models.Pending:
        """Pin the chunks in memory of a prompt. Returns `Pending` if the order takes more than `wait_s_max` seconds.

        Raises:
            BadRequestError: the engine would not accept the prompt, or the order is refused.
            UnavailableError: the engine shuts down, or too many orders wait.

        """
        asked = await self._known(wanted)
        result: models.Pinned | models.Pending
        result = await self._ordered(lambda: self._side.pins.pin(self._prefixes, asked, wanted.seconds))
        return result

    async def unpin(self, number: int) -> models.Pinned | models.Pending:
        """End a pin. Returns and raises as `pin`."""
        result: models.Pinned | models.Pending = await self._ordered(lambda: self._side.pins.unpin(number))
        return result

    async def pins(self) -> models.PinnedPrompts:
        """Return all pins. Raises as `state`."""
        pins = self._side.pins
        listed, chunks = await self._look(lambda: (pins.listed(), pins.chunks))
        pinned = [models.Pinned(**one._asdict()) for one in listed]
        return models.PinnedPrompts(pins=pinned, chunks=chunks, chunks_max=pins.chunks_max)

    async def evict(self, wanted: models.EvictOrder) -> models.EvictedChunks | models.Pending:
        """Evict the chunks in memory of a prompt. Returns and raises as `pin`."""
        asked = await self._known(wanted)
        result: models.EvictedChunks | models.Pending
        result = await self._ordered(lambda: self._side.pins.evict(self._prefixes, asked, wanted.from_token))
        return result

    async def evict_matching(self, wanted: models.EvictMatching) -> models.EvictedChunks | models.Pending:
        """Evict the chunks in memory of the tenants that `wanted` selects. Returns and raises as `pin`."""
        try:
            selects = selecting(wanted, self._holders.token)
        except ValueError as error:
            raise BadRequestError(str(error)) from None
        result: models.EvictedChunks | models.Pending
        result = await self._ordered(lambda: self._side.pins.evict_those(selects, wanted.idle_s or 0.0))
        return result

    async def warm(self, wanted: models.WarmOrder) -> models.Warmed | models.Pending:
        """Fetch the chunks of a prompt from tiers into memory. Returns and raises as `pin`."""
        asked = await self._known(wanted)
        request = self._request_of(wanted, asked.hashes) if self._request_of is not None else None
        result: models.Warmed | models.Pending
        result = await self._ordered(lambda: self._side.prefetching.warm(asked, request, wanted.seconds))
        return result

    async def order(self, number: int) -> Any:  # noqa: ANN401  (whatever was ordered)
        """Return the result of an order that was pending, or `Pending` if the order still waits. Raises as `pin`."""
        order = self._pending.get(number)
        if order is None:
            raise BadRequestError(f"order: no order {number} is remembered")
        return await self._outcome(order)

    async def _known(self, prompt: models.Prompt) -> HashedPrompt:
        asked = await self._hashed(prompt)
        if asked.unknown:
            raise BadRequestError(_NO_ADAPTER)
        return asked

    async def _ordered(self, make: Callable[[], Work]) -> Any:  # noqa: ANN401
        orders, idle = self._side.orders, True
        while idle and orders.full:
            idle = self._slice()
            await anyio.sleep(PAUSE_S)
        return await self._outcome(orders.queue_change(make))

    async def send_evictions(self) -> None:
        """While the engine is idle, send evictions of a node's chunks again.

        Never returns. An operator's eviction is over after one second, even if the node has no holder then. A holder
        that starts later gets the evictions from here.
        """
        while True:
            await anyio.sleep(EVICTIONS_S)
            self._slice()

    def _slice(self) -> bool:
        """Carry out a slice of the waiting orders if the engine is idle. Returns whether any part was carried out.

        Evictions that a node's holder has not answered are sent again, too.
        """
        orders, node = self._side.orders, self._side.node
        waits = orders.due or orders.reads or (node is not None and node.pool.stock.evictions)
        if not waits or not orders.turns.borrow():
            return False
        try:
            return self._side.carry_out_orders()
        finally:
            orders.turns.give_back()

    async def _outcome(self, order: Order) -> Any:  # noqa: ANN401
        """Return the result of the change `order`, or `Pending` if `order` is not over after `wait_s_max` seconds."""
        await self._wait(order, self.wait_s_max)
        if not order.over:
            self._pending[order.number] = order
            while len(self._pending) > PENDING_MAX:
                del self._pending[next(iter(self._pending))]
            return models.Pending(order=order.number)
        kinds: dict[type, type] = {
            PinnedPrompt: models.Pinned, EvictedPrompt: models.EvictedChunks, WarmedPrompt: models.Warmed,
        }  # fmt: skip
        result = _result(order)
        return kinds[type(result)](**result._asdict())

    async def _wait(self, order: Order, seconds: float, *, alone: bool = False) -> None:
        """Wait until `order` is over, for at most `seconds`. Carries out orders while the engine is idle.

        If `alone`, return as soon as `order` is over. Otherwise also carry out the orders that wait after `order`.
        """
        with self._bell.listening() as rung, anyio.move_on_after(seconds):
            while not (alone and order.over) and ((more := self._slice()) or not order.over):
                await (anyio.sleep(PAUSE_S) if more else rung.wait())
                rung.clear()

    async def _look(self, look: Callable[[], Any]) -> Any:  # noqa: ANN401
        """Return the result of a read that has one part. Raises as `_read`."""
        return await self._read(lambda: reads.at_once(look))

    async def _read(self, make: Callable[[], Work], seconds: float = 0.0) -> Any:  # noqa: ANN401
        """Return the result of a read within `seconds`, or within `read_s_max` if `seconds` is 0.

        Raises:
            UnavailableError: the engine ends, or is busy and has not carried out the read in time.

        """
        seconds = seconds or self.read_s_max
        order = self._side.orders.queue_read(make)
        await self._wait(order, seconds, alone=True)
        if not order.over:
            order.unwanted = True
            why = f"the engine is busy: its scheduler has not answered within {seconds:g} s; ask again later"
            raise UnavailableError(why)
        return _result(order)

    # ---- state ----------------------------------------------------------------------------------------------------

    async def _hashed(self, prompt: models.Prompt) -> HashedPrompt:
        """Return the prompt with all its keys. Other tasks run between two iterations of the hasher."""
        hashes: Sequence[bytes] = ()
        async with self._one:  # only one prompt is hashed at a time, because hashing keeps a processor busy
            for some in self._hash(prompt):
                hashes = some
                await anyio.sleep(PAUSE_S)
        if prompt.adapter is None:
            return HashedPrompt(prompt, hashes, hashes)
        agreed: dict[int, bytes] = await self._look(self._side.adapters.agreed)
        digest = agreed.get(prompt.adapter.number, b"")
        keys = [key + digest for key in hashes] if digest else []
        return HashedPrompt(prompt, keys, hashes, digest)

    async def state(self, requests_max: int) -> models.EngineState:
        """Return the engine's state, with at most `requests_max` of its slowest requests.

        Raises:
            UnavailableError: the engine ends, or is busy and has not answered in time.

        """
        totals, rows = await self._read(lambda: reads.snapshot(self._side, requests_max))
        return models.EngineState(
            kvpipe=__version__,
            engine=self.name,
            up_s=time.monotonic() - self._began_s,
            namespace=totals.namespace,
            step=totals.step,
            switches=self.switches(),
            saving=totals.saving,
            pool=totals.pool,
            requests=totals.requests,
            requests_shown=[models.RequestHolds(**row) for row in rows],
            jobs=self._jobs(totals.jobs, totals.tier_orders),
            traffic=totals.traffic,
            tiers=totals.tiers,
            adapters=[
                models.AdapterHeld(number=number, digest=digest.hex())
                for number, digest in sorted(totals.adapters.items())
            ],
        )

    def _jobs(self, jobs: Sequence[Job], tier_orders: int) -> models.JobCounts:
        geometry = self._side.geometry
        count, size = Counter[bool](), Counter[bool]()
        page_bytes = np.array([group.bytes_per_block for group in geometry.groups])
        for job in jobs:
            saves = job.kind == Kind.SAVE
            count[saves] += 1
            size[saves] += int(page_bytes[job.table()[:, 0]].sum())
        return models.JobCounts(
            saves=count[True],
            loads=count[False],
            tier_orders=tier_orders,
            save_bytes=size[True],
            load_bytes=size[False],
            tier_bytes_max=tier_orders * geometry.slot_bytes,
        )


class HashedPrompt(KnownPrompt):
    """An operator's prompt. `hashes` are the engine's block hashes.

    `unknown` says that the digest of the prompt's adapter is not known, so that the prompt has no keys.
    """

    def __init__(
        self, prompt: models.Prompt, keys: Sequence[bytes], hashes: Sequence[bytes], digest: bytes = b""
    ) -> None:
        """Make the keys: the hashes, each followed by `digest`.

        `digest` is the adapter's digest, or b"" if it is not known.
        """
        one = prompt.adapter
        adapter = AdapterIdentity(one.name, one.path, digest) if one is not None else None
        super().__init__(keys, len(prompt.tokens), prompt.cache_salt or "", adapter)
        self.hashes, self.unknown = hashes, not digest and one is not None


def _result(order: Order) -> Any:  # noqa: ANN401
    """Return the result of a finished order. Raises `BadRequestError` or `UnavailableError` for a refused order."""
    if order.refused:
        raise (UnavailableError if order.failed else BadRequestError)(order.refused)
    return order.result
