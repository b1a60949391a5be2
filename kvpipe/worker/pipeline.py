"""The calls of one rank's steps on vLLM's thread submit copies, and order compute after the copies.

The step machine defines the effect of each call in each state. A repeated, missing or misplaced call is harmless.
The module `copies` handles the completions of submitted copies on the loop thread.

A layer without a hook is loaded before the step's compute begins, and saved when the step ends. In step mode no layer
has a hook. In a step that is replayed from a CUDA graph (`replayed`) no layer has a hook either.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from typing import Final

from kvpipe.protocol.geometry import Geometry
from kvpipe.protocol.messages import Job, Kind, StepPlan
from kvpipe.statemachine import copy as copy_m
from kvpipe.statemachine import step as m
from kvpipe.statemachine.core import Cursor
from kvpipe.trace import events as e
from kvpipe.transfer.base import DONE, Ticket, TransferEngine
from kvpipe.worker.async_loads import AsyncLoads
from kvpipe.worker.batch import NO_BATCH, Batch
from kvpipe.worker.caches import EVERY_HOOK, Hooks
from kvpipe.worker.checks import SlotChecks
from kvpipe.worker.context import RankContext
from kvpipe.worker.copies import OPENED, SUBMITTED, Copies
from kvpipe.worker.limits import PLANNED_TO_FAIL, Limits
from kvpipe.worker.outcomes import Outcomes
from kvpipe.worker.watchdog import Watchdog

TIER: Final = "memory"
BLOCKS_MAX: Final = 1 << 31
TIMED_OUT: Final = "the copy did not complete in wait_ms_max"
NOT_BEGUN: Final = "its step could not be begun"
_failed: Final = operator.attrgetter("failed")


class Pipeline:
    """The saves and loads of one rank. `collect` and `take_suspects` are methods of `outcomes`."""

    def __init__(
        self,
        context: RankContext,
        engine: TransferEngine,
        geometry: Geometry,
        *,
        hooks: Hooks[int] = EVERY_HOOK,
        blocks: int = BLOCKS_MAX,
        slots_ready: Callable[[], int] | None = None,
        saves: bool = True,
        checks: SlotChecks | None = None,
    ) -> None:
        """Start the loop thread. `engine` must be attached already. `hooks` has the numbers of layers.

        `blocks` is the number of paged blocks. `slots_ready()` returns the number of usable slots. Without
        `slots_ready`, all slots are usable. A copy's jobs fail after a wait of `wait_ms_max` (a setting). Without
        `saves`, this rank's saves copy nothing, because another rank saves the same bytes. Without `checks`, slots have
        no marks.
        """
        self.counters, self._hooks, self._saves, self._checks = context.counters, hooks, saves, checks
        self.waited_ns = 0  # the time that vLLM's thread has waited for copies
        self._engine, self._trace, self._wait_s = engine, context.trace, context.settings.wait_ms_max / 1000
        self._limits = Limits(geometry.pages_per_chunk, blocks, slots_ready or (lambda: geometry.slots))
        self._groups, self._layers = len(geometry.groups), range(len(geometry.layers))
        self._unhooked = tuple(layer for layer in self._layers if layer in hooks.unhooked)
        self._hooked = tuple(layer for layer in self._layers if layer not in hooks.unhooked)
        self._all = (*self._unhooked, *self._hooked)
        self._late, self._next = frozenset(self._unhooked), {layer: layer for layer in self._layers}
        self._next.update(pairwise(self._hooked))
        self.step = Cursor(m.STEP.compile(), "step")  # a step without jobs leaves the cursor IDLE
        self._save = self._sync = self._async = NO_BATCH  # the open step's saves, sync loads and async loads
        self._unfenced = NO_BATCH  # the last step's saves, which may still read blocks
        self._computes = True  # whether the open step computes any tokens
        self.copies = Copies(context, geometry, engine.abandon, saves=saves, checks=checks, scrub=engine.scrub)
        self.copies.loop.start(Watchdog(self.copies, engine.abandon, context.settings.stuck_ms_max, checks).run)
        self._landed = self.copies.completed  # the sink of all tickets
        self.outcomes = outcomes = Outcomes(self.copies)
        self.collect, self.take_suspects = outcomes.collect, outcomes.take_suspects
        self.async_loads = AsyncLoads(self.copies.loop, outcomes)

    # ---- a step ---------------------------------------------------------------------------------------------------

    def begin(self, plan: StepPlan) -> None:
        """Open the step's jobs. If the previous step was never fenced or never ended, fence or withdraw it first.

        If this method raises, then all jobs of `plan` are reported as failed, and no step is open.
        """
        try:
            if self._unfenced.jobs:
                self.fence()
            self.step.fire(m.BIND)
            if self._save.jobs or self._sync.jobs or self._async.jobs:
                # Jobs are also open here if the transfer engine raised in the call that ends a step.
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
        wrong = refused = self._limits.refused(plan.jobs)
        if self._checks is not None:
            refused = self._checks.refused(plan.jobs, wrong)
        for place, job in enumerate(plan.jobs):
            if place not in refused:
                by_kind.setdefault(job.kind, []).append(job)
        self._save = self._open(Kind.SAVE, by_kind, plan.step)
        self._sync = self._open(Kind.LOAD_SYNC, by_kind, plan.step)
        self._async = self._open(Kind.LOAD_ASYNC, by_kind, plan.step)
        for batch in (self._save, self._sync, self._async):
            if batch.jobs and self._checks is not None:
                self._checks.begin(batch)
            if batch.jobs and (batch.kind is not Kind.SAVE or batch.traced):  # the trace needs the plan's mover
                self._engine.prepare(batch.plan)
        for place, why in refused.items():
            self._refuse(plan.jobs[place], why, poisoned=place in wrong)

    def start_loads(self, forward: object = None) -> None:
        """Submit every layer of the step's loads. Wait for the sync loads of layers without a hook.

        `forward` is the engine's object for the forward that begins. Only `replayed` reads `forward`. Asynchronous
        loads are submitted after the sync loads are settled, because this forward reads the blocks of sync loads.
        """
        if self.step.fire(m.START_LOADS).moves and (self._sync.jobs or self._async.jobs):
            self._start_loads(forward)

    def wait_layer(self, layer: int) -> None:
        """Order later compute after the loads of `layer` and of the next hooked layer, unless a load has failed.

        The next layer's loads also matter, because vLLM writes a layer's new KV before vLLM calls the layer's hook.
        After a full hit, for example, the KV of the prompt's last token is written into a block that is being loaded.
        """
        if not self._sync.jobs:
            return
        batch = self._sync
        if self.step.fire(m.WAIT_LAYER).moves:
            self.counters.fault("loads_started_by_hook")
            # waiting for layers without a hook would be too late: the forward may have read them
            self._submit_all(batch)
        if layer in batch.waited:
            self.counters["wait_repeated"] += 1
        elif (layer in batch.guarded or self._guard(batch, layer)) and self._guard(batch, self._next[layer]):
            batch.waited.add(layer)

    def save_layer(self, layer: int) -> None:
        """Submit the save of `layer` at the first call. Layers without a hook are saved at the step's end."""
        if not self._save.jobs or layer in self._late:
            return
        batch = self._save
        if layer in batch.tickets:
            self.counters["save_repeated"] += 1
        else:
            self._submit(batch, layer)

    def end_loads(self) -> None:
        """Confirm the step's sync loads if every layer has waited. Otherwise fail these loads. Idempotent."""
        was = self.step.state.row
        if self.step.fire(m.SETTLE).moves:
            self._settle_loads(was)

    def end_step(self) -> None:
        """End the step's loads, then the step's saves. Repeated or extra calls do nothing."""
        was = self.step.state.row
        if self.step.fire(m.STEP_END).moves:
            self._end(was)
        else:
            self.counters["step_end_empty"] += 1

    def clear(self) -> None:
        """End the step if `end_step` was not called for the step."""
        was = self.step.state.row
        if self.step.fire(m.CLEAR).moves:
            if self._save.jobs or self._sync.jobs:  # false if the step has no jobs to end
                self.counters.fault("step_end_skipped")
            self._end(was)

    def fence(self) -> None:
        """Order the caller's next compute, which may write saved blocks, after the reads of the last step's saves."""
        batch, self._unfenced = self._unfenced, NO_BATCH
        if not batch.last.done:
            fenced = False
            try:
                fenced = self._timed(self._engine.fence, batch.last)
            finally:
                if not fenced:
                    self._give_up(batch, TIMED_OUT)

    def shutdown(self) -> None:
        """Withdraw the unfinished jobs, finish the submitted copies, and end the threads. Idempotent."""
        if self.step.fire(m.SHUTDOWN).moves:
            with ExitStack() as always:
                always.callback(self.copies.loop.stop)
                if self._checks is not None:
                    always.callback(self._checks.stop)
                always.callback(self._engine.shutdown)
                self._withdraw()

    @property
    def alive(self) -> bool:
        """Whether the threads run, or have ended by a shutdown. False means that a thread has crashed."""
        return self.step.state.final or (self.copies.loop.alive and (self._checks is None or self._checks.alive))

    @property
    def in_flight(self) -> int:
        """The number of begun jobs whose outcomes are not yet collected."""
        return len(self.outcomes.uncollected)

    # ---- its parts ------------------------------------------------------------------------------------------------

    def _refuse(self, job: Job, why: str, *, poisoned: bool) -> None:
        if poisoned and why is not PLANNED_TO_FAIL:
            self.counters.fault("poisoned_plan", job=job.id, why=why)
        self.outcomes.refuse([job], why)
        if job.kind not in {Kind.SAVE, Kind.LOAD_ASYNC}:
            self._fail_step_saves()

    def _open(self, kind: Kind, by_kind: dict[int, list[Job]], step: int) -> Batch:
        jobs = by_kind.get(kind)
        if not jobs:
            return NO_BATCH
        traced = self._trace.detail and any(self._trace.sampled(job.request) for job in jobs)
        batch = Batch(kind, tuple(jobs), self._groups, step, traced=traced)
        self.copies.put(OPENED, batch, wake=False)  # the loop thread need not act before a copy or the step ends
        self.outcomes.uncollected.update((job.id, job) for job in jobs)
        return batch

    def _start_loads(self, forward: object) -> None:
        sync = self._sync
        if sync.jobs:
            self._submit_all(sync)
            replayed = self._hooks.replayed is not None and self._hooks.replayed(forward)
            for layer in self._layers if replayed else self._unhooked:
                self.wait_layer(layer)
            if self._hooked and not replayed:
                self._guard(sync, self._hooked[0])
                return
        self._start_async()

    def _start_async(self) -> None:
        """Submit the step's async loads, if any. From then on, only the loop thread follows the loads' copies."""
        batch, self._async = self._async, NO_BATCH
        if batch.jobs:
            self._submit_all(batch)
            self.async_loads.begun(batch)

    def _submit_all(self, batch: Batch) -> None:
        for layer in self._all:
            self._submit(batch, layer)
        self.copies.put(SUBMITTED, batch)

    def _submit(self, batch: Batch, layer: int) -> None:
        if layer not in batch.tickets:
            self._submit_layers(batch, (layer,))

    def _submit_layers(self, batch: Batch, layers: tuple[int, ...]) -> None:
        """Submit the copies of `layers` with one ticket. No copy of these layers was submitted before."""
        ticket = Ticket(batch, layers[0], len(batch.tickets), self._landed, layers)
        batch.tickets.update(dict.fromkeys(layers, ticket))
        batch.open.append(ticket)
        if batch.traced:
            ids, kind = [job.id for job in batch.jobs], batch.kind.name.lower()
            header, mover = batch.header(self._trace.rank), batch.plan.mover
            for layer in layers:
                self._trace.put(e.LayerSubmitted(*header, kind=kind, layer=layer, jobs=ids, mover=mover))
        if batch.stuck:
            ticket.complete(batch.ids)
            return
        if batch.kind is Kind.SAVE and not self._saves:
            ticket.complete()
            return
        try:
            self._engine.submit(batch.plan, ticket)
            batch.last = ticket
            if ticket.state is DONE:  # vLLM's thread has made the copy itself, in `submit`
                self.waited_ns += ticket.done_ns - ticket.born_ns
        except Exception as error:  # noqa: BLE001  (any error: else the ticket would never end)
            self.counters.fault("submit_failed", error=repr(error))
            if not ticket.over:
                ticket.complete(batch.ids)

    def _guard(self, batch: Batch, layer: int) -> bool:
        """Order the caller's next compute after the load of `layer`. Return False if the load has failed."""
        if layer in batch.guarded:
            return True
        ticket = batch.tickets[layer]
        if ticket.state is DONE:
            self._engine.reached(ticket)
        elif self.step.state.row == m.GIVEN_UP:
            return False  # after one timeout the load has failed, so do not wait for another layer
        elif not self._timed(self._engine.guard_read, ticket):
            self.step.fire(m.TIME_OUT)
            self._give_up(batch, TIMED_OUT)
            return False
        batch.guarded.add(layer)
        if ticket.failed:
            self._fail_step_saves()
        return True

    def _settle_loads(self, was: str) -> None:
        """Confirm the sync loads of a step that was in state `was` if every layer waited. Otherwise fail the loads."""
        batch, self._sync = self._sync, NO_BATCH
        self._start_async()
        if not batch.jobs:
            return
        if was == m.OPEN:
            self.counters.fault("loads_never_started")
            self.copies.put(SUBMITTED, batch)
            self.copies.put(copy_m.FAULT, batch, "no hook ran and the loads were never started")
            self._fail_step_saves()
        elif was == m.GIVEN_UP:
            self.copies.put(copy_m.DENY, batch, TIMED_OUT)
        elif len(batch.waited) == len(self._layers):
            self._await_checks(batch)
            # This is rare. A failed load must be reported to the engine in this step, so wait for the last copy.
            if any(map(_failed, batch.tickets.values())) and not batch.last.wait(self._wait_s):
                self._give_up(batch, TIMED_OUT)
            self.copies.put(copy_m.CONFIRM, batch, wake=False)
            self._report_if_over(batch)
            return
        else:
            self.counters.fault("layers_read_without_waiting")
            self.outcomes.suspect(batch)
            self.copies.put(copy_m.DENY, batch, "a layer was read without waiting for its copy")
            self._fail_step_saves()
            if not batch.last.done:
                self._engine.guard_read(batch.last, self._wait_s)
        self._settle()

    def _await_checks(self, batch: Batch) -> None:
        """Wait until the digests of a batch of sync loads are compared, because their failure ends in this step."""
        if self._checks is None:
            return
        if not self._timed(self._checks.wait, batch.last):
            self._give_up(batch, TIMED_OUT)
        elif batch.damaged:
            self._fail_step_saves()
            if not batch.last.wait(self._wait_s):
                self._give_up(batch, TIMED_OUT)

    def _end(self, was: str) -> None:
        """End the saves of a step that was in state `was`. Before, end the step's loads if they were not settled."""
        if was != m.SETTLED:
            self._settle_loads(was)
        batch, self._save = self._save, NO_BATCH
        if not batch.jobs:
            return
        # no hook was called, and vLLM had to call none
        without = not batch.tickets and (self._hooks.replayed is not None or not self._computes)
        if layers := self._all if without else self._unhooked:
            self._submit_layers(batch, layers)
        self.copies.put(SUBMITTED, batch, wake=False)
        missing = len(self._layers) - len(batch.tickets)
        if missing:
            self.counters.fault("layers_never_submitted", missing=missing)
            self.copies.put(copy_m.DENY, batch, "a layer was never submitted")
        else:
            self.copies.put(copy_m.CONFIRM, batch, wake=False)
        self._unfenced = batch
        if not self._hooks.fences_late:
            self.fence()
        if missing:
            self._settle()
        else:
            self._report_if_over(batch)

    def _report_if_over(self, batch: Batch) -> None:
        """If all copies are over, handle the inbox, so that the jobs are reported with this step.

        Otherwise the thread that completes the last copy handles the inbox.
        """
        last = batch.last  # read only after the step's events are in the inbox, as in `Copies.completed`
        if last.over or batch.stuck:
            self._settle()

    def _withdraw(self) -> None:
        batches = self._save, self._sync, self._async
        self._save = self._sync = self._async = NO_BATCH
        with ExitStack() as always:
            always.callback(self._settle)
            for batch in batches:
                if batch.jobs:
                    always.callback(self._withdraw_batch, batch)

    def _withdraw_batch(self, batch: Batch) -> None:
        try:
            if not batch.last.done:  # wait, because no copy may read or write after the job's report
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
        # abandoned, because a copy that begins later would write to freed blocks
        for ticket in dict.fromkeys(batch.tickets.values()):
            self._engine.abandon(ticket)
        self._trace.put(e.TierSlow(*batch.header(self._trace.rank), tier=TIER, waited_ms=self._wait_s * 1000))
        if batch.kind is Kind.LOAD_SYNC:
            self.outcomes.suspect(batch)
        self.copies.put(copy_m.FAULT, batch, why)
        self._fail_step_saves()

    def _fail_step_saves(self) -> None:
        """Fail the step's saves. A sync load of the step has failed, so the step may compute garbage."""
        if self._save.jobs:
            self.copies.put(copy_m.FAULT, self._save, "computed in a step whose load failed")

    def _settle(self) -> None:
        self.copies.loop.drain()
        if not self.copies.loop.settle(self._wait_s):
            self.counters.fault("loop_did_not_settle")
