"""Tiers without I/O. The cost model and the replay's clock decide when the tiers answer."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from benchmarks.replay.model import Link, Store
from kvpipe.protocol.limits import RequestLimits
from kvpipe.protocol.messages import TierOrder
from kvpipe.tiers.finder import TierLookup
from kvpipe.tiers.prefix_keys import chunk_name
from kvpipe.tiers.rate import ReadRate


class Clock:
    """The replay's clock, which replaces the module `time` in the scheduler side's modules."""

    def __init__(self) -> None:
        """Start at 0 s. Calls that are scheduled with `at` run in the order of their times."""
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()

    def monotonic(self) -> float:
        """Return the replay's time in seconds."""
        return self.now_s

    def monotonic_ns(self) -> int:
        """Return the replay's time in nanoseconds."""
        return int(self.now_s * 1e9)

    def at(self, at_s: float, call: Callable[[], object]) -> None:
        """Schedule `call` for the time `at_s`."""
        heapq.heappush(self._due, (max(at_s, self.now_s), next(self._numbers), call))

    @property
    def next_s(self) -> float:
        """The time of the next scheduled call in seconds, or infinity if no call is scheduled."""
        return self._due[0][0] if self._due else float("inf")

    def go(self, to_s: float) -> None:
        """Advance to `to_s`, and run all calls that are scheduled up to that time."""
        assert to_s >= self.now_s, "time runs forwards"
        while self._due and self._due[0][0] <= to_s:
            self.now_s, _, call = heapq.heappop(self._due)
            call()
        self.now_s = to_s


class VirtualTier:
    """One tier, which holds a chunk from the end of the chunk's write until the chunk is evicted."""

    def __init__(self, store: Store) -> None:
        """Make an empty tier with the figures of `store`."""
        self.store = store
        self.read, self.write = (
            Link(rate, store.latency_s) for rate in (store.read_bytes_per_s, store.write_bytes_per_s)
        )
        self.held: OrderedDict[bytes, None] = OrderedDict()
        self.rate = ReadRate()

    def put(self, name: bytes) -> None:
        """Add a chunk. If the tier is full, the least recently used chunk is evicted."""
        self.held[name] = None
        self.held.move_to_end(name)
        if len(self.held) > self.store.slots:
            self.held.popitem(last=False)

    def get(self, name: bytes) -> bool:
        """Return whether the tier holds a chunk, and mark the chunk as used."""
        if name in self.held:
            self.held.move_to_end(name)
            return True
        return False


class VirtualFinder:
    """Answers lookups as `kvpipe.tiers.finder.Finder` does, but by the replay's clock and without a thread."""

    def __init__(self, tiers: Sequence[VirtualTier], clock: Clock) -> None:
        """Make a finder over `tiers`, which never fail."""
        self._tiers, self._clock = tiers, clock
        self.tiers: list[Any] = [
            SimpleNamespace(name=one.store.name, spec=SimpleNamespace(store="all", lanes=one.store.lanes))
            for one in tiers
        ]
        self.unreadable: frozenset[int] = frozenset()
        self.heads: tuple[int, ...] = ()
        self.usable = True

    def look_up(self, lookup: TierLookup) -> None:
        """Answer a lookup. The answer takes the latencies of the queried tiers."""
        self._ask(lookup, 0)

    def _ask(self, lookup: TierLookup, place: int) -> None:
        left = [one for one in lookup.wanted if one not in lookup.found]
        if place == len(self._tiers) or not left:
            lookup.done = True
            return
        tier = self._tiers[place]

        def answer() -> None:
            lookup.found.update((one, place) for one in left if chunk_name(lookup.key(one)) in tier.held)
            self._ask(lookup, place + 1)

        self._clock.at(self._clock.now_s + tier.store.latency_s, answer)

    def split(self, group: int) -> int:
        """Return 0: each rank has its own part of a chunk."""
        del group
        return 0

    def stored(self, place: int, space: str, chunk: bytes, group: int) -> None:
        """Ignore that a chunk was stored, because this finder reads the tiers' contents directly."""

    def asked(self, limits: RequestLimits) -> None:
        """Return None: a replayed request may ask all tiers."""

    def stop(self) -> None:
        """Do nothing, because there is no thread to stop."""

    def carry(self, order: TierOrder, size: int, done: Callable[[bool], object]) -> None:
        """Carry out an order of `size` bytes, and call `done(ok)` at its end."""
        tier, clock = self._tiers[order.tier], self._clock
        if not order.stores:
            tier.rate.begin(clock.now_s)

        def ended() -> None:
            if order.stores:
                tier.put(order.chunk)
            else:
                tier.rate.end(clock.now_s, size)
            done(order.stores or tier.get(order.chunk))

        link = tier.write if order.stores else tier.read
        clock.at(link.carry(size, clock.now_s), ended)
