"""Images whose tokens attend in both directions, under vLLM's real scheduler: no hit and no save divides them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config import ModelConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.request import Request

from kvpipe.connectors.vllm.spans import spans_of
from kvpipe.connectors.vllm.trial.content import Live
from kvpipe.connectors.vllm.trial.shapes import BLOCK, KVPIPE, SHAPES, make_configs
from kvpipe.connectors.vllm.trial.trial import Trial

FIRST, LENGTH = 100, 68
"""An image of tokens [100, 168). A chunk of four blocks ends inside the image."""
CHUNK = 4 * BLOCK


@pytest.fixture(params=[True, False], ids=["both directions", "causal"])
def trial(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a trial of a model with images, as on a GPU.

    With `whole` the tokens of an image attend in both directions.
    """
    shape = SHAPES["sync"]._replace(blocks=40, seqs_max=2)
    monkeypatch.setattr(ModelConfig, "is_mm_prefix_lm", request.param)
    monkeypatch.setattr(make_configs(shape, KVPIPE)[0].scheduler_config, "disable_chunked_mm_input", request.param)
    made: Any = Trial(shape)
    made.whole = request.param
    made.scheduler.max_num_encoder_input_tokens = 1 << 20
    made.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=1 << 20)
    made.steps_of = []
    made.on_schedule = lambda output: made.steps_of.append(dict(output.num_scheduled_tokens))
    yield made
    made.close()


def _add(trial: Any, name: str, tokens: int, *, first: int = FIRST, length: int = LENGTH, text: int = 0) -> Request:
    """Add a request with an image, or without an image if `length` is 0. Equal `text` means equal tokens."""
    prompt = [(text + at) % 500 for at in range(tokens)]
    one = trial.live[name] = Live(name, trial._sequence(prompt, 0, 0), 1, 0, 0)
    trial._remember(one, one.sequence, 1)
    image = MultiModalFeatureSpec(
        data=None, modality="image", identifier=f"image {text}", mm_position=PlaceholderRange(first, length)
    )
    made = Request(
        name, prompt, SamplingParams(max_tokens=1, ignore_eos=True), None, mm_features=[image] if length else [],
        block_hasher=trial.hasher,
    )  # fmt: skip
    trial.scheduler.add_request(made)
    return made


def _held(trial: Any, request: Request) -> int:
    """Return how many tokens of the request can be found, in whole blocks."""
    index = trial.side.catalog.index(0)
    return max((at for at, key in enumerate(request.block_hashes, 1) if key in index), default=0) * BLOCK


def test_a_hit_ends_before_an_image_that_it_would_cut(trial: Any) -> None:
    """After such a hit vLLM computes the image in one step.

    After a hit inside the image, vLLM would split the rest of the image.
    """
    first = _add(trial, "first", 200)
    trial.do(("drain",))
    assert _held(trial, first) == 6 * BLOCK
    catalog = trial.side.catalog
    catalog._drop(catalog.find(0, first.block_hashes[5]), "evicted")  # this is the second chunk
    assert _held(trial, first) == CHUNK
    trial.do(("reset", False, False))
    trial.steps_of.clear()
    _add(trial, "filler", 91, length=0, text=250)
    second = _add(trial, "second", 200)
    trial.do(("drain",))
    start = 3 * BLOCK if trial.whole else CHUNK
    assert trial.side.counters["tokens_loaded"] == start
    steps = [step["second"] for step in trial.steps_of if "second" in step]
    ends = [start + sum(steps[: at + 1]) for at in range(len(steps))]
    assert any(FIRST < end < FIRST + LENGTH for end in ends) != trial.whole
    assert _held(trial, second) == 6 * BLOCK
    assert not trial.violations


def test_nothing_of_an_image_is_saved_that_vllm_has_cut(trial: Any) -> None:
    """vLLM's own hit ends inside the image.

    Another request takes room of the step, so only a part of the rest of the image is computed.
    """
    first = _add(trial, "first", 200)
    trial.do(("drain",))
    trial.side.reset()
    pool = trial.scheduler.kv_cache_manager.block_pool
    later = [block.block_id for block in pool.blocks if block.block_hash and not _is_of(block, first, CHUNK // BLOCK)]
    trial.scheduler.kv_cache_manager.evict_blocks(set(later))
    trial.steps_of.clear()
    _add(trial, "filler", 91, length=0, text=250)
    second = _add(trial, "second", 200)
    trial.do(("drain",))
    assert trial.steps_of[0] == {"filler": 91, "second": 5}, "vLLM begins at token 128"
    assert _held(trial, second) == (CHUNK if trial.whole else 6 * BLOCK)
    assert trial.side.counters["spans_cut"] == trial.whole
    cached = [block for block in pool.blocks if block.block_hash and _is_of(block, second, 6)]
    assert len(cached) == (CHUNK // BLOCK if trial.whole else 6)
    assert not trial.violations


def _is_of(block: Any, request: Request, blocks: int) -> bool:
    """Whether a block of vLLM's cache is one of the first `blocks` of a request."""
    from vllm.v1.core.kv_cache_utils import get_block_hash

    return get_block_hash(block.block_hash) in request.block_hashes[:blocks]


def test_sound_is_no_span() -> None:
    """vLLM's runners let sound attend only to earlier tokens."""
    of = spans_of(SimpleNamespace(model_config=SimpleNamespace(is_mm_prefix_lm=True)))  # type: ignore[arg-type]
    assert of is not None
    image, sound = (
        SimpleNamespace(modality=kind, mm_position=PlaceholderRange(offset, 10))
        for kind, offset in (("image", 5), ("audio", 40))
    )
    assert of(SimpleNamespace(mm_features=[image, sound])) == [(5, 15)]  # type: ignore[arg-type]
    assert of(SimpleNamespace()) == [], "prompts of operators have no media"  # type: ignore[arg-type]


def test_a_causal_model_has_no_spans() -> None:
    """A causal model needs no whole spans, so the function that finds whole spans is None."""
    assert spans_of(SimpleNamespace(model_config=SimpleNamespace(is_mm_prefix_lm=False))) is None  # type: ignore[arg-type]
