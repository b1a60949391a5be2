"""The loop thread's half of the pipeline: one cursor per job, from the beginning of the job's step to the job's report.

Events come through the inbox. vLLM's thread calls `put`, and the transfer engine's threads complete tickets. One thread
at a time handles these events: the loop thread, or the thread that has completed a batch's last ticket. A job is
reported only when no copy can touch the job's slots or blocks any more, even if the job's cursor ended earlier.
"""

from __future__ import annotations

import functools
import operator
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from kvpipe.protocol.geometry import Geometry
from kvpipe.protocol.messages import Job, Kind, Outcome
from kvpipe.statemachine import copy as m
from kvpipe.statemachine.copy import LayerCursor
from kvpipe.statemachine.core import Cursor, Edge, IllegalTransition, State, Watch
from kvpipe.threads.loop import LoopThread
from kvpipe.trace import events as e
from kvpipe.trace.durations import LOAD, MEMORY, STORE
from kvpipe.transfer.base import QUIET, CopyPlan, Ticket
from kvpipe.worker.batch import Batch
from kvpipe.worker.checks import CHANGED, SlotChecks
from kvpipe.worker.context import RankContext

OPENED: Final = "opened"
SUBMITTED: Final = "submitted"
CHECKED: Final = "checked"
"""`OPENED`, `SUBMITTED` and `CHECKED` are events of a whole batch. All other events are events of the jobs' machine."""
SLOWER_SHARE: Final = 1 / 16
RATE_BYTES: Final = 256 << 20
"""The sums of bytes and time are halved when the sum of bytes exceeds this number, so that older loads count less."""


class LoadRate:
    """Measures the rate of loads in bytes per second.

    A layer counts only if it was queued before the previous layer had landed, because any other layer may have waited
    for compute. Layers that were queued together (a wave) land together.

    A ticket of all layers is the only ticket of its load, so by this rule hardly any such ticket would count. Therefore
    every ticket of all layers counts. A ticket that is slower than the rate may have waited for compute, so it counts
    with weight `SLOWER_SHARE`. Loads that follow one another without a pause (a run) are measured together, because
    several landings may be noticed at the same time.
    """

    def __init__(self) -> None:
        """Start without a measurement: `bytes_per_s` is 0."""
        self.bytes_per_s = 0.0
        self._landed_ns = 0  # the time at which the last layer of a load landed
        # of the wave that is landing: the time at which it was queued, and whether it counts
        self._wave_ns, self._wave_counts = 0, False
        self._of_late = (0, 0)  # recently loaded bytes, and the nanoseconds of these loads
        self._run = (0, 0)  # the bytes of the present run of loads, and the time at which the run began

    def landed(self, ticket: Ticket, size: int, *, alone: bool = False) -> None:
        """Record that `ticket`, a copy of `size` bytes, has landed.

        `alone` says whether the ticket has all layers of a load.
        """
        now = ticket.done_ns
        if alone:
            loaded, began_ns = self._run if ticket.begun_ns < self._landed_ns else (0, ticket.begun_ns)
            self._run = loaded + size, began_ns
            rate = self._run[0] * 1e9 / max(1, now - began_ns)
            self.bytes_per_s += (rate - self.bytes_per_s) * (1 if rate > self.bytes_per_s else SLOWER_SHARE)
            self._landed_ns = now
            return
        if ticket.begun_ns != self._wave_ns:
            self._wave_ns, self._wave_counts = ticket.begun_ns, self._landed_ns > ticket.begun_ns
        took_ns, self._landed_ns, self._run = now - self._landed_ns, now, (0, now)
        if not self._wave_counts:
            return
        loaded, spent_ns = self._of_late
        self._of_late = loaded + size, spent_ns + max(0, took_ns)
        self.bytes_per_s = self._of_late[0] * 1e9 / max(1, self._of_late[1])
        if self._of_late[0] > RATE_BYTES:
            self._of_late = self._of_late[0] // 2, self._of_late[1] // 2


