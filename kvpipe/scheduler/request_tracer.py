"""Reports each request of the scheduler side: events for the trace, and counts for the metrics."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, cast

from kvpipe.protocol.messages import ROW_BYTES, Kind
from kvpipe.scheduler.events import Subscriber
from kvpipe.scheduler.records import MEMORY, NO_RESULT, RequestContext
from kvpipe.statemachine import lookup as lookup_m
from kvpipe.statemachine import node_link as link_m
from kvpipe.statemachine import request as m
from kvpipe.statemachine.core import Cursor, Edge, State
from kvpipe.trace import events as e
from kvpipe.trace.durations import LOOKUP_WAIT, Durations
from kvpipe.trace.recorder import Recorder

if TYPE_CHECKING:
    from kvpipe.cache.chunks import Chunk
    from kvpipe.node.client import NodePool
    from kvpipe.protocol.engine import Request, Tables
    from kvpipe.scheduler.in_flight import JobInFlight
    from kvpipe.scheduler.records import Asking, Tracked, Watches
    from kvpipe.scheduler.stages import Stage, TierTransfer

TRACEPARENT_CHARS_MAX = 64
_NS_PER_MS = 1e6


class RequestTracer(Subscriber):
    """The reporter of one scheduler side.

    The reporter watches the cursors of requests, and reports their transitions.
    """

    def __init__(self, trace: Recorder, durations: Durations) -> None:
        """Count hits by tier and misses by reason, and record events in `trace`."""
        self.trace, self._waited = trace, durations.of(LOOKUP_WAIT)
        self._numbers = 0
        self.hit_tokens: dict[str, int] = {MEMORY: 0}
        self.missed_tokens: dict[str, int] = {}
        self.misses: dict[str, int] = {}
        self._others: Watches = self._request_moved if trace.transitions else None, None, None

    def added(self, request: Request) -> tuple[RequestContext, Watches]:
        """Return the context and the cursors' watches of a request that has just arrived."""
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
        """Watch the cursor of a newly planned job from now on."""
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

    # ---- the watches of cursors -----------------------------------------------------------------------------------

    def _request_moved(self, cursor: Cursor, was: State, edge: Edge, why: str) -> None:
        tracked = cast("Tracked", cursor)
        trace, life = self.trace, tracked.life
        # failures are reported even for requests outside of the sample
        failure = edge.rejects or (edge.moves and edge.to.row == m.RECOMPUTING)
        if failure or (life.sampled and (edge.moves or trace.detail)):
            request_id = tracked.request.request_id
            trace.took(request_id, tracked.epoch, trace.step, cursor, life.number, was, edge, why)

    def _lookup_moved(self, life: RequestContext, cursor: Cursor, was: State, edge: Edge, why: str) -> None:
        """Report a lookup's answer if it has changed. The engine may repeat a lookup in every step."""
        trace, asking = self.trace, cast("Asking", cursor)
        if edge.event != lookup_m.ADMIT and (answer := asking.answer) != life.answer:
            life.answer = answer
            trace.put(e.Lookup(
                *trace.of(str(asking.key), life.epoch), local_tokens=answer.local, hit_tokens=answer.by_tier,
                missed_tokens=answer.missed, why=answer.why, later=answer.later,
            ))  # fmt: skip
        if trace.detail:
            trace.took(str(asking.key), life.epoch, trace.step, cursor, life.number, was, edge, why)

    def admitted(self, tracked: Tracked, tables: Tables) -> None:  # noqa: ARG002  (as of the event)
        """Count the hit and the miss of an admitted request, even if the request is not traced."""
        life, trace, asking, loads = tracked.life, self.trace, tracked.asking, tracked.state.row == m.ALLOCATED
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
        if asked:
            self._waited(asking.waited_s)
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

    def finished(self, tracked: Tracked, chunks: dict[Chunk, None]) -> None:  # noqa: ARG002  (as of the event)
        """Record the summary of a request that is over."""
        trace, life, request = self.trace, tracked.life, tracked.request
        if not trace.lifecycle:
            return
        life.end_loading()  # the load itself may still be under way, but its time for this request ends here
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
        """Record a chunk's transition.

        The trace shows the transition under the request that the recorder now handles.
        """
        trace, chunk = self.trace, cast("Chunk", cursor)
        trace.took(trace.request, trace.epoch, trace.step, cursor, chunk.slot, was, edge, why)

    def stage_moved(self, cursor: Cursor, was: State, edge: Edge, why: str) -> None:
        """Record a stage's transition."""
        trace, stage = self.trace, cast("Stage", cursor)
        trace.took(stage.owner.request, 0, trace.step, cursor, -stage.owner.epoch, was, edge, why)

    def transfer_moved(self, cursor: Cursor, was: State, edge: Edge, why: str) -> None:
        """Record a tier transfer's transition."""
        trace, transfer = self.trace, cast("TierTransfer", cursor)
        trace.took("", 0, trace.step, cursor, transfer.order.id, was, edge, why)

    def watch_node(self, pool: NodePool) -> None:
        """Record the moves of the connection to the node's holder and, if `trace.detail`, of granted slots."""
        link = pool.link
        link.watch = self._link_moved
        # the move to ATTACHED came before the trace was open, so it is recorded now
        if link.state.name == link_m.ATTACHED:
            was = link.machine.initial
            self._link_moved(link, was, was.on[link_m.WELCOME], "")
        if self.trace.detail:
            pool.stock.watch = self._grant_moved

    def _link_moved(self, cursor: Cursor, was: State, edge: Edge, why: str) -> None:
        if edge.moves or edge.rejects:
            self.trace.took("", 0, self.trace.step, cursor, 0, was, edge, why)

    def _grant_moved(self, cursor: Cursor, was: State, edge: Edge, why: str) -> None:
        trace = self.trace
        trace.took(trace.request, trace.epoch, trace.step, cursor, cast("int", cursor.key), was, edge, why)

    def _saving_moved(self, life: RequestContext, cursor: Cursor, was: State, edge: Edge, why: str) -> None:
        trace = self.trace
        trace.took(str(cursor.key), life.epoch, trace.step, cursor, life.number, was, edge, why)


def _ms(ns: int) -> float:
    return round(ns / _NS_PER_MS, 3)
