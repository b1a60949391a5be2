"""The worker role of `KVPipeConnector`: the methods that vLLM's runner calls on a rank."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, cast

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvpipe.config.tracing import tracing
from kvpipe.connectors.vllm import held_adapters, pooled
from kvpipe.connectors.vllm.doctor_facts import first_hash
from kvpipe.connectors.vllm.identity import models, rank_facts, sleep
from kvpipe.connectors.vllm.metadata import Introduction, PlanMetadata, ReportMetadata
from kvpipe.connectors.vllm.metrics import Meter
from kvpipe.connectors.vllm.no_caches import NoCaches
from kvpipe.connectors.vllm.remedies import scales
from kvpipe.protocol.messages import EMPTY_PLAN, Report
from kvpipe.tiers.guard import READ, WRITE, GuardedTier, guarded
from kvpipe.trace.log import Counters
from kvpipe.worker.adapters import HeldAdapters
from kvpipe.worker.caches import PagedCaches
from kvpipe.worker.context import RankContext
from kvpipe.worker.side import WorkerSide

if TYPE_CHECKING:
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.forward_context import ForwardContext

    from kvpipe.connectors.vllm.roles import Door, RoleFacts


class WorkerRole:
    """The worker's part of a connector. There is one per rank."""

    def __init__(self, door: Door, facts: RoleFacts) -> None:
        """Set up the parts that a rank needs before it has caches, because vLLM may load adapters before caches exist.

        `door` makes the copy engine, the tiers and the hooks, so that tests can replace them.
        """
        config, self.counters = facts.config, Counters()
        self._door, self._facts, self.settings, self.geometry = door, facts, facts.settings, facts.geometry
        self.worker: WorkerSide | NoCaches = NoCaches(self.counters)
        self.step, self._introduced = self.worker.step, False
        self._introduction: Introduction | None = None
        self.rank, layers = config.parallel_config.rank, len(self.geometry.layers)
        self.recorder, self.writer = tracing(self.settings, facts.engine, "worker", self.rank, layers)
        self._ends = ExitStack()
        self._ends.callback(self.writer.close)
        if facts.node is not None and facts.node.memory is not None:
            self._ends.callback(facts.node.memory.close)  # after the copies have ended
        self._adapters = HeldAdapters(self.counters)
        if config.lora_config is not None:
            held_adapters.record_loads(self._adapters)
        sleep.join(config, door, self._adapters)
        self._rank_tiers()  # a wrong tier raises now
        self.meter = self._meter()
        self.counters.on_fault = self.recorder.fault

    def _meter(self) -> Meter:
        worker = self.worker
        return Meter(worker.totals, durations=self.counters.durations.take, can_wait=worker.puts_off_metrics)

    def _contain(self, where: str, error: Exception) -> None:
        """Count an exception that the method `where` has raised and vLLM does not see."""
        self.counters.fault("contained_error", where=where, error=repr(error))

    def stats(self) -> dict[str, int]:
        """Return the rank's counters."""
        return self.counters.totals()

    def _rank_tiers(self) -> list[GuardedTier]:
        """Return the tiers from which a rank reads chunks, and to which the rank writes chunks if it saves."""
        uses = (READ, WRITE) if self._facts.transfer.is_kv_producer else (READ,)
        return guarded(self._door.make_tiers(writes=WRITE in uses), uses, self.recorder)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Make the worker side over the rank's paged caches.

        If vLLM registers other caches later, and no sleep came between, the rank stops using its pool and copies
        nothing more.

        Raises:
            UnsupportedError: the caches have a layout that kvpipe does not know.

        """
        if isinstance(self.worker, WorkerSide):
            try:
                restored = self.worker.restore(kv_caches)
            except Exception as e:  # noqa: BLE001  (the pool is given up, and the engine continues without it)
                self._contain("restore", e)
                return
            if not restored:
                self.counters.fault("caches_registered_again")
                self.worker.give_up("the caches are no longer those that its chunks are of")
            return
        config, cache = self._facts.config, self._facts.cache
        models.check_backends(models.backends(config, kv_caches).values())
        scales.set_scales(config.compilation_config.static_forward_context, kv_caches)
        caches = PagedCaches(self.geometry, kv_caches, cache.num_blocks, self._door.hooks(kv_caches))
        facts = rank_facts.find_rank_facts(config, cache, self.geometry, kv_caches, self._contain, whole=caches.whole)
        self._layout, self._common, self._numerics = facts.layout, facts.common, facts.numerics
        pooled.check_rank(self._facts, caches.geometry)
        claim = rank_facts.claim(self.settings, config, cache, self.geometry, self.rank, facts)
        if claim is not None:
            self._ends.callback(claim.release)
        self.worker = WorkerSide(
            RankContext(self.settings, self.rank, config.parallel_config.world_size, self.counters, self.recorder),
            caches,
            engine=self._door.make_engine(),
            shares=facts.shares,
            tiers=self._rank_tiers(),
            weigh=facts.weigh,
            adapters=self._adapters,
            shared=None if self._facts.node is None else self._facts.node.shared,
        )
        if self.worker.carrier is not None:
            self.worker.carrier.first_hash.text = first_hash(config.cache_config.prefix_caching_hash_algo)
        self.step, self.meter = self.worker.step, self._meter()
        self.writer.set_layers(len(caches.geometry.layers))

    def unregister_kv_caches(self) -> None:
        """End every copy, because vLLM is about to release the caches' memory. The pool is kept. Idempotent."""
        self.worker.release()

    def restore_kv_caches(self) -> None:
        """Use the caches again: vLLM has restored their memory, perhaps at other addresses. Idempotent."""
        self.worker.restore()

    def get_handshake_metadata(self) -> None:
        """Read the weights for the rank's first report."""
        self._introduce()

    def _introduce(self) -> Introduction | None:
        """Return this rank's introduction, or None if the rank has no caches yet."""
        worker = self.worker
        if self._introduction is None and not isinstance(worker, NoCaches):
            digest = self._layout if worker.carrier is not None or self._facts.node is not None else ""
            heads, slots = tuple(share.heads for share in worker.shares), self.geometry.slots
            shared = None if self._facts.node is None else self._facts.node.shared
            pool = b"" if shared is None else shared.token
            found = worker.weigh_now(), slots, heads, self._common, self._numerics(), pool
            self._introduction = Introduction(self.rank, digest, *found)
        return self._introduction

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step with its plan. Metadata of another class counts as a fault and as an empty plan."""
        good = isinstance(connector_metadata, PlanMetadata)
        self.worker.bind(cast("PlanMetadata", connector_metadata).plan if good else EMPTY_PLAN)
        if not good:
            self.counters.fault("foreign_metadata", type=type(connector_metadata).__name__)

    def clear_connector_metadata(self) -> None:
        """End the step and drop its plan."""
        self.worker.unbind()

    def start_load_kv(self, forward_context: ForwardContext) -> None:
        """Submit the step's loads of all layers."""
        try:
            self.worker.start_loads(forward_context)
        except Exception as e:  # noqa: BLE001  (vLLM must not see the exception)
            self._contain("start_load_kv", e)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for the layer's sync loads; on a GPU only the stream waits. Not called while the step is IDLE."""
        try:
            self.worker.wait_layer(layer_name)
        except Exception as e:  # noqa: BLE001  (vLLM must not see the exception)
            self._contain("wait_for_layer_load", e)

    def save_kv_layer(self, layer_name: str) -> None:
        """Submit the layer's saves. vLLM calls this method as often as `wait_for_layer_load`."""
        try:
            self.worker.save_layer(layer_name)
        except Exception as e:  # noqa: BLE001  (vLLM must not see the exception)
            self._contain("save_kv_layer", e)

    def wait_for_save(self) -> None:
        """End the step's loads and saves. Further calls in the same step do nothing."""
        try:
            self.worker.end_step()
        except Exception as e:  # noqa: BLE001  (vLLM must not see the exception)
            self._contain("wait_for_save", e)

    def get_transfer_results(self) -> KVConnectorTransferResults:
        """Report every ended async load exactly once, also of an aborted request, because vLLM waits for the report."""
        received, failed = self.worker.collect()
        return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Report the blocks of failed layerwise loads, in the step of the loads."""
        return self.worker.take_bad_blocks(late=False)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return this rank's report since the last call, or None if there is nothing to report.

        The first report contains the rank's `Introduction`.
        """
        report, new = self.worker.take_report(), None if self._introduced else self._introduce()
        if new is None:
            return ReportMetadata(report) if report is not None else None
        self._introduced = True
        return ReportMetadata(report or Report(), (new,))

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return the changes of the rank's metrics since the last call, or None if nothing has changed."""
        return self.meter.take()

    def handle_preemptions(self) -> None:
        """Set the fence of the last step's saves if `hooks.fences_late` is true for this engine."""
        self.counters["handle_preemptions"] += 1
        self.worker.handle_preemptions()

    def shutdown(self) -> None:
        """End all threads and release the engine's name. Idempotent."""
        with self._ends:  # in reverse order; every part is ended even if ending another part raises
            self._ends.callback(self.worker.shutdown)
