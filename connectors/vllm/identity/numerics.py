"""Digests how a rank computes: the variables of libraries, the switches of torch, and measured results.

These facts are not in vLLM's configuration. An engine may change some of them while it starts, so a rank reads them
when it makes its first report.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from kvpipe.trace.log import info

LIBRARIES: Final = (
    "ONEDNN_", "DNNL_", "MKL_", "ZENDNN_", "OPENBLAS_", "CUBLAS_", "CUBLASLT_", "CUDNN_", "HIPBLASLT_", "ROCBLAS_",
    "MIOPEN_", "TORCHINDUCTOR_", "TRITON_", "PYTORCH_TUNABLEOP_",
)  # fmt: skip
"""Prefixes of the variables that set how libraries compute: precision, instruction set, kernels, workspaces."""

NAMES: Final = frozenset(
    {
        "ATEN_CPU_CAPABILITY",  # the instruction set of torch's own kernels
        "DISABLE_ADDMM_CUDA_LT",  # cuBLAS in place of cuBLASLt
        "NVIDIA_TF32_OVERRIDE",  # TF32 in all of NVIDIA's libraries
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",  # TF32 in matrix products of float32
        "TORCH_BLAS_PREFER_CUBLASLT",
        "TORCH_BLAS_PREFER_HIPBLASLT",
    }
)
"""More variables that set how libraries compute. Other variables with the same prefixes do not change results."""

IGNORED: Final[dict[str, frozenset[str]]] = {
    "It configures logs, profiles and dumps.": frozenset(
        {"VERBOSE", "LOG", "LOGS", "LOGINFO", "LOGDEST", "LOGLEVEL", "DEBUG", "DUMP", "PROFILE", "PROFILING", "ITT",
         "TRACE", "PRINT"}
    ),
    "It names a place, a cache or a version.": frozenset(
        {"CACHE", "DIR", "PATH", "HOME", "ROOT", "FILENAME", "VERSION", "CAPACITY"}
    ),
    "It configures threads. Their number is left out of the key (decision 34).": frozenset(
        {"THREADS", "THREADING", "DYNAMIC"}
    ),
}  # fmt: skip
"""By reason, words in the names of variables that do not change results."""

_ROWS, _INNER, _OUTER = 48, 256, 512
"""The sizes of the matrices that `measured` multiplies.

A sum of `_INNER` products is too short to be divided among threads.
"""
_GEMM_BYTES_MIN: Final = 2 << 20
"""The least size of the weight that `measured` multiplies on a CPU. For smaller weights, vLLM uses another kernel."""


def variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of libraries that may change results. An empty variable counts as not set."""
    ignored = frozenset[str]().union(*IGNORED.values())
    return {
        name: value
        for name, value in sorted(environment.items())
        if value and (name in NAMES or (name.startswith(LIBRARIES) and not ignored & {*name.split("_")}))
    }


_SWITCHES: Final[dict[str, Callable[[], object]]] = {
    "deterministic": torch.are_deterministic_algorithms_enabled,
    "precision": torch.get_float32_matmul_precision,
    "cuda.matmul.fp16_reduction": lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    "cuda.matmul.bf16_reduction": lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    "cuda.matmul.fp16_accumulation": lambda: torch.backends.cuda.matmul.allow_fp16_accumulation,
    "cuda.blas": torch.backends.cuda.preferred_blas_library,
    "cuda.sdp.flash": torch.backends.cuda.flash_sdp_enabled,
    "cuda.sdp.mem_efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
    "cuda.sdp.math": torch.backends.cuda.math_sdp_enabled,
    "cuda.sdp.cudnn": torch.backends.cuda.cudnn_sdp_enabled,
    "cuda.sdp.reduction": torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed,
    "cudnn.enabled": lambda: torch.backends.cudnn.enabled,
    "cudnn.benchmark": lambda: torch.backends.cudnn.benchmark,
    "cudnn.deterministic": lambda: torch.backends.cudnn.deterministic,
    "mkldnn.enabled": lambda: torch.backends.mkldnn.enabled,
    "mkldnn.deterministic": lambda: torch.backends.mkldnn.deterministic,
}
_FLOAT32: Final = [("generic", "all")] + [
    (backend, op) for backend in ("cuda", "mkldnn") for op in ("all", "matmul", "conv", "rnn")
]
"""The (backend, operation) pairs for which torch has a precision of float32 products: TF32, bfloat16, or IEEE."""


