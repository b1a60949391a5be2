"""A thread with an event loop on which tiers are kept open, and on which work for them begins."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import anyio
import anyio.abc

from kvpipe.loop import LoopThread
from kvpipe.tiers.shelf import Shelf

_Item = TypeVar("_Item")
_Work = tuple[Callable[[Any], Coroutine[Any, Any, None]], Any, Callable[[Any], object]]


class Keeper:
    """Runs each piece of work as a task of its own. Work that cannot begin any more is refused, never forgotten."""

    def __init__(self, name: str, shelves: Sequence[Shelf], cpus: frozenset[int] = frozenset()) -> None:
        """Start the thread, on `cpus` if any are given, and open the tiers."""
        self.shelves = tuple(shelves)
        self._group: anyio.abc.TaskGroup | None = None
        self._early: list[_Work] = []
        self._over = False
        self.loop = LoopThread(name, self._take, tasks=(self._serve,), cpus=cpus)

    @property
    def alive(self) -> bool:
        """Whether work can begin."""
        return self.loop.alive and not self._over

    def begin(
        self, work: Callable[[_Item], Coroutine[Any, Any, None]], item: _Item, refuse: Callable[[_Item], object]
    ) -> None:
        """Begin `work(item)`; `refuse(item)` if that is not possible. Any thread; never blocks."""
        if not self.loop.put((work, item, refuse)):
            refuse(item)

    def hurry(self) -> None:
        """Probe the tiers that are left alone, now."""
        for shelf in self.shelves:
            self.loop.put(shelf.hurry)

    def stop(self, seconds_max: float) -> None:
        """End what is under way, close the tiers. Idempotent."""
        self.loop.stop(seconds_max)

    async def _serve(self) -> None:
        try:
            async with anyio.create_task_group() as group:
                for shelf in self.shelves:
                    group.start_soon(shelf.keep)
                self._group = group
                early, self._early = self._early, []
                for work in early:
                    self._take(work)
                await anyio.sleep_forever()
        finally:
            self._over = True

    def _take(self, work: _Work) -> None:
        do, item, refuse = work
        if self._group is None and not self._over:
            self._early.append(work)
            return
        try:
            if self._group is not None and not self._over:
                self._group.start_soon(do, item)
                return
        except RuntimeError:  # the group is ending
            pass
        refuse(item)
