"""Compares a node's memory with private pools. The modules `node_*.py` have the measurements.

Each figure is a ratio or a difference of two kinds of measurements that alternate, so that other programs disturb both.
"""

from __future__ import annotations

import os
import time

import numpy as np
import torch

from benchmarks import node_clients, node_copies, node_engines, node_saves, node_trace
from benchmarks.node_clients import beside
from benchmarks.node_lookups import CHUNKS, Lookups, new_times
from benchmarks.report import Figure
from kvpipe.cache.chunks import Owner
from kvpipe.node.catalog import NodeCatalog
from kvpipe.testing.direct_node import DirectNode, DirectPool
from kvpipe.trace.log import Counters

ROUNDS = 300
SLOT_BYTES = 4096


def run() -> list[Figure]:
    """Return all figures.

    Measurements with several processes come first, because this process later binds itself to one core.
    """
    out = [*node_clients.run(), *node_saves.run(), *node_engines.run(), *node_trace.run()]
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    return [*_lookups(), *node_copies.run(), *out]


def _lookups() -> list[Figure]:
    """Measure lookups of one engine alone, with a holder in this process."""
    node = DirectNode(2 * CHUNKS, SLOT_BYTES)
    shared = NodeCatalog(DirectPool(node, 64), 1, Counters(), 16)
    shared.name_space("bench")
    lookups, times = Lookups(shared), new_times()
    lookups.fill(shared)
    for _ in range(ROUNDS):
        lookups.round(times)
    leases = {name: _leases(lookups, name) for name in lookups.finders}
    both = f"{leases['shared']:.0f} us, private {leases['private']:.0f} us"
    began = time.perf_counter()
    shared.reset()
    reset_us = (time.perf_counter() - began) * 1e6
    node.close()
    return [
        *(
            beside("lookup of 128k tokens", kind, quantile, limit, times)
            for kind, limit in (("hit", 50), ("miss", 5))
            for quantile in (50, 99)
        ),
        Figure("leases of the hit, and their end, p50", leases["shared"] / leases["private"], 1.5, "x", both),
        Figure(f"reset of the engine's cache with {CHUNKS} chunks", reset_us, 200, "us"),
    ]  # fmt: skip


def _leases(lookups: Lookups, name: str) -> float:
    """Return the median time, in microseconds, to take and to end a load's leases."""
    finder, keys = lookups.finders[name], lookups.requests["hit"].block_hashes
    catalog, taken = finder._catalog, list[float]()
    chunks = [*filter(None, finder.chunks(0, keys, 0, 16 * CHUNKS))]
    for number in range(ROUNDS // 4):
        began = time.perf_counter()
        catalog.lease(Owner("r", number), chunks)
        catalog.release(Owner("r", number))
        taken.append((time.perf_counter() - began) * 1e6)
        if isinstance(catalog, NodeCatalog):
            catalog.poll()
    return float(np.median(taken))
