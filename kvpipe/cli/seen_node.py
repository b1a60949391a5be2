"""The state of the node's memory for `kvpipe top`. A holder that does not answer delays no other query."""

from __future__ import annotations

import time
from pathlib import Path

import anyio
import anyio.abc
import anyio.to_thread

from kvpipe.errors import UsageError
from kvpipe.node.health import HolderHealth, health_of


class SeenNode:
    """The latest state of the memory of one folder. `error` is the reason why the state is not known, or "".

    `settled` is an event that is set while no query is in progress.
    """

    def __init__(self, folder: Path, *, always: bool) -> None:
        """Make the entry of a memory that was not queried yet.

        With `always`, the memory is shown even without a holder.
        """
        self.folder, self._always = folder, always
        self.health: HolderHealth | None = None
        self.error = ""
        self.settled = anyio.Event()
        self.settled.set()
        self._asked_at_s = 0.0

    def query(self, group: anyio.abc.TaskGroup) -> None:
        """Query the holder in a task of `group`, unless a query is in progress."""
        if self.settled.is_set():
            self.settled = anyio.Event()
            group.start_soon(self.look)

    async def look(self) -> None:
        """Query the holder. Never raises."""
        self._asked_at_s = time.monotonic()
        # a limiter of its own, because hanging queries would take all threads of a shared limiter
        own = anyio.CapacityLimiter(1)
        try:
            self.health = await anyio.to_thread.run_sync(health_of, self.folder, abandon_on_cancel=True, limiter=own)
            self.error = ""
        except UsageError as error:
            self.health, self.error = None, str(error).removeprefix("kvpipe: ")
        finally:
            self._asked_at_s = 0.0
            self.settled.set()

    @property
    def late_s(self) -> float:
        """The time in seconds since the state was requested, or 0 if no request is in progress."""
        return time.monotonic() - self._asked_at_s if self._asked_at_s else 0.0

    @property
    def is_shown(self) -> bool:
        """Whether the screen shows the memory."""
        return self._always or bool(self.error) or (self.health is not None and bool(self.health.pid))
