"""If a block has the pages of all layers side by side, an engine copies whole blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvpipe.worker.side import WorkerSide
from tests.engine.common import BLOCK, assert_clean, assert_legal, baseline, engine, preempted, prompt, whole_blocks

pytestmark = pytest.mark.engine

PROMPTS = [prompt(300, 21), prompt(530, 22)]
DUE = whole_blocks(BLOCK, *map(len, PROMPTS))
OWN: dict[str, Any] = {"enable_prefix_caching": False}


@pytest.fixture(autouse=True)
def _cross_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU's backend declare a cross-layer layout.

    The backend's kernels can read this layout, but the backend declares only LBHNC.
    """
    both = KVCacheLayout.LBHNC, KVCacheLayout.BLHNC
    monkeypatch.setattr(CPUAttentionBackend, "supported_kv_cache_layouts", classmethod(lambda _: both))
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BLHNC")


def test_whole_blocks_are_saved_loaded_and_stored_apart_from_others(tmp_path: Path) -> None:
    """Answers are right after hits, preemptions and reads from a disk.

    An engine that copies by layer finds none of the chunks.

    Both engines' caches have the same layout, so only the order of pages in a slot distinguishes their chunks.
    """
    trace = tmp_path / "trace"
    disk = {"kind": "disk", "path": str(tmp_path / "kv"), "bytes_max": "1GiB", "store": "all"}
    tier: dict[str, Any] = {"chunk_tokens": 64, "tiers": [disk]}
    step = tier | {"mode": "step", "trace_file": str(trace), "trace_level": "debug"}
    expected = baseline(PROMPTS, 8, **OWN)
    with engine("llama", step, **OWN) as live:
        worker = live.worker_connector.worker
        assert isinstance(worker, WorkerSide)
        assert len(worker.geometry.layers) == 1
        for loaded in (0, DUE):
            assert live.generate(PROMPTS, 8) == expected
            assert assert_clean(live).get("tokens_loaded", 0) == loaded
        assert preempted(live, PROMPTS[1], 8, 4) == expected[1]
        assert assert_clean(live)["chunks_stored"] > 0
    assert_legal(trace)
    for kvpipe, found in ((step, DUE), (tier | {"mode": "layerwise"}, 0)):
        with engine("llama", kvpipe, **OWN) as live:
            assert live.generate(PROMPTS, 8) == expected
            assert assert_clean(live).get("tokens_loaded", 0) == found
