"""The readier makes the slots of a pool ready before their use: resident, and pinned if the transfer engine pins.

The first touch of a page causes a page fault, which can take twenty times as long as the copy of that page. On a
virtual machine whose host has not allocated the page yet, the faults of 2 MiB take 7 ms or more. Therefore a thread
touches the pool before its use, from its beginning to its end.

If slots must be pinned, only slots that the thread has finished are used. Otherwise slots are also used *on demand*:
when the engine saves faster than the thread works, untouched slots are used, and the copies cause the page faults.
Without this, chunks would be evicted although the pool has room. The thread continues after the slots that the
scheduler side has used.

The thread touches a page by writing one byte. ``MADV_POPULATE_WRITE`` would hold the lock of the whole address space
while the kernel clears pages, so that every allocation of the forward would wait. The write overwrites a byte of the
slot, which does not matter before the slot is used.

Slots that engines share may have chunks, and the holder gives memory to these slots. So the thread only reads one byte
of each page that has memory. The read maps the page, so that the first copy causes no page fault.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from kvpipe.machine.cores import bind_this_thread
from kvpipe.machine.headroom import Headroom, tightest
from kvpipe.trace.log import log
from kvpipe.transfer.pool import HostPool

How = Literal["ahead", "start", "use"]

# bytes touched in one call if the thread shares the forward's cores; a call takes 14 ms at most
STROKE_BYTES: Final = 4 << 20
SHARE_OF_A_BUSY_CORE: Final = 0.05
SHARE_OF_PINNING: Final = 0.05
"""The share of a busy engine's time in which all ranks together pin, because no launch runs while a rank pins."""
LOOK_S: Final = 0.02
DEMAND_BYTES_MAX: Final = 1 << 30  # the most bytes, of all ranks, that are usable but not touched yet
SHORT_S: Final = 5.0  # the pause before the next check of free memory, after too little was free
WITHOUT_MEMORY_S: Final = 0.1  # the pause before the thread checks again whether shared slots have memory
STOP_S_MAX: Final = 10.0


@dataclass
class Manners:
    """The limits of the thread. `cpus` has the cores that the thread may use. Empty `cpus` allow any core.

    While the engine is `busy`, `share` is the largest share of time in which the thread touches pages. `claim_share` is
    the largest share of time in which the thread claims pages.
    """

    cpus: frozenset[int] = frozenset()
    share: float = 1.0
    claim_share: float = 1.0
    busy: Callable[[], bool] = lambda: True


