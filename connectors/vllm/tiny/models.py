"""Makes small models with random weights locally, without downloads.

Weights have a large standard deviation (`initializer_range` 0.12), so that greedy outputs vary from token to token and
a single wrong KV value changes the output. In float32 the outputs are bit-equal with and without batching, chunked
prefill, preemption and drafts.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

VOCAB = 512
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 16384,
    "initializer_range": 0.12,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

TOKEN_BYTES = 2 * 4 * BASE["num_hidden_layers"] * BASE["num_key_value_heads"] * BASE["head_dim"]
"""The bytes of one token's KV in the model "llama", in float32."""

_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 16, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 32,
}  # fmt: skip

QWEN3_NEXT: dict[str, Any] = {
    "num_hidden_layers": 4, "layer_types": [*["linear_attention"] * 3, "full_attention"], "linear_num_value_heads": 2,
    "linear_num_key_heads": 2, "linear_key_head_dim": 64, "linear_value_head_dim": 64, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
}  # fmt: skip

RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-mha": ("Llama", {"num_key_value_heads": 8, "num_hidden_layers": 4}),
    "mistral-sw": ("Mistral", {"sliding_window": 128}),
    "gemma2-hybrid": (
        "Gemma2",
        {
            "num_hidden_layers": 6,
            "tie_word_embeddings": True,
            "sliding_window": 128,
            "query_pre_attn_scalar": 32,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
        },
    ),
    # The rotary factors depend on the engine's longest prompt: the long factors are used above 512 tokens.
    "phi3-longrope": (
        "Phi3",
        {
            "max_position_embeddings": 2048,
            "original_max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 16,
                "long_factor": [4.0] * 16,
            },
        },
    ),
    # A prefix-LM: the tokens of a prompt attend to each other in both directions.
    "prefix-lm": (
        "HrmText",
        {"num_hidden_layers": 2, "H_cycles": 1, "L_cycles": 2, "num_key_value_heads": 8, "embedding_scale": 1.0},
    ),
    "deepseek-mla": (
        "DeepseekV2",
        {
            "num_key_value_heads": 8,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "head_dim": 64,
            "num_hidden_layers": 3,
            "first_k_dense_replace": 3,
            "n_routed_experts": 8,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    # Hybrids of attention and Mamba 2. granite-hybrid has separate Mamba layers, falcon-h1 has both in every layer.
    "granite-hybrid": (
        "GraniteMoeHybrid",
        {
            "num_hidden_layers": 4,
            "layer_types": ["mamba", "attention", "mamba", "mamba"],
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 512,
            "tie_word_embeddings": True,
            "position_embedding_type": "rope",
            **_MAMBA2,
        },
    ),
    "falcon-h1": ("FalconH1", {"num_hidden_layers": 3, "mamba_d_ssm": 512, **_MAMBA2}),
    # A hybrid of attention and Mamba 1.
    "jamba": (
        "Jamba",
        {
            "num_hidden_layers": 4,
            "attn_layer_period": 4,
            "attn_layer_offset": 2,
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": 16,
            "use_mamba_kernels": False,
        },
    ),
    # The last two layers read the KV that an earlier layer of the same type has cached.
    "gemma3n": (
        "Gemma3nText",
        {
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "sliding_window": 128,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 32,
            "laurel_rank": 16,
            "activation_sparsity_pattern": [0.0] * 6,
            "altup_num_inputs": 2,
            "intermediate_size": [512] * 6,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
        },
    ),
    # A hybrid of attention and short convolutions.
    "lfm2": (
        "Lfm2",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "block_auto_adjust_ff_dim": False,
            "conv_dim": 256,  # vLLM reads these two keys, which transformers does not set
            "block_dim": 256,
        },
    ),
    # A hybrid of attention and gated delta nets.
    "qwen3-next": ("Qwen3Next", QWEN3_NEXT),
    # The model qwen3-next with an MTP module that drafts. Each token depends mostly on the token before it, so that
    # some drafts are accepted.
    "qwen3-next-mtp": ("Qwen3Next", {**QWEN3_NEXT, "num_nextn_predict_layers": 1}),
    # Three layers of chunked local attention, and a layer of full attention without positions.
    "llama4": (
        "Llama4Text",
        {
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 512,
            "moe_layers": [],
            "interleave_moe_layer_step": 0,
            "num_local_experts": 2,
            "attention_chunk_size": 128,
            "no_rope_layers": [1, 1, 1, 0],
        },
    ),
    # A mixture of experts.
    "qwen3-moe": (
        "Qwen3Moe",
        {"num_hidden_layers": 3, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
    # A model with an MTP module after its layers, which drafts.
    "mimo-mtp": (
        "Qwen2",
        {"num_hidden_layers": 3, "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1},
    ),
    "demo": (
        "Llama",
        {
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_hidden_layers": 8,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "initializer_range": 0.085,
        },
    ),
    # A realistic ratio of KV to compute: 4 KiB per token for 120 million weights, twice the ratio of Llama-3-8B in
    # bfloat16.
    "serving": (
        "Llama",
        {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 8,
            "num_attention_heads": 16,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "initializer_range": 0.05,
        },
    ),
    # As small as a model can be, so that a step's time is the time of vLLM's and kvpipe's own code.
    "soak": (
        "Llama",
        {
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
        },
    ),
    # Four query heads per KV head, as in Llama 3.1. KV is 4 KiB per token; one core computes thousands of tokens/s.
    "agents": (
        "Llama",
        {
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
        },
    ),
    # A realistic KV size with little compute: 16 layers x 2 (K and V) x 8 heads x 128 x 4 bytes = 128 KiB per token.
    "big-kv": (
        "Llama",
        {
            "hidden_size": 512,
            "intermediate_size": 512,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "initializer_range": 0.085,
        },
    )}  # fmt: skip


def cache_dir() -> Path:
    """Return the folder in which models are kept between runs, under the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvpipe" / "models"


def make_tokenizer(folder: Path | None = None, special: Sequence[str] = ()) -> Path:
    """Make a tokenizer and return its folder. Token `i` is the word ``ti``; the last tokens are the `special` words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    target = folder or cache_dir() / "tokenizer"
    if not (target / "tokenizer.json").is_file():
        words = [*(f"t{i}" for i in range(VOCAB - len(special))), *special]
        tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="t0"))  # noqa: S106
        tokenizer.pre_tokenizer = WhitespaceSplit()
        made = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token="t1", eos_token="t2", pad_token="t0",  # noqa: S106
            additional_special_tokens=list(special),
        )  # fmt: skip
        with tempfile.TemporaryDirectory(dir=target.parent) as work:
            made.save_pretrained(work)
            target.mkdir(exist_ok=True)
            for path in Path(work).iterdir():
                path.replace(target / path.name)
    return target


