"""The CUDA engine: copies beside the forward, ordered against it by events on the device.

The host never waits for a copy: `guard_read` and `fence` make the compute stream wait, and a completion thread asks
the events whether they have fired. So a ticket may be confirmed by its readers before it is known to have landed.

Layers are queued in *waves*, of so many bytes that queueing them costs the host less than the bus takes to move them.
Of a load that readers wait for layer by layer, two waves are queued ahead of the reader: the hooks share the work.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import structlog
import torch

from kvpipe.errors import UnsupportedError
from kvpipe.geometry import Geometry
from kvpipe.plan import Kind
from kvpipe.tiers.memory import HostPool
from kvpipe.transfer import calibrate
from kvpipe.transfer.base import NO_JOBS, CopyPlan, Direction, Ticket
from kvpipe.transfer.device import CudaDevice, Device, Event
from kvpipe.transfer.movers import Lane, Layout, Mover, Prepared
from kvpipe.transfer.pages import PageView

log = structlog.get_logger("kvpipe.transfer")

POLL_S_MIN: Final = 0.000_05
POLL_S_MAX: Final = 0.000_2
PIN_PIECE_BYTES_MAX: Final = 256 << 20  # about 25 ms in the driver
SHUTDOWN_S_MAX: Final = 30.0
STAGING_BYTES_MAX: Final = 64 << 20
STAGING_ALIGN_BYTES: Final = 64
WAVE_BYTES: Final = 8 << 20  # 160 us on a bus of 50 GB/s; queueing a wave takes a fraction of that
WAVES_AHEAD: Final = 2


class _Flight(NamedTuple):
    """A wave on its way. `last`: of its plan."""

    tickets: tuple[Ticket, ...]
    plan: CopyPlan
    event: Event | None
    failed: frozenset[int]
    last: bool = False


class _Queue:
    """One direction's submissions of one plan that have not been queued on the device yet."""

    __slots__ = ("bytes", "lazy", "plan", "sizes", "submitted", "tickets", "waves")

    def __init__(self, plan: CopyPlan | None = None) -> None:
        """`lazy`: each layer has a reader who will ask for it."""
        self.plan = plan
        self.lazy = plan is not None and any(job.kind == Kind.LOAD_SYNC for job in plan.jobs)
        self.tickets: deque[Ticket] = deque()
        self.sizes: deque[int] = deque()
        self.bytes = self.submitted = self.waves = 0

    def put(self, ticket: Ticket, size: int) -> None:
        ticket.mark = self
        self.tickets.append(ticket)
        self.sizes.append(size)
        self.bytes += size
        self.submitted += 1

    def take(self, bytes_min: int) -> list[Ticket]:
        """Take a wave: tickets until they have `bytes_min` bytes, or all."""
        taken: list[Ticket] = []
        size = 0
        while self.tickets and (not taken or size < bytes_min):
            taken.append(self.tickets.popleft())
            size += self.sizes.popleft()
        self.bytes -= size
        return taken

    def drop(self, ticket: Ticket) -> None:
        ticket.mark = None
        place = self.tickets.index(ticket)
        del self.tickets[place]
        self.bytes -= self.sizes[place]
        del self.sizes[place]


class Mark(NamedTuple):
    """What a queued ticket can be ordered by. The events are None where not even an event could be recorded."""

    landed: Event | None
    read: Event | None
    wave: int
    queue: _Queue


