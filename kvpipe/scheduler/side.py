"""The scheduler side: what an engine calls. Looks up, leases, plans, and publishes what every rank has landed.

Nothing here keeps a copy of a token list or of a block table: the engine's requests and blocks are asked when a new
unit becomes final, so a preempted request that comes back with other blocks needs no special case. Work per step is
one comparison per scheduled request, plus work for what is new.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from kvpipe.cache.catalog import Catalog, Chunk, Piece
from kvpipe.cache.policy import make_policy
from kvpipe.cache.prefixes import Prefixes
from kvpipe.cache.quotas import Accounts, SharedCatalog
from kvpipe.config import Settings
from kvpipe.geometry import Geometry
from kvpipe.messages import Job, Kind, Report, StepPlan, Tally, TierOrder
from kvpipe.scheduler.adapters import Adapters
from kvpipe.scheduler.answers import Answers
from kvpipe.scheduler.base import Answer, Recovery
from kvpipe.scheduler.fetches import PATIENCE_S, Staging
from kvpipe.scheduler.hints import Hinting, RawHints
from kvpipe.scheduler.jobs import JobInFlight, Jobs
from kvpipe.scheduler.loads import Loading
from kvpipe.scheduler.lookups import FIRST_STEPS_MAX, Lookups
from kvpipe.scheduler.orders import Orders
from kvpipe.scheduler.pins import PromptPins
from kvpipe.scheduler.prefetch import Prefetching
from kvpipe.scheduler.records import Tracked
from kvpipe.scheduler.report import RequestReporter
from kvpipe.scheduler.requests import Requests
from kvpipe.scheduler.resets import Resets
from kvpipe.scheduler.saves import Saving
from kvpipe.scheduler.spans import Spans
from kvpipe.scheduler.stall import Idle
from kvpipe.scheduler.switches import Switches
from kvpipe.scheduler.weights import Weights
from kvpipe.statemachine import lookup as lookup_m
from kvpipe.statemachine import request as m
from kvpipe.tiers.finder import Finder
from kvpipe.tiers.guard import GuardedTier
from kvpipe.trace.log import Counters
from kvpipe.trace.recorder import OFF, Recorder

if TYPE_CHECKING:
    from kvpipe.cache.tenants import Tenant
    from kvpipe.scheduler.base import Blocks, Published, Request, SpansOf, Step, Tables


P = ParamSpec("P")
T = TypeVar("T")


class SchedulerSide:
    """One per engine, in the scheduler's process, on its thread."""

    def __init__(
        self,
        settings: Settings,
        geometry: Geometry,
        *,
        hash_tokens: int,
        ranks: int,
        stages: int = 1,
        saves: bool,
        loads: bool,
        recovery: Recovery | None = None,
        published: Published | None = None,
        tiers: Sequence[GuardedTier] = (),
        space_of: Callable[[str], str] = str,
        also_of: Callable[[str], str] = lambda _: "",
        waits_idle: bool = False,
        priority_of: Callable[[Request], float] | None = None,
        spans_of: SpansOf | None = None,
        trace: Recorder = OFF,
    ) -> None:
        """`hash_tokens`: tokens per block hash. `ranks`: their number. `saves`, `loads`: whether this engine does so.

        `stages`: the number of pipeline stages; each has its own layers, and a pool of its own size.
        `recovery`: what the engine needs help with. `published`: notified of chunks that can be found, for routers.
        `tiers`: places beyond host memory. `space_of`: from a digest of the weights to the namespace in tiers, or "";
        `also_of`: to a second one with the same bytes. `priority_of`: who has a lower one is admitted first.
        `waits_idle`: a rank may wait for loads in a step that computes nothing, as no rank waits for it.
        `spans_of`: returns the spans of a request that no step and no hit may cut; None: no request has any.
        """
        self.settings, self.geometry, self._ranks, self._step, self._events = settings, geometry, ranks, 0, published
        self.counters = counters = Counters()
        self.trace, self.report, trace.step = trace, RequestReporter(trace), 1
        self._idle = Idle(settings.stall_ms_max) if waits_idle and stages == 1 else None  # else others may compute
        self._recovery = recovery = recovery or Recovery()
        self.weights = weights = Weights(ranks, counters)
        self.switches = switches = Switches(settings, weights, saves=saves, loads=loads)
        self.catalog = catalog = self._make_catalog(None if settings.prefault == "use" and stages == 1 else 0)
        catalog.on_drop = published.dropped if published is not None else None
        self.orders = orders = Orders(counters, lambda: trace.about("", 0))
        self._turns, self.pins = orders.turns, PromptPins(settings, geometry, catalog, orders)
        self.adapters = adapters = Adapters(ranks, settings.lookup_ms_max / 1000, counters)
        self.prefixes = prefixes = Prefixes(catalog, geometry, hash_tokens, adapters.keys, self._tenant, spans_of)
        self._spans = Spans(spans_of, geometry, counters) if spans_of is not None else None
        self.jobs = jobs = self._make_jobs()
        self.staging = staging = self._make_staging(tiers) if tiers else None
        self.requests = requests = Requests(
            len(geometry.groups), adapters=adapters, staging=staging, jobs=jobs, recovery=recovery, report=self.report,
            counters=counters, priority_of=priority_of,
        )  # fmt: skip
        self.loading = Loading(
            settings, geometry, catalog=catalog, prefixes=prefixes, requests=requests, jobs=jobs,
            report=self.report, staging=staging, recovery=recovery, counters=counters, trace=trace, stages=stages,
        )  # fmt: skip
        self._saving = Saving(
            settings, geometry, catalog=catalog, prefixes=prefixes, requests=requests, jobs=jobs, counters=counters,
            trace=trace,
        )  # fmt: skip
        self._answers = Answers(geometry, catalog, prefixes, counters)
        self._lookups = Lookups(
            geometry.unit_tokens, prefixes, requests=requests, loading=self.loading, staging=staging, switches=switches,
            weights=weights, adapters=adapters, answers=self._answers, recovery=recovery, counters=counters,
        )  # fmt: skip
        one = Prefetching(catalog, geometry, hash_tokens, staging, switches, weights, self.pins, published, trace)
        self.prefetching, self._resets = one, Resets(
            catalog, requests, staging, pins=self.pins, announced=one.announced, weights=weights,
            space_of=space_of, also_of=also_of, recovery=recovery, counters=counters, trace=trace,
        )  # fmt: skip
        self._hinting, self._ready = Hinting(catalog, counters, tiers=bool(tiers)), dict[int, int]()  # slots, by rank
        if trace.detail:
            self.trace_moves()

    def _make_catalog(self, ready: int | None) -> Catalog:
        """`ready`: how many slots may be used before ranks report how many there are; None: all."""
        settings, slots, groups = self.settings, self.geometry.slots, len(self.geometry.groups)
        make = functools.partial(make_policy, settings.policy, fault=self.counters.fault)
        if settings.quotas:
            return SharedCatalog(slots, groups, Accounts(settings.quotas, slots, make), self.counters, ready=ready)
        return Catalog(slots, groups, make(slots), self.counters, ready=ready)

    def _make_jobs(self) -> Jobs:
        return Jobs(
            self.catalog,
            self.counters,
            self.report,
            ranks=self._ranks,
            states=self.geometry.states,
            saved=self._saved,
            load_failed=self._load_failed,
            patience_s=self.settings.stuck_ms_max / 1000 + PATIENCE_S,
        )

    def _make_staging(self, tiers: Sequence[GuardedTier]) -> Staging:
        """Look beyond memory, in `tiers`."""
        slow_ms_max = self.settings.lookup_slow_ms_max if self.switches.saves else self.settings.lookup_ms_max
        return Staging(
            Finder(
                tiers,
                ranks=self._ranks,
                units_per_chunk=self.geometry.units_per_chunk,
                fault=self._tier_failed,
                share_ranks_max=self.settings.share_ranks_max,
            ),
            self.catalog,
            self.prefixes,
            self.geometry,
            ranks=self._ranks,
            lookup_ms_max=self.settings.lookup_ms_max,
            lookup_slow_ms_max=slow_ms_max,
            bytes_in_flight_max=int(self.settings.tier_bytes_in_flight_max),
            counters=self.counters,
            new_id=self.jobs.new_id,
            stores=self.switches.saves,
            store_idle_s_max=self.settings.store_idle_s_max,
            published=self._published,
        )

    def _tier_failed(self, tier: str, use: str, why: str) -> None:
        self.counters.fault("tier_failed", tier=tier, use=use, why=why)

    # ---- the engine's calls, in the order of a request's life -----------------------------------------------------

    def bind(self, blocks: Blocks) -> None:
        """Take the truth about block tables. Called before the first step."""
        self._saving.blocks = blocks
        if self._spans is not None:
            self._spans.blocks = blocks

    def trace_moves(self) -> None:
        """Trace the moves of chunks, stages and tier transfers that begin from now on."""
        report = weakref.proxy(self.report)  # what chunks refer to is never collected before they go
        self.catalog.watch = lambda *move: report.chunk_moved(*move)  # noqa: PLW0108  (its method would refer to it)
        if self.staging is not None:
            self.staging.watch, self.staging.watch_transfer = self.report.stage_moved, self.report.transfer_moved

    def ranks_ready(self, slots: dict[int, int], weights: Iterable[str], heads: Sequence[int] = ()) -> None:
        """All ranks have registered their caches. `slots`: how many slots may be used, by rank.

        `weights`: the digest of each rank's weights, in the ranks' order; empty: not all ranks have answered.
        `heads`: of each group, see `kvpipe.tiers.parts`; empty: each rank stores parts of its own.
        """
        if self._turns.away:
            self._turns.take()
        self.slots_ready(slots)
        if self.staging is not None:
            self.staging.finder.heads = tuple(heads)
        digests = tuple(weights)
        self.weights.awaited = False
        if digests and self.weights.know(digests):
            self._resets.weights_changed()
        else:
            self._resets.name_space()

    def on_new_request(self, request: Request, hints: RawHints | None = None, kind: Hashable = None) -> None:
        """Start to track `request`. `hints`: those that came with it, unread.

        `kind`: whether later prompts contain an answer is learned for each kind of request; None: not learned from it.
        """
        if self._turns.away:
            self._turns.take()
        tracked = self.requests.add(request)
        if hints is not None:
            self._hinting.arrived(tracked, hints)
        if kind is not None and self.settings.learn_answers:
            self._answers.arrived(tracked, kind)

    def lookup(self, request: Request, local_tokens: int, *, elsewhere: bool = False) -> Answer:
        """Return a `Hit` with the number of tokens that can be loaded beyond `local_tokens`, or `LATER`: ask again.

        `local_tokens`: what the engine's own prefix cache holds. A lookup takes no lease.
        `elsewhere`: another connector can bring the whole prompt, but only if this answer is a miss, and only soon.
        So the answer is never `LATER`, and a hit has the whole prompt but its last unit.
        """
        if self._turns.away:
            self._turns.take()
        try:
            if self.prefetching.announced.prompts:
                self.prefetching.came(self.prefixes.hashes(request))
            return self._lookups.answer(request, local_tokens, self._step, elsewhere=elsewhere)
        except Exception:
            self._lookups.raised(request, local_tokens, self._step)
            raise

    def admitted(self, request: Request, tables: Tables, external_tokens: int) -> None:
        """Blocks were allocated: lease chunks and plan the load of `external_tokens`; 0: note that there is no load."""
        if self._turns.away:
            self._turns.take()
        tracked = self.requests.add(request)
        asking = tracked.asking
        asked = asking.state.row != lookup_m.UNASKED
        try:
            if request.num_preemptions != tracked.preemptions:
                self.requests.notice_preemption(tracked)
            goes_on = not asked and external_tokens <= 0 and tracked.state.row != m.NEW
            if asked:
                if request.lora_request is not None:
                    self.adapters.admitted(request, self._step + 1, asking.local)
                if asking.local:  # of use, too, though the request needs no copy of it
                    units = asking.local // self.geometry.unit_tokens
                    self.catalog.refresh(self.prefixes.chunks_from_the_end(request, units), over=False)
        except Exception:  # the engine counts on the load all the same
            self.loading.admit(tracked, tables, external_tokens, self._step)
            tracked.saving.give_up()
            raise
        if goes_on:
            if self._spans is not None:
                self._spans.more(request)
            self.requests.go_on(tracked)
            return
        self.loading.admit(tracked, tables, external_tokens, self._step)
        if self._spans is not None and self._alone("spans", self._spans.admitted, request, tables) is not False:
            tracked.saving.give_up()  # what it got is wrong, or not known

    def plan_step(self, step: Step) -> StepPlan:
        """Plan the step: the loads that were admitted, and a save for every request with newly final units."""
        if self._turns.away:
            self._turns.take()
        self.requests.plan_step(step)
        jobs = self.loading.plan_step(step)
        if self._spans is not None:
            self._stop_at_cuts(self._spans, step, jobs)
        if self.switches.saving:
            self._alone("plan_saves", self._saving.plan_step, step, jobs)
        orders: tuple[TierOrder, ...] = ()
        space, staging, computes = "", self.staging, bool(step.num_scheduled_tokens)
        if staging is not None:
            self.trace.about("", 0)
            self._alone("pace", staging.patience.pace.step, step.num_scheduled_tokens.values(), time.monotonic())
            self._alone("prefetch", self.prefetching.plan_step, idle=not computes)
            orders = self._alone("plan_orders", staging.plan, stores=self.switches.storing, idle=not computes) or ()
            space = staging.space.name
        self._step += 1
        if self.weights.awaited and self._step == FIRST_STEPS_MAX:
            self.counters.fault("weights_not_on_all_ranks", ranks=self._ranks, reported=0)
        self.trace.step = self._step + 1  # what comes now belongs to the step that is planned next
        idle, question, claims = self._idle, self.weights.ask(), self.adapters.claims(jobs)
        wait_ms = idle.wait_ms(step, loading=bool(self.requests.waiting)) if idle is not None else 0
        if self.catalog.stale:
            self.trace.about("", 0)
            self._alone("sweep", self.catalog.sweep)
        if self.pins.pins:
            self._alone("expire_pins", self.pins.expire)
        if self.orders.due:  # behind the answers of this pass, which count on what is held
            self._alone("carry_out_orders", self.orders.carry_out)
        return StepPlan(self._step, tuple(jobs), orders, space, question, claims, wait_ms, computes, self.catalog.fresh)

    def _stop_at_cuts(self, spans: Spans, step: Step, jobs: list[Job]) -> None:
        """Save what requests have computed before a span that `step` cuts, and nothing behind it."""
        try:
            for tracked, first in spans.plan_step(step, self.requests.tracked):
                if self.switches.saving:
                    jobs += self._saving.save_up_to(tracked, first)
                tracked.saving.give_up()
        except Exception as e:  # noqa: BLE001  (the loads of the plan go out; which spans were cut is not known)
            self.counters.fault("contained_error", where="spans", error=repr(e))
            for request_id in step.num_scheduled_tokens:
                if (of := self.requests.tracked.get(request_id)) is not None:
                    of.saving.give_up()

    def _alone(self, where: str, part: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Return what `part` returns. If it raises, count a fault and return None: the call's other work goes on."""
        try:
            return part(*args, **kwargs)
        except Exception as e:  # noqa: BLE001  (the rest of the call counts, too)
            self.counters.fault("contained_error", where=where, error=repr(e))
            return None

    def reported(self, report: Report) -> None:
        """Take what ranks have reported with a step's output. A job on which all ranks have reported is over.

        Its chunks are published or released, or it fails. A part of the report that raises keeps no other from being
        taken: ranks report each thing once.
        """
        if self._turns.away:
            self._turns.take()
        if report.weights:
            self._alone("weighed", self.weighed, report.weights)
        if self.loading.stall is not None and report.rate:
            self.loading.stall.rate = report.rate
        for job_id, tally in sorted(report.tallies.items()):  # pieces of a chunk land in the order of their jobs
            try:
                if not self.jobs.reported(job_id, tally):
                    self._order_reported(job_id, tally)
            except Exception as e:  # noqa: BLE001  (other reports of the step count, too)
                self.counters.fault("contained_error", where="reported", job=job_id, error=repr(e))
        self.switches.tier_lost |= report.lost
        if self.staging is not None and (report.tier_rates or report.unreadable):
            self._alone("ranks_read", self.staging.ranks_read, report.tier_rates, report.unreadable)
        if report.ready:
            self._alone("slots_ready", self.slots_ready, report.ready)
        if report.adapters:
            self._alone("adapters", self.adapters.reported, report.adapters, report.step)

    def slots_ready(self, ready: dict[int, int]) -> None:
        """Take how many slots, from the first on, a rank may use, by rank. Once all have reported, the least counts."""
        if self._turns.away:
            self._turns.take()
        self._ready |= ready
        if ready and len(self._ready) == self._ranks:
            self.catalog.use_more(min(self._ready.values()))

    def _order_reported(self, order_id: int, tally: Tally) -> None:
        try:
            known = self.staging is not None and self.staging.reported(order_id, tally)
        except Exception as e:  # noqa: BLE001  (other reports of the step count, too)
            self.counters.fault("order_not_landed", order=order_id, error=repr(e))
            return
        if not known:
            self.counters["reported_again"] += 1

    def invalidated(self, blocks: set[int]) -> None:
        """The engine takes sync loads into `blocks` for failed, ours or somebody else's.

        Nothing that is being saved is believed. A load of ours has failed now, though its report may come much later.
        """
        if self._turns.away:
            self._turns.take()
        self.jobs.taint_saves()
        for load in self.jobs.loads_in_step:
            if blocks & load.job.blocks():
                self._alone("invalidated", self.jobs.fail_load, load)

    def finished(self, request: Request) -> None:
        """The request is over, in whatever state. Its jobs in flight end by themselves."""
        if self._turns.away:
            self._turns.take()
        tracked = self.requests.tracked.get(request.request_id)
        if tracked is not None and tracked.request is request:
            chunks: dict[Chunk, None] = {}
            try:
                ends = self._saving.ended(request)
                whole = self.prefixes.chunks_from_the_end(request, len(request.block_hashes))
                chunks = dict.fromkeys((*ends, *whole))  # now: a request that has ended has no keys of its adapter
                self.catalog.refresh(chunks, answer=request.num_tokens - request.num_prompt_tokens)
                if tracked.answer is not None:
                    self._answers.ended(tracked)
                if tracked.wishes:
                    self.prefetching.announce(request, self.prefixes, tracked.wishes)
            finally:  # whatever its policy raises
                self._end(tracked)
            if tracked.wishes:
                self._hinting.ended(tracked, list(chunks))

    def _end(self, tracked: Tracked) -> None:
        """Release what a request holds. A part that raises keeps no other from being released."""
        try:
            self.loading.drop(tracked)
            if self.staging is not None:
                self.staging.stores.ended(tracked)
        finally:
            try:
                if self._spans is not None:
                    self._spans.forget(tracked.request.request_id)
            finally:
                self.requests.finish(tracked)

    def adapter_called(self, number: int) -> None:
        """The engine loads, or removes, the adapter with this number, by a call between steps."""
        self.adapters.called(number, self._step)

    def weighed(self, reports: dict[int, tuple[int, str]]) -> None:
        """Ranks have read their weights again. If these have changed, every chunk is forgotten.

        `reports`: by rank, (the question that it answers, the digest of its weights).
        """
        if self._turns.away:
            self._turns.take()
        if reports and self.weights.answered(reports):
            self._resets.weights_changed()

    def reset(self) -> bool:
        """Forget every chunk, for good: what tiers hold is not found again either. Returns True, as vLLM expects."""
        with self._turns.taken():
            self._resets.reset()
        return True

    @property
    def pending(self) -> bool:
        """Whether reports of ranks should come soon: an engine without other work makes steps until they have come.

        A rank fails a job that makes no progress for `stuck_ms_max`. A report that has not come some time after that is
        waited for no longer; if it still comes, then with the next step.

        False also gives way to operators' orders: the engine is idle.
        """
        if self.weights.awaited and self._step < FIRST_STEPS_MAX:
            return True
        if self.jobs.awaited or (self.staging is not None and self.staging.pending):
            return True
        if self.prefetching.has_work():
            return True
        if self.staging is not None:
            self.staging.stores.rest()
        self._turns.give()
        return False

    def stats(self) -> dict[str, int]:
        """Return counters and gauges by name, for tests, the demo and operators."""
        c = self.catalog
        gauges = {
            "slots": c.slots,
            "slots_used": c.used,
            "slots_ready": c.ready,
            "leases": c.leases,
            "pieces_writing": c.writing,
            "chunks_pinned": self.pins.chunks,
        }
        orders = self.staging.orders if self.staging is not None else 0
        gauges |= {
            "jobs_in_flight": len(self.jobs.in_flight),
            "orders_in_flight": orders,
            "requests": len(self.requests.tracked),
        }
        return dict(self.counters) | gauges

    def shutdown(self) -> None:
        """End threads, and refuse operators' orders from now on. Idempotent."""
        self._turns.take()
        self.orders.end()
        if self.staging is not None:
            self.staging.stores.end()
            self.staging.finder.stop()
        self.adapters.reader.stop()

    # ---- jobs -----------------------------------------------------------------------------------------------------

    def _tenant(self, request: Request) -> Tenant:
        """Return whose the KV of `request` is."""
        return self.catalog.tenants.of(request, self.adapters.digest(request))

    def _published(self, request: Request | None, piece: Piece) -> None:
        """Notify routers that `piece` can be found now, if there are any."""
        if self._events is not None and request is not None and piece.chunk.marks:  # else another copy was quicker
            self._events.published(request, piece.chunk, piece.base)

    def _saved(self, tracked: Tracked, piece: Piece) -> None:
        self.counters["pieces_published"] += 1
        over = tracked.state.row == m.FINISHED
        if over:  # it has ended here, as in `Saving.ended`
            self.catalog.keep_mark(piece.chunk, piece.key)
        if tracked.hints:
            self._hinting.landed(tracked, piece.chunk)
        if tracked.answer is not None:
            self._answers.landed(tracked, piece, over=over)
        if self.staging is not None and piece.base < tracked.stored_units:
            self.staging.stores.landed(tracked, piece.chunk, piece.stop)
        if self._events is not None:
            self._published(tracked.request, piece)

    def _load_failed(self, failed: JobInFlight) -> None:
        """A load has failed: whatever any request has computed since it was planned may rest on garbage."""
        kind = Kind(failed.job.kind).name.lower()
        self.counters.fault("load_failed", request=failed.job.request, job=failed.job.id, kind=kind)
        if failed.tracked.epoch == failed.job.epoch:
            failed.tracked.saving.give_up()
        if failed.job.kind == Kind.LOAD_SYNC:
            self.jobs.taint_saves(after=failed.job.id)
            self._recovery.failed(failed.job.blocks(), self.requests.tracked)
