"""Tiers without I/O: what they hold, when they answer, by the model's figures and the replay's clock."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from benchmarks.replay.model import Link, Store
from kvpipe.messages import TierOrder
from kvpipe.tiers.finder import TierLookup, chunk_name
from kvpipe.tiers.rate import ReadRate


class Clock:
    """Stands for the module `time` in the scheduler's process: its time is that of the replay."""

    def __init__(self) -> None:
        """Begin. What is due at a time is called when the clock gets there, in the order of its time."""
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()

    def monotonic(self) -> float:
        """Return the replay's time, in seconds."""
        return self.now_s

    def monotonic_ns(self) -> int:
        """Return it in nanoseconds."""
        return int(self.now_s * 1e9)

    def at(self, at_s: float, call: Callable[[], object]) -> None:
        """Call `call` when it is `at_s`."""
        heapq.heappush(self._due, (max(at_s, self.now_s), next(self._numbers), call))

    @property
    def next_s(self) -> float:
        """When the next call is due."""
        return self._due[0][0] if self._due else float("inf")

    def go(self, to_s: float) -> None:
        """Go on to `to_s`, and call what is due by then."""
        assert to_s >= self.now_s, "time runs forwards"
        while self._due and self._due[0][0] <= to_s:
            self.now_s, _, call = heapq.heappop(self._due)
            call()
        self.now_s = to_s


class VirtualTier:
    """One store, from when a write has ended until it is dropped."""

    def __init__(self, store: Store) -> None:
        """Empty."""
        self.store = store
        self.read, self.write = (
            Link(rate, store.latency_s) for rate in (store.read_bytes_per_s, store.write_bytes_per_s)
        )
        self.held: OrderedDict[bytes, None] = OrderedDict()
        self.rate = ReadRate()

    def put(self, name: bytes) -> None:
        """Keep a chunk."""
        self.held[name] = None
        self.held.move_to_end(name)
        if len(self.held) > self.store.slots:
            self.held.popitem(last=False)

    def get(self, name: bytes) -> bool:
        """Return whether a chunk is there; it is of use now."""
        if name in self.held:
            self.held.move_to_end(name)
            return True
        return False


class VirtualFinder:
    """Answers lookups as `kvpipe.tiers.finder.Finder` does, on the replay's clock and without a thread."""

    def __init__(self, tiers: Sequence[VirtualTier], clock: Clock) -> None:
        """Every tier works."""
        self._tiers, self._clock = tiers, clock
        self.tiers: list[Any] = [
            SimpleNamespace(name=one.store.name, spec=SimpleNamespace(store="all", lanes=one.store.lanes))
            for one in tiers
        ]
        self.unreadable: frozenset[int] = frozenset()
        self.heads: tuple[int, ...] = ()
        self.usable = True

    def ask(self, lookup: TierLookup) -> None:
        """Answer after the latencies of the tiers that are asked."""
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
        """Return that each rank has a part of its own."""
        del group
        return 0

    def stored(self, place: int, space: str, chunk: bytes, group: int) -> None:
        """Nothing is answered from a listing."""

    def stop(self) -> None:
        """There is no thread."""

    def carry(self, order: TierOrder, size: int, done: Callable[[bool], object]) -> None:
        """Carry out an order of `size` bytes; call `done(ok)` when it has ended."""
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
