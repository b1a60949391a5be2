"""Small programs that do an engine step's work on the paged cache. Each program returns whether every byte was right.

A program that returns True for every schedule proves one ordering of the transfer engine. If the program returns False
when a wait is left out, the test itself is proven.
"""

from __future__ import annotations

from hypothesis import strategies as st

from kvpipe.protocol.messages import Kind
from kvpipe.testing.transfer_worlds import BLOCKS, GEOMETRY, LAYERS, World, job_rows, make_job, value_of
from kvpipe.testing.waiting import WAIT_S
from kvpipe.transfer.base import Direction

PAGES = min(GEOMETRY.pages_per_chunk)
TURNS = 3

block_lists = st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=PAGES, unique=True)
"""Lists of blocks of one group. The blocks are in any order, adjacent or not."""
tables = st.fixed_dictionaries(dict.fromkeys(range(len(GEOMETRY.groups)), block_lists))
schedules: st.SearchStrategy[list[int]] = st.one_of(st.just([]), st.lists(st.integers(0, 7), min_size=30, max_size=200))
"""Schedules of a simulated device. 0 returns control to the program. Each other number runs one ready stream.

With an empty schedule nothing runs before the end of the program.
"""


def saves_are_right(w: World, table: dict[int, list[int]]) -> bool:
    """In every turn, compute writes the same blocks. They are saved to a new slot layer by layer, with one fence."""
    for turn in range(TURNS):
        job = make_job(turn, job_rows(turn, table))
        for layer in range(LAYERS):
            for block in table[GEOMETRY.layers[layer][0]]:
                w.write_block(layer, block, value_of(turn, layer, block))
            w.let_run()
            ticket = w.submit(Direction.SAVE, layer, [job], layer)
            w.let_run()
        assert w.engine.fence(ticket, WAIT_S)
        w.let_run()
    w.drain()
    return all(
        w.slot_page(layer, slot, page).eq(value_of(turn, layer, block)).all()
        for turn in range(TURNS)
        for layer in range(LAYERS)
        for group, slot, page, block in job_rows(turn, table)
        if group == GEOMETRY.layers[layer][0]
    )


def loads_are_right(w: World, table: dict[int, list[int]]) -> bool:
    """Compute reads old bytes before the blocks are loaded, and then each layer after the layer's `guard_read`."""
    rows = job_rows(0, table)
    job = make_job(1, rows, Kind.LOAD_SYNC)
    mine = [[row for row in rows if row[0] == GEOMETRY.layers[layer][0]] for layer in range(LAYERS)]
    read = []
    for layer in range(LAYERS):
        for _, slot, page, block in mine[layer]:
            w.slot_page(layer, slot, page).fill_(value_of(0, layer, block))
            w.write_block(layer, block, value_of(1, layer, block))
            read.append((w.read_block(layer, block), value_of(1, layer, block)))
    w.let_run()
    tickets = [w.submit(Direction.LOAD, layer, [job], layer) for layer in range(LAYERS)]
    for layer, ticket in enumerate(tickets):
        w.let_run()
        assert w.engine.guard_read(ticket, WAIT_S)
        read += [(w.read_block(layer, block), value_of(0, layer, block)) for _, _, _, block in mine[layer]]
    w.let_run()
    w.drain()
    return all(set(got()) == {expected} for got, expected in read)


def slots_are_right(w: World, table: dict[int, list[int]], *, awaited: bool = True) -> bool:
    """Blocks are saved, overwritten after the fence, and loaded. If `awaited`, the host waits before the loads."""
    save, load = make_job(0, job_rows(0, table)), make_job(1, job_rows(0, table), Kind.LOAD_SYNC)
    for layer in range(LAYERS):
        for block in table[GEOMETRY.layers[layer][0]]:
            w.write_block(layer, block, value_of(0, layer, block))
        saved = w.submit(Direction.SAVE, layer, [save], layer)
        w.let_run()
    assert w.engine.fence(saved, WAIT_S)
    for layer in range(LAYERS):
        for block in table[GEOMETRY.layers[layer][0]]:
            w.write_block(layer, block, 255)
    if awaited:
        w.wait_for(saved)
    read = []
    for layer in range(LAYERS):
        ticket = w.submit(Direction.LOAD, layer, [load], layer)
        w.let_run()
        assert w.engine.guard_read(ticket, WAIT_S)
        read += [(w.read_block(layer, b), value_of(0, layer, b)) for b in table[GEOMETRY.layers[layer][0]]]
    w.drain()
    return all(set(got()) == {expected} for got, expected in read)
