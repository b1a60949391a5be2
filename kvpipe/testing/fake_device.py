"""A CUDA device that is slow on purpose: streams run only when the test lets them, in whatever order it likes.

A stream is a queue of copies, computations, event records and event waits. `step` runs the head of one stream; a
stream whose head waits for an event that has not fired cannot run. Whatever CUDA may legally do, some sequence of
steps does too, so a missing wait shows as wrong bytes under some sequence.

The host's own order is all that it knows of the host: what is queued after the host has observed something comes after
it. A device can be dead, after which every call raises (a sticky error), and it can give out streams again, like torch.
"""

from __future__ import annotations

import ctypes
import functools
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
from kvpipe.transfer.cuda import OrderingPoint
from kvpipe.transfer.device import CopyBatch, Launch
from kvpipe.transfer.kernels import copy_pages

Work = Callable[[], None]


ILLEGAL_ACCESS = "CUDA error: an illegal memory access was encountered"
CAPTURING = "CUDA error: operation not permitted when stream is capturing"


class FakeEvent:
    """Fires when its stream, `of`, gets there."""

    def __init__(self, of: str, device: FakeDevice) -> None:
        self.of, self.device = of, device
        self.fired = self.broken = False
        self.asked = 0
        self.refusals = 0  # so many questions raise, though the device lives

    def query(self) -> bool:
        """Whether it has fired. A broken event raises then, as CUDA does after an asynchronous error."""
        self.asked += 1
        self.device.alive()
        if self.refusals:
            self.refusals -= 1
            raise RuntimeError(CAPTURING)
        if self.fired and self.broken:
            raise RuntimeError(ILLEGAL_ACCESS)
        return self.fired

    def synchronize(self) -> None:
        """Block until it has fired; somebody else lets the device run."""
        self.device.waits += 1
        while not self.fired:
            self.device.alive()
            time.sleep(0.000_1)


class FakeStream:
    """A queue of work and of events to wait for."""

    def __init__(self, device: FakeDevice, name: str) -> None:
        self.device, self.name = device, name
        self.queue: deque[Work | FakeEvent] = deque()

    @property
    def ready(self) -> bool:
        """Whether its head may run now."""
        if not self.queue:
            return False
        head = self.queue[0]
        return not isinstance(head, FakeEvent) or head.fired

    def put(self, work: Work) -> None:
        """Queue work."""
        self.device.alive()
        with self.device.lock:
            self.queue.append(work)

    def record_event(self) -> FakeEvent:
        """See torch.cuda.Stream."""
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
        """See torch.cuda.Stream. A device made to forget this stream's waits for that stream forgets it."""
        self.device.alive()
        if (self.name, event.of) not in self.device.forgets:
            with self.device.lock:
                self.queue.append(event)

    def synchronize(self) -> None:
        """Run the device until this queue is empty."""
        self.device.alive()
        while self.queue:
            with self.device.lock:  # others may let it run too
                hangs = bool(self.queue) and not self.device.step(0)
            if hangs:
                msg = f"stream {self.name} waits for an event that nobody will fire"
                raise RuntimeError(msg)

    def run_head(self) -> None:
        """Run the head, which is ready."""
        head = self.queue.popleft()
        if not isinstance(head, FakeEvent):
            head()


