"""Which layers vLLM calls the connector's hooks for, and when in a step.

VLLM calls them in the operators of `Attention` and `MLAAttention`. A layer of another class, or of one of theirs whose
`forward` is its own, may attend without: the caches of DeepSeek V3.2 and V4, of their indexers, and more. Only
what is known to call its hooks is relied on; a layer that is taken for one without loses overlap and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from vllm import envs
from vllm.config import CUDAGraphMode
from vllm.model_executor.layers.attention import Attention, MLAAttention

from kvpipe.connectors.vllm import drafters
from kvpipe.connectors.vllm.models import refuse
from kvpipe.worker.caches import Hooks

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext


_OPERATORS: Final = frozenset({"vllm::unified_attention_with_output", "vllm::unified_mla_attention_with_output"})
"""The classes of layers whose operators call the hooks."""


def hooks(config: VllmConfig, caches: Mapping[str, torch.Tensor], mode: str) -> Hooks:
    """Return what vLLM's runner calls for the layers of `caches`. Raises as `unhooked`."""
    return Hooks(unhooked(config, caches, mode), is_replayed if replays(config) else None, fences_late(config, caches))


def is_hooked(layer: object) -> bool:
    """Whether vLLM calls the hooks before and after the attention of `layer`."""
    forward = getattr(type(layer), "forward", None)
    if forward is MLAAttention.forward:
        return not getattr(layer, "use_direct_call", False)  # past the operator, and its hooks
    return forward is Attention.forward


def unhooked(config: VllmConfig, names: Iterable[str], mode: str) -> frozenset[str]:
    """Return those of the layers `names` before and after whose attention no hook is called, or heeded in `mode`.

    To be asked when vLLM has resolved its modes: of what a CUDA graph has captured no hook is called when it is
    replayed. VLLM asks whether a connector needs graphs of pieces before all of that is decided: `fuse_attn_quant`,
    for one, chooses graphs of whole steps later.

    Raises:
        UnsupportedError: `mode` is layerwise, and there will be steps without hooks, or layers that run several times.

    """
    inside = _attention_inside(config)
    graphs = config.compilation_config.cudagraph_mode
    why = f"CUDA graphs of whole steps (cudagraph_mode={graphs.name})" if graphs and replays(config) else inside
    if why and mode == "layerwise":
        refuse(f"mode='layerwise' with {why}", "set mode to 'auto' or 'step', or cudagraph_mode to 'PIECEWISE'")
    drafts = drafters.has_kv(config)
    if drafts and mode == "layerwise":
        refuse("mode='layerwise' with a drafter that has KV (its layers run several times)", "set mode to 'auto'")
    made = config.compilation_config.static_forward_context
    none = inside or mode == "step" or drafts
    return frozenset(name for name in names if none or not is_hooked(made.get(name)))


def replays(config: VllmConfig) -> bool:
    """Whether some steps are replayed from graphs of whole steps, without hooks; those that prefill have them."""
    graphs = config.compilation_config.cudagraph_mode
    return graphs is not None and bool(graphs.has_full_cudagraphs())


def is_replayed(context: ForwardContext) -> bool:
    """Whether the step that begins is replayed. Runner V2 has no context then, V1 one whose mode is FULL."""
    graphs = getattr(context, "cudagraph_runtime_mode", None)
    return getattr(context, "attn_metadata", None) is None or graphs == CUDAGraphMode.FULL


def _attention_inside(config: VllmConfig) -> str:
    """Return why attention is part of captured pieces, so that hooks would not be called; "" if it is not."""
    compilation = config.compilation_config
    graphs = compilation.cudagraph_mode
    if graphs is None or not graphs.has_piecewise_cudagraphs() or envs.VLLM_USE_BREAKABLE_CUDAGRAPH:
        return ""
    if not _OPERATORS.isdisjoint(compilation.splitting_ops or ()):
        return ""
    return f"attention inside CUDA graphs (splitting_ops={compilation.splitting_ops})"


def fences_late(config: VllmConfig, caches: Mapping[str, torch.Tensor]) -> bool:
    """Whether the fence of a step's saves is set in the next step's `handle_preemptions`, not in `wait_for_save`.

    Runner V1 calls `wait_for_save` before logits and sampling, which need not wait for copies, and `handle_preemptions`
    first of all in each step, before it zeroes or copies blocks. Runner V2 does it the other way round: it samples
    first, and zeroes blocks before `handle_preemptions`. On a CPU the fence is the host's wait, after which a
    step's saves are reported with the step.
    """
    return not config.use_v2_model_runner and all(cache.is_cuda for cache in caches.values())
