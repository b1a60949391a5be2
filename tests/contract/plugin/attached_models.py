"""The models that vLLM's tests of its scheduler name, as folders with only the files that a scheduler reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

IMAGES = "KVPipeImages"
"""Architecture of the models of text and images: the plugin registers this architecture."""

_OPT: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "vocab_size": 50272, "hidden_size": 768, "ffn_dim": 3072,
    "num_hidden_layers": 12, "num_attention_heads": 12, "max_position_embeddings": 2048, "word_embed_proj_dim": 768,
    "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1, "torch_dtype": "float16",
}  # fmt: skip
_LLAVA: dict[str, Any] = {
    "architectures": [IMAGES], "model_type": "llava", "image_token_index": 32000, "pad_token_id": 32001,
    "text_config": {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064},
    "vision_config": {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14, "projection_dim": 768},
    "torch_dtype": "float16",
}  # fmt: skip
_QWEN_VL: dict[str, Any] = {
    "architectures": [IMAGES], "model_type": "qwen2_5_vl", "hidden_size": 2048, "intermediate_size": 11008,
    "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151936,
    "max_position_embeddings": 128000, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vision_config": {"model_type": "qwen2_5_vl", "out_hidden_size": 2048, "patch_size": 14}, "torch_dtype": "float16",
}  # fmt: skip

_QWEN_NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_hidden_layers": 4, "hidden_size": 64,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 1024, "torch_dtype": "float16",
}  # fmt: skip

MODELS = {
    "facebook/opt-125m": _OPT,
    "facebook/opt-350m": _OPT,
    "llava-hf/llava-1.5-7b-hf": _LLAVA,
    "Qwen/Qwen2.5-VL-3B-Instruct": _QWEN_VL,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": _QWEN_NEXT,
}


def write(root: Path) -> None:
    """Make a folder for each model under `root`. The folder's path is the model's name."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    for name, config in MODELS.items():
        folder = root / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        Tokenizer(WordLevel({"a": 0, "?": 1}, unk_token="?")).save(str(folder / "tokenizer.json"))  # noqa: S106
        (folder / "tokenizer_config.json").write_text(
            '{"tokenizer_class": "PreTrainedTokenizerFast"}', encoding="utf-8"
        )
