"""The loop thread's half of the pipeline: one cursor per job, from its step's beginning to its report.

Events come through the inbox: from vLLM's thread (`put`), and from the transfer engine's threads, which complete
tickets. A job is reported only when no copy can touch its slots or blocks any more, even if its cursor ended before.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Final

from kvpipe.geometry import Geometry
from kvpipe.loop import LoopThread
from kvpipe.messages import Job, Kind, Outcome
from kvpipe.statemachine import copy as m
from kvpipe.statemachine.copy import LayerCursor
from kvpipe.statemachine.core import Cursor, Edge, IllegalTransition, State, Watch
from kvpipe.trace import events as e
from kvpipe.trace.log import Counters
from kvpipe.trace.recorder import Recorder
from kvpipe.transfer.base import Ticket
from kvpipe.worker.batch import Batch
from kvpipe.worker.watchdog import Watchdog

OPENED: Final = "opened"
SUBMITTED: Final = "submitted"
"""Events of a batch as a whole; all others are events of its jobs' machine."""
RATE_BYTES: Final = 256 << 20
"""The rate of loads is measured over so many bytes; then the sums are halved."""


class LoadRate:
    """Measures the rate of loads, in bytes per second.

    Only layers that were queued before the previous layer had landed count: others may have waited for compute. Layers
    that were queued together (a wave) land together.
    """

    def __init__(self) -> None:
        """Start without a measurement: `bytes_per_s` is 0."""
        self.bytes_per_s = 0.0
        self._landed_ns = 0  # the last layer of a load
        self._wave_ns, self._wave_counts = 0, False  # when the wave that lands was queued; whether it measures speed
        self._of_late = (0, 0)  # bytes, and nanoseconds that they took

    def landed(self, ticket: Ticket, size: int) -> None:
        """Record that a layer of `size` bytes has landed."""
        now = ticket.done_ns
        if ticket.begun_ns != self._wave_ns:
            self._wave_ns, self._wave_counts = ticket.begun_ns, self._landed_ns > ticket.begun_ns
        took_ns, self._landed_ns = now - self._landed_ns, now
        if not self._wave_counts:
            return
        loaded, spent_ns = self._of_late
        self._of_late = loaded + size, spent_ns + max(0, took_ns)
        self.bytes_per_s = self._of_late[0] * 1e9 / max(1, self._of_late[1])
        if self._of_late[0] > RATE_BYTES:
            self._of_late = self._of_late[0] // 2, self._of_late[1] // 2


