"""Connectors with injected faults, loaded by vLLM through `kv_connector_module_path`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import CUDAGraphMode

from kvpipe.connectors.vllm.connector import KVPipeConnector
from kvpipe.connectors.vllm.hooks import is_replayed
from kvpipe.testing.faults import FaultyCpuEngine
from kvpipe.transfer.base import CopyPlan, Direction, Ticket, TransferEngine
from kvpipe.transfer.cpu import CpuEngine
from kvpipe.worker.caches import Hooks


class EverySecondLoadFails(KVPipeConnector):
    """Every second load job fails at its second layer."""

    def make_engine(self) -> TransferEngine | None:
        """Copy for real, but fail."""
        return FaultyCpuEngine(1, fail=lambda direction, job, layer: direction is Direction.LOAD and job and layer == 1)


class OneRankFails(KVPipeConnector):
    """Every second load fails, on one rank only."""

    def make_engine(self) -> TransferEngine | None:
        """Copy for real, but fail on rank 1."""
        if self._vllm_config.parallel_config.rank == 0:
            return None
        return FaultyCpuEngine(1, fail=lambda direction, job, layer: direction is Direction.LOAD and job and layer == 1)


class EverySecondSaveFails(KVPipeConnector):
    """Every second save job fails at its last layer."""

    def make_engine(self) -> TransferEngine | None:
        """Copy for real, but fail."""
        return FaultyCpuEngine(1, fail=lambda direction, job, layer: direction is Direction.SAVE and job and layer == 5)


class _FirstStatesFail(CpuEngine):
    """The first save that has a layer of states fails there."""

    failed: int = -1

    def copy_layer(self, plan: CopyPlan, layer: int) -> frozenset[int]:
        """Copy, then fail."""
        failed = super().copy_layer(plan, layer)
        group, _ = self._geometry.layers[layer]
        if plan.direction is not Direction.SAVE or group not in self._geometry.states or not len(plan.runs[group]):
            return failed
        if self.failed < 0:
            self.failed = plan.jobs[0].id
        return failed | {job.id for job in plan.jobs if job.id == self.failed}


class FirstStatesFail(KVPipeConnector):
    """The states of the first boundary that is saved are not saved."""

    def make_engine(self) -> TransferEngine | None:
        """Copy for real, but fail."""
        return _FirstStatesFail(1)


class _Losing(CpuEngine):
    """Loses the first load: its copies never begin, and nobody is notified."""

    lost: CopyPlan | None = None

    def submit(self, plan: CopyPlan, ticket: Ticket) -> None:
        """See `TransferEngine.submit`."""
        if plan.direction is Direction.LOAD and self.lost is None:
            self.lost = plan
        if plan is not self.lost:
            super().submit(plan, ticket)


class FirstLoadIsLost(KVPipeConnector):
    """The first load never ends."""

    def make_engine(self) -> TransferEngine | None:
        """Copy for real, but lose."""
        return _Losing(1)


class Unruly(KVPipeConnector):
    """Calls kvpipe in every way that vLLM's versions were seen to call a layerwise connector, and some more."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Every hook twice, one for a layer that nobody knows, freeze toggled in mid-forward."""
        super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)
        super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)
        super().wait_for_layer_load(layer_name)
        super().wait_for_layer_load("no.such.layer")
        scheduler_side = self.scheduler_side()
        if scheduler_side is not None:
            scheduler_side.set_freeze(not scheduler_side.scheduler.switches.freeze)  # type: ignore[union-attr]
            scheduler_side.set_freeze(not scheduler_side.scheduler.switches.freeze)  # type: ignore[union-attr]

    def wait_for_save(self) -> None:
        """Three times instead of once."""
        for _ in range(3):
            super().wait_for_save()

    def clear_connector_metadata(self) -> None:
        """Twice, and a step's end after it."""
        super().clear_connector_metadata()
        super().wait_for_save()
        super().clear_connector_metadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Twice."""
        super().start_load_kv(forward_context, **kwargs)
        super().start_load_kv(forward_context, **kwargs)

    @staticmethod
    def scheduler_side() -> KVPipeConnector | None:
        """The other side, in a one-process engine."""
        return Unruly.other

    other: KVPipeConnector | None = None

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Remember the scheduler's side."""
        super().bind_kv_cache_manager(kv_cache_manager)
        Unruly.other = self


class Replayed(KVPipeConnector):
    """Every second step is as one that is replayed from a CUDA graph: its context shows it, and no hook runs."""

    steps = 0

    @property
    def replayed(self) -> bool:
        """Whether this is such a step."""
        return bool(self.steps % 2)

    def hooks(self, kv_caches: dict[str, torch.Tensor]) -> Hooks:
        """Know of graphs."""
        return super().hooks(kv_caches)._replace(replayed=is_replayed)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Count."""
        self.steps += 1
        super().bind_connector_metadata(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """As runner V1 marks it."""
        if self.replayed:
            forward_context = SimpleNamespace(attn_metadata={}, cudagraph_runtime_mode=CUDAGraphMode.FULL)
        super().start_load_kv(forward_context, **kwargs)

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Skipped in a step that is replayed."""
        if not self.replayed:
            super().save_kv_layer(*args, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Skipped in a step that is replayed."""
        if not self.replayed:
            super().wait_for_layer_load(layer_name)


class HooksSkipped(KVPipeConnector):
    """No layer hook runs, as in the replay of a full CUDA graph."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Skipped."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Skipped."""
