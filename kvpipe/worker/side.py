"""The worker side: one rank's pool and pipeline, driven by the model runner's hooks. Nothing raises into vLLM."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

import torch

from kvpipe.config import Settings
from kvpipe.cores import CPUS_AT_START, spare_cpus
from kvpipe.geometry import Geometry
from kvpipe.messages import LOAD_ASYNC, LOAD_SYNC, ONE_BAD, ONE_OK, Outcome, Report, StepPlan, Tally
from kvpipe.tiers.carrier import Carrier
from kvpipe.tiers.guard import GuardedTier
from kvpipe.tiers.parts import Share
from kvpipe.trace.events import PoolReady, PoolShort, StepRan, TierLost
from kvpipe.trace.log import Counters
from kvpipe.trace.recorder import OFF, Recorder
from kvpipe.trace.totals import Totals, copied, left
from kvpipe.transfer.base import TransferEngine
from kvpipe.transfer.engines import EngineOptions, make_engine
from kvpipe.transfer.pool import HostPool
from kvpipe.transfer.ready import DEMAND_BYTES_MAX, SHARE_OF_A_BUSY_CORE, Manners, Readier
from kvpipe.worker.adapters import HeldAdapters, broken
from kvpipe.worker.caches import PagedCaches
from kvpipe.worker.outcomes import REPORTED_EARLY
from kvpipe.worker.pipeline import TIER, Pipeline

if TYPE_CHECKING:
    from kvpipe.headroom import Headroom
    from kvpipe.statemachine.core import Cursor


IDLE_NS: Final = 100_000_000
"""So long after a step's end the engine counts as idle."""


