"""Expert parallelism: the KV is as with tensor or data parallelism, and so is what becomes of it.

The ranks run with a worker class of the tests' own (`staged.ExpertWorker`): vLLM's CPU kernel does not know which
experts a rank has. What is right is what an engine of one rank answers.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.common import assert_clean, baseline, engine, prompt

pytestmark = pytest.mark.engine

MODEL, WORKER = "qwen3-moe", "tests.engine.staged.ExpertWorker"
PROMPTS = [prompt(300, 31), prompt(140, 32)]
TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "worker_cls": WORKER}


def test_experts_on_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has half of the experts, and of the heads: cold, warm, and a conversation."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    expected = baseline(PROMPTS, 12, MODEL, enable_prefix_caching=False)
    turn = PROMPTS[0] + expected[0] + prompt(50, 33)
    answer = baseline([turn], 12, MODEL, enable_prefix_caching=False)
    with engine(MODEL, {}, enable_prefix_caching=False, **TWO_RANKS) as live:
        for _ in range(2):
            assert live.generate(PROMPTS, 12) == expected
        assert live.generate([turn], 12) == answer
        assert assert_clean(live)["tokens_loaded"] == 288 + 128 + 288
