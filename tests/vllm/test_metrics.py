"""Metrics report each change once, are added up over ranks and intervals, and are registered with vLLM."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvpipe.config.settings import load_settings
from kvpipe.connectors.vllm.metrics import METRICS, PREFIX, KVPipeProm, KVPipeStats, Meter, Metric, known_labels
from kvpipe.tiers.totals import Totals
from kvpipe.trace.counters import FAULTS
from kvpipe.trace.durations import KEPT_MAX, LOAD, Durations
from kvpipe.trace.miss_reasons import REASONS
from tests.rigs import promtool

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "kvpipe.rules.yml"


def test_a_meter_reports_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    """A counter is reported as a difference, a gauge as a value, and each only if it has changed.

    Metrics that are expensive to read are read less often than others.
    """
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


def test_changes_wait_for_a_later_step_that_can_report_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics are not added up in every step, because this would cost a fast engine several percent of its time."""
    now, later = [100.0], [True]
    monkeypatch.setattr("kvpipe.connectors.vllm.metrics.time.monotonic", lambda: now[0])
    hits, calls = [0], list[int]()

    def totals() -> Totals:
        calls.append(1)
        return {"hit_tokens": {"memory": hits[0]}}

    durations = Durations()
    meter = Meter(totals, durations=durations.take, can_wait=lambda: later[0])
    assert meter.take() is None
    hits[0] = 64
    durations.of(LOAD, "disk")(0.25)
    assert meter.take() is None
    assert len(calls) == 1
    later[0] = False  # with this step, nothing more is computed
    taken = meter.take()
    assert taken is not None
    assert taken.data == {"hit_tokens": {"memory": 64}, "load_seconds": {"disk": [0.25]}}
    later[0], hits[0], now[0] = True, 70, 100.2
    taken = meter.take()
    assert taken is not None
    assert taken.data == {"hit_tokens": {"memory": 6}}


def test_a_meter_takes_the_durations_since_the_last_call() -> None:
    """Durations are lists of values, because the process that serves `/metrics` sorts the values into buckets."""
    durations = Durations()
    meter = Meter(dict, durations=durations.take)
    durations.of(LOAD, "disk")(0.25)
    durations.of(LOAD, "disk")(0.5)
    durations.of_tier("disk", "write")(1.0)
    taken = meter.take()
    assert taken is not None
    assert taken.data == {"load_seconds": {"disk": [0.25, 0.5]}, "store_seconds": {"disk": [1.0]}}
    assert meter.take() is None


def test_unread_durations_are_bounded() -> None:
    """An engine without statistics never reads the durations, so their number is limited."""
    durations = Durations()
    for at in range(KEPT_MAX + 3):
        durations.of(LOAD, "disk")(at)
    kept = durations.take()[LOAD]["disk"]
    assert (len(kept), kept[0]) == (KEPT_MAX, 3)


def test_stats_add_up() -> None:
    """Counters and durations are added up over ranks and intervals. A gauge keeps only its last value."""
    one = KVPipeStats({"copied_bytes": {"save": 10}, "leases": {"": 5}, "load_seconds": {"disk": (first := [0.5])}})
    other = {
        "copied_bytes": {"save": 7, "load_sync": 3}, "leases": {"": 2},
        "load_seconds": {"disk": [0.25, 1.0], "memory": [0.125]},
    }  # fmt: skip
    both = one.aggregate(KVPipeStats(other))
    assert both.data == {
        "copied_bytes": {"save": 17, "load_sync": 3}, "leases": {"": 2},
        "load_seconds": {"disk": [0.5, 0.25, 1.0], "memory": [0.125]},
    }  # fmt: skip
    assert first == [0.5], "vLLM may have passed the first rank's list on"
    assert not both.is_empty()
    both.reset()
    assert both.is_empty()


def test_stats_keep_a_bounded_number_of_durations() -> None:
    """If a program that embeds the engine never logs the stats, the durations are never reset."""
    stats = KVPipeStats({"load_seconds": {"disk": [0.0] * KEPT_MAX}})
    stats.aggregate(KVPipeStats({"load_seconds": {"disk": [1.0, 2.0]}}))
    kept = stats.data["load_seconds"]["disk"]
    assert (len(kept), kept[-3:]) == (KEPT_MAX, [0.0, 1.0, 2.0])


