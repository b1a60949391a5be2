"""The CUDA engine: copies on one stream per direction, ordered against the forward by events on the device.

The host never waits for a copy: `guard_read` and `fence` make the compute stream wait, and a completion thread asks
the events whether they have fired. So a ticket may be confirmed by its readers before it is known to have landed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, Protocol

import structlog
import torch

from kvpipe.errors import TransferError
from kvpipe.geometry import Geometry
from kvpipe.tiers.memory import HostPool
from kvpipe.transfer.base import NO_JOBS, CopyPlan, Direction, Ticket
from kvpipe.transfer.pages import PageView

log = structlog.get_logger("kvpipe.transfer")

POLL_S_MIN: Final = 0.000_05
POLL_S_MAX: Final = 0.001
PIN_PIECE_BYTES_MAX: Final = 256 << 20  # about 25 ms in the driver
SHUTDOWN_S_MAX: Final = 30.0
_HOST_REGISTER_PORTABLE: Final = 1

Pair = tuple[torch.Tensor, torch.Tensor]


class Event(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Whether everything before it is done."""


class Stream(Protocol):
    """A queue of device work."""

    def record_event(self) -> Any:  # noqa: ANN401  (an `Event`: torch's stubs know only their own)
        """Mark the point after what was queued so far."""

    def wait_event(self, event: Any) -> None:  # noqa: ANN401
        """Hold back what is queued from now on until `event` has fired."""

    def synchronize(self) -> None:
        """Block the host until the queue is empty."""


class Device(Protocol):
    """The few things that the engine asks of CUDA."""

    def stream(self) -> Stream:
        """Make a stream."""

    def current_stream(self) -> Stream:
        """Return the stream on which the caller computes."""

    def copy(self, stream: Any, pairs: Iterator[Pair]) -> None:  # noqa: ANN401
        """Queue copies to each first from each second tensor."""

    def register(self, address: int, size: int) -> None:
        """Pin host memory. Raises `TransferError`."""

    def unregister(self, address: int) -> None:
        """Undo `register`. Raises `TransferError`."""


class CudaDevice:
    """`Device` over torch.cuda."""

    def __init__(self, device: torch.device) -> None:
        """`device` has an index: a new thread's current device is not the engine's."""
        self._device = device

    def stream(self) -> Stream:
        """See `Device.stream`."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def current_stream(self) -> Stream:
        """See `Device.current_stream`."""
        return torch.cuda.current_stream(self._device)

    def copy(self, stream: torch.cuda.Stream, pairs: Iterator[Pair]) -> None:
        """See `Device.copy`. Inference mode: vLLM's caches may be inference tensors, read-only outside of it."""
        with torch.inference_mode(), torch.cuda.stream(stream):
            for to, source in pairs:
                to.copy_(source, non_blocking=True)

    def register(self, address: int, size: int) -> None:
        """See `Device.register`."""
        with torch.cuda.device(self._device):
            cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            self._check(cudart.cudaHostRegister(address, size, _HOST_REGISTER_PORTABLE))

    def unregister(self, address: int) -> None:
        """See `Device.unregister`."""
        with torch.cuda.device(self._device):
            cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            self._check(cudart.cudaHostUnregister(address))

    @staticmethod
    def _check(code: Any) -> None:  # noqa: ANN401  (cudaError, which only CUDA builds have)
        if int(code) != 0:
            raise TransferError(f"CUDA error {int(code)}")


class _Flight(NamedTuple):
    ticket: Ticket
    plan: CopyPlan
    event: Event | None
    failed: frozenset[int]