class CudaEngine:
    """Implements `TransferEngine` for caches in the memory of a CUDA device."""

    piece_bytes = PIN_PIECE_BYTES_MAX

    def __init__(
        self,
        device: Device | None = None,
        *,
        mover: Mover | None = None,
        staging_bytes_max: int = STAGING_BYTES_MAX,
        wave_bytes: int = WAVE_BYTES,
        calibrate_s_max: float = calibrate.SECONDS_MAX,
        told: Callable[[Direction, Mover, calibrate.Cost], object] = lambda *_: None,
    ) -> None:
        """`device`: None for the one that holds the caches. `mover`: None for the quickest for each plan.

        `told` hears what each mover was measured to cost.
        """
        self._given, self._pinned_mover = device, mover
        self._staging_bytes_max, self._wave_bytes, self._calibrate_s_max = (
            staging_bytes_max,
            wave_bytes,
            calibrate_s_max,
        )
        self._told = told
        self._queues = {d: _Queue() for d in Direction}
        self._queueing = threading.RLock()  # guards _queues
        self._flights: dict[Direction, deque[_Flight]] = {d: deque() for d in Direction}
        self._news = threading.Condition()  # guards _flights and _closed
        self._closed = False
        self._pinned: list[int] = []
        self.pinned_slots = 0
        self._unmeasured = Mover.DMA
        self._pins = True  # until it fails
        self._thread: threading.Thread | None = None
        self.costs: calibrate.Costs = {direction: {} for direction in Direction}

    def attach(self, views: Sequence[PageView], geometry: Geometry, pool: HostPool) -> None:
        """See `TransferEngine.attach`. The first piece of the pool is pinned, to measure in.

        Raises:
            UnsupportedError: the mover that was asked for cannot be used here.

        """
        self._layout, self._pool = Layout(views, geometry, pool), pool
        self._device: Device = self._given or CudaDevice(views[0].tensor.device)
        self._staging, no_kernels = self._allocate_staging()
        each = None if self._staging is None else self._staging.view(len(Direction), -1)
        self.lanes = {d: Lane(self._device, d, self._layout, None if each is None else each[d]) for d in Direction}
        self._pin(pool.base, min(max(1, self.piece_bytes // pool.slot_bytes), pool.slots) * pool.slot_bytes)
        if self.pinned_slots:
            self._calibrate(no_kernels)
        self._thread = threading.Thread(target=self._complete, name="kvpipe-landed", daemon=True)
        self._thread.start()

    def claim(self, address: int, size: int) -> None:
        """See `TransferEngine.claim`. Pins it; pieces come in the order of their slots."""
        if address not in self._pinned and not self._closed and self._pins:
            self._enter_thread()
            self._pin(address, size)

    # ---- vLLM's thread -------------------------------------------------------------------------------------------

    def prepare(self, plan: CopyPlan) -> None:
        """See `TransferEngine.prepare`."""
        try:
            plan.mark = self._prepare(plan)
        except Exception:  # `submit` tries again, and fails the plan if it must
            log.exception("prepare_failed")

    def submit(self, plan: CopyPlan, ticket: Ticket) -> None:
        """See `TransferEngine.submit`."""
        with self._queueing:
            if self._closed:
                ticket.complete(_all(plan))
                return
            queue = self._queues[plan.direction]
            if queue.plan is not plan:
                self._launch_all(queue)
                queue = self._queues[plan.direction] = _Queue(plan)
            known = ticket.layer < len(self._layout.views)
            queue.put(ticket, self._layout.layer_bytes(plan, ticket.layer) if known else self._wave_bytes)
            full = queue.bytes >= self._wave_bytes or queue.submitted == len(self._layout.views)
            if full and not (queue.lazy and queue.waves >= WAVES_AHEAD):
                self._launch(queue)

    def guard_read(self, ticket: Ticket, timeout_s: float) -> bool:  # noqa: ARG002  (the device waits, not the host)
        """See `TransferEngine.guard_read`."""
        mark = self.reached(ticket)
        return ticket.over or self._order(ticket, mark and mark.landed)

    def reached(self, ticket: Ticket) -> Mark | None:
        """See `TransferEngine.reached`. When the reader is in the newest wave, the next is queued."""
        with self._queueing:
            mark = self._reach(ticket)
            if mark is not None and mark.wave == mark.queue.waves - 1:
                self._launch(mark.queue)
        return mark

    def fence(self, ticket: Ticket, timeout_s: float) -> bool:  # noqa: ARG002
        """See `TransferEngine.fence`. All of a plan is read in order, so its last event stands for all."""
        with self._queueing:
            mark = self._reach(ticket)
        return self._order(ticket, mark and mark.read)

    def abandon(self, ticket: Ticket) -> bool:
        """See `TransferEngine.abandon`. What is queued on a stream cannot be taken back."""
        with self._queueing:
            queue = ticket.mark
            if isinstance(queue, _Queue) and queue.plan is not None:
                queue.drop(ticket)
                self._take_off(queue.plan.direction, _Flight((ticket,), queue.plan, None, _all(queue.plan)))
                return True
        try:
            landed = ticket.mark.landed if isinstance(ticket.mark, Mark) else None
            return ticket.over or (landed is not None and landed.query())
        except Exception:
            log.exception("abandon_failed", layer=ticket.layer)
            return False

    def shutdown(self) -> None:
        """See `TransferEngine.shutdown`. Bounded: a device that hangs fails what is left."""
        with self._queueing:
            for queue in self._queues.values():
                self._launch_all(queue)
            with self._news:
                self._closed = True
                self._news.notify()
        if self._thread is not None:
            self._thread.join(SHUTDOWN_S_MAX)
        drained = self._thread is None or not self._thread.is_alive()
        for direction in Direction:
            for flight in tuple(self._flights[direction]):
                if self._land(direction, flight):
                    self._tell(flight, _all(flight.plan))
        while drained and self._pinned:  # what a hanging device may still write to stays pinned
            try:
                self._device.unregister(self._pinned.pop())
            except Exception:
                log.exception("unpinning_failed")

    # ---- queueing -------------------------------------------------------------------------------------------------

    def _prepare(self, plan: CopyPlan) -> Prepared:
        # A load must not overwrite what compute still reads: it comes after all that is queued when its step begins.
        # What the step itself computes has nothing to do with the blocks of its loads.
        start = self._device.current_stream().record_event() if plan.direction is Direction.LOAD else None
        mover = self._choose(plan)
        plan.mover = mover.value
        return self.lanes[plan.direction].prepare(plan, mover, start)

    def _choose(self, plan: CopyPlan) -> Mover:
        if any(len(rows) and rows[:, 0].max() >= self.pinned_slots for rows in plan.rows):
            return Mover.PAGEABLE
        if self._pinned_mover is not None:
            return self._pinned_mover
        costs = self.costs[plan.direction]
        return calibrate.choose(costs, self._layout, plan) if costs else self._unmeasured

    def _reach(self, ticket: Ticket) -> Mark | None:
        """Launch waves until `ticket` is in one of them."""
        while isinstance(ticket.mark, _Queue):
            self._launch(ticket.mark)
        return ticket.mark if isinstance(ticket.mark, Mark) else None

    def _launch_all(self, queue: _Queue) -> None:
        while queue.tickets:
            self._launch(queue)

    def _launch(self, queue: _Queue) -> None:
        """Queue one wave on the device."""
        plan, tickets = queue.plan, queue.take(self._wave_bytes)
        if plan is None or not tickets:
            return
        layers, failed = [ticket.layer for ticket in tickets], NO_JOBS
        lane = self.lanes[plan.direction]
        landed = read = None
        try:
            prepared = plan.mark if isinstance(plan.mark, Prepared) else self._prepare(plan)
            plan.mark = prepared
            start = prepared.start or self._device.current_stream().record_event()
            landed, read = lane.queue(plan, prepared, layers, start)
        except Exception:
            log.exception("copy_failed", layers=layers)
            failed = _all(plan)
            try:
                landed = read = lane.end()  # some of its copies may be queued
            except Exception:
                log.exception("device_lost", layers=layers)
        begun_ns = time.monotonic_ns()
        for ticket in tickets:
            ticket.begun_ns = begun_ns
            ticket.mark, ticket.failed = Mark(landed, read, queue.waves, queue), failed
        queue.waves += 1
        last = queue.submitted == len(self._layout.views) and not queue.tickets
        flight = _Flight(tuple(tickets), plan, landed, failed, last)
        if not self._take_off(plan.direction, flight):
            self._tell(flight, _all(plan))

    def _order(self, ticket: Ticket, event: Event | None) -> bool:
        """Make the current stream wait for `event`."""
        if event is None:
            return ticket.done
        try:
            self._device.current_stream().wait_event(event)
        except Exception:
            log.exception("wait_failed", layer=ticket.layer)
            return False
        return True

    # ---- the completion thread ------------------------------------------------------------------------------------

    def _enter_thread(self) -> None:
        try:
            self._device.enter_thread()
        except Exception as error:  # noqa: BLE001  (without it all is well but for a graph that is being captured)
            log.warning("thread_not_entered", why=repr(error))

    def _complete(self) -> None:
        self._enter_thread()
        poll_s = POLL_S_MIN
        while True:
            with self._news:
                while not self._closed and not any(self._flights.values()):
                    self._news.wait()
                closed = self._closed
            if closed:
                for lane in self.lanes.values():
                    try:
                        lane.synchronize()
                    except Exception as error:  # noqa: BLE001  (the events say which copies it concerns)
                        log.warning("synchronize_failed", why=repr(error))
            # Saves are asked first and loads are told first: a save that has fired rests on loads that had fired by
            # then, so news of a failed load never comes after news of a save computed from it.
            saves = list(self._fired(Direction.SAVE))
            fired = [*self._fired(Direction.LOAD), *saves]
            for flight, failed in fired:
                self._tell(flight, failed)
            if closed and not any(self._flights.values()):
                return
            poll_s = POLL_S_MIN if fired else min(2 * poll_s, POLL_S_MAX)
            if not fired:
                time.sleep(poll_s)

    def _fired(self, direction: Direction) -> Iterator[tuple[_Flight, frozenset[int]]]:
        while flights := self._flights[direction]:
            flight = flights[0]
            failed = flight.failed
            try:
                if flight.event is not None and not flight.event.query():
                    return
            except Exception:
                log.exception("copy_failed", layers=[ticket.layer for ticket in flight.tickets])
                failed = _all(flight.plan)
            if self._land(direction, flight):
                yield flight, failed

    def _take_off(self, direction: Direction, flight: _Flight) -> bool:
        with self._news:
            if not self._closed:
                self._flights[direction].append(flight)
                self._news.notify()
            return not self._closed

    def _land(self, direction: Direction, flight: _Flight) -> bool:
        """Whoever gets True, the completion thread or `shutdown`, completes the tickets."""
        with self._news:
            flights = self._flights[direction]
            mine = bool(flights) and flights[0] is flight
            if mine:
                flights.popleft()
            return mine

    @staticmethod
    def _tell(flight: _Flight, failed: frozenset[int]) -> None:
        for ticket in flight.tickets:
            try:
                ticket.complete(failed)
            except Exception:
                log.exception("sink_failed", layer=ticket.layer)
        if flight.last:
            flight.plan.mark = None  # device memory, which should not wait for the garbage collector

    # ---- pinning, staging, calibration ----------------------------------------------------------------------------

    def _pin(self, address: int, size: int) -> None:
        """Pin the next piece of the pool. A copy must not cross from one pinned piece into the next: whole slots."""
        try:
            self._device.register(address, size)
        except Exception as e:  # noqa: BLE001  (whatever it is, copies work without)
            self._pins = False
            log.warning(
                "pool_not_pinned",
                why=str(e),
                pinned_pieces=len(self._pinned),
                effect="copies to and from the rest are slower and block the host",
                remedy="set a smaller pool_bytes_max or raise the limit on locked memory",
            )
            return
        self._pinned.append(address)
        self.pinned_slots += size // self._pool.slot_bytes

    def _allocate_staging(self) -> tuple[torch.Tensor | None, str]:
        """Return device memory for the bays of both directions, or why kernels cannot be used."""
        why = self._device.has_kernels()
        if not why and not self._layout.align:
            why = "addresses or sizes of the KV cache are no multiples of 8 bytes"
        size = self._staging_bytes_max // STAGING_ALIGN_BYTES * STAGING_ALIGN_BYTES
        if why or not size:
            return None, why
        try:
            return self._device.allocate(size), ""
        except Exception as error:  # noqa: BLE001  (out of memory: there are other ways to copy)
            log.warning("no_staging", why=str(error), remedy="set a smaller staging_bytes_max")
            return None, ""

    def _calibrate(self, no_kernels: str) -> None:
        page = max(view.page_bytes for view in self._layout.views)
        open_ways = {
            Mover.DMA: "",
            Mover.STAGED: no_kernels or ("" if page <= self.lanes[Direction.SAVE].bay_bytes else "no page fits a bay"),
            Mover.DIRECT: no_kernels or ("" if self._device.reads_pool() else "kernels cannot read host memory here"),
        }
        asked = self._pinned_mover
        movers = [mover for mover, why in open_ways.items() if not why and asked in {None, mover}]
        if self._calibrate_s_max and movers:
            try:
                self.costs = calibrate.measure(
                    self._device, self.lanes, self._layout, movers, self.pinned_slots, self._calibrate_s_max
                )
            except Exception as error:  # noqa: BLE001  (no memory to measure in, say: copies have a way all the same)
                log.warning("not_calibrated", why=repr(error)[:400], effect="copies go by DMA")
                return
            for direction, costs in self.costs.items():
                for mover, cost in costs.items():
                    self._told(direction, mover, cost)
            movers = [mover for mover in movers if mover in self.costs[Direction.SAVE]]
            self._unmeasured = Mover.PAGEABLE  # not even DMA has passed its check
        if asked is not None and asked not in movers and asked is not Mover.PAGEABLE:
            why = open_ways[asked] or "it failed its check"
            msg = f"kvpipe: mover={asked.value!r} cannot be used here ({why}); set mover to 'auto' or 'dma'"
            raise UnsupportedError(msg)


def _all(plan: CopyPlan) -> frozenset[int]:
    return frozenset(job.id for job in plan.jobs)
