"""The threads of an engine and of an operator are switched at any bytecode.

Only one thread at a time uses the catalog, and no order is lost.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvpipe.features import orders as orders_module
from kvpipe.features.orders import SLICE_PARTS_MAX, Orders, Work
from kvpipe.trace.log import Counters
from property_tests.profiles import examples

PARTS = 3
_FILES = {orders_module.__file__, __file__}


class Lockstep:
    """Threads that run one at a time. One bytecode of a file in `_FILES` is one move."""

    def __init__(self, *programs: Callable[[], None]) -> None:
        """Start without running threads."""
        self._go = [threading.Semaphore(0) for _ in programs]
        self._back = threading.Semaphore(0)
        self._ids: dict[int, int] = {}
        self.alive = [True] * len(programs)
        self.waits: list[Callable[[], bool] | None] = [None] * len(programs)
        self.errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(i, one)) for i, one in enumerate(programs)]
        for thread in self._threads:
            thread.start()

    @property
    def me(self) -> int:
        """Return the index of the program that the calling thread runs."""
        return self._ids[threading.get_ident()]

    def _run(self, index: int, program: Callable[[], None]) -> None:
        self._ids[threading.get_ident()] = index
        self._go[index].acquire()
        sys.settrace(self._traced)
        try:
            program()
        except BaseException as error:  # noqa: BLE001
            self.errors.append(error)
        finally:
            sys.settrace(None)
            self.alive[index] = False
            self._back.release()

    def _traced(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in _FILES or frame.f_code.co_name in {"_traced", "point", "acquire", "release"}:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.point()
        return self._traced

    def point(self) -> None:
        """Return control to `run`, and wait until `run` gives this thread another move."""
        index = self.me
        self._back.release()
        self._go[index].acquire()

    def move(self, index: int) -> bool:
        """Run one bytecode of a program. Return False if the program has ended or waits for the other program."""
        waits = self.waits[index]
        if not self.alive[index] or (waits is not None and waits()):
            return False
        self._go[index].release()
        self._back.acquire()
        return True

    def run(self, runs: list[int]) -> None:
        """Run all programs to their end, in turns of `runs` moves, repeatedly. AssertionError: all programs wait."""
        for turn, count in enumerate(itertools.cycle(runs)):
            moved = [self.move(turn % 2) for _ in range(count)]
            if not any(self.alive):
                break
            if not any(moved):
                other = self.move(1 - turn % 2)
                assert other or self.move(turn % 2) or not any(self.alive)
        for thread in self._threads:
            thread.join()


class SteppedLock:
    """A lock of programs in lockstep."""

    def __init__(self) -> None:
        """The engine has the lock. `passed_over` counts how often an operator got the lock while the engine waited."""
        self.taken, self.steps = True, Lockstep()
        self.borrowed = self.passed_over = 0

    def acquire(self, blocking: bool = True) -> bool:  # noqa: FBT001, FBT002
        """Acquire the lock, with the parameters and result of `threading.Lock.acquire`."""
        if self.taken and blocking:
            me, before = self.steps.me, self.borrowed
            self.steps.waits[me] = lambda: self.taken
            self.steps.point()
            self.steps.waits[me] = None
            self.passed_over += self.borrowed - before
        if self.taken:
            return False
        self.taken = True
        self.borrowed += not blocking
        return True

    def release(self) -> None:
        """Release the lock, as `threading.Lock.release` does."""
        assert self.taken
        self.taken = False


class Tried:
    """An engine's thread, which makes calls and is idle between them, and an operator's thread, which gives orders."""

    def __init__(self, calls: list[str], ordered: int) -> None:
        """`calls` are the engine's calls.

        `step` carries out orders, and `idle` reports that there is nothing to do. A `reset` after `idle` uses the
        catalog, and the engine is idle again after the `reset`.
        """
        self.orders = Orders(Counters())
        self.orders.slice_s_max = float("inf")
        turns: Any = self.orders.turns
        turns._lock = self.lock = SteppedLock()
        self.calls, self.ordered = calls, ordered
        self.inside: list[int] = []
        self.overlaps = 0
        self.done: list[list[int]] = [[] for _ in range(ordered)]
        self.given: list[Any] = []
        self.steps = self.lock.steps = Lockstep(self._engine, self._operator)

    def _touch(self, what: Callable[[], object]) -> None:
        """Use the catalog for several bytecodes."""
        self.overlaps += bool(self.inside)
        self.inside.append(self.steps.me)
        what()
        self.inside.pop()

    def _engine(self) -> None:
        turns = self.orders.turns
        for call in [*self.calls, "end"]:
            if call == "reset":
                with turns.taken():
                    self._touch(int)
                continue
            if turns.away:
                turns.take()
            if call == "idle":
                turns.give()
            elif call == "end":
                self.orders.end()
            elif call == "step" and self.orders.due:
                self._touch(self.orders.carry_out)
            else:
                self._touch(int)

    def _operator(self) -> None:
        for index in range(self.ordered):
            order = self.orders.queue_change(lambda index=index: self._work(index))  # type: ignore[misc]
            self.given.append(order)
            for _ in range(3):
                if self.orders.turns.borrow():
                    self._touch(self.orders.carry_out)
                    self.orders.turns.give_back()

    def _work(self, index: int) -> Work:
        for part in range(PARTS):
            self.done[index].append(part)
            yield
        return index


@given(
    calls=st.lists(st.sampled_from(["step", "idle", "call", "reset"]), max_size=6),
    ordered=st.integers(1, 3),
    runs=st.lists(st.integers(1, 120), min_size=2, max_size=20),
)
@examples(200)
def test_one_thread_has_the_turn_and_each_order_is_carried_out_once(
    calls: list[str], ordered: int, runs: list[int]
) -> None:
    """This holds wherever the threads are switched."""
    tried = Tried(calls, ordered)
    tried.steps.run(runs)
    assert tried.steps.errors == []
    assert tried.overlaps == 0
    assert tried.lock.passed_over == 0, "a busy engine waits for more than the slice that had begun"
    assert len(tried.given) == ordered
    for index, order in enumerate(tried.given):
        assert order.over
        if order.refused:
            assert order.refused == "the engine is shutting down"
            assert tried.done[index] == list(range(len(tried.done[index])))
        else:
            assert (order.result, tried.done[index]) == (index, list(range(PARTS)))
    assert not tried.orders.due


def test_a_slice_is_bounded() -> None:
    """A slice ends after `SLICE_PARTS_MAX` parts, or after the first part that ends later than `slice_s_max`."""
    orders, done = Orders(Counters()), list[int]()

    def work() -> Work:
        for part in range(2 * SLICE_PARTS_MAX):
            done.append(part)
            yield

    orders.slice_s_max = float("inf")
    orders.queue_change(work)
    orders.carry_out()
    assert len(done) == SLICE_PARTS_MAX
    orders.slice_s_max = 0
    orders.carry_out()
    assert len(done) == SLICE_PARTS_MAX + 1