def make_model(recipe: str) -> Path:
    """Make the model of `recipe` unless it exists, and return its folder. Several processes may call this at once."""
    import transformers

    family, changes = RECIPES[recipe]
    wanted = {"recipe": recipe, "family": family, **BASE, **changes}
    home = cache_dir()
    home.mkdir(parents=True, exist_ok=True)
    target = home / recipe
    with (home / f"{recipe}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp = target / "recipe.json"
        if stamp.is_file() and json.loads(stamp.read_text()) == wanted:
            return target
        import torch

        generator_state = torch.random.get_rng_state()
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**BASE | changes)
        named = family if hasattr(transformers, f"{family}ForCausalLM") else family.removesuffix("Text")
        model = getattr(transformers, f"{named}ForCausalLM")(config).float()
        with tempfile.TemporaryDirectory(dir=home) as work:
            model.save_pretrained(work)
            if "num_nextn_predict_layers" in changes:
                (_add_mtp_layers if family == "Qwen3Next" else _add_mtp_module)(Path(work), changes)
            (Path(work) / "recipe.json").write_text(json.dumps(wanted))
            target.mkdir(exist_ok=True)
            for path in Path(work).iterdir():
                path.replace(target / path.name)
        torch.random.set_rng_state(generator_state)
    return target


def make_drafter(method: str, folder: Path) -> Path:
    """Write a random drafter for the model "llama" into `folder`. `method` is eagle, eagle3 or dflash."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((make_model("llama") / "config.json").read_text()) | {"num_hidden_layers": 1}
    width, ones = BASE["hidden_size"], torch.ones(BASE["hidden_size"])
    if method == "eagle":
        tensors = {"fc.weight": _random(width, 2 * width), **_decoder_layer("layers.0.", width)}
        tensors.pop("layers.0.input_layernorm.weight")
    elif method == "dflash":
        config |= {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 2}
        config["dflash_config"] = {"mask_token_id": VOCAB - 1, "target_layer_ids": [0, 1, 2]}
        heads = {f"self_attn.{name}.weight": torch.ones(BASE["head_dim"]) for name in ("q_norm", "k_norm")}
        tensors = {"fc.weight": _random(width, 3 * width), "hidden_norm.weight": ones, "norm.weight": ones.clone()}
        for at in (0, 1):
            tensors |= _decoder_layer(f"layers.{at}.", width)
            tensors |= {f"layers.{at}.{name}": tensor.clone() for name, tensor in heads.items()}
    else:
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VOCAB}
        config["eagle_aux_hidden_state_layer_ids"] = [1, 2, 3]
        tensors = {"fc.weight": _random(width, 3 * width), **_decoder_layer("midlayer.", 2 * width)}
        tensors |= {
            "midlayer.hidden_norm.weight": ones,
            "norm.weight": ones.clone(),
            "lm_head.weight": _random(VOCAB, width),
        }
    save_file(tensors, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _add_mtp_module(folder: Path, changes: dict[str, Any]) -> None:
    """Add an MTP module to a saved model, with the tensor names of MiMo's checkpoints."""
    import torch
    from safetensors.torch import load_file, save_file

    width, prefix, file = BASE["hidden_size"], "model.mtp_layers.0.", str(folder / "model.safetensors")
    tensors = load_file(file) | _decoder_layer(prefix, width, bias=True)
    tensors |= {f"{prefix}{name}.weight": torch.ones(width) for name in ("token_layernorm", "hidden_layernorm")}
    tensors |= {f"{prefix}final_layernorm.weight": torch.ones(width)}
    tensors |= {f"{prefix}input_proj.weight": _random(width, 2 * width)}
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def _add_mtp_layers(folder: Path, changes: dict[str, Any]) -> None:
    """Add an MTP module, a copy of the last layer, to a saved model, with the tensor names of Qwen3-Next."""
    import torch
    from safetensors.torch import load_file, save_file

    width, file = BASE["hidden_size"], str(folder / "model.safetensors")
    tensors = load_file(file)
    words = _random(VOCAB, width) / BASE["initializer_range"]
    tensors["model.embed_tokens.weight"] = words
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1.5 * words.roll(1, 0)  # mostly predicts the next word
    last = f"model.layers.{QWEN3_NEXT['num_hidden_layers'] - 1}."
    layer = {name.removeprefix(last): tensor for name, tensor in tensors.items() if name.startswith(last)}
    tensors |= {f"mtp.layers.0.{name}": tensor.clone() for name, tensor in layer.items()}
    tensors["mtp.fc.weight"] = torch.cat((8 * torch.eye(width), _random(width, width) / 6), dim=1)
    norms = ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
    tensors |= {f"mtp.{name}.weight": torch.zeros(width) for name in norms}
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def _decoder_layer(prefix: str, width: int, *, bias: bool = False) -> dict[str, torch.Tensor]:
    """Return the tensors of a decoder layer with the sizes of `BASE`, whose attention reads `width` values."""
    import torch

    hidden, inner, heads = BASE["hidden_size"], BASE["intermediate_size"], BASE["head_dim"]
    queries, keys = heads * BASE["num_attention_heads"], heads * BASE["num_key_value_heads"]
    attention = {"q_proj": (queries, width), "k_proj": (keys, width), "v_proj": (keys, width)}
    shapes = {f"self_attn.{name}": shape for name, shape in attention.items()}
    shapes |= {"self_attn.o_proj": (hidden, queries), "mlp.gate_proj": (inner, hidden)}
    shapes |= {"mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    tensors = {f"{prefix}{name}.weight": _random(*shape) for name, shape in shapes.items()}
    for norm in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{prefix}{norm}.weight"] = torch.ones(hidden)
    if bias:
        tensors |= {f"{prefix}self_attn.{name}.bias": _random(shape[0]) for name, shape in attention.items()}
    return tensors


def _random(*shape: int) -> torch.Tensor:
    """Return random values that depend only on the shape."""
    import torch

    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * BASE["initializer_range"]


def make_adapter(folder: Path, seed: int) -> Path:
    """Write a random LoRA adapter for "llama" into `folder`. All adapters' files have equal sizes and times."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(BASE["num_hidden_layers"]):
        for name, out in (("q_proj", 256), ("v_proj", 128)):
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(8, 256, generator=generator) * 0.2
            tensors[f"{key}.lora_B.weight"] = torch.randn(out, 8, generator=generator) * 0.2
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    for path in folder.iterdir():
        os.utime(path, (1_700_000_000, 1_700_000_000))
    return folder
