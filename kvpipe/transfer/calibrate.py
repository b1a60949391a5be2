"""Chooses movers by measurements made once at start-up, on the engine's own streams, pool and bays.

Each mover gets two cost models of three numbers, ``us = fixed + copies * copy_us + bytes * byte_us``: until the bytes
have landed, and until they are read, which is what compute waits for before it reuses a save's blocks. They come from
three measured plans: one page; pages none of which is adjacent to another; whole chunks. For a plan, only the movers
whose bytes land about as soon as the quickest's are considered; of these the one that has read first is chosen. Of two
that are nearly equal, the one that takes no multiprocessor from the forward is preferred.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Final, NamedTuple

import numpy as np
import torch

from kvpipe.geometry import Geometry, Group, Layer
from kvpipe.messages import Job, Kind
from kvpipe.trace.log import log
from kvpipe.transfer.base import CopyPlan, Direction
from kvpipe.transfer.device import Device
from kvpipe.transfer.movers import DirectionQueues, Layout, Mover
from kvpipe.transfer.pages import view_pages
from kvpipe.transfer.pool import HostPool

SECONDS_MAX: Final = 0.5
REPEATS: Final = 5
PAGES_MAX: Final = 256
BYTES_MAX: Final = 16 << 20
BURDEN: Final[Mapping[Mover, float]] = {Mover.DMA: 1.0, Mover.STAGED: 1.05, Mover.DIRECT: 1.25}
"""Factors on a mover's microseconds: a staged copy runs two short kernels, a direct one occupies multiprocessors."""
LATE: Final = 1.25
"""By which factor later than with the quickest mover bytes may land if blocks are free sooner."""


class Cost(NamedTuple):
    """Microseconds of one submission: `fixed_us`, plus `copy_us` for every copy and `byte_us` for every byte."""

    fixed_us: float
    copy_us: float
    byte_us: float

    def of(self, copies: int, size: int) -> float:
        """Return the microseconds for `size` bytes in `copies` copies."""
        return self.fixed_us + copies * self.copy_us + size * self.byte_us

    @property
    def gb_per_s(self) -> float:
        """The rate in GB/s without the fixed costs; 0 if the time per byte was too small to be measured."""
        return 1e-3 / self.byte_us if self.byte_us else 0.0


class Measurement(NamedTuple):
    """The time of a plan of `copies` copies with `size` bytes: `us` microseconds."""

    copies: int
    size: int
    us: float


class Way(NamedTuple):
    """A mover's costs until the bytes have landed, and until they are read. For a load both are the same."""

    landed: Cost
    read: Cost


class Took(NamedTuple):
    """Microseconds from submission until the host knows that the bytes have landed, and that they were read."""

    landed_us: float
    read_us: float


Costs = dict[Direction, dict[Mover, Way]]


def fit(samples: Iterable[Measurement]) -> Cost:
    """Fit a cost to samples by least squares. Parts that would be negative are noise, and are set to 0."""
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
    """Return (copies, bytes) of one layer of `plan` with this mover: of the layer with the most bytes."""
    copies = size = 0
    for layer, group in enumerate(layout.groups):
        mine = layout.layer_bytes(plan, layer)
        if mine > size:
            size = mine
            whole = plan.runs if layout.views[layer].dense else plan.rows
            copies = {Mover.DMA: len(whole[group]), Mover.STAGED: len(plan.cuts[group])}.get(mover, 1)
    return copies, size


def choose(ways: Mapping[Mover, Way], layout: Layout, plan: CopyPlan) -> Mover:
    """Return the mover for `plan`: of those that land within `LATE` of the quickest, the first to have read."""
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
        """`pages` pages of whole chunks in adjacent blocks; with `holes` every second one, so that none is adjacent."""
        block = np.arange(0, pages, 1 + holes)
        slot, page = block // self.pages_per_chunk, block % self.pages_per_chunk
        rows = np.column_stack([np.zeros_like(page), slot, page, block]).astype("<i4").tobytes()
        return CopyPlan(direction, (Job(0, int(Kind.SAVE), "", 0, rows),), 1)


def measure(
    device: Device,
    lanes: Mapping[Direction, DirectionQueues],
    layout: Layout,
    movers: Iterable[Mover],
    slots: int,
    seconds_max: float,
) -> Costs:
    """Measure every mover in both directions, in the pinned slots 0 to `slots` - 1, whose content is overwritten.

    Movers that raise, or that copy wrong bytes, are left out of the result. After `seconds_max` the remaining plans are
    measured once.
    """
    size = min(view.page_bytes for view in layout.views)
    layer = next(i for i, view in enumerate(layout.views) if view.page_bytes == size)
    bench = _ScratchLayer(device, size, layout.geometry.pages_per_chunk[layout.groups[layer]], layout.pool, slots)
    open_ways = [mover for mover in movers if _is_right(lanes, bench, mover)]  # compiles kernels: not measured
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
        costs[direction][mover] = Way(*(fit(each) for each in zip(*samples, strict=True)))
    return costs


def _is_right(lanes: Mapping[Direction, DirectionQueues], bench: _ScratchLayer, mover: Mover) -> bool:
    try:
        return _check(lanes, bench, mover)
    except Exception as error:  # noqa: BLE001  (whatever it is, this way is not open)
        log.warning("mover_left_out", mover=mover.value, why=repr(error)[:400])
        return False


def _check(lanes: Mapping[Direction, DirectionQueues], bench: _ScratchLayer, mover: Mover) -> bool:
    """Whether pages that are saved, zeroed and loaded again have their old content."""
    own = torch.Generator().manual_seed(0)  # drawing from torch's generator would change vLLM's samples
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
    """Copy once. A plan is prepared once for all of its `layers`: each bears its share."""
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
        own.kernel.synchronize()  # all is in the bays: read, and not landed
        read = time.perf_counter()
    own.synchronize()
    landed = time.perf_counter()
    read = read or landed
    return Took((landed - began + share) * 1e6, (read - began + share) * 1e6)


def _sample(
    lane: DirectionQueues, bench: _ScratchLayer, mover: Mover, plan: CopyPlan, deadline: float, layers: int
) -> list[Measurement]:
    """Return two measurements, of the median times to land and to be read."""
    took = [_run(lane, bench, mover, plan, layers)]
    while len(took) < REPEATS and time.monotonic() < deadline:
        took.append(_run(lane, bench, mover, plan, layers))
    copies, size = copies_of(bench.layout, plan, mover)
    return [Measurement(copies, size, median(each)) for each in zip(*took, strict=True)]
