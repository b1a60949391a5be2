"""Repeated prompts, conversations and preempted requests get the same answers from loaded KV."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from kvpipe.connectors.vllm.tiny.models import TOKEN_BYTES
from kvpipe.worker.side import WorkerSide
from tests.engine.common import BLOCK, assert_clean, baseline, block_tokens, crowded, engine, prompt, whole_blocks

pytestmark = pytest.mark.engine

PROMPTS = [prompt(300, 1), prompt(611, 2), prompt(150, 3)]
TURN = BLOCK + 2
"""The number of answer tokens that end at least one block."""


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({}, id="default"),
        pytest.param({"mode": "step"}, id="step"),
        pytest.param({"load": "async"}, id="async"),
        pytest.param({"mode": "step", "load": "async", "policy": "s3fifo"}, id="step-async-s3fifo"),
        pytest.param({"copy_threads": 0, "chunk_tokens": 32}, id="inline-small-chunks"),
        pytest.param({"copy_threads": 1, "save_partial": False, "chunk_tokens": 128}, id="threads-whole-chunks"),
    ],
)
def test_repeated_prompts(config: dict[str, Any]) -> None:
    """In every mode, a repeated prompt is loaded instead of computed, and the answer is the same."""
    expected = baseline(PROMPTS, 20, enable_prefix_caching=False)
    with engine(kvpipe=config, enable_prefix_caching=False) as live:
        assert live.generate(PROMPTS, 20) == expected
        assert_clean(live)
        assert live.connector.stats().get("tokens_loaded", 0) == 0
        for _ in range(2):
            assert live.generate(PROMPTS, 20) == expected
        stats = assert_clean(live)
        block = block_tokens(live)
    size = config.get("chunk_tokens", 256) if not config.get("save_partial", True) else block
    due = whole_blocks(size, *map(len, PROMPTS))
    assert stats["tokens_loaded"] == 2 * due, stats


def test_a_flipped_value_changes_the_answer() -> None:
    """One wrong value in one saved chunk changes the answer, which shows that the comparison can fail."""
    with engine(kvpipe={}, enable_prefix_caching=False) as live:
        expected = live.generate(PROMPTS[:1], 20)
        live.settle()
        worker = live.worker_connector.worker
        assert isinstance(worker, WorkerSide)
        pool = worker.pipeline._engine._pool  # type: ignore[attr-defined]
        pool.slot(0)[: BLOCK * 4 * 64 * 4].view(dtype=__import__("torch").float32)[:4096] += 1.0
        assert live.generate(PROMPTS[:1], 20) != expected


@pytest.mark.parametrize("caching", [False, True])
def test_four_turn_conversation(caching: bool) -> None:
    """Each turn finds the KV of the turn before, including generated tokens."""
    with engine(enable_prefix_caching=caching) as plain:
        turns, answers, tokens = [], [], prompt(200, 4)
        for turn in range(4):
            turns.append(list(tokens))
            answers.append(plain.generate([tokens], TURN)[0])
            tokens = tokens + answers[-1] + prompt(30, 50 + turn)
    with engine(kvpipe={}, enable_prefix_caching=caching) as live:
        for turn, (tokens, answer) in enumerate(zip(turns, answers, strict=True)):
            before = live.connector.stats().get("tokens_loaded", 0)
            if caching:
                live.llm.reset_prefix_cache()
            assert live.generate([tokens], TURN) == [answer]
            stats = assert_clean(live)
            if turn:
                held = len(turns[turn - 1]) + TURN - 1  # the last token's KV was never computed
                assert stats["tokens_loaded"] - before == whole_blocks(live, held)


def test_save_decode_off_saves_prompts_only() -> None:
    """With save_decode off, the KV of generated tokens is not found."""
    tokens = prompt(200, 5)
    with engine(kvpipe={"save_decode": False}, enable_prefix_caching=False) as live:
        answer = live.generate([tokens], TURN)[0]
        live.generate([tokens + answer], 4)
        assert assert_clean(live)["tokens_loaded"] == whole_blocks(live, 200)


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("config", [{}, {"load": "async"}, {"mode": "step", "chunk_tokens": 64}], ids=str)
def test_preempted_requests_load_what_was_saved(caching: bool, config: dict[str, Any]) -> None:
    """Ten requests run in a cache for 1,280 tokens. Resumed requests load and save, and their answers are right."""
    prompts = [prompt(60 + 20 * i, 100 + i) for i in range(10)]
    options: dict[str, Any] = {"cache_tokens": 1280, "enable_prefix_caching": caching, "max_model_len": 1024}
    expected = baseline(prompts, 48, **options)
    with engine(kvpipe=config | {"save_decode_steps": 1}, **options) as live:
        assert crowded(live, prompts, 48) == expected
        first = assert_clean(live)
        assert first["preempted"] > 0
        assert first["tokens_loaded"] > 0
        # KV that was computed after the resumption was also saved, so the whole prompt and answer are found.
        live.llm.reset_prefix_cache()
        whole = [p + a for p, a in zip(prompts, expected, strict=True)]
        live.generate(whole[:1], 2)
        again = assert_clean(live)
        assert again["tokens_loaded"] - first["tokens_loaded"] == whole_blocks(live, len(whole[0]) - 1)


def test_preempted_requests_answer_the_same_when_their_saves_wait() -> None:
    """After a preemption, a request computes again the tokens that were not saved before."""
    prompts = [prompt(60 + 20 * i, 100 + i) for i in range(10)]
    options: dict[str, Any] = {"cache_tokens": 1280, "enable_prefix_caching": False, "max_model_len": 1024}
    expected = baseline(prompts, 48, **options)
    with engine(kvpipe={"save_decode_steps": 32}, **options) as live:
        assert crowded(live, prompts, 48) == expected
        stats = assert_clean(live)
        assert stats["preempted"] > 0
        assert stats["tokens_loaded"] > 0


def test_chunked_prefill_smaller_than_a_chunk() -> None:
    """A prefill fills one chunk in several steps. Then the whole chunk is found."""
    options: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "enable_prefix_caching": False}
    expected = baseline(PROMPTS, 16, **options)
    with engine(kvpipe={"chunk_tokens": 256}, **options) as live:
        for _ in range(2):
            assert live.generate(PROMPTS, 16) == expected
        assert assert_clean(live)["tokens_loaded"] == whole_blocks(live, *map(len, PROMPTS))


def test_ngram_drafts() -> None:
    """Accepted drafts are saved when a step has confirmed that the drafts are accepted.

    Rejected drafts are never saved.
    """
    looping = (prompt(24, 6) * 12)[:280]
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    options: dict[str, Any] = {"speculative_config": drafts, "enable_prefix_caching": False}
    expected = baseline([looping, PROMPTS[0]], 80, **options)
    assert expected == baseline([looping, PROMPTS[0]], 80, enable_prefix_caching=False)
    with engine(kvpipe={}, **options) as live:
        for _ in range(2):
            assert live.generate([looping, PROMPTS[0]], 80) == expected
        whole = looping + expected[0]
        before = assert_clean(live)["tokens_loaded"]
        assert before == whole_blocks(live, 280, 300)
        live.generate([whole], 2)
        # Up to one block of a request's last step may stay unconfirmed, and so is not saved (docs/decisions).
        assert assert_clean(live)["tokens_loaded"] - before >= whole_blocks(live, len(whole) - 1) - block_tokens(live)


def test_engine_computes_with_one_thread() -> None:
    """vLLM's attention on a CPU fails if OpenMP's number of threads changes during a step.

    Between two engines of the tests the number may change: each engine restores the PyTorch function that vLLM has
    replaced.
    """
    for _ in range(2):
        torch.set_num_threads(2)
        assert torch.get_num_threads() == 2
        with engine():
            assert torch.get_num_threads() == 1


def test_whole_prompt_hit() -> None:
    """A hit on the whole prompt recomputes only the last token, with sync and async loads."""
    tokens = prompt(8 * BLOCK, 7)
    expected = baseline([tokens], 8, enable_prefix_caching=False)
    for load, loaded in (("sync", 8 * BLOCK - 1), ("async", 8 * BLOCK)):
        with engine(kvpipe={"load": load}, enable_prefix_caching=False) as live:
            for _ in range(2):
                assert live.generate([tokens], 8) == expected
            assert assert_clean(live)["tokens_loaded"] == loaded


def test_waiting_engine_sleeps_after_an_empty_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that runs in the user's process sleeps for a moment after an empty step, as a serving engine does."""
    tokens, rests = prompt(8 * BLOCK, 7), list[float]()
    with engine(kvpipe={"load": "async"}, enable_prefix_caching=False) as live:
        live.generate([tokens], 2)
        live.settle()
        with monkeypatch.context() as patch:
            patch.setattr(time, "sleep", rests.append)
            live.generate([tokens], 2)
        assert 0.001 in rests
        assert assert_clean(live)["tokens_loaded"] == len(tokens)


