"""Models with recurrent states: a hit ends where the state of its last token is held, and nowhere else."""

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
LOST_AT = 24
"""Tokens of its answer that a request has when it is preempted."""
FAMILIES = [
    pytest.param("granite-hybrid", 128, {}, id="mamba2"),
    pytest.param("falcon-h1", 128, {}, id="mamba2-beside-attention"),
    pytest.param("lfm2", 128, {}, id="short-convolution"),
    pytest.param("lfm2", 128, {"prefix_match_unit": 16}, id="hashes-within-a-block"),
    pytest.param("qwen3-next", 192, {"dtype": "bfloat16"}, id="gated-delta-net"),
]


@pytest.fixture(autouse=True)
def _states_at_the_end_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM's CPU build has no kernel that exports a state within a step, though its Mamba 2 layers promise one.

    With prefix caching every prefill of them fails on a CPU, with kvpipe as without.
    """
    monkeypatch.delattr(MambaMixer2, "get_kv_cache_spec")


def _unit(live: Any) -> int:
    geometry = live.connector.geometry
    assert geometry.states
    return int(geometry.unit_tokens)


@pytest.mark.parametrize(("recipe", "chunk_tokens", "options"), FAMILIES)
def test_hits_and_conversations(recipe: str, chunk_tokens: int, options: dict[str, Any], tmp_path: Path) -> None:
    """Answers are those of vLLM's prefix cache: cold, warm, in a second turn, preempted, beside a hit, from a disk."""
    options = {"enable_prefix_caching": True, "prefix_cache_retention_interval": None} | options
    with engine(recipe, None, **options) as plain:
        expected = [[plain.generate([p], 40)[0] for p in PROMPTS] for _ in range(2)]
        turns = [p + answer + prompt(40, 31) for p, answer in zip(PROMPTS, expected[0], strict=True)]
        second = [plain.generate([p], 12)[0] for p in turns]
        again = [plain.generate([p], 12)[0] for p in turns]
        begun = expected[1][0][:LOST_AT]
        resumed = [begun + plain.generate([PROMPTS[0] + begun], 40 - LOST_AT)[0] for _ in range(2)]
    disk = {"kind": "disk", "path": str(tmp_path / "kv"), "bytes_max": "1GiB", "store": "all"}
    config: dict[str, Any] = {"chunk_tokens": chunk_tokens, "tiers": [disk]}
    with engine(recipe, config, **options) as live:
        unit, before = _unit(live), 0
        assert [live.generate([p], 40)[0] for p in PROMPTS] == expected[0]
        held = [(len(p) - 1) // unit * unit for p in PROMPTS]
        for _ in range(2):
            live.settle()  # a reset lets go of what waits to be stored
            live.llm.reset_prefix_cache()
            assert [live.generate([p], 40)[0] for p in PROMPTS] == expected[1]
            before += sum(held)
            assert assert_clean(live)["tokens_loaded"] == before
        live.llm.reset_prefix_cache()
        # from where the first answer crossed a boundary
        assert [live.generate([p], 12)[0] for p in turns] in (second, again)
        ends = [(len(p) + 39) // unit * unit for p in PROMPTS]
        before += sum(ends)
        assert assert_clean(live)["tokens_loaded"] == before
        live.llm.reset_prefix_cache()
        assert preempted(live, PROMPTS[0], 40, LOST_AT) in resumed
        assert assert_clean(live)["tokens_loaded"] == before + held[0] + (len(PROMPTS[0]) + LOST_AT - 1) // unit * unit
    with engine(recipe, config, **options) as live:
        assert [live.generate([p], 40)[0] for p in PROMPTS] == expected[1]
        assert assert_clean(live)["tokens_loaded"] == sum(held)  # from the disk
        live.llm.reset_prefix_cache()
        live.generate([PROMPTS[1][: 2 * unit + 10]], 1)  # no prompt has ended there: computed, and held by vLLM
        assert assert_clean(live)["tokens_loaded"] == sum(held)
        assert live.generate([PROMPTS[1]], 40) == expected[1][1:]
        assert assert_clean(live)["tokens_loaded"] == sum(held) + held[1] - 2 * unit


def test_states_in_the_models_own_type(tmp_path: Path) -> None:
    """Without AVX-512 states are as the model's values are, and blocks are shorter: the same ladder."""
    with complete("plain"):
        test_hits_and_conversations("qwen3-next", 192, {"dtype": "bfloat16"}, tmp_path)


def test_beside_a_hit_within_a_block() -> None:
    """VLLM goes on within a block of its own, in a copy; kvpipe finds what of that request ends with a block."""
    options: dict[str, Any] = {"enable_prefix_caching": True, "prefix_match_unit": 16}
    prompts = [PROMPTS[1][:320], PROMPTS[1], PROMPTS[1]]
    with engine("lfm2", None, **options) as plain:
        expected = [plain.generate([p], 12) for p in prompts]
    with engine("lfm2", {"chunk_tokens": 128}, **options) as live:
        unit = _unit(live)
        assert 319 // 16 * 16 % unit  # where it begins
        assert [live.generate([p], 12) for p in prompts[:2]] == expected[:2]
        assert assert_clean(live).get("tokens_loaded", 0) == 0
        live.llm.reset_prefix_cache()
        assert live.generate([prompts[2]], 12) == expected[2]
        assert assert_clean(live)["tokens_loaded"] == (len(PROMPTS[1]) - 1) // unit * unit


@pytest.mark.parametrize(("recipe", "chunk_tokens", "options"), FAMILIES[:2])
def test_preempted_requests(recipe: str, chunk_tokens: int, options: dict[str, Any]) -> None:
    """Requests that lose their blocks come back with what is held of them, and answer as ever.

    Those of other families answer otherwise in other batches, with kvpipe as without: they are preempted alone.
    """
    prompts = [prompt(100 + 30 * i, 600 + i) for i in range(8)]
    more: dict[str, Any] = {"cache_tokens": 2560, "max_model_len": 640, "enable_prefix_caching": True}
    with engine(recipe, None, **options | more) as plain:
        expected = plain.generate(prompts, 120)
    with engine(recipe, {"chunk_tokens": chunk_tokens}, **options | more) as live:
        for _ in range(2):
            assert crowded(live, prompts, 120) == expected
            live.llm.reset_prefix_cache()
        stats = assert_clean(live)
        assert stats["preempted"] > 0
        assert stats["tokens_loaded"] > 0


def test_a_state_whose_copy_fails() -> None:
    """It is lost, and counted: the next request with that prompt computes it and is offered it again."""
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


def test_refused() -> None:
    """Where vLLM keeps no state of a boundary, an engine does not start."""
    why, options = "set enable_prefix_caching=True", {"enable_prefix_caching": False}
    with pytest.raises(UnsupportedError, match=why), engine("granite-hybrid", {"chunk_tokens": 64}, **options):
        pass


def test_a_unit_is_a_hash_where_states_are_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mamba 2 promises to; the engine starts, and has no kernel for it on a CPU."""
    monkeypatch.undo()
    options: dict[str, Any] = {"enable_prefix_caching": True, "prefix_match_unit": 32}
    with engine("granite-hybrid", {"chunk_tokens": 128}, **options) as live:
        geometry = live.connector.geometry
        assert (_unit(live), geometry.match_tokens) == (32, 32)
        assert all(geometry.groups[i].block_tokens > 32 for i in geometry.states)