def switches() -> dict[str, str]:
    """Return torch's switches that change results. The value of a switch that this torch lacks is the error's name."""
    asked = _SWITCHES | {
        f"float32.{backend}.{op}": lambda backend=backend, op=op: torch._C._get_fp32_precision_getter(backend, op)  # noqa: SLF001
        for backend, op in _FLOAT32
    }
    return {name: str(_outcome(ask)) for name, ask in asked.items()}


def _outcome(compute: Callable[[], object]) -> object:
    try:
        return compute()
    except Exception as error:  # noqa: BLE001  (equal engines raise equal errors)
        return type(error).__name__


def measured(device: torch.device, dtypes: Iterable[torch.dtype]) -> str:
    """Return a digest of the results of a few fixed operations on `device`. Takes milliseconds, draws no random number.

    The digest does not depend on the number of threads, because one thread computes each result as a short sum.
    """
    digest = hashlib.sha256()
    with torch.inference_mode():
        for dtype in sorted({*dtypes, torch.float32}, key=str):
            for name, compute in _operations(device, dtype):
                found = _outcome(compute)
                data = _bytes(found) if isinstance(found, torch.Tensor) else str(found).encode()
                digest.update(f"{name} {dtype} {len(data)} ".encode() + data)
    return digest.hexdigest()[:32]


def _operations(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    outer = max(_OUTER, _GEMM_BYTES_MIN // (_INNER * dtype.itemsize)) if device.type == "cpu" else _OUTER
    rows, weight = _fixed((_ROWS, _INNER), 1, device, dtype), _fixed((outer, _INNER), 2, device, dtype)
    yield "linear", lambda: _linear(rows, weight)
    yield "matmul", lambda: torch.matmul(rows, weight[:_OUTER].t())
    yield "softmax", lambda: torch.softmax(rows * 8, dim=-1)
    yield "norm", lambda: torch.nn.functional.rms_norm(rows, (_INNER,), weight[0], 1e-6)
    yield "silu", lambda: torch.nn.functional.silu(rows * 8)
    yield "tiny", lambda: rows * torch.finfo(dtype).smallest_normal  # shows whether subnormal numbers are flushed to 0


def _linear(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply with the kernel that vLLM's layers use. On a CPU this is vLLM's own kernel."""
    if rows.device.type != "cpu":
        return torch.nn.functional.linear(rows, weight)
    layer: Any = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    product: torch.Tensor = layer.cpu_linear(rows, layer.weight, None)
    return product


def _fixed(shape: tuple[int, int], seed: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers from -0.5 to 0.5 that are equal on every machine, because they are computed from integers."""
    at = np.arange(shape[0] * shape[1], dtype=np.uint32)
    mixed = at * np.uint32(2654435761) + np.uint32(seed * 40503)  # modulo 2**32
    return torch.from_numpy(mixed / float(1 << 32) - 0.5).to(dtype).reshape(shape).to(device)


def _bytes(found: torch.Tensor) -> bytes:
    return found.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def numerics_digest(devices: Iterable[torch.device], dtypes: Iterable[torch.dtype]) -> str:
    """Return a digest of how this rank computes now, and log the digest's parts."""
    set_, kinds = variables(), list(dtypes)
    found = {str(device.type): measured(device, kinds) for device in devices}
    how = switches()
    switched = hashlib.sha256(repr(sorted(how.items())).encode()).hexdigest()[:8]
    info("numerics", variables=" ".join(f"{name}={value}" for name, value in set_.items()), switches=switched,
         measured=" ".join(f"{kind}:{one[:8]}" for kind, one in sorted(found.items())))  # fmt: skip
    facts = sorted(set_.items()), sorted(how.items()), sorted(found.items())
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
