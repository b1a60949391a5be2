"""How a rank's jobs have ended: which are open, and what vLLM's thread collects. On vLLM's thread alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvpipe.messages import Job, Outcome
from kvpipe.trace.log import Counters
from kvpipe.worker.batch import Batch
from kvpipe.worker.copies import Copies

REPORTED_EARLY: Final = "its blocks were reported as suspects, in its step"


class Outcomes:
    """One per rank. `uncollected`: jobs that were begun and not yet collected, by id."""

    def __init__(self, copies: Copies, counters: Counters) -> None:
        """`copies`: whose outbox has what the loop thread reports."""
        self._copies, self._counters = copies, counters
        self.uncollected: dict[int, Job] = {}
        self._refused: list[Outcome] = []
        self._suspects, self._early = set[int](), set[int]()

    @property
    def waiting(self) -> bool:
        """Whether there is something to collect."""
        return bool(self._refused or self._copies.outbox)

    def refuse(self, jobs: Iterable[Job], why: str) -> None:
        """Report `jobs`, which were not begun, as failed."""
        self._refused += [Outcome(job, ok=False, why=why) for job in jobs]

    def refuse_rest(self, jobs: Iterable[Job], why: str) -> None:
        """Report those of `jobs` as failed that are neither open nor refused."""
        known = self.uncollected.keys() | {refused.job.id for refused in self._refused}
        self.refuse([job for job in jobs if job.id not in known], why)

    def suspect(self, batch: Batch) -> None:
        """Report the blocks of failed sync loads in this step. The jobs themselves end when their copies do."""
        self._early |= batch.ids & self.uncollected.keys()  # what has ended is not reported again
        for job in batch.jobs:
            self._suspects |= job.blocks()

    def take_suspects(self) -> set[int]:
        """Return the blocks of sync loads that were given up since the last call: their copies may not have ended."""
        suspects, self._suspects = self._suspects, set()
        return suspects

    def collect(self) -> list[Outcome]:
        """Return how jobs ended since the last call, each exactly once."""
        # asked first: what it reported before its end is in the outbox
        lost = bool(self.uncollected) and not self._copies.loop.alive
        out, self._refused = self._refused, []
        outbox, open_jobs, early = self._copies.outbox, self.uncollected, self._early
        while outbox:
            outcome = outbox.popleft()
            open_jobs.pop(outcome.job.id, None)
            out.append(outcome)
        if early:
            out = [one._replace(why=REPORTED_EARLY) if one.job.id in early else one for one in out]
            early.difference_update([one.job.id for one in out])
        if lost and open_jobs:
            self._counters.fault("loop_lost")
            out += [Outcome(job, ok=False, why="the loop was lost") for job in open_jobs.values()]
            open_jobs.clear()
            early.clear()
        return out
