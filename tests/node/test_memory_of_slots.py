"""A rank touches and registers slots of a node's memory in the background, but only slots that have memory."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvpipe.config.settings import load_settings
from kvpipe.machine.huge_pages import SharedHugePages
from kvpipe.node import pages
from kvpipe.node.attach import shared_slots
from kvpipe.node.layout import READY
from kvpipe.node.segment import Segment, allocate, create
from kvpipe.protocol.geometry import Geometry
from kvpipe.protocol.messages import Kind, StepPlan, Tally
from kvpipe.testing.fake_device import FakeDevice
from kvpipe.testing.transfer_worlds import BLOCKS, GEOMETRY, PAGE_BYTES, make_job
from kvpipe.testing.waiting import eventually
from kvpipe.transfer import ready
from kvpipe.transfer.base import CopyPlan, Direction, TransferEngine
from kvpipe.transfer.cpu import CpuEngine
from kvpipe.transfer.cuda import CudaEngine
from kvpipe.transfer.movers import Mover
from kvpipe.transfer.pages import view_pages
from kvpipe.transfer.pool import HostPool
from kvpipe.transfer.ready import Readier
from kvpipe.worker.caches import Hooks, PagedCaches
from kvpipe.worker.context import RankContext
from kvpipe.worker.side import WorkerSide
from tests.rigs.pipeline_rig import job, make_caches, small_geometry

SLOTS, PARTS, PART = 8, 2, 1
SIZE = GEOMETRY.slot_bytes
LAYERS = len(GEOMETRY.layers)


class TouchingDevice(FakeDevice):
    """A device that reads every page of a range that it registers, as CUDA's driver does."""

    def register(self, address: int, size: int) -> None:
        """Register a range."""
        for at in range(address, address + size, mmap.PAGESIZE):
            ctypes.string_at(at, 1)
        super().register(address, size)


