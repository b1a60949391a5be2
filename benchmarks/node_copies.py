"""Compares copies of chunks of 8 MiB between paged blocks and slots: a node's shared slots, and private slots."""

from __future__ import annotations

import mmap
import os
import time
from typing import Final

import numpy as np
import torch

from benchmarks.report import Figure
from kvpipe.node.attach import shared_slots
from kvpipe.node.segment import Segment, allocate, create
from kvpipe.protocol.geometry import Geometry, Group, Layer
from kvpipe.protocol.messages import Job, Kind, rows_of
from kvpipe.transfer.base import CopyPlan, Direction
from kvpipe.transfer.cpu import CpuEngine
from kvpipe.transfer.pages import view_pages
from kvpipe.transfer.pool import HostPool

SLOTS: Final = 32
COPIES: Final = 3 * SLOTS
BLOCKS: Final = 8
"""The number of chunks that the paged blocks have."""
LAYERS: Final = 16
PAGE_BYTES: Final = 64 << 10
PAGES: Final = 8


def geometry() -> Geometry:
    """Return the geometry of the copied chunks."""
    group = Group(tuple(Layer(f"l{i}", PAGE_BYTES) for i in range(LAYERS)), 16)
    return Geometry((group,), 16 * PAGES, SLOTS * LAYERS * PAGE_BYTES * PAGES)


def run() -> list[Figure]:
    """Measure saves and loads of chunks in shared slots, against private slots.

    Saves come first, so that loads read saved chunks. The private pool has its own chunks, and the node's memory has
    chunks of another engine. Each direction has a mapping of its own, which no copy has touched before.
    """
    fd = create(SLOTS, geometry().slot_bytes)
    other = Segment(fd)
    allocate(fd, other.layout, 0, SLOTS)
    assert other.slots is not None
    np.frombuffer(other.slots, dtype=np.uint8)[:: mmap.PAGESIZE] = 1  # another engine has written the slots
    caches = [torch.ones((PAGES * BLOCKS, PAGE_BYTES), dtype=torch.uint8) for _ in range(LAYERS)]
    views = [view_pages(f"l{i}", cache, len(cache)) for i, cache in enumerate(caches)]
    private, out = HostPool(geometry()), list[Figure]()
    for direction, limit in ((Direction.SAVE, 1.1), (Direction.LOAD, 1.05)):
        engines = {"private": CpuEngine(0), "shared": CpuEngine(0)}
        engines["private"].attach(views, geometry(), private)
        engines["shared"].attach(views, geometry(), HostPool(geometry(), shared_slots(Segment(fd), 0, saves=True)))
        taken: dict[str, list[float]] = {"private": [], "shared": []}
        for number in range(COPIES):
            for name, engine in engines.items():
                taken[name].append(copy_chunk(engine, direction, number % SLOTS))
        for what, pick in (("first copies of slots", slice(SLOTS)), ("later copies", slice(SLOTS, COPIES))):
            one, mine = (float(np.median(taken[name][pick])) for name in ("private", "shared"))
            kind = direction.name.lower()
            beside = f"{mine * 1e3:.2f} ms, private {one * 1e3:.2f} ms per chunk of {geometry().slot_bytes >> 20} MiB"
            out.append(Figure(f"{kind}, {what}", mine / one, limit, "x", beside))
    os.close(fd)
    return out


def copy_chunk(engine: CpuEngine, direction: Direction, slot: int) -> float:
    """Copy one chunk layer by layer, and return the time in seconds."""
    first = slot % BLOCKS * PAGES
    rows = rows_of(0, slot, range(PAGES), range(first, first + PAGES))
    kind = Kind.SAVE if direction is Direction.SAVE else Kind.LOAD_SYNC
    plan = CopyPlan(direction, (Job(1, int(kind), "r", 1, np.asarray(rows, dtype="<i4").tobytes()),), 1)
    began = time.perf_counter()
    for layer in range(LAYERS):
        engine.copy_layer(plan, layer)
    return time.perf_counter() - began
