"""What others than the engine want changed: orders, carried out in slices by whoever's turn it is.

The catalog, and all that the scheduler's side owns, is touched by one thread at a time. It is the engine's turn from
its first call on until it says that it has nothing to do; only then may another thread borrow the turn, for a slice at
most. So a busy engine asks no lock: it looks at one attribute. What it finds given away it takes back, and waits for
the rest of one slice.
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
"""That wait to be carried out. Ends of pins are not counted."""
SLICE_PARTS_MAX: Final = 32
SLICE_S_MAX: Final = 0.0002
"""A slice ends with the part of an order that is under way then."""

Work = Generator[Any, None, Any]
"""Does an order part by part, a chunk's or the like, and returns what is told of it. Yields `WAITS`, or nothing."""
WAITS: Final = True
"""Nothing can be done of an order yet: others go first."""


class OrderRefusedError(ValueError):
    """An order cannot be carried out. Its text says why."""


class Turns:
    """Whose turn it is. `away`: not the engine's."""

    def __init__(self) -> None:
        """It is the engine's."""
        self._lock = threading.Lock()
        self._lock.acquire()
        self.away = self._wanted = False

    # ---- the engine's thread --------------------------------------------------------------------------------------

    def give(self) -> None:
        """The engine has nothing to do: until it comes back others may have their turn. Idempotent."""
        if not self.away:
            self.away = True
            self._lock.release()

    def take(self) -> None:
        """The engine is back. Waits while another thread is at a slice."""
        if self.away:
            self._wanted = True  # nobody begins another slice
            self._lock.acquire()
            self.away = self._wanted = False

    @contextmanager
    def taken(self) -> Iterator[None]:
        """The engine is back for one call. If it had nothing to do, it has nothing to do after it."""
        away = self.away
        self.take()
        try:
            yield
        finally:
            if away:
                self.give()

    # ---- another thread -------------------------------------------------------------------------------------------

    def borrow(self) -> bool:
        """Have the turn, if it is not the engine's: until `give_back`. Never waits."""
        return self.away and not self._wanted and self._lock.acquire(blocking=False)

    def give_back(self) -> None:
        """The slice is over."""
        self._lock.release()


class Order:
    """One order. Whoever gives it reads `told` or `refused` once it is `over`. `failed`: by no fault of the order's."""

    __slots__ = ("always", "failed", "made", "number", "over", "refused", "told", "work")

    def __init__(self, number: int, make: Callable[[], Work], *, always: bool = False) -> None:
        """`make` is called when its first part is to be done. `always`: it is taken however many wait."""
        self.always, self.number, self.made, self.refused = always, number, make, ""
        self.told: Any = None
        self.work: Work | None = None
        self.failed = self.over = False  # this one written last


class Orders:
    """One per scheduler side. The first of `due` is under way; one that waits is put behind the others."""

    def __init__(self, counters: Counters, begin: Callable[[], object] = int) -> None:
        """Nothing is ordered. `begin` is called before each slice."""
        self._begin = begin
        self.due: deque[Order] = deque()
        self.turns = Turns()
        self.slice_parts_max, self.slice_s_max = SLICE_PARTS_MAX, SLICE_S_MAX
        self._counters, self._ended, self._numbers = counters, False, itertools.count(1)

    def put(self, make: Callable[[], Work], *, always: bool = False) -> Order:
        """Give an order. Any thread; never waits. One that is refused is over at once. `always`: however many wait."""
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
        """Whether no more orders are taken. Any thread."""
        waiting = self.due.copy()  # in one go: another thread changes it
        return len(waiting) >= ORDERS_MAX and sum(not order.always for order in waiting) >= ORDERS_MAX

    def carry_out(self) -> bool:
        """Carry out a slice of what is due. For the thread whose turn it is. Never raises.

        Returns whether anything was done: not if all that is due waits.
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
            if time.monotonic() >= until_s:
                break
        return done > 0

    def _part(self, order: Order) -> bool | None:
        """Do one part of an order. Returns whether it waits; None: that was its last."""
        try:
            if order.work is None:
                order.work = order.made()
            return bool(next(order.work))
        except StopIteration as end:
            order.told = end.value
        except OrderRefusedError as why:
            order.refused = str(why)
        except Exception as error:  # noqa: BLE001  (the engine goes on)
            self._counters.fault("contained_error", where="orders", error=repr(error))
            order.refused, order.failed = "it failed; the engine's log says why", True
        return None

    def end(self) -> None:
        """The engine ends: what is not carried out yet is refused, now and later. For the thread whose turn it is."""
        self._ended = True
        self._refuse_all()

    def _refuse_all(self) -> None:
        while self.due:
            try:
                order = self.due.popleft()
            except IndexError:  # another thread has refused the last one
                return
            _refuse(order, "the engine ends")


def _refuse(order: Order, why: str) -> None:
    order.refused, order.failed = why, True
    order.over = True
