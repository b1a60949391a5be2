"""The messages of one step: the plan that the scheduler side sends to the workers, and the workers' report.

A job's `rows` are little-endian int32 quadruples (group, slot, page, block) of 16 bytes, one per block. A row copies
block `block` of the group's paged cache to or from page `page` of slot `slot`, in every layer of the group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

ROW_BYTES = 16
BROKEN = -1
"""A slot number that no rank accepts. A job with such a row is reported as failed by all ranks."""


class Kind(IntEnum):
    """A job's kind: a save, a load that the forward waits for (sync), or a load that only its request waits for."""

    SAVE = 0
    LOAD_SYNC = 1
    LOAD_ASYNC = 2


SAVE, LOAD_SYNC, LOAD_ASYNC = Kind
"""The members of `Kind`, for loops over jobs: Python 3.11 takes 0.07 us to read an attribute of an enumeration."""


class Job(NamedTuple):
    """One save or load of one request in one step. `kind` is a `Kind`.

    `epoch` is the number of the request's admission. With a node's memory, `stamps` has two words of 8 bytes for each
    of the job's slots. These words are the slot, and the generation of the slot while the job's chunk can be found.
    """

    id: int
    kind: int
    request: str
    epoch: int
    rows: bytes
    stamps: bytes = b""

    def table(self) -> npt.NDArray[np.int32]:
        """Return the rows as an int32 array of shape (n, 4): group, slot, page, block."""
        return np.frombuffer(self.rows, dtype="<i4").reshape(-1, 4)

    def blocks(self) -> set[int]:
        """Return the ids of the paged blocks that the job reads or writes."""
        return set(self.table()[:, 3].tolist())


def rows_of(group: int, slot: int, pages: Sequence[int], blocks: Sequence[int]) -> list[int]:
    """Return the rows between pages of one slot and as many blocks, as a flat list of numbers."""
    rows = [group, slot, 0, 0] * len(blocks)
    rows[2::4], rows[3::4] = pages, blocks
    return rows


def table_of(jobs: Iterable[Job]) -> npt.NDArray[np.int32]:
    """Return the rows of all `jobs`, in their order, as an int32 array of shape (n, 4): group, slot, page, block."""
    return np.frombuffer(b"".join([job.rows for job in jobs]), dtype="<i4").reshape(-1, 4)


class TierOrder(NamedTuple):
    """An order to copy the first `units` units of one chunk between its slot and a tier, on every rank.

    A tier order is not bound to the step. With `stores`, the chunk is copied to the tier, otherwise from the tier.
    `tier` is the tier's index in the configuration. `chunk` is the chunk's name in the tier. `split` is the number of
    the chunk's parts in the tier, or 0 if each rank has a part of its own (`kvpipe.tiers.parts`). `space` is the
    chunk's namespace in the tier. If `space` is empty, the namespace of the plan is used. `stamp` is explained in
    `Job.stamps`.
    """

    id: int
    stores: bool
    tier: int
    slot: int
    group: int
    units: int
    chunk: bytes
    split: int = 0
    space: str = ""
    stamp: bytes = b""


class Claim(NamedTuple):
    """The claim that the KV of job `job` belongs to LoRA adapter `adapter` (vLLM's number) with the digest `digest`.

    A rank fails the job if it holds other bytes under `adapter`, or has held other bytes since step `since_step`. If
    `job` is 0, the rank only reports its digest for `adapter`.
    """

    job: int
    adapter: int
    digest: bytes
    since_step: int


class StepPlan(NamedTuple):
    """One engine step's jobs and tier orders.

    `space` is the namespace of the orders' chunks. If `question` is not 0, every rank reports the digest of its weights
    under this number, before any token is computed. `claims` has one claim for each job of a request with an adapter.
    If `wait_ms` is not 0, no token is computed, and a rank with asynchronous loads waits at most `wait_ms` milliseconds
    for a load to land. `computes` says whether any token is computed. In a step without tokens no layer calls a hook.
    This step and earlier steps have used only slots [0, used). `pool` names the shared memory of several engines to
    whose slots the jobs refer. `pool` is b"" if the ranks have pools of their own.
    """

    step: int
    jobs: tuple[Job, ...] = ()
    orders: tuple[TierOrder, ...] = ()
    space: str = ""
    question: int = 0
    claims: tuple[Claim, ...] = ()
    wait_ms: int = 0
    computes: bool = True
    used: int = 0
    pool: bytes = b""


EMPTY_PLAN = StepPlan(0)


class Outcome(NamedTuple):
    """The result of one job on one rank. If the job has failed, `ok` is False and `why` is the reason."""

    job: Job
    ok: bool
    why: str


class Tally(NamedTuple):
    """`ok` is the number of ranks that have carried out a job or tier order.

    `bad` is the number of ranks that failed to do so.
    """

    ok: int
    bad: int


ONE_OK, ONE_BAD = Tally(1, 0), Tally(0, 1)
"""The tallies of one rank that has finished, or has failed, a job."""


@dataclass(slots=True)
class Report:
    """The sum of the reports that the ranks send with a step's output. Every change is reported only once."""

    tallies: dict[int, Tally] = field(default_factory=dict)
    """The tallies of jobs and tier orders that have ended, by their ids."""
    lost: bool = False
    """Whether the loop thread of a rank has ended, so that this rank can neither load nor save any more."""
    rate: float = 0.0
    """The rate of loads on the slowest rank, in bytes per second, or 0 if no rank has loaded yet."""
    tier_rates: dict[int, float] = field(default_factory=dict)
    """By tier: the rate of reads in bytes per second, on the slowest rank that has read the tier."""
    unreadable: dict[int, frozenset[int]] = field(default_factory=dict)
    """By rank: the indices of the tiers that the rank does not read now. Ranks without a change are left out."""
    ready: dict[int, int] = field(default_factory=dict)
    """By rank: how many of the rank's slots, from the first on, may be used. Ranks without a change are left out."""
    weights: dict[int, tuple[int, str]] = field(default_factory=dict)
    """By rank, if a plan had a question: (`StepPlan.question`, digest of the rank's weights, or "" if unknown)."""
    adapters: dict[int, dict[int, bytes]] = field(default_factory=dict)
    """By rank: the changed adapters. By vLLM's number of an adapter: its digest, or b"" if the adapter was removed."""
    step: int = 0
    """The step in which the ranks held the adapters in `adapters`."""
    damaged: dict[int, int] = field(default_factory=dict)
    """By slot of a node's memory: the generation of a chunk whose bytes have changed. Its slot must not be used."""

    def add(self, other: Report) -> None:
        """Add another rank's report of the same step to this report."""
        self.lost |= other.lost
        self.unreadable |= other.unreadable
        self.ready |= other.ready
        self.weights |= other.weights
        self.adapters |= other.adapters
        self.damaged |= other.damaged
        self.step = min(self.step, other.step)
        self.rate = min(self.rate or other.rate, other.rate or self.rate)
        for tier, rate in other.tier_rates.items():
            self.tier_rates[tier] = min(rate, self.tier_rates.get(tier, rate))
        for job, tally in other.tallies.items():
            mine = self.tallies.get(job, Tally(0, 0))
            self.tallies[job] = Tally(mine.ok + tally.ok, mine.bad + tally.bad)
