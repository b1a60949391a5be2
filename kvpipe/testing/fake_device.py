"""A simulated CUDA device. The device's streams run only when a test runs them, in the order that the test chooses.

A stream is a queue of copies, computations, event records and event waits. `step` runs the head of one stream. A stream
whose head waits for an event that has not fired cannot run. For every order that CUDA may legally run, some sequence of
steps gives this order. So if a wait is missing, some sequence gives wrong bytes. The device orders work on the host
only by the host's own order: work that the host queues after it has observed an event runs after that event. Every call
of a dead device raises the same error (a sticky error). A device can also return the same streams in rotation, as torch
does.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from triton.runtime.interpreter import InterpretedFunction

from kvpipe.errors import TransferError
from kvpipe.transfer.base import Ticket
from kvpipe.transfer.device import Launch
from kvpipe.transfer.driver import CopyBatch
from kvpipe.transfer.kernels import copy_pages
from kvpipe.transfer.waves import OrderingPoint

QueuedCall = Callable[[], None]


ILLEGAL_ACCESS = "CUDA error: an illegal memory access was encountered"
CAPTURING = "CUDA error: operation not permitted when stream is capturing"


class FakeEvent:
    """An event of the stream named `of`. The event fires when the stream has run all work queued before the event."""

    def __init__(self, of: str, device: FakeDevice) -> None:
        self.of, self.device = of, device
        self.fired = self.broken = False
        self.asked = 0
        self.refusals = 0  # the number of next calls of `query` that raise, although the device works

    def query(self) -> bool:
        """Whether the event has fired. A broken event raises when it has fired, as CUDA does after an async error."""
        self.asked += 1
        self.device.alive()
        if self.refusals:
            self.refusals -= 1
            raise RuntimeError(CAPTURING)
        if self.fired and self.broken:
            raise RuntimeError(ILLEGAL_ACCESS)
        return self.fired

    def synchronize(self) -> None:
        """Block until the event has fired. Another thread must run the device meanwhile."""
        self.device.waits += 1
        while not self.fired:
            self.device.alive()
            time.sleep(0.000_1)


class FakeStream:
    """A stream: a queue of work and of events to wait for."""

    def __init__(self, device: FakeDevice, name: str) -> None:
        self.device, self.name = device, name
        self.queue: deque[QueuedCall | FakeEvent] = deque()

    @property
    def ready(self) -> bool:
        """Whether the head of the queue may run now."""
        if not self.queue:
            return False
        head = self.queue[0]
        return not isinstance(head, FakeEvent) or head.fired

    def put(self, work: QueuedCall) -> None:
        """Queue `work`."""
        self.device.alive()
        with self.device.lock:
            self.queue.append(work)

    def record_event(self) -> FakeEvent:
        """Queue a new event, as `torch.cuda.Stream.record_event` does, and return the event."""
        self.device.alive()
        if any(self.name.startswith(name) for name in self.device.lost):
            msg = "CUDA error: unspecified launch failure"
            raise RuntimeError(msg)
        event = FakeEvent(self.name, self.device)

        def fire() -> None:
            event.fired = True

        self.put(fire)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        """Make later work wait for `event`. Does nothing if `forgets` has this stream and the event's stream."""
        self.device.alive()
        if (self.name, event.of) not in self.device.forgets:
            with self.device.lock:
                self.queue.append(event)

    def synchronize(self) -> None:
        """Run the device until this stream's queue is empty."""
        self.device.alive()
        while self.queue:
            with self.device.lock:  # other threads may run the device, too
                hangs = bool(self.queue) and not self.device.step(0)
            if hangs:
                msg = f"stream {self.name} waits for an event that nobody will fire"
                raise RuntimeError(msg)

    def run_head(self) -> None:
        """Run the head of the queue, which must be `ready`."""
        head = self.queue.popleft()
        if not isinstance(head, FakeEvent):
            head()


