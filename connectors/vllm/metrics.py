"""Figures for operators, through vLLM's own `/metrics` and its log: a table of metrics, and the way they travel.

Each side hands vLLM what has changed since it was asked last (counters as differences, gauges as they are), as a plain
dict of ``name -> label value -> number``. vLLM adds up the ranks' and the scheduler's and brings them to the process
that serves `/metrics`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvpipe.trace.totals import Totals

PREFIX = "vllm:kvpipe_"
SELDOM_S = 0.5


class Metric(NamedTuple):
    """One metric: its kind, the name of its one label (empty: it has none), its documentation."""

    kind: Literal["counter", "gauge"]
    label: str
    text: str


METRICS: dict[str, Metric] = {
    "hit_tokens": Metric("counter", "tier", "Tokens found beyond vLLM's own cache, at admission."),
    "missed_tokens": Metric("counter", "reason", "Tokens of admitted requests that nobody held, by the reason."),
    "misses": Metric("counter", "reason", "Admissions for which not all that can be held was, by the reason."),
    "copied_bytes": Metric("counter", "kind", "Bytes saved and loaded, over all ranks."),
    "copy_seconds": Metric("counter", "kind", "Seconds from the submission of a layer's copy to its end, added up."),
    "wait_seconds": Metric("counter", "", "Seconds that the engine's own thread has waited for copies."),
    "faults": Metric("counter", "name", "What went wrong and was contained: a cache miss each, never a crash."),
    "tier_bytes": Metric("counter", "flow", "Bytes read from and written to tiers, over all ranks."),
    "tier_seconds": Metric("counter", "flow", "Seconds that reads and writes of tiers took, added up."),
    "tiers_left": Metric("gauge", "flow", "1 while a tier is left alone because it fails."),
    "layout_bound": Metric("gauge", "reason", "1 while only engines of this layout share its chunks, by the reason."),
    "first_hash_differs": Metric(
        "gauge", "tier", "1 if the engine that wrote to the tier before has another PYTHONHASHSEED."
    ),
    "preemptions": Metric("counter", "", "Preemptions of requests."),
    "evictions": Metric("counter", "", "Chunks evicted from the pool."),
    "trace_dropped": Metric("counter", "where", "Traced events that were lost, in the queue or at a sink."),
    "pool_chunks": Metric("gauge", "", "Chunks that the pool has room for."),
    "pool_chunks_ready": Metric("gauge", "", "Of these, chunks whose memory is there: all, some time after start-up."),
    "pool_chunks_used": Metric("gauge", "", "Chunks that the pool holds."),
    "leases": Metric("gauge", "", "Leases that loads in flight hold on chunks."),
    "oldest_lease_seconds": Metric("gauge", "", "Age of the oldest lease."),
    "jobs_in_flight": Metric("gauge", "", "Saves and loads that not every rank has reported yet."),
    "stuck_jobs": Metric("gauge", "", "Of these, those older than stuck_ms_max."),
    "requests": Metric("gauge", "", "Requests that kvpipe tracks."),
    "frozen": Metric("gauge", "", "Whether saving is stopped."),
    "quota_bytes": Metric("gauge", "quota", "Bytes of one rank's slots that a quota's requests hold."),
    "quota_sure_bytes": Metric("gauge", "quota", "Bytes of one rank's slots that nobody takes from a quota."),
    "quota_max_bytes": Metric("gauge", "quota", "Bytes of one rank's slots that a quota's requests hold at most."),
    "quota_evictions": Metric("counter", "quota", "Chunks of a quota that were evicted from the pool."),
    "quota_refusals": Metric("counter", "quota", "Chunks of a quota that got no slot, as all that might go was held."),
}
"""Every metric, without `PREFIX`."""


class KVPipeStats(KVConnectorStats):
    """What has changed in some interval: `data` is `Totals`."""

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, dict[str, float]] = {}

    def is_empty(self) -> bool:
        """Whether nothing has changed."""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another rank's, or a later interval's: counters add up, a gauge is as it was reported last."""
        for name, values in other.data.items():
            metric, mine = METRICS.get(name), self.data.setdefault(name, {})
            for label, value in values.items():
                counts = metric is None or metric.kind == "counter"
                mine[label] = mine.get(label, 0) + value if counts else value
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return a line's worth for vLLM's log."""
        data: dict[str, dict[str, float]] = self.data
        message: dict[str, int | float] = {
            f"hit tokens ({tier})": int(tokens) for tier, tokens in data.get("hit_tokens", {}).items()
        }
        message |= {f"missed tokens ({why})": int(tokens) for why, tokens in data.get("missed_tokens", {}).items()}
        copied, seconds = data.get("copied_bytes", {}), data.get("copy_seconds", {})
        message |= {f"{kind} MB": round(size / 1e6, 1) for kind, size in copied.items()}
        message |= {f"{kind} s": round(seconds.get(kind, 0), 3) for kind in copied}
        for name in ("pool_chunks_used", "pool_chunks", "leases", "stuck_jobs"):
            if name in data:
                message[name.replace("_", " ")] = int(data[name][""])
        message |= {f"fault {name}": int(times) for name, times in data.get("faults", {}).items()}
        return message


class Meter:
    """Turns running totals into differences, for one side."""

    def __init__(self, totals: Callable[[], Totals], seldom: Callable[[], Totals] = dict) -> None:
        """`totals` are asked in every step, `seldom` every half a second, as it costs more: each returns all it has."""
        self._totals, self._seldom = totals, seldom
        self._last: dict[str, dict[str, float]] = {}
        self._asked = 0.0

    def take(self) -> KVPipeStats | None:
        """Return what has changed since the last call, or None."""
        changed = self._changes(self._totals())
        now = time.monotonic()
        if now - self._asked >= SELDOM_S:
            self._asked = now
            changed |= self._changes(self._seldom())
        return KVPipeStats(changed) if changed else None

    def _changes(self, values: Totals) -> dict[str, dict[str, float]]:
        changed: dict[str, dict[str, float]] = {}
        for name, labels in values.items():
            last = self._last.get(name, {})
            if labels == last:  # so it is with nearly all
                continue
            counts = METRICS[name].kind == "counter"
            new = {
                label: value - last.get(label, 0) if counts else value
                for label, value in labels.items()
                if value != last.get(label, 0 if counts else None)
            }
            if new:
                changed[name] = new
            self._last[name] = {**last, **labels}
        return changed


class KVPipeProm(KVConnectorPromMetrics):
    """The metrics in vLLM's Prometheus registry."""

    def __init__(
        self,
        vllm_config: Any,  # noqa: ANN401
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """Register every metric of the table; those without a label begin at zero."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] = {}
        for name, metric in METRICS.items():
            more = [metric.label] if metric.label else []
            options = {"multiprocess_mode": "mostrecent"} if metric.kind == "gauge" else {}
            kind = metric_types[Counter if metric.kind == "counter" else Gauge]
            made = kind(name=PREFIX + name, documentation=metric.text, labelnames=labelnames + more, **options)
            self._metrics[name] = made
            if not more:
                for values in per_engine_labelvalues.values():
                    made.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take what an engine has reported."""
        engine = self.per_engine_labelvalues[engine_idx]
        for name, values in transfer_stats_data.items():
            metric = METRICS.get(name)
            if metric is None:  # of another version's engine
                continue
            for label, value in values.items():
                one = self._metrics[name].labels(*engine, *([label] if metric.label else []))
                if metric.kind == "gauge":
                    one.set(value)
                elif value > 0:
                    one.inc(value)
