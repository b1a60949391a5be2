"""Compares copies of whole blocks (cross-layer layout) with copies layer by layer (usual layout), on the CPU engine."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.report import Figure, median_s
from kvpipe.protocol.geometry import Geometry, Group, Layer
from kvpipe.protocol.messages import Job, Kind
from kvpipe.transfer.base import CopyPlan, Direction
from kvpipe.transfer.cpu import CpuEngine
from kvpipe.transfer.pages import view_pages
from kvpipe.transfer.pool import HostPool
from kvpipe.transfer.whole_blocks import whole_blocks

LAYERS, BLOCKS, BLOCK_TOKENS, CHUNK_TOKENS = 32, 1024, 16, 256
MOVED = 128
"""The number of blocks of a copy: a prompt of 2,048 tokens."""
PAGE_BYTES = (8192, 32768)
REPEATS = 15


class Way(NamedTuple):
    """One layout: the number of copies that the CPU engine makes for a plan, and the seconds of each `run(plan)`."""

    copies: Callable[[CopyPlan], int]
    run: Callable[[CopyPlan], object]


def run() -> list[Figure]:
    """Return all figures."""
    os.sched_setaffinity(0, {0})
    torch.set_num_threads(1)
    return [figure for page in PAGE_BYTES for figure in _figures(page)]


def _figures(page: int) -> list[Figure]:
    usual, whole = _make(page, cross=False), _make(page, cross=True)
    out = []
    for how, blocks in (("adjacent", range(MOVED)), ("scattered", torch.randperm(BLOCKS)[:MOVED].tolist())):
        per_chunk = CHUNK_TOKENS // BLOCK_TOKENS
        rows = [(0, at // per_chunk, at % per_chunk, block) for at, block in enumerate(blocks)]
        job = Job(1, int(Kind.SAVE), "r", 1, np.asarray(rows, dtype="<i4").tobytes())
        for direction in Direction:
            plan = CopyPlan(direction, [job], 1)
            name = f"{direction.name.lower()} of {MOVED} {how} blocks, {LAYERS} layers, pages of {page >> 10} KiB"
            took = [median_s(partial(way.run, plan), REPEATS) for way in (usual, whole)]
            copies = [way.copies(plan) for way in (usual, whole)]
            rates = [MOVED * LAYERS * page / seconds / 1e9 for seconds in took]
            per_s = [count / seconds for count, seconds in zip(copies, took, strict=True)]
            beside = f"{rates[1]:.1f} of {rates[0]:.1f} GB/s; {per_s[1]:,.0f} of {per_s[0]:,.0f} copies/s"
            out += [
                Figure(f"copies of a {name}", copies[1], copies[0] / LAYERS, "copies", f"{copies[0]} by layer"),
                Figure(f"rate of a {name}", took[0] / took[1], 1.0, "of the usual layout's", beside, at_least=True),
            ]
    return out


def _make(page: int, *, cross: bool) -> Way:
    """Return an engine over caches of the layout BLNHC if `cross`, or else of the layout LBNHC."""
    memory = torch.randint(0, 255, (BLOCKS, LAYERS, page) if cross else (LAYERS, BLOCKS, page), dtype=torch.uint8)
    caches = memory.unbind(1 if cross else 0)
    layers = tuple(Layer(f"l{i}", page) for i in range(LAYERS))
    chunks = MOVED * BLOCK_TOKENS // CHUNK_TOKENS
    slot = CHUNK_TOKENS // BLOCK_TOKENS * LAYERS * page
    geometry = Geometry((Group(layers, BLOCK_TOKENS),), CHUNK_TOKENS, chunks * slot)
    views = tuple(view_pages(layer.name, cache, BLOCKS) for layer, cache in zip(layers, caches, strict=True))
    if found := whole_blocks(geometry, views):
        geometry, views = found
    assert (len(views) == 1) is cross
    engine = CpuEngine(0)
    engine.attach(views, geometry, HostPool(geometry))

    def copies(plan: CopyPlan) -> int:
        return len(views) * len(plan.runs[0])

    def copy_all(plan: CopyPlan) -> None:
        for layer in range(len(views)):
            engine.copy_layer(plan, layer)

    return Way(copies, copy_all)
