"""Finds the layers for which vLLM calls the connector's hooks, and when in a step vLLM calls the hooks.

vLLM calls the hooks in the operators of `Attention` and `MLAAttention`. A layer of another class, or of a subclass with
its own `forward`, may attend without these operators. Examples are the caches of DeepSeek V3.2 and V4, and of their
indexers. kvpipe relies on hooks only for layers that are known to call hooks. Copies of all other layers are correct
too, but do not overlap with compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from vllm import envs
from vllm.config import CUDAGraphMode
from vllm.model_executor.layers.attention import Attention, MLAAttention

from kvpipe.connectors.vllm.identity import drafters
from kvpipe.connectors.vllm.identity.models import refuse
from kvpipe.worker.caches import Hooks

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext


_OPERATORS: Final = frozenset({"vllm::unified_attention_with_output", "vllm::unified_mla_attention_with_output"})
"""The custom operators that call the hooks."""


def hooks(config: VllmConfig, caches: Mapping[str, torch.Tensor], mode: str) -> Hooks[str]:
    """Return the hooks that vLLM's runner calls for the layers of `caches`. Raises the errors of `unhooked`."""
    return Hooks(unhooked(config, caches, mode), is_replayed if replays(config) else None, fences_late(config, caches))


def is_hooked(layer: object) -> bool:
    """Whether vLLM calls the hooks before and after the attention of `layer`."""
    forward = getattr(type(layer), "forward", None)
    if forward is MLAAttention.forward:
        return not getattr(layer, "use_direct_call", False)  # a direct call skips the operator and its hooks
    return forward is Attention.forward


def unhooked(config: VllmConfig, names: Iterable[str], mode: str) -> frozenset[str]:
    """Return the layers among `names` for which vLLM calls no hooks, or whose hooks `mode` ignores.

    Call this function only after vLLM has resolved its CUDA graph modes, because the replay of a captured graph calls
    no hook. When vLLM calls `requires_piecewise_for_cudagraph`, the modes are not resolved yet. For example,
    `fuse_attn_quant` chooses graphs of whole steps later.

    Raises:
        UnsupportedError: `mode` is layerwise, but some steps will call no hooks or some layers run several times.
    """
    inside = _attention_inside(config)
    graphs = config.compilation_config.cudagraph_mode
    why = f"CUDA graphs of whole steps (cudagraph_mode={graphs.name})" if graphs and replays(config) else inside
    if why and mode == "layerwise":
        refuse(f"mode='layerwise' with {why}", "set mode to 'auto' or 'step', or cudagraph_mode to 'PIECEWISE'")
    drafts = drafters.has_kv(config)
    if drafts and mode == "layerwise":
        refuse("mode='layerwise' with a drafter that has KV (its layers run several times)", "set mode to 'auto'")
    made, none = config.compilation_config.static_forward_context, ignored(config, mode) or drafts
    return frozenset(name for name in names if none or not is_hooked(made.get(name)))


def ignored(config: VllmConfig, mode: str) -> bool:
    """Whether no layer's hook is used: `mode` ignores hooks, or attention is inside captured graph pieces."""
    return mode == "step" or bool(_attention_inside(config))


def replays(config: VllmConfig) -> bool:
    """Whether some steps replay CUDA graphs of whole steps, and so call no hooks.

    A step with a prefill does call hooks.
    """
    graphs = config.compilation_config.cudagraph_mode
    return graphs is not None and bool(graphs.has_full_cudagraphs())


def is_replayed(context: ForwardContext) -> bool:
    """Whether the step replays a CUDA graph: runner V2 gives an empty context, runner V1 a context of mode FULL."""
    graphs = getattr(context, "cudagraph_runtime_mode", None)
    return getattr(context, "attn_metadata", None) is None or graphs == CUDAGraphMode.FULL


def _attention_inside(config: VllmConfig) -> str:
    """Return why attention is inside captured graph pieces, which call no hooks, or "" if attention is outside."""
    compilation = config.compilation_config
    graphs = compilation.cudagraph_mode
    if graphs is None or not graphs.has_piecewise_cudagraphs() or envs.VLLM_USE_BREAKABLE_CUDAGRAPH:
        return ""
    if not _OPERATORS.isdisjoint(compilation.splitting_ops or ()):
        return ""
    return f"attention inside CUDA graphs (splitting_ops={compilation.splitting_ops})"


def fences_late(config: VllmConfig, caches: Mapping[str, torch.Tensor]) -> bool:
    """Whether the fence of a step's saves is set in the next step's `handle_preemptions`, not in `wait_for_save`.

    Runner V1 calls `wait_for_save` before logits and sampling, which need not wait for copies. Runner V1 begins each
    step with `handle_preemptions`, before it zeroes or copies blocks. Runner V2 samples before `wait_for_save`, and
    zeroes blocks before `handle_preemptions`. On a CPU the fence is a wait of the host in `wait_for_save`, so that a
    step's saves are reported with the same step.
    """
    return not config.use_v2_model_runner and all(cache.is_cuda for cache in caches.values())
