"""A thread whose event loop opens and uses tiers. This is the base class of `Carrier` and `Finder`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import anyio
import anyio.abc

from kvpipe.threads.loop import LoopThread
from kvpipe.tiers.guard import GuardedTier

_ItemT = TypeVar("_ItemT")


class TierThread(Generic[_ItemT]):
    """Runs a task for each item of work.

    If an item's task cannot begin any more, the item is passed to `_refuse`, so that no item is lost.
    """

    def __init__(self, name: str, tiers: Sequence[GuardedTier], cpus: frozenset[int] = frozenset()) -> None:
        """Start the thread, bound to `cpus` if any are given, and open the tiers.

        Before a subclass calls this method, it must set every attribute that `_work` needs.
        """
        self.tiers = tuple(tiers)
        self._begun = self._ended = 0
        self._group: anyio.abc.TaskGroup | None = None
        self._early: list[_ItemT] = []
        self._over = False
        self.loop = LoopThread(name, self._take, tasks=(self._serve,), cpus=cpus)

    @property
    def alive(self) -> bool:
        """Whether new items are accepted."""
        return self.loop.alive and not self._over

    @property
    def open(self) -> int:
        """The number of items whose tasks have begun and have not ended."""
        return self._begun - self._ended

    def probe_now(self) -> None:
        """Probe the tiers with open breakers at once. Any thread may call this method."""
        for tier in self.tiers:
            self.loop.put(tier.probe_now)

    def stop(self, seconds_max: float) -> None:
        """End the tasks in progress and close the tiers, within `seconds_max` seconds. Later calls have no effect."""
        self.loop.stop(seconds_max)

    def _begin(self, item: _ItemT) -> None:
        """Begin the task of `item`, or refuse `item`. Never blocks. Must be called on one thread only."""
        self._begun += 1
        if not self.loop.put(item):
            self._refuse(item)

    @abstractmethod
    async def _work(self, item: _ItemT) -> None:
        """Do the work for `item`, and count `item` as ended."""

    @abstractmethod
    def _refuse(self, item: _ItemT) -> None:
        """Report the end of `item`, whose work has not begun, and count `item` as ended."""

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

    def _take(self, item: _ItemT) -> None:
        if self._group is None and not self._over:
            self._early.append(item)
            return
        try:
            if self._group is not None and not self._over:
                self._group.start_soon(self._work, item)
                return
        except RuntimeError:  # the task group is ending, and starts no tasks any more
            pass
        self._refuse(item)
