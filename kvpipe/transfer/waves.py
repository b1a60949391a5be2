"""The layers of one plan are first submitted, then queued on a CUDA device in waves, and then in flight."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from kvpipe.protocol.messages import Kind
from kvpipe.transfer.base import CopyPlan, Direction, Ticket
from kvpipe.transfer.device import DeviceEvent
from kvpipe.transfer.movers import Mover, Prepared


class PlanQueue:
    """The submissions of one plan that have not been queued on the device yet."""

    __slots__ = (
        "bytes", "computed", "lazy", "patient", "plan", "prepared", "sizes", "submitted", "tickets", "waves",
    )  # fmt: skip

    def __init__(self, plan: CopyPlan) -> None:
        """`lazy` plans are loads whose layers are queued when the layers' readers need them.

        `patient` plans are loads for which no reader waits. The completion thread queues patient loads, because the
        copies of patient loads do not block.
        """
        self.plan = plan
        self.prepare()
        self.lazy = plan.direction is Direction.LOAD and any(job.kind == Kind.LOAD_SYNC for job in plan.jobs)
        blocks = self.prepared is not None and self.prepared.mover is Mover.PAGEABLE
        self.patient = plan.direction is Direction.LOAD and not self.lazy and not blocks
        self.tickets: deque[Ticket] = deque()
        self.sizes: deque[int] = deque()
        self.bytes = self.submitted = self.waves = 0
        self.computed: tuple[int, DeviceEvent] | None = None
        """(n, event): the layers of the first n tickets are computed when the event fires. None means no event."""

    @property
    def all(self) -> frozenset[int]:
        """The ids of the plan's jobs."""
        return frozenset(job.id for job in self.plan.jobs)

    def prepare(self) -> None:
        """Take over the data that the engine has prepared for the plan, if there are any."""
        self.prepared = self.plan.mark if isinstance(self.plan.mark, Prepared) else None
        self.plan.mark = None

    def put(self, ticket: Ticket, size: int) -> None:
        """Append a ticket whose copies have `size` bytes."""
        ticket.mark = self
        self.tickets.append(ticket)
        self.sizes.append(size)
        self.bytes += size
        self.submitted += len(ticket.layers)

    def take(self, bytes_min: int) -> list[Ticket]:
        """Take a wave: the next tickets, until the wave has `bytes_min` bytes or no ticket is left.

        A wave has only tickets that `computed` covers, because the wave's copies wait only for the event of `computed`.
        """
        taken: list[Ticket] = []
        size, most = 0, len(self.tickets) if self.computed is None else self.computed[0]
        while len(taken) < most and (not taken or size < bytes_min):
            taken.append(self.tickets.popleft())
            size += self.sizes.popleft()
        self.bytes -= size
        if self.computed is not None:
            left = self.computed[0] - len(taken)
            self.computed = (left, self.computed[1]) if left > 0 else None
        return taken

    def drop(self, ticket: Ticket) -> None:
        """Remove a withdrawn ticket."""
        ticket.mark = None
        place = self.tickets.index(ticket)
        del self.tickets[place]
        self.bytes -= self.sizes[place]
        del self.sizes[place]
        if self.computed is not None and place < self.computed[0]:
            left = self.computed[0] - 1
            self.computed = (left, self.computed[1]) if left else None


class WaveInFlight(NamedTuple):
    """A wave in flight. `last` says whether the wave is the last wave of its plan."""

    tickets: tuple[Ticket, ...]
    queue: PlanQueue
    event: DeviceEvent | None
    failed: frozenset[int]
    last: bool = False


class OrderingPoint(NamedTuple):
    """A point after which device work can be ordered. An event that could not be recorded is None."""

    landed: DeviceEvent | None
    read: DeviceEvent | None
    wave: int
    queue: PlanQueue
