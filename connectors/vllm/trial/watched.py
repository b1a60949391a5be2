"""A trial whose invariants are checked: the state that checks keep between steps, and when checks run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from kvpipe.cache.catalog import Catalog
from kvpipe.cache.chunks import Chunk
from kvpipe.cache.tenants import ANYBODY, Tenant
from kvpipe.connectors.vllm.hints import is_prefilled_elsewhere
from kvpipe.connectors.vllm.trial.content import Live, Sequence
from kvpipe.connectors.vllm.trial.efficacy import FoundPrefix, ends, promised
from kvpipe.connectors.vllm.trial.laws import INVARIANTS, When
from kvpipe.connectors.vllm.trial.shapes import QUOTAS
from kvpipe.connectors.vllm.trial.tap import plan_in
from kvpipe.connectors.vllm.trial.trial import Trial
from kvpipe.protocol.messages import Job, Kind, TierOrder
from kvpipe.trace.miss_reasons import NO_ROOM

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

Admission = tuple["Request", int]


class Final(NamedTuple):
    """The number of final units of a request when the request was last scheduled, and the request's admission then."""

    admission: Admission
    units: int


class Watched:
    """Checks a trial from step to step.

    The object remembers the results of earlier checks, and the invariants that were broken.
    """

    def __init__(self, trial: Trial, only: str = "") -> None:
        """Watch `trial` from now on, for all invariants or only for the invariant `only`."""
        self.trial, self._only = trial, only
        self._faults = self._wrong = 0
        self.findable: dict[tuple[int, bytes], tuple[int, int]] = {}
        self.final: dict[str, Final] = {}
        self.excused: set[str] = set()  # requests whose KV need not be saved, because a fault has named them
        self.forgotten: set[Chunk] = set()  # chunks that a reset has dropped
        self.stale: dict[str, Admission] = {}  # admissions that began before a reset and still run
        self.dropped = self.replayed = self.gave_up = 0
        self.asked: dict[str, int] = {}  # the value of `drops` at each request's last lookup
        self.announced = 0  # the number of the last chunk in a tier whose announcement was checked
        self.over: list[str] = []  # lookups that promised more tokens than a limit allows
        self.short: list[str] = []  # lookups that promised another number of tokens than they should
        self.found: dict[Live, FoundPrefix] = {}  # for the last finished requests
        # for each finished request, the chunks that held its end when it finished
        self.ends: dict[Live, frozenset[tuple[Chunk, bytes]]] = {}
        # the results of `request_of`, by everything on which a result depends
        self._requests: dict[tuple[Live, Sequence, int], Request] = {}
        self.unfair = (
            _watch_quotas(trial.side.catalog) if trial.shape.quotas and trial.kvpipe is not None else list[str]()
        )
        self.output: SchedulerOutput | None = None
        beside = Watched(trial.beside, only) if trial.beside is not None else None
        self.broken: list[str] = beside.broken if beside is not None else []
        trial.on_schedule = self.after_schedule
        trial.on_update = self.after_update
        trial.on_reset = self.before_reset
        trial.on_drain = self.after_drain
        trial.on_lookup = self.after_lookup
        trial.on_leave = self.after_leave

    def after_schedule(self, output: SchedulerOutput) -> None:
        """Check the invariants of a step that vLLM has just scheduled."""
        self.output = output
        self._check("schedule")

    def after_update(self) -> None:
        """Check the invariants that hold after the scheduler has processed a step's results."""
        self._check("update")

    def after_drain(self) -> None:
        """Check all invariants when no request is left.

        After a shutdown nothing is checked, because requests may be left.
        """
        if not self.trial.is_down:
            self._check("update")
            self._check("drain")

    def after_lookup(self, request: Request, computed: int, answer: tuple[int | None, bool]) -> None:
        """Compare the number of tokens that kvpipe has promised with the number of tokens that the catalog holds."""
        side = self.trial.side
        self.asked[request.request_id] = self.drops
        before, self.gave_up = self.gave_up, side.counters["lookup_gave_up"]
        elsewhere, unit = is_prefilled_elsewhere(request), side.geometry.unit_tokens
        if answer[0] is None or before != self.gave_up:
            if elsewhere and answer[0] is None:
                self.short.append(f"{request.request_id}: later, while another connector waits to bring the prompt")
            return
        limit = self.trial.allowed(request.request_id).load_tokens
        if limit is not None and answer[0] > limit:
            self.over.append(f"{request.request_id} loads {answer[0]} tokens, {limit} are allowed")
        wanted = promised(side, request, computed, waits=answer[1], limit=limit)
        if elsewhere and wanted is not None:
            put_off = not answer[0] and side.requests.tracked[request.request_id].asking.why == NO_ROOM
            if put_off or request.num_tokens - computed - wanted > unit:
                wanted = 0
        if wanted is not None and answer[0] != wanted:
            self.short.append(f"{request.request_id} beyond {computed}: {answer[0]} tokens instead of {wanted}")

    def after_leave(self, one: Live) -> None:
        """Remember the chunks that hold the end of a finished request."""
        last = self.final.pop(one.id, None)
        if self.trial.kvpipe is not None:
            saved = last.units if last is not None and last.admission == admission(last.admission[0]) else 0
            self.ends[one] = ends(self.trial.side, self.request_of(one), saved)

    def request_of(self, one: Live) -> Request:
        """Return a request that continues `one`.

        The request is made only once, because several checks use it in each step, and hashing its blocks takes long.
        """
        made_from = one, one.sequence, len(one.output)
        if made_from not in self._requests:
            self._requests[made_from] = self.trial.answered(one, one.sequence.prompt, one.output)
        return self._requests[made_from]

    @property
    def drops(self) -> int:
        """The number of chunks that were evicted, whose save failed, or that got no slot."""
        counters = self.trial.side.counters
        lost = counters["evicted"] + counters["save_failed"]
        return lost + counters["save_dropped_pool_full"] + counters["save_dropped_at_limit"]

    def before_reset(self) -> None:
        """Remember the chunks and admissions that exist before the reset of the connector's cache."""
        if self.trial.kvpipe is None:
            return
        side, scheduler = self.trial.side, self.trial.scheduler
        self.forgotten |= {piece.chunk for job in side.jobs.in_flight.values() for piece in job.pieces}
        for group in range(len(side.geometry.groups)):
            self.forgotten |= set(side.catalog.index(group).values())
        tables = scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
        for request_id, request in scheduler.requests.items():
            # requests in `failed_recving_kv_req_ids` are computed again
            if tables.get(request_id) and request_id not in scheduler.failed_recving_kv_req_ids:
                self.stale[request_id] = admission(request)
                self.excused.add(request_id)

    def _check(self, when: When) -> None:
        while self.trial.let_down:  # vLLM takes back the blocks of these requests, and computes the requests again
            self.stale.pop(self.trial.let_down.pop(), None)
        found = []
        for one in INVARIANTS.values():
            if one.when == when and (one.outside or self.trial.kvpipe is not None):
                found += [f"{one.name}: {what}" for what in one.check(self)]
        # these come last, because the cause, such as a wrong read, is reported by an invariant
        found += self.trial.violations
        self.trial.violations = []
        self.broken += [what for what in found if what.startswith(self._only)]

    def saves(self) -> Iterator[Job]:
        """Yield the saves of the step that was just scheduled."""
        assert self.output is not None  # noqa: S101
        return (job for job in plan_in(self.output.kv_connector_metadata).jobs if job.kind == Kind.SAVE)

    def orders(self) -> tuple[TierOrder, ...]:
        """Return the tier orders of the step that was just scheduled."""
        assert self.output is not None  # noqa: S101
        return plan_in(self.output.kv_connector_metadata).orders

    def new_faults(self) -> Iterator[str]:
        """Yield the faults since the last call that no move has caused, and excuse the requests that faults name."""
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
    """Return an identifier of the request's present admission: the request and its number of preemptions."""
    return request, request.num_preemptions


def _watch_quotas(catalog: Catalog) -> list[str]:
    """Check each slot that `catalog` reserves from now on. Returns the list to which violations are appended."""
    broken: list[str] = []
    reserve = catalog.reserve

    def checked(group: int, tenant: Tenant = ANYBODY) -> Chunk | None:
        before = used_slots(catalog)
        chunk = reserve(group, tenant)
        now = used_slots(catalog)
        for one in QUOTAS:
            salt, sure = one.get("salt", ""), int(one.get("share", 0) * catalog.ready)
            if salt != _whose(tenant) and now[salt] < min(sure, before[salt]):
                broken.append(f"{one['name']} had {before[salt]} slots of {sure}, and has {now[salt]} for another")
        return chunk

    catalog.reserve = checked  # type: ignore[method-assign]
    return broken


def _whose(tenant: Tenant) -> str:
    return tenant.salt if tenant.salt in {"1", "2"} else ""


def used_slots(catalog: Catalog) -> Counter[str]:
    """Return the number of slots in use, by the salt of their quota."""
    return Counter(_whose(chunk.tenant) for chunk in catalog.chunks())
