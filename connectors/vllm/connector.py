"""`KVPipeConnector`: the class that vLLM loads. Its methods translate vLLM's calls to the two sides of kvpipe.

The decorator `_contained` implements law 1: an exception inside is counted and logged, and vLLM gets the result of a
cache miss. The hooks that run in a forward do the same without it, as a call through it takes 0.2 us more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar, cast

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvpipe.config import Settings, load_settings
from kvpipe.connectors.vllm import compat, drafters, held_adapters, hooks, models, rank_facts, shares, spans, support
from kvpipe.connectors.vllm.adapter import ManagedBlocks, Remedies, make_room
from kvpipe.connectors.vllm.doctor_facts import first_hash
from kvpipe.connectors.vllm.hints import hints_of, is_prefilled_elsewhere, kind_of
from kvpipe.connectors.vllm.kv_events import KvEvents
from kvpipe.connectors.vllm.metadata import Introduction, PlanMetadata, ReportMetadata
from kvpipe.connectors.vllm.metrics import KVPipeProm, KVPipeStats, Meter
from kvpipe.connectors.vllm.model import watch_packing
from kvpipe.connectors.vllm.no_caches import NoCaches
from kvpipe.connectors.vllm.remedies import mixed_prompts, scales
from kvpipe.connectors.vllm.remedies.uncomputed import forget_uncomputed
from kvpipe.connectors.vllm.source import sees_a_part
from kvpipe.connectors.vllm.spaces import Spaces
from kvpipe.connectors.vllm.weights import Watch
from kvpipe.control import check_control_file, watch_control_file
from kvpipe.loop import LoopThread
from kvpipe.manage.engine import ManagedEngine
from kvpipe.manage.start import read_token, start
from kvpipe.messages import EMPTY_PLAN, Report
from kvpipe.names import NameClaim
from kvpipe.scheduler import gauges
from kvpipe.scheduler.base import LATER
from kvpipe.scheduler.side import SchedulerSide
from kvpipe.statemachine.step import IDLE
from kvpipe.tiers.guard import FIND, READ, WRITE, GuardedTier, MadeTier, guarded
from kvpipe.tiers.registry import make_tier, named
from kvpipe.trace.events import SCHEDULER, FreezeSwitched
from kvpipe.trace.log import Counters, configure, info, warn
from kvpipe.trace.setup import tracing
from kvpipe.transfer.base import TransferEngine
from kvpipe.worker.adapters import HeldAdapters
from kvpipe.worker.caches import Hooks, PagedCaches
from kvpipe.worker.side import WorkerSide

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvpipe.manage.server import OperatorServer

F = TypeVar("F", bound=Callable[..., Any])


def _contained(miss: Callable[[], Any]) -> Callable[[F], F]:
    """Decorate a method of the connector: an exception is counted, and `miss()` is returned to vLLM in its place."""

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def inner(self: KVPipeConnector, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            try:
                return method(self, *args, **kwargs)
            except Exception as e:  # noqa: BLE001  (the border)
                self._contain(method.__name__, e)
                return miss()

        return cast("F", inner)

    return decorate


def _nothing() -> None:
    return None


watch_packing()  # where this is imported before the model is loaded; elsewhere vLLM's plugin has done it


class KVPipeConnector(KVConnectorBase_V1, SupportsHMA):
    """Saves and loads KV through explicit state machines. `docs/configuration.md` has its configuration."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
        **_: Any,  # noqa: ANN401  (later versions may pass more)
    ) -> None:
        """Check everything that can be checked before the engine starts.

        Raises:
            UsageError: configuration, model, engine setting or version that kvpipe cannot serve correctly.

        """
        compat.check_version(compat.installed_version())
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = self._kv_transfer_config
        self.settings: Settings = load_settings(transfer.kv_connector_extra_config)
        configure(self.settings.log_level)
        support.check_engine(vllm_config)
        parallel = vllm_config.parallel_config
        self.geometry = support.make_geometry(
            kv_cache_config,
            self.settings,
            drafters.ahead_tokens(vllm_config),
            parallel.decode_context_parallel_size,
            drafters.states_back(vllm_config),
            branches=drafters.branches_within(vllm_config),
        )
        if self.geometry.states:
            drafters.check_states(vllm_config)
        drafters.check_groups(vllm_config, kv_cache_config)
        support.check_load(self.settings, self.geometry, parallel.pipeline_parallel_size)
        self.counters = Counters()
        self.scheduler: SchedulerSide | None = None
        self.worker: WorkerSide | NoCaches = NoCaches(self.counters)
        self._step = self.worker.step
        self._claim: NameClaim | None = None
        self._introduction: Introduction | None = None  # this rank's
        self._introduced = False
        self._met: dict[int, Introduction] = {}  # by rank, on the scheduler's side
        self._control: LoopThread | None = None
        self._manage: OperatorServer | None = None
        self.events: KvEvents | None = None
        engine = support.engine_name(str(transfer.engine_id or vllm_config.instance_id))
        if role is KVConnectorRole.WORKER:
            self._make_worker(vllm_config, engine)
        else:
            self._make_scheduler(vllm_config, kv_cache_config, engine)
        self.counters.on_fault = self.recorder.fault

    def _make_worker(self, config: VllmConfig, engine: str) -> None:
        """Set up what a rank has before its caches: vLLM may load adapters meanwhile."""
        self.rank, layers = config.parallel_config.rank, len(self.geometry.layers)
        self.recorder, self.writer = tracing(self.settings, engine, "worker", self.rank, layers)
        self._adapters = HeldAdapters(self.counters)
        if config.lora_config is not None:
            held_adapters.watch(self._adapters)
        self._rank_tiers()  # what is wrong with them is raised now
        self._meter = Meter(self.worker.totals)

    def _make_scheduler(self, config: VllmConfig, cache: KVCacheConfig, engine: str) -> None:
        """Set up the scheduler side."""
        if self.settings.manage:
            read_token(self.settings)  # what is wrong with it is raised before anything is made
        tokens, transfer = support.hash_tokens(cache, self.geometry), self._kv_transfer_config
        if (size := config.parallel_config.decode_context_parallel_size) > 1:
            warn("context_parallelism", decode_context_parallel_size=size, proven_on="vLLM's schedulers, not a device")
        if drafted := drafters.unproven(config):
            warn("drafts", method=drafted, proven_on="vLLM's schedulers, not a device")
        if size := self.geometry.match_tokens:
            warn("states_within_blocks", prefix_match_unit=size, proven_on="vLLM's schedulers, not a device")
        self.recorder, self.writer = tracing(self.settings, engine, "scheduler", SCHEDULER, len(self.geometry.layers))
        adapts = config.lora_config is not None and config.lora_config.enable_tower_connector_lora
        tiers = self._guarded((FIND,))
        self._spaces = Spaces(config, cache, self.geometry, tiers=bool(tiers), bound=self._report_sharing)
        self._remedies = Remedies(self.geometry, make_room(config, self.geometry), adapts_encoder=adapts)
        if config.kv_events_config is not None and config.kv_events_config.enable_kv_cache_events:
            self.events = KvEvents(cache, self.geometry, tokens)
        self.scheduler = SchedulerSide(
            self.settings,
            self.geometry,
            hash_tokens=tokens,
            ranks=config.parallel_config.world_size,
            stages=config.parallel_config.pipeline_parallel_size,
            saves=transfer.is_kv_producer,
            loads=transfer.is_kv_consumer,
            recovery=self._remedies,
            published=self.events,
            tiers=tiers,
            space_of=self._spaces.space,
            also_of=self._spaces.also,
            waits_idle=config.parallel_config.data_parallel_size == 1,  # else such ranks' steps go together
            spans_of=spans.spans_of(config),
            priority_of=attrgetter("priority") if config.scheduler_config.policy == "priority" else None,
            trace=self.recorder,
        )
        if self.scheduler.staging is not None:
            self.scheduler.staging.finder.first_hash = first_hash(config.cache_config.prefix_caching_hash_algo)
        self.counters, self.scheduler.weights.awaited = self.scheduler.counters, True
        self._watch = Watch(config, self.scheduler)
        self._watch.doubted = self._remedies.encoded.doubted
        self._watch.encoder_reset = self._remedies.encoded.reset
        if config.model_config.enable_prompt_embeds:
            mixed_prompts.extend_hashes()
        here = (functools.partial(one, self.scheduler) for one in (gauges.totals, gauges.quota_totals))
        self._meter = Meter(*here)
        if self.settings.control_file is not None:
            check_control_file(self.settings.control_file)
            watch = functools.partial(watch_control_file, self.settings.control_file, self.set_freeze)
            self._control = LoopThread("kvpipe-control", tasks=(watch,))
        if self.settings.manage:
            self._serve_operators(config, self.scheduler, tokens, engine)

    def _serve_operators(self, config: VllmConfig, side: SchedulerSide, tokens: int, name: str) -> None:
        """Serve the management interface of the engine called `name`."""
        from kvpipe.connectors.vllm.prompts import PromptBlocks, prompt_request  # noqa: PLC0415  (seldom needed)

        managed = ManagedEngine(
            side,
            name,
            hash_tokens=tokens,
            hash_prompt=PromptBlocks(config, tokens),
            request_of=prompt_request if self.events is not None else None,
            set_freeze=self.set_freeze,
            set_bypass=self.set_bypass,
        )
        self._manage = start(self.settings, managed, name, self.counters)

    def _contain(self, where: str, error: Exception) -> None:
        """Count an exception that was kept from vLLM."""
        self.counters.fault("contained_error", where=where, error=repr(error))

    # ---- what vLLM asks of the class ------------------------------------------------------------------------------

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whether vLLM must give up CUDA graphs of whole steps: for `layerwise` alone, however it was configured."""
        return load_settings(extra_config).mode == "layerwise"

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:  # noqa: ARG003
        """Sleep mode remaps the KV cache under registered addresses: not supported."""
        return False

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache is best effort: a dropped save is a future miss."""
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Return a container of metrics, in which vLLM adds up those of all ranks and steps."""
        return KVPipeStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """Register the metrics in vLLM's Prometheus registry."""
        return KVPipeProm(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---- run-time switches ----------------------------------------------------------------------------------------

    def set_freeze(self, on: bool) -> None:  # noqa: FBT001
        """Stop (or resume) saving from the next step on; hits are served as before."""
        if self.scheduler is not None and self.scheduler.switches.freeze != on:
            self.scheduler.switches.freeze = on
            self.counters["freeze_on" if on else "freeze_off"] += 1
            self.recorder.put(FreezeSwitched(*self.recorder.of("", 0), on=on))

    def set_bypass(self, on: bool) -> None:  # noqa: FBT001
        """Stop (or resume) saving and loading from the next step on."""
        if self.scheduler is not None and self.scheduler.switches.bypass != on:
            self.scheduler.switches.bypass = on
            self.counters["bypass_on" if on else "bypass_off"] += 1

    def stats(self) -> dict[str, int]:
        """Counters and gauges of this side."""
        return self.scheduler.stats() if self.scheduler is not None else self.counters.totals()

    def make_engine(self) -> TransferEngine | None:
        """Return a transfer engine, or None for the one that fits the device. Tests inject faults here."""
        return None

    def make_tiers(self, *, writes: bool) -> Sequence[MadeTier]:
        """Return the tiers of the configuration, not yet opened. Tests bring their own here."""
        return [(name, spec, make_tier(name, spec, writes=writes)) for name, spec in named(self.settings.tiers)]

    def hooks(self, kv_caches: dict[str, torch.Tensor]) -> Hooks:
        """Return which hooks vLLM's runner calls, and when. Tests override it."""
        return hooks.hooks(self._vllm_config, kv_caches, self.settings.mode)

    @_contained(_nothing)
    def _report_sharing(self, common: str, source: str) -> None:
        """Count and log why engines with other numbers of ranks cannot use this engine's chunks."""
        staging = self.scheduler.staging if self.scheduler is not None else None
        why = shares.bound_by(self._vllm_config, common, source)
        if staging is not None and staging.space.bind(why) and why:
            info("tiers_of_one_layout", why=why, means=shares.BOUND_BY[why])

    def _rank_tiers(self) -> list[GuardedTier]:
        """Return the tiers that a rank carries chunks from and, if it saves, to."""
        return self._guarded((READ, WRITE) if self._kv_transfer_config.is_kv_producer else (READ,))

    def _guarded(self, uses: tuple[str, ...]) -> list[GuardedTier]:
        return guarded(self.make_tiers(writes=WRITE in uses), uses, self.recorder)

    # ---- worker side ----------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Make the rank's side of its paged caches. Again: they are others, and nothing is copied any more.

        Raises:
            UnsupportedError: a layout that kvpipe does not know, before the first request.

        """
        if self.role is not KVConnectorRole.WORKER:
            return
        if isinstance(self.worker, WorkerSide):
            self.counters.fault("caches_registered_again")
            self.worker.give_up("the caches are no longer those that its chunks are of")
            return
        config, blocks = self._vllm_config, self._kv_cache_config.num_blocks
        models.check_backends(models.backends(config, kv_caches).values())
        scales.set_scales(config.compilation_config.static_forward_context, kv_caches)
        facts = rank_facts.find(config, self._kv_cache_config, self.geometry, kv_caches, self._contain)
        self._layout, self._common, self._numerics = facts.layout, facts.common, facts.numerics
        self._claim = rank_facts.claim(self.settings, config, self._kv_cache_config, self.geometry, self.rank, facts)
        self.worker = WorkerSide(
            self.settings,
            self.geometry,
            PagedCaches(self.geometry, kv_caches, blocks, self.hooks(kv_caches)),
            engine=self.make_engine(),
            rank=self.rank,
            ranks=config.parallel_config.world_size,
            shares=facts.shares,
            tiers=self._rank_tiers(),
            weigh=facts.weigh,
            adapters=self._adapters,
            counters=self.counters,
            trace=self.recorder,
        )
        if self.worker.carrier is not None:
            self.worker.carrier.first_hash.text = first_hash(config.cache_config.prefix_caching_hash_algo)
        self._step, self._meter = self.worker.step, Meter(self.worker.totals)

    @_contained(_nothing)
    def get_handshake_metadata(self) -> None:
        """Return None: vLLM's handshake is for other connectors, see `ReportMetadata`. Read the weights for the report.

        So reading them does not delay the first step. `MultiConnector` skips this call behind a connector that answers.
        """
        self._introduce()

    def _introduce(self) -> Introduction | None:
        """Return this rank's introduction; None without caches."""
        worker = self.worker
        if self._introduction is None and not isinstance(worker, NoCaches):
            digest = self._layout if worker.carrier is not None else ""
            heads, slots = tuple(share.heads for share in worker.shares), self.geometry.slots
            found = worker.weigh_now(), slots, heads, self._common, self._numerics()
            self._introduction = Introduction(worker.rank, digest, *found)
        return self._introduction

    @_contained(_nothing)
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step: take its plan, as sent by `build_connector_meta`."""
        super().bind_connector_metadata(connector_metadata)
        good = isinstance(connector_metadata, PlanMetadata)
        self.worker.bind(cast("PlanMetadata", connector_metadata).plan if good else EMPTY_PLAN)
        if not good:
            self.counters.fault("foreign_metadata", type=type(connector_metadata).__name__)

    @_contained(_nothing)
    def clear_connector_metadata(self) -> None:
        """End the step, and drop its plan."""
        super().clear_connector_metadata()
        self.worker.unbind()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:  # noqa: ARG002, ANN401
        """Submit the step's loads, of all layers."""
        try:
            self.worker.start_loads(forward_context)
        except Exception as e:  # noqa: BLE001  (the border)
            self._contain("start_load_kv", e)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait, on the device where there is one, for the layer's sync loads. Called for every layer of every step."""
        if self._step.state.row != IDLE:
            try:
                self.worker.wait_layer(layer_name)
            except Exception as e:  # noqa: BLE001  (the border)
                self._contain("wait_for_layer_load", e)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,  # noqa: ARG002
        attn_metadata: AttentionMetadata,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002, ANN401
    ) -> None:
        """Submit the layer's saves. Called as often as `wait_for_layer_load`."""
        if self._step.state.row != IDLE:
            try:
                self.worker.save_layer(layer_name)
            except Exception as e:  # noqa: BLE001  (the border)
                self._contain("save_kv_layer", e)

    def wait_for_save(self) -> None:
        """End the step's saves. Repeated, empty or extra calls do nothing."""
        try:
            self.worker.end_step()
        except Exception as e:  # noqa: BLE001  (the border)
            self._contain("wait_for_save", e)

    @_contained(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        """Report async loads that ended, each once, also those of aborted requests: vLLM waits for them."""
        received, failed = self.worker.collect()
        return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Report as `get_transfer_results`, for callers that use this method."""
        return None, self.get_transfer_results(finished_req_ids).finished_recving or None

    @_contained(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Report the blocks of failed layerwise loads, in their own step."""
        return self.worker.take_bad_blocks()

    @_contained(_nothing)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Report the jobs that have ended on this rank since the last call; None: nothing to report.

        The first report has the rank's introduction.
        """
        report, new = self.worker.take_report(), None if self._introduced else self._introduce()
        if new is None:
            return ReportMetadata(report) if report is not None else None
        self._introduced = True
        return ReportMetadata(report or Report(), (new,))

    @_contained(_nothing)
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return what has changed in this side's metrics since the last call."""
        return self._meter.take()

    @_contained(_nothing)
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:  # noqa: ARG002
        """Set the fence of the last step's saves, if that was postponed to here: see `hooks.fences_late`."""
        self.counters["handle_preemptions"] += 1
        self.worker.handle_preemptions()

    @_contained(_nothing)
    def shutdown(self) -> None:
        """End all threads and release the engine's name. Idempotent."""
        with ExitStack() as ends:  # the last first, each though another raises
            ends.callback(self.writer.close)
            if self._claim is not None:
                ends.callback(self._claim.release)
            if self._control is not None:
                ends.callback(self._control.stop)
            if self._manage is not None:
                ends.callback(self._manage.stop)
            if self.scheduler is not None:
                ends.callback(self.scheduler.shutdown)
            ends.callback(self.worker.shutdown)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Ignore the handshake: it is another connector's."""

    @_contained(_nothing)
    def _meet(self, side: SchedulerSide, introductions: Sequence[Introduction]) -> None:
        """Take what ranks' bytes depend on. Tiers are used from now on, in the resulting namespace."""
        side.orders.turns.take()
        self._met |= {one.rank: one for one in introductions}
        reported = [one for _, one in sorted(self._met.items())]
        ranks, tiers = self._vllm_config.parallel_config.world_size, side.staging is not None
        if tiers and not self._spaces.agree(reported):
            self.counters.fault("tiers_not_on_all_ranks", ranks=ranks, reported=len(reported))
        weights = [one.weights for one in reported] if len(reported) == ranks else []
        side.catalog.limit(min(one.slots for one in reported))
        heads = {one.heads for one in reported}
        agreed = heads.pop() if len(heads) == 1 else ()
        side.ranks_ready({}, weights, agreed)
        if self._spaces.agreed and not side.weights.digest:
            apart = sees_a_part(self._vllm_config.parallel_config)
            what = "experts lie in other engines" if apart else "install kvpipe where every process of vLLM finds it"
            warn("weights_not_known", remedy=f"tiers are not used: {what}")

    # ---- scheduler side -------------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Take the engine's cache manager, which has the block tables."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if self.scheduler is not None:
            blocks = ManagedBlocks(kv_cache_manager)
            self.scheduler.bind(blocks)
            self._remedies.bind(blocks, self.counters)
            if self._vllm_config.scheduler_config.policy == "priority":
                forget_uncomputed(kv_cache_manager, blocks, self._remedies.block_tokens, self.counters)
            self._watch.watch_resets(kv_cache_manager)
            if self.events is not None:
                self.events.watch(kv_cache_manager, self.scheduler.orders.turns.taken)

    @_contained(_nothing)
    def on_new_request(self, request: Request) -> None:
        """Begin to track a request. Its `kv_transfer_params` may be anything: what are none, vLLM must not see."""
        if not isinstance(request.kv_transfer_params, Mapping | None):
            request.kv_transfer_params = None  # vLLM's scheduler asks it for a key next
        if self.scheduler is not None:
            kind = kind_of(request) if self.settings.learn_answers else None
            self.scheduler.on_new_request(request, hints_of(request), kind)

    @_contained(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return (how many more tokens can be loaded, or None: ask again; whether asynchronously). Takes no lease."""
        if self.scheduler is None:
            return 0, False
        answer = self.scheduler.lookup(request, num_computed_tokens, elsewhere=is_prefilled_elsewhere(request))
        return (None, False) if answer is LATER else answer

    @_contained(_nothing)
    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Lease the chunks of the hit and plan its load. vLLM may load all of the hit, less, or nothing."""
        if self.scheduler is not None:
            try:
                if request.mm_features:
                    self._remedies.encoded.began(request.request_id, adapted=request.lora_request is not None)
            finally:  # vLLM counts on the load
                self.scheduler.admitted(request, blocks.blocks, num_external_tokens)

    @_contained(lambda: PlanMetadata(EMPTY_PLAN))
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return the step's plan for all ranks: loads, saves and tier orders."""
        if self.scheduler is None:
            return PlanMetadata(EMPTY_PLAN)
        return PlanMetadata(self.scheduler.plan_step(scheduler_output))

    @_contained(_nothing)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take the reports of all ranks, added up, and the blocks that vLLM recomputes after failed loads."""
        if self.scheduler is None:
            return
        report = connector_output.kv_connector_worker_meta
        try:
            if connector_output.invalid_block_ids:
                self.scheduler.invalidated(connector_output.invalid_block_ids)
        finally:  # ranks report each job once
            if isinstance(report, ReportMetadata):
                if report.introductions:
                    self._meet(self.scheduler, report.introductions)
                self.scheduler.reported(report.report)

    @_contained(lambda: (False, None))
    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:  # noqa: ARG002
        """Stop tracking a request. Its blocks are free at once: later writes to them wait for its last save's reads."""
        if self.scheduler is not None:
            self.scheduler.finished(request)
        return False, None

    def request_finished_all_groups(
        self,
        request: Request,
        block_ids: tuple[list[int], ...],  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:
        """Stop tracking a request, for models with several cache groups."""
        return self.request_finished(request, [])

    @_contained(lambda: False)
    def has_pending_push_work(self) -> bool:
        """Whether an idle engine must go on making steps: until every rank has reported its jobs."""
        return self.scheduler is not None and self.scheduler.pending

    @_contained(tuple)
    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return events of the blocks that can be found, or cannot any more, since the last call."""
        if self.events is None or self.scheduler is None:
            return ()
        self.scheduler.orders.turns.take()
        return self.events.take()

    @_contained(lambda: False)
    def reset_cache(self) -> bool | None:
        """Forget every chunk, in tiers too. Returns True; None if this is not the scheduler side."""
        return self.scheduler.reset() if self.scheduler is not None else None
