"""Wakes tasks that wait for what another thread does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator


class Bell:
    """Rung by any thread, awaited by tasks of one event loop. While nobody waits a ring costs next to nothing."""

    def __init__(self) -> None:
        """Nobody waits."""
        self._waiting = set[asyncio.Event]()
        self._loop: asyncio.AbstractEventLoop | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[asyncio.Event]:
        """Yield an event that each ring sets from now on. Clear it before looking at what others may have changed."""
        event, self._loop = asyncio.Event(), asyncio.get_running_loop()
        self._waiting.add(event)
        try:
            yield event
        finally:
            self._waiting.discard(event)

    def ring(self) -> None:
        """Set the events of all who listen. On any thread; never waits."""
        if self._waiting and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._set)

    def _set(self) -> None:
        for event in self._waiting:
            event.set()
