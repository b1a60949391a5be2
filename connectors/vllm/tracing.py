"""What the scheduler's side tells of each request: events for the trace, counts for the metrics."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple, cast

from kvpipe.plan import ROW_BYTES, Job, Kind
from kvpipe.statemachine.core import Cursor, Edge, State, Watch
from kvpipe.statemachine.request import RECOMPUTING
from kvpipe.trace import events as e
from kvpipe.trace.recorder import Recorder

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvpipe.catalog import Chunk
    from kvpipe.connectors.vllm.staging import Stage
    from kvpipe.connectors.vllm.tracked import Tracked

TIER = "memory"
TRACEPARENT_CHARS_MAX = 64
_NS_PER_MS = 1e6


class Answer(NamedTuple):
    """What a lookup has found, in tokens: that vLLM has, that kvpipe adds, that neither has and why."""

    local: int = 0
    hit: int = 0
    missed: int = 0
    why: str = ""
    later: bool = False
    staged: tuple[tuple[str, int], ...] = ()
    """What slower tiers have brought of the hit."""

    @property
    def by_tier(self) -> dict[str, int]:
        """The hit by tier."""
        by = dict(self.staged)
        kept = self.hit - sum(by.values())
        return {TIER: kept, **by} if kept else by


class Life:
    """What the events of a request need to know of it."""

    __slots__ = (
        "added_ns", "admissions", "answer", "failures", "loaded", "loading", "loading_ns", "loading_since", "number",
        "pages_saved", "sampled", "traceparent",
    )  # fmt: skip

    def __init__(self, number: int, traceparent: str, *, sampled: bool) -> None:
        """`number` is what the trace calls the request's cursor; ids may be used again."""
        self.number, self.traceparent, self.sampled = number, traceparent, sampled
        self.added_ns = time.monotonic_ns()
        self.answer: Answer | None = None
        self.admissions = self.failures = self.loading = self.loaded = self.pages_saved = 0  # in tokens, the loads
        self.loading_since = self.loading_ns = 0


