"""Models with recurrent states: a hit ends where the state of its last token is held, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

from tests.engine.common import assert_clean, engine, prompt

pytestmark = pytest.mark.engine

PROMPTS = [prompt(300, 21), prompt(530, 22)]
FAMILIES = [
    pytest.param("granite-hybrid", {}, id="mamba2"),
    pytest.param("falcon-h1", {}, id="mamba2-beside-attention"),
    pytest.param("lfm2", {}, id="short-convolution"),
    pytest.param("qwen3-next", {"dtype": "bfloat16"}, id="gated-delta-net"),
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


@pytest.mark.parametrize(("recipe", "options"), FAMILIES)
def test_hits_and_conversations(recipe: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Answers are those of vLLM's own prefix cache: cold, warm, in a second turn, beside a local hit, from a disk."""
    options = {"enable_prefix_caching": True, "prefix_cache_retention_interval": None} | options
    with engine(recipe, None, **options) as plain:
        expected = [[plain.generate([p], 40)[0] for p in PROMPTS] for _ in range(2)]
        turns = [p + answer + prompt(40, 31) for p, answer in zip(PROMPTS, expected[0], strict=True)]
        second = [plain.generate([p], 12)[0] for p in turns]
        again = [plain.generate([p], 12)[0] for p in turns]
    disk = {"kind": "disk", "path": str(tmp_path / "kv"), "bytes_max": "1GiB", "store": "all"}
    config: dict[str, Any] = {"chunk_tokens": 128, "tiers": [disk]}
    with engine(recipe, config, **options) as live:
        unit, before = _unit(live), 0
        assert [live.generate([p], 40)[0] for p in PROMPTS] == expected[0]
        held = [(len(p) - 1) // unit * unit for p in PROMPTS]
        for _ in range(2):
            live.llm.reset_prefix_cache()
            assert [live.generate([p], 40)[0] for p in PROMPTS] == expected[1]
            before += sum(held)
            assert assert_clean(live)["tokens_loaded"] == before
        live.llm.reset_prefix_cache()
        assert [live.generate([p], 12)[0] for p in turns] in (
            second,
            again,
        )  # from where the first answer crossed a boundary
        ends = [(len(p) + 39) // unit * unit for p in PROMPTS]
        assert assert_clean(live)["tokens_loaded"] == before + sum(ends)
    with engine(recipe, config, **options) as live:
        assert [live.generate([p], 40)[0] for p in PROMPTS] == expected[1]
        assert assert_clean(live)["tokens_loaded"] == sum(held)  # from the disk
        live.llm.reset_prefix_cache()
        live.generate([PROMPTS[1][: 2 * unit + 10]], 1)  # no prompt has ended there: computed, and held by vLLM
        assert assert_clean(live)["tokens_loaded"] == sum(held)
        assert live.generate([PROMPTS[1]], 40) == expected[1][1:]
        assert assert_clean(live)["tokens_loaded"] == sum(held) + held[1] - 2 * unit
