"""Which mover is chosen: from measured costs, by number of copies and bytes, and never one that brings wrong bytes."""

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
from kvpipe.geometry import Geometry, Group, Layer
from kvpipe.messages import Kind
from kvpipe.testing.fake_device import FakeDevice, FakeStream
from kvpipe.testing.logged import capture_logs
from kvpipe.testing.transfer_worlds import BLOCKS, GEOMETRY, LAYERS, PAGE_BYTES, make_job, rows_of
from kvpipe.transfer import calibrate
from kvpipe.transfer.base import CopyPlan, Direction
from kvpipe.transfer.calibrate import Cost, Measurement, Took, Way, choose, copies_of, fit
from kvpipe.transfer.cuda import CudaEngine
from kvpipe.transfer.device import CopyBatch, Launch
from kvpipe.transfer.movers import DirectionQueues, Layout, Mover
from kvpipe.transfer.pages import view_pages
from kvpipe.transfer.pool import HostPool


def attach(device: FakeDevice, mover: Mover | None = None, **options: int) -> CudaEngine:
    """Attach an engine, which measures."""
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
    """No part of a cost is negative; where the samples obey the model, the fit has what they have."""
    real = Cost(*parts)
    fitted = fit(Measurement(copies, size, real.of(copies, size)) for copies, size in points)
    assert min(fitted) >= 0
    for copies, size in points:
        assert fitted.of(copies, size) == pytest.approx(real.of(copies, size), rel=0.02, abs=0.05)


def test_noise_cannot_make_a_part_negative() -> None:
    """Many copies that took less than one, and more bytes that took less: both parts are nothing."""
    assert fit([Measurement(1, 64, 10.0), Measurement(64, 4096, 8.0), Measurement(4, 8192, 7.0)]) == pytest.approx(
        (25 / 3, 0, 0)
    )


COSTS = {
    Mover.DMA: Cost(10, 1.3, 1 / 55_000),
    Mover.STAGED: Cost(20, 0.3, 1 / 54_000),
    Mover.DIRECT: Cost(14, 0, 1 / 47_000),
}
"""Like those of a GPU with a fifth-generation bus; bytes per microsecond."""
LOADS = {mover: Way(cost, cost) for mover, cost in COSTS.items()}
SAVES = LOADS | {Mover.STAGED: Way(COSTS[Mover.STAGED], Cost(12, 0, 1 / 1_000_000))}


def layout_and_plan(page_bytes: int, requests: int, pages: int, *, adjacent: bool) -> tuple[Layout, CopyPlan]:
    """Return a plan of `requests` stretches of `pages` pages, none of which meets another."""
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
        (64 << 10, 1, 16, True, Mover.DMA),  # one copy is one copy
        (1 << 20, 4, 16, False, Mover.DMA),  # pages so large that nothing is to be gained
        (8 << 10, 32, 16, False, Mover.STAGED),  # small scattered pages of whole chunks: few large copies
        (8 << 10, 64, 1, False, Mover.DIRECT),  # a page here and there, of many requests
    ],
)
def test_the_choice_follows_from_the_costs(
    page_bytes: int, requests: int, pages: int, adjacent: bool, expected: Mover
) -> None:
    """Few large copies go by DMA, scattered pages of whole chunks through a bay, stray pages by the kernel."""
    layout, plan = layout_and_plan(page_bytes, requests, pages, adjacent=adjacent)
    assert choose(LOADS, layout, plan) is expected


@pytest.mark.parametrize(
    ("page_bytes", "requests", "pages", "expected"),
    [
        (64 << 10, 1, 16, Mover.DMA),  # 1 MiB: the bytes would land too late
        (64 << 10, 8, 16, Mover.STAGED),  # 8 MiB: they land as soon by DMA, but the blocks are free 12 times as soon
        (1 << 20, 4, 16, Mover.STAGED),
        (8 << 10, 64, 1, Mover.DIRECT),
    ],
)
def test_a_save_goes_the_way_that_frees_its_blocks(page_bytes: int, requests: int, pages: int, expected: Mover) -> None:
    """Of the ways whose bytes land in time, compute waits least for the one that has read them first."""
    layout, plan = layout_and_plan(page_bytes, requests, pages, adjacent=True)
    assert choose(LOADS, layout, plan) in {Mover.DMA, Mover.DIRECT}
    assert choose(SAVES, layout, plan) is expected


