"""A CUDA device that is slow on purpose: streams run only when the test lets them, in whatever order it likes.

A stream is a queue of copies, computations, event records and event waits. `step` runs the head of one stream; a
stream whose head waits for an event that has not fired cannot run. Whatever CUDA may legally do, some sequence of
steps does too, so a missing wait shows as wrong bytes under some sequence.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch

from kvpipe.errors import TransferError

Work = Callable[[], None]


class FakeEvent:
    """Fires when its stream gets there."""

    def __init__(self) -> None:
        self.fired = self.broken = False

    def query(self) -> bool:
        """Whether it has fired. A broken event raises then, as CUDA does after an asynchronous error."""
        if self.fired and self.broken:
            msg = "CUDA error: an illegal memory access was encountered"
            raise RuntimeError(msg)
        return self.fired


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
        with self.device.lock:
            self.queue.append(work)

    def record_event(self) -> FakeEvent:
        """See torch.cuda.Stream."""
        if self.name in self.device.lost:
            msg = "CUDA error: unspecified launch failure"
            raise RuntimeError(msg)
        event = FakeEvent()

        def fire() -> None:
            event.fired = True

        self.put(fire)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        """See torch.cuda.Stream. A device made to forget the waits of this stream forgets it."""
        if self.name not in self.device.forgets:
            with self.device.lock:
                self.queue.append(event)

    def synchronize(self) -> None:
        """Run the device until this queue is empty."""
        while self.queue:
            if not self.device.step(0):
                msg = f"stream {self.name} waits for an event that nobody will fire"
                raise RuntimeError(msg)

    def run_head(self) -> None:
        """Run the head, which is ready."""
        head = self.queue.popleft()
        if not isinstance(head, FakeEvent):
            head()


class FakeDevice:
    """Implements `kvpipe.transfer.cuda.Device`. `compute` is the caller's stream.

    `forgets` names the streams whose waits are dropped: what a missing ``wait_event`` in the engine would do.
    """

    def __init__(self, forgets: Iterable[str] = (), pins_max: int = 1 << 30) -> None:
        self.forgets = frozenset(forgets)
        self.lock = threading.RLock()
        self.compute = FakeStream(self, "compute")
        self.streams = [self.compute]
        self.lost: set[str] = set()  # streams that cannot record events any more
        self.copies_until_error = -1  # how many copies may be queued before one raises; -1: all
        self.pins_max = pins_max
        self.pinned: dict[int, int] = {}
        self.pin_log: list[tuple[int, int]] = []

    def stream(self) -> FakeStream:
        """The engine makes them in the order of `Direction`."""
        made = FakeStream(self, ("save", "load")[len(self.streams) - 1])
        self.streams.append(made)
        return made

    def current_stream(self) -> FakeStream:
        """The caller's stream."""
        return self.compute

    def copy(self, stream: FakeStream, pairs: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Queue copies, each in two halves so that other streams can come between."""
        for to, source in pairs:
            if self.copies_until_error == 0:
                self.copies_until_error = -1
                msg = "CUDA error: invalid argument"
                raise RuntimeError(msg)
            self.copies_until_error -= self.copies_until_error > 0
            to_bytes, source_bytes = to.view(-1), source.view(-1)
            middle = len(to_bytes) // 2
            for half in (slice(0, middle), slice(middle, None)):
                stream.put(_copy(to_bytes[half], source_bytes[half]))

    def register(self, address: int, size: int) -> None:
        """Pin, as far as `pins_max` goes."""
        if len(self.pinned) >= self.pins_max:
            msg = "CUDA error 2"
            raise TransferError(msg)
        self.pinned[address] = size
        self.pin_log.append((address, size))

    def unregister(self, address: int) -> None:
        """Unpin; what was not pinned is an error."""
        del self.pinned[address]

    def step(self, choice: int) -> bool:
        """Run the head of one of the streams that can run. Returns False when none can."""
        with self.lock:
            ready = [stream for stream in self.streams if stream.ready]
            if ready:
                ready[choice % len(ready)].run_head()
            return bool(ready)

    def drain(self) -> None:
        """Run everything."""
        while self.step(0):
            pass
        assert not any(stream.queue for stream in self.streams), "the streams wait for each other"


def _copy(to: torch.Tensor, source: torch.Tensor) -> Work:
    def work() -> None:
        to.copy_(source)

    return work
