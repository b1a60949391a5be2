"""`KVPipeConnector`: the class that vLLM loads. vLLM makes one object of the class for each role of a connector.

The object's methods pass vLLM's calls on to `SchedulerRole` or `WorkerRole`. A call that belongs to the other role
raises `WrongRoleError`.

The decorator `contained` implements law 1: an exception in a method is counted and logged, and vLLM gets the result of
a cache miss. The hooks of a forward pass contain their exceptions without the decorator, because a decorated call takes
0.2 us more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvpipe.config.settings import Settings, check_stores, load_settings
from kvpipe.connectors.vllm import compat, cross_layer, hooks, pooled, started, support
from kvpipe.connectors.vllm.identity import drafters
from kvpipe.connectors.vllm.identity.model import watch_packing
from kvpipe.connectors.vllm.metadata import PlanMetadata
from kvpipe.connectors.vllm.metrics import KVPipeProm, KVPipeStats, known_labels
from kvpipe.connectors.vllm.roles import OtherRole, RoleFacts
from kvpipe.connectors.vllm.scheduler_role import SchedulerRole
from kvpipe.connectors.vllm.worker_role import WorkerRole
from kvpipe.connectors.vllm.wrapping import contained
from kvpipe.protocol.messages import EMPTY_PLAN
from kvpipe.statemachine.step import IDLE
from kvpipe.tiers.guard import MadeTier
from kvpipe.tiers.registry import make_tier, named
from kvpipe.trace.log import configure
from kvpipe.transfer.base import TransferEngine
from kvpipe.worker.caches import Hooks

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
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvpipe.connectors.vllm.no_caches import NoCaches
    from kvpipe.scheduler.side import SchedulerSide
    from kvpipe.worker.side import WorkerSide


def _nothing() -> None:
    return None


watch_packing()  # needed in a process that loads the model without kvpipe's plug-in


class KVPipeConnector(KVConnectorBase_V1, SupportsHMA):
    """Saves and loads KV through explicit state machines. `docs/configuration.md` describes the configuration."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
        **_: Any,  # noqa: ANN401  (later versions may pass more arguments)
    ) -> None:
        """Check everything that can be checked before the engine starts, and make the object of `role`.

        Raises:
            UsageError: kvpipe cannot serve this configuration, model, engine setting or version of vLLM correctly.

        """
        compat.check_version(compat.installed_version())
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = self._kv_transfer_config
        self.settings: Settings = load_settings(transfer.kv_connector_extra_config)
        configure(self.settings.log_level)
        check_stores(self.settings, loads=transfer.is_kv_consumer)
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
        engine = started.traced_engine_name(str(transfer.engine_id or vllm_config.instance_id))
        facts = RoleFacts(vllm_config, transfer, kv_cache_config, self.settings, self.geometry, engine)
        facts = pooled.attach_node(facts, rank=parallel.rank if role is KVConnectorRole.WORKER else None)
        self.settings, self.geometry = facts.settings, facts.geometry
        if role is KVConnectorRole.WORKER:
            self._take_worker_role(WorkerRole(self, facts))
        else:
            self._take_scheduler_role(made := SchedulerRole(self, facts))
            operators = started.start_operators(made, vllm_config, engine)
            if operators is not None:
                made.at_end(operators.stop)

    def _take_worker_role(self, role: WorkerRole) -> None:
        other: Any = OtherRole("worker", "scheduler")
        self._role_taken: SchedulerRole | WorkerRole = role
        self.worker_role: WorkerRole = role
        self.scheduler_role: SchedulerRole = other
        self.scheduler: SchedulerSide | None = None
        self.counters, self.recorder, self.writer = role.counters, role.recorder, role.writer
        self._step = role.step

    def _take_scheduler_role(self, role: SchedulerRole) -> None:
        other: Any = OtherRole("scheduler", "worker")
        self._role_taken = self.scheduler_role = role
        self.worker_role = other
        self.scheduler = role.scheduler
        self.counters, self.recorder, self.writer = role.counters, role.recorder, role.writer

    @property
    def worker(self) -> WorkerSide | NoCaches:
        """The worker side of this rank. Raises `WrongRoleError` on the scheduler's connector."""
        return self.worker_role.worker

    def _contain(self, where: str, error: Exception) -> None:
        """Count an exception that the method `where` has raised and vLLM does not see."""
        self.counters.fault("contained_error", where=where, error=repr(error))

    # ---- methods that vLLM calls on the class ---------------------------------------------------------------------

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whether vLLM must not use CUDA graphs of whole steps. Only the mode `layerwise` forbids such graphs."""
        return load_settings(extra_config).mode == "layerwise"

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Return the cache layout to ask vLLM for, or None for vLLM's own choice. vLLM may ignore the result."""
        assert vllm_config.kv_transfer_config is not None  # noqa: S101  (vLLM asks only an engine with a connector)
        settings = load_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)
        if settings.mover == "staged":  # a block of all layers may not fit a bay
            return None
        return cross_layer.wanted(vllm_config, settings.mode)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:  # noqa: ARG003
        """Return True: vLLM may release and restore the memory of its KV caches (`identity/sleep.py`)."""
        return True

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether vLLM must recompute a preempted request to deliver its KV.

        Returns False, because a dropped save only causes a later miss.
        """
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Return the object in which vLLM adds up the metrics of all ranks and steps."""
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
        labels = known_labels(load_settings(vllm_config.kv_transfer_config.kv_connector_extra_config))
        return KVPipeProm(vllm_config, metric_types, labelnames, per_engine_labelvalues, labels)

    def stats(self) -> dict[str, int]:
        """Return the counters and gauges of this role."""
        return self._role_taken.stats()

    def make_engine(self) -> TransferEngine | None:
        """Return a transfer engine, or None to let the worker side choose by the device. Tests inject faults here."""
        return None

    def make_tiers(self, *, writes: bool) -> Sequence[MadeTier]:
        """Return the configured tiers, which are not opened yet. Tests return their own tiers here."""
        return [(name, spec, make_tier(name, spec, writes=writes)) for name, spec in named(self.settings.tiers)]

    def hooks(self, kv_caches: dict[str, torch.Tensor]) -> Hooks[str]:
        """Return which hooks vLLM's runner calls, and when. Tests override this method."""
        return hooks.hooks(self._vllm_config, kv_caches, self.settings.mode)

    # ---- worker role ----------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Make the worker side over the rank's paged caches.

        If vLLM registers other caches later, and no sleep came between, the rank stops using its pool and copies
        nothing more.

        Raises:
            UnsupportedError: the caches have a layout that kvpipe does not know.

        """
        self.worker_role.register_kv_caches(kv_caches)
        self._step = self.worker_role.step

    @contained(_nothing)
    def unregister_kv_caches(self) -> None:
        """End every copy, because vLLM is about to release the caches' memory. The pool is kept. Idempotent."""
        self.worker_role.unregister_kv_caches()

    @contained(_nothing)
    def restore_kv_caches(self) -> None:
        """Use the caches again: vLLM has restored their memory, perhaps at other addresses. Idempotent."""
        self.worker_role.restore_kv_caches()

    @contained(_nothing)
    def get_handshake_metadata(self) -> None:
        """Read the weights for the rank's first report, so that reading them does not delay the first step.

        Returns None, because kvpipe does not use vLLM's handshake (see `ReportMetadata`). `MultiConnector` skips this
        call if a connector before kvpipe in its list has returned metadata.
        """
        self.worker_role.get_handshake_metadata()

    @contained(_nothing)
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step with the plan that the scheduler's `build_connector_meta` has sent."""
        super().bind_connector_metadata(connector_metadata)
        self.worker_role.bind_connector_metadata(connector_metadata)

    @contained(_nothing)
    def clear_connector_metadata(self) -> None:
        """End the step and drop its plan."""
        super().clear_connector_metadata()
        self.worker_role.clear_connector_metadata()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:  # noqa: ANN401, ARG002
        """Submit the step's loads of all layers."""
        self.worker_role.start_load_kv(forward_context)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for the layer's sync loads; on a GPU only the stream waits. Called for every layer of every step."""
        if self._step.state.row != IDLE:
            self.worker_role.wait_for_layer_load(layer_name)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,  # noqa: ARG002
        attn_metadata: AttentionMetadata,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002, ANN401
    ) -> None:
        """Submit the layer's saves. vLLM calls this method as often as `wait_for_layer_load`."""
        if self._step.state.row != IDLE:
            self.worker_role.save_kv_layer(layer_name)

    def wait_for_save(self) -> None:
        """End the step's loads and saves. Further calls in the same step do nothing."""
        self.worker_role.wait_for_save()

    @contained(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        """Report every ended async load exactly once, also of an aborted request, because vLLM waits for the report."""
        return self.worker_role.get_transfer_results()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the results of `get_transfer_results` as the pair that older callers expect."""
        return None, self.get_transfer_results(finished_req_ids).finished_recving or None

    @contained(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Report the blocks of failed layerwise loads, in the step of the loads."""
        return self.worker_role.get_block_ids_with_load_errors()

    @contained(_nothing)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return this rank's report since the last call, or None if there is nothing to report."""
        return self.worker_role.build_connector_worker_meta()

    @contained(_nothing)
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:  # noqa: ARG002
        """Set the fence of the last step's saves if `hooks.fences_late` is true for this engine."""
        self.worker_role.handle_preemptions()

    # ---- both roles -----------------------------------------------------------------------------------------------

    @contained(_nothing)
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return the changes of this role's metrics since the last call, or None if nothing has changed."""
        return self._role_taken.get_kv_connector_stats()

    @contained(_nothing)
    def shutdown(self) -> None:
        """End all threads and release the engine's name. Idempotent."""
        self._role_taken.shutdown()

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Ignore the handshake's metadata, because kvpipe does not use the handshake."""

    # ---- scheduler role -------------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Take the engine's cache manager, which holds the block tables."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self.scheduler_role.bind_kv_cache_manager(kv_cache_manager)

    @contained(_nothing)
    def on_new_request(self, request: Request) -> None:
        """Begin to track a request. `kv_transfer_params` that are not a mapping are replaced by None."""
        self.scheduler_role.on_new_request(request)

    @contained(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return (how many more tokens can be loaded, whether asynchronously). Takes no lease.

        If the count is None, vLLM calls again in a later step.
        """
        return self.scheduler_role.get_num_new_matched_tokens(request, num_computed_tokens)

    @contained(_nothing)
    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Lease the chunks of the hit and plan their load. vLLM may use all of the hit, a part of it, or nothing."""
        self.scheduler_role.update_state_after_alloc(request, blocks, num_external_tokens)

    @contained(dict)
    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """Return how many of the hit's tokens come from memory, disk and elsewhere, after the request's admission."""
        return self.scheduler_role.get_external_cache_hit_sources(request, num_external_tokens)

    @contained(lambda: PlanMetadata(EMPTY_PLAN))
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return the step's plan for all ranks. The plan contains loads, saves and tier orders."""
        return self.scheduler_role.build_connector_meta(scheduler_output)

    @contained(_nothing)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Process the summed reports of all ranks, and the blocks that vLLM recomputes after failed loads."""
        self.scheduler_role.update_connector_output(connector_output)

    @contained(lambda: (False, None))
    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:  # noqa: ARG002
        """Stop tracking a request. vLLM may free the blocks at once: later writes wait for the request's last save."""
        return self.scheduler_role.request_finished(request)

    def request_finished_all_groups(
        self,
        request: Request,
        block_ids: tuple[list[int], ...],  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:
        """Stop tracking a request, for models with several cache groups."""
        return self.request_finished(request, [])

    @contained(lambda: False)
    def has_pending_push_work(self) -> bool:
        """Whether an idle engine must continue to run steps, because some rank has not reported all its jobs yet."""
        return self.scheduler_role.has_pending_push_work()

    @contained(tuple)
    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return the KV events since the last call: blocks that lookups can find now, or can no longer find."""
        return self.scheduler_role.take_events()

    @contained(lambda: False)
    def reset_cache(self) -> bool | None:
        """Forget every chunk, including chunks in tiers. A reset for a sleep forgets nothing. Returns True."""
        return self.scheduler_role.reset_cache()