class Teller:
    """One per scheduler's side."""

    def __init__(self, trace: Recorder) -> None:
        """Count hits by tier and misses by reason, and tell `trace`."""
        self.trace = trace
        self._numbers = 0
        self.hit_tokens: dict[str, int] = {TIER: 0}
        self.missed_tokens: dict[str, int] = {}
        self.misses: dict[str, int] = {}

    def added(self, request: Request) -> tuple[Life, Watch | None]:
        """A request has come. Return its life, and who watches its cursor."""
        self._numbers += 1
        trace = self.trace
        headers = getattr(request, "trace_headers", None) or {}
        parent = str(headers.get("traceparent", ""))[:TRACEPARENT_CHARS_MAX]
        life = Life(self._numbers, parent, sampled=trace.transitions and trace.sampled(request.request_id))
        if life.sampled:
            common = trace.of(request.request_id, 0)
            trace.put(e.RequestAdded(*common, prompt_tokens=request.num_prompt_tokens, traceparent=parent))
        return life, (self._moved if life.sampled else self._failed) if trace.transitions else None

    def answered(self, tracked: Tracked, answer: Answer) -> None:
        """A lookup was answered. vLLM may ask in every step; only what is new is told."""
        life = tracked.life
        if answer == life.answer:
            return
        life.answer = answer
        if life.sampled:
            self.trace.put(e.Lookup(
                *self.trace.of(tracked.request.request_id, tracked.epoch), local_tokens=answer.local,
                hit_tokens=answer.by_tier, missed_tokens=answer.missed, why=answer.why, later=answer.later,
            ))  # fmt: skip

    def admitted(self, tracked: Tracked, load: str) -> None:
        """Blocks are allocated. `load`: the kind of load that the admission leads to, if any."""
        life, trace = tracked.life, self.trace
        answer, life.answer = life.answer or Answer(), None
        again = life.admissions > 0
        life.admissions += 1
        if load:
            for tier, tokens in answer.by_tier.items():
                self.hit_tokens[tier] = self.hit_tokens.get(tier, 0) + tokens
        if answer.why:
            self.misses[answer.why] = self.misses.get(answer.why, 0) + 1
            self.missed_tokens[answer.why] = self.missed_tokens.get(answer.why, 0) + answer.missed
        if life.sampled if again else trace.lifecycle:
            kind = e.RequestReadmitted if again else e.RequestAdmitted
            waited_ms = _ms(time.monotonic_ns() - life.added_ns)
            trace.put(kind(
                *trace.of(tracked.request.request_id, tracked.epoch),
                prompt_tokens=tracked.request.num_prompt_tokens, local_tokens=answer.local, hit_tokens=answer.by_tier,
                missed_tokens=answer.missed, why=answer.why, load=load, waited_ms=waited_ms,
            ))  # fmt: skip

    def load_planned(self, tracked: Tracked, job: Job, tokens: int, chunks: int) -> None:
        """A load was planned, and so many chunks leased for it."""
        life, trace = tracked.life, self.trace
        life.loading = tokens
        if job.kind == Kind.LOAD_ASYNC:
            life.loading_since = time.monotonic_ns()
        if life.sampled:
            common = trace.of(job.request, job.epoch)
            trace.put(e.LeasesTaken(*common, chunks=chunks))
            kind = Kind(job.kind).name.lower()
            trace.put(e.LoadPlanned(*common, job=job.id, kind=kind, pages=len(job.rows) // ROW_BYTES, tokens=tokens))

    def load_ended(self, tracked: Tracked, job: Job, leases: int, *, ok: bool) -> None:
        """Every rank has reported the load, and its leases are returned."""
        life = tracked.life
        if life.loading_since:
            life.loading_ns += time.monotonic_ns() - life.loading_since
            life.loading_since = 0
        life.failures += not ok
        life.loaded, life.loading = life.loaded + (life.loading if ok else 0), 0
        if life.sampled:
            self.trace.put(e.LeasesReturned(*self.trace.of(job.request, job.epoch), chunks=leases))

    def save_planned(self, tracked: Tracked, job: Job) -> None:
        """A save was planned."""
        pages = len(job.rows) // ROW_BYTES
        tracked.life.pages_saved += pages
        if tracked.life.sampled:
            self.trace.put(e.SavePlanned(*self.trace.of(job.request, job.epoch), job=job.id, pages=pages))

    def load_dropped(self, tracked: Tracked, job: Job, leases: int) -> None:
        """The load never went out, for its request is over."""
        tracked.life.loading = 0
        self.load_ended(tracked, job, leases, ok=True)

    def done(self, tracked: Tracked) -> None:
        """The request is over."""
        trace, life, request = self.trace, tracked.life, tracked.request
        if life.loading_since:  # its load is not
            life.loading_ns += time.monotonic_ns() - life.loading_since
            life.loading_since = 0
        if trace.lifecycle:
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
        """A chunk took an edge, on behalf of whom the recorder is about."""
        trace, chunk = self.trace, cast("Chunk", cursor)
        trace.took(trace.request, trace.epoch, trace.step, cursor, chunk.slot, was, edge, why)

    def stage_moved(self, cursor: Cursor, was: State, edge: Edge, why: str) -> None:
        """A stage took an edge."""
        trace, stage = self.trace, cast("Stage", cursor)
        trace.took(stage.owner.request, 0, trace.step, cursor, -stage.owner.epoch, was, edge, why)

    def _moved(self, cursor: Cursor, was: State, edge: Edge, why: str) -> None:
        trace = self.trace
        if edge.moves or edge.rejects or trace.detail:
            tracked = cast("Tracked", cursor)
            trace.took(
                tracked.request.request_id, tracked.epoch, trace.step, cursor, tracked.life.number, was, edge, why
            )

    def _failed(self, cursor: Cursor, was: State, edge: Edge, why: str) -> None:
        """Of a request that is not in the sample, its failures are told."""
        if edge.rejects or (edge.moves and edge.to.row == RECOMPUTING):
            self._moved(cursor, was, edge, why)


def _ms(ns: int) -> float:
    return round(ns / _NS_PER_MS, 3)
