"""A bell, with which any thread wakes the tasks of an event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator


class Bell:
    """Any thread may ring the bell, and tasks of one loop wait for a ring.

    While no task waits, `ring` only tests a set.
    """

    def __init__(self) -> None:
        """Make a bell for which no task waits."""
        self._waiting = set[asyncio.Event]()
        self._loop: asyncio.AbstractEventLoop | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[asyncio.Event]:
        """Yield an event. From now on, each ring sets this event.

        Clear the event before you read data that other threads change.
        """
        event, self._loop = asyncio.Event(), asyncio.get_running_loop()
        self._waiting.add(event)
        try:
            yield event
        finally:
            self._waiting.discard(event)

    def ring(self) -> None:
        """Set the events of all tasks that listen. Any thread may call this method. The call never waits."""
        if self._waiting and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, so no task waits any more
                self._loop.call_soon_threadsafe(self._set)

    def _set(self) -> None:
        for event in self._waiting:
            event.set()
