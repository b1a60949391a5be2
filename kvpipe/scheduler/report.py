"""The scheduler side's report of each request: events for the trace, counts for the metrics."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, cast

from kvpipe.messages import ROW_BYTES, Kind
from kvpipe.scheduler.records import MEMORY, NO_RESULT
from kvpipe.statemachine import lookup as lookup_m
from kvpipe.statemachine import request as m
from kvpipe.statemachine.core import Cursor, Edge, State
from kvpipe.trace import events as e
from kvpipe.trace.recorder import Recorder

if TYPE_CHECKING:
    from kvpipe.cache.catalog import Chunk
    from kvpipe.scheduler.base import Request
    from kvpipe.scheduler.jobs import JobInFlight
    from kvpipe.scheduler.records import Asking, LookupResult, Tracked, Watches
    from kvpipe.scheduler.stages import Stage, TierTransfer

TRACEPARENT_CHARS_MAX = 64
_NS_PER_MS = 1e6


class RequestContext:
    """What the events of one request need: times in nanoseconds of the monotonic clock, loads in tokens."""

    __slots__ = (
        "added_ns", "admissions", "answer", "epoch", "failures", "loaded", "loading", "loading_ns", "loading_since",
        "number", "pages_saved", "sampled", "traceparent",
    )  # fmt: skip

    def __init__(self, number: int) -> None:
        """`number`: the request's cursor in traces, unlike its id never used again. It starts outside of the sample."""
        self.number, self.traceparent, self.sampled = number, "", False
        self.added_ns = time.monotonic_ns()
        self.answer: LookupResult | None = None
        self.epoch = self.admissions = self.failures = self.loading = self.loaded = self.pages_saved = (
            0  # in tokens, the loads
        )
        self.loading_since = self.loading_ns = 0

    def end_loading(self) -> None:
        """End the time of an asynchronous load, if there is one."""
        if self.loading_since:
            self.loading_ns += time.monotonic_ns() - self.loading_since
            self.loading_since = 0