class Timed(FakeDevice):
    """A device with a clock: a byte takes 1 us of the bus, and no time on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def _queue_copy(self, stream: FakeStream, to: torch.Tensor, source: torch.Tensor) -> None:
        super()._queue_copy(stream, to, source)
        size = len(to)

        def pass_time() -> None:
            self.now_s += size / 1e6

        stream.put(pass_time)


def test_a_staged_save_is_measured_until_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks are free when the kernel is done; those of the others when the bytes have landed, like all loads'."""
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
    """DMA counts runs, or pages where the cache has gaps; a bay counts spans; the kernel is one."""
    layout, plan = layout_and_plan(1024, 3, 4, adjacent=True)
    assert {mover: copies_of(layout, plan, mover) for mover in COSTS} == {
        Mover.DMA: (3, 12 * 1024),
        Mover.STAGED: (3, 12 * 1024),
        Mover.DIRECT: (1, 12 * 1024),
    }
    scattered = layout_and_plan(1024, 3, 4, adjacent=False)
    assert copies_of(*scattered, Mover.DMA) == (12, 12 * 1024)


def test_every_way_is_measured_in_both_directions() -> None:
    """Costs of all three."""
    engine = attach(FakeDevice())
    try:
        assert {direction: set(costs) for direction, costs in engine.costs.items()} == {
            direction: {Mover.DMA, Mover.STAGED, Mover.DIRECT} for direction in Direction
        }
    finally:
        engine.shutdown()


class Wrong(FakeDevice):
    """A device whose kernels bring wrong bytes."""

    def launch(self, stream: FakeStream, launch: Launch) -> None:
        """Leave the last page out."""
        super().launch(stream, launch._replace(rows=launch.rows - 1))


class Refusing(FakeDevice):
    """A device that compiles no kernel."""

    def launch(self, stream: FakeStream, launch: Launch) -> None:  # noqa: ARG002
        """As without a C compiler."""
        raise RuntimeError("Failed to find C compiler")


class NoBatches(FakeDevice):
    """A device whose driver knows no batches."""

    def copy_batch(self, stream: FakeStream, copies: CopyBatch) -> None:  # noqa: ARG002
        """As an old one."""
        raise RuntimeError("CUDA error 801")


@pytest.mark.parametrize("make", [Wrong, Refusing])
def test_a_way_that_fails_its_check_is_not_taken(make: Callable[[], FakeDevice]) -> None:
    """A kernel that brings wrong bytes, or none, is out; copies go by DMA, and nothing is raised."""
    engine = attach(make())
    try:
        assert {mover for costs in engine.costs.values() for mover in costs} == {Mover.DMA}
    finally:
        engine.shutdown()


def test_without_any_way_copies_are_torchs() -> None:
    """When not even batches can be queued, what is left is slow, and right."""
    device = NoBatches()
    device.no_kernels = "no Triton"
    engine = attach(device)
    try:
        plan = CopyPlan(Direction.SAVE, [make_job(1, rows_of(0, {0: [1], 1: [2]}), Kind.SAVE)], 2)
        engine.prepare(plan)
        assert plan.mover == Mover.PAGEABLE
    finally:
        engine.shutdown()


@pytest.mark.parametrize("mover", [Mover.DMA, Mover.STAGED, Mover.DIRECT])
def test_a_pinned_mover_is_taken(mover: Mover) -> None:
    """Whoever asks for one gets it, whatever the costs."""
    engine = attach(FakeDevice(), mover)
    try:
        for direction in Direction:
            plan = CopyPlan(direction, [make_job(1, rows_of(0, {0: [1, 4], 1: [2]}), Kind(direction))], 2)
            engine.prepare(plan)
            assert plan.mover == mover
    finally:
        engine.shutdown()