def test_a_line_for_the_log() -> None:
    """The line is short and has readable units."""
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
    """Return the metrics of two engines in their own registry."""
    registry = CollectorRegistry()

    def make(kind: Any) -> Any:
        def made(**options: Any) -> Any:
            return kind(registry=registry, **options)

        return made

    class Config:
        kv_transfer_config = None

    settings = load_settings({"tiers": ["/mnt/kv"], "quotas": [{"name": "alice", "share": 0.1, "salt": "a"}]})
    kinds = {Counter: make(Counter), Gauge: make(Gauge), Histogram: make(Histogram)}
    return KVPipeProm(
        Config(), kinds, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]}, known_labels(settings)
    ), registry


def test_reported_metrics_are_served(prom: tuple[KVPipeProm, CollectorRegistry]) -> None:
    """Metrics are served by engine and label. Metrics that this version does not know are left out."""
    reported, registry = prom
    reported.observe({"hit_tokens": {"memory": 64}, "leases": {"": 2}, "from_tomorrow": {"": 1}}, 1)
    reported.observe({"hit_tokens": {"memory": 36}, "leases": {"": 0}}, 1)
    served = generate_latest(registry).decode()
    assert 'vllm:kvpipe_hit_tokens_total{engine="1",model_name="m",tier="memory"} 100.0' in served
    assert 'vllm:kvpipe_leases{engine="1",model_name="m"} 0.0' in served
    assert 'vllm:kvpipe_preemptions_total{engine="0",model_name="m"} 0.0' in served
    assert "from_tomorrow" not in served
    reported.observe({"load_seconds": {"disk": [0.2, 0.004]}}, 1)
    labels = 'engine="1",{}model_name="m",tier="disk"}}'
    served = generate_latest(registry).decode()
    for le, count in (("0.0025", 0), ("0.005", 1), ("0.25", 2), ("+Inf", 2)):
        bucket = labels.format(f'le="{le}",')
        assert f"vllm:kvpipe_load_seconds_bucket{{{bucket} {float(count)}" in served
    assert f"vllm:kvpipe_load_seconds_sum{{{labels.format('')} 0.204" in served


def test_counters_begin_at_zero(prom: tuple[KVPipeProm, CollectorRegistry]) -> None:
    """Every counter has its series before the first request, for each engine.

    So rates and alerts also count the first event.
    """
    _, registry = prom
    counts = {
        (sample.name.removeprefix(PREFIX), sample.labels.get("tier", "")): sample.value
        for family in registry.collect() if family.type == "histogram" for sample in family.samples
        if sample.name.endswith("_count") and sample.labels["engine"] == "1"
    }  # fmt: skip
    places = ("load_seconds_count", "memory"), ("store_seconds_count", "memory"), ("lookup_wait_seconds_count", "")
    disk = ((f"{name}_seconds_count", "disk") for name in ("lookup", "load", "store"))
    assert counts == dict.fromkeys((*places, *disk), 0)
    families = [family for family in registry.collect() if family.type == "counter"]
    series: dict[str, set[str]] = {family.name.removeprefix(PREFIX): set() for family in families}
    for name, sample in ((family.name.removeprefix(PREFIX), one) for family in families for one in family.samples):
        if sample.name.endswith("_total") and sample.labels["engine"] == "1":
            assert sample.value == 0
            series[name].add(sample.labels.get(METRICS[name].label, ""))
    flows, kinds, quotas = {"disk read", "disk write"}, {"save", "load_sync", "load_async"}, {"alice", "others"}
    assert series == {
        "hit_tokens": {"memory", "disk"}, "missed_tokens": set(REASONS), "misses": set(REASONS),
        "copied_bytes": kinds, "copy_seconds": kinds, "wait_seconds": {""}, "faults": set(FAULTS),
        "tier_bytes": flows, "tier_seconds": flows, "preemptions": {""}, "evictions": {""},
        "node_takeovers": {""}, "trace_dropped": {"queue", "sink"}, "quota_evictions": quotas, "quota_refusals": quotas,
    }  # fmt: skip


