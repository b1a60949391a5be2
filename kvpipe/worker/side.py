"""The worker side of one rank: the model runner's hooks drive the rank's pool and pipeline. No hook raises."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

import torch

from kvpipe.machine.cores import CPUS_AT_START
from kvpipe.protocol.messages import LOAD_ASYNC, LOAD_SYNC, ONE_BAD, ONE_OK, Outcome, Report, StepPlan, Tally
from kvpipe.tiers.base import FillsSlots
from kvpipe.tiers.carrier import Carrier
from kvpipe.tiers.guard import GuardedTier
from kvpipe.tiers.parts import RankParts, Share
from kvpipe.tiers.totals import Totals, copied, left
from kvpipe.trace.events import PoolReady, PoolShort, StepRan, TierLost
from kvpipe.transfer.base import TransferEngine
from kvpipe.transfer.pool import HostPool, SharedSlots
from kvpipe.transfer.ready import DEMAND_BYTES_MAX, SHARE_OF_A_BUSY_CORE, SHARE_OF_PINNING, Manners, Readier
from kvpipe.worker.adapters import HeldAdapters, marked_broken
from kvpipe.worker.caches import PagedCaches
from kvpipe.worker.checks import SlotChecks
from kvpipe.worker.context import RankContext
from kvpipe.worker.engines import EngineOptions, make_engine
from kvpipe.worker.outcomes import REPORTED_EARLY
from kvpipe.worker.pipeline import TIER, Pipeline

if TYPE_CHECKING:
    from kvpipe.machine.headroom import Headroom
    from kvpipe.statemachine.core import Cursor

IDLE_NS: Final = 100_000_000
"""The engine counts as idle when this number of nanoseconds has passed since the last step began."""


class WorkerSide:
    """The worker side of one rank. The rank creates its worker side as soon as the paged caches exist.

    The calls `start_loads` and `end_step` are methods of the pipeline. The engine calls `start_loads` when loads may be
    submitted. The engine calls `end_step` (`wait_for_save`) when the step's compute is enqueued on the device.
    """

    def __init__(
        self,
        context: RankContext,
        caches: PagedCaches,
        *,
        engine: TransferEngine | None = None,
        shares: Sequence[Share] = (),
        tiers: Sequence[GuardedTier] = (),
        weigh: Callable[[], str] = str,
        adapters: HeldAdapters | None = None,
        shared: SharedSlots | None = None,
    ) -> None:
        """Take the rank's memory for chunks and start the threads. If anything raises, release memory and threads.

        `engine` replaces the device's own transfer engine. `shares` says how each group's KV is divided among the
        ranks, if known. `tiers` are not yet opened. `weigh` returns a digest of this rank's weights, or "" if the
        digest is not known. `adapters` has the adapters that were loaded before the caches existed. `shared` has the
        slots that the engines of a node share, if any.

        Raises:
            ConfigError: the system refuses the requested memory.

        """
        self.context, self.geometry, self.weigh = context, caches.geometry, weigh
        self.counters, self.trace = context.counters, context.trace
        self.adapters = adapters or HeldAdapters(context.counters)
        self.shares = tuple(share.whole if caches.whole else share for share in shares)
        self.lost = False  # whether this rank's pool cannot be used any more
        self.asleep = False  # whether the memory of the caches is released
        self._put_off = False  # whether the step's metrics wait for a later step
        self._caches, self._index, self._aliases = caches, caches.index, caches.aliases
        self._plan: StepPlan | None = None  # the plan of the bound step
        self._bound_ns = self._waited_ns = 0
        # for the next report: this rank's answer to the last question about its weights
        self._weighed: dict[int, tuple[int, str]] = {}
        self._unreadable, self._ready_reported = frozenset[int](), -1
        self._tallies: dict[int, Tally] = {}
        self._received, self._failed, self._bad_blocks = set[str](), set[str](), set[int]()
        self._late_blocks, self._loading = set[int](), set[int]()  # numbers of blocks, and ids of the step's sync loads
        with ExitStack() as undo:
            self._engine = engine = engine or self._make_engine(caches.device)
            self._pool = pool = HostPool(self.geometry, shared)
            engine.attach(caches.views, self.geometry, pool)
            undo.callback(engine.shutdown)
            alone = shared is None or shared.saves  # False if another rank saves the same bytes to the same slots
            for one in tiers:
                if shared is not None and isinstance(one.tier, FillsSlots):
                    one.tier.share(shared)
            self.carrier = self._make_carrier(tiers, fetches=alone)
            if self.carrier is not None:
                undo.callback(self.carrier.shutdown)
            self.pipeline = self._make_pipeline(engine, caches, saves=alone)
            undo.callback(self.pipeline.shutdown)
            self.start_loads, self.end_step = self.pipeline.start_loads, self.pipeline.end_step
            self._readier = self._make_readier(engine, caches.device)
            undo.callback(self._readier.stop)
            self._readier.begin(context.settings.prefault)
            undo.pop_all()

    def _make_engine(self, device: str) -> TransferEngine:
        context, idle = self.context, self._has_idle_core()
        options = EngineOptions(context.settings, context.cpus, idle, context.trace, context.counters.fault)
        return make_engine(device, options)

    def _make_carrier(self, tiers: Sequence[GuardedTier], *, fetches: bool) -> Carrier | None:
        """Return the carrier, which carries chunks to and from tiers, or None without tiers."""
        if not tiers:
            return None
        context = self.context
        parts = RankParts(context.rank, context.ranks, self.shares, context.settings.share_ranks_max, fetches)
        return Carrier(
            tiers,
            self.geometry,
            self._pool,
            parts,
            counters=context.counters,
            cpus=context.cpus,
            trace=context.trace,
        )

    def _make_pipeline(self, engine: TransferEngine, caches: PagedCaches, *, saves: bool) -> Pipeline:
        pool, context = self._pool, self.context
        marks = pool.marks
        checks = None if marks is None else SlotChecks(marks, context.counters, saves=saves, cpus=context.cpus)
        return Pipeline(
            self.context,
            engine,
            self.geometry,
            hooks=caches.hooks,
            blocks=caches.blocks,
            slots_ready=lambda: pool.ready,
            saves=saves,
            checks=checks,
        )

    def _make_readier(self, engine: TransferEngine, device: str) -> Readier:
        """Return the readier, which makes the pool's slots ready."""
        spare, ranks = self.context.cpus, self.context.ranks
        alone = spare or self._has_idle_core() or device != "cpu"
        share = 1.0 if alone else SHARE_OF_A_BUSY_CORE
        claim_share = 1.0 if device == "cpu" else SHARE_OF_PINNING / ranks
        return Readier(
            self._pool,
            engine.claim,
            piece_bytes=engine.piece_bytes,
            manners=Manners(spare, share, claim_share, self._is_busy),
            demand_bytes_max=DEMAND_BYTES_MAX // ranks if device == "cpu" else 0,
            done=self._pool_ready,
            short=self._pool_short,
        )

    @staticmethod
    def _has_idle_core() -> bool:
        """Return whether at least one core that the process may use has no thread of the forward."""
        return len(CPUS_AT_START) > torch.get_num_threads()

    def _is_busy(self) -> bool:
        """Return whether the engine is in a step, or began its last step less than `IDLE_NS` ago."""
        return self._plan is not None or time.monotonic_ns() - self._bound_ns < IDLE_NS

    def _pool_ready(self, took_s: float) -> None:
        pool = self._pool
        reported = PoolReady(*self.trace.of("", 0), slots=pool.slots, took_ms=round(took_s * 1e3, 1))
        reported.gigabytes = round(pool.slots * pool.part_bytes / 1e9, 3)
        self.trace.put(reported)

    def _pool_short(self, room: Headroom) -> None:
        reported = PoolShort(*self.trace.of("", 0), slots=self.geometry.slots, where=room.where)
        reported.ready, reported.free_mb = self.ready, round(room.free / 1e6, 1)
        reported.remedy = "set a smaller pool_bytes_max: what has no memory is not used"
        self.trace.put(reported)

    @property
    def step(self) -> Cursor:
        """The cursor of this rank's steps."""
        return self.pipeline.step

    # ---- hooks, in the order of a step ----------------------------------------------------------------------------

    def handle_preemptions(self) -> None:
        """Order the writes of the next step after the reads of the last step's saves."""
        self.pipeline.fence()

    def bind(self, plan: StepPlan) -> None:
        """Begin the step of `plan`. The engine has already loaded the adapters of the step's requests."""
        self._plan, self._bound_ns = plan, time.monotonic_ns()
        self.trace.step = plan.step
        if plan.used > self._readier.used:
            self._readier.use(plan.used)
        try:
            if plan.jobs and (self.asleep or plan.pool != self._pool.token):
                why = "the memory of the caches is unmapped" if self.asleep else "the plan is for another pool"
                raise RuntimeError(why)  # noqa: TRY301
            plan = self._plan = self.adapters.checked(plan)
        except Exception as error:  # noqa: BLE001  (the scheduler's side needs each job's outcome)
            self.counters.fault("contained_error", where="bind", error=repr(error))
            plan = self._plan = plan._replace(jobs=tuple(map(marked_broken, plan.jobs)))
        self._loading.update([job.id for job in plan.jobs if job.kind == LOAD_SYNC])
        try:
            self._begin_orders(plan)
            if plan.question:
                self._weighed = {self.context.rank: (plan.question, self.weigh_now())}
        finally:
            self.pipeline.begin(plan)

    def weigh_now(self) -> str:
        """Return a digest of this rank's weights. Return "" if the weights cannot be read."""
        try:
            return self.weigh()
        except Exception as error:  # noqa: BLE001  (the engine serves, but shares no chunks)
            self.counters.fault("weights_not_read", error=repr(error))
            return ""

    def _begin_orders(self, plan: StepPlan) -> None:
        """Pass the step's tier orders to the carrier.

        Fail the orders if only other ranks have tiers, or if this rank's pool differs from the other ranks' pools.
        """
        if self.carrier is not None and plan.pool == self._pool.token:
            self.carrier.carry_out(plan.orders, plan.space, plan.step)
        elif plan.orders:
            self.counters.fault("orders_without_tiers", orders=len(plan.orders))
            self._tallies.update((order.id, ONE_BAD) for order in plan.orders)

    def wait_layer(self, name: str) -> None:
        """Order the attention of layer `name`, which is about to read its cache, after the layer's loads."""
        layer = self._index.get(name)
        if layer is None:
            self._unknown(name)
        else:
            self.pipeline.wait_layer(layer)

    def save_layer(self, name: str) -> None:
        """Save layer `name`, whose attention has written its cache."""
        layer = self._index.get(name)
        if layer is None:
            self._unknown(name)
        else:
            self.pipeline.save_layer(layer)

    def unbind(self) -> None:
        """End the step if `end_step` was not called for the step. Trace how long the step took."""
        plan, self._plan, pipeline = self._plan, None, self.pipeline
        pipeline.clear()
        if plan is not None and self.trace.detail:
            took_ns, waited_ns = time.monotonic_ns() - self._bound_ns, pipeline.waited_ns - self._waited_ns
            self._waited_ns = pipeline.waited_ns
            common = (self._bound_ns, self.trace.rank, "", 0, plan.step)
            self.trace.put(StepRan(*common, took_ns=took_ns, jobs=len(plan.jobs), waited_ns=waited_ns))
        if not (pipeline.alive or self.lost):
            self.counters.fault("loop_lost")
            self._lose("a thread of the rank has ended")

    def collect(self) -> tuple[set[str], set[str]]:
        """Return (requests whose async load ended, requests whose async load failed), each request once per load."""
        pipeline, plan = self.pipeline, self._plan
        pipeline.end_loads()
        if plan is not None and plan.wait_ms:
            pipeline.async_loads.await_one(plan.wait_ms / 1000)
        for outcome in pipeline.collect():
            self._account(outcome)
        received, self._received = self._received, set()
        failed, self._failed = self._failed, set()
        return received, failed

    def take_bad_blocks(self, *, late: bool = True) -> set[int]:
        """Return the blocks of failed sync loads of this step and, if `late`, of earlier steps.

        Other requests may hold the blocks of earlier steps' loads now.

        The report tells the scheduler's side of every failed load. The scheduler's `Recovery` handles late failures.
        """
        suspects, bad, were = self.pipeline.take_suspects(), self._bad_blocks, self._late_blocks
        self._bad_blocks, self._late_blocks = set(), set()
        return bad | suspects | were if late else bad | suspects

    def take_report(self) -> Report | None:
        """Return a report of this rank's news since the last call, or None if the scheduler side needs no report.

        This method is called after `collect`.
        """
        carrier, ready, was_ready, were_unreadable = self.carrier, self.ready, self._ready_reported, self._unreadable
        unreadable, rates = (carrier.unreadable, carrier.rates) if carrier is not None else (frozenset[int](), {})
        self._loading.clear()  # the engine already has this step's bad blocks, so failures from now on count as late
        news, weighed, tallies = self._news(), self._weighed, self._take_tallies()  # last: errors would lose tallies
        damaged = self._pool.marks.take_found() if self._pool.marks is not None else {}  # taken after the tallies
        self._weighed, self._ready_reported, self._unreadable = {}, ready, unreadable
        changed = self.lost or ready != was_ready or unreadable != were_unreadable
        if not (tallies or damaged or weighed or news or changed):
            return None
        rank = self.context.rank
        return Report(
            tallies,
            lost=self.lost,
            rate=self.pipeline.copies.rate.bytes_per_s,
            tier_rates=rates,
            unreadable={rank: unreadable} if unreadable != were_unreadable else {},
            ready={rank: ready} if ready != was_ready else {},
            weights=weighed,
            adapters={rank: news} if news else {},
            step=self.adapters.step,
            damaged=damaged,
        )

    def _news(self) -> dict[int, bytes]:
        """Return the digests of adapters that changed since the last call. Empty if the digests cannot be read now."""
        try:
            return self.adapters.news()
        except Exception as error:  # noqa: BLE001  (an error must not lose the report)
            self.counters.fault("contained_error", where="adapters", error=repr(error))
            return {}

    def _take_tallies(self) -> dict[int, Tally]:
        """Return the tallies of this rank's jobs and tier orders that ended since the last call."""
        put_off, self._put_off = self._put_off, False
        for outcome in () if put_off else self.pipeline.collect():  # the jobs that the step's end has settled
            self._account(outcome)
        if self.carrier is not None:
            self._tallies.update((one.order.id, ONE_OK if one.ok else ONE_BAD) for one in self.carrier.collect())
        tallies, self._tallies = self._tallies, {}
        return tallies

    @property
    def ready(self) -> int:
        """The number of usable slots of this rank: the first `ready` slots of the pool."""
        return self._pool.ready

    def puts_off_metrics(self) -> bool:
        """Return whether the step's metrics wait for a later step, because jobs are in flight.

        Jobs that end after this call are not in this step's report. So a later step must report, and that report also
        has the metrics.
        """
        self._put_off = self.carrier is None and self.pipeline.in_flight > 0
        return self._put_off

    def totals(self) -> Totals:
        """Return this rank's current metrics, by metric and label value. "" stands for a metric without a label."""
        pipeline = self.pipeline
        wait_s = pipeline.waited_ns / 1e9
        values = copied(pipeline.copies.bytes, pipeline.copies.ns)
        values |= {"wait_seconds": {"": wait_s}, "faults": self.counters.faults, "trace_dropped": self.trace.losses}
        if self.carrier is not None:
            values["tier_bytes"] = {f"{tier} {use}": size for (tier, use), size in self.carrier.bytes.items()}
            values["tier_seconds"] = {f"{tier} {use}": took for (tier, use), took in self.carrier.seconds.items()}
            values["tiers_left"] = left(self.carrier.tiers)
        return values

    def release(self) -> None:
        """End every copy because the caches' memory will be released, and begin no copy until `restore`. Idempotent."""
        if self.lost:
            self.shutdown()  # even if only the loop thread has ended: the engine may still copy
        if self.asleep or self.lost:
            return
        self.asleep = True
        with ExitStack() as undo:
            undo.callback(self.give_up, "a copy did not end before the memory of its caches was unmapped")
            self.pipeline.fence()
            if self.pipeline.copies.drain(self._engine.fence, self.context.settings.wait_ms_max / 1000):
                undo.pop_all()

    def restore(self, tensors: Mapping[str, torch.Tensor] | None = None) -> bool:
        """Use the caches again after their memory was restored, perhaps at other addresses or as other `tensors`.

        The content of the caches is lost. Returns whether the caches had been released. Idempotent.
        """
        if not self.asleep or self.lost:
            return self.asleep
        self.asleep, before = False, self._caches
        with ExitStack() as undo:
            undo.callback(self.give_up, "the caches have another layout after the sleep")
            now = before.again(tensors)
            if [view.kind for view in now.views] == [view.kind for view in before.views]:
                if [view.base for view in now.views] != [view.base for view in before.views]:
                    self._engine.attach(now.views, self.geometry, self._pool)
                self._caches = now
                undo.pop_all()
        return True

    def give_up(self, why: str) -> None:
        """Never use the caches again: end unfinished jobs, fail later jobs, and report the pool as lost."""
        self._lose(why)
        self.shutdown()

    def shutdown(self) -> None:
        """End the threads of this rank. Idempotent."""
        with ExitStack() as always:
            if self.carrier is not None:
                always.callback(self.carrier.shutdown)
            always.callback(self.pipeline.shutdown)
            self._readier.stop()

    def _lose(self, why: str) -> None:
        """Record that this rank's pool cannot be used any more. The loss is traced once."""
        if not self.lost:
            self.lost = True
            self.trace.put(TierLost(*self.trace.of("", 0), tier=TIER, why=why))

    def _account(self, outcome: Outcome) -> None:
        job, ok, why = outcome
        self._tallies[job.id] = ONE_OK if ok else ONE_BAD
        if job.kind == LOAD_ASYNC:
            self._received.add(job.request)
            if not ok:
                self._failed.add(job.request)
        elif job.kind == LOAD_SYNC and not ok and why != REPORTED_EARLY:
            if job.id in self._loading:
                self._bad_blocks |= job.blocks()
            else:
                self._late_blocks |= job.blocks()

    def _unknown(self, name: str) -> None:
        if name in self._aliases:  # this layer shares the cache of another layer, which is copied
            self.counters["shared_layer_hooks"] += 1
        else:
            self.counters.fault("hook_for_unknown_layer", layer=name)
