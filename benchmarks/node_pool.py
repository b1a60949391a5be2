"""Compares a node's memory with private pools: lookups, and copies of chunks that another engine has saved.

Each figure is a ratio or a difference of two measurements that alternate in one run.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from hashlib import sha256
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.report import Figure
from kvpipe.cache.catalog import Catalog
from kvpipe.cache.chunks import Owner
from kvpipe.cache.policy import make_policy
from kvpipe.cache.prefixes import Prefixes
from kvpipe.node.catalog import NodeCatalog
from kvpipe.node.prefixes import NodePrefixes
from kvpipe.node.segment import Segment, allocate, create
from kvpipe.protocol.geometry import Geometry, Group, Layer
from kvpipe.protocol.messages import Job, Kind, rows_of
from kvpipe.testing.direct_node import DirectNode, DirectPool
from kvpipe.trace.log import Counters
from kvpipe.transfer.base import CopyPlan, Direction
from kvpipe.transfer.cpu import CpuEngine
from kvpipe.transfer.pages import view_pages
from kvpipe.transfer.pool import HostPool, SharedSlots

UNIT = 16
CHUNKS = 500
"""The number of chunks of a prompt of 128k tokens."""
ROUNDS = 300
COPIES = 60
SLOTS = 64
LAYERS = 16
PAGE_BYTES = 64 << 10
PAGES = 8


def run() -> list[Figure]:
    """Return all figures."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    return [*_lookups(), *_copies()]


def _lookups() -> list[Figure]:
    """Measure lookups of a prompt that is held, and of one that is not. The pins of a hit are included.

    Times are the thread's CPU time. A lookup waits for nothing, so on a busy machine the rest of its time is spent by
    others.
    """
    geometry = Geometry((Group((Layer("l", 64),), UNIT),), 16 * UNIT, 2 * CHUNKS * 4096)
    node = DirectNode(2 * CHUNKS, 4096)
    shared = NodeCatalog(DirectPool(node, 64), 1, Counters(), geometry.units_per_chunk)
    shared.name_space("bench")
    private = Catalog(2 * CHUNKS, 1, make_policy("lru", 2 * CHUNKS), Counters())
    held, missed = ([sha256(f"{name} {n}".encode()).digest() for n in range(16 * CHUNKS)] for name in ("hit", "miss"))
    for catalog in (private, shared):
        _fill(catalog, [bytes(bytearray(key)) for key in held])  # not the objects that are asked for
    requests = {"hit": _request(held), "miss": _request(missed)}
    finders = {
        "private": Prefixes(private, geometry, UNIT, attrgetter("block_hashes")),
        "shared": NodePrefixes(shared, geometry, UNIT, attrgetter("block_hashes")),
    }
    taken: dict[tuple[str, str], list[float]] = {(name, kind): [] for name in finders for kind in requests}
    for _ in range(ROUNDS):
        for (name, kind), times in taken.items():
            began = time.thread_time()
            units = finders[name].longest(requests[kind])
            if name == "shared":
                shared.end_step()
            times.append((time.thread_time() - began) * 1e6)
            assert units == (16 * CHUNKS if kind == "hit" else 0), (name, kind, units)
    leases = {name: _leases(finder, requests["hit"]) for name, finder in finders.items()}
    beside = f"{leases['shared']:.0f} us, private {leases['private']:.0f} us"
    began = time.perf_counter()
    shared.reset()
    reset_us = (time.perf_counter() - began) * 1e6
    node.close()
    return [
        *(
            _beside(kind, quantile, limit, taken)
            for kind, limit in (("hit", 50), ("miss", 5))
            for quantile in (50, 99)
        ),
        Figure("leases of the hit, and their end, p50", leases["shared"] / leases["private"], 1.5, "x", beside),
        Figure(f"reset of the engine's cache with {CHUNKS} chunks", reset_us, 200, "us"),
    ]  # fmt: skip


