"""Mamba 1 on a CPU. vLLM's CPU build has the layers, blocks and moves of states, but not the two kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import silu, softplus


def lend_kernels(patch: pytest.MonkeyPatch) -> None:
    """Replace vLLM's kernels by the recurrence in torch, state for state."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.mamba import mamba_mixer

    multiply = _custom_ops.onednn_mm
    patch.setattr(_custom_ops, "selective_scan_fwd", _scan)
    patch.setattr(mamba_mixer, "selective_state_update", _update)
    patch.setattr(_custom_ops, "onednn_mm", lambda layer, x, bias: multiply(layer, x.contiguous(), bias))


def _terms(x: torch.Tensor, delta: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the share of a state that each token keeps, and the part that the token adds.

    Both are (tokens, channels, state).
    """
    return torch.exp(delta[..., None] * a), (delta * x)[..., None] * b[:, None]


def _read(state: torch.Tensor, c: torch.Tensor, x: torch.Tensor, d: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Return the outputs of tokens from the state after each token. The outputs are (tokens, channels)."""
    out: torch.Tensor = ((state * c[:, None]).sum(-1) + d * x) * silu(z)
    return out


def _scan(
    u: torch.Tensor, delta: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor,
    z: torch.Tensor, bias: torch.Tensor, _softplus: bool, starts: torch.Tensor, blocks: torch.Tensor,
    initial: torch.Tensor, states: torch.Tensor, null: int, *_: Any,
) -> None:  # fmt: skip
    """Compute a prefill. `u`, `delta` and `z` are (channels, tokens), `b` and `c` are (1, state, tokens).

    The output is written into `z`.
    """
    for request, block in enumerate(blocks.tolist()):
        if block == null:
            continue
        state = states[block] if bool(initial[request]) else torch.zeros_like(states[block])
        mine = slice(int(starts[request]), int(starts[request + 1]))
        x, after = u[:, mine].T, []
        for kept, added in zip(*_terms(x, softplus(delta[:, mine].T + bias), a, b[0, :, mine].T), strict=True):
            state = state * kept + added
            after.append(state)
        if after:
            z[:, mine] = _read(torch.stack(after), c[0, :, mine].T, x, d, z[:, mine].T).T
        states[block] = state


def _update(
    states: torch.Tensor, x: torch.Tensor, delta: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor,
    d: torch.Tensor, bias: torch.Tensor, *, z: torch.Tensor, state_batch_indices: torch.Tensor, out: torch.Tensor,
    dst_state_batch_indices: torch.Tensor, **_: Any,
) -> None:  # fmt: skip
    """Decode one token of each request. Tensors are (requests, channels)."""
    kept, added = _terms(x, softplus(delta + bias), a, b)
    state = states[state_batch_indices.flatten().long()] * kept + added
    states[dst_state_batch_indices.flatten().long()] = state
    out.copy_(_read(state, c, x, d, z))
