"""Tensor parallelism: every rank saves and loads its own part, and a rank's failure is everybody's."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.common import assert_clean, baseline, engine, prompt, whole_blocks

pytestmark = pytest.mark.engine

PROMPTS = [prompt(300, 31), prompt(140, 32)]
TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "enable_prefix_caching": False}


@pytest.fixture(autouse=True)
def _one_core_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")


@pytest.mark.spawned
def test_two_ranks() -> None:
    """Two ranks: the same answers, from loaded KV; then one rank's loads fail: the same answers, recomputed."""
    expected = baseline(PROMPTS, 12, **TWO_RANKS)
    with engine(kvpipe={}, **TWO_RANKS) as live:
        for _ in range(2):
            assert live.generate(PROMPTS, 12) == expected
        stats = assert_clean(live)
        assert stats["tokens_loaded"] == whole_blocks(live, 300, 140)
        assert "load_failed" not in stats


@pytest.mark.parametrize("load", ["sync", "async"])
def test_one_rank_of_two_fails_its_loads(load: str) -> None:
    """When one rank's load fails, the request is recomputed on both."""
    expected = baseline(PROMPTS, 12, **TWO_RANKS)
    with engine(kvpipe={"load": load}, connector="OneRankFails", module="tests.engine.faulty", **TWO_RANKS) as live:
        for _ in range(3):
            assert live.generate(PROMPTS, 12) == expected
        stats = assert_clean(live)
        assert stats["load_failed"] >= 2
        assert stats["tokens_loaded"] > 0
