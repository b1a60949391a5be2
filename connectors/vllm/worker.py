"""The worker side: one rank's pool and pipeline, driven by the model runner's hooks. Nothing raises into vLLM."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import torch

from kvpipe.config import Settings
from kvpipe.connectors.vllm.held_adapters import HeldAdapters
from kvpipe.errors import UnsupportedError
from kvpipe.geometry import Geometry
from kvpipe.loop import CPUS_AT_START, spare_cpus
from kvpipe.pipeline import TIER, TOLD, Pipeline
from kvpipe.plan import EMPTY_PLAN, Kind, Outcome, StepPlan
from kvpipe.tiers.carrier import CARRY, Carrier
from kvpipe.tiers.memory import HostPool
from kvpipe.tiers.ready import SHARE_OF_A_BUSY_CORE, How, Manners, Readier
from kvpipe.tiers.shelf import BREAKER, Shelf
from kvpipe.trace.events import MoverMeasured, PoolReady, PoolShort, StepRan, TierLost
from kvpipe.trace.log import Counters
from kvpipe.trace.recorder import OFF, Recorder
from kvpipe.transfer.base import Direction, TransferEngine
from kvpipe.transfer.calibrate import Cost
from kvpipe.transfer.cpu import CpuEngine
from kvpipe.transfer.cuda import CudaEngine
from kvpipe.transfer.movers import Mover
from kvpipe.transfer.pages import PageView, view_pages

if TYPE_CHECKING:
    from kvpipe.connectors.vllm.metadata import Tally
    from kvpipe.connectors.vllm.metrics import Values
    from kvpipe.headroom import Room
    from kvpipe.statemachine.core import Compiled


IDLE_NS: Final = 100_000_000
"""So long after a step's end the engine counts as idle."""


