"""Operators' orders on the pool: pin a prompt until a deadline, end a pin, evict a prompt or tenants.

A pin is a set of leases, whose owner is not a request. A pin ends at its deadline, when an operator releases the pin,
when any of its chunks is evicted, and at a reset. The work of an order is done in parts (`kvpipe.features.orders`).
"""

from __future__ import annotations

import functools
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from kvpipe.cache.chunks import Chunk, EvictedError, Owner
from kvpipe.features.orders import OrderRefusedError, Work
from kvpipe.node.operated import OperatedCatalog
from kvpipe.scheduler.events import Subscriber

if TYPE_CHECKING:
    from kvpipe.cache.prefixes import Prefixes
    from kvpipe.cache.tenants import Tenant
    from kvpipe.features.orders import Orders
    from kvpipe.protocol.engine import Request
    from kvpipe.scheduler.context import Context

PINS_MAX: Final = 256
PART_CHUNKS: Final = 16
"""The number of chunks that one part of an order leases, or evicts by tenant."""
PART_SLOTS: Final = 256
"""The number of slots that one part of an order examines."""
EPOCHS: Final = 1 << 62
"""The lowest epoch of an owner of a pin. Owners of admissions, stages and stores have lower epochs."""


SENT_S_MAX: Final = 1.0
"""The longest wait of an eviction for the holder of a node's memory, in seconds."""
_EVICTED: Final = "some chunks of this prompt were evicted meanwhile"


class Pin:
    """The chunks of one prompt's prefix. They are kept until the monotonic clock shows `until_s` seconds."""

    def __init__(self, number: int, until_s: float) -> None:
        """Start without chunks."""
        self.number, self.until_s, self.tokens = number, until_s, 0
        self.parts: list[Owner] = []
        self.chunks: dict[Chunk, None] = {}
        self.over = False


class PinnedPrompt(NamedTuple):
    """A pin as operators see it: its number, and how many tokens, chunks and remaining seconds it has."""

    pin: int
    tokens: int
    chunks: int
    left_s: float


class EvictedPrompt(NamedTuple):
    """The result of an eviction: the numbers of evicted `chunks` and of ended pins.

    `held` is the number of evicted chunks whose slots are still read or written.
    """

    chunks: int
    held: int
    pins_ended: int


