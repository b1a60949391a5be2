"""Models, cache layouts, data types, tenants, roles and modes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvpipe.connectors.vllm.tiny.engine import Engine
from kvpipe.connectors.vllm.tiny.models import make_model
from kvpipe.connectors.vllm.trial.processors import complete, lent, processor
from kvpipe.testing.waiting import eventually
from tests.engine.common import assert_clean, baseline, crowded, engine, preempted, prompt, whole_blocks

pytestmark = pytest.mark.engine

PROMPTS = [prompt(300, 21), prompt(530, 22)]
ANSWER, LOST_AT = 24, 22
"""`ANSWER`: the length of an answer, which ends the block that the prompt has begun.

`LOST_AT`: the number of answer tokens before a preemption.
"""


@pytest.mark.parametrize(
    ("recipe", "groups", "options"),
    [
        pytest.param("llama-mha", 1, {}, id="MHA"),
        pytest.param("llama", 1, {"block_size": 64}, id="blocks-of-64"),
        pytest.param("mistral-sw", 1, {}, id="sliding-window"),
        pytest.param("gemma2-hybrid", 2, {}, id="hybrid"),
        pytest.param("llama4", 4, {}, id="chunked-local"),
    ],
)
def test_models(recipe: str, groups: int, options: dict[str, Any]) -> None:
    """With every kind of attention, loaded KV gives the same answers, for diverging prefixes and after a preemption."""
    diverging = [PROMPTS[1][:270] + prompt(60, 23), PROMPTS[1][:400] + prompt(40, 24)]
    options = options | {"enable_prefix_caching": False}
    expected = baseline(PROMPTS, ANSWER, recipe, **options)
    branches = baseline(diverging, 6, recipe, **options)
    with engine(recipe, {"chunk_tokens": 128}, **options) as live:
        assert len(live.connector.geometry.groups) == groups
        for _ in range(2):
            for tokens, answer in zip(PROMPTS, expected, strict=True):
                assert live.generate([tokens], ANSWER) == [answer]
        stats = assert_clean(live)
        assert stats["tokens_loaded"] == whole_blocks(live, 300, 530)
        for tokens, answer in zip(diverging, branches, strict=True):
            assert live.generate([tokens], 6) == [answer]
        loaded = assert_clean(live)["tokens_loaded"]
        assert loaded > stats["tokens_loaded"]
        assert preempted(live, PROMPTS[0], ANSWER, LOST_AT) == expected[0]
        assert assert_clean(live)["tokens_loaded"] == loaded + whole_blocks(live, 300, 300 + LOST_AT - 1)


def test_a_cache_in_fp8_is_refused_without_avx512() -> None:
    """vLLM refuses an fp8 cache on a processor that has neither AVX-512 nor AMX.

    Kvpipe has no effect on the refusal.
    """
    options: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}
    for attached in (dict[str, Any](), {"kvpipe": dict[str, Any]()}):
        with processor("plain"), pytest.raises(Exception, match="AVX-512 or AMX"), engine(**options | attached):
            pass


@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_bfloat16(cache: str) -> None:
    """In bfloat16, answers equal the answers with vLLM's own prefix cache, cold and with a hit.

    The same is true for an fp8 cache. A processor without AVX-512 cannot have an fp8 cache. On such a processor the
    cache has the model's own type.
    """
    if not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()):
        cache = "auto"
    options: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_dtype": cache}
    with engine(enable_prefix_caching=True, **options) as plain:
        expected = [[plain.generate([p], 12) for p in PROMPTS] for _ in range(2)]
    with engine(kvpipe={}, enable_prefix_caching=False, **options) as live:
        assert [[live.generate([p], 12) for p in PROMPTS] for _ in range(2)] == expected
        assert assert_clean(live)["tokens_loaded"] == whole_blocks(live, 300, 530)


def _pages(live: Engine, request_id: str, tokens: int) -> list[torch.Tensor]:
    """Return the bytes of the request's first `tokens` tokens in the engine's own cache, by layer."""
    (internal,) = [r for r in live.scheduler.requests if r.startswith(request_id)]
    (table,) = live.scheduler.kv_cache_manager.get_block_ids(internal)
    block = live.connector.geometry.unit_tokens
    caches = live.core.model_executor.driver_worker.worker.model_runner.kv_caches
    return [cache[table[: tokens // block]].clone() for cache in caches]


def _mla_answers(live: Engine) -> tuple[list[list[int]], list[list[torch.Tensor]]]:
    """Return three answers to one prompt, and the pages of its tokens at the end of the prefill."""
    answers, pages = [], []
    for _ in range(3):
        request = live.add(PROMPTS[0], 12)
        while not any(one.num_output_tokens for one in live.scheduler.requests.values()):
            live.step()
        pages.append(_pages(live, request, whole_blocks(live, 300)))
        answers.append(list(live.drain()[request].outputs[0].token_ids))
    return answers, pages


MLA: dict[str, Any] = {"recipe": "deepseek-mla", "dtype": "bfloat16"}
ON: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "own": lambda: complete(None),
    "without-AMX": lambda: complete("plain"),
    "with-AMX": lambda: lent("amx"),
}


@pytest.mark.parametrize("on", ON)
def test_mla(on: str) -> None:
    """MLA's loaded cache is byte-equal to the computed cache.

    Answers equal the answers with vLLM's own prefix cache. The answer after a hit may differ from the cold answer,
    because vLLM's MLA computes a prefill with context on another path. On a CPU the results of that path differ, in
    float32 too, with and without kvpipe. On a CPU, vLLM has a prefix cache of MLA only with AMX. Without AMX, answers
    with hits are compared with each other, and their first tokens equal the first token of the cold answer. The case
    "own" runs on this machine's own processor, which with AMX has another attention backend and another block size.
    """
    with ON[on]():
        with engine(enable_prefix_caching=True, **MLA) as plain:
            caches = plain.core.vllm_config.cache_config.enable_prefix_caching
            assert on == "own" or caches == (on == "with-AMX")
            expected = [plain.generate([PROMPTS[0]], 12)[0] for _ in range(3 if caches else 1)]
        with engine(kvpipe={"chunk_tokens": 128}, enable_prefix_caching=False, **MLA) as live:
            answers, pages = _mla_answers(live)
            assert assert_clean(live)["tokens_loaded"] == 2 * whole_blocks(live, 300)
    assert answers[: len(expected)] == expected
    assert answers[1] == answers[2]
    assert answers[1][0] == answers[0][0]
    for again in pages[1:]:
        assert all(torch.equal(a, b) for a, b in zip(pages[0], again, strict=True))
    assert all(page.any() for page in pages[0])


@pytest.mark.parametrize("recipe", ["mistral-sw", "gemma2-hybrid"])
def test_windows_with_preemption_and_caching(recipe: str) -> None:
    """Sliding windows free blocks early. Preempted and resumed requests get right answers."""
    prompts = [prompt(100 + 30 * i, 600 + i) for i in range(8)]
    options: dict[str, Any] = {"cache_tokens": 1408, "max_model_len": 640, "enable_prefix_caching": True}
    expected = baseline(prompts, 40, recipe, **options)
    with engine(recipe, {"chunk_tokens": 64}, **options) as live:
        for _ in range(2):
            assert crowded(live, prompts, 40) == expected
            live.llm.reset_prefix_cache()
        stats = assert_clean(live)
        assert stats["preempted"] > 0
        assert stats["tokens_loaded"] > 0


def test_cache_salts_never_share() -> None:
    """A request finds KV of its own salt, and never KV of another salt or of requests without a salt."""
    tokens = PROMPTS[0]
    expected = baseline([tokens], 8, enable_prefix_caching=False)
    with engine(kvpipe={}, enable_prefix_caching=False) as live:
        loaded = 0
        for salt in ("alice", "bob", None):
            assert live.generate([tokens], 8, salt=salt) == expected
            assert assert_clean(live).get("tokens_loaded", 0) == loaded
            assert live.generate([tokens], 8, salt=salt) == expected
            loaded += whole_blocks(live, 300)
            assert assert_clean(live)["tokens_loaded"] == loaded


@pytest.mark.parametrize(
    ("role", "config", "saves", "loads"),
    [
        ("kv_producer", {}, True, False),
        ("kv_consumer", {}, False, False),
        ("kv_both", {"bypass": True}, False, False),
        ("kv_both", {"freeze": True}, False, False),
    ],
)
def test_roles_and_modes(role: str, config: dict[str, Any], saves: bool, loads: bool) -> None:
    """A producer only saves. A consumer only loads. Bypass neither saves nor loads, and freeze saves nothing."""
    expected = baseline(PROMPTS, 8, enable_prefix_caching=False)
    with engine(kvpipe=config, role=role, enable_prefix_caching=False) as live:
        for _ in range(2):
            assert live.generate(PROMPTS, 8) == expected
        stats = assert_clean(live)
        assert (stats["slots_used"] > 0) == saves
        assert (stats.get("tokens_loaded", 0) > 0) == loads


def test_freeze_is_switched_at_run_time(tmp_path: Path) -> None:
    """A frozen engine serves its chunks and saves nothing new. `kvpipe freeze` switches freeze on and off."""
    from kvpipe.config.control import write_freeze

    control = tmp_path / "control"
    with engine(kvpipe={"control_file": str(control)}, enable_prefix_caching=False) as live:
        first = live.generate(PROMPTS[:1], 8)
        live.settle()
        used = live.connector.stats()["slots_used"]

        def switch(on: bool) -> None:
            write_freeze(control, on=on)
            side = live.connector.scheduler
            assert side is not None
            assert eventually(lambda: side.switches.freeze == on), "the engine did not obey"

        switch(True)
        assert live.generate(PROMPTS[:1], 8) == first
        live.generate(PROMPTS[1:], 8)
        stats = assert_clean(live)
        assert stats["slots_used"] == used
        assert stats["tokens_loaded"] == whole_blocks(live, 300)
        switch(False)
        live.generate(PROMPTS[1:], 8)
        assert assert_clean(live)["slots_used"] > used


def test_the_connector_is_found_by_module_path() -> None:
    """`kv_connector_module_path` works in addition to the registered name."""
    expected = baseline(PROMPTS, 8, enable_prefix_caching=False)
    with engine(kvpipe={}, module="kvpipe.connectors.vllm.connector", enable_prefix_caching=False) as live:
        assert type(live.connector).__name__ == "KVPipeConnector"
        assert live.generate(PROMPTS, 8) == expected


def test_made_models_are_stable() -> None:
    """A model is made once and then reused."""
    assert make_model("llama") == make_model("llama")
