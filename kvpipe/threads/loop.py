"""The event-loop thread runs one anyio loop, which owns cursors and gets items through an inbox.

Any thread appends to the inbox (a deque, 0.03 us) and wakes the loop only if the loop sleeps (2 us). The handler runs
on the loop thread, one item at a time, in order. Another thread may call `drain` and handle the items itself, instead
of waking the loop. The thread that handles items holds the lock `turn`. Therefore no other lock is needed for data that
only the handler touches.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final

import anyio

from kvpipe.machine.cores import bind_this_thread
from kvpipe.trace.log import log

DRAINED_S: Final = 0.001
Handler = Callable[[Any], None]
Task = Callable[[], Coroutine[Any, Any, None]]


def _refuse(item: object) -> None:
    raise TypeError(f"a loop without a handler was given {item!r}")


class LoopThread:
    """A thread that calls `handle(item)` for every item of its inbox, and runs background `tasks`, until `stop`.

    A callable item is called instead of handled. Without `handle`, all items must be callable.
    """

    def __init__(
        self,
        name: str,
        handle: Handler | None = None,
        tasks: tuple[Task, ...] = (),
        cpus: frozenset[int] = frozenset(),
    ) -> None:
        """Start the thread, bound to `cpus` if any are given. Return when the thread accepts items."""
        self._handle, self._tasks, self._cpus = handle or _refuse, deque(tasks), cpus
        self._inbox: deque[Any] = deque()
        self.turn = threading.Lock()
        """The lock that the thread holds while it handles items.

        A task of the loop takes this lock to touch the handler's data.
        """
        self._awake = False
        self._stopping = False
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._bell = anyio.Event()
        self.errors = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._ready.wait()

    @property
    def alive(self) -> bool:
        """Whether the loop runs and `stop` was not called."""
        return not self._stopping and self._runs

    @property
    def has_ended(self) -> bool:
        """Whether the thread has ended. A forked process does not have the thread."""
        return not self._thread.is_alive()

    def put(self, item: object, *, wake: bool = True) -> bool:
        """Put `item` into the loop's inbox. After `stop`, drop `item` and return False.

        Without `wake`, a sleeping loop handles `item` only when another call wakes the loop. The caller saves the time
        of waking the loop.
        """
        if self._stopping:
            return False
        self._inbox.append(item)
        if wake:
            self.wake()
        return True

    def start(self, task: Task) -> None:
        """Run `task` beside the inbox, until `stop`. Any thread may call this method."""
        self._tasks.append(task)
        self._ring()

    def wake(self) -> None:
        """Wake the loop, so that it handles the items of its inbox. Any thread may call this method."""
        if not self._awake:
            self._ring()

    def settle(self, timeout_s: float) -> bool:
        """Wait until all items that were put so far are handled. Return False on a timeout or if the loop has ended."""
        if not self._runs:
            return False
        # the inbox first, because an item leaves the inbox before it is handled
        if not self._inbox and not self.turn.locked():
            return True
        done = threading.Lock()
        done.acquire()
        if not (self._thread.is_alive() and self.put(done.release)):  # a forked process lacks this thread
            return False
        return done.acquire(timeout=timeout_s)

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Handle the items of the inbox, cancel the tasks, and end the thread. Idempotent.

        Returns whether the thread has ended within `timeout_s` seconds.
        """
        if not self._stopping:
            self._stopping = True
            self._ring()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def _runs(self) -> bool:
        """Whether the event loop runs. In a forked process the value is True, although the thread does not exist there.

        Asking the event loop takes a seventh of the time of asking whether the thread is alive.
        """
        loop = self._loop
        return loop is not None and loop.is_running()

    def _ring(self) -> None:
        self._awake = True
        loop = self._loop
        if loop is not None and not loop.is_closed():
            try:
                loop.call_soon_threadsafe(self._bell.set)
            except RuntimeError:  # the loop was closed between the check and the call
                log.debug("loop_closed")

    def _run(self) -> None:
        try:
            if self._cpus:
                bind_this_thread(self._cpus)
            anyio.run(self._main, backend="asyncio")
        finally:
            self._ready.set()  # even if the loop could not start, so that `__init__` does not wait for ever

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with anyio.create_task_group() as group:
            self._ready.set()
            while True:
                self._awake = True
                while self._tasks:
                    group.start_soon(self._guarded, self._tasks.popleft())
                self.drain()
                self._awake = False
                if self._stopping and not self._inbox and not self.turn.locked():
                    break
                if self._inbox and not self.turn.locked():
                    continue
                if self._stopping:  # another thread handles the last items
                    await anyio.sleep(DRAINED_S)
                    continue
                await self._bell.wait()
                self._bell = anyio.Event()
            group.cancel_scope.cancel()

    async def _guarded(self, task: Task) -> None:
        """Run `task`. If it raises, only this task ends. The loop and the other tasks continue."""
        try:
            await task()
        except Exception:
            self.errors += 1
            log.exception("task_failed", task=repr(task)[:200])

    def drain(self) -> None:
        """Handle the items of the inbox on this thread, unless another thread handles them now.

        The other thread then also handles the items that were put before this call. A handler may call this method.
        """
        while self._inbox and self._runs and self.turn.acquire(blocking=False):
            try:
                while self._inbox:
                    self._call(self._inbox.popleft())
            finally:
                self.turn.release()

    def _call(self, item: Any) -> None:  # noqa: ANN401  (any item)
        try:
            if callable(item):
                item()
            else:
                self._handle(item)
        except Exception:
            self.errors += 1
            log.exception("handler_failed", item=repr(item)[:200])
