"""Copies: merged runs copy the same bytes as single rows, and saves and loads give the bytes of a naive copy."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpipe.protocol.geometry import Geometry, Group, Layer
from kvpipe.protocol.messages import Job, Kind
from kvpipe.testing.waiting import WAIT_S
from kvpipe.transfer.base import CopyPlan, Direction, Run, Ticket
from kvpipe.transfer.cpu import CpuEngine
from kvpipe.transfer.pages import PageView, view_pages
from kvpipe.transfer.pool import HostPool
from property_tests.profiles import examples
from tests.rigs.pipeline_rig import Row, rows

BLOCKS, SLOTS = 9, 4
ROWS = st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 3), st.integers(0, 6))
RAMPS = st.builds(  # adjacent pages and blocks, which are to be merged
    lambda first, count: [(first[0], first[1], first[2] + i, first[3] + i) for i in range(count)],
    ROWS,
    st.integers(1, 5),
)
TABLES = st.lists(RAMPS | st.lists(ROWS, max_size=4), max_size=4).map(lambda parts: list(itertools.chain(*parts)))


def _jobs(tables: list[list[Row]], kind: Kind = Kind.SAVE) -> list[Job]:
    return [Job(10 + i, int(kind), f"r{i}", 1, rows(table)) for i, table in enumerate(tables)]


def _naive_runs(tables: list[list[Row]], group: int) -> list[Run]:
    runs: list[Run] = []
    for i, table in enumerate(tables):
        for g, slot, page, block in table:
            if g != group:
                continue
            last = runs[-1] if runs else None
            joined = last and (last.job, last.slot, last.page + last.pages, last.block + last.pages)
            if last and joined == (10 + i, slot, page, block):
                runs[-1] = last._replace(pages=last.pages + 1)
            else:
                runs.append(Run(10 + i, slot, page, block, 1))
    return runs


@given(st.lists(TABLES, max_size=4))
def test_merged_runs_equal_those_of_a_merge_by_rows(tables: list[list[Row]]) -> None:
    """The vectorised merge gives the runs of a row-by-row merge: it merges only adjacent rows of one job and slot."""
    plan = CopyPlan(Direction.SAVE, _jobs(tables), 2)
    for group in range(2):
        assert plan.run_list(group) == _naive_runs(tables, group)


def test_consecutive_rows_are_one_run() -> None:
    """Adjacent rows are merged, so a whole chunk is one copy per layer; the job's end ends the run."""
    table: list[Row] = [(0, 1, i, 3 + i) for i in range(4)]
    plan = CopyPlan(Direction.LOAD, _jobs([table[:2], table[2:]]), 1)
    assert plan.run_list(0) == [Run(10, 1, 0, 3, 2), Run(11, 1, 2, 5, 2)]


# ---- bytes --------------------------------------------------------------------------------------------------------

GEOMETRY = Geometry(
    (
        Group((Layer("a", 96), Layer("b", 160)), block_tokens=4),
        Group((Layer("c", 512),), block_tokens=8),
    ),
    chunk_tokens=16,
    pool_bytes_max=SLOTS * 4096,
)
LAYER_BYTES = [layer.page_bytes for group in GEOMETRY.groups for layer in group.layers]


def _cache(page_bytes: int, pad: int) -> torch.Tensor:
    """Return a paged cache of random bytes, shape (BLOCKS, page_bytes), with `pad` bytes between blocks."""
    buffer = torch.randint(0, 256, (BLOCKS * (page_bytes + pad),), dtype=torch.uint8)
    return torch.as_strided(buffer, (BLOCKS, page_bytes), (page_bytes + pad, 1))


def _views(caches: list[torch.Tensor]) -> list[PageView]:
    return [view_pages(str(i), cache, BLOCKS) for i, cache in enumerate(caches)]


def _place(layer: int, slot: int, page: int) -> tuple[int, int]:
    """Return (slot, byte) of a page, computed independently of the code of `Geometry`."""
    group, index = ((0, 0), (0, 1), (1, 0))[layer]
    pages = (4, 2)[group]
    return slot, sum(LAYER_BYTES[:index] if group == 0 else []) * pages + page * LAYER_BYTES[layer]


def _naive_copy(direction: Direction, table: list[Row], caches: list[torch.Tensor], slots: torch.Tensor) -> None:
    for layer, cache in enumerate(caches):
        for group, slot, page, block in table:
            if group != (0, 0, 1)[layer]:
                continue
            s, at = _place(layer, slot, page)
            if direction is Direction.SAVE:
                slots[s, at : at + LAYER_BYTES[layer]] = cache[block]
            else:
                cache[block] = slots[s, at : at + LAYER_BYTES[layer]]


def _whole(cache: torch.Tensor) -> torch.Tensor:
    """Return every byte of a cache's storage, including padding."""
    return torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())


@st.composite
def _tables(draw: st.DrawFn) -> tuple[list[list[Row]], list[list[Row]]]:
    """Draw the rows of two save jobs, and rows that load all saved pages into other blocks."""
    saves: list[Row] = []
    loads: list[Row] = []
    for group, pages, slots in ((0, 4, (0, 2)), (1, 2, (1, 3))):  # a slot belongs to one group
        places = list(itertools.product(slots, range(pages)))
        count = draw(st.integers(0, min(BLOCKS, len(places))))
        start = draw(st.integers(0, len(places) - count))
        chosen = places[start : start + count] if draw(st.booleans()) else draw(st.permutations(places))[:count]
        sources = draw(st.just(list(range(BLOCKS))) | st.permutations(range(BLOCKS)))
        targets = draw(st.just(list(range(BLOCKS))) | st.permutations(range(BLOCKS)))
        for i, (slot, page) in enumerate(chosen):
            saves.append((group, slot, page, sources[i]))
            loads.append((group, slot, page, targets[i]))
    cut = draw(st.integers(0, len(saves)))
    return [saves[:cut], saves[cut:]], [loads[cut:], loads[:cut]]


