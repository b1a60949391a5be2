"""A trial under watch: what the checks need to know of earlier steps, and when they run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from kvpipe.cache.catalog import Chunk
from kvpipe.cache.miss_reasons import NO_ROOM
from kvpipe.connectors.vllm.hints import is_prefilled_elsewhere
from kvpipe.connectors.vllm.trial.content import Live
from kvpipe.connectors.vllm.trial.efficacy import Found, ends, promised
from kvpipe.connectors.vllm.trial.laws import INVARIANTS, When
from kvpipe.connectors.vllm.trial.quotas import watch
from kvpipe.connectors.vllm.trial.tap import plan_in
from kvpipe.connectors.vllm.trial.trial import Trial
from kvpipe.messages import Job, Kind, TierOrder

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

Admission = tuple["Request", int]


class Final(NamedTuple):
    """How far a request's KV was final when it was last scheduled, in one of its admissions."""

    admission: Admission
    units: int


class Watched:
    """A trial under watch, from step to step: remembers what was checked already, and what was broken."""

    def __init__(self, trial: Trial, only: str = "") -> None:
        """Watch `trial` from now on, for all invariants or for one."""
        self.trial, self._only = trial, only
        self._faults = self._wrong = 0
        self.findable: dict[tuple[int, bytes], tuple[int, int]] = {}
        self.final: dict[str, Final] = {}
        self.excused: set[str] = set()  # requests whose KV need not be saved: a fault has named them
        self.forgotten: set[Chunk] = set()  # chunks that a reset has dropped
        self.stale: dict[str, Admission] = {}  # admissions that have lived through a reset
        self.dropped = self.replayed = self.gave_up = 0
        self.asked: dict[str, int] = {}  # how much had been dropped when a request was last looked up
        self.short: list[str] = []  # answers of lookups that should have been more
        self.found: dict[Live, Found] = {}  # of the last requests that are over
        self.ends: dict[Live, frozenset[tuple[Chunk, bytes]]] = {}  # of all that are over: who held their ends then
        self.unfair = watch(trial.side.catalog) if trial.shape.quotas and trial.kvpipe is not None else list[str]()
        self.output: SchedulerOutput | None = None
        beside = Watched(trial.producer, only) if trial.producer is not None else None
        self.broken: list[str] = beside.broken if beside is not None else []
        trial.on_schedule = self.after_schedule
        trial.on_update = self.after_update
        trial.on_reset = self.before_reset
        trial.on_drain = self.after_drain
        trial.on_lookup = self.after_lookup
        trial.on_leave = self.after_leave

    def after_schedule(self, output: SchedulerOutput) -> None:
        """Check what holds for a step that goes out."""
        self.output = output
        self._check("schedule")

    def after_update(self) -> None:
        """Check what holds whenever the scheduler has digested a step."""
        self._check("update")

    def after_drain(self) -> None:
        """Check everything, when nothing is left to do. After a shutdown much is."""
        if not self.trial.is_down:
            self._check("update")
            self._check("drain")

    def after_lookup(self, request: Request, computed: int, answer: tuple[int | None, bool]) -> None:
        """Compare what kvpipe has promised with what it holds."""
        side = self.trial.side
        self.asked[request.request_id] = self.drops
        before, self.gave_up = self.gave_up, side.counters["lookup_gave_up"]
        elsewhere, unit = is_prefilled_elsewhere(request), side.geometry.unit_tokens
        if answer[0] is None or before != self.gave_up:
            if elsewhere and answer[0] is None:
                self.short.append(f"{request.request_id}: later, while another connector waits to bring the prompt")
            return
        wanted = promised(side, request, computed, waits=answer[1])
        if elsewhere and wanted is not None:
            put_off = not answer[0] and side.requests.tracked[request.request_id].asking.why == NO_ROOM
            if put_off or request.num_tokens - computed - wanted > unit:
                wanted = 0
        if wanted is not None and answer[0] != wanted:
            self.short.append(f"{request.request_id} beyond {computed}: {answer[0]} tokens instead of {wanted}")

    def after_leave(self, one: Live) -> None:
        """Remember where a request that is over has ended."""
        if self.trial.kvpipe is not None:
            self.ends[one] = ends(self.trial.side, self.request_of(one))

    def request_of(self, one: Live) -> Request:
        """Return a request that continues `one`."""
        return self.trial.answered(one, one.sequence.prompt, one.output)

    @property
    def drops(self) -> int:
        """How often something that was to be saved, or was saved, had to give way."""
        counters = self.trial.side.counters
        return counters["evicted"] + counters["save_dropped_pool_full"] + counters["save_dropped_at_limit"]

    def before_reset(self) -> None:
        """Remember what the reset of the connector's cache must end."""
        if self.trial.kvpipe is None:
            return
        side, scheduler = self.trial.side, self.trial.scheduler
        self.forgotten |= {piece.chunk for job in side.jobs.in_flight.values() for piece in job.pieces}
        for group in range(len(side.geometry.groups)):
            self.forgotten |= set(side.catalog.index(group).values())
        tables = scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
        for request_id, request in scheduler.requests.items():
            if tables.get(request_id) and request_id not in scheduler.failed_recving_kv_req_ids:  # they begin anew
                self.stale[request_id] = admission(request)
                self.excused.add(request_id)

    def _check(self, when: When) -> None:
        while self.trial.let_down:  # vLLM takes their blocks back: they begin anew
            self.stale.pop(self.trial.let_down.pop(), None)
        found = []
        for one in INVARIANTS.values():
            if one.when == when and (one.outside or self.trial.kvpipe is not None):
                found += [f"{one.name}: {what}" for what in one.check(self)]
        found += self.trial.violations  # last: a wrong answer comes of a wrong read
        self.trial.violations = []
        self.broken += [what for what in found if what.startswith(self._only)]

    def saves(self) -> Iterator[Job]:
        """Yield the saves of the step that goes out."""
        assert self.output is not None  # noqa: S101
        return (job for job in plan_in(self.output.kv_connector_metadata).jobs if job.kind == Kind.SAVE)

    def orders(self) -> tuple[TierOrder, ...]:
        """Return the orders of the step that goes out."""
        assert self.output is not None  # noqa: S101
        return plan_in(self.output.kv_connector_metadata).orders

    def new_faults(self) -> Iterator[str]:
        """Yield the faults since the last call that no move has asked for, and excuse whom they name."""
        new, self._faults = self.trial.faults[self._faults :], len(self.trial.faults)
        for fault in new:
            self.excused.add(fault.fields.get("request", ""))
            if fault.name not in self.trial.excused:
                yield f"{fault.name} {fault.fields}"

    def new_wrong(self) -> list[str]:
        """Return the wrong reads since the last call."""
        new, self._wrong = self.trial.wrong[self._wrong :], len(self.trial.wrong)
        return [str(one) for one in new]


def admission(request: Request) -> Admission:
    """Name one stay of a request in vLLM's block pool."""
    return request, request.num_preemptions
