"""Pipeline parallelism: two stages, each in its own process with half of the layers.

The stages run with the tests' own worker class (`staged.StagedWorker`), because vLLM's CPU worker lacks a buffer. An
engine with one stage gives the expected answers.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from kvpipe.connectors.vllm.tiny.engine import Engine
from kvpipe.testing.waiting import WAIT_S
from tests.engine.common import assert_clean, baseline, crowded, engine, prompt, whole_blocks

pytestmark = pytest.mark.engine

MODEL = "llama-mha"
PROMPTS = [prompt(300, 31), prompt(140, 32)]
MANY = [prompt(100 + 20 * i, 100 + i) for i in range(8)]
OPTIONS: dict[str, Any] = {"cache_tokens": 1280, "enable_prefix_caching": False}
TWO_STAGES: dict[str, Any] = OPTIONS | {"pipeline_parallel_size": 2, "worker_cls": "tests.engine.staged.StagedWorker"}


def _store_all(live: Engine) -> None:
    """Make steps until all offered chunks are stored."""
    limit = time.monotonic() + WAIT_S
    while (side := live.connector.scheduler) is not None and side.staging is not None and side.staging.pending:
        assert time.monotonic() < limit
        live.settle()
        time.sleep(0.01)


def test_two_stages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Answers from loaded KV are the same: cold, warm, in a conversation, preempted, and from disk after a restart."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    expected = baseline(PROMPTS, 12, MODEL, **OPTIONS)
    turn = PROMPTS[0] + expected[0] + prompt(50, 33)
    answer, many = baseline([turn], 12, MODEL, **OPTIONS), baseline(MANY, 60, MODEL, **OPTIONS)
    disk = {"kind": "disk", "path": str(tmp_path / "kv"), "bytes_max": "1GiB"}
    config = {"chunk_tokens": 64, "tiers": [disk], "save_decode_steps": 1}
    with engine(MODEL, config, **TWO_STAGES) as live:
        for _ in range(2):
            assert live.generate(PROMPTS, 12) == expected
            loaded = assert_clean(live).get("tokens_loaded", 0)
        assert loaded == whole_blocks(live, 300, 140)
        assert live.generate([turn], 12) == answer
        assert assert_clean(live)["tokens_loaded"] - loaded == whole_blocks(live, 300 + 12 - 1)
        assert crowded(live, MANY, 60) == many
        assert assert_clean(live)["preempted"] > 0
        _store_all(live)
    with engine(MODEL, config, **TWO_STAGES) as live:
        assert live.generate(PROMPTS, 12) == expected
        stats = assert_clean(live)
        assert stats["tokens_loaded"] > 0
        assert stats["chunks_fetched"] > 0
    assert [len(list((tmp_path / "kv").rglob(f"*-g0-r{rank}of2"))) > 0 for rank in range(3)] == [True, True, False]
