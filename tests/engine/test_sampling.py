"""Requests with grammars, stop strings, beams, seeds and penalties get the same answers from loaded as from new KV."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvpipe.connectors.vllm.tiny.engine import Engine
from kvpipe.connectors.vllm.tiny.models import VOCAB, make_model
from tests.engine.common import assert_clean, prompt

if TYPE_CHECKING:
    from vllm import SamplingParams

pytestmark = pytest.mark.engine

PROMPTS = [prompt(150, 7), prompt(300, 8)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the small model with a tokenizer.

    Each token is a letter or digit, so that grammars and stop strings have text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    for file in make_model("llama").iterdir():
        (folder / file.name).symlink_to(file)
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    words = {"<unk>": 0, "<s>": 1, "</s>": 2}
    words |= {letter: number for number, letter in enumerate(letters, 3)}
    words |= {f"{letters[i % 26]}{letters[i // 26]}": i for i in range(len(words), VOCAB)}
    unknown, begin, end = tuple(words)[:3]
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=unknown, bos_token=begin, eos_token=end)
    whole.save_pretrained(folder)
    return folder


def _requests() -> Iterator[tuple[str, SamplingParams]]:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    common: dict[str, Any] = {"max_tokens": 24}
    yield (
        "grammar",
        SamplingParams(temperature=0, structured_outputs=StructuredOutputsParams(regex="[a-z]{20}"), **common),
    )
    yield "choice", SamplingParams(temperature=0, structured_outputs=StructuredOutputsParams(choice=["abba", "baab"]))
    yield "stop", SamplingParams(temperature=0, stop=["a", "e", "i"], ignore_eos=True, **common)
    yield "seeded", SamplingParams(temperature=1.0, seed=11, ignore_eos=True, n=2, **common)
    yield (
        "penalties",
        SamplingParams(temperature=0, repetition_penalty=1.5, presence_penalty=1.0, ignore_eos=True, **common),
    )


def _answers(live: Engine) -> dict[str, Any]:
    from vllm.sampling_params import BeamSearchParams

    prompts: Any = [{"prompt_token_ids": tokens} for tokens in PROMPTS]
    out: dict[str, Any] = {}
    for name, params in _requests():
        made = live.llm.generate(prompts, params, use_tqdm=False)
        out[name] = [[(list(one.token_ids), one.text, one.finish_reason) for one in each.outputs] for each in made]
    beams = live.llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True), use_tqdm=False)
    out["beams"] = [[beam.tokens for beam in each.sequences] for each in beams]
    return out


def test_answers_are_the_same_from_loaded_kv(model: Path) -> None:
    """Answers of every kind equal the answers of an engine without kvpipe, both cold and from loaded KV."""
    options: dict[str, Any] = {"skip_tokenizer_init": False, "enable_prefix_caching": False}
    bare = Engine(str(model), **options)
    try:
        expected = _answers(bare)
    finally:
        bare.close()
    assert all(text in {"abba", "baab"} for each in expected["choice"] for _, text, _ in each)
    assert {why for each in expected["stop"] for _, _, why in each} == {"stop"}
    assert len({tuple(beam) for beam in expected["beams"][0]}) == 3
    live = Engine(str(model), kvpipe={"chunk_tokens": 64}, **options)
    try:
        for _ in range(2):
            assert _answers(live) == expected
        live.settle()
        assert assert_clean(live)["tokens_loaded"] > 0
    finally:
        live.close()
