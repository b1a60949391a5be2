"""A world: an engine, its paged cache and pool, and what stands for the model's compute. The same tests run in each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from kvpipe.geometry import Geometry, Group, Layer
from kvpipe.messages import Job, Kind
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
BAY_PAGES = 2  # so few that every plan needs a bay twice


def make_job(number: int, rows: Iterable[Row], kind: Kind = Kind.SAVE) -> Job:
    """Return a job over `rows` of (group, slot, page, block)."""
    return Job(number, int(kind), f"request-{number}", 1, np.asarray(list(rows), dtype="<i4").tobytes())


class World:
    """Compute is queued with `write_block` and `read_block`, and happens when the device gets there."""

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
        """`engine` makes one, whose caches are on torch's device `where`; without it `kind` is one of kvpipe's own.

        `schedule`: which stream a simulated device runs next; 0 hands the turn back to the caller.

        `wave_bytes`: 0 queues every layer as it is submitted.
        """
        self.kind, self.wave_bytes, self.poll_us_min = kind, wave_bytes, poll_us_min
        self.device = device or FakeDevice()
        self._schedule = iter(schedule)
        self.where = where or ("cuda" if kind.startswith("cuda") else "cpu")
        gap = 1 if dense else 2
        self.caches = [
            torch.zeros(BLOCKS, gap, PAGE_BYTES, dtype=torch.uint8, device=self.where)[:, 0] for _ in range(LAYERS)
        ]
        self.views = [view_pages(f"layer.{i}", cache, BLOCKS) for i, cache in enumerate(self.caches)]
        self.pool = HostPool(GEOMETRY)
        self.engine = (engine or self._engine)()
        self.engine.attach(self.views, GEOMETRY, self.pool)
        self.completed: list[Ticket] = []
        self.tickets: list[Ticket] = []

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
        ticket = Ticket(None, layer, ordinal, self.completed.append)
        self.tickets.append(ticket)
        self.engine.submit(CopyPlan(direction, tuple(jobs), len(GEOMETRY.groups)), ticket)
        return ticket

    def write_block(self, layer: int, block: int, value: int) -> None:
        """Compute fills a block."""
        self._compute(lambda: self.caches[layer][block].fill_(value))

    def read_block(self, layer: int, block: int) -> Callable[[], bytes]:
        """Compute reads a block; call the result after `drain` for what it has read."""
        got = torch.zeros(PAGE_BYTES, dtype=torch.uint8, device=self.caches[layer].device)
        self._compute(lambda: got.copy_(self.caches[layer][block]))
        return lambda: got.cpu().numpy().tobytes()

    def _compute(self, work: Callable[[], object]) -> None:
        if self.fake:
            self.device.compute.put(lambda: (work(), None)[1])
        else:
            work()

    def let_run(self) -> None:
        """Give a simulated device its turn."""
        if self.fake:
            for choice in self._schedule:
                if choice == 0 or not self.device.step(choice - 1):
                    return

    def drain(self) -> None:
        """Let everything that was submitted happen, and every ticket complete."""
        self.drain_all()
        self.wait_for(*self.tickets)

    def wait_for(self, *tickets: Ticket) -> None:
        """Wait on the host until the tickets are complete."""
        assert eventually(lambda: self.are_complete(tickets)), "a ticket never completed"

    def are_complete(self, tickets: Iterable[Ticket]) -> bool:
        """Give a simulated device its turn; return whether the tickets are complete."""
        while self.fake and self.device.step(0):
            pass
        return all(ticket.done for ticket in tickets)

    def drain_all(self) -> None:
        """Let everything that was submitted happen."""
        if self.fake:
            for choice in self._schedule:
                self.device.step(choice)
            self.device.drain()
        elif self.device_ordered:
            torch.get_device_module(self.where).synchronize()

    def slot_page(self, layer: int, slot: int, page: int) -> torch.Tensor:
        """Where page `page` of `layer` lies in slot `slot`."""
        group, index = GEOMETRY.layers[layer]
        start = GEOMETRY.layer_offsets[group][index] + page * PAGE_BYTES
        return self.pool.tensor[slot, start : start + PAGE_BYTES]


@contextmanager
def world(kind: str, **options: object) -> Iterator[World]:
    """Make a world and shut it down."""
    made = World(kind, **options)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.engine.shutdown()


def rows_of(turn: int, blocks: dict[int, list[int]]) -> list[Row]:
    """Return rows for `blocks` per group: one slot per turn and group, pages in order."""
    return [(g, 2 * turn + g, page, block) for g, mine in blocks.items() for page, block in enumerate(mine)]


def value_of(turn: int, layer: int, block: int) -> int:
    """A byte that is like no other."""
    return 1 + (turn * LAYERS + layer) * BLOCKS + block
