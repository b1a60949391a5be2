"""This module measures each mover once at start-up, on the engine's own streams, pool and bays, and chooses movers.

Each mover gets two cost models of three numbers, ``us = fixed + copies * copy_us + bytes * byte_us``. The first model
gives the time until the bytes have landed. The second model gives the time until the bytes have been read. From then
on, compute may reuse the blocks of a save. The models come from three measured plans. The first plan has one page, the
second plan has pages that are not adjacent, and the third plan has whole chunks. Plans without adjacent pages, such as
the saves of a decoding batch, have separate models, from the first two measured plans.

For a plan, a mover is considered if its bytes land within `LATE` times the fastest mover's time. The chosen mover is
the considered mover that finishes reading first. If two movers are nearly equal, the factors of `BURDEN` prefer the
mover that takes fewer multiprocessors from the forward.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Final, NamedTuple

import numpy as np
import torch

from kvpipe.errors import TransferError
from kvpipe.protocol.geometry import Geometry, Group, Layer
from kvpipe.protocol.messages import Job, Kind
from kvpipe.trace.log import log
from kvpipe.transfer.base import CopyPlan, Direction
from kvpipe.transfer.device import Device
from kvpipe.transfer.movers import DirectionQueues, Layout, Mover
from kvpipe.transfer.pages import view_pages
from kvpipe.transfer.pinning import Pins
from kvpipe.transfer.pool import HostPool

SECONDS_MAX: Final = 0.5
REPEATS: Final = 5
PAGES_MAX: Final = 256
BYTES_MAX: Final = 16 << 20
BURDEN: Final[Mapping[Mover, float]] = {Mover.DMA: 1.0, Mover.STAGED: 1.05, Mover.DIRECT: 1.25}
"""Factors for a mover's measured microseconds, because staged and direct copies take multiprocessors from the
forward."""
LATE: Final = 1.25
"""A mover is considered for a plan if its bytes land within this multiple of the fastest mover's time."""


class Cost(NamedTuple):
    """The microseconds of one submission: `fixed_us`, plus `copy_us` per copy, plus `byte_us` per byte."""

    fixed_us: float
    copy_us: float
    byte_us: float

    def of(self, copies: int, size: int) -> float:
        """Return the microseconds that `copies` copies of together `size` bytes take."""
        return self.fixed_us + copies * self.copy_us + size * self.byte_us

    @property
    def gb_per_s(self) -> float:
        """The rate in GB/s without the fixed costs. The rate is 0 if the time per byte was too short to measure."""
        return 1e-3 / self.byte_us if self.byte_us else 0.0


class Measurement(NamedTuple):
    """The measured time of a plan: `copies` copies of together `size` bytes took `us` microseconds."""

    copies: int
    size: int
    us: float


class Way(NamedTuple):
    """A mover's costs until the bytes have landed, and until the bytes are read. For a load both costs are equal.

    `ones_landed` and `ones_read` are the same costs for plans without adjacent pages, such as the saves of a decoding
    batch. None means that the cost was not measured.
    """

    landed: Cost
    read: Cost
    ones_landed: Cost | None = None
    ones_read: Cost | None = None

    @property
    def ones(self) -> Way:
        """The costs for plans without adjacent pages."""
        return Way(self.ones_landed or self.landed, self.ones_read or self.read)


class Took(NamedTuple):
    """The microseconds from the submission until the host knows that the bytes have landed, or that they were read."""

    landed_us: float
    read_us: float


Costs = dict[Direction, dict[Mover, Way]]


def fit(samples: Iterable[Measurement]) -> Cost:
    """Fit a cost to samples by least squares. Negative coefficients are noise and are set to 0."""
    known = list(samples)
    wanted = np.array([s.us for s in known])
    columns = np.array([[1.0, s.copies, s.size] for s in known])
    active = [0, 1, 2]
    parts = np.zeros(3)
    while active:
        solution = np.linalg.lstsq(columns[:, active], wanted, rcond=None)[0]
        if (solution >= 0).all():
            parts[active] = solution
            break
        active.pop(int(np.argmin(solution * columns[:, active].max(axis=0))))
    return Cost(*parts.tolist())


