"""Worlds: a transfer engine with a paged cache, a pool, and simulated compute. The same tests run in every world."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from kvpipe.protocol.geometry import Geometry, Group, Layer
from kvpipe.protocol.messages import Job, Kind
from kvpipe.testing.fake_device import FakeDevice
from kvpipe.testing.waiting import eventually
from kvpipe.transfer.base import CopyPlan, Direction, Ticket, TransferEngine
from kvpipe.transfer.cpu import CpuEngine
from kvpipe.transfer.cuda import POLL_US_MIN, CudaEngine
from kvpipe.transfer.movers import BAYS, Mover
from kvpipe.transfer.pages import view_pages
from kvpipe.transfer.pool import HostPool

BLOCKS = 8
PAGE_BYTES = 64
GEOMETRY = Geometry(
    groups=(
        Group(tuple(Layer(f"full.{i}", PAGE_BYTES) for i in range(2)), block_tokens=16),
        Group((Layer("window.0", PAGE_BYTES),), block_tokens=16, window_tokens=64),
    ),
    chunk_tokens=64,
    pool_bytes_max=8 * 4096,
)
LAYERS = len(GEOMETRY.layers)
Row = tuple[int, int, int, int]

NO_GPU = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs an NVIDIA GPU: torch.cuda.is_available() is False on this machine"
)
FAKES = [f"fake_{mover.value}" for mover in Mover]
KINDS = ["cpu_inline", "cpu_threads", *FAKES, *(pytest.param(f"cuda_{m.value}", marks=NO_GPU) for m in Mover)]
BAY_PAGES = 2  # few pages, so that every plan uses a bay twice


def make_job(number: int, rows: Iterable[Row], kind: Kind = Kind.SAVE) -> Job:
    """Return a job over `rows` of (group, slot, page, block)."""
    return Job(number, int(kind), f"request-{number}", 1, np.asarray(list(rows), dtype="<i4").tobytes())


class World:
    """One world. `write_block` and `read_block` queue compute, which runs when the device runs its queue."""

    def __init__(
        self,
        kind: str,
        *,
        engine: Callable[[], TransferEngine] | None = None,
        where: str = "",
        dense: bool = True,
        device: FakeDevice | None = None,
        schedule: Iterable[int] = (),
        wave_bytes: int = 0,
        poll_us_min: int = POLL_US_MIN,
    ) -> None:
        """`engine` makes the engine, whose caches are on torch's device `where`.

        Without `engine`, `kind` names an engine of kvpipe. `schedule` has the streams that a simulated device runs, in
        order. A 0 in `schedule` returns control to the caller. `wave_bytes` is the size of a wave. If it is 0, every
        layer is queued when the layer is submitted.
        """
        self.kind, self.wave_bytes, self.poll_us_min = kind, wave_bytes, poll_us_min
        self.device = device or FakeDevice()
        self._schedule = iter(schedule)
        self.where = where or ("cuda" if kind.startswith("cuda") else "cpu")
        self._gap = 1 if dense else 2
        self.pool = HostPool(GEOMETRY)
        self.engine = (engine or self._engine)()
        self.attach()
        self.completed: list[Ticket] = []
        self.tickets: list[Ticket] = []

    def attach(self) -> None:
        """Attach the engine to new caches of zeros, at other addresses than before."""
        shape = BLOCKS, self._gap, PAGE_BYTES
        self.caches = [torch.zeros(shape, dtype=torch.uint8, device=self.where)[:, 0] for _ in range(LAYERS)]
        self.views = [view_pages(f"layer.{i}", cache, BLOCKS) for i, cache in enumerate(self.caches)]
        self.engine.attach(self.views, GEOMETRY, self.pool)

    def _engine(self) -> TransferEngine:
        if self.kind.startswith("cpu"):
            return CpuEngine(int(self.kind == "cpu_threads"))
        mover = Mover(self.kind.partition("_")[2])
        staging = len(Direction) * BAYS * BAY_PAGES * PAGE_BYTES
        return CudaEngine(
            self.device if self.fake else None,
            mover=mover,
            staging_bytes_max=staging if mover is Mover.STAGED else 0,
            wave_bytes=self.wave_bytes,
            calibrate_s_max=0,
            poll_us_min=self.poll_us_min,
        )

    @property
    def device_ordered(self) -> bool:
        """Whether `guard_read` and `fence` return before the copy is done."""
        return self.fake or self.where != "cpu"

    @property
    def fake(self) -> bool:
        """Whether the device is simulated."""
        return self.kind.startswith("fake")

    def submit(self, direction: Direction, layer: int, jobs: Iterable[Job], ordinal: int = 0) -> Ticket:
        """Submit one layer."""
        return self._submit(direction, Ticket(None, layer, ordinal, self.completed.append), jobs)

    def submit_all(self, direction: Direction, jobs: Iterable[Job]) -> Ticket:
        """Submit all layers with one ticket, as a step without hooks does."""
        return self._submit(direction, Ticket(None, 0, 0, self.completed.append, tuple(range(LAYERS))), jobs)

    def _submit(self, direction: Direction, ticket: Ticket, jobs: Iterable[Job]) -> Ticket:
        self.tickets.append(ticket)
        self.engine.submit(CopyPlan(direction, tuple(jobs), len(GEOMETRY.groups)), ticket)
        self.await_queueing()
        return ticket

    def await_queueing(self) -> None:
        """Queue the saves now that the completion thread would queue later, so that a schedule is repeatable."""
        if isinstance(self.engine, CudaEngine):
            self.engine._launch_computed()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the simulated device and the completion thread's queueing. The caller's thread can still queue work.

        The locks are taken in the engine's order. With the device's lock alone, the completion thread may take the lock
        for queueing and wait for the device, while the caller waits for the lock for queueing.
        """
        assert isinstance(self.engine, CudaEngine)
        with self.engine._queueing, self.device.lock:
            yield

    def write_block(self, layer: int, block: int, value: int) -> None:
        """Queue compute that fills a block with `value`."""
        self._compute(lambda: self.caches[layer][block].fill_(value))

    def read_block(self, layer: int, block: int) -> Callable[[], bytes]:
        """Queue compute that reads a block. After `drain`, a call of the result returns the bytes that were read."""
        got = torch.zeros(PAGE_BYTES, dtype=torch.uint8, device=self.caches[layer].device)
        self._compute(lambda: got.copy_(self.caches[layer][block]))
        return lambda: got.cpu().numpy().tobytes()

    def _compute(self, work: Callable[[], object]) -> None:
        if self.fake:
            self.device.compute.put(lambda: (work(), None)[1])
        else:
            work()

    def let_run(self) -> None:
        """Run a simulated device up to the next 0 of its schedule."""
        if self.fake:
            for choice in self._schedule:
                if choice == 0 or not self.device.step(choice - 1):
                    return

    def drain(self) -> None:
        """Run all submitted work, and wait until every ticket is complete."""
        self.drain_all()
        self.wait_for(*self.tickets)

    def wait_for(self, *tickets: Ticket) -> None:
        """Wait on the host until the tickets are complete."""
        assert eventually(lambda: self.are_complete(tickets)), "a ticket never completed"

    def are_complete(self, tickets: Iterable[Ticket]) -> bool:
        """Run all ready work of a simulated device. Return whether the tickets are complete."""
        while self.fake and self.device.step(0):
            pass
        return all(ticket.done for ticket in tickets)

    def drain_all(self) -> None:
        """Run all submitted work."""
        if self.fake:
            for choice in self._schedule:
                self.device.step(choice)
            self.device.drain()
        elif self.device_ordered:
            torch.get_device_module(self.where).synchronize()

    def slot_page(self, layer: int, slot: int, page: int) -> torch.Tensor:
        """Return the bytes of page `page` of `layer` in slot `slot`."""
        group, index = GEOMETRY.layers[layer]
        start = GEOMETRY.layer_offsets[group][index] + page * PAGE_BYTES
        return self.pool.tensor[slot, start : start + PAGE_BYTES]


@contextmanager
def world(kind: str, **options: object) -> Iterator[World]:
    """Yield a world, and shut the world's engine down at the end."""
    made = World(kind, **options)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.engine.shutdown()


def job_rows(turn: int, blocks: dict[int, list[int]]) -> list[Row]:
    """Return rows for `blocks` per group: one slot per turn and group, pages in order."""
    return [(g, 2 * turn + g, page, block) for g, mine in blocks.items() for page, block in enumerate(mine)]


def value_of(turn: int, layer: int, block: int) -> int:
    """Return a byte that differs for each turn, layer and block."""
    return 1 + (turn * LAYERS + layer) * BLOCKS + block