def test_prefix_cache_hit_that_ends_inside_a_chunk() -> None:
    """If vLLM's own cache has the first blocks of a chunk, only the other blocks are loaded."""
    head, tail = prompt(3 * BLOCK, 8), prompt(400, 9)
    whole = head + tail
    expected = baseline([whole], 8)
    with engine(kvpipe={"chunk_tokens": 256}, enable_prefix_caching=True) as live:
        assert live.generate([whole], 8) == expected
        live.settle()
        live.llm.reset_prefix_cache()
        # this request loads the chunk's first three blocks into vLLM's own cache
        live.generate([head + prompt(10, 10)], 4)
        before = assert_clean(live).get("tokens_loaded", 0)
        assert live.generate([whole], 8) == expected
        assert assert_clean(live)["tokens_loaded"] - before == whole_blocks(live, len(whole)) - len(head)


def test_eviction_under_load() -> None:
    """A pool that is far smaller than the working set evicts chunks, and answers stay right."""
    prompts = [prompt(200 + 13 * i, 200 + i) for i in range(12)]
    expected = baseline(prompts, 12, enable_prefix_caching=False)
    for policy in ("lru", "s3fifo"):
        config = {"pool_bytes_max": 6 * 128 * TOKEN_BYTES, "chunk_tokens": 128, "policy": policy}
        with engine(kvpipe=config, enable_prefix_caching=False) as live:
            for _ in range(3):
                assert live.generate(prompts, 12) == expected
            for tokens, answer in zip(prompts[-2:], expected[-2:], strict=True):
                assert live.generate([tokens], 12) == [answer]
                assert live.generate([tokens], 12) == [answer]
            stats = assert_clean(live)
            assert stats["slots"] == 6
            assert stats["evicted"] > stats["slots"]
            assert stats["tokens_loaded"] > 0