class FakeDevice:
    """Implements `kvpipe.transfer.device.Device`. `compute` is the caller's stream.

    `forgets` has (waiting stream, stream waited for): waits that are dropped, as if the engine had forgotten them. With
    `interpreted` launches run the real kernel in Triton's interpreter; without, what it should do. `streams_max`: so
    many streams there are, the caller's among them, which are given out again and again; 0: a new one each time.
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
        self.streams = [self.compute]
        self.lost: set[str] = set()  # streams, by how their names begin, that cannot record events any more
        self.copies_until_error = -1  # how many copies and launches may be queued before one raises; -1: all
        self.errors_on = ""  # of the streams whose names begin so
        self.pins_max = pins_max
        self.pinned: dict[int, int] = {}
        self.pin_log: list[tuple[int, int]] = []
        self.pinned_memory: set[int] = set()  # addresses
        self.interpreted = interpreted
        self.no_kernels = ""
        self.memory_max = 1 << 30
        self.moved: Counter[str] = Counter()  # operations by kind
        self.deepest = 0  # the most layers of a launch
        self.dead = ""  # the error that every call raises
        self.waits = 0  # of the host, for events
        self.near: frozenset[int] = frozenset()
        self._streams_max, self._given = streams_max, 0

    def alive(self) -> None:
        """Raise the sticky error, if there is one."""
        if self.dead:
            raise RuntimeError(self.dead)

    def stream(self, name: str) -> FakeStream:
        """Make a stream, or give one out again."""
        self._given += 1
        if self._streams_max and self._given >= self._streams_max:
            return self.streams[self._given % self._streams_max]
        made = FakeStream(self, name)
        self.streams.append(made)
        return made

    def current_stream(self) -> FakeStream:
        """The caller's stream."""
        return self.compute

    def enter_thread(self) -> None:
        """Nothing to do."""

    def cpus(self) -> frozenset[int]:
        """Return the CPUs that the test has set."""
        return self.near

    def copy(self, stream: FakeStream, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Queue copies. One out of memory that was allocated pinned is small, and is queued as a whole."""
        for to, source in pairs:
            if source.untyped_storage().data_ptr() in self.pinned_memory:
                stream.put(_copy(to, source))
            else:
                self.moved["copy"] += 1
                self._queue_copy(stream, to.view(-1), source.view(-1))

    def copy_batch(self, stream: FakeStream, copies: CopyBatch) -> None:
        """Queue copies between addresses."""
        self.moved["batch"] += 1
        for to, source, size in zip(*(column.tolist() for column in copies), strict=True):
            self._queue_copy(stream, _bytes_at(to, size), _bytes_at(source, size))

    def _queue_copy(self, stream: FakeStream, to: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy in two halves, so that other streams can come between."""
        self._may_fail(stream)
        middle = len(to) // 2
        for half in (slice(0, middle), slice(middle, None)):
            stream.put(_copy(to[half], source[half]))

    def _may_fail(self, stream: FakeStream) -> None:
        if not stream.name.startswith(self.errors_on):
            return
        if self.copies_until_error == 0:
            self.copies_until_error = -1
            msg = "CUDA error: invalid argument"
            raise RuntimeError(msg)
        self.copies_until_error -= self.copies_until_error > 0

    def upload(self, stream: FakeStream, array: npt.NDArray[Any]) -> torch.Tensor:
        """Queue a copy to a tensor whose bytes are nonsense until then."""
        self.moved["upload"] += 1
        made, wanted = torch.full(array.shape, -1, dtype=torch.from_numpy(array).dtype), torch.tensor(array)
        stream.put(_copy(made, wanted))
        return made

    def launch(self, stream: FakeStream, launch: Launch) -> None:
        """Queue the kernel, in two halves of its rows unless it is interpreted."""
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
        return torch.full((size,), 0xEE, dtype=torch.uint8)

    def allocate_pinned(self, size: int) -> torch.Tensor:
        """Return memory that holds nonsense."""
        made = self.allocate(size)
        self.pinned_memory.add(made.untyped_storage().data_ptr())
        return made

    def has_kernels(self) -> str:
        """Return why the device has no kernels, as the test has set it; nothing: it has."""
        return self.no_kernels

    def reads_pool(self) -> bool:
        """It does."""
        return True

    def register(self, address: int, size: int) -> None:
        """Pin, as far as `pins_max` goes."""
        self.alive()
        if len(self.pinned) >= self.pins_max:
            msg = "CUDA error 2"
            raise TransferError(msg)
        self.pinned[address] = size
        self.pin_log.append((address, size))

    def unregister(self, address: int) -> None:
        """Unpin; what was not pinned is an error."""
        self.alive()
        del self.pinned[address]

    def step(self, choice: int) -> bool:
        """Run the head of one of the streams that can run. Returns False when none can."""
        with self.lock:
            ready = [stream for stream in self.streams if stream.ready]
            if ready:
                ready[choice % len(ready)].run_head()
            return bool(ready)

    def drain(self) -> None:
        """Run everything that is queued by now."""
        with self.lock:
            while self.step(0):
                pass
            assert not any(stream.queue for stream in self.streams), "the streams wait for each other"


INTERPRETED = InterpretedFunction(copy_pages.fn)
"""The kernel, run by Triton's interpreter: the addresses are those of host memory."""


def _bytes_at(address: int, size: int) -> torch.Tensor:
    """Return the bytes at an address of this process."""
    return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)))


def _move_rows(launch: Launch, rows: Iterable[int]) -> None:
    """What the kernel is to do, page by page, written down without regard to speed."""
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


def _copy(to: torch.Tensor, source: torch.Tensor) -> Work:
    def work() -> None:
        to.copy_(source)

    return work


def landed_of(ticket: Ticket) -> FakeEvent:
    """Return the event that fires when a queued ticket's bytes have landed."""
    assert isinstance(ticket.mark, OrderingPoint)
    assert isinstance(ticket.mark.landed, FakeEvent)
    return ticket.mark.landed