class NodeRank:
    """A rank whose part of each of the `SLOTS` slots is part `PART`."""

    def __init__(self, with_memory: int, geometry: Geometry = GEOMETRY) -> None:
        """Make a memory whose holder has given memory to the first `with_memory` slots."""
        self.fd = create(SLOTS, PARTS * SIZE, rows=1, ring=64)
        self.segment = Segment(self.fd)
        self.give_memory(0, with_memory)
        self.shared = shared_slots(self.segment, PART * SIZE, saves=True)
        self.pool = HostPool(geometry, self.shared)
        self.device = TouchingDevice()

    def give_memory(self, first: int, stop: int) -> None:
        """Give memory to slots [first, stop), as the holder does."""
        if first < stop:
            allocate(self.fd, self.segment.layout, first, stop)
        self.segment.words[READY] = stop
        self.bytes_used = self.memory_bytes()

    def memory_bytes(self) -> int:
        """Return the size of the memory that the system has given to the node's memory."""
        return os.fstat(self.fd).st_blocks * 512

    def engine(self, mover: Mover | None = None, calibrate_s_max: float = 0) -> CudaEngine:
        """Return a CUDA engine over the pool. The engine's `piece_bytes` is the size of two parts."""
        engine = CudaEngine(self.device, mover=mover, staging_bytes_max=0, calibrate_s_max=calibrate_s_max)
        engine.piece_bytes = 2 * SIZE
        caches = [torch.zeros((BLOCKS, PAGE_BYTES), dtype=torch.uint8) for _ in range(LAYERS)]
        engine.attach([view_pages(f"layer.{i}", cache, BLOCKS) for i, cache in enumerate(caches)], GEOMETRY, self.pool)
        return engine

    def readier(self, engine: TransferEngine) -> Readier:
        """Return the readier of the pool."""
        return Readier(self.pool, engine.claim, piece_bytes=engine.piece_bytes)

    def mapped(self) -> list[int]:
        """Return the slots for which the rank's page tables have the rank's whole part."""
        with Path("/proc/self/pagemap").open("rb") as pagemap:
            entries = np.array([self._entries(pagemap, slot) for slot in range(SLOTS)])
        return [slot for slot, there in enumerate(entries.tolist()) if all(entry >> 63 for entry in there)]

    def _entries(self, pagemap: BinaryIO, slot: int) -> npt.NDArray[np.uint64]:
        pagemap.seek((self.pool.base + slot * self.pool.slot_bytes) // mmap.PAGESIZE * 8)
        return np.frombuffer(pagemap.read(SIZE // mmap.PAGESIZE * 8), "<u8")

    def registered(self) -> list[int]:
        """Return the registered slots. Each registration must cover exactly this rank's part of one slot."""
        pinned = dict(self.device.pinned)  # another thread may pin meanwhile
        offsets = [divmod(address - self.pool.base, self.pool.slot_bytes) for address in pinned]
        assert all(at == 0 for _, at in offsets)
        assert set(pinned.values()) <= {SIZE}
        return [slot for slot, _ in offsets]

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Check that no page was charged to this rank."""
        assert self.memory_bytes() == self.bytes_used, "the rank has taken memory that the holder has not given"
        os.close(self.fd)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "WITHOUT_MEMORY_S", 0.001)
    # a huge page would give memory to more slots than the test says
    monkeypatch.setattr(pages, "shared_huge_pages", lambda: SharedHugePages("never", 1 << 21, Path()))


@pytest.mark.parametrize("first", [0, 1, 3])
def test_rank_registers_its_part_of_slots_that_have_memory(first: int) -> None:
    """Slots are registered when they get memory, and unregistered at the end.

    A load or save of a slot that is not registered goes through the driver's own buffer.
    """
    with NodeRank(first) as rank:
        engine = rank.engine(Mover.DMA)
        readier = rank.readier(engine)
        readier.begin("start")
        assert rank.registered() == [*range(first)]
        assert rank.pool.ready == SLOTS, "the holder may grant any slot with memory"
        plans = [CopyPlan(Direction.SAVE, [make_job(1, [(0, slot, 0, 0)])], 2) for slot in range(SLOTS)]
        for plan in plans:
            engine.prepare(plan)
        assert [plan.mover for plan in plans] == ["dma"] * first + ["pageable"] * (SLOTS - first)
        for stop in (5, SLOTS):
            rank.give_memory(first, stop)
            assert eventually(lambda stop=stop: rank.registered() == [*range(stop)])  # type: ignore[misc]
        readier.stop()
        engine.shutdown()
        assert not rank.device.pinned
        assert readier._at == SLOTS


def test_rank_maps_its_part_of_slots_that_have_memory() -> None:
    """The first copy of a mapped slot causes no page fault. Chunks of other engines do not change."""
    with NodeRank(3) as rank:
        for slot in range(3):
            os.pwrite(rank.fd, b"\xee" * PARTS * SIZE, rank.segment.layout.slots_at + slot * PARTS * SIZE)
        readier = rank.readier(CpuEngine(0))
        assert rank.mapped() == []
        readier.begin("start")
        assert rank.mapped() == [0, 1, 2]
        rank.give_memory(3, SLOTS)
        assert eventually(lambda: rank.mapped() == [*range(SLOTS)])
        readier.stop()
        assert bytes(rank.segment.slots or b"") == b"\xee" * 3 * PARTS * SIZE + bytes(5 * PARTS * SIZE)


def test_rank_maps_no_slot_if_pages_are_mapped_on_use() -> None:
    """With `prefault: use` the first copy of a slot maps the slot."""
    with NodeRank(SLOTS) as rank:
        readier = rank.readier(CpuEngine(0))
        readier.begin("use")
        readier.stop()
        assert rank.mapped() == []
        assert readier._at == SLOTS


def test_no_slot_is_registered_after_the_end_of_the_engine() -> None:
    """A slot that gets memory later is not registered, because the rank will unmap the memory."""
    with NodeRank(2) as rank:
        engine = rank.engine(Mover.DMA)
        engine.shutdown()
        rank.give_memory(2, SLOTS)
        readier = rank.readier(engine)
        readier.begin("start")
        readier.stop()
        assert not rank.device.pinned
        assert len(rank.device.pin_log) == 2


def test_movers_are_measured_outside_of_the_node_s_memory() -> None:
    """The measurement has memory of its own, which is unpinned afterwards.

    No chunk of another engine is overwritten.
    """
    with NodeRank(SLOTS) as rank:
        assert rank.segment.slots is not None
        rank.segment.slots[:] = b"\xee" * len(rank.segment.slots)
        rank.give_memory(0, SLOTS)
        engine = rank.engine(calibrate_s_max=0.01)
        assert {Mover.DMA, Mover.DIRECT} <= set(engine.costs[Direction.SAVE])
        assert rank.segment.slots == b"\xee" * len(rank.segment.slots)
        assert len(rank.registered()) == 2
        engine.shutdown()


def _step(side: WorkerSide, step: StepPlan) -> Tally | None:
    """Run one step. Return how its only job has ended, or None while the job is in flight."""
    side.bind(step)
    side.start_loads()
    side.end_step()
    side.collect()
    side.unbind()
    report = side.take_report()
    return next(iter(report.tallies.values()), None) if report is not None else None


def test_cuda_rank_copies_to_and_from_slots_that_are_not_registered() -> None:
    """A rank may use slots that it could not register. At its end, it unregisters all slots."""
    geometry = small_geometry()
    with NodeRank(SLOTS, geometry) as rank:
        rank.device.pins_max = 1
        engine = CudaEngine(rank.device, mover=Mover.DMA, calibrate_s_max=0)
        tensors = make_caches(geometry, BLOCKS)
        for number, cache in enumerate(tensors.values()):
            cache[0] = 1 + number
        caches = PagedCaches(geometry, tensors, BLOCKS, Hooks(frozenset("abc")))
        side = WorkerSide(RankContext(load_settings({})), caches, engine=engine, shared=rank.shared)
        try:
            assert len(rank.device.pinned) == 1
            for one in (job(1), job(2, Kind.LOAD_ASYNC, [(0, 0, 0, 7), (1, 1, 0, 7)])):
                ended = _step(side, StepPlan(1, (one,), pool=rank.pool.token))
                while ended is None:
                    rank.device.step(0)
                    ended = _step(side, StepPlan(2, (), pool=rank.pool.token))
                assert ended == Tally(1, 0)
            assert all(torch.equal(cache[7], cache[0]) for cache in tensors.values())
            assert rank.segment.slots is not None
            assert not any(rank.segment.slots[: PART * SIZE]), "the part of another rank"
            assert any(rank.segment.slots[PART * SIZE : PARTS * SIZE])
        finally:
            side.shutdown()
        assert not rank.device.pinned
