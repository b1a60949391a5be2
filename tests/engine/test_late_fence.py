"""Runner V1, whose next step sets the fence.

A CPU runs the same steps as a GPU, except that the host waits for copies.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvpipe.connectors.vllm import hooks
from kvpipe.worker.side import WorkerSide
from tests.engine.common import assert_clean, baseline, crowded, engine, prompt

pytestmark = pytest.mark.engine

PROMPTS = [prompt(100 + 30 * i, 700 + i) for i in range(8)]


@pytest.mark.parametrize("mode", ["layerwise", "step"])
def test_answers_are_right_when_the_next_step_fences(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are freed, preempted and reused at once. Saves land in parallel with sampling and scheduling."""
    monkeypatch.setattr(hooks, "fences_late", lambda *_: True)
    options: dict[str, Any] = {"cache_tokens": 960, "max_model_len": 640, "enable_prefix_caching": True}
    expected = baseline(PROMPTS, 60, **options)
    with engine(kvpipe={"chunk_tokens": 64, "copy_threads": 1, "mode": mode}, **options) as live:
        worker = live.worker_connector.worker
        assert isinstance(worker, WorkerSide)
        assert worker.pipeline._hooks.fences_late
        for _ in range(2):
            assert crowded(live, PROMPTS, 60) == expected
            live.settle()
            live.llm.reset_prefix_cache()
        stats = assert_clean(live)
        assert stats["preempted"] > 0
        assert stats["tokens_loaded"] > 0
