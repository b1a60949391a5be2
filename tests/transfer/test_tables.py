"""Row tables are uploaded through rings: no step allocates memory, and no table is overwritten while a copy uses it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpipe.protocol.messages import Kind
from kvpipe.testing.fake_device import FakeDevice, FakeStream
from kvpipe.testing.transfer_worlds import LAYERS, job_rows, make_job, world
from kvpipe.transfer.base import CopyPlan, Direction, Ticket
from kvpipe.transfer.tables import ALIGN_BYTES, RowTables

TABLE = {0: [0, 1, 5], 1: [7, 2]}
STEPS = 12


@pytest.mark.parametrize("kind", ["fake_staged", "fake_direct"])
def test_no_step_allocates(kind: str) -> None:
    """With a dozen steps in flight on a device that runs no work, memory does not grow after start-up."""
    with world(kind) as w:
        w.device.moved.clear()
        for step in range(STEPS):
            for direction in Direction:
                job = make_job(
                    step, job_rows(step % 3, TABLE), Kind.SAVE if direction is Direction.SAVE else Kind.LOAD_SYNC
                )
                plan = CopyPlan(direction, [job], 2)
                w.engine.prepare(plan)
                for layer in range(LAYERS):
                    ticket = Ticket(None, layer, layer, w.completed.append)
                    w.tickets.append(ticket)
                    w.engine.submit(plan, ticket)
                assert w.engine.fence(ticket, 0)
        assert w.device.moved["launch"]
        assert w.device.moved["upload"] == len(Direction), "where the layers lie, once"
        assert w.device.moved["allocate"] == 0
        w.drain()


@given(
    sizes=st.lists(st.integers(1, 5 * ALIGN_BYTES), max_size=30),
    choices=st.lists(st.integers(0, 3), min_size=1),
)
def test_table_in_use_keeps_its_bytes(sizes: list[int], choices: list[int]) -> None:
    """Tables in use keep their bytes, even if uploads run late and tables are released in another order."""
    device = FakeDevice()
    stream = FakeStream(device, "kernel")
    device.streams.append(stream)
    tables = RowTables(device, stream, 8 * ALIGN_BYTES)
    held: list[tuple[torch.Tensor, int]] = []
    turns = itertools.cycle(choices)
    for number, size in enumerate(sizes):
        made = tables.upload(np.full(size, number, np.uint8))
        if made is None:
            assert held, "there is room when no table is in use"
        else:
            held.append((made, number))
        del made
        for _ in range(next(turns)):
            device.step(0)
        if held and next(turns) < 2:
            del held[next(turns) % len(held)]
    device.drain()
    assert all(bool(made.eq(number).all()) for made, number in held)


def test_a_table_larger_than_the_ring_has_no_place() -> None:
    """A table that is larger than the ring is uploaded without the ring."""
    device = FakeDevice()
    tables = RowTables(device, device.stream("kernel"), ALIGN_BYTES)
    assert tables.upload(np.zeros(ALIGN_BYTES + 1, np.uint8)) is None
    assert tables.upload(np.zeros(ALIGN_BYTES, np.uint8)) is not None
