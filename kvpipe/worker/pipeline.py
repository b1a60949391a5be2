"""The calls of one rank's steps, on vLLM's thread: they submit copies, and order compute after them.

The step machine defines what each call does in each state: all are harmless when repeated, missing or out of order.
`copies` handles the completions of submitted copies, on the loop thread.

A layer without a hook is loaded before the step's compute begins, and saved when the step ends. In step mode no layer
has a hook; neither has any layer in a step that is replayed from a CUDA graph (`replayed`).
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from itertools import pairwise
from typing import Any, Final

from kvpipe.geometry import Geometry
from kvpipe.messages import Job, Kind, StepPlan
from kvpipe.statemachine import copy as copy_m
from kvpipe.statemachine import step as m
from kvpipe.statemachine.core import Cursor
from kvpipe.trace import events as e
from kvpipe.trace.log import Counters
from kvpipe.trace.recorder import OFF, Recorder
from kvpipe.transfer.base import DONE, Ticket, TransferEngine
from kvpipe.worker.async_loads import AsyncLoads
from kvpipe.worker.batch import Batch
from kvpipe.worker.copies import OPENED, SUBMITTED, Copies
from kvpipe.worker.limits import PLANNED_TO_FAIL, Limits
from kvpipe.worker.outcomes import Outcomes

TIER: Final = "memory"
STUCK_MS_MAX: Final = 60_000
BLOCKS_MAX: Final = 1 << 31
TIMED_OUT: Final = "the copy did not complete in wait_ms_max"
NOT_BEGUN: Final = "its step could not be begun"
_failed: Final = operator.attrgetter("failed")


class Pipeline:
    """Saves and loads for one rank. Two calls are those of its `outcomes`: `collect` and `take_suspects`."""

    def __init__(
        self,
        engine: TransferEngine,
        geometry: Geometry,
        *,
        wait_ms_max: int,
        counters: Counters,
        blocks: int = BLOCKS_MAX,
        slots_ready: Callable[[], int] | None = None,
        unhooked: Collection[int] = (),
        replayed: Callable[[Any], bool] | None = None,
        fences_late: bool = False,
        cpus: frozenset[int] = frozenset(),
        stuck_ms_max: int = STUCK_MS_MAX,
        trace: Recorder = OFF,
    ) -> None:
        """Start the loop thread, bound to `cpus` if any are given. `engine` must be attached already.

        `wait_ms_max`: longest wait for a copy; then its jobs fail. `blocks`: number of paged blocks. `slots_ready()`:
        returns how many slots may be used; None: all. `unhooked`: indices of layers for which no hook is called.
        `replayed(context)`: whether no hook will be called in the step; None: in each. `fences_late`: `fence` is called
        before the next step's compute.
        """
        self.counters, self._replayed, self._fences_late = counters, replayed, fences_late
        self.waited_ns = 0  # for copies
        self._engine, self._trace, self._wait_s = engine, trace, wait_ms_max / 1000
        self._limits = Limits(geometry.pages_per_chunk, blocks, slots_ready or (lambda: geometry.slots))
        self._groups, self._layers = len(geometry.groups), range(len(geometry.layers))
        self._unhooked = tuple(layer for layer in self._layers if layer in unhooked)
        self._hooked = tuple(layer for layer in self._layers if layer not in unhooked)
        self._late, self._next = frozenset(self._unhooked), {layer: layer for layer in self._layers}
        self._next.update(pairwise(self._hooked))
        self.step = Cursor(m.STEP.compile(), "step")  # idle without jobs: then layer hooks have nothing to do
        self._save: Batch | None = None  # the open step's jobs, by kind
        self._sync: Batch | None = None
        self._async: Batch | None = None
        self._unfenced: Batch | None = None  # its saves may still read blocks
        self._computes = True  # anything, the open step
        self.copies = Copies(
            geometry, engine.abandon, counters=counters, stuck_ms_max=stuck_ms_max, cpus=cpus, trace=trace
        )
        self._landed = self.copies.completed  # the sink of all tickets
        self.outcomes = outcomes = Outcomes(self.copies, counters)
        self.collect, self.take_suspects = outcomes.collect, outcomes.take_suspects
        self.async_loads = AsyncLoads(self.copies.loop, outcomes)

    # ---- a step ---------------------------------------------------------------------------------------------------

    def begin(self, plan: StepPlan) -> None:
        """Open the step's jobs. A step that was never ended is withdrawn first, and one that was not fenced is fenced.

        If it raises, all jobs of `plan` are reported as failed, and no step is open.
        """
        try:
            if self._unfenced is not None:
                self.fence()
            self.step.fire(m.BIND)
            if self._save is not None or self._sync is not None or self._async is not None:
                # also after the step's end: the engine raised in it
                self.counters.fault("step_never_ended")
                self._withdraw()
            if plan.jobs:
                self._open_step(plan)
        except Exception:
            self.outcomes.refuse_rest(plan.jobs, NOT_BEGUN)
            self.step.fire(m.BIND)
            self._withdraw()
            raise

    def _open_step(self, plan: StepPlan) -> None:
        if not self.copies.loop.alive:
            self.counters.fault("plan_after_shutdown")
            self.outcomes.refuse(plan.jobs, "shut down")
            return
        self.step.fire(m.PLAN)
        self._computes = plan.computes
        by_kind: dict[int, list[Job]] = {}
        refused = self._limits.refused(plan.jobs)
        for place, job in enumerate(plan.jobs):
            if place not in refused:
                by_kind.setdefault(job.kind, []).append(job)
        self._save = self._open(Kind.SAVE, by_kind, plan.step)
        self._sync = self._open(Kind.LOAD_SYNC, by_kind, plan.step)
        self._async = self._open(Kind.LOAD_ASYNC, by_kind, plan.step)
        for batch in (self._save, self._sync, self._async):
            if batch is not None:
                self._engine.prepare(batch.plan)
        for place, why in refused.items():
            self._refuse(plan.jobs[place], why)

    def start_loads(self, context: object = None) -> None:
        """Submit every layer of the step's loads. Wait for the sync loads of layers without a hook.

        `context`: the engine's, of the forward that begins; only `replayed` reads it. Asynchronous loads are submitted
        after the sync ones are settled, because those are read in this forward.
        """
        if self.step.fire(m.START_LOADS).moves and (self._sync is not None or self._async is not None):
            self._start_loads(context)

    def wait_layer(self, layer: int) -> None:
        """Order compute after the loads of `layer` and of the next hooked layer, unless they fail.

        The next one too, because a layer's new KV is written before its hook is called: after a full hit, the prompt's
        last token is computed again and written into a block that is being loaded.
        """
        batch = self._sync
        if batch is None:
            return
        if self.step.fire(m.WAIT_LAYER).moves:
            self.counters.fault("loads_started_by_hook")
            self._submit_all(batch)  # and no more: layers without a hook were read already, or may have been
        if layer in batch.waited:
            self.counters["wait_repeated"] += 1
        elif (layer in batch.guarded or self._guard(batch, layer)) and self._guard(batch, self._next[layer]):
            batch.waited.add(layer)

    def save_layer(self, layer: int) -> None:
        """Submit the save of `layer`, once. Layers without a hook are submitted at the step's end."""
        batch = self._save
        if batch is None or layer in self._late:
            return
        if layer in batch.tickets:
            self.counters["save_repeated"] += 1
        else:
            self._submit(batch, layer)

    def end_loads(self) -> None:
        """Settle the step's sync loads: confirm them if every layer has waited, else fail them. Idempotent."""
        was = self.step.state.row
        if self.step.fire(m.SETTLE).moves:
            self._settle_loads(was)

    def end_step(self) -> None:
        """End the step: its loads, then its saves. Repeated or extra calls do nothing."""
        was = self.step.state.row
        if self.step.fire(m.STEP_END).moves:
            self._end(was)
        else:
            self.counters["step_end_empty"] += 1

    def clear(self) -> None:
        """End the step if `end_step` was not called."""
        was = self.step.state.row
        if self.step.fire(m.CLEAR).moves:
            if self._save is not None or self._sync is not None:  # else nothing waits for the end
                self.counters.fault("step_end_skipped")
            self._end(was)

    def fence(self) -> None:
        """Order the caller's next compute, which may write their blocks, after the reads of the last step's saves."""
        batch, self._unfenced = self._unfenced, None
        if batch is not None and batch.last is not None:
            fenced = False
            try:
                fenced = self._timed(self._engine.fence, batch.last)
            finally:
                if not fenced:
                    self._give_up(batch, TIMED_OUT)

    def shutdown(self) -> None:
        """Withdraw open jobs, finish submitted copies, end the threads. Idempotent."""
        if self.step.fire(m.SHUTDOWN).moves:
            with ExitStack() as always:
                always.callback(self.copies.loop.stop)
                always.callback(self._engine.shutdown)
                self._withdraw()

    @property
    def alive(self) -> bool:
        """False once the loop thread has died. True after a shutdown."""
        return self.step.state.final or self.copies.loop.alive

    @property
    def in_flight(self) -> int:
        """The number of jobs that were begun and not yet collected."""
        return len(self.outcomes.uncollected)

    # ---- its parts ------------------------------------------------------------------------------------------------

    def _refuse(self, job: Job, why: str) -> None:
        if why is not PLANNED_TO_FAIL:
            self.counters.fault("poisoned_plan", job=job.id, why=why)
        self.outcomes.refuse([job], why)
        if job.kind not in {Kind.SAVE, Kind.LOAD_ASYNC}:
            self._fail_step_saves()

    def _open(self, kind: Kind, by_kind: dict[int, list[Job]], step: int) -> Batch | None:
        jobs = by_kind.get(kind)
        if not jobs:
            return None
        traced = self._trace.detail and any(self._trace.sampled(job.request) for job in jobs)
        batch = Batch(kind, tuple(jobs), self._groups, step, traced=traced)
        self.copies.put(OPENED, batch, wake=False)  # nothing is to be done before its first copy, or its step's end
        self.outcomes.uncollected.update((job.id, job) for job in jobs)
        return batch

    def _start_loads(self, context: object) -> None:
        sync = self._sync
        if sync is not None:
            self._submit_all(sync)
            replayed = self._replayed is not None and self._replayed(context)
            for layer in self._layers if replayed else self._unhooked:
                self.wait_layer(layer)
            if self._hooked and not replayed:
                self._guard(sync, self._hooked[0])
                return
        if self._async is not None:
            self._start_async(self._async)

    def _start_async(self, batch: Batch) -> None:
        """From now on `batch` lives in the loop alone."""
        self._async = None
        self._submit_all(batch)
        self.async_loads.begun(batch)

    def _submit_all(self, batch: Batch) -> None:
        for layer in (*self._unhooked, *self._hooked):
            self._submit(batch, layer)
        self.copies.put(SUBMITTED, batch)

    def _submit(self, batch: Batch, layer: int) -> None:
        if layer in batch.tickets:
            return
        ticket = batch.tickets[layer] = Ticket(batch, layer, len(batch.tickets), self._landed)
        batch.open.append(ticket)
        if batch.traced:
            ids, kind = [job.id for job in batch.jobs], batch.kind.name.lower()
            header, mover = batch.header(self._trace.rank), batch.plan.mover
            self._trace.put(e.LayerSubmitted(*header, kind=kind, layer=layer, jobs=ids, mover=mover))
        if batch.stuck:
            ticket.complete(batch.ids)
            return
        try:
            self._engine.submit(batch.plan, ticket)
            batch.last = ticket
            if ticket.state is DONE:  # copied inline: the engine's thread has done it itself
                self.waited_ns += ticket.done_ns - ticket.born_ns
        except Exception as error:  # noqa: BLE001  (such as no thread: a ticket would never end)
            self.counters.fault("submit_failed", error=repr(error))
            if not ticket.over:
                ticket.complete(batch.ids)

    def _guard(self, batch: Batch, layer: int) -> bool:
        """Order the caller's next compute after the load of `layer`. Returns False if it was given up."""
        if layer in batch.guarded:
            return True
        ticket = batch.tickets[layer]
        if ticket.state is DONE:
            self._engine.reached(ticket)
        elif self.step.state.row == m.GIVEN_UP:
            return False  # one timeout is enough: the load is failed, whatever its other layers do
        elif not self._timed(self._engine.guard_read, ticket):
            self.step.fire(m.TIME_OUT)
            self._give_up(batch, TIMED_OUT)
            return False
        batch.guarded.add(layer)
        if ticket.failed:
            self._fail_step_saves()
        return True

    def _settle_loads(self, was: str) -> None:
        """End the sync loads of a step that was in state `was`: confirm them if every layer waited, else fail them."""
        batch, self._sync = self._sync, None
        if self._async is not None:
            self._start_async(self._async)
        if batch is None:
            return
        if was == m.OPEN:
            self.counters.fault("loads_never_started")
            self.copies.put(SUBMITTED, batch)
            self.copies.put(copy_m.FAULT, batch, "no hook ran and the loads were never started")
            self._fail_step_saves()
        elif was == m.GIVEN_UP:
            self.copies.put(copy_m.DENY, batch, TIMED_OUT)
        elif len(batch.waited) == len(self._layers):
            # rare: a failed load has to be reported to the engine in this very step
            bad = batch.last is not None and any(map(_failed, batch.tickets.values()))
            if bad and batch.last is not None and not batch.last.wait(self._wait_s):
                self._give_up(batch, TIMED_OUT)
            self.copies.put(copy_m.CONFIRM, batch)
        else:
            self.counters.fault("layers_read_without_waiting")
            self.outcomes.suspect(batch)
            self.copies.put(copy_m.DENY, batch, "a layer was read without waiting for its copy")
            self._fail_step_saves()
            if batch.last is not None:
                self._engine.guard_read(batch.last, self._wait_s)
        self._settle()

    def _end(self, was: str) -> None:
        """End the loads, if they were not settled, and the saves of a step that was in state `was`."""
        if was != m.SETTLED:
            self._settle_loads(was)
        batch, self._save = self._save, None
        if batch is None:
            return
        without = not batch.tickets and (self._replayed is not None or not self._computes)  # no hook has come
        for layer in self._layers if without else self._unhooked:
            self._submit(batch, layer)
        self.copies.put(SUBMITTED, batch, wake=False)
        missing = len(self._layers) - len(batch.tickets)
        if missing:
            self.counters.fault("layers_never_submitted", missing=missing)
            self.copies.put(copy_m.DENY, batch, "a layer was never submitted")
        else:
            self.copies.put(copy_m.CONFIRM, batch)
        self._unfenced = batch
        if not self._fences_late:
            self.fence()
        self._settle()

    def _withdraw(self) -> None:
        batches = self._save, self._sync, self._async
        self._save = self._sync = self._async = None
        with ExitStack() as always:
            always.callback(self._settle)
            for batch in filter(None, batches):
                always.callback(self._withdraw_batch, batch)

    def _withdraw_batch(self, batch: Batch) -> None:
        try:
            if batch.last is not None:  # nothing may still read or write once the job is reported
                self._engine.fence(batch.last, self._wait_s)
        finally:
            if batch.kind is Kind.LOAD_SYNC:
                self.outcomes.suspect(batch)
            self.copies.put(SUBMITTED, batch, wake=False)
            self.copies.put(copy_m.CANCEL if batch.kind is Kind.SAVE else copy_m.FAULT, batch, "its step never ended")

    def _timed(self, wait: Callable[[Ticket, float], bool], ticket: Ticket) -> bool:
        began = time.monotonic_ns()
        done = wait(ticket, self._wait_s)
        self.waited_ns += time.monotonic_ns() - began
        return done

    def _give_up(self, batch: Batch, why: str) -> None:
        self.counters.fault("copy_timeout", why=why)
        for ticket in batch.tickets.values():  # what has not begun shall not write into blocks that are given back
            self._engine.abandon(ticket)
        self._trace.put(e.TierSlow(*batch.header(self._trace.rank), tier=TIER, waited_ms=self._wait_s * 1000))
        if batch.kind is Kind.LOAD_SYNC:
            self.outcomes.suspect(batch)
        self.copies.put(copy_m.FAULT, batch, why)
        self._fail_step_saves()

    def _fail_step_saves(self) -> None:
        """Fail the step's saves: a sync load of the step has failed, so what it computes may be garbage."""
        if self._save is not None:
            self.copies.put(copy_m.FAULT, self._save, "computed in a step whose load failed")

    def _settle(self) -> None:
        if not self.copies.loop.settle(self._wait_s):
            self.counters.fault("loop_did_not_settle")
