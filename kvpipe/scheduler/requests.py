"""The requests that live: from their arrival, through admissions and preemptions, to their end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvpipe.scheduler.records import Machines, Tracked
from kvpipe.statemachine import lookup as lookup_m
from kvpipe.statemachine import request as m
from kvpipe.statemachine import saving as saving_m
from kvpipe.statemachine.core import IllegalTransition

if TYPE_CHECKING:
    from kvpipe.scheduler.adapters import Adapters
    from kvpipe.scheduler.base import Recovery, Request, Step, Tables
    from kvpipe.scheduler.fetches import Staging
    from kvpipe.scheduler.jobs import Jobs
    from kvpipe.scheduler.report import RequestReporter
    from kvpipe.trace.log import Counters


class Requests:
    """One per scheduler side. `tracked`: by request id. `waiting`: for async loads, or have not run since.

    `sessions`: may be continued, and keep their blocks until they are.
    """

    def __init__(
        self,
        groups: int,
        *,
        adapters: Adapters,
        staging: Staging | None,
        jobs: Jobs,
        recovery: Recovery,
        report: RequestReporter,
        counters: Counters,
    ) -> None:
        """`groups`: cache groups. `staging`: of an engine with tiers."""
        self._groups, self._adapters, self._staging, self._jobs = groups, adapters, staging, jobs
        self._recovery, self._report, self._counters = recovery, report, counters
        self.machines: Machines = m.REQUEST.compile(), lookup_m.LOOKUP.compile(), saving_m.SAVING.compile()
        self.tracked: dict[str, Tracked] = {}
        self.waiting: dict[str, Request] = {}
        self.sessions: dict[str, Request] = {}
        self._epochs = 1

    def __iter__(self) -> Iterator[Request]:
        """All that live."""
        return (tracked.request for tracked in self.tracked.values())

    def add(self, request: Request) -> Tracked:
        """Start to track. The id of a request that is over may be used again: it gets a new cursor."""
        old = self.tracked.get(request.request_id)
        if old is not None:
            if old.request is request:
                return old
            self._counters.fault("id_reused_before_finish", request=request.request_id)
            self.finish(old)
        if request.lora_request is not None:
            self._adapters.begin(request)
        life, watches = self._report.added(request)
        tracked = self.tracked[request.request_id] = Tracked(self.machines, request, self._groups, life, watches)
        if request.resumable:
            self.sessions[request.request_id] = request
        return tracked

    def notice_preemption(self, tracked: Tracked, *, notified: bool = False) -> None:
        """The engine counts preemptions on the request: the notice itself may be late, or never come."""
        now = tracked.request.num_preemptions
        if now != tracked.preemptions:
            tracked.preemptions, tracked.load_job_id = now, 0
            tracked.saving.preempted()
            tracked.fire(m.PREEMPT)
            self._counters["preempted"] += 1
        elif notified:
            tracked.fire(m.PREEMPT_LATE)

    def plan_step(self, step: Step) -> None:
        """Notice who has lost its blocks, and who runs."""
        for request_id in step.preempted_req_ids or ():
            tracked = self.tracked.get(request_id)
            if tracked is not None:
                try:
                    self.notice_preemption(tracked, notified=True)
                except IllegalTransition as e:  # the engine counts on the loads of the plan
                    self._counters.fault("illegal_transition", request=request_id, error=repr(e))
        if self.waiting:
            for request_id in self.waiting.keys() & step.num_scheduled_tokens.keys():
                del self.waiting[request_id]

    def new_epoch(self) -> int:
        """Epochs are unique in the engine, so that a reused request id never meets an older one's leases."""
        self._epochs += 1
        return self._epochs

    def begin_admission(self, tracked: Tracked, held_units: int, tables: Tables) -> None:
        """New blocks: what the catalog holds need not be saved, everything beyond it is open again."""
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
        """More blocks for the same admission: what is computed with them may not be worth what came before."""
        if self._recovery.continued(tracked.request.request_id):
            tracked.saving.give_up()

    def end_stage(self, tracked: Tracked) -> None:
        """The request waits for no tier any more."""
        if self._staging is not None:
            self._staging.end(tracked.stage)
        tracked.stage = None

    def finish(self, tracked: Tracked) -> None:
        """Stop tracking. Jobs in flight end by themselves."""
        request_id = tracked.request.request_id
        del self.tracked[request_id]
        if tracked.stage is not None:
            self.end_stage(tracked)
        if tracked.request.lora_request is not None:
            self._adapters.end(tracked.request)
        self.waiting.pop(request_id, None)
        self.sessions.pop(request_id, None)
        self._recovery.finished(request_id, loading=self._jobs.sync_loads > 0)
        tracked.fire(m.FINISH)
        self._report.finished(tracked)