class CudaEngine:
    """Implements `TransferEngine` for caches in the memory of a CUDA device."""

    def __init__(self, device: Device | None = None) -> None:
        """`device`: None for the one that holds the caches."""
        self._given = device
        self._flights: dict[Direction, deque[_Flight]] = {d: deque() for d in Direction}
        self._news = threading.Condition()  # guards _flights and _closed
        self._closed = False
        self._pinned: list[int] = []
        self._threads: tuple[threading.Thread, ...] = ()

    def attach(self, views: Sequence[PageView], geometry: Geometry, pool: HostPool) -> None:
        """See `TransferEngine.attach`. Pinning goes on in the background; until it is done, copies are slower."""
        self._views, self._geometry, self._pool = tuple(views), geometry, pool
        self._device: Device = self._given or CudaDevice(views[0].tensor.device)
        self._streams = {d: self._device.stream() for d in Direction}
        mains = {"kvpipe-landed": self._complete, "kvpipe-pin": self._pin}
        self._threads = tuple(threading.Thread(target=m, name=n, daemon=True) for n, m in mains.items())
        for thread in self._threads:
            thread.start()

    def submit(self, plan: CopyPlan, ticket: Ticket) -> None:
        """See `TransferEngine.submit`."""
        if self._closed:
            ticket.complete(_all(plan))
            return
        stream, event, failed = self._streams[plan.direction], None, NO_JOBS
        try:
            # a save reads what compute has written; a load must not overwrite what compute still reads
            stream.wait_event(self._device.current_stream().record_event())
            self._device.copy(stream, self._pairs(plan, ticket.layer))
        except Exception:
            log.exception("copy_failed", layer=ticket.layer)
            failed = _all(plan)
        try:
            event = stream.record_event()  # after a failure too: some of its copies may be queued
        except Exception:
            log.exception("device_lost", layer=ticket.layer)
            failed = _all(plan)
        ticket.mark, ticket.failed = event, failed
        if not self._take_off(plan.direction, _Flight(ticket, plan, event, failed)):
            ticket.complete(_all(plan))

    def guard_read(self, ticket: Ticket, timeout_s: float) -> bool:  # noqa: ARG002  (the device waits, not the host)
        """See `TransferEngine.guard_read`."""
        return self._order(ticket)

    def fence(self, ticket: Ticket, timeout_s: float) -> bool:  # noqa: ARG002
        """See `TransferEngine.fence`. A stream is a queue, so its last event stands for all."""
        return self._order(ticket)

    def abandon(self, ticket: Ticket) -> bool:
        """See `TransferEngine.abandon`. What is queued on a stream cannot be taken back."""
        try:
            return ticket.over or (ticket.mark is not None and ticket.mark.query())  # type: ignore[attr-defined]
        except Exception:
            log.exception("abandon_failed", layer=ticket.layer)
            return False

    def shutdown(self) -> None:
        """See `TransferEngine.shutdown`. Bounded: a device that hangs fails what is left."""
        with self._news:
            self._closed = True
            self._news.notify()
        for thread in self._threads:
            thread.join(SHUTDOWN_S_MAX)
        drained = not any(thread.is_alive() for thread in self._threads)
        for direction in Direction:
            for flight in tuple(self._flights[direction]):
                if self._land(direction, flight):
                    flight.ticket.complete(_all(flight.plan))
        while drained and self._pinned:  # what a hanging device may still write to stays pinned
            try:
                self._device.unregister(self._pinned.pop())
            except Exception:
                log.exception("unpinning_failed")

    def _order(self, ticket: Ticket) -> bool:
        """Make the current stream wait for the copy."""
        if ticket.mark is None:
            return ticket.done
        try:
            self._device.current_stream().wait_event(ticket.mark)
        except Exception:
            log.exception("wait_failed", layer=ticket.layer)
            return False
        return True

    def _pairs(self, plan: CopyPlan, layer: int) -> Iterator[Pair]:
        group, index = self._geometry.layers[layer]
        view, offset = self._views[layer], self._geometry.layer_offsets[group][index]
        for _, slot, page, block, pages in plan.run_list(group):
            start = offset + page * view.page_bytes
            host = self._pool.tensor[slot, start : start + pages * view.page_bytes].view(pages, view.page_bytes)
            paged = view.tensor[block : block + pages]
            to, source = (host, paged) if plan.direction is Direction.SAVE else (paged, host)
            if view.dense:
                yield to, source
            else:
                yield from zip(to, source, strict=True)

    # ---- the completion thread ------------------------------------------------------------------------------------

    def _complete(self) -> None:
        poll_s = POLL_S_MIN
        while True:
            with self._news:
                while not self._closed and not any(self._flights.values()):
                    self._news.wait()
                closed = self._closed
            if closed:
                for stream in self._streams.values():
                    with suppress(Exception):  # the events say what failed
                        stream.synchronize()
            # Saves are asked first and loads are told first: a save that has fired rests on loads that had fired by
            # then, so news of a failed load never comes after news of a save computed from it.
            saves = list(self._fired(Direction.SAVE))
            fired = [*self._fired(Direction.LOAD), *saves]
            for ticket, failed in fired:
                try:
                    ticket.complete(failed)
                except Exception:
                    log.exception("sink_failed", layer=ticket.layer)
            if closed and not any(self._flights.values()):
                return
            poll_s = POLL_S_MIN if fired else min(2 * poll_s, POLL_S_MAX)
            if not fired:
                time.sleep(poll_s)

    def _fired(self, direction: Direction) -> Iterator[tuple[Ticket, frozenset[int]]]:
        while flights := self._flights[direction]:
            flight = flights[0]
            ticket, plan, event, failed = flight
            try:
                if event is not None and not event.query():
                    return
            except Exception:
                log.exception("copy_failed", layer=ticket.layer)
                failed = _all(plan)
            if self._land(direction, flight):
                yield ticket, failed

    def _take_off(self, direction: Direction, flight: _Flight) -> bool:
        with self._news:
            if not self._closed:
                self._flights[direction].append(flight)
                self._news.notify()
            return not self._closed

    def _land(self, direction: Direction, flight: _Flight) -> bool:
        """Whoever gets True, the completion thread or `shutdown`, completes the ticket."""
        with self._news:
            flights = self._flights[direction]
            mine = bool(flights) and flights[0] is flight
            if mine:
                flights.popleft()
            return mine

    # ---- the pinning thread ---------------------------------------------------------------------------------------

    def _pin(self) -> None:
        for address, size in self._pool.pieces(PIN_PIECE_BYTES_MAX):
            if self._closed:
                return
            try:
                self._device.register(address, size)
            except Exception as e:  # noqa: BLE001  (whatever it is, copies work without)
                log.warning(
                    "pool_not_pinned",
                    why=str(e),
                    pinned_pieces=len(self._pinned),
                    effect="copies to and from the rest are slower and block the host",
                    remedy="set a smaller pool_bytes_max or raise the limit on locked memory",
                )
                return
            self._pinned.append(address)


def _all(plan: CopyPlan) -> frozenset[int]:
    return frozenset(job.id for job in plan.jobs)