class Readier:
    """The readier of one pool makes the pool's slots ready, from the first slot on. `pool.ready` is the progress."""

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
        """`claim(address, bytes)`, such as `TransferEngine.claim`, is called for each piece of resident slots.

        `piece_bytes` is the approximate size of a piece. Slots are offered at most `demand_bytes_max` bytes beyond the
        last slot that is resident or used. If `demand_bytes_max` is not 0, then `claim` must take pieces in any order.
        `done(seconds)` is called when all slots are ready. `short(room)` is called when too little memory is free.
        `room()` returns the number of free bytes of memory.
        """
        self._pool, self._claim, self._manners = pool, claim, manners or Manners()
        self._done, self._short, self._room = done, short, room
        self._demand_bytes_max, self._lock = demand_bytes_max, threading.Lock()
        self.used = 0
        """The scheduler side has used the slots [0, used). The thread does not touch these slots any more."""
        self._step = max(1, piece_bytes // pool.part_bytes)
        self._at = 0  # the first slot of the next piece
        self._bytes = pool.flat.numpy()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._began = time.monotonic()
        self._touches = True
        self._is_short = False
        self._pause_s = 0.0  # the pause before the next piece, if the last piece could not be made ready

    def begin(self, how: How) -> None:
        """Make the first piece ready, and the other pieces in the background. With how="start", wait for all pieces.

        With how="use" no slot is touched. In this case every slot counts as ready, and the first copy into a slot
        causes the slot's page faults. Shared slots always count as ready. The thread only reads shared slots, because
        shared slots may have chunks.
        """
        self._touches = how != "use"
        self._pool.ready = 0 if self._touches and not self._pool.token else self._pool.slots
        self._next()
        if self._at == self._pool.slots:
            return
        self._thread = threading.Thread(target=self._main, name="kvpipe-ready", daemon=True)
        self._thread.start()
        while how == "start" and self._thread.is_alive() and not self._pause_s:
            self._thread.join(LOOK_S)

    def use(self, stop: int) -> None:
        """Stop touching the slots [0, stop), because copies are about to write these slots.

        Waits for one stroke at most. vLLM's thread calls this before any copy into these slots.
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
        """Make more slots usable: all resident slots and, on demand, the next slots if enough memory is free."""
        pool, stop = self._pool, max(self._at, self.used)
        if self._demand_bytes_max:
            room, demand = self._room(), self._demand_bytes_max
            demand = demand if room is None else min(max(0, room.spare), demand)
            stop = min(stop + demand // pool.slot_bytes, pool.slots)
        with self._lock:  # vLLM's thread and the readier's thread both increase `ready`
            pool.ready = max(pool.ready, stop)

    def stop(self) -> None:
        """End the readier's thread. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(STOP_S_MAX)

    def _main(self) -> None:
        near = self._pool.near  # near the device, because a page stays in the memory of the core that first touches it
        if cpus := near & self._manners.cpus or near or self._manners.cpus:
            bind_this_thread(cpus)
        try:
            while self._at < self._pool.slots and not self._stop.is_set():
                self._next()
                if self._pause_s:
                    self._stop.wait(self._pause_s)
        except Exception:
            log.exception("pool_not_readied", ready=self._pool.ready, slots=self._pool.slots)

    def _next(self) -> None:
        """Make the next piece ready if its slots have memory, or enough memory is free."""
        first = max(self._at, self.used)
        stop = min(first + self._step, self._pool.with_memory)
        if stop <= first < self._pool.slots:
            self._pause_s = WITHOUT_MEMORY_S
        else:
            self._pause_s = 0.0 if self._make_ready(first, stop) else SHORT_S

    def _make_ready(self, first: int, stop: int) -> bool:
        """Make slots [first, stop) ready. Returns False if some of these slots are not ready yet."""
        pool, parts = self._pool, self._pool.parts(first, stop)
        total = sum(size for _, size in parts)
        if self._touches and not (self._has_room(total) and all(self._touch(at, at + size) for at, size in parts)):
            return False
        began = time.monotonic()
        if not all(self._claim(pool.base + at, size) for at, size in parts):
            self._is_short = True
            return False
        self._is_short, self._at = False, stop
        if self._touches and not pool.token:
            self._offer()
        if stop == pool.slots:
            self._done(time.monotonic() - self._began)
        else:
            self._rest(began, self._manners.claim_share)
        return True

    def _has_room(self, size: int) -> bool:
        """Return whether `size` more bytes of memory are free. Without this check the system could kill the engine."""
        # None for shared slots, because their holder has checked the free memory
        room = None if self._pool.token else self._room()
        is_short = room is not None and room.spare < size
        if room is not None and is_short and not self._is_short:
            self._short(room)
        self._is_short = is_short
        return not is_short

    def _touch(self, low: int, high: int) -> bool:
        """Touch the pages of the bytes [low, high). Returns False if `stop` was called meanwhile.

        All pages are touched in one stroke, unless the thread shares its cores or slots are used on demand. One call to
        native code touches a stroke. After each stroke this thread needs the GIL, and vLLM's thread may have to wait
        for the GIL.
        """
        manners = self._manners
        stroke = STROKE_BYTES if manners.share < 1 or self._demand_bytes_max else high - low
        for at in range(low, high, stroke):
            if self._stop.is_set():
                return False
            began = time.monotonic()
            with self._lock:
                first, stop = max(at, self.used * self._pool.slot_bytes), min(at + stroke, high)
                if first < stop and self._pool.token:
                    self._bytes[first : stop : mmap.PAGESIZE].max()
                elif first < stop:
                    self._bytes[first : stop : mmap.PAGESIZE] = 0
                    self._bytes[stop - 1] = 0
            self._rest(began, manners.share)
        return True

    def _rest(self, began: float, share: float) -> None:
        """If the engine is busy, pause until the work since `began` was only `share` of the time since `began`."""
        if share < 1 and self._manners.busy():
            self._stop.wait((time.monotonic() - began) * (1 / share - 1))