def _submit_all(engine: CpuEngine, plan: CopyPlan, order: list[int]) -> list[Ticket]:
    finished: list[Ticket] = []
    tickets = [Ticket(None, layer, i, finished.append) for i, layer in enumerate(order)]
    for ticket in tickets:
        engine.submit(plan, ticket)
    assert all(engine.fence(ticket, WAIT_S) for ticket in tickets)
    assert finished == tickets  # each ticket ends once, in the order of submission
    assert not any(ticket.failed for ticket in tickets)
    return tickets


@pytest.mark.parametrize("threads", [0, 1])
@examples(60)
@given(
    tables=_tables(),
    pads=st.lists(st.sampled_from([0, 0, 8, 40]), min_size=3, max_size=3),
    order=st.permutations(range(3)),
)
def test_loaded_bytes_equal_saved_bytes(
    threads: int, tables: tuple[list[list[Row]], list[list[Row]]], pads: list[int], order: list[int]
) -> None:
    """A save and a load into other blocks leave the bytes of a naive copy everywhere, the padding included."""
    saves, loads = tables
    caches = [_cache(size, pad) for size, pad in zip(LAYER_BYTES, pads, strict=True)]
    pool = HostPool(GEOMETRY)
    wanted_slots, wanted = pool.tensor.clone(), [_clone(cache) for cache in caches]
    engine = CpuEngine(threads)
    engine.attach(_views(caches), GEOMETRY, pool)
    try:
        _submit_all(engine, CopyPlan(Direction.SAVE, _jobs(saves), 2), order)
        _naive_copy(Direction.SAVE, [r for t in saves for r in t], wanted, wanted_slots)
        assert torch.equal(pool.tensor, wanted_slots)
        _submit_all(engine, CopyPlan(Direction.LOAD, _jobs(loads, Kind.LOAD_ASYNC), 2), order)
        _naive_copy(Direction.LOAD, [r for t in loads for r in t], wanted, wanted_slots)
        assert torch.equal(pool.tensor, wanted_slots)
        for cache, want in zip(caches, wanted, strict=True):
            assert torch.equal(_whole(cache), _whole(want))
    finally:
        engine.shutdown()


def _clone(cache: torch.Tensor) -> torch.Tensor:
    """Copy a cache with its strides and padding."""
    return torch.as_strided(_whole(cache).clone(), cache.shape, cache.stride())


@pytest.mark.parametrize("threads", [0, 1])
def test_a_copy_that_raises_fails_every_job_of_its_plan(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in a copy completes the ticket with all its jobs failed; the next copy works."""
    engine, pool = CpuEngine(threads), HostPool(GEOMETRY)
    engine.attach(_views([_cache(size, 0) for size in LAYER_BYTES]), GEOMETRY, pool)
    plan = CopyPlan(Direction.SAVE, _jobs([[(0, 0, 0, 0)], [(0, 1, 0, 1)]]), 2)
    copy_layer = CpuEngine.copy_layer

    def fail_once(self: CpuEngine, plan: CopyPlan, layer: int) -> frozenset[int]:
        if layer == 0:
            msg = "no"
            raise MemoryError(msg)
        return copy_layer(self, plan, layer)

    monkeypatch.setattr(CpuEngine, "copy_layer", fail_once)
    done: list[Ticket] = []
    tickets = [Ticket(None, layer, layer, done.append) for layer in range(3)]
    for ticket in tickets:
        engine.submit(plan, ticket)
    assert engine.fence(tickets[-1], WAIT_S)
    assert done == tickets
    assert [ticket.failed for ticket in tickets] == [{10, 11}, frozenset(), frozenset()]
    engine.shutdown()


@pytest.mark.parametrize("threads", [0, 1])
def test_shutdown_completes_earlier_tickets_and_fails_later_tickets(threads: int) -> None:
    """After shutdown every earlier ticket is complete, a later ticket fails, and a second shutdown changes nothing."""
    engine, pool = CpuEngine(threads), HostPool(GEOMETRY)
    caches = [_cache(size, 0) for size in LAYER_BYTES]
    engine.attach(_views(caches), GEOMETRY, pool)
    done: list[Ticket] = []
    plans = [CopyPlan(direction, _jobs([[(0, 2, 1, 4)]]), 2) for direction in Direction]
    tickets = [Ticket(None, i % 3, i, done.append) for i in range(30)]
    for i, ticket in enumerate(tickets):
        engine.submit(plans[i % 2], ticket)
    engine.shutdown()
    engine.shutdown()
    assert all(ticket.done for ticket in tickets)
    for parity in range(2):
        assert [t for t in done if t.ordinal % 2 == parity] == tickets[parity::2]
    late = Ticket(None, 0, 0, done.append)
    engine.submit(plans[0], late)
    assert late.done
    assert late.failed == {10}
    assert len(done) == 31