class WorkerSide:
    """One per rank."""

    def __init__(self, settings: Settings, geometry: Geometry, trace: Recorder = OFF) -> None:
        """Nothing is allocated before the caches are registered."""
        self.settings, self.geometry, self.trace = settings, geometry, trace
        self.counters = Counters()
        self.pipeline: Pipeline | None = None
        self._index: dict[str, int] = {}
        self._aliases: frozenset[str] = frozenset()
        self._plan: StepPlan = EMPTY_PLAN
        self._bound = False
        self._bound_ns = self._waited_ns = 0
        self.adapters = HeldAdapters(self.counters)
        self.lost = False  # this rank's tier cannot be used any more
        self.make_shelves: Callable[[], Sequence[Shelf]] = tuple
        self.carrier: Carrier | None = None
        self.rank, self.ranks = 0, 1
        self.weigh: Callable[[], str] = str  # which weights this rank has; nothing: it cannot say
        self._weighed: tuple[int, str] | None = None
        self._unreadable: frozenset[int] = frozenset()
        self._device = "cpu"
        self._pool: HostPool | None = None
        self._readier: Readier | None = None
        self._told_ready = 0
        self._tallies: dict[int, tuple[int, int]] = {}
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._bad_blocks: set[int] = set()

    def register(self, caches: dict[str, torch.Tensor], blocks: int, engine: TransferEngine | None = None) -> None:
        """Take the engine's caches, one tensor per layer name.

        Raises:
            UnsupportedError: a layer is missing, or has a layout that kvpipe does not know.

        """
        views = []
        names = [layer.name for group in self.geometry.groups for layer in group.layers]
        sizes = [layer.page_bytes for group in self.geometry.groups for layer in group.layers]
        for name, size in zip(names, sizes, strict=True):
            if name not in caches:
                msg = f"kvpipe: the engine registered no KV cache for layer {name!r}; this model cannot be served"
                raise UnsupportedError(msg)
            view = view_pages(name, caches[name], blocks)
            if view.page_bytes > size:
                msg = (
                    f"kvpipe: a block of layer {name!r} has {view.page_bytes} bytes, its specification says {size}; "
                    "this attention backend cannot be served"
                )
                raise UnsupportedError(msg)
            views.append(view)
        known = {(v.base, v.page_bytes) for v in views}
        self._aliases = frozenset(
            n
            for n, t in caches.items()
            if n not in names and (t.data_ptr(), view_pages(n, t, blocks).page_bytes) in known
        )
        self._index = {name: i for i, name in enumerate(names)}
        self._device = views[0].tensor.device.type
        engine = engine or self._make_engine(views)
        self.shutdown()
        again, self._pool = self._pool is not None, (pool := HostPool(self.geometry))
        engine.attach(views, self.geometry, pool)
        self._make_carrier(pool)
        self.pipeline = Pipeline(
            engine,
            self.geometry,
            layerwise=self.settings.mode == "layerwise",
            wait_ms_max=self.settings.wait_ms_max,
            counters=self.counters,
            cpus=spare_cpus(),
            stuck_ms_max=self.settings.stuck_ms_max,
            trace=self.trace,
        )
        self.pipeline.blocks, self.pipeline.slots_ready = blocks, lambda: pool.ready
        # slots of a pool that takes another's place may be in use
        self._make_ready(engine, pool, "use" if again else self.settings.prefault)

    def _make_ready(self, engine: TransferEngine, pool: HostPool, how: How) -> None:
        """Have the pool's memory before it is used."""
        spare = spare_cpus()
        alone = spare or self._has_idle_core() or self._device != "cpu"
        share = 1.0 if alone else SHARE_OF_A_BUSY_CORE
        self._readier = Readier(
            pool,
            engine.claim,
            piece_bytes=engine.piece_bytes,
            manners=Manners(spare, share, self._is_busy),
            done=self._pool_ready,
            short=self._pool_short,
        )
        self._readier.begin(how)

    def _is_busy(self) -> bool:
        """Whether the engine is in a step, or was a moment ago."""
        return self._bound or time.monotonic_ns() - self._bound_ns < IDLE_NS

    def _pool_ready(self, took_s: float) -> None:
        told = PoolReady(*self.trace.of("", 0), slots=self.geometry.slots, took_ms=round(took_s * 1e3, 1))
        told.gigabytes = round(self.geometry.slots * self.geometry.slot_bytes / 1e9, 3)
        self.trace.put(told)

    def _pool_short(self, room: Room) -> None:
        told = PoolShort(*self.trace.of("", 0), slots=self.geometry.slots, where=room.where)
        told.ready, told.free_mb = self.ready, round(room.free / 1e6, 1)
        told.remedy = "set a smaller pool_bytes_max: what has no memory is not used"
        self.trace.put(told)

    def _make_carrier(self, pool: HostPool) -> None:
        """Carry chunks to and from tiers, if there are any."""
        shelves = self.make_shelves()
        if shelves:
            self.carrier = Carrier(
                shelves,
                self.geometry,
                pool,
                rank=self.rank,
                ranks=self.ranks,
                counters=self.counters,
                cpus=spare_cpus(),
                trace=self.trace,
            )

    def _make_engine(self, views: list[PageView]) -> TransferEngine:
        device = views[0].tensor.device.type
        if device == "cuda":
            mover = None if self.settings.mover == "auto" else Mover(self.settings.mover)
            staging_bytes_max = int(self.settings.staging_bytes_max)
            return CudaEngine(mover=mover, staging_bytes_max=staging_bytes_max, told=self._measured)
        if device != "cpu":
            msg = (
                f"kvpipe: KV caches on device {device!r} are not supported by this release; "
                "use vLLM's CUDA or CPU build"
            )
            raise UnsupportedError(msg)
        spare = spare_cpus()
        threads = self.settings.copy_threads
        if threads is None:
            threads = int(bool(spare) or self._has_idle_core())
        return CpuEngine(threads, spare)

    @staticmethod
    def _has_idle_core() -> bool:
        """Whether the forward's threads leave a core of those that the process may use."""
        return len(CPUS_AT_START) > torch.get_num_threads()

    def _measured(self, direction: Direction, mover: Mover, cost: Cost) -> None:
        told = MoverMeasured(*self.trace.of("", 0), kind=direction.name.lower(), mover=mover.value)
        told.fixed_us, told.copy_us = round(cost.fixed_us, 1), round(cost.copy_us, 3)
        told.gb_per_s = round(cost.gb_per_s, 1)
        self.trace.put(told)

    # ---- hooks, in the order of a step ----------------------------------------------------------------------------

    def bind(self, plan: StepPlan) -> None:
        """A step begins. Its requests' adapters are loaded."""
        plan = self.adapters.checked(plan)
        self._plan, self._bound, self._bound_ns = plan, True, time.monotonic_ns()
        self.trace.step = plan.step
        if plan.question:
            self._weighed = plan.question, self.weigh_now()
        self._begin_orders(plan)
        if self.pipeline is not None:
            self.pipeline.begin(plan)

    def weigh_now(self) -> str:
        """Return which weights this rank has; nothing, where that cannot be said."""
        try:
            return self.weigh()
        except Exception as error:  # noqa: BLE001  (nothing is shared then; the engine serves)
            self.counters.fault("weights_not_read", error=repr(error))
            return ""

    def take_weighed(self) -> tuple[int, str] | None:
        """Return which weights this rank has, and the question that asked for it, once."""
        weighed, self._weighed = self._weighed, None
        return weighed

    def _begin_orders(self, plan: StepPlan) -> None:
        """Take the step's orders; a rank that has no tiers, unlike others, fails them."""
        if self.carrier is not None:
            self.carrier.begin(plan.orders, plan.space, plan.step)
        elif plan.orders:
            self.counters.fault("orders_without_tiers", orders=len(plan.orders))
            self._tallies.update((order.id, (0, 1)) for order in plan.orders)

    def start_loads(self) -> None:
        """Loads may be submitted."""
        if self.pipeline is not None and self._bound:
            self.pipeline.start_loads()

    def wait_layer(self, name: str) -> None:
        """Attention of layer `name` is about to read its cache."""
        pipeline = self.pipeline
        if pipeline is None or not pipeline.busy:
            return
        layer = self._index.get(name)
        if layer is None:
            self._unknown(name)
        else:
            pipeline.wait_layer(layer)

    def save_layer(self, name: str) -> None:
        """Attention of layer `name` has written its cache."""
        pipeline = self.pipeline
        if pipeline is None or not pipeline.busy:
            return
        layer = self._index.get(name)
        if layer is None:
            self._unknown(name)
        else:
            pipeline.save_layer(layer)

    def end_step(self) -> None:
        """`wait_for_save`: everything of this step was submitted, and source blocks are free to be reused."""
        if self.pipeline is not None:
            self.pipeline.end_step()

    def unbind(self) -> None:
        """The step is over. A step without `wait_for_save` ends here."""
        plan, bound = self._plan, self._bound
        self._plan, self._bound = EMPTY_PLAN, False
        pipeline = self.pipeline
        if pipeline is None:
            return
        if pipeline.busy:
            self.counters.fault("step_end_skipped")
            pipeline.end_step()
        if bound and self.trace.detail:
            took_ns, waited_ns = time.monotonic_ns() - self._bound_ns, pipeline.waited_ns - self._waited_ns
            self._waited_ns = pipeline.waited_ns
            common = (self._bound_ns, self.trace.rank, "", 0, plan.step)
            self.trace.put(StepRan(*common, took_ns=took_ns, jobs=len(plan.jobs), waited_ns=waited_ns))
        if not pipeline.alive and not self.lost:
            self.lost = True
            self.trace.put(TierLost(*self.trace.of("", 0), tier=TIER, why="the loop thread has ended"))

    def collect(self) -> tuple[set[str], set[str]]:
        """Return (requests whose async load ended, those of them that failed), each request once per load."""
        if self.pipeline is not None:
            self.pipeline.end_loads()
            for outcome in self.pipeline.collect():
                self._account(outcome)
        received, self._received = self._received, set()
        failed, self._failed = self._failed, set()
        return received, failed

    def take_bad_blocks(self) -> set[int]:
        """Return the blocks whose sync load failed."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad | self.pipeline.take_suspects() if self.pipeline is not None else bad

    def take_tallies(self) -> dict[int, Tally]:
        """Return this rank's outcomes since the last call."""
        from kvpipe.connectors.vllm.metadata import Tally  # noqa: PLC0415  (imports vllm)

        if self.pipeline is not None:  # what the step's end has settled since `collect`
            for outcome in self.pipeline.collect():
                self._account(outcome)
        if self.carrier is not None:
            self._tallies.update((one.order.id, (int(one.ok), int(not one.ok))) for one in self.carrier.collect())
        tallies = {job: Tally(*t) for job, t in self._tallies.items()}
        self._tallies = {}
        return tallies

    def take_unreadable(self) -> frozenset[int] | None:
        """Return the tiers that this rank does not read, if they are others than at the last call."""
        now = self.carrier.unreadable if self.carrier is not None else frozenset()
        was, self._unreadable = self._unreadable, now
        return now if now != was else None

    @property
    def ready(self) -> int:
        """So many of this rank's slots, from the first on, may be used."""
        return self._pool.ready if self._pool is not None else 0

    def take_ready(self) -> int | None:
        """Return `ready`, if it is another than at the last call."""
        was, self._told_ready = self._told_ready, self.ready
        return self._told_ready if self._told_ready != was else None

    @property
    def load_rate(self) -> float:
        """Bytes per second of this rank's loads; 0: none yet."""
        return self.pipeline.load_rate if self.pipeline is not None else 0.0

    def totals(self) -> Values:
        """Return what the metrics say of this side, as of now."""
        from kvpipe.connectors.vllm.metrics import copied, left  # noqa: PLC0415  (imports vllm)

        pipeline = self.pipeline
        if pipeline is None:
            return {}
        wait_s = pipeline.waited_ns / 1e9
        values = copied(pipeline.copied_bytes, pipeline.copied_ns)
        values |= {"wait_seconds": {"": wait_s}, "faults": self.counters.faults, "trace_dropped": self.trace.losses}
        if self.carrier is not None:
            values["tier_bytes"] = {f"{tier} {use}": size for (tier, use), size in self.carrier.bytes.items()}
            values["tier_seconds"] = {f"{tier} {use}": took for (tier, use), took in self.carrier.seconds.items()}
            values["tiers_left"] = left(self.carrier.shelves)
        return values

    def machines(self) -> tuple[Compiled, ...]:
        """Return the machines whose cursors this side owns."""
        return (*self.pipeline.machines, CARRY, BREAKER) if self.pipeline is not None else ()

    def shutdown(self) -> None:
        """End threads. Idempotent."""
        if self._readier is not None:
            self._readier.stop()
        if self.pipeline is not None:
            self.pipeline.shutdown()
        if self.carrier is not None:
            self.carrier.shutdown()

    def _account(self, outcome: Outcome) -> None:
        job, ok, why = outcome
        self._tallies[job.id] = (int(ok), int(not ok))
        if job.kind == Kind.LOAD_ASYNC:
            self._received.add(job.request)
            if not ok:
                self._failed.add(job.request)
        elif job.kind == Kind.LOAD_SYNC and not ok and why != TOLD:
            self._bad_blocks |= job.blocks()

    def _unknown(self, name: str) -> None:
        if name in self._aliases:  # a layer that shares another's cache: the owner's copy covers it
            self.counters["shared_layer_hooks"] += 1
        else:
            self.counters.fault("hook_for_unknown_layer", layer=name)
