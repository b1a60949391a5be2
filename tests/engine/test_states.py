"""Models with recurrent states: a hit ends only at a boundary whose state is held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

from kvpipe.connectors.vllm.trial.processors import complete
from kvpipe.errors import UnsupportedError
from tests.engine.common import assert_clean, crowded, engine, preempted, prompt

pytestmark = pytest.mark.engine

PROMPTS = [prompt(300, 21), prompt(530, 22)]
ANSWER, LOST_AT = 24, 22
"""`ANSWER`: the length of an answer, which ends the block that the prompt has begun.

`LOST_AT`: the number of answer tokens before a preemption.
"""
AGAIN = 8
"""The number of answer tokens that tests compare if no later prompt contains the answer."""
FAMILIES = [
    pytest.param("granite-hybrid", 128, {}, id="mamba2"),
    pytest.param("falcon-h1", 128, {}, id="mamba2-beside-attention"),
    pytest.param("lfm2", 128, {}, id="short-convolution"),
    pytest.param("lfm2", 128, {"prefix_match_unit": 16}, id="hashes-within-a-block"),
    pytest.param("qwen3-next", 192, {"dtype": "bfloat16"}, id="gated-delta-net"),
]


@pytest.fixture(autouse=True)
def _states_at_the_end_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make layers keep states at the ends of steps only.

    Mamba 2 layers declare to vLLM that they export states within a step, but vLLM's CPU build has no kernel for the
    export. So with prefix caching every prefill of such a model fails on a CPU, with and without kvpipe.
    """
    monkeypatch.delattr(MambaMixer2, "get_kv_cache_spec")


def _unit(live: Any) -> int:
    geometry = live.connector.geometry
    assert geometry.states
    return int(geometry.unit_tokens)