class Copies:
    """The cursors of one rank's jobs. vLLM's thread takes the outcomes of jobs from `outbox`."""

    def __init__(
        self, context: RankContext, geometry: Geometry, abandon: Callable[[Ticket], bool], *, saves: bool = True,
        checks: SlotChecks | None = None, scrub: Callable[[CopyPlan, frozenset[int]], None] | None = None,
    ) -> None:  # fmt: skip
        """Make the loop thread. `abandon` and `scrub` are the transfer engine's methods.

        Without `saves`, saves copy nothing. Without `checks`, slots have no marks, and `scrub` is not needed.
        """
        self._checks, self._scrub = checks, scrub
        if checks is not None:
            checks.on_checked = self._checked
        self.counters, self.trace, self._abandon, self._saves = context.counters, context.trace, abandon, saves
        groups = geometry.groups
        self._layers = [(group, groups[group].layers[index].page_bytes) for group, index in geometry.layers]
        self._group_bytes = [sum(layer.page_bytes for layer in group.layers) for group in groups]
        self._paths: dict[tuple[State, range], Edge | None] = {}
        self.machines = m.SAVE.compile(len(geometry.layers)), m.LOAD.compile(len(geometry.layers))
        self.live: dict[Batch, None] = {}  # batches with jobs that are not yet reported
        self.bytes, self.ns = dict.fromkeys(Kind, 0), dict.fromkeys(Kind, 0)
        self.rate = LoadRate()
        loaded, stored = (self.counters.durations.of(name, MEMORY) for name in (LOAD, STORE))
        self._took = {Kind.SAVE: stored, Kind.LOAD_SYNC: loaded, Kind.LOAD_ASYNC: loaded}
        self.outbox: deque[Outcome] = deque()
        self.loop = LoopThread("kvpipe-loop", self._handle, cpus=context.cpus)

    def put(self, event: str, batch: Batch, why: str = "", *, wake: bool = True) -> None:
        """Send an event of `batch` from vLLM's thread to the loop thread. `wake` is an argument of `LoopThread.put`."""
        self.loop.put((event, batch, why), wake=wake)

    def completed(self, ticket: Ticket) -> None:
        """Send a completed ticket to the loop thread. Any thread may call this sink of all tickets.

        After a failed ticket or the batch's last ticket, this thread handles the inbox itself, because waking the loop
        thread takes longer. After any other ticket, a later ticket of the batch will complete, or vLLM's thread is
        still submitting. `batch.last` is read only after the ticket is in the inbox, so that no ticket is missed.
        """
        self.loop.put(ticket, wake=False)
        batch = ticket.batch
        assert isinstance(batch, Batch)  # noqa: S101  (the pipeline makes all tickets)
        if ticket.failed or batch.last is ticket:
            self.loop.drain()

    def _checked(self, batch: Batch) -> None:
        """Send the news that the digests' thread has read the slots of `batch`. The digests' thread calls this."""
        self.loop.put((CHECKED, batch, ""), wake=False)
        self.loop.drain()

    def drain(self, fence: Callable[[Ticket, float], bool], wait_s: float) -> bool:
        """Wait for all copies, `wait_s` seconds at most, and then abandon the copies that have not begun.

        vLLM's thread calls this between steps. `fence` is the transfer engine's method, which queues the copies that
        the engine holds back. Returns False if a copy may still touch memory. The loop thread has as long again to
        handle the end of the copies.
        """
        live, until_s = list[Batch](), time.monotonic() + wait_s
        if not (self.loop.put(lambda: live.extend(self.live)) and self.loop.settle(wait_s)):
            return False
        for batch in live:
            last, left_s = batch.last, until_s - time.monotonic()
            if last.done or (left_s > 0 and fence(last, left_s) and last.wait(max(0.0, until_s - time.monotonic()))):
                # after a load's comparison, which may scrub blocks
                compared = None if batch.kind is Kind.SAVE else batch.checked
                if compared is None or compared.wait(max(0.0, until_s - time.monotonic())):
                    continue
            for ticket in batch.tickets.values():
                self._abandon(ticket)
            self.put(m.FAULT, batch, "the copy did not complete before the memory of its blocks was unmapped")
        ended = all(ticket.state in QUIET for batch in live for ticket in batch.tickets.values())
        return self.loop.settle(wait_s) and ended

    # ---- the loop thread -----------------------------------------------------------------------------------------

    def _handle(self, item: Ticket | tuple[str, Batch, str]) -> None:
        if isinstance(item, Ticket):
            batch = item.batch
            assert isinstance(batch, Batch)  # noqa: S101  (the pipeline makes all tickets)
            batch.moved_ns = item.done_ns
            if self._checks is None or not self._checks.holds(batch, item, layers=len(self._layers)):
                self._landed(batch, item)
        else:
            event, batch, why = item
            self._news(batch, event, why)
        self.put_outcomes(batch)

    def _news(self, batch: Batch, event: str, why: str) -> None:
        if event == SUBMITTED:
            batch.closed = True
            return
        if event == CHECKED:
            try:
                if batch.held is not None:
                    batch.held.done_ns = batch.moved_ns = time.monotonic_ns()  # a request gets its load only now
                    self._landed(batch, batch.held)
            finally:
                if batch.checked is not None:
                    batch.checked.set()  # last: vLLM's thread may wait for this, and then settles its step
            return
        if event == OPENED:
            machine = self.machines[batch.kind is not Kind.SAVE]
            batch.cursors = {job.id: LayerCursor(machine, job.id, self._watch(batch, job)) for job in batch.jobs}
            self.live[batch] = None
            if batch.kind is not Kind.LOAD_ASYNC:
                return
            # an async load is confirmed at once, because no forward reads its blocks before the copy has landed
            event = m.CONFIRM
        for job in batch.jobs:
            self.fire(batch, job, event, why)

    def _landed(self, batch: Batch, ticket: Ticket) -> None:
        failed, checks = ticket.failed, self._checks
        if checks is not None and ticket.ordinal + len(ticket.layers) == len(self._layers):
            changed = checks.failed(batch)
            # A job that has ended was given up, so its blocks may belong to another request.
            if scrubbed := frozenset(one for one in changed if not batch.cursors[one].state.final):
                self._scrub_blocks(batch, scrubbed)
            failed |= changed
        took_ns = ticket.done_ns - ticket.born_ns
        if self._saves or batch.kind is not Kind.SAVE:
            self._count(batch, ticket, took_ns)
        if batch.traced:
            header = batch.header(self.trace.rank)[1:]
            for layer in ticket.layers:
                self.trace.put(e.LayerCopied(
                    ticket.born_ns, *header, kind=batch.kind.name.lower(), layer=layer,
                    jobs=[job.id for job in batch.jobs], took_ns=took_ns, failed=sorted(failed),
                ))  # fmt: skip
        for job in batch.jobs:
            if job.id in ticket.failed:
                self.fire(batch, job, m.FAULT, f"the copy of layer {ticket.layer} failed")
            elif job.id in failed:
                self.fire(batch, job, m.FAULT, CHANGED)
            else:
                self._land(batch, job, range(ticket.ordinal, ticket.ordinal + len(ticket.layers)))

    def _scrub_blocks(self, batch: Batch, jobs: frozenset[int]) -> None:
        """Scrub the blocks of loads whose slots have changed, before the jobs are reported."""
        try:
            if self._scrub is not None:
                self._scrub(batch.plan, jobs)
        except Exception as error:  # noqa: BLE001  (the jobs fail all the same)
            self.counters.fault("contained_error", where="scrub", error=repr(error))

    def _count(self, batch: Batch, ticket: Ticket, took_ns: int) -> None:
        """Add a landed copy to the totals of the batch's kind of job."""
        self.ns[batch.kind] += took_ns
        batch.first_ns = batch.first_ns or ticket.born_ns
        if not ticket.failed:
            size = self._size(batch.pages, ticket.layers)
            self.bytes[batch.kind] += size
            if batch.kind is not Kind.SAVE:
                self.rate.landed(ticket, size, alone=len(ticket.layers) == len(self._layers))

    def _size(self, pages: list[int], layers: tuple[int, ...]) -> int:
        """Return the number of bytes of `layers`, if cache group g has `pages[g]` pages."""
        if len(layers) == len(self._layers):
            return sum(map(operator.mul, pages, self._group_bytes))
        return sum(pages[group] * page_bytes for group, page_bytes in (self._layers[layer] for layer in layers))

    def _land(self, batch: Batch, job: Job, layers: range) -> None:
        """Fire the landing of each of `layers` (ordinals) at the job's cursor.

        Without a watch, the cursor moves once for all layers.
        """
        cursor = batch.cursors[job.id]
        edge = self._path(cursor, layers) if cursor.watch is None else None
        if edge is None:
            for k in layers:
                self.fire(batch, job, k, "completions out of order")
        else:
            cursor.state = edge.to
            self._moved_on(batch, job, edge, "")

    def _path(self, cursor: LayerCursor, layers: range) -> Edge | None:
        """Return the last edge that `cursor` takes when `layers` land, or None if `layers` are not the next layers."""
        key = cursor.state, layers
        if key not in self._paths:
            trial = LayerCursor(cursor.machine, cursor.key)
            trial.state = cursor.state
            try:
                edges = [trial.landed(k) for k in layers]
            except IllegalTransition:
                edges = []
            good = bool(edges) and all(edge.moves and edge.event == m.LANDED_NEXT for edge in edges)
            self._paths[key] = edges[-1] if good else None
        return self._paths[key]

    def fire(self, batch: Batch, job: Job, news: str | int, why: str) -> None:
        """Fire an event or a landed layer at a job's cursor. If the job ends, its outcome is kept in the batch.

        `news` is the event, or the ordinal of the layer. An illegal transition fails the job and raises nothing.
        """
        cursor = batch.cursors[job.id]
        was_final = cursor.state.final
        try:
            edge = cursor.fire(news, why) if isinstance(news, str) else cursor.landed(news, why)
        except IllegalTransition as error:
            # This is a bug of kvpipe. The job fails, because its bytes cannot be trusted; the engine is not affected.
            message = {"machine": error.machine, "state": error.state, "on": error.event, "why": error.why}
            self.counters.fault("illegal_transition", **message)
            if was_final:
                return
            why = str(error)
            edge = cursor.fire(m.FAULT, why)
        if not edge.moves:
            self.counters["no_op_transitions"] += 1
            return
        self._moved_on(batch, job, edge, why)

    def _moved_on(self, batch: Batch, job: Job, edge: Edge, why: str) -> None:
        """Record that the job's cursor took `edge`. If the job has ended, also record the job's outcome."""
        batch.history.append((job.id, edge))
        if edge.to.final:
            ok = edge.to.row == m.FINALIZED
            batch.ended.append(Outcome(job, ok, "" if ok else why))
            if not ok:
                self.counters.fault("job_failed", job=job.id, request=job.request, state=edge.to.name, why=why)

    def put_outcomes(self, batch: Batch) -> None:
        """Put the outcomes of ended jobs into the outbox, once no copy can touch the slots or blocks of these jobs.

        The outcomes of saves wait until the marks of the saves' slots are written.
        """
        if batch.closed and batch.settled and (self._checks is None or self._checks.is_marked(batch)):
            if batch in self.live and all(cursor.state.final for cursor in batch.cursors.values()):
                del self.live[batch]
                if batch.first_ns:
                    self._took[batch.kind]((batch.moved_ns - batch.first_ns) / 1e9)
            self.outbox.extend(batch.ended)
            batch.ended = []

    # ---- the trace -----------------------------------------------------------------------------------------------

    def _watch(self, batch: Batch, job: Job) -> Watch | None:
        """Return the watch for the job's cursor. Outside the trace's sample of requests, only failures are traced."""
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
