"""A copy engine without threads that is late, in a way that a seed decides, and fails some loads."""

from __future__ import annotations

import random
from collections import deque

from kvpipe.transfer.base import CopyPlan, Direction, Ticket
from kvpipe.transfer.cpu import CpuEngine

TICK_COPIES_MAX = 2
SPOILED = 0x7F


class HeldEngine(CpuEngine):
    """Copies run when somebody waits for them, or a few at each `tick`; submissions of one direction stay in order."""

    def __init__(self, rng: random.Random, fail: float = 0.0) -> None:
        """`fail` is the share of loads that fail, leaving garbage in their blocks."""
        super().__init__(0)
        self._rng, self._fail = rng, fail
        self._held: dict[Direction, deque[tuple[CopyPlan, Ticket]]] = {d: deque() for d in Direction}
        self._doomed: dict[int, int] = {}
        self.failed_jobs: set[int] = set()

    def submit(self, plan: CopyPlan, ticket: Ticket) -> None:
        """Hold the copy back."""
        self._held[plan.direction].append((plan, ticket))
        if self._closed:
            self._pump(plan.direction, 1)

    def tick(self) -> None:
        """Time passes."""
        for direction in Direction:
            self._pump(direction, self._rng.randint(0, TICK_COPIES_MAX))

    def guard_read(self, ticket: Ticket, timeout_s: float) -> bool:
        """Run everything up to `ticket`."""
        return self.fence(ticket, timeout_s)

    def fence(self, ticket: Ticket, timeout_s: float) -> bool:
        """Run everything up to `ticket`."""
        for direction, held in self._held.items():
            while not ticket.done and any(t is ticket for _, t in held):
                self._pump(direction, 1)
        return ticket.wait(timeout_s)

    def shutdown(self) -> None:
        """Run everything."""
        for direction in Direction:
            self._pump(direction, len(self._held[direction]))
        super().shutdown()

    def copy_layer(self, plan: CopyPlan, layer: int) -> frozenset[int]:
        """Copy, then spoil what fails: a job that is doomed fails in one of its layers."""
        super().copy_layer(plan, layer)
        if plan.direction is Direction.SAVE or not self._fail:
            return frozenset()
        failed = set()
        for job in plan.jobs:
            if job.id not in self._doomed:
                layers = len(self._geometry.layers)
                self._doomed[job.id] = self._rng.randrange(layers) if self._rng.random() < self._fail else layers
            if self._doomed[job.id] == layer:
                failed.add(job.id)
        group, _ = self._geometry.layers[layer]
        for job_id, _, _, block, pages in plan.runs[group].tolist():
            if job_id in failed:
                self._views[layer].tensor[block : block + pages] = SPOILED
        self.failed_jobs |= failed
        return frozenset(failed)

    def _pump(self, direction: Direction, count: int) -> None:
        held = self._held[direction]
        for _ in range(min(count, len(held))):
            self._run(*held.popleft())
