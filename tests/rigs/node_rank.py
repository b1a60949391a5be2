"""An engine on a node's memory: a real scheduler side, and a real rank whose caches a test reads and writes."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvpipe.config.settings import load_settings
from kvpipe.node.attach import node_note_bytes, node_slot_bytes, rank_slots
from kvpipe.node.segment import Segment
from kvpipe.protocol.geometry import Geometry
from kvpipe.protocol.messages import Job, Report, StepPlan
from kvpipe.testing.direct_node import DirectNode, DirectPool
from kvpipe.testing.fake_device import FakeDevice
from kvpipe.transfer.base import TransferEngine
from kvpipe.transfer.cpu import CpuEngine
from kvpipe.transfer.cuda import CudaEngine
from kvpipe.transfer.movers import Mover
from kvpipe.worker.caches import Hooks, PagedCaches
from kvpipe.worker.context import RankContext
from kvpipe.worker.side import WorkerSide
from tests.rigs.pipeline_rig import make_caches
from tests.rigs.scheduler_world import SchedulerWorld, geometry_of_windows

UNITS, SLOTS, BLOCKS = 4, 16, 64
_NUMBERS = itertools.count(1)
_WRITE = "import sys; from kvpipe.node.segment import Segment; fd, at, raw = sys.argv[1:]; raw = bytes.fromhex(raw); "
_WRITE += "Segment(int(fd)).slots[int(at) : int(at) + len(raw)] = raw"


def geometry() -> Geometry:
    """Return the geometry of the engines."""
    return geometry_of_windows((None,), UNITS, SLOTS)


def make_node() -> DirectNode:
    """Make a memory for engines of one rank."""
    return DirectNode(SLOTS, node_slot_bytes(geometry(), 1), node_note_bytes(geometry(), 1))


def hostile_write(node: DirectNode, at: int, raw: bytes) -> None:
    """Write bytes into the slots, from byte `at` of all slots on, as another process that has the memory can."""
    subprocess.run([sys.executable, "-c", _WRITE, str(node.fd), str(at), raw.hex()], pass_fds=(node.fd,), check=True)


class NodeRank:
    """An engine with one rank. `cache` is the only layer's paged cache."""

    def __init__(
        self, node: DirectNode, *, engine: TransferEngine | None = None, digests: bool = False, **keys: Any
    ) -> None:
        """Attach an engine with the settings `keys` to `node`. Without `engine`, the CPU copies."""
        self.world = SchedulerWorld(
            chunk_units=UNITS, slots=SLOTS, node=DirectPool(node, stock=4), also_of="layout {}".format
        )
        self.world.side.ranks_ready({}, ["weights"])
        self.world.side.node.poll()  # type: ignore[union-attr]
        tensors = make_caches(geometry(), BLOCKS)
        (self.cache,) = tensors.values()
        self.device = engine._given if isinstance(engine, CudaEngine) else None
        self.segment = Segment(os.dup(node.fd))
        self.side = WorkerSide(
            RankContext(load_settings(keys)),
            PagedCaches(geometry(), tensors, BLOCKS, Hooks(frozenset(tensors))),
            engine=engine or CpuEngine(0),
            shared=rank_slots(self.segment, geometry(), 1, 0, digests=digests),
        )
        self.bad = set[int]()
        """The blocks that the rank has reported as bad."""

    def step(self, *requests: Any) -> list[Job]:
        """Run a step. Each saved block gets the content that its request's hash implies."""
        jobs = self.world.step(*requests)
        self.begin(jobs)
        for job in jobs:
            if not job.kind:
                for block in job.blocks():
                    self.cache[block] = float(block)
        self.end()
        return jobs

    def begin(self, jobs: list[Job]) -> None:
        """Begin a step with `jobs`."""
        self.side.bind(StepPlan(next(_NUMBERS), tuple(jobs), pool=self.segment.layout.token))
        self.side.start_loads()

    def end(self) -> Report | None:
        """End the step, and pass the rank's report to the scheduler's side."""
        with self._running():
            self.side.end_step()
        self.side.collect()
        self.bad |= self.side.take_bad_blocks()
        self.side.unbind()
        report = self.side.take_report()
        if report is not None:
            self.world.side.reported(report)
        return report

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Run the simulated device, if there is one, while the engine's thread may wait for copies."""
        device, over = self.device, threading.Event()
        if not isinstance(device, FakeDevice):
            yield
            return

        def run() -> None:
            while not over.wait(0.000_1):
                device.step(0)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            device.drain()

    def rest(self) -> None:
        """Take steps until no job is in flight."""
        for _ in range(1000):
            self.step()
            if not self.world.side.jobs.in_flight:
                return
        raise AssertionError(f"jobs are in flight: {self.world.side.jobs.in_flight}")

    def save(self, name: str, units: int = UNITS) -> Any:
        """Compute and save a new request."""
        request = self.world.request(name, units)
        self.world.admit(request)
        self.step(request)
        self.rest()
        self.world.side.finished(request)
        self.rest()
        return request

    def load(self, name: str, units: int = UNITS) -> int:
        """Load a request's hit, and compute no other token. Returns the number of tokens of the hit."""
        self.step()
        request = self.world.request(name, units)
        tokens = self.world.admit(request)
        self.step()
        self.rest()
        self.world.side.finished(request)
        return tokens

    @property
    def counts(self) -> dict[str, int]:
        """The counters of the rank and of the scheduler's side."""
        return self.side.counters.totals() | self.world.side.counters.totals()

    def close(self) -> None:
        """End the rank's threads."""
        self.side.shutdown()


def cuda() -> CudaEngine:
    """Return a CUDA engine on a simulated device."""
    return CudaEngine(FakeDevice(), mover=Mover.DMA, calibrate_s_max=0)
