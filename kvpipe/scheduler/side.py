"""The scheduler side, which the engine calls: lookups, leases, plans of steps, and publishing of saved chunks.

The scheduler side keeps no copy of a token list or of a block table. Instead, the scheduler side reads the engine's
requests and block tables when a new unit becomes final. Therefore a preempted request needs no special case when it
gets other blocks. The work per step is one comparison per scheduled request, plus the work for new units.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from kvpipe.cache.chunks import Chunk
from kvpipe.cache.prefixes import Prefixes
from kvpipe.config.settings import Settings
from kvpipe.features.hints import Hinting
from kvpipe.features.orders import Orders
from kvpipe.features.pins import PromptPins
from kvpipe.features.prefetch import Prefetching
from kvpipe.node.catalog import NodeCatalog
from kvpipe.node.prefixes import NodePrefixes
from kvpipe.node.shared import SharedChunk
from kvpipe.protocol.engine import LookupAnswer
from kvpipe.protocol.geometry import Geometry
from kvpipe.protocol.limits import NO_LIMITS, RequestLimits
from kvpipe.protocol.messages import Job, Report, StepPlan, Tally, TierOrder
from kvpipe.scheduler.adapters import Adapters
from kvpipe.scheduler.context import Context, make_catalog
from kvpipe.scheduler.events import Events, Subscriber, nobody
from kvpipe.scheduler.failed_loads import FailedLoads
from kvpipe.scheduler.fetches import Staging
from kvpipe.scheduler.hooks import EngineFacts, EngineHooks, Published
from kvpipe.scheduler.jobs import Jobs
from kvpipe.scheduler.loads import Loading
from kvpipe.scheduler.lookups import FIRST_STEPS_MAX, Lookups
from kvpipe.scheduler.notified import NotedChunks, NotifiedRouters
from kvpipe.scheduler.records import Tracked
from kvpipe.scheduler.request_tracer import RequestTracer
from kvpipe.scheduler.requests import Requests
from kvpipe.scheduler.resets import Resets
from kvpipe.scheduler.saves import Saving
from kvpipe.scheduler.spans import WholeSpans
from kvpipe.scheduler.stall import Idle
from kvpipe.scheduler.switches import Switches
from kvpipe.scheduler.weights import Weights
from kvpipe.scheduler.wishes import RawHints
from kvpipe.statemachine import lookup as lookup_m
from kvpipe.statemachine import request as m
from kvpipe.tiers.finder import Finder
from kvpipe.tiers.guard import GuardedTier
from kvpipe.trace.log import Counters
from kvpipe.trace.recorder import OFF, Recorder

if TYPE_CHECKING:
    from kvpipe.node.client import NodePool
    from kvpipe.protocol.engine import Blocks, Request, Step, Tables


P = ParamSpec("P")
T = TypeVar("T")


class SchedulerSide:
    """The scheduler side of one engine. It runs in the scheduler's process, on the scheduler's thread."""

    def __init__(
        self,
        settings: Settings,
        geometry: Geometry,
        facts: EngineFacts,
        hooks: EngineHooks | None = None,
        *,
        tiers: Sequence[GuardedTier] = (),
        trace: Recorder = OFF,
        node: NodePool | None = None,
    ) -> None:
        """Create all parts of the scheduler side. `tiers` are the stores beyond host memory that keep chunks.

        `node` is the node's memory that the engine uses instead of private pools.
        """
        hooks = hooks or EngineHooks()
        recovery, published, spans_of = hooks.recovery, hooks.published, hooks.spans_of
        hash_tokens, ranks, stages = facts.hash_tokens, facts.ranks, facts.pipeline_stages
        self.settings, self.geometry, self._ranks = settings, geometry, ranks
        self.counters = counters = Counters()
        self.trace, self.tracer = trace, (tracer := RequestTracer(trace, counters.durations))
        trace.step = 1
        # no rank waits if there are several pipeline stages, because other stages may compute
        waits_idle = facts.waits_idle and stages == 1
        self._idle = Idle(settings.stall_ms_max) if waits_idle else None
        self.weights = weights = Weights(ranks, counters)
        self.switches = switches = Switches(settings, weights, saves=facts.saves, loads=facts.loads)
        ready = None if settings.prefault == "use" and stages == 1 else 0
        self.catalog = catalog = make_catalog(settings, geometry, counters, ready=ready, node=node)
        catalog.on_drop = published.dropped if published is not None else None
        self.adapters = adapters = Adapters(ranks, settings.lookup_ms_max / 1000, counters)
        self.node = catalog if isinstance(catalog, NodeCatalog) else None
        self._pool_token = b"" if self.node is None else self.node.token
        self.prefixes = (Prefixes if self.node is None else NodePrefixes)(
            catalog, geometry, hash_tokens, adapters.keys,
            lambda request: catalog.tenants.of(request, adapters.digest(request)), spans_of,
        )  # fmt: skip
        self.events = events = Events(counters)
        self.context = context = Context(settings, geometry, catalog, self.prefixes, counters, trace, events)
        self.orders = orders = Orders(counters, lambda: trace.about("", 0))
        self.turns, self.pins = orders.turns, PromptPins(context, orders)
        self._spans = WholeSpans(spans_of, geometry, counters) if spans_of is not None else None
        self.jobs = jobs = Jobs(context, tracer, ranks=ranks)
        self.staging = staging = self._make_staging(tiers, published) if tiers else None
        self.requests = requests = Requests(
            context, adapters=adapters, staging=staging, jobs=jobs, recovery=recovery, tracer=tracer,
            priority_of=hooks.priority_of,
        )  # fmt: skip
        self.loading = Loading(context, requests=requests, jobs=jobs, recovery=recovery, pipeline_stages=stages)
        self._saving = Saving(context, requests, jobs, stages)
        self._failed_loads = FailedLoads(
            context, requests=requests, jobs=jobs, recovery=recovery, hash_tokens=hash_tokens
        )
        self._lookups = Lookups(
            context, requests=requests, loading=self.loading, staging=staging, switches=switches, weights=weights,
            adapters=adapters, recovery=recovery,
        )  # fmt: skip
        self.prefetching = Prefetching(
            context, hash_tokens=hash_tokens, staging=staging, switches=switches, weights=weights, pins=self.pins,
            published=published,
        )  # fmt: skip
        self._resets = Resets(context, hooks, requests=requests, staging=staging, weights=weights, node=self.node)
        self._hinting, self._ready = Hinting(context, tiers=bool(tiers)), dict[int, int]()  # usable slots, by rank
        self._routers = self._make_routers(hooks)
        events.subscribe(self._subscribers())
        if trace.detail:
            self.trace_moves()
        if self.node is not None:
            tracer.watch_node(self.node.pool)

    def _subscribers(self) -> Iterator[Subscriber]:
        """Yield the parts that react to the events of requests. Each event calls the parts in this order."""
        yield self._failed_loads
        yield self.tracer
        yield self._hinting  # before the stores, because a hint decides how long a landed chunk stays in memory
        if self.staging is not None:
            yield self.staging.stores
            yield self.staging
            yield self.prefetching  # only with tiers, because prefetching fetches from tiers
        if self._routers is not None:
            yield self._routers
        yield self.pins

    def _make_routers(self, hooks: EngineHooks) -> NotifiedRouters | NotedChunks | None:
        """Return the part that notifies routers. In a node's memory, every engine writes notes for other engines."""
        if self.node is None:
            return NotifiedRouters(hooks.published) if hooks.published is not None else None
        self.node.notes.routers = hooks.published
        if hooks.note_of is None:
            return None
        noted = NotedChunks(self.node, hooks.note_of)
        self.node.notes.on_report = lambda chunk: self._alone("note", noted.reported, chunk)
        return noted

    def _make_staging(self, tiers: Sequence[GuardedTier], published: Published | None) -> Staging:
        """Return the part that looks up, fetches and stores chunks in `tiers`."""
        counters = self.counters
        finder = Finder(
            tiers,
            ranks=self._ranks,
            units_per_chunk=self.geometry.units_per_chunk,
            fault=lambda tier, use, why: counters.fault("tier_failed", tier=tier, use=use, why=why),
            share_ranks_max=self.settings.share_ranks_max,
            durations=counters.durations,
        )
        return Staging(
            self.context,
            finder,
            ranks=self._ranks,
            new_id=self.jobs.new_id,
            stores=self.switches.saves,
            loads=self.switches.loads,
            published=published,
        )

    # ---- the engine's calls, in the order of a request's life -----------------------------------------------------

    def bind(self, blocks: Blocks) -> None:
        """Keep `blocks`, which gives the block tables of requests. The engine calls this before the first step."""
        self._saving.blocks = self._failed_loads.blocks = blocks
        if self._spans is not None:
            self._spans.blocks = blocks

    def trace_moves(self) -> None:
        """Trace the moves of chunks, stages and tier transfers that begin from now on."""
        tracer = weakref.proxy(self.tracer)  # a strong reference would keep the tracer alive as long as the chunks
        self.catalog.watch = lambda *move: tracer.chunk_moved(*move)  # noqa: PLW0108  (its method would refer to it)
        if self.staging is not None:
            self.staging.watch, self.staging.watch_transfer = self.tracer.stage_moved, self.tracer.transfer_moved

    def ranks_ready(self, slots: dict[int, int], weights: Iterable[str], heads: Sequence[int] = ()) -> None:
        """Start to use the caches, because all ranks have registered their caches.

        `slots` has the number of pool slots that may be used, by rank. `weights` has the digest of each rank's weights,
        in the order of the ranks. `weights` is empty if not all ranks have answered. `heads` has the number of KV heads
        of each cache group (see `kvpipe.tiers.parts`). If `heads` is empty, each rank stores parts of its own, which
        only engines of the same layout can use.
        """
        self.turns.take()
        self.slots_ready(slots)
        if self.staging is not None:
            self.staging.finder.heads = tuple(heads)
        digests = tuple(weights)
        self.weights.awaited = False
        if digests and self.weights.know(digests):
            self._resets.weights_changed()
        else:
            self._resets.name_space()

    def on_new_request(
        self, request: Request, hints: RawHints | None = None, limits: RequestLimits = NO_LIMITS
    ) -> None:
        """Start to track `request`. `hints` are the hints that the request carries, not parsed yet.

        `limits` hold until the request's end.
        """
        self.turns.take()
        if self.node is not None:
            self._alone("node", self.node.poll)
        self.requests.add(request, hints, limits)

    def lookup(self, request: Request, local_tokens: int, *, elsewhere: bool = False) -> LookupAnswer:
        """Return a `Hit` with the number of tokens to load beyond `local_tokens`, or `LATER`.

        `LATER` makes the engine repeat the lookup in a later step. `local_tokens` is the number of tokens that the
        engine's own prefix cache holds. A lookup takes no lease.

        `elsewhere` says that another connector can load the whole prompt, if this lookup returns a miss at once. In
        this case the result is never `LATER`. A hit is returned only if the hit covers the prompt up to the prompt's
        last unit.
        """
        self.turns.take()
        try:
            answer = self._lookups.answer(request, local_tokens, self.context.steps.planned, elsewhere=elsewhere)
            if self.events.looked_up is not nobody:
                self.events.looked_up(self.requests.tracked[request.request_id], answer)
        except Exception:
            self._lookups.raised(request, local_tokens, self.context.steps.planned)
            raise
        return answer

    def admitted(self, request: Request, tables: Tables, external_tokens: int) -> None:
        """Lease chunks and plan the load of `external_tokens` into the blocks that the engine has allocated.

        If `external_tokens` is 0, note that nothing is loaded.
        """
        self.turns.take()
        tracked = self.requests.add(request)
        asking = tracked.asking
        asked = asking.state.row != lookup_m.UNASKED
        try:
            if request.num_preemptions != tracked.preemptions:
                self.requests.notice_preemption(tracked)
            goes_on = not asked and external_tokens <= 0 and tracked.state.row != m.NEW
            if asked:
                if request.lora_request is not None:
                    self.adapters.admitted(request, self.context.steps.planned + 1, asking.local)
                if asking.local:  # a local hit also counts as a use of these chunks
                    units = asking.local // self.geometry.unit_tokens
                    self.catalog.refresh(self.prefixes.chunks_from_the_end(request, units), over=False)
        except Exception:  # the engine expects the report of the load even after this error
            self.loading.admit(tracked, tables, external_tokens, self.context.steps.planned)
            tracked.saving.give_up()
            raise
        if goes_on:
            if self._spans is not None:
                self._spans.more(request)
            self.requests.go_on(tracked)
            return
        self.loading.admit(tracked, tables, external_tokens, self.context.steps.planned)
        if self._spans is not None and self._alone("spans", self._spans.admitted, request, tables) is not False:
            tracked.saving.give_up()  # the KV of the request's blocks is wrong or unknown

    def plan_step(self, step: Step) -> StepPlan:
        """Return the plan of `step`: loads of admitted requests, and saves of requests with newly final units."""
        self.turns.take()
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
            if staging.tier_blocks is not None:
                self._alone("tier_blocks", staging.tier_blocks.plan_step)
            orders = self._alone("plan_orders", staging.plan, stores=self.switches.storing, idle=not computes) or ()
            space = staging.space.name
        self.context.steps.planned = number = self.context.steps.planned + 1
        if self.weights.awaited and number == FIRST_STEPS_MAX:
            self.counters.fault("weights_not_on_all_ranks", ranks=self._ranks, reported=0)
        self.trace.step = number + 1  # from here on, events belong to the step that is planned next
        idle, question, claims = self._idle, self.weights.next_question(), self.adapters.claims(jobs)
        wait_ms = idle.wait_ms(step, loading=bool(self.requests.waiting)) if idle is not None else 0
        if self.catalog.stale:
            self.trace.about("", 0)
            self._alone("sweep", self.catalog.sweep)
        if self.pins.pins:
            self._alone("expire_pins", self.pins.expire)
        if self.orders.due or self.orders.reads:  # after this step's lookups, which rely on the chunks held now
            self._alone("carry_out_orders", self.orders.carry_out)
        if self.node is not None:
            self._poll_node(self.node.end_step)
        used, pool = self.catalog.fresh, self._pool_token
        return StepPlan(number, tuple(jobs), orders, space, question, claims, wait_ms, computes, used, pool)

    def carry_out_orders(self) -> bool:
        """Carry out a slice of operators' orders. Only for a thread that has borrowed the turn of an idle engine.

        Returns whether any part was carried out. An idle engine takes no steps, so the holder of a node's memory is
        polled here.
        """
        done = self.orders.carry_out()
        if self.node is not None:
            self._poll_node(self.node.end_step)
        return done

    def _poll_node(self, poll: Callable[[], None]) -> None:
        """Poll the holder of the node's memory, and end the fetches whose chunks the holder has published."""
        self.trace.about("", 0)
        self._alone("node", poll)
        if self.staging is not None:
            self._alone("settle", self.staging.settle)

    def _stop_at_cuts(self, spans: WholeSpans, step: Step, jobs: list[Job]) -> None:
        """For each span that `step` cuts, save the request's tokens before the span, and no later tokens."""
        try:
            for tracked, first in spans.plan_step(step, self.requests.tracked):
                if self.switches.saving:
                    jobs += self._saving.save_up_to(tracked, first)
                tracked.saving.give_up()
        except Exception as e:  # noqa: BLE001  (the loads of the plan are sent; which spans were cut is unknown)
            self.counters.fault("contained_error", where="spans", error=repr(e))
            for request_id in step.num_scheduled_tokens:
                if (of := self.requests.tracked.get(request_id)) is not None:
                    of.saving.give_up()

    def _alone(self, where: str, part: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Return the result of `part`. If `part` raises, count a fault and return None."""
        try:
            return part(*args, **kwargs)
        except Exception as e:  # noqa: BLE001  (the caller's other work is done all the same)
            self.counters.fault("contained_error", where=where, error=repr(e))
            return None

    def reported(self, report: Report) -> None:
        """Process the ranks' reports of one step. A job is over when all ranks have reported it.

        The chunks of a job that is over are published or released, or the job fails. If an item of the report raises,
        all other items are still processed, because ranks report everything only once.
        """
        self.turns.take()
        if report.weights:
            self._alone("weighed", self.weighed, report.weights)
        if self.loading.stall is not None and report.rate:
            self.loading.stall.rate = report.rate
        self._alone("damaged", self._forget_damaged, report.damaged)  # before failed loads are looked up again
        for job_id, tally in sorted(report.tallies.items()):  # pieces of a chunk land in the order of their jobs
            try:
                if not self.jobs.reported(job_id, tally):
                    self._order_reported(job_id, tally)
            except Exception as e:  # noqa: BLE001  (the step's other reports are processed all the same)
                self.counters.fault("contained_error", where="reported", job=job_id, error=repr(e))
        self.switches.tier_lost |= report.lost
        if self.staging is not None and (report.tier_rates or report.unreadable):
            self._alone("ranks_read", self.staging.ranks_read, report.tier_rates, report.unreadable)
        if report.ready:
            self._alone("slots_ready", self.slots_ready, report.ready)
        if report.adapters:
            self._alone("adapters", self.adapters.reported, report.adapters, report.step)
        # now, so that the next step's lookups find the reported chunks
        if self.node is not None and self.node.pending_reports:
            self._poll_node(self.node.poll)

    def _forget_damaged(self, damaged: dict[int, int]) -> None:
        """Evict the chunks of damaged slots of a node's memory. `damaged` has the chunks' generations by slot."""
        for slot, generation in damaged.items():
            chunk = self.catalog.at(slot)
            if isinstance(chunk, SharedChunk) and chunk.generation == generation and self.catalog.evict(chunk):
                self.counters["damaged_chunks_evicted"] += 1

    def slots_ready(self, ready: dict[int, int]) -> None:
        """Update the number of usable slots by rank.

        When all ranks have reported, the pool uses the lowest of these numbers. The usable slots of a rank are the
        first slots of its pool.
        """
        self.turns.take()
        self._ready |= ready
        if ready and len(self._ready) == self._ranks:
            self.catalog.use_more(min(self._ready.values()))

    def _order_reported(self, order_id: int, tally: Tally) -> None:
        try:
            known = self.staging is not None and self.staging.reported(order_id, tally)
        except Exception as e:  # noqa: BLE001  (the step's other reports are processed all the same)
            self.counters.fault("order_not_landed", order=order_id, error=repr(e))
            return
        if not known:
            self.counters["reported_again"] += 1

    def invalidated(self, blocks: set[int]) -> None:
        """The engine treats sync loads into `blocks` as failed. The loads may belong to kvpipe or to another connector.

        Every save in flight is tainted, because the saved KV may be computed from a failed load. A load of kvpipe
        into `blocks` fails at once, although ranks may report on that load much later.
        """
        self.turns.take()
        self.jobs.taint_saves()
        for load in self.jobs.loads_in_step:
            if blocks & load.job.blocks():
                self._alone("invalidated", self.jobs.fail_load, load)

    def finished(self, request: Request) -> None:
        """Release the leases and chunks of a request that is over, in any state.

        The request's jobs in flight end when ranks report them.
        """
        self.turns.take()
        tracked = self.requests.tracked.get(request.request_id)
        if tracked is None or tracked.request is not request:
            return
        chunks: dict[Chunk, None] = {}
        try:
            ends = self._saving.ended(request)
            whole = self.prefixes.chunks_from_the_end(request, len(request.block_hashes))
            chunks = dict.fromkeys((*ends, *whole))
            self.catalog.refresh(chunks, answer=request.num_tokens - request.num_prompt_tokens)
        finally:  # even if the eviction policy raises
            self._end(tracked, chunks)

    def _end(self, tracked: Tracked, chunks: dict[Chunk, None]) -> None:
        """Release everything that a request holds. If one release raises, all other releases are still carried out.

        `chunks` are all chunks of the request that memory holds, the last chunk first.
        """
        try:
            self.loading.drop(tracked)
        finally:
            try:
                if self._spans is not None:
                    self._spans.forget(tracked.request.request_id)
            finally:
                self.requests.finish(tracked, chunks)

    def adapter_called(self, number: int) -> None:
        """The engine loads or removes the adapter with this number, by a call between two steps."""
        self.adapters.called(number, self.context.steps.planned)

    def weighed(self, reports: dict[int, tuple[int, str]]) -> None:
        """Process the weight digests that ranks have read again. If the weights have changed, every chunk is forgotten.

        `reports` maps each rank to a pair: the `StepPlan.question` that the rank answers, and the digest of the rank's
        weights.
        """
        self.turns.take()
        if reports and self.weights.answered(reports):
            self._resets.weights_changed()

    def reset(self) -> bool:
        """Forget every chunk permanently, including the chunks in tiers. Returns True, as vLLM expects."""
        with self.turns.taken():
            self._resets.reset()
        return True

    def hit_by_tier(self, request: Request) -> dict[str, int]:
        """Return the tokens of the request's last hit, by tier. Chunks in memory come first."""
        self.turns.take()
        return self.requests.tracked[request.request_id].asking.answer.by_tier

    @property
    def pending(self) -> bool:
        """Whether ranks should report soon.

        If so, an engine without other work makes empty steps until the reports arrive. A rank fails a job that makes no
        progress for `stuck_ms_max`. If the report is still missing some seconds later, the engine makes no more steps
        for it. A later report is processed with the next step.

        If nothing is pending, the engine is idle, and operators' orders are carried out now. In a sleeping engine
        nothing is pending, because such an engine makes no steps.
        """
        if self.weights.asleep:
            self.turns.give()
            return False
        if self.weights.awaited and self.context.steps.planned < FIRST_STEPS_MAX:
            return True
        if self.jobs.awaited or (self.staging is not None and self.staging.pending):
            return True
        if self.prefetching.has_work() or (self.node is not None and self.node.pending_reports):
            return True
        if self.staging is not None:
            self.staging.stores.rest()
        self.turns.give()
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
        """Stop the threads, and refuse operators' orders from now on. A second call has no effect."""
        self.turns.take()
        self.orders.end()
        if self.staging is not None:
            self.staging.stores.end()
            self.staging.finder.stop()
        self.adapters.reader.stop()
        if self.node is not None:
            self.node.close()
