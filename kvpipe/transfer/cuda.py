"""The CUDA engine copies in parallel with the forward. Events on the device order the copies against the forward.

The host never waits for a copy. `guard_read` and `fence` make the compute stream wait, and a completion thread asks
whether the events have fired. So a job may be confirmed before the host knows that the job's copies have landed.

Layers are queued in *waves*. A wave is so large that the host queues the wave faster than the bus moves the wave's
bytes. If readers wait for a load layer by layer, each layer's hook queues waves until two waves ahead of the reader are
queued. So the work of queueing is divided among the hooks. If no reader waits (a *patient* load), the completion thread
queues waves until two waves are in flight. So a load with readers never waits for more than two waves of patient loads.

For a save, vLLM's thread only records an event after the compute of the layers, and the completion thread queues the
copies. At the fence, vLLM's thread itself queues the copies that the completion thread has not queued yet.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch

from kvpipe.errors import TransferError, UnsupportedError
from kvpipe.protocol.geometry import Geometry
from kvpipe.trace.log import log
from kvpipe.transfer import calibrate
from kvpipe.transfer.base import NO_JOBS, CopyPlan, Direction, Ticket
from kvpipe.transfer.device import CudaDevice, Device, DeviceEvent
from kvpipe.transfer.movers import DirectionQueues, Layout, Mover, Prepared
from kvpipe.transfer.pages import PageView
from kvpipe.transfer.pinning import FIRST_BYTES, PIECE_BYTES_MAX, Pins, enter_thread
from kvpipe.transfer.pool import HostPool
from kvpipe.transfer.waves import OrderingPoint, PlanQueue, WaveInFlight

POLL_US_MIN: Final = 50
POLL_S_MAX: Final = 0.000_2
SHUTDOWN_S_MAX: Final = 30.0
# the longest wait for the lock `_queueing` per layer, because queueing a wave takes less time
ABANDON_S_MAX: Final = 0.002
STAGING_BYTES_MAX: Final = 64 << 20
STAGING_ALIGN_BYTES: Final = 64
WAVE_BYTES: Final = 8 << 20  # 160 us on a bus of 50 GB/s; the host queues a wave in less time
WAVES_AHEAD: Final = 2
UNPROVEN_DIRECT_SAVES: Final = (9, 0)
"""On devices of this or a higher compute capability, the mover `auto` makes no `direct` saves.

