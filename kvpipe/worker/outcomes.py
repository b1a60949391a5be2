"""The outcomes of a rank's jobs: open jobs, and the outcomes for vLLM's thread. Only vLLM's thread runs this module."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvpipe.protocol.messages import Job, Outcome
from kvpipe.worker.batch import Batch
from kvpipe.worker.copies import Copies

REPORTED_EARLY: Final = "its blocks were reported as suspects, in its step"


class Outcomes:
    """The outcomes of one rank's jobs. `uncollected` has the begun jobs whose outcomes are not yet collected, by id."""

    def __init__(self, copies: Copies) -> None:
        """`copies` has the outbox into which the loop thread puts outcomes."""
        self._copies = copies
        self.uncollected: dict[int, Job] = {}
        self._refused: list[Outcome] = []
        self._suspects, self._early = set[int](), set[int]()

    @property
    def waiting(self) -> bool:
        """Whether some outcomes are not collected yet."""
        return bool(self._refused or self._copies.outbox)

    def refuse(self, jobs: Iterable[Job], why: str) -> None:
        """Report `jobs`, which were not begun, as failed."""
        self._refused += [Outcome(job, ok=False, why=why) for job in jobs]

    def refuse_rest(self, jobs: Iterable[Job], why: str) -> None:
        """Report as failed the jobs in `jobs` that are neither open nor already refused."""
        known = self.uncollected.keys() | {refused.job.id for refused in self._refused}
        self.refuse([job for job in jobs if job.id not in known], why)

    def suspect(self, batch: Batch) -> None:
        """Report the blocks of a failed batch of sync loads in this step, before its jobs end with their copies."""
        self._early |= batch.ids & self.uncollected.keys()  # exclude jobs that were already reported
        for job in batch.jobs:
            self._suspects |= job.blocks()

    def take_suspects(self) -> set[int]:
        """Return the blocks of sync loads that have failed since the last call.

        The copies of these loads may still run.
        """
        suspects, self._suspects = self._suspects, set()
        return suspects

    def collect(self) -> list[Outcome]:
        """Return the outcomes of the jobs that ended since the last call. Each outcome is returned exactly once."""
        if not (self.uncollected or self.waiting):
            return []
        # `alive` is read before the outbox, so that the outbox has every report from before the loop's end.
        lost = bool(self.uncollected) and not self._copies.loop.alive
        out, self._refused = self._refused, []
        outbox, open_jobs, early = self._copies.outbox, self.uncollected, self._early
        while outbox:
            outcome = outbox.popleft()
            if open_jobs.pop(outcome.job.id, None) is not None:  # None if the job was already reported as lost
                out.append(outcome)
        if early:
            out = [one._replace(why=REPORTED_EARLY) if one.job.id in early else one for one in out]
            early.difference_update([one.job.id for one in out])
        if lost and open_jobs:
            out += [Outcome(job, ok=False, why="the loop was lost") for job in open_jobs.values()]
            open_jobs.clear()
            early.clear()
        return out
