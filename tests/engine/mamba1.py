"""Mamba 1 on a CPU: vLLM's CPU build has its layers, blocks and moves of states, and lacks its two kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import silu, softplus


def lend_kernels(patch: pytest.MonkeyPatch) -> None:
    """Put the recurrence in torch in the place of vLLM's kernels, state for state."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.mamba import mamba_mixer

    multiply = _custom_ops.onednn_mm
    patch.setattr(_custom_ops, "selective_scan_fwd", _scan)
    patch.setattr(mamba_mixer, "selective_state_update", _update)
    patch.setattr(_custom_ops, "onednn_mm", lambda layer, x, bias: multiply(layer, x.contiguous(), bias))


def _step(state: torch.Tensor, x: torch.Tensor, delta: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return state * torch.exp(delta[:, None] * a) + (delta * x)[:, None] * b


def _scan(
    u: torch.Tensor, delta: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor,
    z: torch.Tensor, bias: torch.Tensor, _softplus: bool, starts: torch.Tensor, blocks: torch.Tensor,
    initial: torch.Tensor, states: torch.Tensor, null: int, *_: Any,
) -> None:  # fmt: skip
    """Prefill: `u`, `delta` and `z` are (channels, tokens), `b` and `c` (1, state, tokens); `z` becomes the output."""
    for request, block in enumerate(blocks.tolist()):
        if block == null:
            continue
        state = states[block] if bool(initial[request]) else torch.zeros_like(states[block])
        for t in range(int(starts[request]), int(starts[request + 1])):
            state = _step(state, u[:, t], softplus(delta[:, t] + bias), a, b[0, :, t])
            z[:, t] = ((state * c[0, :, t]).sum(1) + d * u[:, t]) * silu(z[:, t])
        states[block] = state


def _update(
    states: torch.Tensor, x: torch.Tensor, delta: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor,
    d: torch.Tensor, bias: torch.Tensor, *, z: torch.Tensor, state_batch_indices: torch.Tensor, out: torch.Tensor,
    dst_state_batch_indices: torch.Tensor, **_: Any,
) -> None:  # fmt: skip
    """Decode: one token of each request, (requests, channels)."""
    both = zip(state_batch_indices.flatten().tolist(), dst_state_batch_indices.flatten().tolist(), strict=True)
    for request, (block, target) in enumerate(both):
        state = _step(states[block], x[request], softplus(delta[request] + bias), a, b[request])
        states[target] = state
        out[request] = ((state * c[request]).sum(1) + d * x[request]) * silu(z[request])