class FakeDevice:
    """Implements `kvpipe.transfer.device.Device`. `compute` is the caller's stream.

    `forgets` has pairs (waiting stream, awaited stream) whose waits are dropped, as if the engine had no such waits. If
    `interpreted`, launches run the real kernel in Triton's interpreter, otherwise `_move_rows`. `streams_max` is the
    number of streams, including the caller's, that `stream` returns in rotation. If it is 0, each call makes a stream.
    """

    def __init__(
        self,
        forgets: Iterable[tuple[str, str]] = (),
        pins_max: int = 1 << 30,
        *,
        interpreted: bool = False,
        streams_max: int = 0,
    ) -> None:
        self.forgets = frozenset(forgets)
        self.lock = threading.RLock()
        self.compute = FakeStream(self, "compute")
        self.default = FakeStream(self, "default")
        self.streams = [self.compute, self.default]
        self.lost: set[str] = set()  # beginnings of the names of streams that cannot record events any more
        self.copies_until_error = -1  # the number of copies and launches that succeed before one raises; -1: no limit
        self.errors_on = ""  # the beginning of the names of streams whose copies may raise
        self.pins_max = pins_max
        self.pinned: dict[int, int] = {}
        self.pin_log: list[tuple[int, int]] = []
        self.pinned_memory: set[int] = set()  # the addresses of pinned memory
        self.interpreted = interpreted
        self.no_kernels = ""
        self.memory_max = 1 << 30
        self.moved: Counter[str] = Counter()  # the numbers of operations, by kind
        self.deepest = 0  # the largest number of layers that one launch has copied so far
        self.dead = ""  # the error that every call raises, or "" if the device works
        self.waits = 0  # the number of times that the host has waited for an event
        self.near: frozenset[int] = frozenset()
        self.architecture = (8, 0)
        self.lag_us = 1000.0  # the result of `blocking_lag_us`
        self._streams_max, self._given = streams_max, 0

    def alive(self) -> None:
        """Raise the sticky error `dead`, if it is not ""."""
        if self.dead:
            raise RuntimeError(self.dead)

    def stream(self, name: str) -> FakeStream:
        """Return a new stream, or an earlier stream if `streams_max` streams exist."""
        self._given += 1
        if self._streams_max and self._given >= self._streams_max:
            return self.streams[self._given % self._streams_max]
        made = FakeStream(self, name)
        self.streams.append(made)
        return made

    def current_stream(self) -> FakeStream:
        """Return the caller's stream.

        For the engine's own threads this is the default stream, on which nothing is computed.
        """
        return self.default if threading.current_thread().name.startswith("kvpipe") else self.compute

    def enter_thread(self) -> None:
        """Do nothing, because the device has no state per thread."""

    def cpus(self) -> frozenset[int]:
        """Return `near`, which the test has set."""
        return self.near

    def capability(self) -> tuple[int, int]:
        """Return `architecture`, which the test has set."""
        return self.architecture

    def copy(self, stream: FakeStream, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Queue copies. A copy from memory of `allocate_pinned` is small, and is not split in halves."""
        for to, source in pairs:
            if source.untyped_storage().data_ptr() in self.pinned_memory:
                stream.put(_copy(to, source))
            else:
                self.moved["copy"] += 1
                self._queue_copy(stream, to.view(-1), source.view(-1))

    def copy_batch(self, stream: FakeStream, copies: CopyBatch, *, settled: bool) -> None:
        """Queue copies between addresses."""
        self.moved["batch"] += 1
        for to, source, size in zip(*(column.tolist() for column in copies), strict=True):
            self._queue_copy(stream, _bytes_at(to, size), _bytes_at(source, size), settled=settled)

    def _queue_copy(self, stream: FakeStream, to: torch.Tensor, source: torch.Tensor, *, settled: bool = False) -> None:
        """Queue a copy in two halves, so that other streams can run between the halves.

        The first half reads `settled` bytes now.
        """
        self._may_fail(stream)
        middle = len(to) // 2
        for half in (slice(0, middle), slice(middle, None)):
            stream.put(_copy(to[half], source[half].clone() if settled and not half.start else source[half]))

    def _may_fail(self, stream: FakeStream) -> None:
        if not stream.name.startswith(self.errors_on):
            return
        if self.copies_until_error == 0:
            self.copies_until_error = -1
            msg = "CUDA error: invalid argument"
            raise RuntimeError(msg)
        self.copies_until_error -= self.copies_until_error > 0

    def upload(self, stream: FakeStream, array: npt.NDArray[Any]) -> torch.Tensor:
        """Return a tensor with wrong bytes, and queue a copy of `array` to this tensor."""
        self.moved["upload"] += 1
        made, wanted = torch.full(array.shape, -1, dtype=torch.from_numpy(array).dtype), torch.tensor(array)
        stream.put(_copy(made, wanted))
        return made

    def launch(self, stream: FakeStream, launch: Launch) -> None:
        """Queue the kernel: as a whole if it is interpreted, otherwise in two halves of its rows."""
        self.moved["launch"] += 1
        self.deepest = max(self.deepest, launch.layers)
        self._may_fail(stream)
        if self.interpreted:
            stream.put(lambda: INTERPRETED[(launch.programs,)](*launch.arguments, **launch.constants))
            return
        middle = launch.rows // 2
        for half in (range(middle), range(middle, launch.rows)):
            stream.put(functools.partial(_move_rows, launch, half))

    def allocate(self, size: int) -> torch.Tensor:
        """Return memory that holds nonsense."""
        self.moved["allocate"] += 1
        if size > self.memory_max:
            msg = "CUDA out of memory"
            raise RuntimeError(msg)
        return _nonsense(size)

    def allocate_pinned(self, size: int) -> torch.Tensor:
        """Return memory that holds nonsense."""
        made = self.allocate(size)
        self.pinned_memory.add(made.untyped_storage().data_ptr())
        return made

    def blocking_lag_us(self) -> float:
        """Return `lag_us`, which the test has set. Raises if `lag_us` is negative."""
        if self.lag_us < 0:
            raise RuntimeError("CUDA out of memory")
        return self.lag_us

    def has_kernels(self) -> str:
        """Return `no_kernels`, the reason that the test has set, or "" if the device has kernels."""
        return self.no_kernels

    def reads_pool(self) -> bool:
        """Return True."""
        return True

    def register(self, address: int, size: int) -> None:
        """Record the memory as pinned. Raises `TransferError` beyond `pins_max` registrations."""
        self.alive()
        if len(self.pinned) >= self.pins_max:
            msg = "CUDA error 2"
            raise TransferError(msg)
        self.pinned[address] = size
        self.pin_log.append((address, size))

    def unregister(self, address: int) -> None:
        """Remove the record of `register`. Raises KeyError if `address` was not registered."""
        self.alive()
        del self.pinned[address]

    def step(self, choice: int) -> bool:
        """Run the head of one stream that is ready. Returns False if no stream is ready."""
        with self.lock:
            ready = [stream for stream in self.streams if stream.ready]
            if ready:
                ready[choice % len(ready)].run_head()
            return bool(ready)

    def drain(self) -> None:
        """Run all queued work."""
        with self.lock:
            while self.step(0):
                pass
            assert not any(stream.queue for stream in self.streams), "the streams wait for each other"


NONSENSE = 0xEE
MAPPED_BYTES_MIN, MAPPED_BYTES_MAX = 64 << 10, 4 << 20
"""The sizes of allocations that map `_nonsense_file`. Filling such memory would take longer than most tests."""


@functools.cache
def _nonsense_file() -> int:
    """Return a file in memory that is full of random bytes."""
    file = os.memfd_create("nonsense")
    os.pwrite(file, bytes([NONSENSE]) * MAPPED_BYTES_MAX, 0)
    return file


def _nonsense(size: int) -> torch.Tensor:
    """Return random bytes. The system copies a page of mapped memory at the first write to the page."""
    if not MAPPED_BYTES_MIN <= size <= MAPPED_BYTES_MAX:
        return torch.full((size,), NONSENSE, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(_nonsense_file(), size, flags=mmap.MAP_PRIVATE), dtype=torch.uint8)


INTERPRETED = InterpretedFunction(copy_pages.fn)
"""The kernel in Triton's interpreter, which accepts addresses of host memory."""


def _bytes_at(address: int, size: int) -> torch.Tensor:
    """Return the bytes at an address of this process."""
    return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)))


