"""A tier with faults: delays, failures, a full store, misses, damage or hangs, by a seeded plan or on demand."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from enum import Enum

import anyio

from kvpipe.tiers.base import Capacity, Entry, Get, Key, Put, Read, Tier, TierError, TierFullError, Written


class TierFault(Enum):
    """A fault of one call."""

    LATE = "late"  # the call is done after a delay
    ERROR = "error"  # the call is not done, and raises TierError
    LOST = "lost"  # the call is done, but raises TierError, as if the answer was lost
    HANG = "hang"  # the call never returns, and can only be cancelled
    FULL = "full"  # writes only: raises TierFullError
    MISS = "miss"  # exists and read only: no value is found
    FLIP = "flip"  # read only: one bit of every value is flipped


ALWAYS = frozenset({TierFault.LATE, TierFault.ERROR, TierFault.LOST, TierFault.HANG})


def seeded(seed: int, chances: Mapping[TierFault, float]) -> Iterator[TierFault | None]:
    """For each successive call, yield a random fault, or None for no fault.

    Each fault has its probability. The same seed gives the same faults.
    """
    rng = random.Random(seed)
    faults: tuple[TierFault | None, ...] = (*chances, None)
    weights = (*chances.values(), 1 - sum(chances.values()))
    while True:
        yield rng.choices(faults, weights)[0]


class FaultyTier:
    """Passes every call to the tier `inner`, with at most one fault.

    The fault is the first fault in `demanded` that is possible for the call, or else the next fault of the plan. `open`
    and `close` have no faults. `struck` counts the faults that have occurred.
    """

    def __init__(
        self, inner: Tier, plan: Iterable[TierFault | None] = (), *, late_s: float = 0.01, seed: int = 0
    ) -> None:
        """Start without faults. `plan` may be endless. After the plan's end only `demanded` causes faults."""
        self.inner, self.name, self.late_s = inner, inner.name, late_s
        self.plan = iter(plan)
        self.demanded: deque[TierFault] = deque()
        self.struck: Counter[TierFault] = Counter()
        self._rng = random.Random(seed)

    def _next(self, own: frozenset[TierFault]) -> TierFault | None:
        possible = ALWAYS | own
        fault = next((fault for fault in self.demanded if fault in possible), None)
        if fault is not None:
            self.demanded.remove(fault)
        else:
            fault = next(self.plan, None)
        if fault not in possible:
            return None
        self.struck[fault] += 1
        return fault

    async def _before(self, *own: TierFault) -> TierFault | None:
        """Return the next fault, after its effect before the call, such as a delay."""
        fault = self._next(frozenset(own))
        if fault is TierFault.LATE:
            await anyio.sleep(self.late_s)
        elif fault is TierFault.HANG:
            await anyio.sleep_forever()
        elif fault is TierFault.FULL:
            msg = f"{self.name}: full, as the test demanded"
            raise TierFullError(msg)
        elif fault is TierFault.ERROR:
            self._fail()
        return fault

    def _fail(self) -> None:
        msg = f"{self.name}: failed, as the test demanded"
        raise TierError(msg)

    def _after(self, fault: TierFault | None) -> None:
        if fault is TierFault.LOST:
            self._fail()

    async def open(self) -> None:
        """Open the inner tier, without a fault."""
        await self.inner.open()

    async def exists(self, keys: Sequence[Key]) -> list[bool]:
        """Pass the call to the inner tier, with at most one fault."""
        fault = await self._before(TierFault.MISS)
        found = await self.inner.exists(keys)
        self._after(fault)
        return [False] * len(keys) if fault is TierFault.MISS else found

    async def read(self, gets: Sequence[Get]) -> list[Read]:
        """Pass the call to the inner tier, with at most one fault."""
        fault = await self._before(TierFault.MISS, TierFault.FLIP)
        if fault is TierFault.MISS:
            return [Read.MISS] * len(gets)
        reads = await self.inner.read(gets)
        self._after(fault)
        if fault is TierFault.FLIP:
            for get, read in zip(gets, reads, strict=True):
                if read is Read.HIT:
                    part = self._rng.choice(get.into)
                    part[self._rng.randrange(part.nbytes)] ^= 1 << self._rng.randrange(8)
        return reads

    async def write(self, puts: Sequence[Put]) -> list[Written]:
        """Pass the call to the inner tier, with at most one fault."""
        fault = await self._before(TierFault.FULL)
        written = await self.inner.write(puts)
        self._after(fault)
        return written

    async def delete(self, keys: Sequence[Key]) -> int:
        """Pass the call to the inner tier, with at most one fault."""
        fault = await self._before()
        count = await self.inner.delete(keys)
        self._after(fault)
        return count

    async def capacity(self) -> Capacity:
        """Pass the call to the inner tier, with at most one fault."""
        fault = await self._before()
        capacity = await self.inner.capacity()
        self._after(fault)
        return capacity

    async def health(self) -> None:
        """Pass the call to the inner tier, with at most one fault."""
        fault = await self._before()
        await self.inner.health()
        self._after(fault)

    async def scan(self) -> AsyncIterator[Entry]:
        """Pass the call to the inner tier, with at most one fault."""
        fault = await self._before()
        async for entry in self.inner.scan():
            yield entry
        self._after(fault)

    async def close(self) -> None:
        """Close the inner tier, without a fault."""
        await self.inner.close()
