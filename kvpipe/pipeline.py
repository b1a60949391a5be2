"""The worker's pipeline: drives the save and load cursors of one rank from copy-completion events.

vLLM's thread calls `begin`, `start_loads`, `wait_layer`, `save_layer`, `end_loads` and `end_step`; each is harmless
when repeated, missing or out of order. It only submits copies and waits where the device would. Every cursor is owned
by the loop thread, which gets its news through the inbox: opened batches, completed tickets, the step's end.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable
from typing import Final, TypeVar

import anyio
import numpy as np
import structlog

from kvpipe.geometry import Geometry
from kvpipe.loop import LoopThread
from kvpipe.plan import BROKEN, ROW_BYTES, Job, Kind, Outcome, StepPlan, table_of
from kvpipe.statemachine import load as load_m
from kvpipe.statemachine import save as save_m
from kvpipe.statemachine.core import Compiled, Cursor, Edge, IllegalTransition, State, Watch
from kvpipe.statemachine.save import LayerCursor
from kvpipe.trace import events as e
from kvpipe.trace.log import Counters
from kvpipe.trace.recorder import OFF, Recorder
from kvpipe.transfer.base import CopyPlan, Direction, Ticket, TransferEngine

log = structlog.get_logger("kvpipe.pipeline")

TIER: Final = "memory"
STUCK_MS_MAX: Final = 60_000
WATCHES_PER_LIMIT: Final = 4  # how often the watchdog looks in `stuck_ms_max`
_News = TypeVar("_News", str, int)
TIMED_OUT: Final = "the copy did not complete in wait_ms_max"
CONDEMNED: Final = "it was planned to fail"
TOLD: Final = "its blocks were reported as suspects, in its step"
STUCK: Final = "it did not move in stuck_ms_max"
LAST_MOVES: Final = 8
RATE_BYTES: Final = 256 << 20  # of loads: the older half of so many is forgotten
OPEN: Final = "open"
SUBMITTED: Final = "submitted"
STEP_END: Final = "step_end"


class Batch:
    """The jobs of one kind in one step: one copy plan, one ticket per layer, one cursor per job."""

    __slots__ = (
        "closed",
        "confirmed",
        "cursors",
        "doomed",
        "ended",
        "gave_up",
        "jobs",
        "kind",
        "last",
        "moved_ns",
        "moves",
        "open",
        "pages",
        "plan",
        "step",
        "submitted",
        "tickets",
        "told",
        "traced",
        "waited",
    )

    def __init__(self, kind: Kind, jobs: tuple[Job, ...], groups: int, step: int) -> None:
        """`submitted` and `waited` are bit masks over the engine's layers."""
        self.kind, self.jobs, self.step = kind, jobs, step
        self.plan = CopyPlan(Direction.SAVE if kind is Kind.SAVE else Direction.LOAD, jobs, groups)
        self.pages = [int(runs[:, 4].sum()) for runs in self.plan.runs]  # per group
        self.submitted = self.waited = 0
        self.tickets: dict[int, Ticket] = {}
        self.open: deque[Ticket] = (
            deque()
        )  # put there before their copies begin; the loop thread takes out what is over
        self.last: Ticket | None = None  # of those that the engine has taken: copies of a batch complete in order
        self.gave_up = False  # a wait timed out
        self.told = False  # the blocks of its sync loads were reported before the jobs' end
        # the loop thread's own:
        self.cursors: dict[int, LayerCursor] = {}
        self.ended: list[Outcome] = []
        self.closed = False  # nothing more will be submitted
        self.confirmed = kind is Kind.LOAD_ASYNC  # nobody reads before its copy has landed
        self.moved_ns = time.monotonic_ns()
        self.moves: deque[tuple[int, Edge]] = deque(maxlen=LAST_MOVES * len(jobs))
        self.traced = False  # some of its jobs are, in detail
        # set by the watchdog, and never taken back:
        self.doomed = False  # stuck: nothing more of it is begun

    @property
    def settled(self) -> bool:
        """Whether no copy can touch the jobs' slots or blocks any more: none, in whatever order they end.

        Asked by the loop thread, when all of them were submitted.
        """
        while self.open and (self.open[0].over or self.open[0].withdrawn):
            self.open.popleft()
        return not self.open