def copies_of(layout: Layout, plan: CopyPlan, mover: Mover) -> tuple[int, int]:
    """Return the numbers of copies and bytes that `mover` needs for the layer of `plan` that has the most bytes."""
    copies = size = 0
    for layer, group in enumerate(layout.groups):
        mine = layout.layer_bytes(plan, layer)
        if mine > size:
            size = mine
            whole = plan.runs if layout.views[layer].dense else plan.rows
            copies = {Mover.DMA: len(whole[group]), Mover.STAGED: len(plan.cuts[group])}.get(mover, 1)
    return copies, size


def choose(ways: Mapping[Mover, Way], layout: Layout, plan: CopyPlan) -> Mover:
    """Return the mover that finishes reading `plan` first, among movers that land within `LATE` times the best time."""
    if all(len(rows) == len(cuts) for rows, cuts in zip(plan.rows, plan.cuts, strict=True)):
        ways = {mover: way.ones for mover, way in ways.items()}
    counts = {mover: copies_of(layout, plan, mover) for mover in ways}
    landed = {mover: way.landed.of(*counts[mover]) * BURDEN[mover] for mover, way in ways.items()}
    in_time = [mover for mover in ways if landed[mover] <= LATE * min(landed.values())]
    return min(in_time, key=lambda mover: (ways[mover].read.of(*counts[mover]) * BURDEN[mover], landed[mover]))


