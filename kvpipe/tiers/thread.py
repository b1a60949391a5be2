"""A thread whose event loop opens tiers and uses them: the base class of `Carrier` and `Finder`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import anyio
import anyio.abc

from kvpipe.loop import LoopThread
from kvpipe.tiers.guard import GuardedTier

_Item = TypeVar("_Item")


class TierThread(Generic[_Item]):
    """Runs a task for each item. An item whose task cannot begin any more is refused, never forgotten."""

    def __init__(self, name: str, tiers: Sequence[GuardedTier], cpus: frozenset[int] = frozenset()) -> None:
        """Start the thread, bound to `cpus` if any are given, and open the tiers.

        A subclass sets everything that `_work` needs before it calls this.
        """
        self.tiers = tuple(tiers)
        self._begun = self._ended = 0
        self._group: anyio.abc.TaskGroup | None = None
        self._early: list[_Item] = []
        self._over = False
        self.loop = LoopThread(name, self._take, tasks=(self._serve,), cpus=cpus)

    @property
    def alive(self) -> bool:
        """Whether new items are accepted."""
        return self.loop.alive and not self._over

    @property
    def open(self) -> int:
        """The number of items that were begun and have not ended."""
        return self._begun - self._ended

    def probe_now(self) -> None:
        """Probe the tiers with open breakers at once. On any thread."""
        for tier in self.tiers:
            self.loop.put(tier.probe_now)

    def stop(self, seconds_max: float) -> None:
        """End the tasks under way and close the tiers, within `seconds_max`. Idempotent."""
        self.loop.stop(seconds_max)

    def _begin(self, item: _Item) -> None:
        """Begin the task of `item`, or refuse it. On one thread only; never blocks."""
        self._begun += 1
        if not self.loop.put(item):
            self._refuse(item)

    @abstractmethod
    async def _work(self, item: _Item) -> None:
        """Do the work for `item`, and count it as ended."""

    @abstractmethod
    def _refuse(self, item: _Item) -> None:
        """End `item`, whose work has not begun, and count it as ended."""

    async def _serve(self) -> None:
        try:
            async with anyio.create_task_group() as group:
                for tier in self.tiers:
                    group.start_soon(tier.run)
                self._group = group
                early, self._early = self._early, []
                for item in early:
                    self._take(item)
                await anyio.sleep_forever()
        finally:
            self._over = True

    def _take(self, item: _Item) -> None:
        if self._group is None and not self._over:
            self._early.append(item)
            return
        try:
            if self._group is not None and not self._over:
                self._group.start_soon(self._work, item)
                return
        except RuntimeError:  # the group is ending
            pass
        self._refuse(item)
