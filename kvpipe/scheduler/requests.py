"""The requests that are not finished: from their arrival, through admissions and preemptions, to their end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    """One per scheduler side. All by request id: `tracked`, all of them; `waiting`, with an async load, until they run.

    `sessions`: `resumable` ones, which may keep their blocks while they wait for more input.
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
        priority_of: Callable[[Request], float] | None = None,
    ) -> None:
        """`groups`: number of cache groups. `staging`: None without tiers. `priority_of`: see `SchedulerSide`."""
        self._groups, self._adapters, self._staging, self._jobs = groups, adapters, staging, jobs
        self._recovery, self._report, self._counters = recovery, report, counters
        self.machines: Machines = m.REQUEST.compile(), lookup_m.LOOKUP.compile(), saving_m.SAVING.compile()
        self.tracked: dict[str, Tracked] = {}
        self.waiting: dict[str, Request] = {}
        self.sessions: dict[str, Request] = {}
        self._epochs, self._turns, self._priority_of = 1, 0, priority_of

    def __iter__(self) -> Iterator[Request]:
        """Iterate over all requests that are not finished."""
        return (tracked.request for tracked in self.tracked.values())

    def add(self, request: Request) -> Tracked:
        """Track `request`, or return what tracks it already. A new request with a used id gets a new cursor."""
        old = self.tracked.get(request.request_id)
        if old is not None:
            if old.request is request:
                return old
            self._counters.fault("id_reused_before_finish", request=request.request_id)
            self.finish(old)
        if request.lora_request is not None:
            self._adapters.begin(request)
        life, watches = self._report.added(request)
        self._turns += 1
        turn = self._priority_of(request) if self._priority_of is not None else 0, self._turns
        tracked = Tracked(self.machines, request, self._groups, turn, life, watches)
        self.tracked[request.request_id] = tracked
        if request.resumable:
            self.sessions[request.request_id] = request
        return tracked

    def notice_preemption(self, tracked: Tracked, *, notified: bool = False) -> None:
        """Compare the engine's count of preemptions on the request. `notified`: the engine has reported one.

        The count is what counts: the engine's notice may be late, or never come.
        """
        now = tracked.request.num_preemptions
        if now != tracked.preemptions:
            tracked.preemptions, tracked.load_job_id = now, 0
            tracked.saving.preempted()
            tracked.fire(m.PREEMPT)
            self._counters["preempted"] += 1
        elif notified:
            tracked.fire(m.PREEMPT_LATE)

    def plan_step(self, step: Step) -> None:
        """Notice the requests that have lost their blocks, and those that run."""
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
        """Return a new epoch, unique in the engine: a request id that is used again never meets older leases."""
        self._epochs += 1
        return self._epochs

    def begin_admission(self, tracked: Tracked, held_units: int, tables: Tables) -> None:
        """The request was admitted with new blocks. The first `held_units` units need not be saved."""
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
        """The same admission got more blocks. Save no more of it if its KV is of old weights (`Recovery.continued`)."""
        if self._recovery.continued(tracked.request.request_id):
            tracked.saving.give_up()
        tracked.fire(m.ADMIT_EMPTY)

    def end_stage(self, tracked: Tracked) -> None:
        """End the request's stage: it waits for no tier any more."""
        if self._staging is not None:
            self._staging.end(tracked.stage)
        tracked.stage = None

    def finish(self, tracked: Tracked) -> None:
        """Stop tracking. Jobs in flight end by themselves. A part that raises keeps no other from its end."""
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
                    if tracked.request.lora_request is not None:
                        self._adapters.end(tracked.request)
                finally:
                    if tracked.fire(m.FINISH).to.final:
                        tracked.load_job_id = 0  # a load that is still in flight ends without it
                    self._report.finished(tracked)