class WorkerSide:
    """One per rank, made when the rank has its caches: from then on there is all that a step's calls need.

    Two calls are its pipeline's own: `start_loads`, when loads may be submitted, and `end_step`, when everything of the
    step was submitted (`wait_for_save`): source blocks are free to be reused then.
    """

    def __init__(
        self,
        settings: Settings,
        geometry: Geometry,
        caches: PagedCaches,
        *,
        engine: TransferEngine | None = None,
        rank: int = 0,
        ranks: int = 1,
        shares: Sequence[Share] = (),
        tiers: Sequence[GuardedTier] = (),
        weigh: Callable[[], str] = str,
        adapters: HeldAdapters | None = None,
        counters: Counters | None = None,
        trace: Recorder = OFF,
    ) -> None:
        """Take the rank's memory for chunks, and start its threads. Whatever is raised, none is left.

        `engine`: what moves the bytes, if not the device's own. `shares`: how each group's KV lies over the ranks, if
        anybody can say. `tiers`: places beyond memory, not yet opened. `weigh`: returns a digest of this rank's
        weights; "": not known. `adapters`: those that the rank holds, where some are loaded before there are caches.

        Raises:
            ConfigError: the system does not give the memory that was asked for.

        """
        self.settings, self.geometry, self.trace = settings, geometry, trace
        self.counters = counters = Counters() if counters is None else counters
        self.adapters = HeldAdapters(counters) if adapters is None else adapters
        self.rank, self.ranks, self.shares, self.weigh = rank, ranks, tuple(shares), weigh
        self.lost = False  # this rank's pool cannot be used any more
        self._index, self._aliases = caches.index, caches.aliases
        self._plan: StepPlan | None = None  # the bound step's
        self._bound_ns = self._waited_ns = 0
        self._weighed: tuple[int, str] | None = None
        self._unreadable: frozenset[int] = frozenset()
        self._ready_reported = -1
        self._tallies: dict[int, Tally] = {}
        self._received, self._failed, self._bad_blocks = set[str](), set[str](), set[int]()
        with ExitStack() as undo:
            engine = self._make_engine(caches.device) if engine is None else engine
            self._pool = pool = HostPool(geometry)
            engine.attach(caches.views, geometry, pool)
            undo.callback(engine.shutdown)
            self.carrier = self._make_carrier(tiers)
            if self.carrier is not None:
                undo.callback(self.carrier.shutdown)
            self.pipeline = self._make_pipeline(engine, caches)
            undo.callback(self.pipeline.shutdown)
            self.start_loads, self.end_step = self.pipeline.start_loads, self.pipeline.end_step
            self._readier = self._make_readier(engine, caches.device)
            undo.callback(self._readier.stop)
            self._readier.begin(settings.prefault)
            undo.pop_all()

    def _make_engine(self, device: str) -> TransferEngine:
        options = EngineOptions(self.settings, spare_cpus(), self._has_idle_core(), self.trace, self.counters.fault)
        return make_engine(device, options)

    def _make_carrier(self, tiers: Sequence[GuardedTier]) -> Carrier | None:
        """Return what carries chunks to and from tiers, if there are any."""
        if not tiers:
            return None
        return Carrier(
            tiers,
            self.geometry,
            self._pool,
            rank=self.rank,
            ranks=self.ranks,
            shares=self.shares,
            share_ranks_max=self.settings.share_ranks_max,
            counters=self.counters,
            cpus=spare_cpus(),
            trace=self.trace,
        )

    def _make_pipeline(self, engine: TransferEngine, caches: PagedCaches) -> Pipeline:
        pool = self._pool
        return Pipeline(
            engine,
            self.geometry,
            wait_ms_max=self.settings.wait_ms_max,
            counters=self.counters,
            blocks=caches.blocks,
            slots_ready=lambda: pool.ready,
            replayed=caches.hooks.replayed,
            fences_late=caches.hooks.fences_late,
            unhooked=caches.unhooked,
            cpus=spare_cpus(),
            stuck_ms_max=self.settings.stuck_ms_max,
            trace=self.trace,
        )

    def _make_readier(self, engine: TransferEngine, device: str) -> Readier:
        """Return what makes the pool's slots ready: see `Readier`."""
        spare = spare_cpus()
        alone = spare or self._has_idle_core() or device != "cpu"
        share = 1.0 if alone else SHARE_OF_A_BUSY_CORE
        return Readier(
            self._pool,
            engine.claim,
            piece_bytes=engine.piece_bytes,
            manners=Manners(spare, share, self._is_busy),
            demand_bytes_max=DEMAND_BYTES_MAX // self.ranks if device == "cpu" else 0,
            done=self._pool_ready,
            short=self._pool_short,
        )

    @staticmethod
    def _has_idle_core() -> bool:
        """Whether the forward's threads leave a core of those that the process may use."""
        return len(CPUS_AT_START) > torch.get_num_threads()

    def _is_busy(self) -> bool:
        """Whether the engine is in a step, or was a moment ago."""
        return self._plan is not None or time.monotonic_ns() - self._bound_ns < IDLE_NS

    def _pool_ready(self, took_s: float) -> None:
        reported = PoolReady(*self.trace.of("", 0), slots=self.geometry.slots, took_ms=round(took_s * 1e3, 1))
        reported.gigabytes = round(self.geometry.slots * self.geometry.slot_bytes / 1e9, 3)
        self.trace.put(reported)

    def _pool_short(self, room: Headroom) -> None:
        reported = PoolShort(*self.trace.of("", 0), slots=self.geometry.slots, where=room.where)
        reported.ready, reported.free_mb = self.ready, round(room.free / 1e6, 1)
        reported.remedy = "set a smaller pool_bytes_max: what has no memory is not used"
        self.trace.put(reported)

    @property
    def step(self) -> Cursor:
        """The machine of its steps."""
        return self.pipeline.step

    # ---- hooks, in the order of a step ----------------------------------------------------------------------------

    def handle_preemptions(self) -> None:
        """A step is about to write blocks: those that the last step's saves read are not written before."""
        self.pipeline.fence()

    def bind(self, plan: StepPlan) -> None:
        """A step begins. Its requests' adapters are loaded."""
        self._plan, self._bound_ns = plan, time.monotonic_ns()
        self.trace.step = plan.step
        if plan.used > self._readier.used:
            self._readier.use(plan.used)
        try:
            plan = self._plan = self.adapters.checked(plan)
        except Exception as error:  # noqa: BLE001  (the scheduler's side counts on the jobs: they are reported, as failed)
            self.counters.fault("contained_error", where="bind", error=repr(error))
            plan = self._plan = plan._replace(jobs=tuple(map(broken, plan.jobs)))
        try:
            self._begin_orders(plan)
            if plan.question:
                self._weighed = plan.question, self.weigh_now()
        finally:
            self.pipeline.begin(plan)

    def weigh_now(self) -> str:
        """Return a digest of this rank's weights; "" if they cannot be read."""
        try:
            return self.weigh()
        except Exception as error:  # noqa: BLE001  (nothing is shared then; the engine serves)
            self.counters.fault("weights_not_read", error=repr(error))
            return ""

    def _begin_orders(self, plan: StepPlan) -> None:
        """Take the step's orders; a rank that has no tiers, unlike others, fails them."""
        if self.carrier is not None:
            self.carrier.begin(plan.orders, plan.space, plan.step)
        elif plan.orders:
            self.counters.fault("orders_without_tiers", orders=len(plan.orders))
            self._tallies.update((order.id, ONE_BAD) for order in plan.orders)

    def wait_layer(self, name: str) -> None:
        """Attention of layer `name` is about to read its cache."""
        layer = self._index.get(name)
        if layer is None:
            self._unknown(name)
        else:
            self.pipeline.wait_layer(layer)

    def save_layer(self, name: str) -> None:
        """Attention of layer `name` has written its cache."""
        layer = self._index.get(name)
        if layer is None:
            self._unknown(name)
        else:
            self.pipeline.save_layer(layer)

    def unbind(self) -> None:
        """The step is over. A step without `wait_for_save` ends here."""
        plan, self._plan, pipeline = self._plan, None, self.pipeline
        pipeline.clear()
        if plan is not None and self.trace.detail:
            took_ns, waited_ns = time.monotonic_ns() - self._bound_ns, pipeline.waited_ns - self._waited_ns
            self._waited_ns = pipeline.waited_ns
            common = (self._bound_ns, self.trace.rank, "", 0, plan.step)
            self.trace.put(StepRan(*common, took_ns=took_ns, jobs=len(plan.jobs), waited_ns=waited_ns))
        if not pipeline.alive:
            self._lose("the loop thread has ended")

    def collect(self) -> tuple[set[str], set[str]]:
        """Return (requests whose async load ended, those of them that failed), each request once per load."""
        pipeline, plan = self.pipeline, self._plan
        pipeline.end_loads()
        if plan is not None and plan.wait_ms:
            pipeline.async_loads.await_one(plan.wait_ms / 1000)
        for outcome in pipeline.collect():
            self._account(outcome)
        received, self._received = self._received, set()
        failed, self._failed = self._failed, set()
        return received, failed

    def take_bad_blocks(self) -> set[int]:
        """Return the blocks whose sync load failed."""
        suspects = self.pipeline.take_suspects()
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad | suspects

    def take_report(self) -> Report | None:
        """Return what has happened on this rank since the last call; None: nothing that the scheduler side must know.

        Called after `collect`.
        """
        carrier, ready, was_ready, were_unreadable = self.carrier, self.ready, self._ready_reported, self._unreadable
        unreadable, rates = (carrier.unreadable, carrier.rates) if carrier is not None else (frozenset[int](), {})
        news, weighed, tallies = self._news(), self._weighed, self._take_tallies()  # last: reported once, or lost
        self._weighed, self._ready_reported, self._unreadable = None, ready, unreadable
        if not (tallies or self.lost or weighed or news or ready != was_ready or unreadable != were_unreadable):
            return None
        return Report(
            tallies,
            lost=self.lost,
            rate=self.pipeline.copies.rate.bytes_per_s,
            tier_rates=rates,
            unreadable={self.rank: unreadable} if unreadable != were_unreadable else {},
            ready={self.rank: ready} if ready != was_ready else {},
            weights={self.rank: weighed} if weighed else {},
            adapters={self.rank: news} if news else {},
            step=self.adapters.step,
        )

    def _news(self) -> dict[int, bytes]:
        """Return which adapters this rank holds since the last call; nothing yet if they cannot be read."""
        try:
            return self.adapters.news()
        except Exception as error:  # noqa: BLE001  (the rest of the report counts: jobs are reported once)
            self.counters.fault("contained_error", where="adapters", error=repr(error))
            return {}

    def _take_tallies(self) -> dict[int, Tally]:
        """Return this rank's outcomes since the last call."""
        for outcome in self.pipeline.collect():  # what the step's end has settled since `collect`
            self._account(outcome)
        if self.carrier is not None:
            self._tallies.update((one.order.id, ONE_OK if one.ok else ONE_BAD) for one in self.carrier.collect())
        tallies, self._tallies = self._tallies, {}
        return tallies

    @property
    def ready(self) -> int:
        """The number of this rank's slots, from the first on, that may be used."""
        return self._pool.ready

    def totals(self) -> Totals:
        """Return the metrics of this rank as of now: by metric, then by label value ("": it has no label)."""
        pipeline = self.pipeline
        wait_s = pipeline.waited_ns / 1e9
        values = copied(pipeline.copies.bytes, pipeline.copies.ns)
        values |= {"wait_seconds": {"": wait_s}, "faults": self.counters.faults, "trace_dropped": self.trace.losses}
        if self.carrier is not None:
            values["tier_bytes"] = {f"{tier} {use}": size for (tier, use), size in self.carrier.bytes.items()}
            values["tier_seconds"] = {f"{tier} {use}": took for (tier, use), took in self.carrier.seconds.items()}
            values["tiers_left"] = left(self.carrier.tiers)
        return values

    def give_up(self, why: str) -> None:
        """Let go of the caches for good: what is open ends, later jobs fail, and the pool is reported as lost."""
        self._lose(why)
        self.shutdown()

    def shutdown(self) -> None:
        """End threads. Idempotent."""
        with ExitStack() as always:
            if self.carrier is not None:
                always.callback(self.carrier.shutdown)
            always.callback(self.pipeline.shutdown)
            self._readier.stop()

    def _lose(self, why: str) -> None:
        """The pool cannot be used any more. Reported once."""
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
            self._bad_blocks |= job.blocks()

    def _unknown(self, name: str) -> None:
        if name in self._aliases:  # a layer that shares another's cache: the owner's copy covers it
            self.counters["shared_layer_hooks"] += 1
        else:
            self.counters.fault("hook_for_unknown_layer", layer=name)