@pytest.mark.parametrize(("recipe", "chunk_tokens", "options"), FAMILIES)
def test_hits_and_conversations(recipe: str, chunk_tokens: int, options: dict[str, Any], tmp_path: Path) -> None:
    """Answers equal those with vLLM's own cache: cold, warm, in a second turn, preempted, beside a hit, from a disk."""
    options = {"enable_prefix_caching": True, "prefix_cache_retention_interval": None} | options
    with engine(recipe, None, **options) as plain:
        expected = [[plain.generate([p], ANSWER)[0] for p in PROMPTS] for _ in range(2)]
        turns = [p + answer + prompt(40, 31) for p, answer in zip(PROMPTS, expected[0], strict=True)]
        second = [plain.generate([p], AGAIN)[0] for p in turns]
        again = [plain.generate([p], AGAIN)[0] for p in turns]
        warm = [answer[:AGAIN] for answer in expected[1]]
        begun = expected[1][0][:LOST_AT]
        resumed = [begun + plain.generate([PROMPTS[0] + begun], ANSWER - LOST_AT)[0] for _ in range(2)]
    disk = {"kind": "disk", "path": str(tmp_path / "kv"), "bytes_max": "1GiB", "store": "all"}
    config: dict[str, Any] = {"chunk_tokens": chunk_tokens, "tiers": [disk]}
    with engine(recipe, config, **options) as live:
        unit, before = _unit(live), 0
        assert [live.generate([p], ANSWER)[0] for p in PROMPTS] == expected[0]
        held = [(len(p) - 1) // unit * unit for p in PROMPTS]
        for _ in range(2):
            live.settle()  # a reset drops chunks that wait to be stored
            live.llm.reset_prefix_cache()
            assert [live.generate([p], AGAIN)[0] for p in PROMPTS] == warm
            before += sum(held)
            assert assert_clean(live)["tokens_loaded"] == before
        live.llm.reset_prefix_cache()
        # The second turn loads KV up to the last boundary that the first answer crossed.
        assert [live.generate([p], AGAIN)[0] for p in turns] in (second, again)
        ends = [(len(p) + ANSWER - 1) // unit * unit for p in PROMPTS]
        before += sum(ends)
        assert assert_clean(live)["tokens_loaded"] == before
        live.llm.reset_prefix_cache()
        assert preempted(live, PROMPTS[0], ANSWER, LOST_AT) in resumed
        assert assert_clean(live)["tokens_loaded"] == before + held[0] + (len(PROMPTS[0]) + LOST_AT - 1) // unit * unit
    with engine(recipe, config, **options) as live:
        assert [live.generate([p], AGAIN)[0] for p in PROMPTS] == warm
        assert assert_clean(live)["tokens_loaded"] == sum(held)  # loaded from the disk
        live.llm.reset_prefix_cache()
        # No prompt has ended at the last boundary of these tokens, so they are computed. From now on, vLLM's own cache
        # holds them.
        live.generate([PROMPTS[1][: 2 * unit + 10]], 1)
        assert assert_clean(live)["tokens_loaded"] == sum(held)
        assert live.generate([PROMPTS[1]], AGAIN) == warm[1:]
        assert assert_clean(live)["tokens_loaded"] == sum(held) + held[1] - 2 * unit


def test_states_in_the_models_own_type(tmp_path: Path) -> None:
    """Without AVX-512, states have the model's type and blocks are shorter. The results are the same."""
    with complete("plain"):
        test_hits_and_conversations("qwen3-next", 192, {"dtype": "bfloat16"}, tmp_path)


def test_beside_a_hit_within_a_block() -> None:
    """After a hit within a block, vLLM continues in a copy of the block. A later prompt hits at the end of a block."""
    options: dict[str, Any] = {"enable_prefix_caching": True, "prefix_match_unit": 16}
    prompts = [PROMPTS[1][:320], PROMPTS[1], PROMPTS[1]]
    with engine("lfm2", None, **options) as plain:
        expected = [plain.generate([p], 12) for p in prompts]
    with engine("lfm2", {"chunk_tokens": 128}, **options) as live:
        unit = _unit(live)
        assert 319 // 16 * 16 % unit  # vLLM's hit ends within a unit
        assert [live.generate([p], 12) for p in prompts[:2]] == expected[:2]
        assert assert_clean(live).get("tokens_loaded", 0) == 0
        live.llm.reset_prefix_cache()
        assert live.generate([prompts[2]], 12) == expected[2]
        assert assert_clean(live)["tokens_loaded"] == (len(PROMPTS[1]) - 1) // unit * unit


@pytest.mark.parametrize(("recipe", "chunk_tokens", "options"), FAMILIES[:2])
def test_preempted_requests(recipe: str, chunk_tokens: int, options: dict[str, Any]) -> None:
    """Requests that lose their blocks resume with the chunks that are held, and their answers are right.

    In some families, a request's answer depends on the other requests of the batch, with and without kvpipe. Such
    requests are preempted alone.
    """
    prompts = [prompt(100 + 30 * i, 600 + i) for i in range(8)]
    more: dict[str, Any] = {"cache_tokens": 2560, "max_model_len": 640, "enable_prefix_caching": True}
    with engine(recipe, None, **options | more) as plain:
        expected = plain.generate(prompts, 80)
    with engine(recipe, {"chunk_tokens": chunk_tokens}, **options | more) as live:
        for _ in range(2):
            assert crowded(live, prompts, 80) == expected
            live.llm.reset_prefix_cache()
        stats = assert_clean(live)
        assert stats["preempted"] > 0
        assert stats["tokens_loaded"] > 0


def test_a_state_whose_copy_fails() -> None:
    """The state is lost, and the loss is counted. The next request with that prompt computes the state and saves it."""
    options: dict[str, Any] = {"enable_prefix_caching": True}
    with engine("lfm2", None, **options) as plain:
        expected = plain.generate(PROMPTS[:1], 8)
    faulty = {"connector": "FirstStatesFail", "module": "tests.engine.faulty"}
    with engine("lfm2", {"chunk_tokens": 128}, **options, **faulty) as live:
        loaded, lost = [], []
        for _ in range(3):
            assert live.generate(PROMPTS[:1], 8) == expected
            stats = assert_clean(live)
            loaded.append(stats.get("tokens_loaded", 0))
            lost.append(stats.get("states_not_saved", 0))
            live.llm.reset_prefix_cache()
        assert loaded == [0, 0, 299 // _unit(live) * _unit(live)]
        assert lost == [len(live.connector.geometry.states)] * 3


def test_engine_is_refused_if_no_boundary_keeps_its_state() -> None:
    """An engine does not start if vLLM does not keep the state of any boundary."""
    why, options = "set enable_prefix_caching=True", {"enable_prefix_caching": False}
    with pytest.raises(UnsupportedError, match=why), engine("granite-hybrid", {"chunk_tokens": 64}, **options):
        pass


def test_a_unit_is_a_hash_where_states_are_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mamba 2 layers declare that they export states.

    So the engine starts, although a CPU has no kernel for the export.
    """
    monkeypatch.undo()
    options: dict[str, Any] = {"enable_prefix_caching": True, "prefix_match_unit": 32}
    with engine("granite-hybrid", {"chunk_tokens": 128}, **options) as live:
        geometry = live.connector.geometry
        assert (_unit(live), geometry.match_tokens) == (32, 32)
        assert all(geometry.groups[i].block_tokens > 32 for i in geometry.states)
