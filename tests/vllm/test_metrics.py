"""Metrics: what has changed is reported once, adds up over ranks and intervals, and is in vLLM's registry."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvpipe.connectors.vllm.metrics import METRICS, PREFIX, KVPipeProm, KVPipeStats, Meter
from kvpipe.trace.totals import Totals

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"


def test_a_meter_reports_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters as what came on top, gauges as they are, if they have changed; what costs more is asked seldom."""
    now = [100.0]
    monkeypatch.setattr("kvpipe.connectors.vllm.metrics.time.monotonic", lambda: now[0])
    totals: dict[str, dict[str, float]] = {"hit_tokens": {"memory": 0}, "leases": {"": 0}}
    seldom: dict[str, dict[str, float]] = {"quota_evictions": {"alice": 5}}
    asked: list[int] = []

    def rare() -> Totals:
        asked.append(1)
        return {name: dict(values) for name, values in seldom.items()}

    meter = Meter(lambda: {name: dict(values) for name, values in totals.items()}, rare)
    first = meter.take()
    assert first is not None
    assert first.data == {"leases": {"": 0}, "quota_evictions": {"alice": 5}}
    assert meter.take() is None
    totals["hit_tokens"]["memory"], totals["leases"][""], seldom["quota_evictions"]["alice"] = 64, 2, 9
    second = meter.take()
    assert second is not None
    assert second.data == {"hit_tokens": {"memory": 64}, "leases": {"": 2}}
    totals["hit_tokens"]["memory"] = 100
    now[0] += 1
    third = meter.take()
    assert third is not None
    assert third.data == {"hit_tokens": {"memory": 36}, "quota_evictions": {"alice": 4}}
    assert len(asked) == 2


def test_stats_add_up() -> None:
    """Over ranks and over intervals; a gauge is as it was reported last."""
    one = KVPipeStats({"copied_bytes": {"save": 10}, "leases": {"": 5}})
    both = one.aggregate(KVPipeStats({"copied_bytes": {"save": 7, "load_sync": 3}, "leases": {"": 2}}))
    assert both.data == {"copied_bytes": {"save": 17, "load_sync": 3}, "leases": {"": 2}}
    assert not both.is_empty()
    both.reset()
    assert both.is_empty()


def test_a_line_for_the_log() -> None:
    """Short, and in units that people read."""
    stats = KVPipeStats({
        "hit_tokens": {"memory": 288}, "missed_tokens": {"evicted": 12}, "copied_bytes": {"save": 2_500_000},
        "copy_seconds": {"save": 0.0123}, "faults": {"job_failed": 2}, "pool_chunks_used": {"": 3}, "requests": {"": 9},
    })  # fmt: skip
    assert stats.reduce() == {
        "hit tokens (memory)": 288, "missed tokens (evicted)": 12, "save MB": 2.5, "save s": 0.012,
        "pool chunks used": 3, "fault job_failed": 2,
    }  # fmt: skip


@pytest.fixture
def prom() -> tuple[KVPipeProm, CollectorRegistry]:
    """The metrics of two engines in a registry of their own."""
    registry = CollectorRegistry()

    def make(kind: Any) -> Any:
        def made(**options: Any) -> Any:
            return kind(registry=registry, **options)

        return made

    class Config:
        kv_transfer_config = None

    kinds = {Counter: make(Counter), Gauge: make(Gauge), Histogram: make(Histogram)}
    return KVPipeProm(Config(), kinds, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]}), registry


def test_what_was_reported_is_served(prom: tuple[KVPipeProm, CollectorRegistry]) -> None:
    """By engine and label; what another version reports is left out."""
    reported, registry = prom
    reported.observe({"hit_tokens": {"memory": 64}, "leases": {"": 2}, "from_tomorrow": {"": 1}}, 1)
    reported.observe({"hit_tokens": {"memory": 36}, "leases": {"": 0}}, 1)
    served = generate_latest(registry).decode()
    assert 'vllm:kvpipe_hit_tokens_total{engine="1",model_name="m",tier="memory"} 100.0' in served
    assert 'vllm:kvpipe_leases{engine="1",model_name="m"} 0.0' in served
    assert 'vllm:kvpipe_preemptions_total{engine="0",model_name="m"} 0.0' in served
    assert "from_tomorrow" not in served


def test_the_dashboard_asks_for_metrics_that_exist(prom: tuple[KVPipeProm, CollectorRegistry]) -> None:
    """Every metric that it names is served, with the labels that it uses; and every metric is on it."""
    _, registry = prom
    served = {sample.name for family in registry.collect() for sample in family.samples} | {
        family.name + ("_total" if family.type == "counter" else "") for family in registry.collect()
    }
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    asked = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    named = {name for expression in asked for name in re.findall(r"vllm:kvpipe_\w+", expression)}
    assert named <= served
    assert {PREFIX + name + ("_total" if metric.kind == "counter" else "") for name, metric in METRICS.items()} <= named
    for expression in asked:
        for name, labels in re.findall(r"by \(([\w, ]+)\) \(\w*\(?(vllm:kvpipe_\w+)", expression):
            metric = METRICS[labels.removeprefix(PREFIX).removesuffix("_total")]
            assert set(name.replace(" ", "").split(",")) <= {metric.label, "engine", "model_name"}, expression
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in board["panels"])
