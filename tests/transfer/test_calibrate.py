"""Tests of the choice of a mover by measured costs. A mover that copies wrong bytes is never chosen."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpipe.errors import UnsupportedError
from kvpipe.protocol.geometry import Geometry, Group, Layer
from kvpipe.protocol.messages import Kind
from kvpipe.testing.fake_device import FakeDevice, FakeStream
from kvpipe.testing.logged import capture_logs
from kvpipe.testing.transfer_worlds import BLOCKS, GEOMETRY, LAYERS, PAGE_BYTES, job_rows, make_job
from kvpipe.transfer import calibrate
from kvpipe.transfer.base import CopyPlan, Direction
from kvpipe.transfer.calibrate import Cost, Measurement, Took, Way, choose, copies_of, fit
from kvpipe.transfer.cuda import CudaEngine
from kvpipe.transfer.device import Launch
from kvpipe.transfer.driver import CopyBatch
from kvpipe.transfer.movers import DirectionQueues, Layout, Mover
from kvpipe.transfer.pages import view_pages
from kvpipe.transfer.pool import HostPool


def attach(device: FakeDevice, mover: Mover | None = None, **options: int) -> CudaEngine:
    """Return an attached engine that has measured its movers."""
    caches = [torch.zeros(BLOCKS, PAGE_BYTES, dtype=torch.uint8) for _ in range(LAYERS)]
    engine = CudaEngine(device, mover=mover, **options)  # type: ignore[arg-type]
    engine.attach([view_pages(f"{i}", cache, BLOCKS) for i, cache in enumerate(caches)], GEOMETRY, HostPool(GEOMETRY))
    return engine


@given(
    parts=st.tuples(*[st.floats(0, 50)] * 2, st.floats(0, 0.001)),
    points=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 1 << 24)), min_size=3, max_size=5, unique=True),
)
def test_fit_is_never_negative_and_right_without_noise(
    parts: tuple[float, float, float], points: list[tuple[int, int]]
) -> None:
    """No part of a fitted cost is negative. If samples follow the cost model exactly, the fit is exact too."""
    real = Cost(*parts)
    fitted = fit(Measurement(copies, size, real.of(copies, size)) for copies, size in points)
    assert min(fitted) >= 0
    for copies, size in points:
        assert fitted.of(copies, size) == pytest.approx(real.of(copies, size), rel=0.02, abs=0.05)


def test_noise_cannot_make_a_part_negative() -> None:
    """In noisy samples, many copies may take less time than one copy, or many bytes less time than few bytes.

    In such a case the cost of a copy or of a byte is 0.
    """
    assert fit([Measurement(1, 64, 10.0), Measurement(64, 4096, 8.0), Measurement(4, 8192, 7.0)]) == pytest.approx(
        (25 / 3, 0, 0)
    )


COSTS = {
    Mover.DMA: Cost(10, 1.3, 1 / 55_000),
    Mover.STAGED: Cost(20, 0.3, 1 / 54_000),
    Mover.DIRECT: Cost(14, 0, 1 / 47_000),
}
"""Costs like those of a GPU with a fifth-generation bus, in microseconds and bytes per microsecond."""
LOADS = {mover: Way(cost, cost) for mover, cost in COSTS.items()}
SAVES = LOADS | {Mover.STAGED: Way(COSTS[Mover.STAGED], Cost(12, 0, 1 / 1_000_000))}


def layout_and_plan(page_bytes: int, requests: int, pages: int, *, adjacent: bool) -> tuple[Layout, CopyPlan]:
    """Return a layout, and a plan of `requests` runs of `pages` pages. No two runs are adjacent."""
    group = Group((Layer("a", page_bytes),), block_tokens=16)
    geometry = Geometry((group,), chunk_tokens=256, pool_bytes_max=(requests + 1) * 16 * max(page_bytes, 256))
    step = 1 if adjacent else 2
    rows = [(0, r, p, step * (r * (pages + 1) + p)) for r in range(requests) for p in range(pages)]
    blocks = max(row[3] for row in rows) + 1
    view = view_pages("a", torch.empty(blocks, page_bytes, dtype=torch.uint8), blocks)
    return Layout([view], geometry, HostPool(geometry)), CopyPlan(Direction.SAVE, [make_job(1, rows)], 1)


@pytest.mark.parametrize(
    ("page_bytes", "requests", "pages", "adjacent", "expected"),
    [
        (64 << 10, 1, 16, True, Mover.DMA),  # `dma` needs one copy, like the other movers
        (1 << 20, 4, 16, False, Mover.DMA),  # pages are so large that other movers gain nothing
        (8 << 10, 32, 16, False, Mover.STAGED),  # small scattered pages of whole chunks become few large copies
        (8 << 10, 64, 1, False, Mover.DIRECT),  # single pages of many requests
    ],
)
def test_the_choice_follows_from_the_costs(
    page_bytes: int, requests: int, pages: int, adjacent: bool, expected: Mover
) -> None:
    """Few large copies use DMA, scattered pages of whole chunks a bay, and single pages the kernel."""
    layout, plan = layout_and_plan(page_bytes, requests, pages, adjacent=adjacent)
    assert choose(LOADS, layout, plan) is expected


@pytest.mark.parametrize(
    ("page_bytes", "requests", "pages", "expected"),
    [
        (64 << 10, 1, 16, Mover.DMA),  # for 1 MiB, `staged` would land the bytes too late
        (64 << 10, 8, 16, Mover.STAGED),  # for 8 MiB, in time, and the blocks are free 12 times as soon
        (1 << 20, 4, 16, Mover.STAGED),
        (8 << 10, 64, 1, Mover.DIRECT),
    ],
)
def test_save_uses_the_mover_that_first_reads_its_blocks(
    page_bytes: int, requests: int, pages: int, expected: Mover
) -> None:
    """Among movers whose bytes land in time, a save uses the mover that first finishes reading the blocks."""
    layout, plan = layout_and_plan(page_bytes, requests, pages, adjacent=True)
    assert choose(LOADS, layout, plan) in {Mover.DMA, Mover.DIRECT}
    assert choose(SAVES, layout, plan) is expected


def test_single_pages_have_separate_costs() -> None:
    """Single pages, as in decoding, have a separate cost model, because `staged` copies each of them like `dma`."""
    lone = Cost(20, 2.0, 1 / 54_000)
    ways = LOADS | {Mover.STAGED: Way(COSTS[Mover.STAGED], COSTS[Mover.STAGED], lone, lone)}
    del ways[Mover.DIRECT]
    assert choose(ways, *layout_and_plan(8 << 10, 64, 1, adjacent=False)) is Mover.DMA
    assert choose(ways, *layout_and_plan(8 << 10, 32, 16, adjacent=False)) is Mover.STAGED
    del ways[Mover.STAGED]
    assert choose(ways, *layout_and_plan(8 << 10, 64, 1, adjacent=False)) is Mover.DMA


def test_single_pages_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost model of single pages uses only measurements of single pages, not measurements of whole chunks."""
    measured: list[tuple[Mover, Direction, list[Measurement]]] = []
    real = calibrate._sample

    def sample(lane: DirectionQueues, bench: Any, mover: Mover, plan: CopyPlan, *more: Any) -> list[Measurement]:
        slow = len(plan.rows[0]) == len(plan.cuts[0]) > 1
        made = [one._replace(us=90_000.0 if slow else 10.0) for one in real(lane, bench, mover, plan, *more)]
        measured.append((mover, plan.direction, made))
        return made

    monkeypatch.setattr(calibrate, "_sample", sample)
    engine = attach(FakeDevice())
    engine.shutdown()
    for mover, direction, (landed, read) in measured:
        way = engine.costs[direction][mover].ones
        if landed.us > 10:
            assert way.landed.of(landed.copies, landed.size) == pytest.approx(90_000, rel=0.01)
            assert way.read.of(read.copies, read.size) == pytest.approx(90_000, rel=0.01)
    assert sum(landed.us > 10 for _, _, (landed, _) in measured) == 6


