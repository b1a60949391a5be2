"""Expert parallelism: the KV is as with tensor or data parallelism, and so is what becomes of it.

The ranks run with a worker class of the tests' own (`staged.ExpertWorker`): vLLM's CPU kernel does not know which
experts a rank has. What is right is what an engine of one rank answers.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from kvpipe.testing.models import make_model
from tests.engine.common import assert_clean, baseline, engine, prompt
from tests.engine.serving import Server

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


def test_replicas_share_their_experts_and_a_disk(tmp_path: Path) -> None:
    """Data parallel, in lockstep: what one replica has been asked is found by the other; metrics tell them apart."""
    expected = baseline(PROMPTS, 12, MODEL, enable_prefix_caching=False)
    tier = {"kind": "disk", "path": str(tmp_path / "kv"), "bytes_max": "1GiB"}
    config = {"chunk_tokens": 64, "lookup_ms_max": 20_000, "tiers": [tier]}
    options = ("--data-parallel-size", "2", "--enable-expert-parallel", "--worker-cls", WORKER)
    with Server(
        tmp_path / "log", config, *options, "--no-enable-prefix-caching", model=make_model(MODEL),
        VLLM_CPU_OMP_THREADS_BIND="nobind",
    ) as server:  # fmt: skip
        for which in (0, 1):
            assert server.stream(PROMPTS[which], 12, rank=which) == expected[which]
        server.idle()
        limit = time.monotonic() + 60
        while len(list((tmp_path / "kv").rglob("*-g0-*"))) < 4 + 2 and time.monotonic() < limit:
            time.sleep(0.2)
        for which in (0, 1):
            assert server.stream(PROMPTS[which], 12, rank=1 - which) == expected[which]
            assert server.stream(PROMPTS[which], 12, rank=which) == expected[which]
        server.idle()
        for replica in "01":
            assert server.metric("hit_tokens", tier="disk", engine=replica) > 0
            assert server.metric("hit_tokens", tier="memory", engine=replica) > 0
