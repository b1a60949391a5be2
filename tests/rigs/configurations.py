"""Configurations of small models without weights: vLLM makes random weights (`load_format="dummy"`)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from kvpipe.connectors.vllm.tiny.models import BASE, QWEN3_NEXT, cache_dir

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    # Three layers, each with a window. The first has only the window, the second also a state per 4 tokens and an
    # indexer, the third also a state per 128 tokens.
    "deepseek-v4": {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "q_lora_rank": 128,
        "qk_rope_head_dim": 64,
        "moe_intermediate_size": 32,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "num_hash_layers": 0,
        "norm_topk_prob": True,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "expert_dtype": "bf16",
        "o_groups": 2,
        "o_lora_rank": 64,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "hc_mult": 4,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20,
        "compress_ratios": [1, 4, 128],
        "sliding_window": 128,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    },
    # like "qwen3-next", but with Kimi delta attention instead of gated delta nets; see `tests/engine/kda.py`
    "qwen3-next-kda": {
        **QWEN3_NEXT,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "linear_attn_config": {
            "num_heads": 2,
            "head_dim": 64,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
        },
    },
}
"""Configurations, in vLLM's form, of models that transformers cannot make. The models' weights are random."""


def make_configuration(recipe: str) -> Path:
    """Write the configuration of `recipe` and return its folder, which holds no weights."""
    target = cache_dir() / f"{recipe}-configuration"
    target.mkdir(parents=True, exist_ok=True)
    text = json.dumps(BASE | CONFIGURATIONS[recipe])
    if not (file := target / "config.json").is_file() or file.read_text() != text:
        (fresh := target / f"config.{os.getpid()}").write_text(text)
        fresh.replace(file)
    return target
