"""A transfer engine over KV caches of a model's shape, and the clock of the device that holds these caches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from kvpipe.protocol.geometry import Geometry, Group, Layer
from kvpipe.protocol.messages import Job, Kind
from kvpipe.transfer.base import CopyPlan, Direction, Ticket
from kvpipe.transfer.cuda import CudaEngine
from kvpipe.transfer.movers import Mover
from kvpipe.transfer.pages import PageView, view_pages
from kvpipe.transfer.pool import HostPool
from kvpipe.transfer.ready import Readier
from kvpipe.transfer.waves import OrderingPoint

if TYPE_CHECKING:
    from kvpipe.testing.fake_device import FakeDevice

COMPLETE_S_MAX = 60.0
BLOCK_TOKENS, CHUNK_TOKENS = 16, 256
PAGES = CHUNK_TOKENS // BLOCK_TOKENS


class Shape(NamedTuple):
    """A model's KV cache on one rank. `page_bytes` is the size of a block of 16 tokens in one layer."""

    name: str
    layers: int
    page_bytes: int

    @property
    def chunk_bytes(self) -> int:
        """The number of bytes of 256 tokens in all layers."""
        return self.layers * self.page_bytes * PAGES


SIMULATED_LAYERS, SIMULATED_SHRINKS = 4, 128
LLAMA_8B = Shape("Llama-3-8B", 32, 64 << 10)
LLAMA_70B_TP4 = Shape("Llama-3-70B TP4", 80, 8 << 10)


