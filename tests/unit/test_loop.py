"""Tests of the loop thread: it handles items in order, loses none, survives exceptions, and always ends."""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import threading
import time

import anyio
import pytest

from kvpipe.testing.logged import capture_logs
from kvpipe.testing.waiting import WAIT_S
from kvpipe.threads.loop import LoopThread
from kvpipe.trace.log import log


def test_items_are_handled_in_order_on_one_thread() -> None:
    """Items are handled on the loop's thread in the order in which they were put.

    An item that is callable is called.
    """
    seen: list[object] = []
    loop = LoopThread("t", lambda item: seen.append((item, threading.current_thread().name)))
    for i in range(500):
        assert loop.put(i)
    assert loop.put(lambda: seen.append("called"))
    assert loop.settle(WAIT_S)
    assert seen == [*((i, "t") for i in range(500)), "called"]
    assert loop.stop(WAIT_S)


def test_settle_waits_for_earlier_items() -> None:
    """`settle` returns only when all items that were put before it are handled, even if the loop was asleep."""
    seen: list[int] = []
    loop = LoopThread("t", seen.append)
    for i in range(300):
        loop.put(i)
        assert loop.settle(WAIT_S)
        assert seen[-1] == i
    loop.stop(WAIT_S)


def test_settle_is_bounded() -> None:
    """`settle` returns False if a handler does not return in time, or if the loop was stopped."""
    gate = threading.Event()
    loop = LoopThread("t")
    loop.put(lambda: gate.wait(WAIT_S) and None)
    assert not loop.settle(0.0)
    gate.set()
    assert loop.settle(WAIT_S)
    assert loop.stop(WAIT_S)
    assert not loop.settle(WAIT_S)


def test_stop_handles_the_inbox_first() -> None:
    """Items that were put before `stop` are handled before the thread ends.

    Later items are refused, and not handled.
    """
    gate, entered = threading.Event(), threading.Event()
    seen: list[object] = []

    def hold() -> None:
        entered.set()
        gate.wait(WAIT_S)

    loop = LoopThread("t", seen.append)
    loop.put(hold)
    assert entered.wait(WAIT_S)
    for i in range(100):
        loop.put(i)
    assert not loop.stop(0.0)
    assert not loop.alive
    assert not loop.put("late")
    gate.set()
    assert loop.stop(WAIT_S)
    assert loop.stop(WAIT_S)
    assert seen == list(range(100))


def test_exception_of_a_handler_is_counted() -> None:
    """If a handler or an item raises, the exception is counted and the next item is handled."""
    seen: list[int] = []

    def handle(item: int) -> None:
        if item % 2:
            msg = "odd"
            raise ValueError(msg)
        seen.append(item)

    loop = LoopThread("t", handle)
    for i in range(10):
        loop.put(i)
    loop.put(lambda: 1 / 0)
    assert loop.settle(WAIT_S)
    assert (seen, loop.errors, loop.alive) == ([0, 2, 4, 6, 8], 6, True)
    loop.stop(WAIT_S)


def test_tasks_run_and_are_cancelled_by_stop() -> None:
    """A background task runs beside the inbox. When the loop stops, the task is cancelled, and its cleanup runs."""
    events: list[str] = []
    started = threading.Event()

    async def task() -> None:
        started.set()
        try:
            await anyio.sleep_forever()
        finally:
            events.append("cancelled")

    loop = LoopThread("t", tasks=(task,))
    assert started.wait(WAIT_S)
    assert loop.settle(WAIT_S)
    assert events == []
    assert loop.stop(WAIT_S)
    assert events == ["cancelled"]


def test_without_a_handler_only_callables_are_handled() -> None:
    """Without a handler, any item that is not callable is an error, and the loop continues."""
    seen: list[int] = []
    loop = LoopThread("t")
    loop.put(1)
    loop.put(lambda: seen.append(2))
    assert loop.settle(WAIT_S)
    assert (seen, loop.errors) == ([2], 1)
    assert loop.stop(WAIT_S)