class Pipeline:
    """Saves and loads for one rank."""

    def __init__(
        self,
        engine: TransferEngine,
        geometry: Geometry,
        *,
        layerwise: bool,
        wait_ms_max: int,
        counters: Counters,
        cpus: frozenset[int] = frozenset(),
        stuck_ms_max: int = STUCK_MS_MAX,
        trace: Recorder = OFF,
    ) -> None:
        """Start the loop thread, on `cpus` if any are given. `engine` must be attached already."""
        self._trace, self._stuck_s = trace, stuck_ms_max / 1000
        self._live: dict[Batch, None] = {}  # the loop thread's own: batches with jobs that are not reported
        self.waited_ns = 0  # by vLLM's thread, for copies
        self.copied_bytes, self.copied_ns = dict.fromkeys(Kind, 0), dict.fromkeys(Kind, 0)
        self.load_rate = 0.0  # bytes per second; of late
        self._loaded_ns = 0  # when the last layer of a load landed
        self._of_late = (0, 0)  # bytes of loads, and nanoseconds that they took
        self._wave_ns, self._wave_counts = 0, False  # when the wave that lands was queued; whether it says how fast
        self._engine, self._geometry = engine, geometry
        self._layers = len(geometry.layers)
        self._all = (1 << self._layers) - 1
        self._layerwise, self._wait_s = layerwise, wait_ms_max / 1000
        self.counters = counters
        self._save_machine = save_m.SAVE.compile(self._layers)
        self._load_machine = load_m.LOAD.compile(self._layers)
        self._save: Batch | None = None
        self._sync: Batch | None = None
        self._async: Batch | None = None
        self._outbox: deque[Outcome] = deque()
        self._open_jobs: dict[int, Job] = {}
        self._suspects: set[int] = set()
        self.blocks = 1 << 31  # how many paged blocks the engine has; the connector knows when caches are registered
        self.slots_ready: Callable[[], int] = lambda: geometry.slots  # how many, from the first on, may be used
        self._closed = False
        self._loop = LoopThread("kvpipe-loop", self._handle, tasks=(self._watch_over,), cpus=cpus)

    # ---- vLLM's thread -------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether the current step has per-layer work: what the hooks look at first."""
        return self._save is not None or self._sync is not None

    def begin(self, plan: StepPlan) -> None:
        """Open the step's jobs. A step that was never ended is withdrawn first."""
        if self._save is not None or self._sync is not None or self._async is not None:
            self.counters.fault("step_never_ended")
            self._withdraw()
        if not plan.jobs:
            return
        if self._closed or not self._loop.alive:
            self.counters.fault("plan_after_shutdown")
            self._outbox.extend(Outcome(job, ok=False, why="shut down") for job in plan.jobs)
            return
        by_kind: dict[Kind, list[Job]] = {}
        junk = False
        poison = self._poison(plan.jobs)
        for place, job in enumerate(plan.jobs):
            why = poison.get(place)
            if why:
                if why is not CONDEMNED:
                    self.counters.fault("poisoned_plan", job=job.id, why=why)
                self._outbox.append(Outcome(job, ok=False, why=why))
                junk |= job.kind not in {Kind.SAVE, Kind.LOAD_ASYNC}
            else:
                by_kind.setdefault(Kind(job.kind), []).append(job)
        self._save = self._open(Kind.SAVE, by_kind, plan.step)
        self._sync = self._open(Kind.LOAD_SYNC, by_kind, plan.step)
        self._async = self._open(Kind.LOAD_ASYNC, by_kind, plan.step)
        if junk:
            self._junk()

    def start_loads(self) -> None:
        """Submit every layer of the step's loads. In step mode, wait for sync loads: no hook will.

        Asynchronous loads come after sync ones, whose readers are in this very forward: at its end.
        """
        sync = self._sync
        if sync is not None:
            self._start(sync)
            if self._layerwise:
                return
            for layer in range(self._layers):
                self.wait_layer(layer)
        batch, self._async = self._async, None  # from now on it lives in the loop alone
        if batch is not None:
            self._start(batch)

    def _start(self, batch: Batch) -> None:
        if not batch.submitted:
            for layer in range(self._layers):
                self._submit(batch, layer)
            self._loop.put((SUBMITTED, batch, ""))

    def wait_layer(self, layer: int) -> None:
        """Return when `layer`'s loads are in place, or have failed."""
        batch = self._sync
        if batch is None:
            return
        if not batch.submitted:
            self.counters.fault("loads_started_by_hook")
            self.start_loads()
        bit = 1 << layer
        if batch.gave_up:
            return  # one timeout is enough: the load is failed, whatever its other layers do
        if batch.waited & bit:
            self.counters["wait_repeated"] += 1
            return
        ticket = batch.tickets[layer]
        if ticket.done:
            self._engine.reached(ticket)
        elif not self._timed(self._engine.guard_read, ticket):
            self._give_up(batch, TIMED_OUT)
            return
        batch.waited |= bit
        if ticket.failed:
            self._junk()

    def save_layer(self, layer: int) -> None:
        """Submit the copy of `layer`, once. In step mode, the step's end does it."""
        batch = self._save
        if batch is None or not self._layerwise:
            return
        if batch.submitted >> layer & 1:
            self.counters["save_repeated"] += 1
            return
        self._submit(batch, layer)

    def end_loads(self) -> None:
        """Settle the step's sync loads: every reader must have waited. Idempotent."""
        batch, self._sync = self._sync, None
        if self._async is not None:
            self.start_loads()
        if batch is None:
            return
        if not batch.submitted:
            self.counters.fault("loads_never_started")
            self._loop.put((SUBMITTED, batch, ""))
            self._loop.put((load_m.FAULT, batch, "no hook ran and the loads were never started"))
            self._junk()
        elif batch.waited == self._all:
            # rare: the engine has to hear of a failed load in this very step
            bad = batch.last is not None and any(t.failed for t in batch.tickets.values())
            if bad and batch.last is not None and not batch.last.wait(self._wait_s):
                self._give_up(batch, TIMED_OUT)
            self._loop.put((load_m.CONFIRM, batch, ""))
        elif batch.gave_up:
            self._loop.put((load_m.UNWAITED, batch, TIMED_OUT))
        else:
            self.counters.fault("layers_read_without_waiting")
            if batch.last is not None:
                self._engine.guard_read(batch.last, self._wait_s)
            self._suspect(batch)
            self._loop.put((load_m.UNWAITED, batch, "a layer was read without waiting for its copy"))
            self._junk()
        self._settle()

    def end_step(self) -> None:
        """Settle the step: loads, then saves. Repeated, early or empty calls find nothing to do."""
        self.end_loads()
        batch, self._save = self._save, None
        if batch is None:
            self.counters["step_end_empty"] += 1
            return
        if not self._layerwise:
            for layer in range(self._layers):
                self._submit(batch, layer)
        if batch.submitted != self._all:
            self.counters.fault("layers_never_submitted", missing=self._layers - batch.submitted.bit_count())
        self._loop.put((STEP_END, batch, "a layer was never submitted"))
        if batch.last is not None and not self._timed(self._engine.fence, batch.last):
            self._give_up(batch, TIMED_OUT)
        self._settle()

    def collect(self) -> list[Outcome]:
        """Return how jobs ended since the last call, each exactly once."""
        lost = not self._loop.alive  # asked first: what it reported before its end is in the outbox
        out = []
        while self._outbox:
            outcome = self._outbox.popleft()
            self._open_jobs.pop(outcome.job.id, None)
            out.append(outcome)
        if lost and self._open_jobs:
            self.counters.fault("loop_lost")
            out += [Outcome(job, ok=False, why="the loop was lost") for job in self._open_jobs.values()]
            self._open_jobs.clear()
        return out

    @property
    def machines(self) -> tuple[Compiled, ...]:
        """The machines whose cursors this pipeline owns."""
        return self._save_machine, self._load_machine

    @property
    def alive(self) -> bool:
        """Whether jobs can be carried out: False once the loop is lost, not after a shutdown."""
        return self._closed or self._loop.alive

    @property
    def in_flight(self) -> int:
        """Jobs that were begun and not yet collected."""
        return len(self._open_jobs)

    def shutdown(self) -> None:
        """Withdraw what is open, finish what was submitted, end the threads. Idempotent."""
        if self._closed:
            return
        self._withdraw()
        self._closed = True
        self._engine.shutdown()
        self._loop.stop()

    def _poison(self, jobs: tuple[Job, ...]) -> dict[int, str]:
        """Return why jobs cannot be carried out, by their places in `jobs`. All are looked at together at first."""
        if len(jobs) > 1 and not self._poison_of(jobs):
            return {}
        each = ((place, self._poison_of((job,))) for place, job in enumerate(jobs))
        return {place: why for place, why in each if why}

    def _poison_of(self, jobs: tuple[Job, ...]) -> str:
        """Return why not all of `jobs` can be carried out, or nothing."""
        for job in jobs:
            if job.kind not in Kind.__members__.values():
                return f"unknown kind {job.kind}"
            if len(job.rows) % ROW_BYTES:
                return "its rows are cut"
        group, slot, page, block = table_of(jobs).T
        if not len(group):
            return ""
        pages = np.asarray(self._geometry.pages_per_chunk)
        if (slot == BROKEN).any():
            return CONDEMNED
        wrong = {
            "a group": (group < 0) | (group >= len(pages)),
            "a slot": (slot < 0) | (slot >= self.slots_ready()),
            "a page": (page < 0) | (page >= pages[np.clip(group, 0, len(pages) - 1)]),
            "a block": (block < 0) | (block >= self.blocks),
        }
        return next((f"{what} is out of range" for what, where in wrong.items() if where.any()), "")

    def _open(self, kind: Kind, by_kind: dict[Kind, list[Job]], step: int) -> Batch | None:
        jobs = by_kind.get(kind)
        if not jobs:
            return None
        batch = Batch(kind, tuple(jobs), len(self._geometry.groups), step)
        batch.traced = self._trace.detail and any(self._trace.sampled(job.request) for job in jobs)
        self._open_jobs.update((job.id, job) for job in jobs)
        self._engine.prepare(batch.plan)
        self._loop.put((OPEN, batch, ""), wake=False)  # nothing is to be done before its first copy, or its step's end
        return batch

    def _submit(self, batch: Batch, layer: int) -> None:
        if batch.submitted >> layer & 1:
            return
        ticket = Ticket(batch, layer, batch.submitted.bit_count(), self._loop.put)
        batch.submitted |= 1 << layer
        batch.tickets[layer] = ticket
        batch.open.append(ticket)
        if batch.traced:
            ids = [job.id for job in batch.jobs]
            said, kind, mover = self._said(batch), batch.kind.name.lower(), batch.plan.mover
            self._trace.put(e.LayerSubmitted(*said, kind=kind, layer=layer, jobs=ids, mover=mover))
        if batch.doomed:
            ticket.complete(frozenset(job.id for job in batch.jobs))
            return
        try:
            self._engine.submit(batch.plan, ticket)
            batch.last = ticket
            if ticket.over:  # copied inline: the engine's thread has done it itself
                self.waited_ns += time.monotonic_ns() - ticket.born_ns
        except Exception as error:  # noqa: BLE001  (no thread could be started, say: a ticket would never end)
            self.counters.fault("submit_failed", error=repr(error))
            if not ticket.over:
                ticket.complete(frozenset(job.id for job in batch.jobs))

    def _timed(self, wait: Callable[[Ticket, float], bool], ticket: Ticket) -> bool:
        began = time.monotonic_ns()
        done = wait(ticket, self._wait_s)
        self.waited_ns += time.monotonic_ns() - began
        return done

    def _junk(self) -> None:
        """A sync load of this step failed: whatever the step computes may rest on garbage, so it is not saved."""
        if self._save is not None:
            self._loop.put((save_m.FAULT, self._save, "computed in a step whose load failed"))

    def _give_up(self, batch: Batch, why: str) -> None:
        self.counters.fault("copy_timeout", why=why)
        batch.gave_up = True
        for ticket in batch.tickets.values():  # what has not begun shall not write into blocks that are given back
            self._engine.abandon(ticket)
        self._trace.put(e.TierSlow(*self._said(batch), tier=TIER, waited_ms=self._wait_s * 1000))
        if batch.kind is Kind.LOAD_SYNC:
            self._suspect(batch)
        self._loop.put((save_m.FAULT, batch, why))
        self._junk()

    def _suspect(self, batch: Batch) -> None:
        """Let the engine hear of failed sync loads in this step; the jobs end when their copies do."""
        batch.told = True
        for job in batch.jobs:
            self._suspects |= job.blocks()

    def take_suspects(self) -> set[int]:
        """Return the blocks of sync loads that failed since the last call, and whose copies may not have ended."""
        suspects, self._suspects = self._suspects, set()
        return suspects

    def _withdraw(self) -> None:
        for batch in (self._save, self._sync, self._async):
            if batch is None:
                continue
            if batch.last is not None:  # nothing may still read or write once the job is reported
                self._engine.fence(batch.last, self._wait_s)
            self._loop.put((save_m.CANCEL, batch, "its step never ended"))
        self._save = self._sync = self._async = None
        self._settle()

    def _settle(self) -> None:
        if not self._loop.settle(self._wait_s):
            self.counters.fault("loop_did_not_settle")

    # ---- the loop thread -----------------------------------------------------------------------------------------

    def _handle(self, item: Ticket | tuple[str, Batch, str]) -> None:
        if isinstance(item, Ticket):
            batch = item.batch
            assert isinstance(batch, Batch)  # noqa: S101  (tickets are made in _submit only)
            batch.moved_ns = time.monotonic_ns()
            self._landed(batch, item)
        else:
            event, batch, why = item
            self._told(batch, event, why)
        self._report(batch)

    def _report(self, batch: Batch) -> None:
        """Tell how jobs ended, but only when no copy can touch their slots or blocks any more."""
        if batch.closed and batch.settled:
            self._outbox.extend(o._replace(why=TOLD) if batch.told else o for o in batch.ended)
            batch.ended = []
            if all(cursor.state.final for cursor in batch.cursors.values()):
                self._live.pop(batch, None)

    def _told(self, batch: Batch, event: str, why: str) -> None:
        if event == OPEN:
            machine = self._save_machine if batch.kind is Kind.SAVE else self._load_machine
            batch.cursors = {job.id: LayerCursor(machine, job.id, self._watch(batch, job)) for job in batch.jobs}
            self._live[batch] = None
            return
        if event == SUBMITTED:
            batch.closed = True
            return
        if event == STEP_END:
            batch.closed = True
            whole = batch.submitted == self._all
            event = save_m.STEP_END_COMPLETE if whole else save_m.STEP_END_MISSING
        elif event == save_m.CANCEL:
            batch.closed = True
        elif event == load_m.CONFIRM:
            batch.confirmed = True
        for job in batch.jobs:
            self._fire(batch, job, batch.cursors[job.id].fire, event, why)

    def _landed(self, batch: Batch, ticket: Ticket) -> None:
        took_ns = time.monotonic_ns() - ticket.born_ns
        self.copied_ns[batch.kind] += took_ns
        if not ticket.failed:
            size = self._bytes(batch, ticket.layer)
            self.copied_bytes[batch.kind] += size
            if batch.kind is not Kind.SAVE:
                self._rate(ticket, size)
        if batch.traced:
            self._trace.put(e.LayerCopied(
                ticket.born_ns, *self._said(batch)[1:], kind=batch.kind.name.lower(), layer=ticket.layer,
                jobs=[job.id for job in batch.jobs], took_ns=took_ns, failed=sorted(ticket.failed),
            ))  # fmt: skip
        for job in batch.jobs:
            cursor = batch.cursors[job.id]
            if job.id in ticket.failed:
                self._fire(batch, job, cursor.fire, save_m.FAULT, f"the copy of layer {ticket.layer} failed")
                continue
            self._fire(batch, job, cursor.landed, ticket.ordinal, "completions out of order")
            if batch.confirmed and cursor.state.row == load_m.LANDED:
                self._fire(batch, job, cursor.fire, load_m.CONFIRM, "")
            elif batch.kind is Kind.SAVE and batch.closed and cursor.state.row == save_m.LANDED:
                self._fire(batch, job, cursor.fire, save_m.STEP_END_COMPLETE, "")

    def _fire(self, batch: Batch, job: Job, move: Callable[[_News, str], Edge], news: _News, why: str) -> None:
        cursor = batch.cursors[job.id]
        was_final = cursor.state.final
        try:
            edge = move(news, why)
        except IllegalTransition as error:
            # a bug of ours: the job is failed rather than trusted, and the engine never hears of it
            said = {"machine": error.machine, "state": error.state, "on": error.event, "why": error.why}
            self.counters.fault("illegal_transition", **said)
            if was_final:
                return
            why = str(error)
            edge = cursor.fire(save_m.FAULT, why)
        if not edge.moves:
            self.counters["no_op_transitions"] += 1
            return
        batch.moves.append((job.id, edge))
        if cursor.state.final:
            ok = cursor.state.row == save_m.FINALIZED
            batch.ended.append(Outcome(job, ok, "" if ok else why))
            if not ok:
                self.counters.fault("job_failed", job=job.id, request=job.request, state=cursor.state.name, why=why)

    def _rate(self, ticket: Ticket, size: int) -> None:
        """Learn how fast loads are, from layers that were queued before the one before them had landed.

        Others may have waited for compute. Layers that were queued together (a wave) land together.
        """
        now = time.monotonic_ns()
        if ticket.begun_ns != self._wave_ns:
            self._wave_ns, self._wave_counts = ticket.begun_ns, self._loaded_ns > ticket.begun_ns
        took_ns, self._loaded_ns = now - self._loaded_ns, now
        if not self._wave_counts:
            return
        loaded, spent_ns = self._of_late
        self._of_late = loaded + size, spent_ns + max(0, took_ns)
        self.load_rate = self._of_late[0] * 1e9 / max(1, self._of_late[1])
        if self._of_late[0] > RATE_BYTES:
            self._of_late = self._of_late[0] // 2, self._of_late[1] // 2

    # ---- what is told ---------------------------------------------------------------------------------------------

    def _said(self, batch: Batch) -> tuple[int, int, str, int, int]:
        """What every event about `batch` says first; of its request, if it is about one only."""
        job = batch.jobs[0]
        request, epoch = (job.request, job.epoch) if len(batch.jobs) == 1 else ("", 0)
        return time.monotonic_ns(), self._trace.rank, request, epoch, batch.step

    def _watch(self, batch: Batch, job: Job) -> Watch | None:
        """Who hears of the job's moves; of a job that is not in the sample, only of its failure."""
        if not self._trace.detail:
            return None
        told = self._moved if self._trace.sampled(job.request) else self._failed
        return functools.partial(told, batch.step, job)

    def _moved(self, step: int, job: Job, cursor: Cursor, was: State, edge: Edge, why: str) -> None:
        why = why if edge.to.row == save_m.FAILED else ""
        self._trace.took(job.request, job.epoch, step, cursor, job.id, was, edge, why)

    def _failed(self, step: int, job: Job, cursor: Cursor, was: State, edge: Edge, why: str) -> None:
        if edge.rejects or (edge.moves and edge.to.row == save_m.FAILED):
            self._trace.took(job.request, job.epoch, step, cursor, job.id, was, edge, why)

    def _bytes(self, batch: Batch, layer: int) -> int:
        """Bytes of one layer of a batch."""
        group, index = self._geometry.layers[layer]
        return batch.pages[group] * self._geometry.groups[group].layers[index].page_bytes

    # ---- the watchdog ---------------------------------------------------------------------------------------------

    async def _watch_over(self) -> None:
        """Fail jobs whose copies have not ended, and that have not moved, for `stuck_ms_max`."""
        while True:
            await anyio.sleep(self._stuck_s / WATCHES_PER_LIMIT)
            self._loop.drain()  # a batch may have been put there without waking anybody
            oldest_ns = time.monotonic_ns() - int(self._stuck_s * 1e9)
            for batch in [one for one in self._live if self._is_stuck(one, oldest_ns)]:
                self._unstick(batch)

    @staticmethod
    def _is_stuck(batch: Batch, oldest_ns: int) -> bool:
        last = batch.last  # of vLLM's thread: a step may still be submitting
        born_ns = last.born_ns if last is not None else 0
        return max(batch.moved_ns, born_ns) < oldest_ns and (batch.doomed or not batch.settled)

    def _unstick(self, batch: Batch) -> None:
        if not all(cursor.state.final for cursor in batch.cursors.values()):
            waited_ms, kind = round((time.monotonic_ns() - batch.moved_ns) / 1e6), batch.kind.name.lower()
            for job in batch.jobs:
                moves = [f"{edge.event} -> {edge.to.name}" for number, edge in batch.moves if number == job.id]
                last = moves[-LAST_MOVES:]
                said = (time.monotonic_ns(), self._trace.rank, job.request, job.epoch, batch.step)
                self.counters.noted("stuck")
                self._trace.put(e.Stuck(*said, job=job.id, kind=kind, waited_ms=waited_ms, last=last))
        batch.doomed = True  # first: what is submitted from now on is not begun
        for job in batch.jobs:
            if not batch.cursors[job.id].state.final:
                self._fire(batch, job, batch.cursors[job.id].fire, save_m.FAULT, STUCK)
        # told only when it is safe: what cannot be taken back may still write, and is asked again
        for ticket in tuple(batch.tickets.values()):
            ticket.withdrawn = ticket.withdrawn or self._engine.abandon(ticket)
        self._report(batch)
