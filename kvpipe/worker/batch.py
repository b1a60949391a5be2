"""The jobs of one kind in one step, and the state of their copies."""

from __future__ import annotations

import time
from collections import deque
from typing import Final

from kvpipe.messages import Job, Kind, Outcome
from kvpipe.statemachine.copy import LayerCursor
from kvpipe.statemachine.core import Edge
from kvpipe.transfer.base import QUIET, CopyPlan, Direction, Ticket

LAST_MOVES: Final = 8


class Batch:
    """The jobs of one kind in one step: one copy plan, one ticket per submitted layer, one cursor per job.

    vLLM's thread submits the copies and waits for them; the loop thread does everything else. See `kvpipe.worker`.
    """

    __slots__ = (
        "closed",
        "cursors",
        "ended",
        "guarded",
        "history",
        "jobs",
        "kind",
        "last",
        "moved_ns",
        "open",
        "pages",
        "plan",
        "step",
        "stuck",
        "tickets",
        "traced",
        "waited",
    )

    def __init__(self, kind: Kind, jobs: tuple[Job, ...], groups: int, step: int, *, traced: bool) -> None:
        """`groups`: number of cache groups. `traced`: some jobs are traced in detail.

        Layers in `guarded` are loaded before any later compute; for layers in `waited`, attention has waited.
        """
        self.kind, self.jobs, self.step, self.traced = kind, jobs, step, traced
        self.plan = CopyPlan(Direction.SAVE if kind is Kind.SAVE else Direction.LOAD, jobs, groups)
        self.pages = [len(rows) for rows in self.plan.rows]  # per group
        # vLLM's thread:
        self.guarded: set[int] = set()
        self.waited: set[int] = set()
        self.tickets: dict[int, Ticket] = {}  # by layer, in the order of submission
        self.last: Ticket | None = None  # of those that the engine has taken: copies of a batch complete in order
        self.open: deque[Ticket] = deque()  # put there before their copies begin; the loop takes out what is over
        # the loop thread:
        self.cursors: dict[int, LayerCursor] = {}
        self.ended: list[Outcome] = []
        self.closed = False
        self.moved_ns = time.monotonic_ns()
        self.history: deque[tuple[int, Edge]] = deque(maxlen=LAST_MOVES * len(jobs))
        self.stuck = False

    @property
    def settled(self) -> bool:
        """Whether no copy can touch the jobs' slots or blocks any more. On the loop thread, once all are submitted."""
        while self.open and self.open[0].state in QUIET:
            self.open.popleft()
        return not self.open

    @property
    def landed(self) -> bool:
        """Whether every copy that the engine has taken has completed. On vLLM's thread."""
        return self.last is None or self.last.done

    @property
    def ids(self) -> frozenset[int]:
        """The jobs' ids."""
        return frozenset(job.id for job in self.jobs)

    def header(self, rank: int) -> tuple[int, int, str, int, int]:
        """Return the first fields of a trace event about the batch: now (ns), rank, request, epoch, step.

        Request and epoch are "" and 0 if there are several jobs.
        """
        job = self.jobs[0]
        request, epoch = (job.request, job.epoch) if len(self.jobs) == 1 else ("", 0)
        return time.monotonic_ns(), rank, request, epoch, self.step
