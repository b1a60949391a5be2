"""Prompts with sound: KV of a recording is never found for another recording, although the placeholders are equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvpipe.connectors.vllm.tiny.engine import Engine
from kvpipe.connectors.vllm.tiny.models import VOCAB, make_tokenizer
from tests.engine.common import BLOCK, assert_clean, prompt, starts_on_every_processor, whole_blocks

pytestmark = pytest.mark.engine

SPECIAL = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
AUDIO, BEGIN, END = range(VOCAB - len(SPECIAL), VOCAB)
RATE, SECONDS = 16_000, 4
HEAD = 3 * BLOCK
"""The number of tokens before the recording: three blocks. The last of these tokens marks the recording's begin."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a small Qwen2-Audio with random weights, its tokenizer and its processor."""
    from transformers import (
        AutoTokenizer,
        Qwen2AudioConfig,
        Qwen2AudioForConditionalGeneration,
        Qwen2AudioProcessor,
        WhisperFeatureExtractor,
    )

    folder = make_tokenizer(tmp_path_factory.mktemp("audio") / "model", SPECIAL)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    Qwen2AudioProcessor(WhisperFeatureExtractor(feature_size=128), tokenizer).save_pretrained(folder)
    text = {
        "model_type": "qwen2",
        "vocab_size": VOCAB,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "initializer_range": 0.12,
        "max_position_embeddings": 1024,
    }
    sound = {
        "d_model": 64,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "initializer_range": 0.12,
    }
    torch.manual_seed(0)
    config = Qwen2AudioConfig(audio_config=sound, text_config=text, audio_token_index=AUDIO)
    Qwen2AudioForConditionalGeneration(config).float().save_pretrained(folder)
    # "model." occurs once instead of twice in these tensor names, which transformers accepts too
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name.replace(".model.model.", ".model."): w for name, w in weights.items()}, folder / "model.safetensors"
    )
    return folder


def _recording(seed: int) -> dict[str, Any]:
    return {"audio": [(np.random.default_rng(seed).standard_normal(RATE * SECONDS).astype(np.float32), RATE)]}


def test_another_recording_hits_only_the_text_before_it(model: Path) -> None:
    """Tokens and placeholders are equal, but the sound differs.

    Only the text before the sound is loaded, and the answer is right.
    """
    asked = [*prompt(HEAD - 1, 91), BEGIN, AUDIO, END, *prompt(60, 92)]
    sounds = [_recording(1), _recording(1), _recording(2)]
    options: dict[str, Any] = {"skip_tokenizer_init": False, "enable_prefix_caching": False}

    def answers(live: Engine) -> list[tuple[int, ...]]:
        return [tuple(live.generate([asked], 16, media=sound)[0]) for sound in sounds]

    plain = Engine(str(model), **options)
    try:
        expected = answers(plain)
    finally:
        plain.close()
    assert len(set(expected)) == 2, "the model must hear"
    live = Engine(str(model), kvpipe={"chunk_tokens": BLOCK}, **options)
    try:
        starts_on_every_processor(model, {"chunk_tokens": BLOCK}, options)
        loaded = []
        for sound, answer in zip(sounds, expected, strict=True):
            assert tuple(live.generate([asked], 16, media=sound)[0]) == answer
            loaded.append(assert_clean(live).get("tokens_loaded", 0))
        tokens = len(asked) - 1 + RATE * SECONDS // 160 // 4
        assert loaded == [0, whole_blocks(live, tokens), whole_blocks(live, tokens) + HEAD]
    finally:
        live.close()
