"""The worker side of LoRA adapters: which the rank holds, with which digest, since when; checks a plan's claims.

The engine's connector announces each adapter that is loaded, before the step that needs it, and provides `now`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from kvpipe.adapter_files import KNOWN_MAX, AdapterFiles, Reading, remember
from kvpipe.messages import BROKEN, Claim, Job, StepPlan
from kvpipe.trace.log import Counters


class Loaded(NamedTuple):
    """An adapter that was loaded: vLLM's number, name and path of it, and the digest of its files."""

    number: int
    name: str
    path: str
    digest: bytes


class HeldAdapters:
    """One per rank."""

    def __init__(self, counters: Counters) -> None:
        """Start without adapters."""
        self._counters, self._files = counters, AdapterFiles()
        self.now: Callable[[], dict[int, bytes]] = dict
        """Returns the digests of the adapters that the rank holds, by vLLM's number. Set by the connector."""
        self._since: OrderedDict[object, tuple[bytes, int]] = OrderedDict()
        self._names: OrderedDict[int, tuple[str, str]] = OrderedDict()
        self._forgotten_step = 0  # up to which changes may have been forgotten
        self.step = 0
        """The last step that was begun."""
        self._reported: dict[int, bytes] = {}
        self.changes = 0

    @property
    def readings(self) -> int:
        """How often an adapter's files were read."""
        return self._files.readings

    # ---- in every step --------------------------------------------------------------------------------------------

    def checked(self, plan: StepPlan) -> StepPlan:
        """Return the plan, in which jobs whose claim does not hold on this rank are replaced by jobs that fail."""
        if plan.step > self.step:  # noqa: PLR1730  (in every step, in a quarter of the time)
            self.step = plan.step
        if not plan.claims:
            return plan
        held = self.now()
        refused = [claim for claim in plan.claims if not self._stands(claim, held)]
        if not refused:
            return plan
        for claim in refused:
            self._reported[claim.adapter] = b""  # the scheduler's side does not know it: report it once more
            if claim.job:
                self._counters.fault("adapter_changed", job=claim.job, adapter=claim.adapter)
        self.changes += 1
        jobs = {claim.job for claim in refused}
        return plan._replace(jobs=tuple(broken(job) if job.id in jobs else job for job in plan.jobs))

    def _stands(self, claim: Claim, held: dict[int, bytes]) -> bool:
        if not claim.digest or held.get(claim.adapter) != claim.digest:
            return False
        keys = (claim.adapter, self._names.get(claim.adapter))
        return all(self._since.get(key, (b"", self._forgotten_step))[1] <= claim.since_step for key in keys)

    def news(self) -> dict[int, bytes]:
        """Return the digests that have changed since the last call, by number; b"": not held any more."""
        if not self.changes:
            return {}
        self.changes, reported, now = 0, self._reported, self.now()
        self._reported = now
        gone = dict.fromkeys(reported.keys() - now.keys(), b"")
        return gone | {number: digest for number, digest in now.items() if reported.get(number) != digest}

    # ---- loads ----------------------------------------------------------------------------------------------------

    def loaded(self, one: Loaded) -> None:
        """Record that an adapter was loaded, before the next step."""
        self.changes += 1
        name = one.name, one.path
        remember(self._names, one.number, name, KNOWN_MAX)
        for key in (one.number, name):
            before, since = self._since.get(key, (one.digest, self._forgotten_step))
            if before != one.digest:
                since = self.step + 1
            remember(self._since, key, (one.digest, since), KNOWN_MAX)
        if len(self._since) >= KNOWN_MAX - 1:
            self._forgotten_step = self.step + 1

    def read(self, folder: str) -> Reading | None:
        """Return the digest of the adapter in `folder`; None, and a fault is counted, if it cannot be read."""
        try:
            return self._files.read(folder)
        except Exception as error:  # noqa: BLE001  (whatever files and paths may raise: the engine refuses it, or not)
            self._counters.fault("adapter_not_read", path=repr(folder), why=repr(error))
            return None


def broken(job: Job) -> Job:
    """Return a copy of the job that every rank reports as failed."""
    rows = job.table().copy()
    rows[:, 1] = BROKEN
    return job._replace(rows=rows.tobytes())
