"""A tier for trials: a dictionary that all ranks share. On demand, calls wait, fail or return wrong bytes."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from typing import Literal

from kvpipe.testing.dict_tier import DictTier
from kvpipe.tiers.base import Get, Key, Put, Read, Tier, TierError, TierFullError, Written
from kvpipe.tiers.spec import TierSpec

TROUBLES = ("none", "down", "full", "forgets", "damages", "cuts")
"""The faults of the tier.

They are, in order: no fault, the tier is down, the tier is full, every read misses, a bit is flipped, values are short.
"""
DROPPED_MAX = 4096


class DictSpec(TierSpec):
    """The configuration of a `HeldTier`."""

    kind: Literal["dict"] = "dict"

    def make(self, name: str, *, writes: bool = True) -> Tier:  # noqa: ARG002
        """Return a new `HeldTier`."""
        return HeldTier(name)


class HeldTier(DictTier):
    """A tier that several event loops use at once. The trial's thread controls it."""

    def __init__(self, name: str = "dict") -> None:
        """Start without a fault and without held calls."""
        super().__init__(name)
        self.trouble = "none"
        self.is_held, self._lock = False, threading.Lock()
        self.values_max = 0
        """The largest number of values that the tier keeps; 0 means no limit. The oldest values are dropped first."""
        self.dropped = deque[str](maxlen=DROPPED_MAX)
        """The names of the values that were most recently dropped or deleted."""
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    @property
    def waiting(self) -> int:
        """The number of calls that are held."""
        return len(self._waiting)

    def hold(self) -> None:
        """Hold every call from now on."""
        self.is_held = True

    def let_go(self) -> None:
        """Release the held calls, and hold no later calls."""
        with self._lock:
            self.is_held = False
            waiting, self._waiting = self._waiting, []
        for loop, event in waiting:
            loop.call_soon_threadsafe(event.set)

    async def exists(self, keys: Sequence[Key]) -> list[bool]:
        """Search for values as `DictTier` does, once the call is no longer held."""
        await self._turn()
        return await super().exists(keys)

    async def read(self, gets: Sequence[Get]) -> list[Read]:
        """Read values as `DictTier` does, with the fault that the trial has set."""
        await self._turn()
        if self.trouble == "forgets":
            return [Read.MISS for _ in gets]
        if self.trouble == "cuts":
            return [Read.DAMAGED for _ in gets]
        found = await super().read(gets)
        if self.trouble == "damages":
            for get in gets:
                get.into[-1][0] ^= 1
        return found

    async def write(self, puts: Sequence[Put]) -> list[Written]:
        """Write values as `DictTier` does, and drop the oldest values beyond `values_max`."""
        await self._turn()
        if self.trouble == "full":
            raise TierFullError("it is full")
        written = await super().write(puts)
        with self._lock:
            for name in list(self.values)[: -self.values_max or 0]:
                self._drop(name)
        return written

    async def delete(self, keys: Sequence[Key]) -> int:
        """Remove values as `DictTier` does, and record their names in `dropped`."""
        self.dropped.extend(key.text for key in keys)
        return await super().delete(keys)

    def _drop(self, name: str) -> None:
        self.dropped.append(name)
        self.values.pop(name, None)

    async def health(self) -> None:
        """Raise `TierError` if the tier is down."""
        if self.trouble == "down":
            raise TierError("it is down")

    async def _turn(self) -> None:
        event = asyncio.Event()
        with self._lock:
            held = self.is_held
            if held:
                self._waiting.append((asyncio.get_running_loop(), event))
        if held:
            try:
                await event.wait()
            finally:
                with self._lock:
                    self._waiting = [one for one in self._waiting if one[1] is not event]
        if self.trouble == "down":
            raise TierError("it is down")