def _served(registry: CollectorRegistry) -> set[str]:
    samples = {sample.name for family in registry.collect() for sample in family.samples}
    return samples | {family.name + ("_total" if family.type == "counter" else "") for family in registry.collect()}


def _metric(name: str) -> Metric:
    return METRICS[re.sub(r"_(total|bucket)$", "", name.removeprefix(PREFIX))]


def test_the_dashboard_asks_for_metrics_that_exist(prom: tuple[KVPipeProm, CollectorRegistry]) -> None:
    """Every metric that the dashboard names is served, with the labels that the dashboard uses.

    Every metric is on the dashboard.
    """
    board = json.loads(promtool.DASHBOARD.read_text(encoding="utf-8"))
    panels = [one for panel in board["panels"] for one in (panel, *panel.get("panels", ()))]
    asked = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    named = {name for expression in asked for name in re.findall(r"vllm:kvpipe_\w+", expression)}
    assert named <= _served(prom[1])
    assert {metric.full_name(name) for name, metric in METRICS.items()} <= {
        one.removesuffix("_bucket") for one in named
    }
    for expression in asked:
        for by, name in re.findall(r"by \(([\w, ]+)\) \(\w*\(?(vllm:kvpipe_\w+)", expression):
            assert set(by.split(", ")) <= {_metric(name).label, "engine", "model_name", "le"}, expression
        chosen = '{model_name=~"$model",instance=~"$instance",pod=~"$pod"}'
        assert expression.count("vllm:") == expression.count(chosen), expression
    ids = [panel["id"] for panel in panels]
    assert len(set(ids)) == len(ids)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)


def test_an_empty_panel_is_seen(prom: tuple[KVPipeProm, CollectorRegistry], tmp_path: Path) -> None:
    """`test_served_with_one_flag` checks that no panel is empty.

    This check can fail: before the first hit, the panels of load times are empty.
    """
    reported, registry = prom
    query = (
        'histogram_quantile(0.9, sum by (le) (rate(vllm:kvpipe_load_seconds_bucket{pod=~"$pod"}[$__rate_interval])))'
    )
    scrapes = [generate_latest(registry).decode()]
    with pytest.raises(AssertionError, match="FAILED"):
        promtool.check_answers([query], scrapes * 2, tmp_path)
    reported.observe({"load_seconds": {"memory": [0.5]}})
    promtool.check_answers([query], [*scrapes, generate_latest(registry).decode()], tmp_path)


def test_the_dashboard_has_variables_that_need_no_label() -> None:
    """`All` also chooses engines without the label `pod`.

    The data source is also a variable, so that Grafana can provision the file.
    """
    board = json.loads(promtool.DASHBOARD.read_text(encoding="utf-8"))
    source, *others = board["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == ("datasource", "datasource", "prometheus")
    assert [one["name"] for one in others] == ["model", "instance", "pod"]
    assert {one["allValue"] for one in others} == {".*"}
    assert set(re.findall(r'"uid": "(\$[^"]+)"', json.dumps(board))) == {"${datasource}"}


def test_alert_rules_name_metrics_that_exist(prom: tuple[KVPipeProm, CollectorRegistry]) -> None:
    """Each label that a rule compares or drops belongs to its metric, and each fault that a rule names exists."""
    served = _served(prom[1])
    known: dict[str, set[str]] = {"name": {*FAULTS}, "reason": {*REASONS}}
    (group,) = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]:
        found = re.findall(r"(?:without \((\w+)\) \((?:\w+\()?)?(vllm:\w+)(?:\{(\w+)\W+([^\"]+))?", rule["expr"])
        assert found, rule["expr"]
        for dropped, name, label, values in found:
            assert name in served
            assert {dropped, label} - {""} <= {_metric(name).label}, rule["expr"]
            assert not label or {*values.split("|")} <= known[label], rule["expr"]