class Timed(FakeDevice):
    """A device with a simulated clock: a byte takes 1 us on the bus, and 0 us within the device."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def _queue_copy(self, stream: FakeStream, to: torch.Tensor, source: torch.Tensor, *, settled: bool = False) -> None:
        super()._queue_copy(stream, to, source, settled=settled)
        size = len(to)

        def pass_time() -> None:
            self.now_s += size / 1e6

        stream.put(pass_time)


def test_a_staged_save_is_measured_until_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A staged save has read its blocks when the kernel ends, any other save when the bytes have landed."""
    device = Timed()
    clock = SimpleNamespace(perf_counter=lambda: device.now_s, monotonic=lambda: 0.0)
    monkeypatch.setattr(calibrate, "time", clock)
    engine = attach(device)
    engine.shutdown()
    saves, loads = engine.costs[Direction.SAVE], engine.costs[Direction.LOAD]
    assert saves[Mover.STAGED].landed.byte_us == pytest.approx(1, rel=0.1)
    assert saves[Mover.STAGED].read.byte_us < 0.1
    assert saves[Mover.DMA].read == saves[Mover.DMA].landed
    assert all(way.read == way.landed for way in loads.values())


def test_a_plan_is_counted_as_it_is_copied() -> None:
    """`dma` counts runs, or pages if the cache has gaps. `staged` counts spans. `direct` counts one copy."""
    layout, plan = layout_and_plan(1024, 3, 4, adjacent=True)
    assert {mover: copies_of(layout, plan, mover) for mover in COSTS} == {
        Mover.DMA: (3, 12 * 1024),
        Mover.STAGED: (3, 12 * 1024),
        Mover.DIRECT: (1, 12 * 1024),
    }
    scattered = layout_and_plan(1024, 3, 4, adjacent=False)
    assert copies_of(*scattered, Mover.DMA) == (12, 12 * 1024)


