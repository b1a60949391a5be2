"""Connectors with injected faults, loaded by vLLM through `kv_connector_module_path`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import CUDAGraphMode

from kvpipe.connectors.vllm.connector import KVPipeConnector
from kvpipe.connectors.vllm.hooks import is_replayed
from kvpipe.connectors.vllm.tiny.models import BASE
from kvpipe.testing.faults import FaultyCpuEngine
from kvpipe.transfer.base import CopyPlan, Direction, Ticket, TransferEngine
from kvpipe.transfer.cpu import CpuEngine
from kvpipe.worker.caches import Hooks

LAST = BASE["num_hidden_layers"] - 1
"""The number of the last layer of the model "llama"."""


class EverySecondLoadFails(KVPipeConnector):
    """A connector in which every second load fails at its second layer."""

    def make_engine(self) -> TransferEngine | None:
        """Make a transfer engine that copies, but fails every second load."""
        return FaultyCpuEngine(1, fail=lambda direction, job, layer: direction is Direction.LOAD and job and layer == 1)


class OneRankFails(KVPipeConnector):
    """A connector in which every second load fails, on one rank only."""

    def make_engine(self) -> TransferEngine | None:
        """Make a transfer engine that copies, but fails every second load on rank 1."""
        if self._vllm_config.parallel_config.rank == 0:
            return None
        return FaultyCpuEngine(1, fail=lambda direction, job, layer: direction is Direction.LOAD and job and layer == 1)


class EverySecondSaveFails(KVPipeConnector):
    """A connector in which every second save fails at its last layer."""

    def make_engine(self) -> TransferEngine | None:
        """Make a transfer engine that copies, but fails every second save."""
        return FaultyCpuEngine(
            1, fail=lambda direction, job, layer: direction is Direction.SAVE and job and layer == LAST
        )


class _FirstStatesFail(CpuEngine):
    """A transfer engine in which the first save that has a layer of states fails at this layer."""

    failed: int = -1

    def copy_layer(self, plan: CopyPlan, layer: int) -> frozenset[int]:
        """Copy the layer, and report a failure if the layer is the first layer of states."""
        failed = super().copy_layer(plan, layer)
        group, _ = self._geometry.layers[layer]
        if plan.direction is not Direction.SAVE or group not in self._geometry.states or not len(plan.runs[group]):
            return failed
        if self.failed < 0:
            self.failed = plan.jobs[0].id
        return failed | {job.id for job in plan.jobs if job.id == self.failed}


class FirstStatesFail(KVPipeConnector):
    """A connector that does not save the states of the first boundary."""

    def make_engine(self) -> TransferEngine | None:
        """Make a transfer engine that copies, but fails the first save of states."""
        return _FirstStatesFail(1)


class _Losing(CpuEngine):
    """A transfer engine that loses the first load: the load's copies never begin, and no thread is notified."""

    lost: CopyPlan | None = None

    def submit(self, plan: CopyPlan, ticket: Ticket) -> None:
        """See `TransferEngine.submit`."""
        if plan.direction is Direction.LOAD and self.lost is None:
            self.lost = plan
        if plan is not self.lost:
            super().submit(plan, ticket)


class FirstLoadIsLost(KVPipeConnector):
    """A connector in which the first load never ends."""

    def make_engine(self) -> TransferEngine | None:
        """Make a transfer engine that copies, but loses the first load."""
        return _Losing(1)


class Unruly(KVPipeConnector):
    """A connector that calls kvpipe as vLLM's releases have called connectors, and in ways that no release has used."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Call every hook twice, call a hook of an unknown layer, and toggle freeze during the forward."""
        super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)
        super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)
        super().wait_for_layer_load(layer_name)
        super().wait_for_layer_load("no.such.layer")
        scheduler_side = self.scheduler_side()
        if scheduler_side is not None:
            scheduler_side.scheduler_role.set_freeze(not scheduler_side.scheduler.switches.freeze)  # type: ignore[union-attr]
            scheduler_side.scheduler_role.set_freeze(not scheduler_side.scheduler.switches.freeze)  # type: ignore[union-attr]

    def wait_for_save(self) -> None:
        """End the step three times instead of once."""
        for _ in range(3):
            super().wait_for_save()

    def clear_connector_metadata(self) -> None:
        """Clear the metadata twice, and then end the step again."""
        super().clear_connector_metadata()
        super().wait_for_save()
        super().clear_connector_metadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the loads of each step twice."""
        super().start_load_kv(forward_context, **kwargs)
        super().start_load_kv(forward_context, **kwargs)

    @staticmethod
    def scheduler_side() -> KVPipeConnector | None:
        """The scheduler side of the one-process engine."""
        return Unruly.other

    other: KVPipeConnector | None = None

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Keep the scheduler side."""
        super().bind_kv_cache_manager(kv_cache_manager)
        Unruly.other = self


class Replayed(KVPipeConnector):
    """A connector for which every second step is a replay of a CUDA graph.

    In a replay the forward context has the mark of a replay, and no hook runs.
    """

    steps = 0

    @property
    def replayed(self) -> bool:
        """Whether this step is a replay."""
        return bool(self.steps % 2)

    def hooks(self, kv_caches: dict[str, torch.Tensor]) -> Hooks[str]:
        """Return hooks that recognize replays."""
        return super().hooks(kv_caches)._replace(replayed=is_replayed)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Count the step."""
        self.steps += 1
        super().bind_connector_metadata(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the loads with a context that runner V1 marks as a replay."""
        if self.replayed:
            forward_context = SimpleNamespace(attn_metadata={}, cudagraph_runtime_mode=CUDAGraphMode.FULL)
        super().start_load_kv(forward_context, **kwargs)

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Save the layer, unless the step is a replay."""
        if not self.replayed:
            super().save_kv_layer(*args, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for the layer, unless the step is a replay."""
        if not self.replayed:
            super().wait_for_layer_load(layer_name)


class HooksSkipped(KVPipeConnector):
    """A connector whose layer hooks do nothing, like hooks during the replay of a full CUDA graph."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing."""
