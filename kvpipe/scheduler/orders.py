"""Orders: changes of the pool that operators ask for, carried out in slices by the thread that has the turn.

Only one thread at a time touches the catalog and whatever else the scheduler side owns: the thread that has the turn.
That is the engine's thread, from its first call on until it reports that it has nothing to do (`give`). Only then may
another thread borrow the turn, for one slice. So a busy engine takes no lock: it reads one attribute. At its next call
it takes the turn back, and waits for the rest of one slice at most.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvpipe.trace.log import Counters

ORDERS_MAX: Final = 64
"""How many orders may wait to be carried out. Ends of pins are not counted."""
SLICE_PARTS_MAX: Final = 32
SLICE_S_MAX: Final = 0.0002
"""A slice ends after the first part of an order that ends later than this."""

Work = Generator[Any, None, Any]
"""Carries out an order, and returns its result. It yields None after each part (some chunks), or `WAITS`."""
WAITS: Final = True
"""Yielded by an order that can do nothing yet: other orders go first."""


class OrderRefusedError(ValueError):
    """An order cannot be carried out. The text is the reason, for the operator."""


class Turns:
    """The right to touch what the scheduler side owns. `away`: the engine's thread does not have it."""

    def __init__(self, on_give: Callable[[], object] = int) -> None:
        """Start with the turn at the engine's thread. `on_give` is called by it whenever it has given the turn away."""
        self._lock, self._on_give = threading.Lock(), on_give
        self._lock.acquire()
        self.away = self._wanted = False

    # ---- the engine's thread --------------------------------------------------------------------------------------

    def give(self) -> None:
        """Let other threads borrow the turn until `take`: the engine has nothing to do. Idempotent."""
        if not self.away:
            self.away = True
            self._lock.release()
            self._on_give()

    def take(self) -> None:
        """Take the turn back. Waits until another thread's slice is over. Idempotent."""
        if self.away:
            self._wanted = True  # nobody begins another slice
            self._lock.acquire()
            self.away = self._wanted = False

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Take the turn back for one call, and give it away again after it if it was given away before."""
        away = self.away
        self.take()
        try:
            yield
        finally:
            if away:
                self.give()

    # ---- another thread -------------------------------------------------------------------------------------------

    def borrow(self) -> bool:
        """Take the turn until `give_back`, if it is free. Returns whether this thread has it now. Never waits."""
        return self.away and not self._wanted and self._lock.acquire(blocking=False)

    def give_back(self) -> None:
        """End a slice: the turn can be taken or borrowed again."""
        self._lock.release()


class Order:
    """One order. Once it is `over`, it has a `result`, or `refused` is the reason why it was not carried out.

    `failed`: the operator's request was not the reason: the engine ends, the queue is full, or the work has raised.
    """

    __slots__ = ("always", "failed", "made", "number", "over", "refused", "result", "work")

    def __init__(self, number: int, make: Callable[[], Work], *, always: bool = False) -> None:
        """`make()` returns its work; it is called before the first part. `always`: accepted even by a full queue."""
        self.always, self.number, self.made, self.refused = always, number, make, ""
        self.result: Any = None
        self.work: Work | None = None
        self.failed = self.over = False  # this one written last


class Orders:
    """The queue of orders, one per scheduler side. The first of `due` is carried out; a waiting one goes to the end."""

    def __init__(self, counters: Counters, begin: Callable[[], object] = int) -> None:
        """Start empty. `begin` is called before each slice."""
        self._begin = begin
        self.due: deque[Order] = deque()
        self.wake: Callable[[], object] = int
        """Called by any thread when an order is over, or when due ones may be carried out by another thread."""
        self.turns = Turns(lambda: self.due and self.wake())
        self.slice_parts_max, self.slice_s_max = SLICE_PARTS_MAX, SLICE_S_MAX
        self._counters, self._ended, self._numbers = counters, False, itertools.count(1)

    def put(self, make: Callable[[], Work], *, always: bool = False) -> Order:
        """Queue an order and return it. On any thread; never waits. A refused order is over at once."""
        order = Order(next(self._numbers), make, always=always)
        if not always and self.full:
            _refuse(order, f"{ORDERS_MAX} orders wait already")
            return order
        self.due.append(order)
        if self._ended:  # looked at after the order is there: either this finds it, or the end did
            self._refuse_all()
        return order

    @property
    def full(self) -> bool:
        """Whether no more orders are accepted, except those with `always`. On any thread."""
        waiting = self.due.copy()  # in one go: another thread changes it
        return len(waiting) >= ORDERS_MAX and sum(not order.always for order in waiting) >= ORDERS_MAX

    def carry_out(self) -> bool:
        """Carry out a slice of the due orders. Only for the thread that has the turn. Never raises.

        Returns whether anything was done: False if all due orders wait.
        """
        until_s, done, waiting = time.monotonic() + self.slice_s_max, 0, 0
        self._begin()
        for _ in range(self.slice_parts_max):
            if waiting >= len(self.due) or self._ended:
                break
            order = self.due[0]
            waits = self._part(order)
            if waits:
                self.due.rotate(-1)
                waiting += 1
            else:
                done += 1
                if waits is None:
                    self.due.popleft()
                    order.over = True
                    self.wake()
            if time.monotonic() >= until_s:
                break
        return done > 0

    def _part(self, order: Order) -> bool | None:
        """Carry out one part of an order. Returns whether the order waits; None if it is over."""
        try:
            if order.work is None:
                order.work = order.made()
            return bool(next(order.work))
        except StopIteration as end:
            order.result = end.value
        except OrderRefusedError as why:
            order.refused = str(why)
        except Exception as error:  # noqa: BLE001  (the engine goes on)
            self._counters.fault("contained_error", where="orders", error=repr(error))
            order.refused, order.failed = "it failed; the reason is in the engine's log", True
        return None

    def end(self) -> None:
        """Refuse all orders that are not over, and later ones: the engine ends. Only for the thread with the turn."""
        self._ended = True
        self._refuse_all()

    def _refuse_all(self) -> None:
        while self.due:
            try:
                order = self.due.popleft()
            except IndexError:  # another thread has refused the last one
                return
            _refuse(order, "the engine ends")
            self.wake()


def _refuse(order: Order, why: str) -> None:
    order.refused, order.failed = why, True
    order.over = True
