"""The CUDA engine: copies beside the forward, ordered against it by events on the device.

The host never waits for a copy: `guard_read` and `fence` make the compute stream wait, and a completion thread asks
the events whether they have fired. So a ticket may be confirmed by its readers before it is known to have landed.

Layers are queued in *waves*, of so many bytes that queueing them costs the host less than the bus takes to move them.
Of a load two waves are queued ahead: of the reader, if readers wait for it layer by layer, so that the hooks share the
work; of the bus, if nobody does (a *patient* load), by the completion thread. So a load with readers never waits for
more than two waves of those without.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import torch

from kvpipe.errors import TransferError, UnsupportedError
from kvpipe.geometry import Geometry
from kvpipe.messages import Kind
from kvpipe.trace.log import log
from kvpipe.transfer import calibrate
from kvpipe.transfer.base import NO_JOBS, CopyPlan, Direction, Ticket
from kvpipe.transfer.device import CudaDevice, Device, DeviceEvent
from kvpipe.transfer.movers import DirectionQueues, Layout, Mover, Prepared
from kvpipe.transfer.pages import PageView
from kvpipe.transfer.pinning import PIECE_BYTES_MAX, Pins, enter_thread
from kvpipe.transfer.pool import HostPool

POLL_US_MIN: Final = 50
POLL_S_MAX: Final = 0.000_2
SHUTDOWN_S_MAX: Final = 30.0
ABANDON_S_MAX: Final = 0.002  # per layer, on the loop that serves all tiers; queueing a wave takes less
STAGING_BYTES_MAX: Final = 64 << 20
STAGING_ALIGN_BYTES: Final = 64
WAVE_BYTES: Final = 8 << 20  # 160 us on a bus of 50 GB/s; queueing a wave takes a fraction of that
WAVES_AHEAD: Final = 2


class _Queue:
    """One plan's submissions that have not been queued on the device yet."""

    __slots__ = ("all", "bytes", "lazy", "patient", "plan", "prepared", "sizes", "submitted", "tickets", "waves")

    def __init__(self, plan: CopyPlan) -> None:
        """`lazy`: each layer has a reader who will ask for it. `all`: its jobs.

        `patient`: nobody waits for it, and the completion thread may queue it: its copies do not block.
        """
        self.plan = plan
        self.prepared = plan.mark if isinstance(plan.mark, Prepared) else None
        plan.mark = None
        self.all = frozenset(job.id for job in plan.jobs)
        self.lazy = any(job.kind == Kind.LOAD_SYNC for job in plan.jobs)
        blocks = self.prepared is not None and self.prepared.mover is Mover.PAGEABLE
        self.patient = plan.direction is Direction.LOAD and not self.lazy and not blocks
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


class _WaveInFlight(NamedTuple):
    """A wave on its way. `last`: of its plan."""

    tickets: tuple[Ticket, ...]
    queue: _Queue
    event: DeviceEvent | None
    failed: frozenset[int]
    last: bool = False


class OrderingPoint(NamedTuple):
    """What a queued ticket can be ordered by. The events are None where not even an event could be recorded."""

    landed: DeviceEvent | None
    read: DeviceEvent | None
    wave: int
    queue: _Queue