class Copies:
    """The cursors of one rank's jobs. `outbox`: how jobs ended, for vLLM's thread to take."""

    def __init__(
        self,
        geometry: Geometry,
        abandon: Callable[[Ticket], bool],
        *,
        counters: Counters,
        stuck_ms_max: int,
        cpus: frozenset[int],
        trace: Recorder,
    ) -> None:
        """Start the thread, bound to `cpus` if any are given. `abandon`: as of the transfer engine."""
        self.counters, self.trace = counters, trace
        groups = geometry.groups
        self._layers = [(group, groups[group].layers[index].page_bytes) for group, index in geometry.layers]
        self.machines = m.SAVE.compile(len(geometry.layers)), m.LOAD.compile(len(geometry.layers))
        self.live: dict[Batch, None] = {}  # batches with jobs that are not reported
        self.bytes, self.ns = dict.fromkeys(Kind, 0), dict.fromkeys(Kind, 0)
        self.rate = LoadRate()
        self.outbox: deque[Outcome] = deque()
        self.loop = LoopThread("kvpipe-loop", self._handle, cpus=cpus)
        self.loop.begin(Watchdog(self, abandon, stuck_ms_max).run)  # which looks at the loop

    def put(self, event: str, batch: Batch, why: str = "", *, wake: bool = True) -> None:
        """Send an event of `batch` to the loop thread. On vLLM's thread. `wake`: as of `LoopThread.put`."""
        self.loop.put((event, batch, why), wake=wake)

    def completed(self, ticket: Ticket) -> None:
        """Send a completed ticket to the loop thread: the sink of all tickets, on any thread.

        Only the batch's last one wakes it, or one that has failed. Before that another ticket comes, or vLLM's thread
        still submits, and wakes it when it is done: what is read here is read after the ticket is in the inbox.
        """
        self.loop.put(ticket, wake=False)
        batch = ticket.batch
        assert isinstance(batch, Batch)  # noqa: S101  (the pipeline makes all tickets)
        if ticket.failed or batch.last is ticket:
            self.loop.wake()

    # ---- the loop thread -----------------------------------------------------------------------------------------

    def _handle(self, item: Ticket | tuple[str, Batch, str]) -> None:
        if isinstance(item, Ticket):
            batch = item.batch
            assert isinstance(batch, Batch)  # noqa: S101  (the pipeline makes all tickets)
            batch.moved_ns = item.done_ns
            self._landed(batch, item)
        else:
            event, batch, why = item
            self._news(batch, event, why)
        self.report(batch)

    def _news(self, batch: Batch, event: str, why: str) -> None:
        if event == SUBMITTED:
            batch.closed = True
            return
        if event == OPENED:
            machine = self.machines[batch.kind is not Kind.SAVE]
            batch.cursors = {job.id: LayerCursor(machine, job.id, self._watch(batch, job)) for job in batch.jobs}
            self.live[batch] = None
            if batch.kind is not Kind.LOAD_ASYNC:
                return
            event = m.CONFIRM  # nobody reads before its copy has landed
        for job in batch.jobs:
            self.fire(batch, job, event, why)

    def _landed(self, batch: Batch, ticket: Ticket) -> None:
        took_ns = ticket.done_ns - ticket.born_ns
        self.ns[batch.kind] += took_ns
        if not ticket.failed:
            group, page_bytes = self._layers[ticket.layer]
            size = batch.pages[group] * page_bytes
            self.bytes[batch.kind] += size
            if batch.kind is not Kind.SAVE:
                self.rate.landed(ticket, size)
        if batch.traced:
            header = batch.header(self.trace.rank)[1:]
            self.trace.put(e.LayerCopied(
                ticket.born_ns, *header, kind=batch.kind.name.lower(), layer=ticket.layer,
                jobs=[job.id for job in batch.jobs], took_ns=took_ns, failed=sorted(ticket.failed),
            ))  # fmt: skip
        for job in batch.jobs:
            if job.id in ticket.failed:
                self.fire(batch, job, m.FAULT, f"the copy of layer {ticket.layer} failed")
            else:
                self.fire(batch, job, ticket.ordinal, "completions out of order")

    def fire(self, batch: Batch, job: Job, news: str | int, why: str) -> None:
        """Fire an event at a job's cursor, or a landed layer. If the job ends, its outcome is kept in the batch.

        `news`: the event, or the ordinal of the layer. An illegal transition fails the job; it is not raised.
        """
        cursor = batch.cursors[job.id]
        was_final = cursor.state.final
        try:
            edge = cursor.fire(news, why) if isinstance(news, str) else cursor.landed(news, why)
        except IllegalTransition as error:
            # a bug of ours: the job is failed rather than trusted, and the engine is not affected
            message = {"machine": error.machine, "state": error.state, "on": error.event, "why": error.why}
            self.counters.fault("illegal_transition", **message)
            if was_final:
                return
            why = str(error)
            edge = cursor.fire(m.FAULT, why)
        if not edge.moves:
            self.counters["no_op_transitions"] += 1
            return
        batch.history.append((job.id, edge))
        if cursor.state.final:
            ok = cursor.state.row == m.FINALIZED
            batch.ended.append(Outcome(job, ok, "" if ok else why))
            if not ok:
                self.counters.fault("job_failed", job=job.id, request=job.request, state=cursor.state.name, why=why)

    def report(self, batch: Batch) -> None:
        """Put the outcomes of jobs that have ended into the outbox, once no copy can touch their slots or blocks."""
        if batch.closed and batch.settled:
            self.outbox.extend(batch.ended)
            batch.ended = []
            if all(cursor.state.final for cursor in batch.cursors.values()):
                self.live.pop(batch, None)

    # ---- the trace -----------------------------------------------------------------------------------------------

    def _watch(self, batch: Batch, job: Job) -> Watch | None:
        """Return the watch for the job's cursor. Outside of the trace's sample, only a failure is traced."""
        if not self.trace.detail:
            return None
        watch = self._moved if self.trace.sampled(job.request) else self._failed
        return functools.partial(watch, batch.step, job)

    def _moved(self, step: int, job: Job, cursor: Cursor, was: State, edge: Edge, why: str) -> None:
        why = why if edge.to.row == m.FAILED else ""
        self.trace.took(job.request, job.epoch, step, cursor, job.id, was, edge, why)

    def _failed(self, step: int, job: Job, cursor: Cursor, was: State, edge: Edge, why: str) -> None:
        if edge.rejects or (edge.moves and edge.to.row == m.FAILED):
            self.trace.took(job.request, job.epoch, step, cursor, job.id, was, edge, why)
