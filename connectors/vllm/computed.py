"""Settings by which equal weights make other KV, of which nothing is seen in weights, configuration or caches.

Experts that nobody has asked for, activations and queries in another precision, another order within a block. Settings
that choose among kernels for the same computation are none of these: their results differ as those of any two kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from vllm import envs

if TYPE_CHECKING:
    from vllm.config import VllmConfig

USUAL: Final[dict[str, object]] = {
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "",
    "VLLM_MARLIN_INPUT_DTYPE": None,
    "VLLM_HUMMING_INPUT_QUANT_CONFIG": None,
    "VLLM_B12X_MOE_FP4_FORCE_A16": False,
    "VLLM_CPU_INT4_W4A8": True,
    "VLLM_FLOAT32_MATMUL_PRECISION": "highest",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "NONE",
    "VLLM_ROCM_USE_AITER_FP8BMM": True,
    "VLLM_ROCM_USE_AITER_FP4BMM": True,
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE": False,
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT": False,
}
"""Such variables of vLLM's, and their defaults."""


def otherwise(config: VllmConfig) -> dict[str, str]:
    """Return, as plain data, by which settings KV is not the usual. Empty: by none."""
    values = {name: getattr(envs, name) for name in USUAL}
    found = {name: str(value) for name, value in values.items() if value != USUAL[name]}
    attention = config.attention_config
    if attention.use_prefill_query_quantization or attention.disable_flashinfer_q_quantization:
        queries = attention.use_prefill_query_quantization, attention.disable_flashinfer_q_quantization
        found["queries"] = str(queries)
    return found
