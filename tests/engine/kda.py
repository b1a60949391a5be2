"""Kimi delta attention on a CPU: vLLM's own layer, states, moves and plans, with its kernels replaced by torch.

Kimi Linear itself starts on no CPU, because its latent attention needs CUDA kernels. So here Kimi's layers replace the
gated delta nets of Qwen3-Next, between its full attention and its experts.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.nn.functional import normalize, softplus

from tests.engine.kernels import replace_kernels


def lend_kernels(patch: pytest.MonkeyPatch) -> None:
    """Make a model from Qwen3-Next with Kimi's layers, and replace their kernels by torch."""
    replace_kernels({})  # vLLM's own scan would fail at a module that is imported below
    from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import causal_conv1d_fn_cpu, causal_conv1d_update_cpu
    from vllm.model_executor.model_loader import dummy_loader
    from vllm.model_executor.models import qwen3_next
    from vllm.models.kimi_k3 import KimiLinearForCausalLM
    from vllm.models.kimi_k3.nvidia import kda, kda_metadata
    from vllm.models.kimi_k3.nvidia.ops.third_party import kda as kernels
    from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor

    class Layer(kda.KimiK3DeltaAttention):  # type: ignore[misc]
        """A layer with the interface of Qwen3-Next's own layer."""

        def __init__(self, config: Any, vllm_config: Any, prefix: str, **_: Any) -> None:
            super().__init__(config, vllm_config, prefix)

        def forward(self, hidden_states: torch.Tensor, *_: Any) -> torch.Tensor:
            """Compute the layer. Positions have no effect."""
            out: torch.Tensor = super().forward(hidden_states, hidden_states)
            return out

    patch.setattr(qwen3_next, "QwenGatedDeltaNetAttention", Layer)
    for what in ("dtype_from_config", "shape_from_config", "copy_func"):
        name = f"get_mamba_state_{what}"
        patch.setattr(qwen3_next.Qwen3NextForCausalLM, name, getattr(KimiLinearForCausalLM, name))
    patch.setattr(dummy_loader, "initialize_single_dummy_weight", _draw)
    patch.setattr(kda_metadata, "_mamba_get_block_table_tensor", mamba_get_block_table_tensor)
    patch.setattr(kda, "gather_initial_states", _gather)
    patch.setattr(kda, "causal_conv1d_fn", causal_conv1d_fn_cpu)
    patch.setattr(kda, "causal_conv1d_update", causal_conv1d_update_cpu)
    patch.setattr(kernels, "chunk_kda_with_fused_gate", _prefill)
    patch.setattr(kernels, "fused_recurrent_kda_packed_decode", _decode)


def _draw(tensor: torch.Tensor, *_: Any, **__: Any) -> None:
    """Fill a weight with values that depend only on the weight's shape.

    Their range is wide enough to make answers differ.
    """
    generator = torch.Generator().manual_seed(sum(tensor.shape))
    drawn = torch.randn(tensor.shape, generator=generator) * 0.12
    tensor.data.copy_((drawn / 10 + 1 if tensor.dim() == 1 else drawn).to(tensor.dtype))


def _gather(states: torch.Tensor, blocks: torch.Tensor, initial: torch.Tensor) -> torch.Tensor:
    return torch.where(initial[:, None, None, None], states[blocks.long()], 0.0)


def _step(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kept: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute one token of all heads, like `fused_recurrent_kda_fwd_kernel`. `state` is (heads, values, keys).

    The other tensors are (heads, width, 1) or (heads, 1, width), which takes few calls of torch.
    """
    state = state * kept
    state = torch.baddbmm(state, (v - torch.bmm(state, k.mT)) * beta, k)
    return state, torch.bmm(state, q)


def _gates(raw: torch.Tensor, bias: torch.Tensor, named: dict[str, Any]) -> torch.Tensor:
    """Return the logarithm of the share of a state that each token keeps, in shape (tokens, heads, keys)."""
    raw, decay, bound = raw.float() + bias.view(raw.shape[1:]), torch.exp(named["A_log"])[:, None], named["lower_bound"]
    return -decay * softplus(raw) if bound is None else bound * torch.sigmoid(decay * raw)


def _prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, raw_g: torch.Tensor, raw_beta: torch.Tensor, *,
    g_bias: torch.Tensor, initial_state: torch.Tensor, cu_seqlens: torch.Tensor, **named: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute like `chunk_kda_with_fused_gate`. Tensors are (1, tokens, heads, width), with one state per request."""
    kept, betas = torch.exp(_gates(raw_g[0], g_bias, named)), torch.sigmoid(raw_beta[0].float())
    q, k = normalize(q[0].float(), dim=-1) * q.shape[-1] ** -0.5, normalize(k[0].float(), dim=-1)
    out, states = torch.zeros_like(v), initial_state.float().clone()
    columns = q[..., None], k[:, :, None], v[0].float()[..., None], kept[:, :, None], betas[..., None, None]
    tokens = list(zip(*(one.unbind() for one in columns), strict=True))
    for request, (first, stop) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        state = states[request]
        for t in range(first, stop):
            state, read = _step(state, *tokens[t])
            out[0, t] = read[..., 0]
        states[request] = state
    return out, states


def _decode(
    mixed_qkv: torch.Tensor, raw_g: torch.Tensor, raw_beta: torch.Tensor, *, dt_bias: torch.Tensor,
    initial_state: torch.Tensor, state_indices: torch.Tensor, **named: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute like `fused_recurrent_kda_packed_decode`: one token of each request. The state is written in place."""
    blocks = state_indices.long()
    q, k, v = (one.view(1, len(blocks), *raw_g.shape[2:]) for one in mixed_qkv.chunk(3, -1))
    starts, states = torch.arange(len(blocks) + 1), initial_state[blocks]
    out, initial_state[blocks] = _prefill(
        q, k, v, raw_g, raw_beta, g_bias=dt_bias, initial_state=states, cu_seqlens=starts, **named
    )
    return out, initial_state
