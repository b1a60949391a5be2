"""Parts that vLLM's CPU build lacks to run a model in stages, or its experts on several ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.v1.worker.cpu_worker import CPUWorker


class StagedWorker(CPUWorker):
    """A worker that can be a later stage: it has a buffer for what the stage before it sends.

    VLLM's runner V1 makes that buffer in its profiling run, which its CPU worker leaves out unless it compiles the
    model: `sync_and_gather_intermediate_tensors` then fails on an assertion at the first step.
    """

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Make it when the caches are made."""
        from vllm.distributed.parallel_state import get_pp_group

        super().initialize_from_config(kv_cache_config)
        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.get_model().make_empty_intermediate_tensors(  # type: ignore[operator]
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )


class ExpertWorker(CPUWorker):
    """A worker that can have some of the experts: vLLM's CPU kernel takes every expert's number for that of its own.

    It reads beyond its weights, and the process dies of it. Here experts of other ranks weigh nothing.
    """

    def load_model(self, **how: Any) -> None:
        """Teach the kernel whose experts there are."""
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
    """A worker whose experts may lie in other engines: vLLM's CPU build does not know how to bring them tokens.

    Its `AgRsAll2AllManager` asks the communicator for `all_gatherv` and `reduce_scatterv`, which that of the CPU lacks.
    """

    def load_model(self, **how: Any) -> None:
        """Teach the communicator both."""

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