class RequestReporter:
    """One per scheduler side. It watches the cursors, so what is reported is what they do."""

    def __init__(self, trace: Recorder) -> None:
        """Count hits by tier and misses by reason, and put events into `trace`."""
        self.trace = trace
        self._numbers = 0
        self.hit_tokens: dict[str, int] = {MEMORY: 0}
        self.missed_tokens: dict[str, int] = {}
        self.misses: dict[str, int] = {}
        self._others: Watches = self._request_moved if trace.transitions else None, None, None

    def added(self, request: Request) -> tuple[RequestContext, Watches]:
        """A request has arrived. Return its context and the watches for its cursors."""
        self._numbers += 1
        life, trace = RequestContext(self._numbers), self.trace
        if trace.lifecycle and (headers := getattr(request, "trace_headers", None)):
            life.traceparent = str(headers.get("traceparent", ""))[:TRACEPARENT_CHARS_MAX]
        if not (trace.transitions and trace.sampled(request.request_id)):
            return life, self._others
        life.sampled = True
        trace.put(e.RequestAdded(
            *trace.of(request.request_id, 0), prompt_tokens=request.num_prompt_tokens, traceparent=life.traceparent,
        ))  # fmt: skip
        return life, self._watches(life)

    def _watches(self, life: RequestContext) -> Watches:
        saving = partial(self._saving_moved, life) if self.trace.detail else None
        return self._request_moved, partial(self._lookup_moved, life), saving

    def begun(self, planned: JobInFlight) -> None:
        """A job was planned: watch its cursor from now on."""
        job, life, trace = planned.job, planned.tracked.life, self.trace
        if not (trace.lifecycle or life.sampled):
            return
        if planned.owner is not None or (life.sampled and trace.detail):
            planned.watch = self._job_moved
        pages = len(job.rows) // ROW_BYTES
        if planned.owner is None:
            life.pages_saved += pages
            if life.sampled:
                trace.put(e.SavePlanned(*trace.of(job.request, job.epoch), job=job.id, pages=pages))
        elif planned.tokens:
            life.loading = planned.tokens
            if job.kind == Kind.LOAD_ASYNC:
                life.loading_since = time.monotonic_ns()
            if life.sampled:
                common, kind = trace.of(job.request, job.epoch), Kind(job.kind).name.lower()
                trace.put(e.LeasesTaken(*common, chunks=planned.leases))
                trace.put(e.LoadPlanned(*common, job=job.id, kind=kind, pages=pages, tokens=planned.tokens))

    # ---- what watches ---------------------------------------------------------------------------------------------

    def _request_moved(self, cursor: Cursor, was: State, edge: Edge, why: str) -> None:
        tracked = cast("Tracked", cursor)
        trace, life = self.trace, tracked.life
        failure = edge.rejects or (edge.moves and edge.to.row == m.RECOMPUTING)  # reported also beyond the sample
        if failure or (life.sampled and (edge.moves or trace.detail)):
            request_id = tracked.request.request_id
            trace.took(request_id, tracked.epoch, trace.step, cursor, life.number, was, edge, why)

    def _lookup_moved(self, life: RequestContext, cursor: Cursor, was: State, edge: Edge, why: str) -> None:
        """Report a lookup's answer. The engine may repeat the lookup in every step; only changes are reported."""
        trace, asking = self.trace, cast("Asking", cursor)
        if edge.event != lookup_m.ADMIT and (answer := asking.answer) != life.answer:
            life.answer = answer
            trace.put(e.Lookup(
                *trace.of(str(asking.key), life.epoch), local_tokens=answer.local, hit_tokens=answer.by_tier,
                missed_tokens=answer.missed, why=answer.why, later=answer.later,
            ))  # fmt: skip
        if trace.detail:
            trace.took(str(asking.key), life.epoch, trace.step, cursor, life.number, was, edge, why)

    def admitted(self, tracked: Tracked, *, loads: bool) -> None:
        """Blocks were allocated; called before the lookup's answer is used up. Counts every request, traced or not."""
        life, trace, asking = tracked.life, self.trace, tracked.asking
        asked = asking.state.row == lookup_m.ASKED
        if not asked and not loads:
            return  # more blocks for the same admission
        again, life.answer = life.admissions > 0, None
        life.admissions += 1
        traced = life.sampled if again else trace.lifecycle
        answer = asking.answer if asked and (loads or traced) else NO_RESULT
        if loads:
            for tier, tokens in answer.by_tier.items():
                self.hit_tokens[tier] = self.hit_tokens.get(tier, 0) + tokens
        if asked and (why := asking.why):
            self.misses[why] = self.misses.get(why, 0) + 1
            self.missed_tokens[why] = self.missed_tokens.get(why, 0) + asking.missed
        if traced:
            kind = e.RequestReadmitted if again else e.RequestAdmitted
            load = (Kind.LOAD_ASYNC if asking.waits else Kind.LOAD_SYNC).name.lower() if loads else ""
            trace.put(kind(
                *trace.of(tracked.request.request_id, tracked.epoch),
                prompt_tokens=tracked.request.num_prompt_tokens, local_tokens=answer.local, hit_tokens=answer.by_tier,
                missed_tokens=answer.missed, why=answer.why, load=load,
                waited_ms=_ms(time.monotonic_ns() - life.added_ns),
            ))  # fmt: skip

    def _job_moved(self, cursor: Cursor, was: State, edge: Edge, why: str) -> None:
        trace, ended = self.trace, cast("JobInFlight", cursor)
        job, life = ended.job, ended.tracked.life
        if edge.to.final and ended.owner is not None:
            life.end_loading()
            life.failures += not ended.believed
            life.loaded, life.loading = life.loaded + (life.loading if ended.believed else 0), 0
            if life.sampled:
                trace.put(e.LeasesReturned(*trace.of(job.request, job.epoch), chunks=ended.leases))
        if life.sampled and trace.detail:
            trace.took(job.request, job.epoch, trace.step, cursor, job.id, was, edge, why)

    def finished(self, tracked: Tracked) -> None:
        """The request is over."""
        trace, life, request = self.trace, tracked.life, tracked.request
        if not trace.lifecycle:
            return
        life.end_loading()  # though its load may go on
        status = getattr(request, "status", None)
        trace.put(e.RequestDone(
            *trace.of(request.request_id, tracked.epoch),
            status=getattr(status, "name", "").lower(), prompt_tokens=request.num_prompt_tokens,
            output_tokens=request.num_tokens - request.num_prompt_tokens, loaded_tokens=life.loaded,
            saved_pages=life.pages_saved, preemptions=request.num_preemptions, loads_failed=life.failures,
            loading_ms=_ms(life.loading_ns), lived_ms=_ms(time.monotonic_ns() - life.added_ns),
            traceparent=life.traceparent,
        ))  # fmt: skip

    def chunk_moved(self, cursor: Cursor, was: State, edge: Edge, why: str) -> None:
        """A chunk took an edge, on behalf of the request that the recorder is about."""
        trace, chunk = self.trace, cast("Chunk", cursor)
        trace.took(trace.request, trace.epoch, trace.step, cursor, chunk.slot, was, edge, why)

    def stage_moved(self, cursor: Cursor, was: State, edge: Edge, why: str) -> None:
        """A stage took an edge."""
        trace, stage = self.trace, cast("Stage", cursor)
        trace.took(stage.owner.request, 0, trace.step, cursor, -stage.owner.epoch, was, edge, why)

    def transfer_moved(self, cursor: Cursor, was: State, edge: Edge, why: str) -> None:
        """A tier transfer took an edge."""
        trace, transfer = self.trace, cast("TierTransfer", cursor)
        trace.took("", 0, trace.step, cursor, transfer.order.id, was, edge, why)

    def _saving_moved(self, life: RequestContext, cursor: Cursor, was: State, edge: Edge, why: str) -> None:
        trace = self.trace
        trace.took(str(cursor.key), life.epoch, trace.step, cursor, life.number, was, edge, why)


def _ms(ns: int) -> float:
    return round(ns / _NS_PER_MS, 3)