def test_every_mover_is_measured_in_both_directions() -> None:
    """`dma`, `staged` and `direct` have measured costs in both directions."""
    engine = attach(FakeDevice())
    try:
        assert {direction: set(costs) for direction, costs in engine.costs.items()} == {
            direction: {Mover.DMA, Mover.STAGED, Mover.DIRECT} for direction in Direction
        }
    finally:
        engine.shutdown()


@pytest.mark.parametrize("architecture", [(9, 0), (10, 3), (12, 0)])
def test_auto_makes_no_direct_saves_from_hopper_on(architecture: tuple[int, int]) -> None:
    """From Hopper on, `auto` uses `direct` only for loads. The setting `direct` still makes direct saves."""
    device = FakeDevice()
    device.architecture = architecture
    engine, asked = attach(device), attach(device, Mover.DIRECT)
    engine.shutdown()
    asked.shutdown()
    assert set(engine.costs[Direction.SAVE]) == {Mover.DMA, Mover.STAGED}
    assert Mover.DIRECT in engine.costs[Direction.LOAD]
    assert set(asked.costs[Direction.SAVE]) == {Mover.DIRECT}


class Wrong(FakeDevice):
    """A device whose kernels copy wrong bytes."""

    def launch(self, stream: FakeStream, launch: Launch) -> None:
        """Copy all pages except the last page."""
        super().launch(stream, launch._replace(rows=launch.rows - 1))


class Refusing(FakeDevice):
    """A device that cannot compile kernels."""

    def launch(self, stream: FakeStream, launch: Launch) -> None:  # noqa: ARG002
        """Raise the error that Triton raises without a C compiler."""
        raise RuntimeError("Failed to find C compiler")


class NoBatches(FakeDevice):
    """A device whose driver does not support batches of copies."""

    def copy_batch(self, stream: FakeStream, copies: CopyBatch, *, settled: bool) -> None:  # noqa: ARG002
        """Raise the error of an old driver."""
        raise RuntimeError("CUDA error 801")


@pytest.mark.parametrize("make", [Wrong, Refusing])
def test_mover_that_fails_its_check_is_not_used(make: Callable[[], FakeDevice]) -> None:
    """A kernel that copies wrong bytes, or does not compile, is not used. Copies use DMA, and no error is raised."""
    engine = attach(make())
    try:
        assert {mover for costs in engine.costs.values() for mover in costs} == {Mover.DMA}
    finally:
        engine.shutdown()


def test_copies_use_torch_without_a_usable_mover() -> None:
    """If the driver refuses even plain batches, torch makes the copies. They are slow but correct."""
    device = NoBatches()
    device.no_kernels = "no Triton"
    engine = attach(device)
    try:
        plan = CopyPlan(Direction.SAVE, [make_job(1, job_rows(0, {0: [1], 1: [2]}), Kind.SAVE)], 2)
        engine.prepare(plan)
        assert plan.mover == Mover.PAGEABLE
    finally:
        engine.shutdown()


@pytest.mark.parametrize("mover", [Mover.DMA, Mover.STAGED, Mover.DIRECT])
def test_configured_mover_is_used(mover: Mover) -> None:
    """A mover that the configuration sets is used in both directions, at any cost."""
    engine = attach(FakeDevice(), mover)
    try:
        for direction in Direction:
            plan = CopyPlan(direction, [make_job(1, job_rows(0, {0: [1, 4], 1: [2]}), Kind(direction))], 2)
            engine.prepare(plan)
            assert plan.mover == mover
    finally:
        engine.shutdown()


@pytest.mark.parametrize(
    ("device", "options", "mover", "why"),
    [
        (Wrong(), {}, Mover.STAGED, "it failed its check"),
        (FakeDevice(), {"staging_bytes_max": 64}, Mover.STAGED, "no page fits a bay of staging_bytes_max"),
        (FakeDevice(), {"staging_bytes_max": 0}, Mover.STAGED, "no page fits a bay of staging_bytes_max"),
    ],
)
def test_a_pinned_mover_that_cannot_be_used_is_refused(
    device: FakeDevice, options: dict[str, int], mover: Mover, why: str
) -> None:
    """The engine does not start. The refusal names the key, the value, the reason and the remedy."""
    with pytest.raises(UnsupportedError, match=rf"mover='{mover.value}' cannot be used here \({why}\); set mover to"):
        attach(device, mover, **options)


