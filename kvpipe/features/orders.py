"""Orders are reads and changes that operators request.

The *turn* is the right to use the catalog and all other data of the scheduler side. Only the thread that has the turn
may use these data, and carries orders out in slices. The engine's thread has the turn from its first call until it
reports that it has nothing to do (`give`). After this report, another thread may borrow the turn for one slice.
Therefore a busy engine takes no lock, but reads one attribute. At its next call, the engine's thread takes the turn
back, and waits at most for the rest of one slice.
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
"""The number of changes that may wait to be carried out. Ends of pins are not counted."""
READS_MAX: Final = 64
"""The number of reads that may wait to be carried out."""
SLICE_PARTS_MAX: Final = 32
SLICE_S_MAX: Final = 0.0002
"""The time limit of a slice, in seconds. The slice ends after the first part that exceeds this limit."""

Work = Generator[Any, None, Any]
"""A generator that carries out an order, and returns the order's result.

Each part of the work handles some chunks. After each part, the generator yields None, or `WAITS`.
"""
WAITS: Final = True
"""The value that an order yields if the order cannot continue yet. Other orders are then carried out first."""


class OrderRefusedError(ValueError):
    """An order cannot be carried out. The text is the reason, for the operator."""


class Turns:
    """The right to access the data of the scheduler side.

    `away` says that the engine's thread has given this right, the turn, to other threads.
    """

    def __init__(self, on_give: Callable[[], object] = int) -> None:
        """Start with the turn at the engine's thread.

        The engine's thread calls `on_give` each time after it has given the turn.
        """
        self._lock, self._on_give = threading.Lock(), on_give
        self._lock.acquire()
        self.away = self._wanted = False

    # ---- calls of the engine's thread -----------------------------------------------------------------------------

    def give(self) -> None:
        """Let other threads borrow the turn until `take`, because the engine has nothing to do.

        A second call has no effect.
        """
        if not self.away:
            self.away = True
            self._lock.release()
            self._on_give()

    def take(self) -> None:
        """Take the turn back, after waiting for the end of another thread's slice. A second call has no effect."""
        if self.away:
            self._wanted = True  # so that other threads begin no further slice
            self._lock.acquire()
            self.away = self._wanted = False

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Take the turn back for one block of code. If the turn was given before the block, give it after the block."""
        away = self.away
        self.take()
        try:
            yield
        finally:
            if away:
                self.give()

    # ---- calls of other threads -----------------------------------------------------------------------------------

    def borrow(self) -> bool:
        """Take the turn until `give_back`, if the turn is free. Returns whether this thread has the turn now.

        This method never waits.
        """
        return self.away and not self._wanted and self._lock.acquire(blocking=False)

    def give_back(self) -> None:
        """End a slice, so that the turn can be taken or borrowed again."""
        self._lock.release()


class Order:
    """An order of an operator.

    When the order is `over`, either `result` is its result, or `refused` is the reason why the order was not carried
    out. `failed` says that the operator's request is not the reason: the engine has ended, the queue was full, or the
    work raised. `unwanted` says that no caller waits for the result any more, so the work need not be done.
    """

    __slots__ = ("always", "failed", "made", "number", "over", "refused", "result", "unwanted", "work")

    def __init__(self, number: int, make: Callable[[], Work], *, always: bool = False) -> None:
        """Create an order. `make()` returns the order's work, and is called before the first part of the work.

        `always` says that even a full queue accepts the order.
        """
        self.always, self.number, self.made, self.refused = always, number, make, ""
        self.result: Any = None
        self.work: Work | None = None
        self.unwanted = False
        self.failed = self.over = False  # `over` is written last


class Orders:
    """The queues of orders of one scheduler side: `reads`, and `due`, the changes.

    Changes are carried out one after the other. If a change yields `WAITS`, the change moves to the end of the queue.
    Reads are carried out part by part, one after the other. While both queues have orders, the parts of reads and of
    changes alternate. So a read does not wait for the end of a long change, and reads do not stop changes.
    """

    def __init__(self, counters: Counters, begin: Callable[[], object] = int) -> None:
        """Start without orders. `begin` is called before each slice."""
        self._begin = begin
        self.due: deque[Order] = deque()
        self.reads: deque[Order] = deque()
        self.wake: Callable[[], object] = int
        """Called, by any thread, when an order is over, or when another thread may carry out waiting orders."""
        self.turns = Turns(lambda: (self.due or self.reads) and self.wake())
        self.slice_parts_max, self.slice_s_max = SLICE_PARTS_MAX, SLICE_S_MAX
        self._counters, self._ended, self._numbers = counters, False, itertools.count(1)
        self._parts = 0

    def queue_read(self, make: Callable[[], Work]) -> Order:
        """Queue a read and return it. A read changes nothing and never yields `WAITS`.

        In all other respects this method works as `queue_change`.
        """
        order = Order(next(self._numbers), make)
        if len(self.reads) >= READS_MAX:
            _refuse(order, f"the engine is busy: {READS_MAX} reads wait for its scheduler already; ask again later")
            return order
        self.reads.append(order)
        if self._ended:  # checked after the append, as in `queue_change`
            self._refuse_all()
        return order

    def queue_change(self, make: Callable[[], Work], *, always: bool = False) -> Order:
        """Queue a change and return it. Any thread may call this method. The call never waits.

        If the change is refused, it is returned with `over` set.
        """
        order = Order(next(self._numbers), make, always=always)
        if not always and self.full:
            _refuse(order, f"{ORDERS_MAX} orders wait already")
            return order
        self.due.append(order)
        if self._ended:  # checked after the append: this call or `end` refuses the order
            self._refuse_all()
        return order

    @property
    def full(self) -> bool:
        """Whether only changes with `always` are accepted. Any thread may read this property."""
        waiting = self.due.copy()  # an atomic copy, because another thread changes the queue
        return len(waiting) >= ORDERS_MAX and sum(not order.always for order in waiting) >= ORDERS_MAX

    def carry_out(self) -> bool:
        """Carry out a slice of the orders. Only the thread that has the turn may call this method. Never raises.

        Returns whether any part was carried out. False means that all waiting orders are changes that yield `WAITS`.
        """
        until_s, done, waiting = time.monotonic() + self.slice_s_max, 0, 0
        self._begin()
        for _ in range(self.slice_parts_max):
            changes = waiting < len(self.due)
            if self._ended or not (changes or self.reads):
                break
            self._parts += 1
            queue = self.reads if self.reads and (self._parts % 2 or not changes) else self.due
            order = queue[0]
            waits = self._part(order)
            if waits:
                queue.rotate(-1)
                waiting += 1
            else:
                done += 1
                if waits is None:
                    queue.popleft()
                    order.over = True
                    self.wake()
                elif queue is self.reads:
                    # the next part is of another read, so that a long read does not delay a short read
                    queue.rotate(-1)
            if time.monotonic() >= until_s:
                break
        return done > 0

    def _part(self, order: Order) -> bool | None:
        """Carry out one part of an order. Returns whether the order has to wait, or None if the order is over."""
        if order.unwanted:
            return None
        try:
            if order.work is None:
                order.work = order.made()
            return bool(next(order.work))
        except StopIteration as end:
            order.result = end.value
        except OrderRefusedError as why:
            order.refused = str(why)
        except Exception as error:  # noqa: BLE001  (the engine continues)
            self._counters.fault("contained_error", where="orders", error=repr(error))
            order.refused, order.failed = "the request failed; the reason is in the engine's log", True
        return None

    def end(self) -> None:
        """Refuse all waiting orders and all later orders, because the engine ends.

        Only the thread that has the turn may call this method.
        """
        self._ended = True
        self._refuse_all()

    def _refuse_all(self) -> None:
        for queue in (self.reads, self.due):
            while queue:
                try:
                    order = queue.popleft()
                except IndexError:  # another thread has refused the last order
                    break
                _refuse(order, "the engine is shutting down")
                self.wake()


def _refuse(order: Order, why: str) -> None:
    order.refused, order.failed = why, True
    order.over = True