class CudaEngine:
    """Implements `TransferEngine` for caches in the memory of a CUDA device."""

    piece_bytes = PIECE_BYTES_MAX

    def __init__(
        self,
        device: Device | None = None,
        *,
        mover: Mover | None = None,
        staging_bytes_max: int = STAGING_BYTES_MAX,
        wave_bytes: int = WAVE_BYTES,
        calibrate_s_max: float = calibrate.SECONDS_MAX,
        poll_us_min: int = POLL_US_MIN,
        on_measured: Callable[[Direction, Mover, calibrate.Cost], object] = lambda *_: None,
    ) -> None:
        """`device`: None for the one that holds the caches. `mover`: None for the quickest for each plan.

        `poll_us_min`: how long the completion thread pauses between two questions, at least; 0: it does not ask, but
        sleeps in the driver until an event has fired, in a thread per direction. `on_measured` is called with the
        measured cost of each mover.
        """
        self._given, self._pinned_mover = device, mover
        self._staging_bytes_max, self._wave_bytes = staging_bytes_max, wave_bytes
        self._calibrate_s_max = calibrate_s_max
        self._poll_s_min, self._on_measured = poll_us_min / 1e6, on_measured
        self._newest: dict[Direction, _Queue] = {}
        self._patient: deque[_Queue] = deque()  # queues with something left, oldest first
        self._queueing = threading.RLock()  # guards _newest and _patient
        self._flights: dict[Direction, deque[_WaveInFlight]] = {d: deque() for d in Direction}
        self._news = threading.Condition()  # guards _flights and _closed
        self._looking = threading.Lock()  # whoever has it notifies
        self._closed = False
        self._lost = False  # the context is dead: nothing is asked of the device any more
        self._unmeasured = Mover.DMA
        self._threads: list[threading.Thread] = []
        self.costs: calibrate.Costs = {direction: {} for direction in Direction}

    def attach(self, views: Sequence[PageView], geometry: Geometry, pool: HostPool) -> None:
        """See `TransferEngine.attach`. The first piece of the pool is pinned, to measure in.

        Raises:
            UnsupportedError: the mover that was asked for cannot be used here.
            TransferError: the device gives no streams.

        """
        self._layout, self._pool = Layout(views, geometry, pool), pool
        self._device: Device = self._given or CudaDevice(views[0].tensor.device)
        self._staging, no_kernels = self._allocate_staging()
        each = None if self._staging is None else self._staging.view(len(Direction), -1)
        self.lanes = {
            d: DirectionQueues(self._device, d, self._layout, None if each is None else each[d]) for d in Direction
        }
        self._hold_tables(no_kernels)
        self._pins = Pins(self._device, pool)
        atexit.register(self.shutdown)  # a process must not end while the driver pins memory for one of its threads
        self._pins.begin(self.piece_bytes)
        self._calibrate(no_kernels)
        watched = [tuple(Direction)] if self._poll_s_min else [(d,) for d in Direction]
        for directions in watched:
            name = "-".join(("kvpipe-landed", *(d.name.lower() for d in directions if len(watched) > 1)))
            thread = threading.Thread(target=self._complete, args=(directions,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def claim(self, address: int, size: int) -> bool:
        """See `TransferEngine.claim`. Pins it."""
        return self._pins.claim(address, size)

    @property
    def pinned_slots(self) -> int:
        """The number of slots that are pinned, from the first on."""
        return self._pins.slots

    # ---- vLLM's thread -------------------------------------------------------------------------------------------

    def prepare(self, plan: CopyPlan) -> None:
        """See `TransferEngine.prepare`."""
        if not self._lost:
            try:
                plan.mark = self._prepare(plan)
            except Exception as error:  # noqa: BLE001  (logged; `submit` tries again, and fails the plan if it must)
                self._trouble(plan.direction, "prepare_failed", error)

    def submit(self, plan: CopyPlan, ticket: Ticket) -> None:
        """See `TransferEngine.submit`."""
        with self._queueing:
            if self._closed:
                ticket.complete(frozenset(job.id for job in plan.jobs))
                return
            queue = self._newest.get(plan.direction)
            if queue is None or queue.plan is not plan or queue.submitted == len(self._layout.views):
                queue = self._begin(plan)
            known = ticket.layer < len(self._layout.views)
            queue.put(ticket, self._layout.layer_bytes(plan, ticket.layer) if known else self._wave_bytes)
            if queue.patient:
                self._go_on()
            elif self._is_full(queue) and not (queue.lazy and queue.waves >= WAVES_AHEAD):
                self._launch(queue)

    def guard_read(self, ticket: Ticket, timeout_s: float) -> bool:  # noqa: ARG002  (the device waits, not the host)
        """See `TransferEngine.guard_read`."""
        mark = self.reached(ticket)
        return ticket.over or self._order(ticket, mark and mark.landed)

    def reached(self, ticket: Ticket) -> OrderingPoint | None:
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
        """See `TransferEngine.abandon`. What is queued on a stream cannot be taken back.

        On any thread: nothing is asked of the device, so a capture is not disturbed, and a copy that blocks the thread
        that queues is not awaited. What is held back behind it is not given up yet.
        """
        if isinstance(ticket.mark, _Queue) and self._queueing.acquire(timeout=ABANDON_S_MAX):
            try:
                queue = ticket.mark
                if isinstance(queue, _Queue):
                    queue.drop(ticket)
                    ticket.withdraw()
                    self._take_off(_WaveInFlight((ticket,), queue, None, queue.all))
                    return True
            finally:
                self._queueing.release()
        return ticket.over

    def shutdown(self) -> None:
        """See `TransferEngine.shutdown`. Bounded: a device that hangs fails what is left."""
        atexit.unregister(self.shutdown)
        deadline = time.monotonic() + SHUTDOWN_S_MAX
        mine = self._queueing.acquire(timeout=SHUTDOWN_S_MAX)
        try:
            if mine:
                self._launch_rest()
            else:
                self._lost = True
                log.error("device_hangs", effect="what is under way fails")
            with self._news:
                self._closed = True
                self._news.notify_all()
        finally:
            if mine:
                self._queueing.release()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        drained = not any(thread.is_alive() for thread in self._threads)
        for direction in Direction:
            for flight in tuple(self._flights[direction]):
                if self._land(direction, flight):
                    self._notify(flight, flight.queue.all)
        self._pins.end(unpin=drained and not self._lost)  # what a hanging device may still write to stays pinned

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
        ways = self.costs[plan.direction]
        return calibrate.choose(ways, self._layout, plan) if ways else self._unmeasured

    def _begin(self, plan: CopyPlan) -> _Queue:
        """Open a queue for `plan`. The one before it in its direction gets no more."""
        if not isinstance(plan.mark, Prepared):
            self.prepare(plan)  # now, on the thread that computes
        before = self._newest.get(plan.direction)
        if before is not None and not before.patient:
            self._launch_all(before)
        queue = self._newest[plan.direction] = _Queue(plan)
        if queue.patient:
            self._patient.append(queue)
        return queue

    def _is_full(self, queue: _Queue) -> bool:
        """Whether a wave need not wait for more layers."""
        no_more = queue.submitted == len(self._layout.views) or queue is not self._newest[queue.plan.direction]
        return queue.bytes >= self._wave_bytes or no_more

    def _go_on(self) -> None:
        """Have two waves of patient loads on their way. Holds `_queueing`."""
        while self._patient and self._is_full(queue := self._patient[0]):
            if queue.tickets:
                with self._news:
                    ahead = sum(flight.queue.patient for flight in self._flights[Direction.LOAD])
                if ahead >= WAVES_AHEAD:
                    return
                self._launch(queue)
            elif queue is self._newest[Direction.LOAD] and queue.submitted < len(self._layout.views):
                return
            else:
                self._patient.popleft()

    def _reach(self, ticket: Ticket) -> OrderingPoint | None:
        """Launch waves until `ticket` is in one of them."""
        while isinstance(ticket.mark, _Queue):
            self._launch(ticket.mark)
        return ticket.mark if isinstance(ticket.mark, OrderingPoint) else None

    def _launch_all(self, queue: _Queue) -> None:
        while queue.tickets:
            self._launch(queue)

    def _launch(self, queue: _Queue) -> None:
        """Queue one wave on the device."""
        plan, tickets = queue.plan, queue.take(self._wave_bytes)
        if not tickets:
            return
        landed, read, failed = None, None, queue.all
        if not self._lost:
            try:
                if queue.prepared is None:
                    raise TransferError("its plan could not be prepared")  # noqa: TRY301
                start = queue.prepared.start or self._device.current_stream().record_event()
                layers = [ticket.layer for ticket in tickets]
                landed, read = self.lanes[plan.direction].queue(plan, queue.prepared, layers, start)
                failed = NO_JOBS
            except Exception as error:  # noqa: BLE001  (logged)
                landed = read = self._trouble(plan.direction, "copy_failed", error, tickets)
        begun_ns = time.monotonic_ns()
        for ticket in tickets:
            ticket.begun_ns = begun_ns
            ticket.mark, ticket.failed = OrderingPoint(landed, read, queue.waves, queue), failed
        queue.waves += 1
        last = queue.submitted == len(self._layout.views) and not queue.tickets
        flight = _WaveInFlight(tuple(tickets), queue, landed, failed, last)
        if not self._take_off(flight):
            self._notify(flight, queue.all)

    def _launch_rest(self) -> None:
        """Leave nothing held back. Holds `_queueing`."""
        for queue in (*self._patient, *self._newest.values()):
            self._launch_all(queue)

    def _order(self, ticket: Ticket, event: DeviceEvent | None) -> bool:
        """Make the current stream wait for `event`."""
        if event is None or self._lost:
            return ticket.done
        try:
            self._device.current_stream().wait_event(event)
        except Exception as error:  # noqa: BLE001  (logged)
            self._trouble(Direction.LOAD, "wait_failed", error, [ticket])
            return False
        return True

    def _trouble(
        self,
        direction: Direction,
        what: str,
        error: Exception,
        tickets: Sequence[Ticket] = (),
        *,
        logged: bool = False,
    ) -> DeviceEvent | None:
        """Log `error`, unless it was `logged`; return an event after whatever was queued all the same.

        Of a dead context one traceback is enough, and no event can be had: None.
        """
        if self._lost:
            return None
        layers = [ticket.layer for ticket in tickets]
        try:
            end = self.lanes[direction].end()
        except Exception:
            self._lost = True
            log.exception("device_lost", after=what, layers=layers, effect="nothing is saved or loaded any more")
            return None
        if not logged:
            log.error(what, layers=layers, exc_info=error)
        return end

    # ---- completion ------------------------------------------------------------------------------------------------

    def _complete(self, watched: tuple[Direction, ...]) -> None:
        """Notify of what has landed, whenever something of the `watched` directions is under way."""
        enter_thread(self._device)
        pause_s = self._poll_s_min
        while True:
            with self._news:
                self._news.wait_for(lambda: self._closed or any(self._flights[d] for d in watched))
                closed = self._closed
                head = next((flights[0] for d in watched if (flights := self._flights[d])), None)
            if closed:
                self._await(*(lane.synchronize for lane in self.lanes.values()))
            elif not self._poll_s_min and head is not None and head.event is not None:
                self._await(head.event.synchronize)
            fired = self._look()
            if closed and not any(self._flights[d] for d in watched):
                with self._queueing:  # where `shutdown` did not get it
                    self._launch_rest()
                return
            pause_s = self._poll_s_min if fired else min(2 * pause_s, max(POLL_S_MAX, self._poll_s_min))
            if not fired:
                time.sleep(pause_s)

    def _await(self, *waits: Callable[[], object]) -> None:
        """Block in the driver."""
        for wait in waits:
            try:
                wait()
            except Exception as error:  # noqa: BLE001  (the events show which copies it concerns)
                if not self._lost:
                    log.warning("synchronize_failed", why=repr(error))

    def _look(self) -> bool:
        """Notify of what has landed, and queue what may follow. Returns whether there was anything.

        Saves are queried first, loads are notified first: a save that has fired rests on loads that had fired by then,
        so a failed load is never notified after a save computed from it. While a load has failed and is not over,
        saves fail.
        """
        with self._looking:
            saves, loads = list(self._fired(Direction.SAVE)), list(self._fired(Direction.LOAD))
            for flight, failed in loads:
                self._notify(flight, failed)
            with self._news:
                doubt = any(flight.failed for flight in self._flights[Direction.LOAD])
            for flight, failed in saves:
                self._notify(flight, flight.queue.all if doubt else failed)
        if self._patient:  # or somebody may hold the lock in a copy that blocks
            with self._queueing:
                self._go_on()
        return bool(saves or loads)

    def _fired(self, direction: Direction) -> Iterator[tuple[_WaveInFlight, frozenset[int]]]:
        while flights := self._flights[direction]:
            flight = flights[0]
            failed = flight.failed
            if self._lost:
                failed = flight.queue.all
            elif flight.event is not None:
                try:
                    if not flight.event.query():
                        return
                except Exception as error:  # noqa: BLE001  (logged)
                    failed = flight.queue.all
                    end = self._trouble(direction, "copy_failed", error, flight.tickets, logged=bool(flight.failed))
                    if end is not None:  # the device lives, and may be at it still
                        self._await_instead(direction, flight._replace(event=end, failed=failed))
                        return
            if self._land(direction, flight):
                yield flight, failed

    def _take_off(self, flight: _WaveInFlight) -> bool:
        with self._news:
            if not self._closed:
                self._flights[flight.queue.plan.direction].append(flight)
                self._news.notify_all()
            return not self._closed

    def _await_instead(self, direction: Direction, flight: _WaveInFlight) -> None:
        """Put `flight` in the place of the first, which has its tickets but another event, unless that has landed."""
        with self._news:
            flights = self._flights[direction]
            if flights and flights[0].tickets is flight.tickets:
                flights[0] = flight
                for ticket in flight.tickets:
                    ticket.failed = flight.failed

    def _land(self, direction: Direction, flight: _WaveInFlight) -> bool:
        """Whoever gets True, the completion thread or `shutdown`, completes the tickets."""
        with self._news:
            flights = self._flights[direction]
            mine = bool(flights) and flights[0].tickets is flight.tickets
            if mine:
                flights.popleft()
            return mine

    @staticmethod
    def _notify(flight: _WaveInFlight, failed: frozenset[int]) -> None:
        for ticket in flight.tickets:
            try:
                ticket.complete(failed)
            except Exception:
                log.exception("sink_failed", layer=ticket.layer)
        if flight.last:
            flight.queue.prepared = None  # its table's memory, which should not wait for the garbage collector

    # ---- pinning, staging, calibration ----------------------------------------------------------------------------

    def _hold_tables(self, no_kernels: str) -> None:
        try:
            for lane in self.lanes.values() if not no_kernels else ():
                lane.hold_tables()
        except Exception as error:  # noqa: BLE001  (out of memory: steps allocate what they need)
            log.warning("no_tables", why=str(error), effect="steps allocate memory, which waits for the device")

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
        if self._calibrate_s_max and movers and self.pinned_slots:
            try:
                self.costs = calibrate.measure(
                    self._device, self.lanes, self._layout, movers, self.pinned_slots, self._calibrate_s_max
                )
            except Exception as error:  # noqa: BLE001  (no memory to measure in, or the like: copies have a way)
                log.warning("not_calibrated", why=repr(error)[:400], effect="copies go by DMA")
                return
            for direction, ways in self.costs.items():
                for mover, way in ways.items():
                    self._on_measured(direction, mover, way.landed)
            movers = [mover for mover in movers if mover in self.costs[Direction.SAVE]]
            self._unmeasured = Mover.PAGEABLE  # not even DMA has passed its check
        if asked is not None and asked not in movers and asked is not Mover.PAGEABLE:
            why = open_ways[asked] or "it failed its check"
            msg = f"kvpipe: mover={asked.value!r} cannot be used here ({why}); set mover to 'auto' or 'dma'"
            raise UnsupportedError(msg)
