"""Metrics for operators: a table of kvpipe's metrics, and the code that passes them to vLLM's `/metrics` and log.

Each side returns to vLLM the metrics that have changed since vLLM's last call, as a plain dict of ``name -> label value
-> number``. A counter is returned as its difference, a gauge as its value, and a histogram as the list of its new
values. vLLM adds up the metrics of the ranks and the scheduler, and sends the sums to the process that serves
`/metrics`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvpipe.config.settings import Settings
from kvpipe.inputs.quota_spec import OTHERS
from kvpipe.scheduler.records import MEMORY
from kvpipe.tiers.guard import READ, WRITE
from kvpipe.tiers.registry import named
from kvpipe.tiers.totals import KINDS, Totals
from kvpipe.trace.counters import FAULTS
from kvpipe.trace.durations import BUCKETS_S, KEPT_MAX, Taken
from kvpipe.trace.miss_reasons import REASONS
from kvpipe.trace.recorder import LOSSES

PREFIX = "vllm:kvpipe_"
OFTEN_S = 0.1
SELDOM_S = 0.5


class Metric(NamedTuple):
    """One metric: its kind, the name of its only label, and its documentation.

    An empty name of the label means that the metric has no label.
    """

    kind: Literal["counter", "gauge", "histogram"]
    label: str
    text: str

    def full_name(self, name: str) -> str:
        """Return the metric's name in `/metrics`.

        A histogram has three series, whose names have three different endings.
        """
        return f"{PREFIX}{name}_total" if self.kind == "counter" else PREFIX + name


METRICS: dict[str, Metric] = {
    "hit_tokens": Metric("counter", "tier", "Tokens found beyond vLLM's own cache, at admission."),
    "missed_tokens": Metric(
        "counter",
        "reason",
        "Tokens of admitted requests that were found neither in vLLM's cache nor by kvpipe, by reason.",
    ),
    "misses": Metric("counter", "reason", "Admissions with fewer tokens than could have been held, by reason."),
    "copied_bytes": Metric("counter", "kind", "Bytes saved and loaded, over all ranks."),
    "copy_seconds": Metric(
        "counter", "kind", "Seconds from the submission to the end of each layer's copy, summed over copies."
    ),
    "wait_seconds": Metric("counter", "", "Seconds that the engine's own thread has waited for copies."),
    "faults": Metric("counter", "name", "Failures that were contained. Each costs a cache miss, never a crash."),
    "tier_bytes": Metric("counter", "flow", "Bytes read from and written to tiers, over all ranks."),
    "tier_seconds": Metric("counter", "flow", "Seconds that reads and writes of tiers took, summed over calls."),
    "lookup_wait_seconds": Metric(
        "histogram", "", "Seconds for which an admitted request's lookup was put off; 0: it was answered at once."
    ),
    "lookup_seconds": Metric("histogram", "tier", "Seconds until a tier answered which of some chunks it holds."),
    "load_seconds": Metric(
        "histogram", "tier", "Seconds until a chunk was read from a tier; memory: until a step's loads were copied."
    ),
    "store_seconds": Metric(
        "histogram", "tier", "Seconds until a chunk was written to a tier; memory: until a step's saves were copied."
    ),
    "tiers_left": Metric("gauge", "flow", "1 while a tier is not used because it has failed."),
    "layout_bound": Metric("gauge", "reason", "1 while only engines with this layout share the chunks, by reason."),
    "first_hash_differs": Metric(
        "gauge", "tier", "1 if the engine that wrote to the tier before has another PYTHONHASHSEED."
    ),
    "preemptions": Metric("counter", "", "Preemptions of requests."),
    "evictions": Metric("counter", "", "Chunks evicted from the pool."),
    "trace_dropped": Metric("counter", "where", "Trace events that were lost, in the queue or at a sink."),
    "pool_chunks": Metric("gauge", "", "Chunks that the pool has room for."),
    "pool_chunks_ready": Metric(
        "gauge",
        "",
        "Chunks that the pool has room for and whose memory is allocated. "
        "Some time after start-up the number includes all chunks of the pool.",
    ),
    "pool_chunks_used": Metric("gauge", "", "Chunks that the pool holds."),
    "node_slots": Metric(
        "gauge",
        "state",
        "With pool=node: slots of this engine's slot size in the node's memory, by state.",
    ),
    "node_stock": Metric("gauge", "", "With pool=node (else 0): slots that saves can take without asking the holder."),
    "node_writing": Metric("gauge", "", "With pool=node (else 0): slots that saves and fetches write now."),
    "node_unpublished": Metric("gauge", "", "With pool=node (else 0): chunks that the holder has not published yet."),
    "node_pins": Metric("gauge", "", "With pool=node (else 0): pins of this engine's lookups and loads on chunks."),
    "node_journal_lag": Metric("gauge", "", "With pool=node (else 0): journal records that are yet to be read."),
    "node_attached": Metric("gauge", "", "With pool=node (else 0): whether the node's holder answers."),
    "node_holder_silent_seconds": Metric(
        "gauge", "", "Seconds since this engine has last seen the node's holder alive. 0: it is alive, or pool=private."
    ),
    "node_takeovers": Metric("counter", "", "Holders that have taken over the node's memory from an earlier holder."),
    "leases": Metric("gauge", "", "Leases that loads in flight hold on chunks."),
    "oldest_lease_seconds": Metric("gauge", "", "Age of the oldest lease."),
    "jobs_in_flight": Metric("gauge", "", "Saves and loads that not every rank has reported yet."),
    "stuck_jobs": Metric(
        "gauge", "", "Saves and loads that not every rank has reported yet and that are older than stuck_ms_max."
    ),
    "requests": Metric("gauge", "", "Requests that kvpipe tracks."),
    "frozen": Metric("gauge", "", "Whether saving is stopped."),
    "quota_bytes": Metric("gauge", "quota", "Bytes of one rank's slots that this quota's requests hold."),
    "quota_sure_bytes": Metric(
        "gauge", "quota", "Bytes of one rank's slots that other quotas cannot take from this quota."
    ),
    "quota_max_bytes": Metric(
        "gauge", "quota", "Largest number of bytes of one rank's slots that this quota's requests may hold."
    ),
    "quota_evictions": Metric("counter", "quota", "Chunks of a quota that were evicted from the pool."),
    "quota_refusals": Metric(
        "counter",
        "quota",
        "Chunks of a quota that got no slot, because all chunks that could be evicted for them were held.",
    ),
}
"""All metrics, by name without `PREFIX`."""

_KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "counter": (Counter, {}),
    "gauge": (Gauge, {"multiprocess_mode": "mostrecent"}),
    "histogram": (Histogram, {"buckets": BUCKETS_S}),
}
"""The class of each kind of metric, and its arguments."""


def known_labels(settings: Settings) -> Mapping[str, Iterable[str]]:
    """Return, by counter, the label values that an engine with these settings may report."""
    tiers = [name for name, _ in named(settings.tiers)]
    flows = [f"{tier} {use}" for tier in tiers for use in (READ, WRITE)]
    quotas = dict.fromkeys((*(quota.name for quota in settings.quotas), OTHERS)) if settings.quotas else ()
    return {
        "hit_tokens": (MEMORY, *tiers), "missed_tokens": REASONS, "misses": REASONS, "copied_bytes": KINDS,
        "copy_seconds": KINDS, "faults": FAULTS, "tier_bytes": flows, "tier_seconds": flows, "trace_dropped": LOSSES,
        "quota_evictions": quotas, "quota_refusals": quotas, "lookup_seconds": tiers,
        "load_seconds": (MEMORY, *tiers), "store_seconds": (MEMORY, *tiers),
    }  # fmt: skip


class KVPipeStats(KVConnectorStats):
    """Changes of the metrics in some interval, by name and label value. A histogram's change is a list of values."""

    def reset(self) -> None:
        """Remove all changes."""
        self.data: dict[str, dict[str, Any]] = {}

    def is_empty(self) -> bool:
        """Whether no metric has changed."""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the changes of another rank or of a later interval.

        A gauge takes the value in `other`. Counters are added, and the values of histograms are appended.

        A histogram keeps its last `KEPT_MAX` values, because a program that embeds the engine may never read and reset
        them.
        """
        for name, values in other.data.items():
            metric, mine = METRICS.get(name), self.data.setdefault(name, {})
            for label, value in values.items():
                adds = label in mine and (metric is None or metric.kind != "gauge")
                both = mine[label] + value if adds else value  # not in place: vLLM may use the old list
                mine[label] = both[-KEPT_MAX:] if isinstance(both, list) else both
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the numbers that vLLM logs in one line."""
        data = self.data
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
    """Computes the changes of one side's metrics between calls of `take`."""

    def __init__(
        self,
        totals: Callable[[], Totals],
        seldom: Callable[[], Totals] = dict,
        durations: Callable[[], Taken] = dict,
        *,
        can_wait: Callable[[], bool] = lambda: False,
    ) -> None:
        """Compute changes of the totals that `totals` returns.

        `seldom` returns totals that cost more time, so `seldom` is called at most every 0.5 s. `durations` returns the
        new values of histograms. `can_wait()` returns whether a later step will report the present changes. If so,
        `take` returns None for 0.1 s after a report.
        """
        self._totals, self._seldom, self._durations, self._can_wait = totals, seldom, durations, can_wait
        self._last: dict[str, dict[str, float]] = {}
        self._asked = self._taken = 0.0

    def take(self) -> KVPipeStats | None:
        """Return the changes since the last report, or None if nothing has changed or a later step reports them."""
        now = time.monotonic()
        if now - self._taken < OFTEN_S and self._can_wait():
            return None
        self._taken = now
        changed: dict[str, dict[str, Any]] = {**self._changes(self._totals()), **self._durations()}
        if now - self._asked >= SELDOM_S:
            self._asked = now
            changed |= self._changes(self._seldom())
        return KVPipeStats(changed) if changed else None

    def _changes(self, values: Totals) -> dict[str, dict[str, float]]:
        changed: dict[str, dict[str, float]] = {}
        for name, labels in values.items():
            last = self._last.get(name, {})
            if labels == last:  # nearly all metrics are unchanged
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
    """Registers kvpipe's metrics in vLLM's Prometheus registry and updates them."""

    def __init__(
        self,
        vllm_config: Any,  # noqa: ANN401
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        labels: Mapping[str, Iterable[str]],
    ) -> None:
        """Register every metric of `METRICS`. Metrics without a label, and the label values in `labels`, start at 0."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] = {}
        for name, metric in METRICS.items():
            more = [metric.label] if metric.label else []
            kind, options = _KINDS[metric.kind]
            made = metric_types[kind](
                name=PREFIX + name, documentation=metric.text, labelnames=labelnames + more, **options
            )
            self._metrics[name] = made
            for values in per_engine_labelvalues.values():
                for label in labels.get(name, ()) if more else ("",):
                    made.labels(*values, *([label] if more else []))

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the changes that engine number `engine_idx` has reported."""
        engine = self.per_engine_labelvalues[engine_idx]
        for name, values in transfer_stats_data.items():
            metric = METRICS.get(name)
            if metric is None:  # an engine with another version of kvpipe has reported this metric
                continue
            for label, value in values.items():
                one = self._metrics[name].labels(*engine, *([label] if metric.label else []))
                if metric.kind == "gauge":
                    one.set(value)
                elif metric.kind == "histogram":
                    for seconds in value:
                        one.observe(seconds)
                elif value > 0:
                    one.inc(value)
