"""The OpenAI-compatible server finds kvpipe by its registered name, with the one flag of the README."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvpipe.connectors.vllm.metrics import METRICS
from kvpipe.connectors.vllm.tiny.models import make_model
from tests.engine.common import BLOCK, baseline, prompt, whole_blocks
from tests.engine.serving import Server
from tests.rigs import promtool

pytestmark = pytest.mark.engine


def test_served_with_one_flag(tmp_path: Path) -> None:
    """The server with the README's flag answers like an engine without kvpipe. The second answer uses loaded KV.

    After the second answer no main panel of the dashboard is empty.
    """
    tokens, held = prompt(300, 41), whole_blocks(BLOCK, 300)
    expected = baseline([tokens], 12, enable_prefix_caching=False)[0]
    with Server(tmp_path / "log", None, "--no-enable-prefix-caching", spawned=True) as server:
        scrapes = [server.ask("GET", "/metrics")[1]]
        for _ in range(2):
            assert server.stream(tokens, 12) == expected
            server.idle()
        metrics = server.ask("GET", "/metrics")[1]
        stated = server.stated
    promtool.check_answers(promtool.main_queries(), [*scrapes, metrics], tmp_path)
    assert re.search(r"^\(Worker pid=\d+\) INFO \S+ \S+ \[numerics\.py:\d+\] numerics ", stated, re.MULTILINE), stated
    assert "request=" not in stated, "no line per request"
    hits = [
        float(line.rsplit(" ", 1)[1])
        for line in metrics.splitlines()
        if line.startswith("vllm:external_prefix_cache_hits_total")
    ]
    assert sum(hits) == held, metrics[:2000]
    for line in (
        f'vllm:kvpipe_hit_tokens_total{{engine="0",model_name="MODEL",tier="memory"}} {held}.0',
        'vllm:kvpipe_misses_total{engine="0",model_name="MODEL",reason="not_saved"} 1.0',
        'vllm:kvpipe_jobs_in_flight{engine="0",model_name="MODEL"} 0.0',
        'vllm:kvpipe_leases{engine="0",model_name="MODEL"} 0.0',
        f'vllm:prompt_tokens_cached_by_source_total{{engine="0",model_name="MODEL",source="host"}} {held}.0',
    ):
        assert line.replace("MODEL", str(make_model("llama"))) in metrics, metrics[-6000:]
    for name, metric in METRICS.items():
        series = metric.full_name(name) + ("_bucket" if metric.kind == "histogram" else "")
        assert f"\n{series}{{" in metrics or metric.label, name
