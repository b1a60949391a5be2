"""Prompts with images: KV after an image is found only for the same image, prepared in the same way."""

from __future__ import annotations

import json
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from kvpipe.connectors.vllm.tiny.engine import Engine
from kvpipe.connectors.vllm.tiny.models import VOCAB, make_tokenizer
from tests.engine.common import BLOCK, assert_clean, patient, prompt, starts_on_every_processor

pytestmark = pytest.mark.engine

SPECIAL = ("<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<image>")
IMAGE = VOCAB - 1
SIDE, PATCH, SCALE = 112, 7, 2
TOKENS = (SIDE // PATCH // SCALE) ** 2 + 3
"""The 67 tokens that one image takes in a prompt, including the markers around the image."""
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": False,
    "enable_prefix_caching": False,
    "limit_mm_per_prompt": {"image": 2},
}
UNIT = BLOCK
LEAD, BETWEEN, END = prompt(3 * UNIT, 61), prompt(50, 62), prompt(60, 63)
ONE = [*LEAD, IMAGE, *END]
TWO = [*LEAD, IMAGE, *BETWEEN, IMAGE, *END]
"""The second image begins and ends within blocks."""


_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "initializer_range": 0.12,
    "max_position_embeddings": 1024,
}
_SIGHT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": PATCH,
    "initializer_range": 0.12,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small Idefics3 with random weights and a tokenizer. Its processor needs no torchvision."""
    from transformers import (
        AutoTokenizer,
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessorPil,
        Idefics3Processor,
    )

    folder = make_tokenizer(tmp_path_factory.mktemp("image") / "model", SPECIAL)
    side = {"longest_edge": SIDE}
    Idefics3Processor(
        Idefics3ImageProcessorPil(size=side, max_image_size=side, do_image_splitting=False),
        AutoTokenizer.from_pretrained(folder),
        image_seq_len=(SIDE // PATCH // SCALE) ** 2,
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = Idefics3Config(
        vision_config=_SIGHT,
        text_config={"model_type": "llama", "num_hidden_layers": 3} | _TEXT,
        image_token_id=IMAGE,
        scale_factor=SCALE,
        pad_token_id=0,
    )
    Idefics3ForConditionalGeneration(config).float().save_pretrained(folder)
    return folder


GEMMA_SPECIAL = ("\n", "\n\n", "\n\n\n", "\n\n\n\n", "<boi>", "<eoi>", "<image>")
BEGIN = VOCAB - 3
"""The processor of Gemma replaces this token of a prompt by an image.

