"""Parts that unit tests and property tests share: jobs, small geometries, and a copy engine that a test controls."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch

from kvpipe.config.settings import load_settings
from kvpipe.protocol.geometry import Geometry, Group, Layer
from kvpipe.protocol.messages import Job, Kind, StepPlan
from kvpipe.testing.waiting import WAIT_S
from kvpipe.trace.log import Counters
from kvpipe.transfer.base import NO_JOBS, CopyPlan, Direction, Ticket
from kvpipe.transfer.pages import PageView
from kvpipe.transfer.pool import HostPool
from kvpipe.worker.batch import Batch
from kvpipe.worker.caches import Hooks, PagedCaches
from kvpipe.worker.context import RankContext
from kvpipe.worker.pipeline import Pipeline
from kvpipe.worker.side import WorkerSide

Row = tuple[int, int, int, int]


def rows(table: Iterable[Row]) -> bytes:
    """Pack (group, slot, page, block) rows as a job carries them."""
    return np.asarray(list(table), dtype="<i4").tobytes()


def job(number: int, kind: int = Kind.SAVE, table: Iterable[Row] = ((0, 0, 0, 0), (1, 1, 0, 0))) -> Job:
    """Make a job of request ``r<number>``."""
    return Job(number, int(kind), f"r{number}", 1, rows(table))


def plan(*jobs: Job) -> StepPlan:
    """Make a step of `jobs`."""
    return StepPlan(1, jobs)


def small_geometry() -> Geometry:
    """Return a geometry of two groups and three layers, for four slots."""
    first = Group((Layer("a", 64), Layer("b", 64)), block_tokens=4)
    second = Group((Layer("c", 128),), block_tokens=8)
    return Geometry((first, second), chunk_tokens=16, pool_bytes_max=4 * 4096)


def make_caches(geometry: Geometry, blocks: int) -> dict[str, torch.Tensor]:
    """Make an empty paged cache per layer, with one head of floats."""
    return {
        layer.name: torch.zeros(blocks, 1, group.block_tokens, layer.page_bytes // group.block_tokens // 4)
        for group in geometry.groups
        for layer in group.layers
    }


class Waiting(Enum):
    """The ways in which the fake engine answers a wait."""

    OBEDIENT = "completes what is waited for, then returns True"
    STUCK = "a timeout: returns False at once and completes nothing"
    DEVICE = "the device waits: returns True at once and completes nothing, but loads that have failed come to an end"


class Copy(NamedTuple):
    """One submitted copy."""

    plan: CopyPlan
    ticket: Ticket
    failed: frozenset[int]


class FakeEngine:
    """A transfer engine that copies nothing.

    The engine completes the tickets of each direction in order, on the test's command or when it is waited for.
    """

    piece_bytes = 1 << 20

    def __init__(self) -> None:
        """Start without submissions."""
        self.waiting = Waiting.OBEDIENT
        self.failing: Callable[[CopyPlan, Ticket], frozenset[int]] = lambda _plan, _ticket: NO_JOBS
        self.finishes_at_shutdown = True
        self.copies: list[Copy] = []
        self.queues: dict[Direction, deque[Copy]] = {d: deque() for d in Direction}
        self.shutdowns = 0

    def attach(self, views: Sequence[PageView], geometry: Geometry, pool: HostPool) -> None:
        """See `TransferEngine.attach`."""

    def claim(self, address: int, size: int) -> bool:  # noqa: ARG002
        """See `TransferEngine.claim`."""
        return True

    def prepare(self, plan: CopyPlan) -> None:
        """See `TransferEngine.prepare`."""

    def reached(self, ticket: Ticket) -> None:
        """See `TransferEngine.reached`."""

    def submit(self, plan: CopyPlan, ticket: Ticket) -> None:
        """See `TransferEngine.submit`.

        A failure is set at the submission, as the protocol requires of engines for devices.
        """
        ticket.failed = self.failing(plan, ticket)
        copy = Copy(plan, ticket, ticket.failed)
        self.copies.append(copy)
        if self.shutdowns:
            ticket.complete(frozenset(j.id for j in plan.jobs))
        else:
            self.queues[plan.direction].append(copy)

    def complete(self, direction: Direction, count: int = 1) -> None:
        """Complete the next `count` copies of `direction`."""
        for _ in range(count):
            copy = self.queues[direction].popleft()
            copy.ticket.complete(copy.failed)

    def complete_all(self) -> None:
        """Complete all copies of both directions."""
        for direction, queue in self.queues.items():
            self.complete(direction, len(queue))

    def abandon(self, ticket: Ticket) -> bool:
        """See `TransferEngine.abandon`."""
        return ticket.over

    def guard_read(self, ticket: Ticket, timeout_s: float) -> bool:
        """See `TransferEngine.guard_read`."""
        assert timeout_s > 0
        batch = ticket.batch
        assert isinstance(batch, Batch)
        bad = batch.plan.direction is Direction.LOAD and any(t.failed for t in batch.tickets.values())
        if self.waiting is Waiting.OBEDIENT or (self.waiting is Waiting.DEVICE and bad):
            queue = self.queues[batch.plan.direction]
            while any(copy.ticket.batch is batch and not copy.ticket.done for copy in queue):
                self.complete(batch.plan.direction)
        return ticket.done or self.waiting is Waiting.DEVICE

    fence = guard_read

    def scrub(self, plan: CopyPlan, jobs: frozenset[int]) -> None:
        """See `TransferEngine.scrub`."""

    def shutdown(self) -> None:
        """See `TransferEngine.shutdown`."""
        self.shutdowns += 1
        if self.finishes_at_shutdown:
            self.complete_all()

    def layers_of(self, number: int) -> list[int]:
        """Return the layers that were submitted for job `number`, in order."""
        return [layer for c in self.copies if number in {j.id for j in c.plan.jobs} for layer in c.ticket.layers]


class ThreadedEngine(FakeEngine):
    """A transfer engine that completes every copy at once, on its own thread."""

    def __init__(self) -> None:
        """Start the thread."""
        super().__init__()
        self._todo: deque[Copy | None] = deque()
        self._more = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()

    def submit(self, plan: CopyPlan, ticket: Ticket) -> None:
        """See `TransferEngine.submit`."""
        self._todo.append(Copy(plan, ticket, self.failing(plan, ticket)))
        self._more.release()

    def guard_read(self, ticket: Ticket, timeout_s: float) -> bool:
        """See `TransferEngine.guard_read`."""
        return ticket.wait(timeout_s)

    fence = guard_read

    def shutdown(self) -> None:
        """See `TransferEngine.shutdown`."""
        self._todo.append(None)
        self._more.release()
        self._thread.join(WAIT_S)

    def _main(self) -> None:
        while True:
            self._more.acquire()
            copy = self._todo.popleft()
            if copy is None:
                return
            copy.ticket.complete(copy.failed)


class Rig:
    """A pipeline over a fake engine, with the calls that tests need."""

    def __init__(
        self,
        engine: FakeEngine | None = None,
        *,
        layerwise: bool = True,
        wait_s: float = WAIT_S,
        unhooked: Collection[int] = (),
        blocks: int = 10,
        replayed: Callable[[Any], bool] | None = None,
        fences_late: bool = False,
        saves: bool = True,
    ) -> None:
        """Start the pipeline."""
        self._saves = saves
        self.engine = engine or FakeEngine()
        self.counters = Counters()
        self.geometry = small_geometry()
        self.layers = len(self.geometry.layers)
        hooks = Hooks(
            frozenset("abc"[layer] for layer in unhooked) if layerwise else frozenset("abc"), replayed, fences_late
        )
        self.pipeline = self._make_pipeline(hooks, blocks, int(wait_s * 1000))

    def _make_pipeline(self, hooks: Hooks[str], blocks: int, wait_ms_max: int) -> Pipeline:
        numbered = Hooks(frozenset(map("abc".index, hooks.unhooked)), hooks.replayed, hooks.fences_late)
        return Pipeline(
            self.context({"wait_ms_max": wait_ms_max}), self.engine, self.geometry, hooks=numbered, blocks=blocks,
            saves=self._saves,
        )  # fmt: skip

    def context(self, keys: dict[str, Any], **shared: Any) -> RankContext:
        """Return a context with the settings `keys` and the rig's counters."""
        return RankContext(load_settings({"prefault": "use", **keys}), counters=self.counters, **shared)

    def busy(self) -> bool:
        """Whether the step has per-layer work.

        This is a method, because mypy would assume that an attribute does not change.
        """
        return bool(self.pipeline._save.jobs or self.pipeline._sync.jobs)

    def in_flight(self) -> int:
        """The number of jobs that have begun, and whose end was not collected yet."""
        return self.pipeline.in_flight

    def save_all(self) -> None:
        """Run the save hook of every layer."""
        for layer in range(self.layers):
            self.pipeline.save_layer(layer)

    def wait_all(self) -> None:
        """Run the load hook of every layer."""
        for layer in range(self.layers):
            self.pipeline.wait_layer(layer)

    def settle(self) -> None:
        """Wait until the loop has handled all completions."""
        assert self.pipeline.copies.loop.settle(WAIT_S)

    def news(self) -> dict[int, bool]:
        """Return the jobs that have ended since the last call, and how. Checks that no job is reported twice."""
        if self.pipeline.copies.loop.alive:
            self.settle()
        outcomes = self.pipeline.collect()
        ended = {o.job.id: o.ok for o in outcomes}
        assert len(ended) == len(outcomes)
        assert all(o.why for o in outcomes if not o.ok)
        return ended

    def kill_loop(self) -> None:
        """End the loop thread as an unexpected exception would."""

        def die() -> None:
            raise SystemExit

        self.pipeline.copies.loop.put(die)
        self.pipeline.copies.loop._thread.join(WAIT_S)
        assert not self.pipeline.copies.loop._thread.is_alive()


class SideRig(Rig):
    """A worker side over a fake engine. The side uses the pipeline of the rig."""

    side: WorkerSide

    def _make_pipeline(self, hooks: Hooks[str], blocks: int, wait_ms_max: int) -> Pipeline:
        self.side = WorkerSide(
            self.context({"wait_ms_max": wait_ms_max}),
            PagedCaches(self.geometry, make_caches(self.geometry, blocks), blocks, hooks),
            engine=self.engine,
        )
        return self.side.pipeline
