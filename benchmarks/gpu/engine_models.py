"""Llama-shaped models that are created locally: one with random weights, and two of real sizes with dummy weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

SEED: Final = 0
WIDTH: Final = 0.1  # the weights' standard deviation is large, so that wrong KV changes greedy answers
EMBEDDING_WIDTH: Final = 1.0


class Shape(NamedTuple):
    """The size of a model."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    vocab: int
    dummy: bool  # vLLM creates dummy weights: answers are meaningless, and no weights are written

    @property
    def token_elements(self) -> int:
        """The number of elements of a token's KV in all layers."""
        return 2 * self.layers * self.kv_heads * self.head


SHAPES: Final = {
    "tiny": Shape(256, 512, 4, 4, 2, 64, 512, dummy=False),
    "mid": Shape(2048, 8192, 16, 32, 8, 64, 128_256, dummy=True),  # 1 B parameters
    "big": Shape(4096, 14_336, 32, 32, 8, 128, 128_256, dummy=True),  # 8 B parameters
}


def write_model(name: str, home: Path) -> Path:
    """Write the model of shape `name` into a folder of `home`, and return the folder."""
    shape, folder = SHAPES[name], home / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_config(shape)), encoding="utf-8")
    if not shape.dummy:
        from safetensors.torch import save_file

        save_file(_weights(shape), str(folder / "model.safetensors"))
    return folder


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head,
        "vocab_size": shape.vocab,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16" if shape.dummy else "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _weights(shape: Shape) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(SEED)

    def drawn(*size: int, width: float = WIDTH) -> torch.Tensor:
        return torch.randn(*size, generator=generator) * width

    queries, keys = shape.heads * shape.head, shape.kv_heads * shape.head
    weights = {
        "model.embed_tokens.weight": drawn(shape.vocab, shape.hidden, width=EMBEDDING_WIDTH),
        "lm_head.weight": drawn(shape.vocab, shape.hidden),
        "model.norm.weight": torch.ones(shape.hidden),
    }
    for layer in range(shape.layers):
        at = f"model.layers.{layer}"
        weights |= {
            f"{at}.self_attn.q_proj.weight": drawn(queries, shape.hidden),
            f"{at}.self_attn.k_proj.weight": drawn(keys, shape.hidden),
            f"{at}.self_attn.v_proj.weight": drawn(keys, shape.hidden),
            f"{at}.self_attn.o_proj.weight": drawn(shape.hidden, queries),
            f"{at}.mlp.gate_proj.weight": drawn(shape.inner, shape.hidden),
            f"{at}.mlp.up_proj.weight": drawn(shape.inner, shape.hidden),
            f"{at}.mlp.down_proj.weight": drawn(shape.hidden, shape.inner),
            f"{at}.input_layernorm.weight": torch.ones(shape.hidden),
            f"{at}.post_attention_layernorm.weight": torch.ones(shape.hidden),
        }
    return weights
