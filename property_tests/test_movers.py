"""Every mover gives the bytes of a naive copy, whatever the waves, the bays and the order of events are."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st

from kvpipe.protocol.geometry import Geometry, Group, Layer
from kvpipe.protocol.messages import Job, Kind
from kvpipe.testing.fake_device import FakeDevice
from kvpipe.testing.waiting import WAIT_S
from kvpipe.transfer.base import CopyPlan, Direction, Ticket
from kvpipe.transfer.cpu import CpuEngine
from kvpipe.transfer.cuda import CudaEngine
from kvpipe.transfer.movers import BAYS, Layout, Mover
from kvpipe.transfer.pages import PageView, view_pages
from kvpipe.transfer.pool import HostPool
from property_tests.profiles import examples
from tests.rigs.pipeline_rig import Row, rows

BLOCKS, SLOTS, CHUNK = 20, 6, 32
SIZES = (64, 96, 8)


class Case(NamedTuple):
    """Caches with pages of `sizes` bytes and `pads` between pages, and the copies to make.

    `saves` are (group, slot, page, block). `loads` copy all saved pages into other blocks.
    """

    geometry: Geometry
    pads: list[int]
    sizes: list[int]
    saves: list[Row]
    loads: list[Row]
    cut: int
    order: list[int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw one or two groups of one to four layers, with pages in any order and with whole or partial chunks."""
    groups: list[Group] = []
    paddings: list[int] = []
    for tokens in draw(st.sampled_from([[4], [4, 8], [8, 4], [16]])):
        alike = st.builds(lambda size, count: [size] * count, st.sampled_from(SIZES), st.integers(2, 4))
        sizes = draw(alike | st.lists(st.sampled_from(SIZES), min_size=1, max_size=4))
        padding = draw(st.sampled_from([0, 0, 32]))  # vLLM's specification has padding, and so has a slot
        layers = tuple(Layer(f"{len(groups)}.{i}", size + padding) for i, size in enumerate(sizes))
        paddings += [padding] * len(sizes)
        groups.append(Group(layers, block_tokens=tokens))
    geometry = Geometry(tuple(groups), CHUNK, SLOTS * 4096)
    saves: list[Row] = []
    loads: list[Row] = []
    slots = draw(st.permutations(range(SLOTS)))
    for g, pages in enumerate(geometry.pages_per_chunk):
        mine = slots[g * SLOTS // len(groups) : (g + 1) * SLOTS // len(groups)]
        places = list(itertools.product(mine, range(pages)))[:BLOCKS]
        keep = draw(st.lists(st.booleans(), min_size=len(places), max_size=len(places)) | st.just([True] * len(places)))
        chosen = [place for place, kept in zip(places, keep, strict=True) if kept]
        chosen = draw(st.just(chosen) | st.permutations(chosen))
        sources, targets = (draw(st.just(list(range(BLOCKS))) | st.permutations(range(BLOCKS))) for _ in range(2))
        saves += [(g, slot, page, sources[i]) for i, (slot, page) in enumerate(chosen)]
        loads += [(g, slot, page, targets[i]) for i, (slot, page) in enumerate(chosen)]
    pads = draw(st.lists(st.sampled_from([0, 0, 16, 40]), min_size=len(geometry.layers), max_size=len(geometry.layers)))
    count = len(geometry.layers)
    padded = [layer.page_bytes for group in groups for layer in group.layers]
    view_sizes = [size - padding for size, padding in zip(padded, paddings, strict=True)]
    order = draw(st.just(list(range(count))) | st.permutations(range(count)))
    return Case(geometry, pads, view_sizes, saves, loads, draw(st.integers(0, len(saves))), order)


def make_caches(case: Case) -> tuple[list[torch.Tensor], list[PageView]]:
    """Return one cache of random bytes per layer, of shape (BLOCKS, page_bytes), and its views."""
    caches = []
    for pad, size in zip(case.pads, case.sizes, strict=True):
        stride = size + pad
        buffer = torch.randint(0, 256, (BLOCKS * stride // 8 * 8,), dtype=torch.uint8)
        caches.append(torch.as_strided(buffer, (BLOCKS, size), (stride, 1)))
    return caches, [view_pages(str(i), cache, BLOCKS) for i, cache in enumerate(caches)]


def whole(cache: torch.Tensor) -> torch.Tensor:
    """Return every byte of a cache's storage, including padding."""
    return torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())


def run(engine: CudaEngine, device: FakeDevice, plan: CopyPlan, case: Case, choices: list[int]) -> None:
    """Submit every layer, and let the device run in the order of `choices`."""
    reported: list[Ticket] = []
    tickets = [Ticket(None, layer, i, reported.append) for i, layer in enumerate(case.order)]
    engine.prepare(plan)
    for ticket in tickets:
        engine.submit(plan, ticket)
    for ticket in tickets if plan.direction is Direction.LOAD else tickets[-1:]:
        assert (engine.guard_read if plan.direction is Direction.LOAD else engine.fence)(ticket, 0)
    for choice in choices:
        device.step(choice)
    device.drain()
    assert all(ticket.wait(WAIT_S) for ticket in tickets)
    assert reported == tickets
    assert not any(ticket.failed for ticket in tickets)


def there_and_back(engine: CudaEngine, device: FakeDevice, case: Case, choices: list[int], kind: Kind) -> None:
    """Save, load into other blocks, and compare every byte of pool and caches with the bytes of the CPU engine."""
    caches, views = make_caches(case)
    pool, wanted_pool = HostPool(case.geometry), HostPool(case.geometry)
    wanted = [torch.as_strided(whole(c).clone(), c.shape, c.stride()) for c in caches]
    reference = CpuEngine(0)
    reference.attach([view_pages(str(i), c, BLOCKS) for i, c in enumerate(wanted)], case.geometry, wanted_pool)
    engine.attach(views, case.geometry, pool)
    groups = len(case.geometry.groups)
    try:
        for direction, table, of in ((Direction.SAVE, case.saves, Kind.SAVE), (Direction.LOAD, case.loads, kind)):
            parts = [table[: case.cut], table[case.cut :]]
            jobs = [Job(10 + i, int(of), f"r{i}", 1, rows(part)) for i, part in enumerate(parts)]
            run(engine, device, CopyPlan(direction, jobs, groups), case, choices)
            for layer in case.order:
                reference.copy_layer(CopyPlan(direction, jobs, groups), layer)
            assert torch.equal(pool.tensor, wanted_pool.tensor)
            assert all(torch.equal(whole(c), whole(w)) for c, w in zip(caches, wanted, strict=True))
    finally:
        engine.shutdown()


@pytest.mark.parametrize("mover", Mover)
@examples(60)
@given(
    case=cases(),
    wave_bytes=st.sampled_from([0, 400, 1 << 20, 1 << 20]),
    bay_pages=st.integers(1, 6) | st.just(200),
    choices=st.lists(st.integers(0, 7), max_size=200),
    kind=st.sampled_from([Kind.LOAD_SYNC, Kind.LOAD_ASYNC]),
)
def test_every_mover_copies_what_the_cpu_engine_copies(
    mover: Mover, case: Case, wave_bytes: int, bay_pages: int, choices: list[int], kind: Kind
) -> None:
    """With any tables, layers, waves and bays, slots and blocks have the same bytes as with the CPU engine."""
    staging = len(Direction) * BAYS * bay_pages * max(SIZES)
    device = FakeDevice()
    options = {"mover": mover, "staging_bytes_max": staging, "wave_bytes": wave_bytes, "calibrate_s_max": 0.0}
    there_and_back(CudaEngine(device, **options), device, case, choices, kind)  # type: ignore[arg-type]
    if mover is Mover.STAGED and any(case.saves):
        event("a launch of several layers" if device.deepest > 1 else "one layer per launch")


@pytest.mark.parametrize("mover", [Mover.STAGED, Mover.DIRECT])
@examples(6)
@given(case=cases(), wave_bytes=st.just(1 << 20), bay_pages=st.sampled_from([3, 200]))
def test_the_kernel_copies_what_the_cpu_engine_copies(
    mover: Mover, case: Case, wave_bytes: int, bay_pages: int
) -> None:
    """The real kernel, run by Triton's interpreter, gives the CPU engine's bytes."""
    staging = len(Direction) * BAYS * bay_pages * max(SIZES)
    device = FakeDevice(interpreted=True)
    options = {"mover": mover, "staging_bytes_max": staging, "wave_bytes": wave_bytes, "calibrate_s_max": 0.0}
    there_and_back(CudaEngine(device, **options), device, case, [], Kind.LOAD_ASYNC)  # type: ignore[arg-type]


@given(case=cases())
def test_whole_chunks_take_few_copies(case: Case) -> None:
    """A whole chunk is one copy for all layers of a piece. Other chunks need one copy per layer and run."""
    _, views = make_caches(case)
    layout = Layout(views, case.geometry, HostPool(case.geometry))
    plan = CopyPlan(Direction.SAVE, [Job(1, 0, "r", 1, rows(case.saves))], len(case.geometry.groups))
    for alike in layout.alike(range(len(views))):
        for piece in layout.pieces(plan, alike, 1 << 20):
            copies = layout.spans(plan, piece, 0, {})
            pages = np.diff(np.append(plan.cuts[alike.group], len(plan.rows[alike.group])))
            full = int((pages == case.geometry.pages_per_chunk[alike.group]).sum())
            assert len(copies.sizes) == full + (len(pages) - full) * alike.layers
            assert copies.sizes.sum() == piece.rows * piece.layers * views[alike.first].page_bytes


def test_a_bay_is_filled_with_several_layers_when_not_all_layers_fit() -> None:
    """Each filling of a bay costs a launch, two events and a batch, so several layers must share a filling."""
    geometry = Geometry((Group(tuple(Layer(str(i), 64) for i in range(5)), block_tokens=8),), CHUNK, SLOTS * 4096)
    views = [view_pages(str(i), torch.zeros(BLOCKS, 64, dtype=torch.uint8), BLOCKS) for i in range(5)]
    layout = Layout(views, geometry, HostPool(geometry))
    plan = CopyPlan(Direction.SAVE, [Job(1, 0, "r", 1, rows([(0, 0, 0, 3), (0, 1, 0, 5)]))], 1)
    (alike,) = layout.alike(range(5))
    pieces = [(piece.layer, piece.layers, piece.rows) for piece in layout.pieces(plan, alike, 4 * 64 + 63)]
    assert pieces == [(0, 2, 2), (2, 2, 2), (4, 1, 2)]


@pytest.mark.parametrize("mover", Mover)
def test_a_padded_specification_is_copied_like_any_other(mover: Mover) -> None:
    """A page of vLLM's specification may be larger than a page of the cache.

    If so, there are gaps between the layers of a slot.
    """
    geometry = Geometry((Group(tuple(Layer(str(i), 96) for i in range(3)), block_tokens=8),), CHUNK, SLOTS * 4096)
    rows_ = [(0, 1, page, 2 * page) for page in range(geometry.pages_per_chunk[0])]
    moved = [(0, 1, page, 2 * page + 1) for page in range(geometry.pages_per_chunk[0])]
    case = Case(geometry, [0] * 3, [64] * 3, rows_, moved, 0, [0, 1, 2])
    device = FakeDevice()
    engine = CudaEngine(device, mover=mover, staging_bytes_max=1 << 16, wave_bytes=1 << 20, calibrate_s_max=0)
    there_and_back(engine, device, case, [], Kind.LOAD_ASYNC)