def test_a_closed_stderr_does_not_end_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stderr is closed, so the failure of an item cannot be logged. The next items are still handled."""
    closed, seen = io.StringIO(), list[int]()
    monkeypatch.setattr(sys, "stderr", closed)
    with capture_logs():
        log.addHandler(logging.StreamHandler())
        closed.close()
        loop = LoopThread("t", seen.append)
        loop.put(lambda: 1 / 0)
        loop.put(1)
        assert loop.settle(WAIT_S)
        assert (seen, loop.errors) == ([1], 1)
        assert loop.stop(WAIT_S)


def test_a_failing_task_ends_alone() -> None:
    """A task that raises is counted. The loop and the other tasks continue."""
    other = threading.Event()
    go_on = threading.Event()

    async def bad() -> None:
        msg = "no"
        raise OSError(msg)

    async def good() -> None:
        await anyio.to_thread.run_sync(go_on.wait, WAIT_S)
        other.set()

    loop = LoopThread("t", tasks=(bad, good))
    assert loop.settle(WAIT_S)
    go_on.set()
    assert other.wait(WAIT_S)
    assert (loop.alive, loop.errors) == (True, 1)
    assert loop.stop(WAIT_S)


def test_many_threads_putting_lose_nothing() -> None:
    """Eight threads put items in parallel. Each item is handled once. The items of one thread keep their order."""
    seen: list[tuple[int, int]] = []
    loop = LoopThread("t", seen.append)
    line = threading.Barrier(8)

    def put(who: int) -> None:
        line.wait(WAIT_S)
        for i in range(1000):
            loop.put((who, i))

    threads = [threading.Thread(target=put, args=(who,)) for who in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert loop.settle(WAIT_S)
    assert len(seen) == 8000
    for who in range(8):
        assert [i for w, i in seen if w == who] == list(range(1000))
    loop.stop(WAIT_S)


def test_loop_can_stop_itself() -> None:
    """A handler may stop its own loop. In this case `stop` does not wait for the loop."""
    loop = LoopThread("t")
    answers: list[bool] = []
    loop.put(lambda: answers.append(loop.stop(WAIT_S)))
    loop._thread.join(WAIT_S)
    assert answers == [False]
    assert not loop._thread.is_alive()


def test_a_loop_that_cannot_start_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the event loop cannot start, the constructor returns and the loop is not alive."""

    def refuse(*_: object, **__: object) -> None:
        pass

    monkeypatch.setattr("kvpipe.threads.loop.anyio.run", refuse)
    loop = LoopThread("t")
    loop._thread.join(WAIT_S)
    assert not loop.alive
    assert not loop.settle(WAIT_S)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_lost_loop_is_noticed() -> None:
    """If the loop's thread has died, the loop is not alive, and `settle` returns False at once."""

    def die() -> None:
        raise SystemExit

    loop = LoopThread("t")
    loop.put(die)
    loop._thread.join(WAIT_S)
    assert not loop.alive
    assert not loop.settle(threading.TIMEOUT_MAX)


def test_a_fork_does_not_wait_for_a_thread_that_it_lacks() -> None:
    """A forked child does not wait for its parent's inbox: `settle` returns at once, even with the longest timeout."""
    loop = LoopThread("t")
    loop.put(int, wake=False)
    if not (child := os.fork()):
        signal.alarm(int(WAIT_S))  # if the child waits, this alarm ends it
        os._exit(int(loop.settle(threading.TIMEOUT_MAX)))
    assert os.waitpid(child, 0)[1] == 0
    assert loop.settle(WAIT_S)
    loop.stop(WAIT_S)


def test_an_item_may_wait_for_something_that_wakes_the_loop() -> None:
    """Items that are put without waking the loop are handled with the next item that wakes the loop.

    `settle` and `stop` also handle such items.
    """
    seen: list[object] = []
    loop = LoopThread("quiet", seen.append)
    assert loop.settle(WAIT_S)
    assert loop.put("first", wake=False)
    time.sleep(0.05)
    assert seen == []
    assert loop.put("second")
    assert loop.settle(WAIT_S)
    assert seen == ["first", "second"]
    loop.put("third", wake=False)
    assert loop.settle(WAIT_S)
    assert seen[2:] == ["third"]
    loop.put("fourth", wake=False)
    assert loop.stop()
    assert seen[3:] == ["fourth"]


def test_a_task_of_the_loop_may_look_into_the_inbox() -> None:
    """On the loop's own thread, `drain` handles items that were put without waking the loop."""
    seen: list[object] = []
    asked = anyio.Event()

    async def look() -> None:
        await asked.wait()
        loop.drain()

    loop = LoopThread("looked-into", seen.append, tasks=(look,))
    loop.put("quiet", wake=False)
    assert loop._loop is not None
    loop._loop.call_soon_threadsafe(asked.set)
    deadline = time.monotonic() + WAIT_S
    while not seen and time.monotonic() < deadline:
        time.sleep(0.001)
    assert seen == ["quiet"]
    assert loop.stop()


def test_another_thread_handles_the_inbox_when_it_drains() -> None:
    """On another thread, `drain` handles items that were put without waking the loop.

    After the loop has ended, `drain` handles no items.
    """
    seen: list[tuple[object, str]] = []
    loop = LoopThread("t", lambda item: seen.append((item, threading.current_thread().name)))
    assert loop.settle(WAIT_S)
    for item in range(3):
        loop.put(item, wake=False)
    loop.drain()
    mine = threading.current_thread().name
    assert seen == [(item, mine) for item in range(3)]
    assert loop.stop()
    loop._inbox.append("late")
    loop.drain()
    assert len(seen) == 3


def test_one_thread_at_a_time_handles_items() -> None:
    """Several threads put and drain at once: no item is lost, and no two handlers run at the same time."""
    seen: list[int] = []
    inside = threading.Lock()

    def handle(item: int) -> None:
        assert inside.acquire(blocking=False), "two threads handle items"
        time.sleep(0)
        seen.append(item)
        inside.release()

    loop = LoopThread("t", handle)

    def work(first: int) -> None:
        for item in range(first, first + 200):
            loop.put(item, wake=item % 7 == 0)
            if item % 3 == 0:
                loop.drain()

    threads = [threading.Thread(target=work, args=(1000 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert loop.settle(WAIT_S)
    assert (loop.errors, len(seen)) == (0, 800)
    assert [item for item in seen if item < 1000] == list(range(200))
    assert loop.stop()
