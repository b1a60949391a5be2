"""On every transfer engine, copies touch only the rank's part of shared slots."""

from __future__ import annotations

import pytest
import torch

from kvpipe.testing.transfer_worlds import BLOCKS, GEOMETRY, KINDS, LAYERS, World, job_rows, make_job, value_of
from kvpipe.transfer.base import Direction
from kvpipe.transfer.pool import HostPool, SharedSlots
from kvpipe.transfer.ready import Readier

PARTS = 3


def shared_pool(memory: bytearray, part: int) -> HostPool:
    """Return the pool of rank `part` of three over one memory."""
    size = GEOMETRY.slot_bytes
    return HostPool(GEOMETRY, SharedSlots(memoryview(memory), PARTS * size, part * size, b"token"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", [0, PARTS - 1])
def test_copies_touch_only_the_rank_s_part(kind: str, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A saved chunk is loaded again, and the parts of other ranks do not change."""
    size = GEOMETRY.slot_bytes
    memory = bytearray(b"\xee" * (PARTS * size * GEOMETRY.slots))
    monkeypatch.setattr("kvpipe.testing.transfer_worlds.HostPool", lambda _: shared_pool(memory, part))
    world = World(kind)
    try:
        pool = world.pool
        assert pool.slots == GEOMETRY.slots
        readier = Readier(pool, world.engine.claim, piece_bytes=world.engine.piece_bytes)
        readier.begin("ahead")
        readier.stop()
        assert memory == b"\xee" * len(memory), "a chunk of another engine was overwritten at the start"
        blocks = {0: [1, 3], 1: [2]}
        for layer in range(LAYERS):
            for block in range(BLOCKS):
                world.write_block(layer, block, value_of(0, layer, block))
        world.submit_all(Direction.SAVE, [make_job(1, job_rows(2, blocks))])
        world.drain()
        whole = torch.frombuffer(memory, dtype=torch.uint8).view(GEOMETRY.slots, PARTS, size)
        others = [one for one in range(PARTS) if one != part]
        assert (whole[:, others] == 0xEE).all()
        assert (whole[[0, 1, 2, 3, 6, 7], part] == 0xEE).all()
        for layer in range(LAYERS):
            for block in range(BLOCKS):
                world.write_block(layer, block, 0)
        world.submit_all(Direction.LOAD, [make_job(2, job_rows(2, blocks))])
        world.drain()
        for layer, (group, _) in enumerate(GEOMETRY.layers):
            for block in blocks[group]:
                got = world.read_block(layer, block)
                world.drain_all()
                assert set(got()) == {value_of(0, layer, block)}
    finally:
        world.engine.shutdown()
