"""A tier with faults: late, failing, full, forgetful, damaging or hanging, by a seeded plan or on demand."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from enum import Enum

import anyio

from kvpipe.tiers.base import Capacity, Entry, Get, Key, Put, Read, Tier, TierError, TierFullError, Written


class TierFault(Enum):
    """What can go wrong with one call."""

    LATE = "late"  # it is done, but only after a while
    ERROR = "error"  # it is not done, and raises
    LOST = "lost"  # it is done, but raises: the answer was lost
    HANG = "hang"  # it never returns: it can only be cancelled
    FULL = "full"  # writes only: there is no room
    MISS = "miss"  # exists and read only: nothing is found
    FLIP = "flip"  # read only: one bit of every value read is another


ALWAYS = frozenset({TierFault.LATE, TierFault.ERROR, TierFault.LOST, TierFault.HANG})


def seeded(seed: int, chances: Mapping[TierFault, float]) -> Iterator[TierFault | None]:
    """Yield, for one call after the other, a fault by its chance, or None; the same ones for the same seed."""
    rng = random.Random(seed)
    faults: tuple[TierFault | None, ...] = (*chances, None)
    weights = (*chances.values(), 1 - sum(chances.values()))
    while True:
        yield rng.choices(faults, weights)[0]


class FaultyTier:
    """Passes every call to `inner`, with at most one fault: the first of `demanded` that fits, or else the plan's next.

    Opening and closing have no faults. `struck` counts what has happened.
    """

    def __init__(
        self, inner: Tier, plan: Iterable[TierFault | None] = (), *, late_s: float = 0.01, seed: int = 0
    ) -> None:
        """Nothing has happened. `plan` may be endless; when it ends there are no further faults."""
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
        """Let the next fault begin; return it for what remains of it afterwards."""
        fault = self._next(frozenset(own))
        if fault is TierFault.LATE:
            await anyio.sleep(self.late_s)
        elif fault is TierFault.HANG:
            await anyio.sleep_forever()
        elif fault is TierFault.FULL:
            msg = f"{self.name}: full, as was wished"
            raise TierFullError(msg)
        elif fault is TierFault.ERROR:
            self._fail()
        return fault

    def _fail(self) -> None:
        msg = f"{self.name}: failed, as was wished"
        raise TierError(msg)

    def _after(self, fault: TierFault | None) -> None:
        if fault is TierFault.LOST:
            self._fail()

    async def open(self) -> None:
        """See `Tier.open`."""
        await self.inner.open()

    async def exists(self, keys: Sequence[Key]) -> list[bool]:
        """See `Tier.exists`."""
        fault = await self._before(TierFault.MISS)
        found = await self.inner.exists(keys)
        self._after(fault)
        return [False] * len(keys) if fault is TierFault.MISS else found

    async def read(self, gets: Sequence[Get]) -> list[Read]:
        """See `Tier.read`."""
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
        """See `Tier.write`."""
        fault = await self._before(TierFault.FULL)
        written = await self.inner.write(puts)
        self._after(fault)
        return written

    async def delete(self, keys: Sequence[Key]) -> int:
        """See `Tier.delete`."""
        fault = await self._before()
        count = await self.inner.delete(keys)
        self._after(fault)
        return count

    async def capacity(self) -> Capacity:
        """See `Tier.capacity`."""
        fault = await self._before()
        capacity = await self.inner.capacity()
        self._after(fault)
        return capacity

    async def health(self) -> None:
        """See `Tier.health`."""
        fault = await self._before()
        await self.inner.health()
        self._after(fault)

    async def scan(self) -> AsyncIterator[Entry]:
        """See `Tier.scan`."""
        fault = await self._before()
        async for entry in self.inner.scan():
            yield entry
        self._after(fault)

    async def close(self) -> None:
        """See `Tier.close`."""
        await self.inner.close()