def _leases(finder: Prefixes, request: Any) -> float:
    """Return the median time in us that a load's leases take, with their end."""
    catalog, taken = finder._catalog, list[float]()
    chunks = [*filter(None, finder.chunks(0, request.block_hashes, 0, 16 * CHUNKS))]
    for number in range(ROUNDS // 4):
        began = time.perf_counter()
        catalog.lease(Owner("r", number), chunks)
        catalog.release(Owner("r", number))
        taken.append((time.perf_counter() - began) * 1e6)
        if isinstance(catalog, NodeCatalog):
            catalog.poll()
    return float(np.median(taken))


def _beside(kind: str, quantile: int, limit: float, taken: dict[tuple[str, str], list[float]]) -> Figure:
    mine, theirs = (float(np.percentile(taken[name, kind], quantile)) for name in ("shared", "private"))
    beside = f"{mine:.1f} us, private {theirs:.1f} us"
    return Figure(f"lookup of 128k tokens, {kind}, p{quantile}", mine - theirs, limit, "us", beside)


def _request(hashes: list[bytes]) -> Any:
    return SimpleNamespace(block_hashes=hashes, num_tokens=len(hashes) * UNIT + 1)


def _fill(catalog: Catalog, hashes: list[bytes]) -> None:
    for stop in range(16, len(hashes) + 1, 16):
        chunk = catalog.reserve(0)
        while chunk is None:
            assert isinstance(catalog, NodeCatalog)
            catalog.poll()
            chunk = catalog.reserve(0)
        catalog.landed(catalog.write(chunk, 16, hashes[stop - 1], keep=True))
    if isinstance(catalog, NodeCatalog):
        for _ in range(5):
            catalog.poll()


def _copies() -> list[Figure]:
    """Measure loads and saves of chunks in shared slots against private ones."""
    group = Group(tuple(Layer(f"l{i}", PAGE_BYTES) for i in range(LAYERS)), 16)
    geometry = Geometry((group,), 16 * PAGES, SLOTS * LAYERS * PAGE_BYTES * PAGES)
    fd = create(SLOTS, geometry.slot_bytes)
    segment, other = Segment(fd), Segment(fd)
    allocate(fd, segment.layout, 0, SLOTS)
    assert segment.slots is not None
    assert other.slots is not None
    np.frombuffer(other.slots, dtype=np.uint8)[:: mmap.PAGESIZE] = 1  # another engine has written them
    layout = segment.layout
    pools = {
        "private": HostPool(geometry),
        "shared": HostPool(geometry, SharedSlots(segment.slots, layout.slot_bytes, 0, layout.token)),
    }
    caches = [torch.ones((PAGES * SLOTS // 8, PAGE_BYTES), dtype=torch.uint8) for _ in range(LAYERS)]
    views = [view_pages(f"l{i}", cache, len(cache)) for i, cache in enumerate(caches)]
    engines = {}
    for name, pool in pools.items():
        engines[name] = CpuEngine(0)
        engines[name].attach(views, geometry, pool)
    out = []
    for direction, limit in ((Direction.LOAD, 1.05), (Direction.SAVE, 1.1)):
        taken: dict[str, list[float]] = {"private": [], "shared": []}
        for number in range(COPIES):
            for name, engine in engines.items():
                taken[name].append(_copy(engine, direction, number % SLOTS))
        for what, pick in (("first copies of slots", slice(0, 30)), ("later copies", slice(COPIES // 2, COPIES))):
            one, mine = (float(np.median(taken[name][pick])) for name in ("private", "shared"))
            kind = direction.name.lower()
            beside = f"{mine * 1e3:.2f} ms, private {one * 1e3:.2f} ms per chunk of {geometry.slot_bytes >> 20} MiB"
            out.append(Figure(f"{kind}, {what}", mine / one, limit, "x", beside))
    os.close(fd)
    return out


def _copy(engine: CpuEngine, direction: Direction, slot: int) -> float:
    rows = rows_of(0, slot % 8, range(PAGES), range(slot % 8 * PAGES, slot % 8 * PAGES + PAGES))
    kind = Kind.SAVE if direction is Direction.SAVE else Kind.LOAD_SYNC
    plan = CopyPlan(direction, (Job(1, int(kind), "r", 1, np.asarray(rows, dtype="<i4").tobytes()),), 1)
    call: Callable[[CopyPlan, int], object] = engine.copy_layer
    began = time.perf_counter()
    for layer in range(LAYERS):
        call(plan, layer)
    return time.perf_counter() - began
