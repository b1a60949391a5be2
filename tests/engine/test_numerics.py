"""Numerical settings of libraries, on real engines: KV is shared only between engines with equal results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvpipe.scheduler import gauges
from tests.engine.child_engine import child
from tests.engine.common import assert_clean, baseline, engine, prompt

pytestmark = pytest.mark.engine

PROMPTS = [prompt(600, 341)]
HELD, TOKENS = 576, 20
LOW = {"ONEDNN_DEFAULT_FPMATH_MODE": "BF16"}


def test_engines_share_kv_when_their_libraries_compute_alike(tmp_path: Path) -> None:
    """A setting may make a library multiply float32 in bfloat16, and vLLM does not notice.

    KV of such an engine is not shared.
    """
    folder = str(tmp_path / "kv")
    options: dict[str, Any] = {
        "kvpipe": {"chunk_tokens": 64, "tiers": [{"kind": "disk", "path": folder}]},
        "enable_prefix_caching": False,
    }
    expected = baseline(PROMPTS, TOKENS, enable_prefix_caching=False)
    with child(LOW, **options) as other:
        low, _ = other.generate(PROMPTS, TOKENS)
    with engine(**options) as live:
        assert live.generate(PROMPTS, TOKENS) == expected
        assert assert_clean(live).get("tokens_loaded", 0) == 0
    with child(LOW, **options) as other:
        answers, hits = other.generate(PROMPTS, TOKENS)
    assert answers == low
    assert hits.get("disk", 0) == HELD


def test_an_engine_says_that_its_hashes_begin_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PYTHONHASHSEED seeds vLLM's hashes.

    An engine with another value finds no chunks, and a gauge reports that the values differ.
    """
    options: dict[str, Any] = {
        "kvpipe": {"chunk_tokens": 64, "tiers": [{"kind": "disk", "path": str(tmp_path / "kv")}]},
        "enable_prefix_caching": False,
    }
    for seed, differs in (("0", 0.0), ("11", 1.0)):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        with engine(**options) as live:
            live.generate(PROMPTS, 1)
            assert assert_clean(live).get("tokens_loaded", 0) == 0
            side = live.connector.scheduler
            assert side is not None
            assert gauges.totals(side)["first_hash_differs"] == {"disk": differs}