A soak test must first show that such saves are safe. In another engine, a kernel that wrote to pinned memory has caused
illegal accesses. These accesses occurred while attention kernels that stay on the device (FlashAttention 3) ran in
parallel.
"""


class CudaEngine:
    """The implementation of `TransferEngine` for caches in the memory of a CUDA device."""

    piece_bytes = PIECE_BYTES_MAX

    def __init__(
        self,
        device: Device | None = None,
        *,
        mover: Mover | None = None,
        staging_bytes_max: int = STAGING_BYTES_MAX,
        wave_bytes: int = WAVE_BYTES,
        calibrate_s_max: float = calibrate.SECONDS_MAX,
        poll_us_min: int | None = POLL_US_MIN,
        on_measured: Callable[[Direction, Mover, calibrate.Cost], object] = lambda *_: None,
    ) -> None:
        """Without `device`, use the device of the caches. Without `mover`, use the fastest mover for each plan.

        `poll_us_min` is the shortest pause of the completion thread between two polls, in microseconds. With 0 no
        thread polls. Instead, one thread per direction sleeps in the driver until an event has fired. None stands for 0
        if a sleeping thread notices an event about as soon as a polling thread, and for `POLL_US_MIN` otherwise.
        `on_measured` is called with the measured cost of each mover.
        """
        self._given, self._pinned_mover = device, mover
        self._staging_bytes_max, self._wave_bytes = staging_bytes_max, wave_bytes
        self._calibrate_s_max = calibrate_s_max
        self._poll_us_min, self._on_measured = poll_us_min, on_measured
        self._newest: dict[Direction, PlanQueue] = {}
        self._patient: deque[PlanQueue] = deque()  # patient loads that are not fully queued, oldest first
        self._computed: deque[PlanQueue] = deque()  # saves that the completion thread may queue, oldest first
        self._queueing = threading.RLock()  # guards _newest, _patient and _computed
        self._flights: dict[Direction, deque[WaveInFlight]] = {d: deque() for d in Direction}
        self._news = threading.Condition()  # guards _flights and _closed
        self._looking = threading.Lock()  # the thread that holds this lock completes tickets
        self._closed = False
        self._lost = False  # whether the CUDA context is dead; then the device is not called any more
        self._unmeasured = Mover.DMA
        self._threads: list[threading.Thread] = []
        self.costs: calibrate.Costs = {direction: {} for direction in Direction}

    def attach(self, views: Sequence[PageView], geometry: Geometry, pool: HostPool) -> None:
        """Bind the paged cache and the pool. The pool's first bytes are pinned, so that copies can be measured there.

        If engines share the pool, copies are measured in scratch slots, because the pool's slots have chunks.

        Raises:
            UnsupportedError: the configured mover cannot be used here.
            TransferError: the device has no free streams.

        """
        if self._threads:
            self._move(Layout(views, geometry, pool))
            return
        self._layout, self._pool = Layout(views, geometry, pool), pool
        self._device: Device = self._given or CudaDevice(views[0].tensor.device)
        self._staging, no_kernels = self._allocate_staging()
        each = None if self._staging is None else self._staging.view(len(Direction), -1)
        self.lanes = {
            d: DirectionQueues(self._device, d, self._layout, None if each is None else each[d]) for d in Direction
        }
        self._hold_tables(no_kernels)
        self._pins = Pins(self._device, pool)
        # `shutdown` waits for pinning: the process must not end while the driver pins memory on another thread
        atexit.register(self.shutdown)
        self._pins.begin(self.piece_bytes, FIRST_BYTES if self._calibrate_s_max and not pool.token else 0)
        self._calibrate(no_kernels)
        poll_us_min = self._choose_poll_us() if self._poll_us_min is None else self._poll_us_min
        self._poll_s_min = poll_us_min / 1e6
        parts = (
            {"kvpipe-landed": (tuple(Direction), True)}
            if self._poll_s_min
            else {"kvpipe-queue": ((), True), **{f"kvpipe-landed-{d.name.lower()}": ((d,), False) for d in Direction}}
        )  # a thread of its own, because threads that sleep in the driver cannot queue waves
        for name, part in parts.items():
            thread = threading.Thread(target=self._complete, args=part, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def _move(self, layout: Layout) -> None:
        """Use the new addresses of the caches. The kernels' table of addresses is uploaded to the device again."""
        if layout.align != self._layout.align:
            raise UnsupportedError(
                "kvpipe: the KV cache has moved to addresses of another alignment; restart the engine"
            )
        with self._queueing:
            self._layout = layout
            for lane in self.lanes.values():
                lane.move(layout)

    def claim(self, address: int, size: int) -> bool:
        """Make `size` bytes of whole slots at `address` ready for copies. This engine pins the memory."""
        return self._pins.claim(address, size)

    @property
    def pinned_slots(self) -> int:
        """The number of pinned slots. The pinned slots are the first slots of the pool."""
        return self._pins.slots

    # ---- vLLM's thread -------------------------------------------------------------------------------------------

    def prepare(self, plan: CopyPlan) -> None:
        """Order the loads of `plan` after all compute enqueued so far."""
        with self._queueing:
            if not self._lost:
                try:
                    plan.mark = self._prepare(plan)
                except Exception as error:  # noqa: BLE001  (logged; `submit` tries again, and may fail the plan)
                    self._trouble(plan.direction, "prepare_failed", error)

    def submit(self, plan: CopyPlan, ticket: Ticket) -> None:
        """Copy the layers `ticket.layers` of `plan`, and complete the ticket when the bytes have landed."""
        with self._queueing:
            if self._closed:
                ticket.complete(frozenset(job.id for job in plan.jobs))
                return
            queue = self._newest.get(plan.direction)
            if queue is None or queue.plan is not plan or queue.submitted == len(self._layout.views):
                queue = self._begin(plan)
            alone = len(ticket.layers) > 1 or ticket.layer >= len(self._layout.views)
            queue.put(ticket, self._wave_bytes if alone else self._layout.layer_bytes(plan, ticket.layer))
            if queue.patient:
                self._go_on()
            elif self._is_full(queue) and not (queue.lazy and queue.waves >= WAVES_AHEAD):
                if plan.direction is Direction.SAVE:
                    self._let_save(queue)
                else:
                    self._launch(queue)

    def guard_read(self, ticket: Ticket, timeout_s: float) -> bool:  # noqa: ARG002  (the device waits, not the host)
        """Order the caller's next compute after the copy."""
        mark = self.reached(ticket)
        return ticket.over or self._order(ticket, mark and mark.landed)

    def reached(self, ticket: Ticket) -> OrderingPoint | None:
        """Queue the next wave when attention has reached a layer of the newest wave."""
        with self._queueing:
            mark = self._reach(ticket)
            if mark is not None and mark.wave == mark.queue.waves - 1:
                self._launch(mark.queue)
        return mark

    def fence(self, ticket: Ticket, timeout_s: float) -> bool:  # noqa: ARG002
        """Order later writes to the paged blocks after the copy's reads.

        The copies of a plan read in order, so waiting for the last copy's event is enough.
        """
        with self._queueing:
            mark = self._reach(ticket)
        return self._order(ticket, mark and mark.read)

    def abandon(self, ticket: Ticket) -> bool:
        """Give up a copy. Returns False for a queued copy that is not over, because it cannot be withdrawn.

        Any thread may call this method. The method does not query the device, because a query would make a graph's
        capture fail. If a copy blocks the queueing thread, the method does not wait for this copy, and does not
        withdraw the tickets that are delayed behind it.
        """
        if isinstance(ticket.mark, PlanQueue) and self._queueing.acquire(timeout=ABANDON_S_MAX):
            try:
                queue = ticket.mark
                if isinstance(queue, PlanQueue):
                    queue.drop(ticket)
                    ticket.withdraw()
                    self._take_off(WaveInFlight((ticket,), queue, None, queue.all))
                    return True
            finally:
                self._queueing.release()
        return ticket.over

    def scrub(self, plan: CopyPlan, jobs: frozenset[int]) -> None:
        """Do nothing. The blocks of failed copies are not zeroed on a device either (decision 3)."""

    def shutdown(self) -> None:
        """Finish the submitted copies and end the threads. After `SHUTDOWN_S_MAX` seconds the remaining copies fail."""
        atexit.unregister(self.shutdown)
        deadline = time.monotonic() + SHUTDOWN_S_MAX
        mine = self._queueing.acquire(timeout=SHUTDOWN_S_MAX)
        try:
            if mine:
                self._launch_rest()
            else:
                self._lost = True
                log.error("device_hangs", effect="copies in flight fail")
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
        self._pins.end(unpin=drained and not self._lost)  # a hanging device may still write to pinned memory

    # ---- queueing -------------------------------------------------------------------------------------------------

    def _prepare(self, plan: CopyPlan) -> Prepared:
        # A load must not overwrite blocks that compute still reads, so the load is ordered after all work that is
        # queued when its step begins. The step's own compute does not touch the blocks of the step's loads.
        start = self._device.current_stream().record_event() if plan.direction is Direction.LOAD else None
        mover = self._choose(plan)
        plan.mover = mover.value
        return self.lanes[plan.direction].prepare(plan, mover, start)

    def _choose(self, plan: CopyPlan) -> Mover:
        pinned = self.pinned_slots
        if pinned < self._pool.slots and any(len(rows) and rows[:, 0].max() >= pinned for rows in plan.rows):
            return Mover.PAGEABLE
        if self._pinned_mover is not None:
            return self._pinned_mover
        ways = self.costs[plan.direction]
        return calibrate.choose(ways, self._layout, plan) if ways else self._unmeasured

    def _begin(self, plan: CopyPlan) -> PlanQueue:
        """Open a queue for `plan`. The previous queue of the same direction gets no more layers."""
        if plan.direction is Direction.LOAD and not isinstance(plan.mark, Prepared):
            self.prepare(plan)  # `prepare` must run on the thread that enqueues compute
        before = self._newest.get(plan.direction)
        if before is not None and not before.patient:
            self._launch_all(before)
        queue = self._newest[plan.direction] = PlanQueue(plan)
        if queue.patient:
            self._patient.append(queue)
        return queue

    def _let_save(self, queue: PlanQueue) -> None:
        """Make the completion thread queue the submitted layers of `queue`, after the current work of this stream."""
        try:
            queue.computed = len(queue.tickets), self._device.current_stream().record_event()
        except Exception:  # noqa: BLE001  (the launch meets the error again and fails the copies)
            self._launch_all(queue)
            return
        self._computed.append(queue)
        with self._news:
            self._news.notify_all()

    def _launch_computed(self) -> None:
        """Queue the saves of layers whose compute has an event."""
        while True:
            with self._queueing:
                if not self._computed:
                    return
                queue = self._computed[0]
                if queue.computed is None:
                    self._computed.popleft()
                else:
                    self._launch(queue)

    def _is_full(self, queue: PlanQueue) -> bool:
        """Return whether the next wave of `queue` need not wait for more layers."""
        no_more = queue.submitted == len(self._layout.views) or queue is not self._newest[queue.plan.direction]
        return queue.bytes >= self._wave_bytes or no_more

    def _go_on(self) -> None:
        """Queue patient loads until two waves of patient loads are in flight. The caller holds `_queueing`."""
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
        """Launch waves until a wave has `ticket`."""
        while isinstance(ticket.mark, PlanQueue):
            self._launch(ticket.mark)
        return ticket.mark if isinstance(ticket.mark, OrderingPoint) else None

    def _launch_all(self, queue: PlanQueue) -> None:
        while queue.tickets:
            self._launch(queue)

    def _launch(self, queue: PlanQueue) -> None:
        """Queue one wave on the device."""
        plan, computed = queue.plan, queue.computed
        tickets = queue.take(self._wave_bytes)
        if not tickets:
            return
        if plan.direction is Direction.SAVE and queue.prepared is None:
            self.prepare(plan)
            queue.prepare()
        landed, read, failed = None, None, NO_JOBS
        if not self._lost:
            try:
                if queue.prepared is None:
                    raise TransferError("its plan could not be prepared")  # noqa: TRY301
                start = computed[1] if computed is not None else queue.prepared.start
                start = start or self._device.current_stream().record_event()
                layers = [layer for ticket in tickets for layer in ticket.layers]
                landed, read = self.lanes[plan.direction].queue(plan, queue.prepared, layers, start)
            except Exception as error:  # noqa: BLE001  (logged)
                landed = read = self._trouble(plan.direction, "copy_failed", error, tickets)
                failed = queue.all
        else:
            failed = queue.all
        begun_ns = time.monotonic_ns()
        for ticket in tickets:
            ticket.begun_ns = begun_ns
            ticket.mark, ticket.failed = OrderingPoint(landed, read, queue.waves, queue), failed
        queue.waves += 1
        last = queue.submitted == len(self._layout.views) and not queue.tickets
        flight = WaveInFlight(tuple(tickets), queue, landed, failed, last)
        if not self._take_off(flight):
            self._notify(flight, queue.all)

    def _launch_rest(self) -> None:
        """Launch all layers that are still delayed. The caller holds `_queueing`."""
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
        """Log `error` unless it was `logged`. Return an event after all copies that were queued in spite of the error.

        Returns None if the context is dead, because a dead context records no event. In this case only one traceback is
        logged.
        """
        if self._lost:
            return None
        layers = [layer for ticket in tickets for layer in ticket.layers]
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

    def _complete(self, watched: tuple[Direction, ...], queues: bool) -> None:  # noqa: FBT001  (a thread's main)
        """Wait for copies of the `watched` directions and complete landed tickets, until the engine is closed.

        `queues` says whether this thread also queues saves.
        """
        enter_thread(self._device)
        pause_s = self._poll_s_min

        def due() -> bool:
            return queues and bool(self._computed)

        while True:
            with self._news:
                self._news.wait_for(lambda: self._closed or due() or any(self._flights[d] for d in watched))
                closed = self._closed
                head = next((flights[0] for d in watched if (flights := self._flights[d])), None)
            if closed:
                self._await(*(lane.synchronize for lane in self.lanes.values()))
            elif not self._poll_s_min and head is not None and head.event is not None:
                self._await(head.event.synchronize)
            if due():
                self._launch_computed()
            fired = self._look() if watched else True
            if closed and not any(self._flights[d] for d in watched):
                with self._queueing:  # queued here, because `shutdown` may have failed to get this lock
                    self._launch_rest()
                return
            pause_s = self._poll_s_min if fired else min(2 * pause_s, max(POLL_S_MAX, self._poll_s_min))
            if not fired:
                time.sleep(pause_s)

    def _await(self, *waits: Callable[[], object]) -> None:
        """Call `waits`, which block in the driver, and log errors."""
        for wait in waits:
            try:
                wait()
            except Exception as error:  # noqa: BLE001  (the events tell which copies have failed)
                if not self._lost:
                    log.warning("synchronize_failed", why=repr(error))

    def _look(self) -> bool:
        """Complete the tickets of landed copies, and queue the next waves. Returns whether any copy has landed.

        The events of saves are queried first, but the tickets of loads are completed first. If a save's event has
        fired, the events of the loads that the saved compute has read have fired earlier. So a failed load is always
        reported before a save that was computed from the load's blocks. Until a failed load is over, saves fail.
        """
        with self._looking:
            saves, loads = list(self._fired(Direction.SAVE)), list(self._fired(Direction.LOAD))
            for flight, failed in loads:
                self._notify(flight, failed)
            with self._news:
                doubt = any(flight.failed for flight in self._flights[Direction.LOAD])
            for flight, failed in saves:
                self._notify(flight, flight.queue.all if doubt else failed)
        if self._patient:  # checked before the lock is taken, because the lock's holder may be in a blocking copy
            with self._queueing:
                self._go_on()
        return bool(saves or loads)

    def _fired(self, direction: Direction) -> Iterator[tuple[WaveInFlight, frozenset[int]]]:
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
                    if end is not None:  # the device still works, and may still be copying
                        self._await_instead(direction, flight._replace(event=end, failed=failed))
                        return
            if self._land(direction, flight):
                yield flight, failed

    def _take_off(self, flight: WaveInFlight) -> bool:
        with self._news:
            if not self._closed:
                self._flights[flight.queue.plan.direction].append(flight)
                self._news.notify_all()
            return not self._closed

    def _await_instead(self, direction: Direction, flight: WaveInFlight) -> None:
        """Replace the first flight, which has the same tickets, by `flight`, unless the first flight has landed."""
        with self._news:
            flights = self._flights[direction]
            if flights and flights[0].tickets is flight.tickets:
                flights[0] = flight
                for ticket in flight.tickets:
                    ticket.failed = flight.failed

    def _land(self, direction: Direction, flight: WaveInFlight) -> bool:
        """Remove the flight from its direction. The completion thread and `shutdown` call this method.

        The caller that gets True completes the flight's tickets.
        """
        with self._news:
            flights = self._flights[direction]
            mine = bool(flights) and flights[0].tickets is flight.tickets
            if mine:
                flights.popleft()
            return mine

    @staticmethod
    def _notify(flight: WaveInFlight, failed: frozenset[int]) -> None:
        for ticket in flight.tickets:
            try:
                ticket.complete(failed)
            except Exception:
                log.exception("sink_failed", layer=ticket.layer)
        if flight.last:
            flight.queue.prepared = None  # release the table's memory now, not at a later garbage collection

    # ---- pinning, staging, calibration ----------------------------------------------------------------------------

    def _hold_tables(self, no_kernels: str) -> None:
        try:
            for lane in self.lanes.values() if not no_kernels else ():
                lane.hold_tables()
        except Exception as error:  # noqa: BLE001  (out of memory: steps allocate tables)
            log.warning("no_tables", why=str(error), effect="steps allocate memory, which waits for the device")

    def _allocate_staging(self) -> tuple[torch.Tensor | None, str]:
        """Return device memory for the bays of both directions, and the reason if kernels cannot be used."""
        why = self._device.has_kernels()
        if not why and not self._layout.align:
            why = "addresses or sizes of the KV cache are no multiples of 8 bytes"
        size = self._staging_bytes_max // STAGING_ALIGN_BYTES * STAGING_ALIGN_BYTES
        if why or not size:
            return None, why
        try:
            return self._device.allocate(size), ""
        except Exception as error:  # noqa: BLE001  (out of memory: other movers copy)
            log.warning("no_staging", why=str(error), remedy="set a smaller staging_bytes_max")
            return None, ""

    def _choose_poll_us(self) -> int:
        """Return 0 if a thread that sleeps in the driver notices an event about as soon as a polling thread.

        Otherwise return `POLL_US_MIN`.
        """
        try:
            lag_us = self._device.blocking_lag_us()
        except Exception as error:  # noqa: BLE001  (out of memory, for example)
            log.warning("completions_not_measured", why=repr(error)[:400], effect="completions are polled")
            return POLL_US_MIN
        blocks = lag_us <= POLL_S_MAX * 1e6
        log.info("completions", how="block" if blocks else "poll", blocking_lag_us=round(lag_us, 1))
        return 0 if blocks else POLL_US_MIN

    def _calibrate(self, no_kernels: str) -> None:
        page, bay = max(view.page_bytes for view in self._layout.views), self.lanes[Direction.SAVE].bay_bytes
        no_bays = no_kernels or ("" if page <= bay else "no page fits a bay of staging_bytes_max")
        open_ways = {
            Mover.DMA: "",
            Mover.STAGED: no_bays,
            Mover.DIRECT: no_kernels or ("" if self._device.reads_pool() else "kernels cannot read host memory here"),
        }
        asked = self._pinned_mover
        if asked is None and bay and no_bays and not no_kernels:
            log.info("staged_not_used", why=no_bays, page_bytes=page, bay_bytes=bay)
        movers = [mover for mover, why in open_ways.items() if not why and asked in {None, mover}]
        if self._calibrate_s_max and movers and (self.pinned_slots or self._pool.token):
            try:
                with calibrate.measured_slots(self._pins, self._layout, self.piece_bytes, FIRST_BYTES) as bench:
                    self.costs = calibrate.measure(self._device, self.lanes, *bench, movers, self._calibrate_s_max)
            except Exception as error:  # noqa: BLE001  (no memory, for example: DMA still copies)
                log.warning("not_calibrated", why=repr(error)[:400], effect="copies go by DMA")
                return
            for direction, ways in self.costs.items():
                for mover, way in ways.items():
                    self._on_measured(direction, mover, way.landed)
            movers = [mover for mover in movers if mover in self.costs[Direction.SAVE]]
            if asked is None and self._device.capability() >= UNPROVEN_DIRECT_SAVES:
                self.costs[Direction.SAVE].pop(Mover.DIRECT, None)
            self._unmeasured = Mover.PAGEABLE  # used if not even `DMA` has passed its check
        if asked is not None and asked not in movers and asked is not Mover.PAGEABLE:
            why = open_ways[asked] or "it failed its check"
            msg = f"kvpipe: mover={asked.value!r} cannot be used here ({why}); set mover to 'auto' or 'dma'"
            raise UnsupportedError(msg)
