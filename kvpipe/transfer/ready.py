"""Makes the slots of a pool ready before they are used: resident, and pinned if the transfer engine needs that.

The first touch of a page is a fault, which can take twenty times as long as the copy: on a virtual machine whose host
has not allocated the page yet, 2 MiB take 7 ms or more. So a thread touches the pool from its beginning to its end.

Where slots must be pinned, only those that the thread is done with are used. Elsewhere slots are also used *on demand*:
when the engine saves faster than the thread works, the copies take the faults, because the alternative is to evict
chunks from a pool that has room. The thread goes on behind what was handed out.

Pages are touched by writing one byte each, not by ``MADV_POPULATE_WRITE``: that holds the lock of the whole address
space while the kernel clears pages, so every allocation of the forward would wait. This overwrites a slot's content,
which does not matter before the slot is used.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from kvpipe.cores import bind_this_thread
from kvpipe.headroom import Headroom, tightest
from kvpipe.trace.log import log
from kvpipe.transfer.pool import HostPool

How = Literal["ahead", "start", "use"]

STROKE_BYTES: Final = 4 << 20  # touched at once on the forward's own cores: 14 ms where pages are slowest
SHARE_OF_A_BUSY_CORE: Final = 0.05
LOOK_S: Final = 0.02
DEMAND_BYTES_MAX: Final = 1 << 30  # of all ranks: handed out ahead of the thread until the next step's report
SHORT_S: Final = 5.0  # how often memory is asked for again when there is none to spare
STOP_S_MAX: Final = 10.0


@dataclass
class Manners:
    """Limits of the thread. `cpus`: cores that it may use; empty: any.

    `share`: the share of time in which it works while the engine is `busy`.
    """

    cpus: frozenset[int] = frozenset()
    share: float = 1.0
    busy: Callable[[], bool] = lambda: True


class Readier:
    """Makes a pool's slots ready, from the first on. One per pool. `pool.ready` is the progress."""

    def __init__(
        self,
        pool: HostPool,
        claim: Callable[[int, int], bool],
        *,
        piece_bytes: int,
        demand_bytes_max: int = 0,
        manners: Manners | None = None,
        done: Callable[[float], object] = lambda _: None,
        short: Callable[[Headroom], object] = lambda _: None,
        room: Callable[[], Headroom | None] = tightest,
    ) -> None:
        """`claim(address, bytes)`: called for each piece of resident slots, see `TransferEngine.claim`.

        `piece_bytes`: about how many bytes a piece has. `demand_bytes_max`: how much of the pool may be used
        before it is in memory; if not 0, `claim` takes pieces in any order. `done(seconds)` is called when all slots
        are ready, `short(room)` when there is no memory to spare at present. `room()`: returns the memory that is left.
        """
        self._pool, self._claim, self._manners = pool, claim, manners or Manners()
        self._done, self._short, self._room = done, short, room
        self._demand_bytes_max, self._lock = demand_bytes_max, threading.Lock()
        self.used = 0
        """Slots before this one were handed out. The thread does not touch them any more."""
        self._step = max(1, piece_bytes // pool.slot_bytes)
        self._at = 0  # the first slot of the next piece
        self._bytes = pool.tensor.view(-1).numpy()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._began = time.monotonic()
        self._touches = True
        self._is_short = False

    def begin(self, how: How) -> None:
        """Make the first piece ready, and the rest in the background; with how="start", wait for the rest.

        With how="use" nothing is touched: every slot counts as ready, and its first writer takes the page faults.
        """
        self._touches = how != "use"
        self._pool.ready = 0 if self._touches else self._pool.slots
        self._next()
        if self._at == self._pool.slots:
            return
        self._thread = threading.Thread(target=self._main, name="kvpipe-ready", daemon=True)
        self._thread.start()
        while how == "start" and self._thread.is_alive() and not self._is_short:
            self._thread.join(LOOK_S)

    def use(self, stop: int) -> None:
        """Touch no slot before `stop` from now on: they are about to be written. Waits for one stroke at most.

        Called on vLLM's thread, before anything is copied into those slots.
        """
        if stop <= self._at:
            self.used = stop
            return
        with self._lock:
            self.used = stop
        pool = self._pool
        if pool.ready < pool.slots and 2 * (pool.ready - stop) * pool.slot_bytes < self._demand_bytes_max:
            self._offer()

    def _offer(self) -> None:
        """Let more slots be used: all that are in memory and, on demand, those behind them that there is memory for."""
        pool, stop = self._pool, max(self._at, self.used)
        if self._demand_bytes_max:
            room, demand = self._room(), self._demand_bytes_max
            demand = demand if room is None else min(max(0, room.spare), demand)
            stop = min(stop + demand // pool.slot_bytes, pool.slots)
        with self._lock:  # vLLM's thread and the readier's both come here
            pool.ready = max(pool.ready, stop)

    def stop(self) -> None:
        """End the thread. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(STOP_S_MAX)

    def _main(self) -> None:
        near = self._pool.near  # where a page is first touched it stays, and every copy goes the way from there
        if cpus := near & self._manners.cpus or near or self._manners.cpus:
            bind_this_thread(cpus)
        try:
            while self._at < self._pool.slots and not self._stop.is_set():
                self._next()
                if self._is_short:
                    self._stop.wait(SHORT_S)
        except Exception:
            log.exception("pool_not_readied", ready=self._pool.ready, slots=self._pool.slots)

    def _next(self) -> None:
        """Make the next piece ready, if there is memory for it."""
        pool, first = self._pool, max(self._at, self.used)
        stop = min(first + self._step, pool.slots)
        low, high = first * pool.slot_bytes, stop * pool.slot_bytes
        if self._touches and not (self._has_room(high - low) and self._touch(low, high)):
            return
        if not self._claim(pool.base + low, high - low):
            self._is_short = True
            return
        self._is_short, self._at = False, stop
        if self._touches:
            self._offer()
        if stop == pool.slots:
            self._done(time.monotonic() - self._began)

    def _has_room(self, size: int) -> bool:
        """Whether `size` more bytes of memory are left. Otherwise the system would kill the engine."""
        room = self._room()
        is_short = room is not None and room.spare < size
        if room is not None and is_short and not self._is_short:
            self._short(room)
        self._is_short = is_short
        return not is_short

    def _touch(self, low: int, high: int) -> bool:
        """Touch the pages of the bytes [low, high). Returns False if `stop` was called meanwhile.

        In one stroke, unless the engine is busy or may wait for it: after each stroke this thread needs the GIL again,
        and vLLM's thread may have to wait until it has had it.
        """
        manners = self._manners
        stroke = STROKE_BYTES if manners.share < 1 or self._demand_bytes_max else high - low
        for at in range(low, high, stroke):
            if self._stop.is_set():
                return False
            began = time.monotonic()
            with self._lock:
                first, stop = max(at, self.used * self._pool.slot_bytes), min(at + stroke, high)
                if first < stop:
                    self._bytes[first : stop : mmap.PAGESIZE] = 0
                    self._bytes[stop - 1] = 0
            if manners.share < 1 and manners.busy():
                self._stop.wait((time.monotonic() - began) * (1 / manners.share - 1))
        return True