class Gpu:
    """A CUDA device, or, if `simulated`, host memory with a fake device."""

    def __init__(self, *, simulated: bool, device: FakeDevice | None = None) -> None:
        """Choose the device. `device` is the fake device. Its default runs every call at once."""
        self.simulated, self.device = simulated, device
        self.where = torch.device("cpu") if simulated else torch.device("cuda", torch.cuda.current_device())
        self.dtype = torch.float32 if simulated else torch.bfloat16

    def sized(self, shape: Shape) -> Shape:
        """Return `shape`, or a smaller shape if the device is simulated."""
        if not self.simulated:
            return shape
        return shape._replace(layers=SIMULATED_LAYERS, page_bytes=shape.page_bytes // SIMULATED_SHRINKS)

    def mark(self) -> Any:
        """Return a CUDA event on the compute stream, or the time in seconds if the device is simulated."""
        if self.simulated:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()  # type: ignore[no-untyped-call]
        return event

    def ms(self, begin: Any, end: Any) -> float:
        """Return the milliseconds between two results of `mark`."""
        if self.simulated:
            return float((end - begin) * 1e3)
        end.synchronize()
        return float(begin.elapsed_time(end))

    def sync(self) -> None:
        """Wait until the device has done all queued work."""
        if self.device is not None:
            self.device.compute.synchronize()
        if not self.simulated:
            torch.cuda.synchronize()

    def sleep(self, ms: float) -> None:
        """Keep the current stream busy for about `ms` milliseconds."""
        if not self.simulated:
            torch.cuda._sleep(int(ms * 1.5e6))  # type: ignore[no-untyped-call]  # cycles, at about 1.5 GHz

    def pinned(self, size: int) -> torch.Tensor:
        """Return `size` bytes of pinned host memory."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=not self.simulated)

    def engine(self, mover: Mover | None, **options: Any) -> CudaEngine:
        """Make a transfer engine on this device."""
        if not self.simulated:
            return CudaEngine(mover=mover, **options)
        from benchmarks.gpu.simulated import Immediate

        return CudaEngine(self.device or Immediate(), mover=mover, **options)

    def compute(self, work: Callable[[], object]) -> None:
        """Queue `work` on the compute stream, in place of the model's compute."""
        if self.device is None:
            work()
        else:
            self.device.compute.put(lambda: (work(), None)[1])

    def median_ms(self, run: Callable[[], tuple[Any, Any]], repeats: int) -> float:
        """Return the median milliseconds between the two events that `run` returns, after one warm-up."""
        run()
        return median(self.ms(*run()) for _ in range(repeats))


class Rig:
    """A transfer engine with one mover, over KV caches of one shape."""

    def __init__(self, gpu: Gpu, shape: Shape, chunks: int, mover: Mover | None, **options: Any) -> None:
        """Make a pool and caches for `2 * chunks` chunks each, fill the caches at random, and attach the engine."""
        self.gpu, self.shape, self.chunks = gpu, shape, chunks
        self.blocks = 2 * chunks * PAGES
        group = Group(tuple(Layer(f"layer.{i}", shape.page_bytes) for i in range(shape.layers)), BLOCK_TOKENS)
        self.geometry = Geometry((group,), CHUNK_TOKENS, 2 * chunks * -(-shape.chunk_bytes // 4096) * 4096)
        self.caches = [self._cache() for _ in range(shape.layers)]
        self.pool = HostPool(self.geometry)
        views: list[PageView] = [view_pages(f"layer.{i}", c, self.blocks) for i, c in enumerate(self.caches)]
        began = time.perf_counter()
        self.engine = gpu.engine(mover, **options)
        self.engine.attach(views, self.geometry, self.pool)
        self._readier = Readier(self.pool, self.engine.claim, piece_bytes=self.engine.piece_bytes)
        self._readier.begin("use")
        self.attach_s = time.perf_counter() - began
        self.reported: list[Ticket] = []
        self._random = np.random.default_rng(0)

    def _cache(self) -> torch.Tensor:
        words = torch.randint(0, 1 << 62, (self.blocks, self.shape.page_bytes // 8), device=self.gpu.where)
        return words.view(torch.uint8)

    def wait_pinned(self) -> float:
        """Wait until the whole pool is pinned, and return the seconds that attaching and this wait have taken."""
        began = time.perf_counter()
        while self.engine.pinned_slots < self.pool.slots and time.perf_counter() - began < 60:
            time.sleep(0.005)
        return self.attach_s + time.perf_counter() - began

    def blocks_for(self, count: int) -> list[int]:
        """Return the numbers of `count` blocks in random order."""
        return [int(b) for b in self._random.permutation(self.blocks)[:count]]

    def jobs(
        self, stretches: Iterable[tuple[int, int]], kind: Kind, blocks: Iterable[int] | None = None
    ) -> tuple[Job, ...]:
        """Return one job per (slot, pages), to or from `blocks`. If `blocks` is None, choose random blocks."""
        wanted = list(stretches)
        given = iter(self.blocks_for(sum(pages for _, pages in wanted)) if blocks is None else blocks)
        jobs = []
        for number, (slot, pages) in enumerate(wanted):
            rows = np.array([(0, slot, page, next(given)) for page in range(pages)], "<i4")
            jobs.append(Job(number, int(kind), f"r{number}", 1, rows.tobytes()))
        return tuple(jobs)

    def begin(self, direction: Direction, jobs: tuple[Job, ...]) -> CopyPlan:
        """Compile a plan of `jobs` and prepare it, as the beginning of a step does."""
        plan = CopyPlan(direction, jobs, 1)
        self.engine.prepare(plan)
        return plan

    def chunk_plan(self, direction: Direction, chunks: int | None = None, first: int = 0) -> CopyPlan:
        """Return a plan that copies whole chunks to or from blocks in random order."""
        kind = Kind.SAVE if direction is Direction.SAVE else Kind.LOAD_ASYNC
        stretches = [(first + slot, PAGES) for slot in range(chunks or self.chunks)]
        return CopyPlan(direction, self.jobs(stretches, kind), 1)

    def submit(self, plan: CopyPlan, layer: int, ordinal: int | None = None) -> Ticket:
        """Submit one layer of `plan`, and return the layer's ticket."""
        ticket = Ticket(None, layer, layer if ordinal is None else ordinal, self.reported.append)
        self.engine.submit(plan, ticket)
        return ticket

    def land(self, ticket: Ticket) -> None:
        """Make the compute stream wait until a ticket's bytes have landed."""
        self.engine.fence(ticket, 0)  # queues the copies that were held back
        if not self.gpu.simulated and isinstance(ticket.mark, OrderingPoint) and ticket.mark.landed is not None:
            torch.cuda.current_stream().wait_event(ticket.mark.landed)  # type: ignore[arg-type]

    def wait_for(self, ticket: Ticket) -> None:
        """Wait on the host until a ticket is complete, as the scheduler side does before it reuses a slot."""
        self.engine.fence(ticket, 0)
        assert ticket.wait(COMPLETE_S_MAX), "a ticket never completed"

    def copy(self, *plans: CopyPlan) -> tuple[Any, Any]:
        """Copy every layer of all plans in parallel, and return an event before and an event after the copies."""
        self.gpu.sync()
        begin = self.gpu.mark()
        for plan in plans:
            self.engine.prepare(plan)
        last: dict[CopyPlan, Ticket] = {}
        for layer in range(self.shape.layers):
            for plan in plans:
                last[plan] = self.submit(plan, layer)
        for ticket in last.values():
            self.land(ticket)
        return begin, self.gpu.mark()

    def failed(self) -> int:
        """Return the number of failed tickets. All tickets must have been reported."""
        self.gpu.sync()
        return sum(bool(ticket.failed) for ticket in self.reported)

    def close(self) -> None:
        """Shut the engine down and free the caches."""
        self._readier.stop()
        self.engine.shutdown()
        self.caches.clear()
        if not self.gpu.simulated:
            torch.cuda.empty_cache()