@pytest.mark.parametrize(
    ("device", "options", "mover", "why"),
    [
        (Wrong(), {}, Mover.STAGED, "it failed its check"),
        (FakeDevice(), {"staging_bytes_max": 64}, Mover.STAGED, "no page fits a bay"),
        (FakeDevice(), {"staging_bytes_max": 0}, Mover.STAGED, "no page fits a bay"),
    ],
)
def test_a_pinned_mover_that_cannot_be_used_is_refused(
    device: FakeDevice, options: dict[str, int], mover: Mover, why: str
) -> None:
    """The refusal names the key, the value, the reason and the remedy, before the engine starts."""
    with pytest.raises(UnsupportedError, match=rf"mover='{mover.value}' cannot be used here \({why}\); set mover to"):
        attach(device, mover, **options)


def test_a_pinned_mover_is_checked_where_nothing_is_pinned() -> None:
    """Who asks for what cannot be used is shown it before the engine starts, though copies would be torch's."""
    device = FakeDevice(pins_max=0)
    device.no_kernels = "no Triton"
    with pytest.raises(UnsupportedError, match="no Triton"):
        attach(device, Mover.STAGED)


@pytest.mark.parametrize("mover", [None, Mover.STAGED])
def test_no_way_is_taken_that_was_not_checked(mover: Mover | None) -> None:
    """When the first piece cannot be pinned nothing ever is: copies stay torch's, and that is reported once."""
    device = FakeDevice(pins_max=0)
    with capture_logs() as logs:
        engine = attach(device, mover)
        try:
            device.pins_max = 1 << 30
            assert engine.claim(engine._pool.base, GEOMETRY.slot_bytes), "its slots may be used"
            assert not device.pin_log
            plan = CopyPlan(Direction.SAVE, [make_job(1, rows_of(0, {0: [1, 4], 1: [2]}))], 2)
            engine.prepare(plan)
            assert plan.mover == Mover.PAGEABLE
        finally:
            engine.shutdown()
    assert [entry["event"] for entry in logs if entry["log_level"] == "warning"] == ["pool_not_pinned"]


def test_without_kernels_the_reason_is_reported() -> None:
    """Where Triton is missing, DMA is all there is, and who asks for more is shown why."""
    device = FakeDevice()
    device.no_kernels = "ModuleNotFoundError(\"No module named 'triton'\")"
    engine = attach(device)
    engine.shutdown()
    assert {mover for costs in engine.costs.values() for mover in costs} == {Mover.DMA}
    with pytest.raises(UnsupportedError, match="No module named 'triton'"):
        attach(device, Mover.DIRECT)


def test_no_memory_for_staging_is_no_reason_to_stop() -> None:
    """A full device gets no bays: one warning, and the other ways."""
    device = FakeDevice()
    device.memory_max = 1 << 20
    engine = attach(device)
    engine.shutdown()
    assert set(engine.costs[Direction.SAVE]) == {Mover.DMA, Mover.DIRECT}


def test_no_memory_at_all_is_no_reason_to_stop() -> None:
    """Where not even scratch pages can be had, nothing is measured, and copies go by DMA."""
    device = FakeDevice()
    device.memory_max = 0
    engine = attach(device)
    try:
        plan = CopyPlan(Direction.SAVE, [make_job(1, rows_of(0, {0: [1], 1: [2]}))], 2)
        engine.prepare(plan)
        assert plan.mover == Mover.DMA
    finally:
        engine.shutdown()


def test_every_kernel_is_compiled_before_the_first_step() -> None:
    """Each size of page, staged and not, each way: launched once at start-up, with nothing to copy."""
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


def test_measuring_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past its time a measurement repeats nothing more; every way has its three samples all the same."""
    runs: list[Mover] = []
    real = calibrate._run

    def run(lane: DirectionQueues, bench: Any, mover: Mover, plan: CopyPlan, layers: int = 1) -> Took:
        runs.append(mover)
        return real(lane, bench, mover, plan, layers)

    monkeypatch.setattr(calibrate, "_run", run)
    engine = attach(FakeDevice(), calibrate_s_max=1e-9)  # type: ignore[arg-type]
    engine.shutdown()
    assert len(runs) == 3 * (2 + 2 * 3), "per way: a check of two copies, and three samples each way"
