"""The two kernels that move recurrent states of drafts, in plain Python. VLLM's CPU build does not have these kernels.

Without these kernels an engine on a CPU fails in its first step, with or without kvpipe. Each function follows the
kernel of the same name in `vllm/v1/worker/mamba_utils.py`, decision by decision. vLLM's own registry replaces the
kernels.
"""

from __future__ import annotations

import ctypes
from typing import Any

from tests.engine.kernels import replace_kernels


class _States:
    """The places of recurrent states, from the kernels' arguments: one tensor per layer and kind of state."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        names = ("base_addrs", "block_strides", "elem_sizes", "inner_sizes", "conv_widths", "group_indices")
        columns = [arguments[f"state_{name}_ptr"].tolist() for name in names]
        rows = arguments["state_dim_row_count_ptr"].tolist(), arguments["state_dim_row_stride_ptr"].tolist()
        self._states = list(zip(*columns, *rows, strict=True))
        self._tables = [int(address) for address in arguments["block_table_ptrs_ptr"].tolist()]
        self._stride = int(arguments["block_table_stride_req"])
        self._dim_first = bool(arguments["CONV_STATE_DIM_FIRST"])

    def _block(self, group: int, request: int, column: int) -> int:
        """Return an entry of a block table of 32-bit numbers."""
        address = self._tables[group] + 4 * (request * self._stride + column)
        return ctypes.c_int32.from_address(address).value

    def copy(self, request: int, source: int, target: int, bias: int) -> None:
        """Copy all states of a request from one column of its tables to another.

        The copied state is the state after `bias` more accepted tokens.
        """
        for base, stride, size, inner, width, group, rows, row_stride in self._states:
            to = base + self._block(group, request, target) * stride
            if not width:  # each draft token has a state in a block of its own
                ctypes.memmove(to, base + self._block(group, request, source + bias) * stride, inner * size)
                continue
            start = base + self._block(group, request, source) * stride
            if self._dim_first:
                for row in range(rows):
                    at = row * row_stride
                    ctypes.memmove(to + at, start + at + bias * size, (width - bias) * size)
            else:
                ctypes.memmove(to, start + bias * inner * size, (width - bias) * inner * size)


def _precopy(**a: Any) -> None:
    states, target, source = _States(a), a["mamba_state_idx_ptr"].tolist(), a["src_col_ptr"].tolist()
    bias, requests = a["token_bias_ptr"].tolist(), range(int(a["num_reqs"]))
    for request in requests if a["idx_mapping_ptr"] is None else a["idx_mapping_ptr"].tolist():
        if request >= 0 and 0 <= source[request] != target[request]:
            states.copy(request, source[request], target[request], bias[request])


def _postprocess(**a: Any) -> None:
    states, size, out = _States(a), int(a["block_size"]), a["num_accepted_tokens_out_ptr"]
    accepted, column = a["num_accepted_tokens_ptr"].tolist(), a["mamba_state_idx_ptr"].tolist()
    computed, requests = a["num_computed_tokens_ptr"].tolist(), range(int(a["num_reqs"]))
    done = a.get("PRECOMPUTED_NEW_COMPUTED", False)
    scheduled, drafts = (a[f"num_{what}_tokens_ptr"] for what in ("scheduled", "draft"))
    for request in requests if a["idx_mapping_ptr"] is None else a["idx_mapping_ptr"].tolist():
        if request < 0:
            continue
        if done:
            first, new = computed[request] - accepted[request] + 1, computed[request]
        else:
            first = computed[request] + int(scheduled[request]) - int(drafts[request])
            new = first + accepted[request] - 1
        boundary = new // size * size
        if boundary < first:
            continue
        target, bias = boundary // size - 1, boundary - first
        if target == column[request]:
            out[request] = 1
        if target != column[request] or bias:
            states.copy(request, column[request], target, bias)


def _by_name(kernel: str, run: Any) -> Any:
    """Return `run` as a function that also accepts positional arguments."""
    from vllm.v1.worker import mamba_utils

    made = getattr(mamba_utils, kernel)
    names = tuple(made.arg_names) if hasattr(made, "arg_names") else _names(made)

    def launched(*args: Any, **named: Any) -> None:
        run(**dict(zip(names, args, strict=False)), **named)

    return launched


def _names(kernel: Any) -> tuple[str, ...]:
    import inspect

    return tuple(inspect.signature(getattr(kernel, "func", kernel)).parameters)


def register() -> None:
    """Register the kernels. Further calls in the same process do nothing."""
    kernels = {"precopy_mamba_align_fused_kernel": _precopy, "postprocess_mamba_fused_kernel": _postprocess}
    replace_kernels({f"vllm.v1.worker.mamba_utils.{name}": _by_name(name, run) for name, run in kernels.items()})