An image is 64 tokens between two markers, with a token of two line ends on each side.
"""
GEMMA_TOKENS = (SIDE // PATCH // SCALE) ** 2 + 4


@pytest.fixture
def gemma(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a small Gemma 3 with random weights.

    Some layers see a window, the other layers all tokens. Images attend in both directions.

    For annotations of types, vLLM imports a processor of transformers that needs torchvision, which is not installed
    here.
    """
    from safetensors.torch import load_file, save_file
    from transformers import (
        Gemma3Config,
        Gemma3ForConditionalGeneration,
        Gemma3ImageProcessorPil,
        Gemma3Processor,
        PreTrainedTokenizerFast,
    )

    name = "transformers.models.gemma3.image_processing_gemma3"
    module = types.ModuleType(name)
    module.Gemma3ImageProcessor = Gemma3ImageProcessorPil  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    folder = make_tokenizer(tmp_path / "model", GEMMA_SPECIAL)
    words = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<image>"}
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, extra_special_tokens=words)
    tokenizer.save_pretrained(folder)
    images = Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE}, do_pan_and_scan=False)
    seen = (SIDE // PATCH // SCALE) ** 2
    Gemma3Processor(images, tokenizer, image_seq_length=seen).save_pretrained(folder)
    layers = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 128}
    torch.manual_seed(0)
    config = Gemma3Config(
        vision_config=_SIGHT,
        text_config=_TEXT | layers | {"query_pre_attn_scalar": 32, "tie_word_embeddings": False},
        tie_word_embeddings=False,
        initializer_range=0.12,
        mm_tokens_per_image=seen,
        boi_token_index=BEGIN,
        eoi_token_index=VOCAB - 2,
        image_token_index=VOCAB - 1,
        pad_token_id=0,
    )
    made = Gemma3ForConditionalGeneration(config).float()
    made.get_input_embeddings().weight.data.mul_(0.3)  # without this, an answer would depend on the last token only
    torch.nn.init.normal_(made.model.multi_modal_projector.mm_input_projection_weight, std=0.12)
    made.save_pretrained(folder)
    file = str(folder / "model.safetensors")  # vLLM expects the tensor names of published checkpoints
    tensors = {key.replace("vision_tower.", "vision_tower.vision_model."): one for key, one in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def _image(seed: int) -> Image.Image:
    """Return an image of large patches of colour."""
    colours = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    return Image.fromarray(colours.repeat(SIDE // 4, 0).repeat(SIDE // 4, 1))


def _answer(live: Engine, tokens: list[int], *seeds: int, **more: Any) -> list[int]:
    return live.generate([tokens], 12, media={"image": [_image(seed) for seed in seeds]}, **more)[0]


def _loaded(live: Engine) -> int:
    return assert_clean(live).get("tokens_loaded", 0)


def _whole(tokens: int) -> int:
    return tokens // UNIT * UNIT


ASKED: list[tuple[list[int], tuple[int, ...], int]] = [
    (ONE, (1,), 0),
    (ONE, (1,), _whole(len(ONE) - 1 + TOKENS - 1)),
    (ONE, (2,), len(LEAD)),  # the tokens are equal, but only the text before the image is found
    (TWO, (1, 2), _whole(len(LEAD) + TOKENS)),  # the hit ends where the text differs from that of ONE
    (TWO, (1, 2), _whole(len(TWO) - 2 + 2 * TOKENS - 1)),
    (TWO, (1, 3), _whole(len(LEAD) + TOKENS + len(BETWEEN))),
    (TWO, (2, 1), _whole(len(LEAD) + TOKENS)),
    # the hit ends within the second image
    ([*TWO[: -len(END)], *prompt(60, 64)], (1, 2), _whole(len(LEAD) + 2 * TOKENS + len(BETWEEN))),
]
"""For each case: the prompt, the images, and the number of tokens that are found."""


def test_prompts_hit_up_to_the_first_different_image(model: Path) -> None:
    """With equal tokens, KV is found up to the first different image, and completely if all images are equal."""
    plain = Engine(str(model), **OPTIONS)
    try:
        expected = [_answer(plain, tokens, *seeds) for tokens, seeds, _ in ASKED]
    finally:
        plain.close()
    assert len({tuple(answer) for answer in expected}) == 6, "the model must see"
    live = Engine(str(model), kvpipe={"chunk_tokens": UNIT}, **OPTIONS)
    try:
        starts_on_every_processor(model, {"chunk_tokens": UNIT}, OPTIONS)
        before = 0
        for (tokens, seeds, found), answer in zip(ASKED, expected, strict=True):
            assert _answer(live, tokens, *seeds) == answer
            assert _loaded(live) - before == found
            before += found
        # If vLLM's own cache has an image, a request may send only the image's name.
        assert _answer(live, ONE, 1, names={"image": ["first"]}) == expected[0]
        assert _loaded(live) - before == len(LEAD)
        again = live.generate([ONE], 12, media={"image": [None]}, names={"image": ["first"]})[0]
        assert again == expected[0]
        assert _loaded(live) - before == len(LEAD) + ASKED[1][2]
    finally:
        live.close()


def test_clients_send_no_embeddings_unless_they_may(model: Path) -> None:
    """Without `enable-mm-embeds`, an engine with kvpipe refuses embeddings from clients.

    VLLM alone would accept the embeddings if a connector loads KV. In an engine that computes, embeddings of a wrong
    shape would cause a crash.
    """
    live = Engine(str(model), kvpipe={"chunk_tokens": UNIT}, **OPTIONS)
    try:
        with pytest.raises(ValueError, match="enable-mm-embeds"):
            live.add(ONE, media={"image": torch.zeros(1, 64, 256)})
    finally:
        live.close()


def test_weights_that_change_under_an_image(model: Path) -> None:
    """After a change of weights, vLLM's cache still has an image's embeddings of the old weights.

    KV that is computed from these embeddings is not kept.
    """

    def change(loaded: torch.nn.Module) -> None:
        (seen,) = (one for name, one in loaded.named_parameters() if name.endswith("position_embedding.weight"))
        seen.data.mul_(-20)

    def answers(live: Engine) -> list[list[int]]:
        noted = [_answer(live, ONE, 1)]
        live.llm.apply_model(change)
        noted.append(_answer(live, ONE, 1))
        live.core.reset_encoder_cache()
        return [*noted, _answer(live, ONE, 1)]

    plain = Engine(str(model), **OPTIONS)
    try:
        expected = answers(plain)
    finally:
        plain.close()
    assert expected[1] != expected[2], "the model must see"
    live = Engine(str(model), kvpipe={"chunk_tokens": UNIT}, **OPTIONS)
    try:
        assert answers(live) == expected
        assert _loaded(live) == 0
        assert _answer(live, ONE, 1) == expected[2]
        assert _loaded(live) == ASKED[1][2]
    finally:
        live.close()


def test_changed_image_processor_finds_nothing(model: Path, tmp_path: Path) -> None:
    """If a setting or a file changes the image processor between restarts, nothing is found on the disk."""
    from vllm.transformers_utils.processor import cached_get_processor

    folder = Path(shutil.copytree(model, tmp_path / "model"))
    kvpipe = {
        "chunk_tokens": UNIT,
        "tiers": [{"kind": "disk", "path": str(tmp_path / "kv"), "bytes_max": "1GiB"}],
    }

    def run(config: dict[str, Any] | None, **options: Any) -> tuple[list[int], int]:
        cached_get_processor.cache_clear()  # a new process has an empty cache
        live = Engine(str(folder), kvpipe=patient(config), **OPTIONS | options)
        try:
            return _answer(live, ONE, 1), _loaded(live) if config else 0
        finally:
            live.close()

    first, _ = run(kvpipe)
    darker = {"mm_processor_kwargs": {"image_mean": [0.9, 0.9, 0.9]}}
    expected, _ = run(None, **darker)
    assert expected != first
    assert run(kvpipe, **darker) == (expected, 0)
    path = folder / "processor_config.json"
    message = json.loads(path.read_text())
    message["image_processor"]["image_mean"] = [0.9, 0.9, 0.9]
    path.write_text(json.dumps(message))
    assert run(kvpipe) == (expected, 0)
    assert run(kvpipe)[1] > 0


def test_a_hit_ends_before_an_image_that_attends_in_both_directions(gemma: Path) -> None:
    """A chunk of 64 tokens ends inside the image [100, 168). The second prompt shares the text and the image.

    Attention on a CPU is causal, so a hit inside the image would give the same answer. Therefore hits are counted.
    """
    lead = [at % 500 for at in prompt(100, 65)]
    first, second = ([*lead, BEGIN, *(at % 500 for at in prompt(60, seed))] for seed in (66, 67))
    options = OPTIONS | {"disable_chunked_mm_input": True}  # vLLM sets this option on a GPU
    chunk = 2 * UNIT
    whole = _whole(len(first) - 1 + GEMMA_TOKENS - 1)
    asked = [
        (first, 1, 0),
        (first, 1, whole),
        (second, 1, len(lead) // UNIT * UNIT),
        (second, 1, whole),
        (second, 2, len(lead) // chunk * chunk),
    ]
    plain = Engine(str(gemma), **options)
    try:
        expected = [_answer(plain, tokens, seed) for tokens, seed, _ in asked]
    finally:
        plain.close()
    assert len({tuple(answer) for answer in expected}) == 3, "the model must see"
    live = Engine(str(gemma), kvpipe={"chunk_tokens": chunk}, **options)
    try:
        starts_on_every_processor(gemma, {"chunk_tokens": chunk}, options)
        before = 0
        for (tokens, seed, found), answer in zip(asked, expected, strict=True):
            assert _answer(live, tokens, seed) == answer
            assert _loaded(live) - before == found
            before += found
    finally:
        live.close()
