"""A tier for trials: a dictionary that all ranks share, which waits, fails and lies on demand."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Literal

from kvpipe.testing.dict_tier import DictTier
from kvpipe.tiers.base import Get, Key, Put, Read, Tier, TierError, TierFullError, Written
from kvpipe.tiers.spec import TierSpec

TROUBLES = ("none", "down", "full", "forgets", "damages", "cuts")
"""Faults of the tier: it fails; it is full; values vanish after a lookup; bytes flip; values are short."""


class DictSpec(TierSpec):
    """The configuration of a tier that a test brings itself."""

    kind: Literal["dict"] = "dict"

    def make(self, name: str, *, writes: bool = True) -> Tier:  # noqa: ARG002
        """Return a new one."""
        return HeldTier(name)


class HeldTier(DictTier):
    """Used by several event loops at once, controlled from the trial's thread."""

    def __init__(self, name: str = "dict") -> None:
        """Hold nothing back."""
        super().__init__(name)
        self.trouble = "none"
        self.is_held, self._lock = False, threading.Lock()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    @property
    def waiting(self) -> int:
        """How many calls are held back."""
        return len(self._waiting)

    def hold(self) -> None:
        """Let no call end from now on."""
        self.is_held = True

    def let_go(self) -> None:
        """Let calls end."""
        with self._lock:
            self.is_held = False
            waiting, self._waiting = self._waiting, []
        for loop, event in waiting:
            loop.call_soon_threadsafe(event.set)

    async def exists(self, keys: Sequence[Key]) -> list[bool]:
        """See `Tier.exists`."""
        await self._turn()
        return await super().exists(keys)

    async def read(self, gets: Sequence[Get]) -> list[Read]:
        """See `Tier.read`."""
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
        """See `Tier.write`."""
        await self._turn()
        if self.trouble == "full":
            raise TierFullError("it is full")
        return await super().write(puts)

    async def health(self) -> None:
        """See `Tier.health`."""
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
