"""The requests that are not finished: from their arrival, through admissions and preemptions, to their end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kvpipe.protocol.limits import NO_LIMITS, RequestLimits
from kvpipe.scheduler.records import Machines, Tracked
from kvpipe.statemachine import lookup as lookup_m
from kvpipe.statemachine import request as m
from kvpipe.statemachine import saving as saving_m
from kvpipe.statemachine.core import IllegalTransition

if TYPE_CHECKING:
    from kvpipe.cache.chunks import Chunk
    from kvpipe.protocol.engine import Recovery, Request, Step, Tables
    from kvpipe.scheduler.adapters import Adapters
    from kvpipe.scheduler.context import Context
    from kvpipe.scheduler.fetches import Staging
    from kvpipe.scheduler.jobs import Jobs
    from kvpipe.scheduler.request_tracer import RequestTracer
    from kvpipe.scheduler.wishes import RawHints


class Requests:
    """The unfinished requests of one scheduler side, in three dictionaries by request id.

    `tracked` has all unfinished requests. `waiting` has requests with an async load, until they run. `sessions` has the
    `resumable` requests, which may keep their blocks while they wait for more input.
    """

    def __init__(
        self,
        context: Context,
        *,
        adapters: Adapters,
        staging: Staging | None,
        jobs: Jobs,
        recovery: Recovery,
        tracer: RequestTracer,
        priority_of: Callable[[Request], float] | None = None,
    ) -> None:
        """Start without requests. `staging` is None without tiers. `priority_of` is explained in `EngineHooks`."""
        self._context, self._groups = context, len(context.geometry.groups)
        self._adapters, self._staging, self._jobs = adapters, staging, jobs
        self._recovery, self._tracer = recovery, tracer
        self.machines: Machines = m.REQUEST.compile(), lookup_m.LOOKUP.compile(), saving_m.SAVING.compile()
        self.tracked: dict[str, Tracked] = {}
        self.waiting: dict[str, Request] = {}
        self.sessions: dict[str, Request] = {}
        self._epochs, self._arrivals, self._priority_of = 1, 0, priority_of

    def __iter__(self) -> Iterator[Request]:
        """Iterate over all requests that are not finished."""
        return (tracked.request for tracked in self.tracked.values())

    def add(self, request: Request, hints: RawHints | None = None, limits: RequestLimits = NO_LIMITS) -> Tracked:
        """Track `request`, or return its `Tracked` if it is tracked already.

        If another unfinished request has the same id, that request is finished first. `hints` are the hints that came
        with `request`, not parsed yet. `limits` came with `request`, too.
        """
        old = self.tracked.get(request.request_id)
        if old is not None:
            if old.request is request:
                return old
            self._context.counters.fault("id_reused_before_finish", request=request.request_id)
            self.finish(old)
        if request.lora_request is not None:
            self._adapters.begin_use(request)
        life, watches = self._tracer.added(request)
        self._arrivals += 1
        precedence = self._priority_of(request) if self._priority_of is not None else 0, self._arrivals
        tracked = Tracked(self.machines, request, self._groups, precedence, life, watches)
        tracked.limits = limits
        self.tracked[request.request_id] = tracked
        if request.resumable:
            self.sessions[request.request_id] = request
        self._context.events.arrived(tracked, hints)
        return tracked

    def notice_preemption(self, tracked: Tracked, *, notified: bool = False) -> None:
        """Compare the engine's count of preemptions of the request with the count at the last call.

        `notified` says that the engine has reported a preemption. The count alone decides whether the request was
        preempted, because the engine's report may come late or never.
        """
        now = tracked.request.num_preemptions
        if now != tracked.preemptions:
            tracked.preemptions, tracked.load_job_id = now, 0
            tracked.saving.preempted()
            tracked.fire(m.PREEMPT)
            self._context.counters["preempted"] += 1
        elif notified:
            tracked.fire(m.PREEMPT_LATE)

    def plan_step(self, step: Step) -> None:
        """Record which requests have lost their blocks, and which of the waiting requests run now."""
        for request_id in step.preempted_req_ids or ():
            tracked = self.tracked.get(request_id)
            if tracked is not None:
                try:
                    self.notice_preemption(tracked, notified=True)
                except IllegalTransition as e:  # raising would lose the plan's loads, which the engine expects
                    self._context.counters.fault("illegal_transition", request=request_id, error=repr(e))
        if self.waiting:
            for request_id in self.waiting.keys() & step.num_scheduled_tokens.keys():
                del self.waiting[request_id]

    def new_epoch(self) -> int:
        """Return a new epoch, unique in the engine.

        A reused request id therefore never matches the leases of its predecessor.
        """
        self._epochs += 1
        return self._epochs

    def begin_admission(self, tracked: Tracked, held_units: int, tables: Tables) -> None:
        """Start the saves of a request again, because the request was admitted with new blocks.

        The first `held_units` units of the request need no save.
        """
        stale = True
        try:
            if tracked.stage is not None:
                self.end_stage(tracked)
            tracked.saving.admit(held_units)
            stale = self._recovery.admitted(tracked.request.request_id, tables)
        finally:
            if stale:
                tracked.saving.give_up()

    def go_on(self, tracked: Tracked) -> None:
        """Record that the same admission got more blocks.

        If the request's KV was computed with old weights (`Recovery.continued`), save no more of the request.
        """
        if self._recovery.continued(tracked.request.request_id):
            tracked.saving.give_up()
        tracked.fire(m.ADMIT_EMPTY)

    def end_stage(self, tracked: Tracked) -> None:
        """End the request's stage, so that the request does not wait for tiers any more."""
        if self._staging is not None:
            self._staging.end(tracked.stage)
        tracked.stage = None

    def finish(self, tracked: Tracked, chunks: dict[Chunk, None] | None = None) -> None:
        """Stop tracking the request. If one step of this raises, all other steps are still carried out.

        The request's jobs in flight end when ranks report them. `chunks` are all chunks of the request that memory
        holds, the last chunk first, or None if these chunks are unknown.
        """
        request_id = tracked.request.request_id
        del self.tracked[request_id]
        self.waiting.pop(request_id, None)
        self.sessions.pop(request_id, None)
        try:
            if tracked.stage is not None:
                self.end_stage(tracked)
        finally:
            try:
                self._recovery.finished(request_id, loading=self._jobs.sync_loads > 0)
            finally:
                try:
                    if tracked.fire(m.FINISH).to.final:
                        # a load in flight no longer belongs to the request, and ends when ranks report
                        tracked.load_job_id = 0
                    self._context.events.finished(tracked, chunks or {})
                finally:
                    tracked.saving.seal_chunks()
                    if tracked.request.lora_request is not None:
                        self._adapters.end_use(tracked.request)
