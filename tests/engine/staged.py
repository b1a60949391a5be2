"""Replacements for parts that vLLM's CPU build lacks.

Pipeline stages, and experts on several ranks, need these parts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.v1.worker.cpu_worker import CPUWorker


class StagedWorker(CPUWorker):
    """A worker that can be a later pipeline stage: the worker has a buffer for data from the previous stage.

    VLLM's runner V1 makes this buffer in its profiling run. vLLM's CPU worker skips the profiling run unless the worker
    compiles the model. Without the buffer `sync_and_gather_intermediate_tensors` fails on an assertion at the first
    step.
    """

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Make the buffer when the worker makes its caches."""
        from vllm.distributed.parallel_state import get_pp_group

        super().initialize_from_config(kv_cache_config)
        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.get_model().make_empty_intermediate_tensors(  # type: ignore[operator]
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )


class ExpertWorker(CPUWorker):
    """A worker that can have only some of the experts.

    VLLM's CPU kernel treats every expert's number as that of a local expert, so the kernel reads beyond the rank's
    weights and the process crashes. This worker gives experts of other ranks the weight 0.
    """

    def load_model(self, **how: Any) -> None:
        """Make the kernel skip the experts of other ranks."""
        apply = CPUUnquantizedExperts.apply

        def mapped(self: Any, *args: Any, **kwargs: Any) -> None:
            if (experts := kwargs.get("expert_map")) is not None:
                mine = experts[kwargs["topk_ids"].long()]
                kwargs["topk_weights"] = torch.where(mine < 0, 0.0, kwargs["topk_weights"])
                kwargs["topk_ids"] = mine.clamp(min=0).to(kwargs["topk_ids"].dtype)
            apply(self, *args, **kwargs)

        CPUUnquantizedExperts.apply = mapped  # type: ignore[method-assign]
        super().load_model(**how)


class ReplicaWorker(ExpertWorker):
    """A worker whose experts may be in other engines.

    VLLM's `AgRsAll2AllManager` calls `all_gatherv` and `reduce_scatterv`, which the CPU's communicator lacks.
    """

    def load_model(self, **how: Any) -> None:
        """Add `all_gatherv` and `reduce_scatterv` to the communicator."""

        def gathered(self: Any, input_: list[torch.Tensor], dim: int, sizes: list[int]) -> list[torch.Tensor]:
            assert dim == 0
            first = sum(sizes[: self.rank_in_group])
            made = [one.new_zeros(sum(sizes), *one.shape[1:]) for one in input_]
            for whole, one in zip(made, input_, strict=True):
                whole[first : first + len(one)] = one
                distributed.all_reduce(whole, group=self.device_group)
            return made

        def reduced(self: Any, input_: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
            assert dim == 0
            whole, first = input_.clone(), sum(sizes[: self.rank_in_group])
            distributed.all_reduce(whole, group=self.device_group)
            return whole[first : first + sizes[self.rank_in_group]]

        CpuCommunicator.all_gatherv = gathered  # type: ignore[assignment]
        CpuCommunicator.reduce_scatterv = reduced  # type: ignore[assignment]
        super().load_model(**how)
