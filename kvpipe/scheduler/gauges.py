"""The present values of a scheduler side's metrics. The functions only read, on the scheduler's thread."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

from kvpipe.cache.leases import oldest_lease_s
from kvpipe.cache.quotas import SharedCatalog
from kvpipe.node.usage import usage_of
from kvpipe.statemachine.node_link import ATTACHED
from kvpipe.tiers.totals import left

if TYPE_CHECKING:
    from kvpipe.node.catalog import NodeCatalog
    from kvpipe.scheduler.side import SchedulerSide
    from kvpipe.tiers.totals import Totals


def totals(side: SchedulerSide) -> Totals:
    """Return the values of the metrics: by metric, then by label value, which is "" for a metric without a label."""
    side.turns.take()
    c, tracer, jobs = side.catalog, side.tracer, side.jobs.in_flight
    stuck_at_s = time.monotonic() - side.settings.stuck_ms_max / 1000
    old = itertools.takewhile(lambda job: job.sent_at_s < stuck_at_s, jobs.values())
    gauges = {
        "pool_chunks": c.slots, "pool_chunks_ready": c.ready, "pool_chunks_used": c.used, "leases": c.leases,
        "oldest_lease_seconds": oldest_lease_s(c), "requests": len(side.requests.tracked),
        "jobs_in_flight": len(jobs), "stuck_jobs": sum(1 for _ in old), "frozen": side.switches.freeze,
        "preemptions": side.counters["preempted"], "evictions": side.counters["evicted"],
    }  # fmt: skip
    values: Totals = {name: {"": value} for name, value in gauges.items()}
    if side.node is not None:
        values |= node_totals(side.node)
    if side.staging is not None:
        values["tiers_left"] = left(side.staging.finder.tiers)
        values["layout_bound"] = side.staging.space.bound
        values["first_hash_differs"] = dict(side.staging.finder.other_hashes)
    values |= {"hit_tokens": tracer.hit_tokens, "missed_tokens": tracer.missed_tokens, "misses": tracer.misses}
    return values | {"faults": side.counters.faults, "trace_dropped": side.trace.losses}


def node_totals(node: NodeCatalog) -> Totals:
    """Return the metrics of the node's memory, which are read from shared memory and from this engine's own records."""
    pool, stock = node.pool, node.pool.stock
    assert pool.segment is not None  # noqa: S101  (the catalog's pool is attached)
    assert pool.leases is not None  # noqa: S101
    gauges = {
        "node_stock": stock.free, "node_unpublished": len(stock.reports),
        "node_writing": len(stock.grants) - stock.free - len(stock.reports), "node_pins": pool.leases.count,
        "node_journal_lag": node.lag, "node_attached": pool.state == ATTACHED, "node_takeovers": pool.takeovers,
        "node_holder_silent_seconds": pool.silent_s,
    }  # fmt: skip
    return {"node_slots": usage_of(pool.segment).by_use} | {name: {"": value} for name, value in gauges.items()}


def quota_totals(side: SchedulerSide) -> Totals:
    """Return the metrics of quotas: by metric, then by the quota's name. The result is empty without quotas."""
    side.turns.take()
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