def _move_rows(launch: Launch, rows: Iterable[int]) -> None:
    """Do the work of the kernel for `rows`, page by page."""
    for deep in range(launch.layers):
        base, offset = launch.places[launch.layer + deep].tolist()
        for number in rows:
            row = launch.first + number
            slot, page, block, span, pages = launch.table[row].tolist()
            paged = _bytes_at(base + block * launch.stride, launch.page_bytes)
            if launch.bay is None:
                other = launch.pool + slot * launch.slot_bytes + offset + page * launch.page_bytes
            elif launch.layers == 1:
                other = launch.bay + number * launch.page_bytes
            else:
                before = (span - launch.first) * launch.layers + deep * pages
                other = launch.bay + (before + row - span) * launch.page_bytes
            there = _bytes_at(other, launch.page_bytes)
            to, source = (there, paged) if launch.saving else (paged, there)
            to.copy_(source)


def _copy(to: torch.Tensor, source: torch.Tensor) -> QueuedCall:
    def work() -> None:
        to.copy_(source)

    return work


def landed_of(ticket: Ticket) -> FakeEvent:
    """Return the event that fires when a queued ticket's bytes have landed."""
    assert isinstance(ticket.mark, OrderingPoint)
    assert isinstance(ticket.mark.landed, FakeEvent)
    return ticket.mark.landed