class PromptPins(Subscriber):
    """The pins of one engine. Only the thread that has the turn may use the pins.

    The `Work` methods raise `OrderRefusedError` if an order cannot be carried out.
    """

    def __init__(self, context: Context, orders: Orders) -> None:
        """Start without pins."""
        settings = context.settings
        self._share_max, self._seconds_max = settings.manage_pinned_share_max, settings.manage_pin_s_max
        self._context, self._orders = context, orders
        self._per_chunk = context.geometry.units_per_chunk
        self.clock: Callable[[], float] = time.monotonic
        self.pins: dict[int, Pin] = {}
        self._pinned: Counter[Chunk] = Counter()  # the number of pins of each chunk
        self._numbers, self._epochs = 0, itertools.count(EPOCHS)
        self._first_s = 0.0  # no pin ends before this time
        if isinstance(context.catalog, OperatedCatalog):
            context.catalog.on_leased_evicted = self._end_those_of

    # ---- pins -----------------------------------------------------------------------------------------------------

    def check(self, seconds: float) -> None:
        """Raise OrderRefusedError if `seconds` exceeds the longest time for which a pin may last."""
        if seconds > self._seconds_max:
            raise OrderRefusedError(f"seconds: {seconds:g} are more than manage_pin_s_max ({self._seconds_max})")

    def pin(self, prefixes: Prefixes, asked: Request, seconds: float) -> Work:
        """Pin the chunks of a prompt's prefix that memory holds, for at most `seconds`. Returns a `PinnedPrompt`.

        The pin holds all chunks that a hit of this prompt needs, and all chunks that a hit of a longer prompt needs.
        """
        self.check(seconds)
        now_s = self.clock()
        for other in [other for other in self.pins.values() if other.over or other.until_s <= now_s]:
            yield from self._end(other)
        if len(self.pins) >= PINS_MAX:
            raise OrderRefusedError(f"there are {PINS_MAX} pins already")
        reaches = self._reaches(prefixes, asked)
        if not reaches[0]:
            raise OrderRefusedError("nothing of this prompt is in memory")
        self._numbers += 1
        self._first_s = 0.0
        pin = self.pins[self._numbers] = Pin(self._numbers, self.clock() + seconds)
        part: list[Chunk] = []
        needed = (self.needed(prefixes, asked, reach) for reach in dict.fromkeys(reaches))
        for seen, chunk in enumerate(itertools.chain.from_iterable(needed), 1):
            if chunk not in pin.chunks and chunk not in part:
                part.append(chunk)
            if not seen % PART_CHUNKS:
                yield from self._hold(pin, part)
                part = []
        yield from self._hold(pin, part)
        if any(now < before for now, before in zip(self._reaches(prefixes, asked), reaches, strict=True)):
            yield from self._end(pin)
            raise OrderRefusedError(_EVICTED)
        pin.tokens = reaches[0] * self._context.geometry.unit_tokens
        return self._report(pin)

    def _hold(self, pin: Pin, part: list[Chunk]) -> Work:
        chunks = [chunk for chunk in part if self._context.catalog.holds(chunk)]
        most, held = self.chunks_max, len(self._pinned)
        if held + sum(1 for chunk in chunks if chunk not in self._pinned) > most:
            yield from self._end(pin)
            raise OrderRefusedError(
                f"pins may hold {most} chunks (manage_pinned_share_max): this prompt needs more than are left"
            )
        if chunks:
            owner = Owner(f"pin:{pin.number}", next(self._epochs))
            try:
                self._context.catalog.lease(owner, chunks, timed=False)
            except EvictedError:
                yield from self._end(pin)
                raise OrderRefusedError(_EVICTED) from None
            pin.parts.append(owner)
            pin.chunks |= dict.fromkeys(chunks)
            self._pinned.update(chunks)
        yield
        if pin.over:
            raise OrderRefusedError("the pin has ended: its time is over, or its chunks were evicted or reset")

    def unpin(self, number: int) -> Work:
        """End a pin. Returns a `PinnedPrompt` that describes the pin before its end."""
        pin = self.pins.get(number)
        if pin is None:
            raise OrderRefusedError(f"pin: there is no pin {number}")
        result = self._report(pin)
        yield from self._end(pin)
        return result

    def expire(self) -> None:
        """Queue an order to end each pin whose deadline has passed."""
        now_s = self.clock()
        if now_s < self._first_s:
            return
        for pin in [pin for pin in self.pins.values() if pin.until_s <= now_s and not pin.over]:
            self._end_soon(pin)
        self._first_s = min((pin.until_s for pin in self.pins.values() if not pin.over), default=now_s)

    def _end_soon(self, pin: Pin) -> None:
        pin.over = True
        self._orders.queue_change(functools.partial(self._end, pin), always=True)

    def reset(self) -> None:
        """End all pins at once."""
        for pin in list(self.pins.values()):
            for _ in self._end(pin):
                pass

    def listed(self) -> list[PinnedPrompt]:
        """Return all pins."""
        now_s = self.clock()
        return [self._report(pin) for pin in self.pins.values() if not pin.over and pin.until_s > now_s]

    @property
    def chunks_max(self) -> int:
        """The number of chunks that pins may hold."""
        return int(self._share_max * self._context.catalog.slots_for_pins)

    @property
    def chunks(self) -> int:
        """The number of chunks that pins hold."""
        return len(self._pinned)

    @property
    def owners(self) -> set[Owner]:
        """The owners of the pins' leases."""
        return {owner for pin in self.pins.values() for owner in pin.parts}

    def _report(self, pin: Pin) -> PinnedPrompt:
        return PinnedPrompt(pin.number, pin.tokens, len(pin.chunks), max(0.0, pin.until_s - self.clock()))

    def _end(self, pin: Pin) -> Work:
        """End a pin's leases. The last chunk of the prefix is released first, and so is evicted first."""
        pin.over = True
        while pin.parts:
            owner = pin.parts.pop()
            for chunk in self._context.catalog.leased.get(owner, ()):
                pin.chunks.pop(chunk, None)
                self._pinned[chunk] -= 1
                if not self._pinned[chunk]:
                    del self._pinned[chunk]
            self._context.catalog.release(owner, hit=False)
            yield
        self.pins.pop(pin.number, None)

    def _reaches(self, prefixes: Prefixes, asked: Request) -> tuple[int, int]:
        """Return (units of the hit of a longer prompt that begins with this one, units of the hit of this prompt)."""
        continued = prefixes.longest(asked, continued=True)
        whole = continued * self._context.geometry.unit_tokens >= asked.num_tokens
        return continued, prefixes.longest(asked) if whole else continued

    def needed(self, prefixes: Prefixes, asked: Request, reach: int) -> Iterator[Chunk]:
        """Yield the chunks that a hit of `reach` units reads, in the order of the prefix."""
        hashes = prefixes.hashes(asked)
        catalog, geometry = self._context.catalog, self._context.geometry
        for base in range(0, reach, self._per_chunk):
            high = min(base + self._per_chunk, reach)
            for group, kind in enumerate(geometry.groups):
                if kind.state:
                    chunk = catalog.find(group, prefixes.state_key(hashes, reach)) if high == reach else None
                elif kind.window_tokens and (reach - high) * geometry.unit_tokens > kind.window_tokens:
                    continue  # the chunk ends before the window of the last token
                else:
                    chunk = prefixes.holding(group, hashes, base, high)
                    if chunk is not None and high % self._per_chunk:
                        catalog.keep_mark(chunk, prefixes.key(hashes, high))
                if chunk is not None:
                    yield chunk

    # ---- evictions ------------------------------------------------------------------------------------------------

    def evict(self, prefixes: Prefixes, asked: Request, first_tokens: int) -> Work:
        """Evict a prompt's chunks in memory, from the last chunk back to the chunk that has token `first_tokens`.

        Chunks that are being written are evicted too. Pins that hold any evicted chunk end. Returns an `EvictedPrompt`.
        """
        catalog, geometry = self._context.catalog, self._context.geometry
        hashes, unit = prefixes.hashes(asked), geometry.unit_tokens
        units, states = (count(asked, asked.num_tokens) for count in (prefixes.final_units, prefixes.state_units))
        first = first_tokens // unit
        dropped = held = ended = 0
        for base in reversed(range(first // self._per_chunk * self._per_chunk, max(units, states), self._per_chunk)):
            found: dict[Chunk, None] = {}
            for group, kind in enumerate(geometry.groups):
                stop, key = (states, prefixes.state_key) if kind.state else (units, prefixes.key)
                for at in range(max(base, first if kind.state else 0) + 1, min(base + self._per_chunk, stop) + 1):
                    there = (
                        catalog.find(group, key(hashes, at)),
                        catalog.pending(group).get(key(hashes, at)),
                    )
                    found.update(dict.fromkeys(chunk for chunk in there if chunk is not None))
            for chunk in found:
                if catalog.evict(chunk):
                    dropped, held, ended = dropped + 1, held + chunk.held, ended + self._end_those_of(chunk)
            yield
        yield from self._sent()
        return EvictedPrompt(dropped, held, ended)

    def _sent(self) -> Work:
        """Wait until the holder of a node's memory has carried out the evictions. Without a holder, do not wait."""
        until_s = self.clock() + SENT_S_MAX
        while self._context.catalog.evictions_wait and self.clock() < until_s:
            yield

    def _end_those_of(self, chunk: Chunk) -> int:
        """End the pins that hold a chunk. Returns the number of these pins."""
        if chunk not in self._pinned:
            return 0
        pins = [pin for pin in self.pins.values() if chunk in pin.chunks and not pin.over]
        for pin in pins:
            self._end_soon(pin)
        return len(pins)

    def evict_those(self, selects: Callable[[Tenant], bool], idle_s: float = 0.0) -> Work:
        """Evict the chunks of the tenants for which `selects` is true, slot by slot. Returns an `EvictedPrompt`.

        If `idle_s` is not 0, a chunk is evicted only if it has no lease, is not being written, and was not used for
        `idle_s` seconds. Chunks that are saved while this order runs may stay.
        """
        known: dict[Tenant, bool] = {}
        dropped = held = ended = 0
        for first in range(0, self._context.catalog.ready, PART_SLOTS):
            for chunk in self._chosen(first, known, selects, idle_s):
                if self._context.catalog.evict(chunk):
                    dropped, held, ended = dropped + 1, held + chunk.held, ended + self._end_those_of(chunk)
                    if not dropped % PART_CHUNKS:
                        yield
            yield
        yield from self._sent()
        return EvictedPrompt(dropped, held, ended)

    def _chosen(
        self, first: int, known: dict[Tenant, bool], selects: Callable[[Tenant], bool], idle_s: float
    ) -> Iterator[Chunk]:
        """Yield the chunks to evict from `PART_SLOTS` slots, the first of which is `first`.

        `known` caches the results of `selects`.
        """
        catalog, latest_s = self._context.catalog, self._context.catalog.now_s - idle_s
        if len(known) > PART_SLOTS:
            known.clear()
        for slot in range(first, min(first + PART_SLOTS, catalog.ready)):
            chunk = catalog.at(slot)
            if chunk is None or (idle_s and (chunk.held or chunk.used_s > latest_s)):
                continue
            tenant = chunk.tenant
            if tenant not in known:
                known[tenant] = selects(tenant)
            if known[tenant]:
                yield chunk
