"""A copy engine without threads. A trial decides when copies run and complete, and which copies fail."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from kvpipe.transfer.base import CopyPlan, Direction, Ticket
from kvpipe.transfer.cpu import CpuEngine

SPOILED = 0x7F


class Held(NamedTuple):
    """A submitted copy that has not run."""

    plan: CopyPlan
    ticket: Ticket


class Moved(NamedTuple):
    """A copy whose bytes have moved, and the ids of the jobs that failed."""

    ticket: Ticket
    failed: frozenset[int]


class HeldEngine(CpuEngine):
    """A copy engine that holds each copy until a caller waits for the copy or the trial runs the copy.

    The trial may make copies fail. Copies of one direction run in order. If `device` is True, a wait only orders work,
    as with CUDA events: when the wait returns, the bytes have moved, but the completion is delivered later. A failure
    is then set at once in `Ticket.failed`.
    """

    def __init__(self, *, device: bool = False) -> None:
        """Start in a state in which every copy is held until a caller waits for the copy, and then succeeds."""
        super().__init__(0)
        self._device = device
        self._held: dict[Direction, deque[Held]] = {d: deque() for d in Direction}
        self._moved: dict[Direction, deque[Moved]] = {d: deque() for d in Direction}  # completions not yet delivered
        self._silent: list[Moved] = []
        self._armed: dict[Direction, list[int]] = {d: [] for d in Direction}
        self._doomed: dict[int, int] = {}
        self._losing: dict[Direction, bool] = {}
        self._pace: dict[Direction, int] = dict.fromkeys(Direction, 0)
        self._backwards = False
        self._last: Ticket | None = None
        self._doubling = 0
        self._failing: object = None

    # ---- the trial's side -----------------------------------------------------------------------------------------

    def arm(self, direction: Direction, layer: int) -> None:
        """Make the next job of `direction` fail in `layer`. The job leaves garbage at its destination."""
        self._armed[direction].append(layer)

    def lose(self, direction: Direction, *, in_time: bool = False) -> None:
        """Make the next wait of `direction` time out, although the bytes have moved. `find_lost` delivers completions.

        If `in_time` is True, the completions are delivered just before the wait returns.
        """
        self._losing[direction] = in_time

    def pace(self, saves: int, loads: int, *, backwards: bool) -> None:
        """Run copies in batches from now on, when `saves` or `loads` copies are held. 0 means only in a wait.

        If `backwards` is True, the completions of a batch arrive in reverse order.
        """
        self._pace = {Direction.SAVE: saves, Direction.LOAD: loads}
        self._backwards = backwards

    def tick(self, direction: Direction, copies: int) -> None:
        """Run and complete up to `copies` copies of `direction`."""
        moved = self._moved[direction]
        while self._held[direction] and len(moved) < copies:
            self._move(direction)
        done = [moved.popleft() for _ in range(min(copies, len(moved)))]
        # of three or more, the first stays first, so that the order is wrong only from the second on
        if self._backwards:
            done = done[: len(done) > 2] + done[: 0 if len(done) > 2 else None : -1]
        for ticket, failed in done:
            self._last = ticket
            ticket.complete(failed)
            self._doubling -= 1
            if not self._doubling:
                ticket.sink(ticket)

    def find_lost(self) -> None:
        """Deliver the completions that `lose` has held back."""
        late, self._silent = self._silent, []
        for ticket, failed in late:
            ticket.complete(failed)

    def again(self, ahead: int) -> None:
        """Deliver the last completion once more, and deliver the `ahead`-th next completion twice."""
        self._doubling = ahead
        if self._last is not None:
            self._last.sink(self._last)

    @property
    def idle(self) -> bool:
        """Whether no copy and no completion is held."""
        return not self._silent and not any(self._held.values()) and not any(self._moved.values())

    # ---- called by the pipeline -----------------------------------------------------------------------------------

    def submit(self, plan: CopyPlan, ticket: Ticket) -> None:
        """Hold the copy `plan`, or run held copies if a pace is set."""
        for job in plan.jobs:
            if job.id not in self._doomed:
                armed = self._armed[plan.direction]
                self._doomed[job.id] = armed.pop() % len(self._geometry.layers) if armed else -1
        held = self._held[plan.direction]
        held.append(Held(plan, ticket))
        pace = 1 if self._closed else self._pace[plan.direction]
        if pace and len(held) >= pace:
            self.tick(plan.direction, pace)

    def guard_read(self, ticket: Ticket, timeout_s: float) -> bool:
        """Run all copies up to `ticket`, as `fence` does."""
        return self.fence(ticket, timeout_s)

    def fence(self, ticket: Ticket, timeout_s: float) -> bool:
        """Run all copies up to `ticket`. A wait that `lose` has chosen returns False at once."""
        for direction, held in self._held.items():
            moved = self._moved[direction]
            if direction in self._losing and any(h.ticket is ticket for h in held):
                in_time = self._losing.pop(direction)
                while held:
                    self._move(direction)
                if in_time:
                    self.tick(direction, len(moved))
                self._silent += moved
                moved.clear()
                return False
            while any(h.ticket is ticket for h in held):
                self._move(direction)
            prompt = not self._device or ticket.batch is self._failing  # a failure's completion is delivered at once
            while prompt and any(t is ticket for t, _ in moved):
                self.tick(direction, 1)
        if any(t is ticket for t, _ in self._silent):
            return False
        return self._device or ticket.wait(timeout_s)

    def shutdown(self) -> None:
        """Run all copies and deliver all completions, then shut down."""
        self.find_lost()
        for direction, held in self._held.items():
            self.tick(direction, len(held) + len(self._moved[direction]))
        super().shutdown()

    def copy_layer(self, plan: CopyPlan, layer: int) -> frozenset[int]:
        """Copy a layer, then overwrite the destination of each job that fails in this layer."""
        super().copy_layer(plan, layer)
        failed = frozenset(job.id for job in plan.jobs if self._doomed.get(job.id, -1) == layer)
        if failed:
            group, index = self._geometry.layers[layer]
            page_bytes = self._views[layer].page_bytes
            offset = self._geometry.layer_offsets[group][index]
            for job_id, slot, page, block, pages in plan.runs[group].tolist():
                if job_id not in failed:
                    continue
                if plan.direction is Direction.LOAD:
                    self._views[layer].tensor[block : block + pages] = SPOILED
                else:
                    at = offset + page * page_bytes
                    self._pool.tensor[slot, at : at + pages * page_bytes] = SPOILED
        return failed

    def _move(self, direction: Direction) -> None:
        plan, ticket = self._held[direction].popleft()
        if not ticket.begin():
            self._moved[direction].append(Moved(ticket, frozenset(job.id for job in plan.jobs)))
            return
        failed = self._copy(plan, ticket.layers)
        if failed and self._device:
            ticket.failed, self._failing = failed, ticket.batch
        self._moved[direction].append(Moved(ticket, failed))
