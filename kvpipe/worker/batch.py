"""The jobs of one kind in one step, and the state of their copies."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Final

from kvpipe.protocol.messages import Job, Kind, Outcome
from kvpipe.statemachine.copy import LayerCursor
from kvpipe.statemachine.core import Edge
from kvpipe.transfer.base import NO_JOBS, QUIET, CopyPlan, Direction, Ticket

LAST_MOVES: Final = 8
NO_COPY: Final = Ticket(None, 0, 0, bool)
"""The value of `Batch.last` while the transfer engine has taken no copy. This ticket is already completed."""
NO_COPY.complete()
NO_COPY.born_ns = 0


class Batch:
    """The jobs of one kind in one step: one copy plan, a ticket for each submission, one cursor per job.

    vLLM's thread submits the copies and waits for their end. The loop thread does everything else (`kvpipe.worker` has
    the rules).
    """

    __slots__ = (
        "checked",
        "closed",
        "cursors",
        "damaged",
        "ended",
        "first_ns",
        "guarded",
        "held",
        "history",
        "jobs",
        "kind",
        "last",
        "moved_ns",
        "open",
        "plan",
        "stamps",
        "step",
        "stuck",
        "tickets",
        "traced",
        "waited",
    )

    def __init__(self, kind: Kind, jobs: tuple[Job, ...], groups: int, step: int, *, traced: bool) -> None:
        """`groups` is the number of cache groups. `traced` says whether some of the jobs are traced in detail.

        The layers in the attribute `guarded` have loads after which later compute is already ordered. The attribute
        `waited` has the layers whose attention called `wait_layer`. The attributes `stamps`, `checked`, `damaged` and
        `held` belong to `SlotChecks`.
        """
        self.kind, self.jobs, self.step, self.traced = kind, jobs, step, traced
        self.plan = CopyPlan(Direction.SAVE if kind is Kind.SAVE else Direction.LOAD, jobs, groups)
        # The attributes of vLLM's thread:
        self.guarded: set[int] = set()
        self.waited: set[int] = set()
        self.tickets: dict[int, Ticket] = {}  # the ticket of each layer, in the order of submission
        self.last = NO_COPY  # the last ticket that the engine took, and so the last to complete
        self.open: deque[Ticket] = deque()  # each ticket from before its copy begins until the loop removes the ticket
        self.stamps = b""  # the stamps of all jobs (see `Job.stamps`)
        self.checked: threading.Event | None = None  # set when the inbox's handler knows the result of the digests
        self.damaged = NO_JOBS  # the loads whose slots have other digests
        # The attributes of the loop thread:
        self.cursors: dict[int, LayerCursor] = {}
        self.ended: list[Outcome] = []
        self.closed = False
        self.moved_ns = time.monotonic_ns()
        self.first_ns = 0  # the time at which the first landed copy was submitted, or 0 before a copy has landed
        self.history: deque[tuple[int, Edge]] = deque(maxlen=LAST_MOVES * len(jobs))
        self.stuck = False
        self.held: Ticket | None = None  # the last ticket, which has landed before the digests were compared

    @property
    def pages(self) -> list[int]:
        """The number of the batch's pages by cache group. The loop thread reads this property."""
        return [len(rows) for rows in self.plan.rows]

    @property
    def settled(self) -> bool:
        """Whether no copy can touch the jobs' slots or blocks any more.

        The loop thread reads this property after all copies were submitted.
        """
        while self.open and self.open[0].state in QUIET:
            self.open.popleft()
        return not self.open

    @property
    def landed(self) -> bool:
        """Whether every copy that the engine has taken has completed, and every digest of a load is compared.

        vLLM's thread reads this property.
        """
        return self.last.done and (self.checked is None or self.checked.is_set())

    @property
    def awaits_digests(self) -> bool:
        """Whether the copies have landed, and the digests' thread is not done. The loop thread reads this property."""
        has_landed = self.kind is Kind.SAVE or self.held is not None
        return has_landed and self.checked is not None and not self.checked.is_set()

    @property
    def ids(self) -> frozenset[int]:
        """The jobs' ids."""
        return frozenset(job.id for job in self.jobs)

    def header(self, rank: int) -> tuple[int, int, str, int, int]:
        """Return the first fields of a trace event about the batch: now (ns), rank, request, epoch, step.

        If the batch has several jobs, then the request is "" and the epoch is 0.
        """
        job = self.jobs[0]
        request, epoch = (job.request, job.epoch) if len(self.jobs) == 1 else ("", 0)
        return time.monotonic_ns(), rank, request, epoch, self.step


NO_BATCH: Final = Batch(Kind.SAVE, (), 0, 0, traced=False)
"""The batch that stands for each kind of job that a step lacks. This batch never changes."""
