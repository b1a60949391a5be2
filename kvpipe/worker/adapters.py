"""The worker side of LoRA adapters records the adapters that the rank holds, and checks the claims of each plan.

A record has an adapter's digest and the step since which the rank has held the adapter. The engine's connector calls
`loaded` for each adapter before the step that needs the adapter. The connector also sets `now`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from kvpipe.protocol.messages import BROKEN, Claim, Job, StepPlan
from kvpipe.threads.adapter_files import KNOWN_MAX, AdapterFiles, Reading, remember
from kvpipe.trace.log import Counters


class Loaded(NamedTuple):
    """A loaded adapter: the number, name and path that vLLM gives the adapter, and the digest of the adapter files."""

    number: int
    name: str
    path: str
    digest: bytes


class HeldAdapters:
    """The adapters that one rank holds. Each rank has one object of this class."""

    def __init__(self, counters: Counters) -> None:
        """Start without adapters."""
        self._counters, self._files = counters, AdapterFiles()
        self.now: Callable[[], dict[int, bytes]] = dict
        """The connector's function that returns the digests of the adapters that the rank holds, by vLLM's number."""
        self._since: OrderedDict[object, tuple[bytes, int]] = OrderedDict()
        self._names: OrderedDict[int, tuple[str, str]] = OrderedDict()
        self._forgotten_step = 0  # an adapter without an entry in `_since` counts as changed at this step
        self.step = 0
        """The number of the last step that was begun."""
        self._reported: dict[int, bytes] = {}
        self._lost = set[int]()  # numbers of adapters that the engine still lists, although their bytes are lost
        self.changes = 0

    @property
    def readings(self) -> int:
        """The number of times that files of an adapter were read."""
        return self._files.readings

    # ---- in every step --------------------------------------------------------------------------------------------

    def checked(self, plan: StepPlan) -> StepPlan:
        """Return the plan. A job whose claim is false on this rank is replaced by a job that fails."""
        if plan.step > self.step:  # noqa: PLR1730  (`max` would take four times as long, in every step)
            self.step = plan.step
        if not plan.claims:
            return plan
        held = self._held()
        refused = [claim for claim in plan.claims if not self._stands(claim, held)]
        if not refused:
            return plan
        for claim in refused:
            # differs from every held digest, so that `news` reports the adapter's digest again
            self._reported[claim.adapter] = b""
            if claim.job:
                self._counters.fault("adapter_changed", job=claim.job, adapter=claim.adapter)
        self.changes += 1
        jobs = {claim.job for claim in refused}
        return plan._replace(jobs=tuple(marked_broken(job) if job.id in jobs else job for job in plan.jobs))

    def _stands(self, claim: Claim, held: dict[int, bytes]) -> bool:
        if not claim.digest or held.get(claim.adapter) != claim.digest:
            return False
        keys = (claim.adapter, self._names.get(claim.adapter))
        return all(self._since.get(key, (b"", self._forgotten_step))[1] <= claim.since_step for key in keys)

    def news(self) -> dict[int, bytes]:
        """Return the digests that changed since the last call, by number.

        A digest of b"" means that the rank does not hold the adapter any more.
        """
        if not self.changes:
            return {}
        self.changes, reported, now = 0, self._reported, self._held()
        self._reported = now
        gone = dict.fromkeys(reported.keys() - now.keys(), b"")
        return gone | {number: digest for number, digest in now.items() if reported.get(number) != digest}

    def _held(self) -> dict[int, bytes]:
        return {number: digest for number, digest in self.now().items() if number not in self._lost}

    # ---- loads ----------------------------------------------------------------------------------------------------

    def lose(self) -> None:
        """Record that the bytes of all adapters are lost. The rank holds an adapter again after its next load."""
        self.changes += 1
        try:
            self._lost.update(self.now())
        except Exception as error:  # noqa: BLE001  (vLLM is going to sleep: an error must not stop it)
            self._counters.fault("contained_error", where="lose", error=repr(error))

    def loaded(self, one: Loaded) -> None:
        """Record the loaded adapter `one`. The connector calls this before the next step."""
        self.changes += 1
        self._lost.discard(one.number)
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
        """Return the digest of the adapter in `folder`. If the files are unreadable, count a fault and return None."""
        try:
            return self._files.read(folder)
        except Exception as error:  # noqa: BLE001  (files and paths may raise anything; the engine judges the adapter)
            self._counters.fault("adapter_not_read", path=repr(folder), why=repr(error))
            return None


def marked_broken(job: Job) -> Job:
    """Return a copy of `job` whose rows are marked as broken, so that the rank reports the job as failed."""
    rows = job.table().copy()
    rows[:, 1] = BROKEN
    return job._replace(rows=rows.tobytes())
