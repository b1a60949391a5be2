"""Prompts with images: KV after an image is found for the same image alone, prepared in the same way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from kvpipe.connectors.vllm.trial.engine import Engine
from kvpipe.testing.models import VOCAB, make_tokenizer
from tests.engine.common import BLOCK, assert_clean, patient, prompt, starts_on_every_processor

pytestmark = pytest.mark.engine

SPECIAL = ("<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<image>")
IMAGE = VOCAB - 1
SIDE, PATCH, SCALE = 112, 7, 2
TOKENS = (SIDE // PATCH // SCALE) ** 2 + 3
"""Of one image in a prompt, with what is around it: 67."""
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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Idefics3 with random weights, its tokenizer and its processor, which needs no torchvision."""
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
    text = {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "initializer_range": 0.12,
        "max_position_embeddings": 1024,
    }
    sight = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "patch_size": PATCH,
        "initializer_range": 0.12,
    }
    torch.manual_seed(0)
    config = Idefics3Config(
        vision_config=sight, text_config=text, image_token_id=IMAGE, scale_factor=SCALE, pad_token_id=0
    )
    Idefics3ForConditionalGeneration(config).float().save_pretrained(folder)
    return folder


def _image(seed: int) -> Image.Image:
    """Large patches of colour."""
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
    (ONE, (2,), len(LEAD)),  # the same tokens: only the text before the image
    (TWO, (1, 2), _whole(len(LEAD) + TOKENS)),  # as far as the text is that of ONE
    (TWO, (1, 2), _whole(len(TWO) - 2 + 2 * TOKENS - 1)),
    (TWO, (1, 3), _whole(len(LEAD) + TOKENS + len(BETWEEN))),
    (TWO, (2, 1), _whole(len(LEAD) + TOKENS)),
    ([*TWO[: -len(END)], *prompt(60, 64)], (1, 2), _whole(len(LEAD) + 2 * TOKENS + len(BETWEEN))),  # within the image
]
"""Prompt, images, and how many tokens are found."""


def test_images(model: Path) -> None:
    """Equal tokens: KV is found up to the first image that is another, and in full for the same."""
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
        # an image that vLLM has in its own cache is known by its name alone
        assert _answer(live, ONE, 1, names={"image": ["first"]}) == expected[0]
        assert _loaded(live) - before == len(LEAD)
        again = live.generate([ONE], 12, media={"image": [None]}, names={"image": ["first"]})[0]
        assert again == expected[0]
        assert _loaded(live) - before == len(LEAD) + ASKED[1][2]
    finally:
        live.close()


def test_clients_send_no_embeddings_unless_they_may(model: Path) -> None:
    """VLLM lets them where it finds a connector that loads KV: what does not fit would end an engine that computes."""
    live = Engine(str(model), kvpipe={"chunk_tokens": UNIT}, **OPTIONS)
    try:
        with pytest.raises(ValueError, match="enable-mm-embeds"):
            live.add(ONE, media={"image": torch.zeros(1, 64, 256)})
    finally:
        live.close()


def test_weights_that_change_under_an_image(model: Path) -> None:
    """VLLM keeps an image's embeddings of old weights until it is notified: what is computed from them is not kept."""

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


def test_another_processor(model: Path, tmp_path: Path) -> None:
    """What is made of an image changes between restarts, by a setting or a file: nothing is found on the disk."""
    from vllm.transformers_utils.processor import cached_get_processor

    folder = Path(shutil.copytree(model, tmp_path / "model"))
    kvpipe = {
        "chunk_tokens": UNIT,
        "tiers": [{"kind": "disk", "path": str(tmp_path / "kv"), "bytes_max": "1GiB"}],
    }

    def run(config: dict[str, Any] | None, **options: Any) -> tuple[list[int], int]:
        cached_get_processor.cache_clear()  # as with a process of its own
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
