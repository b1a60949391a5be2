"""Copies of caches with gaps between a layer's blocks: cross-layer, padded or packed caches."""

from __future__ import annotations

import tracemalloc

import pytest
import torch

from kvpipe.protocol.geometry import Geometry, Group, Layer
from kvpipe.testing.transfer_worlds import make_job
from kvpipe.transfer.base import CopyPlan, Direction
from kvpipe.transfer.cpu import CpuEngine
from kvpipe.transfer.pages import view_pages
from kvpipe.transfer.pool import HostPool

PAGE_BYTES, BLOCKS, TAKEN = 1 << 10, 1 << 12, (9, 3, 4000)


@pytest.mark.parametrize("direction", Direction, ids=lambda one: one.name.lower())
def test_a_copy_touches_its_own_blocks_only(direction: Direction) -> None:
    """A copy allocates no memory for the layer's other blocks, which may take gigabytes."""
    geometry = Geometry((Group((Layer("a", PAGE_BYTES),), block_tokens=16),), 64, 1 << 20)
    cache = torch.zeros(BLOCKS, 2, PAGE_BYTES, dtype=torch.uint8)[:, 1]
    for block in TAKEN:
        cache[block] = block % 251
    pool, engine = HostPool(geometry), CpuEngine(0)
    engine.attach([view_pages("a", cache, BLOCKS)], geometry, pool)
    plan = CopyPlan(direction, [make_job(1, [(0, 0, page, block) for page, block in enumerate(TAKEN)])], 1)
    tracemalloc.start()
    try:
        assert not engine.copy_layer(plan, 0)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < BLOCKS * PAGE_BYTES // 8
    saved = pool.tensor[0, : len(TAKEN) * PAGE_BYTES].view(len(TAKEN), PAGE_BYTES)
    assert torch.equal(saved, cache[list(TAKEN)])
