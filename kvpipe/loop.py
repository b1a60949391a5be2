"""The event-loop thread: one anyio loop that owns cursors, fed through an inbox.

Any thread appends to the inbox (a deque, 0.03 us) and wakes the loop only if it is asleep (2 us). The handler runs on
the loop thread, one item at a time, in order, so state that only the handler touches needs no lock.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
from anyio.abc import TaskGroup

from kvpipe.cores import bind_this_thread
from kvpipe.trace.log import log

Handler = Callable[[Any], None]
Task = Callable[[], Coroutine[Any, Any, None]]


def _refuse(item: object) -> None:
    raise TypeError(f"a loop without a handler was given {item!r}")


class LoopThread:
    """Runs `handle(item)` for every item put into the inbox, and background `tasks`, until `stop`.

    A callable item is called instead of handled; without `handle`, all items must be callable.
    """

    def __init__(
        self,
        name: str,
        handle: Handler | None = None,
        tasks: tuple[Task, ...] = (),
        cpus: frozenset[int] = frozenset(),
    ) -> None:
        """Start the thread, bound to `cpus` if any are given, and return once it accepts items."""
        self._handle, self._tasks, self._cpus = handle or _refuse, tasks, cpus
        self._inbox: deque[Any] = deque()
        self._awake = False
        self._stopping = False
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._bell = anyio.Event()
        self._group: TaskGroup  # once it runs
        self.errors = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._ready.wait()

    @property
    def alive(self) -> bool:
        """False once the loop has stopped, for whatever reason."""
        return not self._stopping and self._runs

    def put(self, item: object, *, wake: bool = True) -> bool:
        """Hand `item` to the loop. Returns False, and drops it, after `stop`.

        Without `wake` a sleeping loop handles it only when something else wakes it; it costs the caller nothing.
        """
        if self._stopping:
            return False
        self._inbox.append(item)
        if wake:
            self.wake()
        return True

    def wake(self) -> None:
        """Have the loop handle what is in its inbox. On any thread."""
        if not self._awake:
            self._ring()

    def begin(self, task: Task) -> bool:
        """Run a background task from now on, like those given at the start. Returns as `put`."""
        return self.put(lambda: self._group.start_soon(self._guarded, task))

    def settle(self, timeout_s: float) -> bool:
        """Wait until everything put so far was handled. Returns False on a timeout, or if the loop has ended."""
        if not self._runs:
            return False
        if not self._inbox and not self._awake:  # in this order: an item leaves the inbox of a loop that is awake
            return True
        done = threading.Lock()
        done.acquire()
        if not (self._thread.is_alive() and self.put(done.release)):  # a fork of the process has no such thread
            return False
        return done.acquire(timeout=timeout_s)

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Handle what is in the inbox, cancel the tasks, end the thread. Returns whether it has ended. Idempotent."""
        if not self._stopping:
            self._stopping = True
            self._ring()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def _runs(self) -> bool:
        """Whether its event loop runs, which takes a seventh of the time to ask of its thread's. True in forks, too."""
        loop = self._loop
        return loop is not None and loop.is_running()

    def _ring(self) -> None:
        self._awake = True
        loop = self._loop
        if loop is not None and not loop.is_closed():
            try:
                loop.call_soon_threadsafe(self._bell.set)
            except RuntimeError:  # closed between the check and the call
                log.debug("loop_closed")

    def _run(self) -> None:
        try:
            if self._cpus:
                bind_this_thread(self._cpus)
            anyio.run(self._main, backend="asyncio")
        finally:
            self._ready.set()  # whoever made the thread must not wait for a loop that could not start

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with anyio.create_task_group() as group:
            self._group = group
            for task in self._tasks:
                group.start_soon(self._guarded, task)
            self._ready.set()
            while True:
                self.drain()
                if self._stopping and not self._inbox:
                    break
                await self._bell.wait()
                self._bell = anyio.Event()
            group.cancel_scope.cancel()

    async def _guarded(self, task: Task) -> None:
        """Run `task`. If it raises, only this task ends; the loop and the other tasks go on."""
        try:
            await task()
        except Exception:
            self.errors += 1
            log.exception("task_failed", task=repr(task)[:200])

    def drain(self) -> None:
        """Handle what is in the inbox. To be called by the loop's own tasks only."""
        while True:
            self._awake = True
            while self._inbox:
                item = self._inbox.popleft()
                try:
                    if callable(item):
                        item()
                    else:
                        self._handle(item)
                except Exception:
                    self.errors += 1
                    log.exception("handler_failed", item=repr(item)[:200])
            self._awake = False
            if not self._inbox:
                return