def test_auto_reports_that_no_page_fits_a_bay() -> None:
    """The log reports that pages are larger than a bay. For example, a page may be a block of all layers."""
    with capture_logs() as logs:
        attach(FakeDevice(), staging_bytes_max=64).shutdown()
    (found,) = (entry for entry in logs if entry["event"] == "staged_not_used")
    assert "staging_bytes_max" in found["why"]


def test_a_pinned_mover_is_checked_where_nothing_is_pinned() -> None:
    """A mover that the device cannot run is refused at start-up, even if nothing is pinned and torch copies."""
    device = FakeDevice(pins_max=0)
    device.no_kernels = "no Triton"
    with pytest.raises(UnsupportedError, match="no Triton"):
        attach(device, Mover.STAGED)


@pytest.mark.parametrize("mover", [None, Mover.STAGED])
def test_no_unchecked_mover_is_used(mover: Mover | None) -> None:
    """If the first range of slots cannot be pinned, no range is pinned later.

    Torch makes all copies, and one warning is logged.
    """
    device = FakeDevice(pins_max=0)
    with capture_logs() as logs:
        engine = attach(device, mover)
        try:
            device.pins_max = 1 << 30
            assert engine.claim(engine._pool.base, GEOMETRY.slot_bytes), "its slots may be used"
            assert not device.pin_log
            plan = CopyPlan(Direction.SAVE, [make_job(1, job_rows(0, {0: [1, 4], 1: [2]}))], 2)
            engine.prepare(plan)
            assert plan.mover == Mover.PAGEABLE
        finally:
            engine.shutdown()
    assert [entry["event"] for entry in logs if entry["log_level"] == "warning"] == ["pool_not_pinned"]


def test_without_kernels_the_reason_is_reported() -> None:
    """Without Triton only DMA is used, and the refusal of another mover names the reason."""
    device = FakeDevice()
    device.no_kernels = "ModuleNotFoundError(\"No module named 'triton'\")"
    engine = attach(device)
    engine.shutdown()
    assert {mover for costs in engine.costs.values() for mover in costs} == {Mover.DMA}
    with pytest.raises(UnsupportedError, match="No module named 'triton'"):
        attach(device, Mover.DIRECT)


def test_engine_starts_without_memory_for_staging() -> None:
    """If the device has no memory for bays, one warning is logged and the other movers are used."""
    device = FakeDevice()
    device.memory_max = 1 << 20
    engine = attach(device)
    engine.shutdown()
    assert set(engine.costs[Direction.SAVE]) == {Mover.DMA, Mover.DIRECT}


def test_engine_starts_without_memory_for_scratch_pages() -> None:
    """If the device has no memory for scratch pages, no mover is measured, and all copies use DMA."""
    device = FakeDevice()
    device.memory_max = 0
    engine = attach(device)
    try:
        plan = CopyPlan(Direction.SAVE, [make_job(1, job_rows(0, {0: [1], 1: [2]}))], 2)
        engine.prepare(plan)
        assert plan.mover == Mover.DMA
    finally:
        engine.shutdown()


def test_every_kernel_is_compiled_before_the_first_step() -> None:
    """At start-up each variant of the kernel is launched once without rows: each page size, with and without a bay."""
    device = FakeDevice()
    launched: list[Launch] = []
    real = device.launch

    def launch(stream: FakeStream, what: Launch) -> None:
        launched.append(what)
        real(stream, what)

    device.launch = launch  # type: ignore[method-assign, assignment]
    group = Group((Layer("a", 64), Layer("b", 4096), Layer("c", 64)), block_tokens=16)
    geometry = Geometry((group,), 64, 8 * 40960)
    caches = [torch.zeros(BLOCKS, layer.page_bytes, dtype=torch.uint8) for layer in group.layers]
    engine = CudaEngine(device)
    engine.attach([view_pages(f"{i}", c, BLOCKS) for i, c in enumerate(caches)], geometry, HostPool(geometry))
    engine.shutdown()
    warm = [(one.page_bytes, one.bay is None, one.saving) for one in launched if not one.rows]
    assert sorted(warm) == sorted(itertools.product((64, 4096), (False, True), (False, True)))


def test_measurements_end_after_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the time limit measurements are not repeated any more. Every mover still gets its three samples."""
    runs: list[Mover] = []
    real = calibrate._run

    def run(lane: DirectionQueues, bench: Any, mover: Mover, plan: CopyPlan, layers: int = 1) -> Took:
        runs.append(mover)
        return real(lane, bench, mover, plan, layers)

    monkeypatch.setattr(calibrate, "_run", run)
    engine = attach(FakeDevice(), calibrate_s_max=1e-9)  # type: ignore[arg-type]
    engine.shutdown()
    assert len(runs) == 3 * (2 + 2 * 3), "per way: a check of two copies, and three samples each way"