class _ScratchLayer:
    """One layer of scratch pages in device memory, and the pool's first slots."""

    def __init__(self, device: Device, page_bytes: int, pages_per_chunk: int, pool: HostPool, slots: int) -> None:
        pages = min(PAGES_MAX, BYTES_MAX // page_bytes, slots * pages_per_chunk)
        self.blocks = max(2, pages // pages_per_chunk * pages_per_chunk)
        self.pages_per_chunk = pages_per_chunk
        cache = device.allocate(self.blocks * page_bytes).view(self.blocks, page_bytes)
        geometry = Geometry((Group((Layer("scratch", page_bytes),), 1),), pages_per_chunk, pool.slots * pool.slot_bytes)
        self.layout = Layout([view_pages("scratch", cache, self.blocks)], geometry, pool)
        self.cache = cache

    def plan(self, direction: Direction, pages: int, *, holes: bool) -> CopyPlan:
        """Return a plan of `pages` pages of whole chunks in adjacent blocks. `holes` leaves out every second page.

        With `holes` no two pages of the plan are adjacent.
        """
        block = np.arange(0, pages, 1 + holes)
        slot, page = block // self.pages_per_chunk, block % self.pages_per_chunk
        rows = np.column_stack([np.zeros_like(page), slot, page, block]).astype("<i4").tobytes()
        return CopyPlan(direction, (Job(0, int(Kind.SAVE), "", 0, rows),), 1)


@contextmanager
def measured_slots(pins: Pins, layout: Layout, piece_bytes: int, size_max: int) -> Iterator[tuple[Layout, int]]:
    """Yield a layout, and the number of its pinned slots whose content may be overwritten.

    The slots belong to `pins`. If engines share the pool, they are scratch slots of at most about `size_max` bytes.
    """
    if not pins.pool.token:
        yield layout, pins.slots
        return
    size = max(min(size_max, layout.geometry.pool_bytes_max), layout.geometry.slot_bytes)
    scratch = Pins(pins.device, HostPool(replace(layout.geometry, pool_bytes_max=size)))
    scratch.begin(piece_bytes, size)
    try:
        if not scratch.slots:
            raise TransferError("no scratch memory can be pinned")
        yield Layout(layout.views, layout.geometry, scratch.pool), scratch.slots
    finally:
        scratch.end(unpin=True)


def measure(
    device: Device,
    lanes: Mapping[Direction, DirectionQueues],
    layout: Layout,
    slots: int,
    movers: Iterable[Mover],
    seconds_max: float,
) -> Costs:
    """Measure every mover in both directions. The content of the pinned slots [0, slots) is overwritten.

    The result has no movers that raise or copy wrong bytes. After `seconds_max` seconds each remaining plan is measured
    only once.
    """
    size = min(view.page_bytes for view in layout.views)
    layer = next(i for i, view in enumerate(layout.views) if view.page_bytes == size)
    bench = _ScratchLayer(device, size, layout.geometry.pages_per_chunk[layout.groups[layer]], layout.pool, slots)
    open_ways = [mover for mover in movers if _is_right(lanes, bench, mover)]  # compiles kernels
    for lane in lanes.values():
        lane.warm(staged=Mover.STAGED in open_ways, direct=Mover.DIRECT in open_ways)
        lane.synchronize()
    deadline = time.monotonic() + seconds_max
    costs: Costs = {direction: {} for direction in Direction}
    for mover, direction in itertools.product(open_ways, Direction):
        plans = [
            bench.plan(direction, n, holes=h) for n, h in ((1, False), (bench.blocks, True), (bench.blocks, False))
        ]
        samples = [_sample(lanes[direction], bench, mover, plan, deadline, len(layout.views)) for plan in plans]
        ones = samples[:2]  # the plans without adjacent pages; for these plans, a bay needs as many copies as DMA
        costs[direction][mover] = Way(*(fit(each) for some in (samples, ones) for each in zip(*some, strict=True)))
    return costs


def _is_right(lanes: Mapping[Direction, DirectionQueues], bench: _ScratchLayer, mover: Mover) -> bool:
    try:
        return _check(lanes, bench, mover)
    except Exception as error:  # noqa: BLE001  (after any error this mover cannot be used)
        log.warning("mover_left_out", mover=mover.value, why=repr(error)[:400])
        return False


def _check(lanes: Mapping[Direction, DirectionQueues], bench: _ScratchLayer, mover: Mover) -> bool:
    """Return whether pages that are saved, zeroed and loaded again have their old content."""
    own = torch.Generator().manual_seed(0)  # an own generator, because vLLM samples with the global generator
    pattern = torch.randint(0, 256, bench.cache.shape, dtype=torch.uint8, generator=own)
    bench.cache.copy_(pattern)
    for direction in (Direction.SAVE, Direction.LOAD):
        if direction is Direction.LOAD:
            bench.cache.zero_()
        _run(lanes[direction], bench, mover, bench.plan(direction, bench.blocks, holes=True))
    want = torch.zeros_like(pattern)
    want[::2] = pattern[::2]
    return torch.equal(bench.cache.cpu(), want)


def _run(lane: DirectionQueues, bench: _ScratchLayer, mover: Mover, plan: CopyPlan, layers: int = 1) -> Took:
    """Copy one layer and return the times, including the layer's share of the time to prepare the plan.

    A plan is prepared once for all of its `layers` layers.
    """
    own = lane.over(bench.layout)
    began = time.perf_counter()
    prepared = own.prepare(plan, mover, None)
    share = (time.perf_counter() - began) / layers
    own.synchronize()
    start = own.device.current_stream().record_event()
    began = time.perf_counter()
    own.queue(plan, prepared, [0], start)
    read = 0.0
    if mover is Mover.STAGED and plan.direction is Direction.SAVE:
        own.kernel.synchronize()  # from here on, all pages are in the bays: they are read, but have not landed
        read = time.perf_counter()
    own.synchronize()
    landed = time.perf_counter()
    read = read or landed
    return Took((landed - began + share) * 1e6, (read - began + share) * 1e6)


def _sample(
    lane: DirectionQueues, bench: _ScratchLayer, mover: Mover, plan: CopyPlan, deadline: float, layers: int
) -> list[Measurement]:
    """Return two measurements: the median time until the bytes land, and the median time until they are read."""
    took = [_run(lane, bench, mover, plan, layers)]
    while len(took) < REPEATS and time.monotonic() < deadline:
        took.append(_run(lane, bench, mover, plan, layers))
    copies, size = copies_of(bench.layout, plan, mover)
    return [Measurement(copies, size, median(each)) for each in zip(*took, strict=True)]
