"""The metrics of a scheduler side as of now. They only read, on the scheduler's thread."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

from kvpipe.cache.leases import oldest_lease_s
from kvpipe.cache.quotas import SharedCatalog
from kvpipe.trace.totals import left

if TYPE_CHECKING:
    from kvpipe.scheduler.side import SchedulerSide
    from kvpipe.trace.totals import Totals


def totals(side: SchedulerSide) -> Totals:
    """Return the metrics: by metric, then by label value ("": it has no label)."""
    if side.orders.turns.away:
        side.orders.turns.take()
    c, report, jobs = side.catalog, side.report, side.jobs.in_flight
    stuck_at_s = time.monotonic() - side.settings.stuck_ms_max / 1000
    old = itertools.takewhile(lambda job: job.sent_at_s < stuck_at_s, jobs.values())
    gauges = {
        "pool_chunks": c.slots, "pool_chunks_ready": c.ready, "pool_chunks_used": c.used, "leases": c.leases,
        "oldest_lease_seconds": oldest_lease_s(c), "requests": len(side.requests.tracked),
        "jobs_in_flight": len(jobs), "stuck_jobs": sum(1 for _ in old), "frozen": side.switches.freeze,
        "preemptions": side.counters["preempted"], "evictions": side.counters["evicted"],
    }  # fmt: skip
    values: Totals = {name: {"": value} for name, value in gauges.items()}
    if side.staging is not None:
        values["tiers_left"] = left(side.staging.finder.tiers)
        values["layout_bound"] = side.staging.space.bound
        values["first_hash_differs"] = dict(side.staging.finder.other_hashes)
    values |= {"hit_tokens": report.hit_tokens, "missed_tokens": report.missed_tokens, "misses": report.misses}
    return values | {"faults": side.counters.faults, "trace_dropped": side.trace.losses}


def quota_totals(side: SchedulerSide) -> Totals:
    """Return the metrics of each quota: by metric, then by the quota's name. Empty without quotas."""
    if side.orders.turns.away:
        side.orders.turns.take()
    if not isinstance(side.catalog, SharedCatalog):
        return {}
    size, all_ = side.geometry.slot_bytes, side.catalog.accounts.all
    return {
        "quota_bytes": {one.spec.name: one.used * size for one in all_},
        "quota_sure_bytes": {one.spec.name: one.sure * size for one in all_},
        "quota_max_bytes": {one.spec.name: one.most * size for one in all_},
        "quota_evictions": {one.spec.name: one.evicted for one in all_},
        "quota_refusals": {one.spec.name: one.refused for one in all_},
    }
