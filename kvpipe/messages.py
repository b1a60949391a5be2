"""What the scheduler side sends the workers in one step, and what they report.

A job's `rows` are little-endian int32 quadruples (group, slot, page, block): block `block` of the group's paged cache
is copied to or from page `page` of slot `slot`, in every layer of the group. That is 16 bytes per block.
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
"""A slot that no rank accepts: a job with such a row is reported as failed by all of them."""


class Kind(IntEnum):
    """What a job does: save, or load with the forward waiting (sync) or the request waiting (async)."""

    SAVE = 0
    LOAD_SYNC = 1
    LOAD_ASYNC = 2


SAVE, LOAD_SYNC, LOAD_ASYNC = Kind
"""The members of `Kind`, for loops over jobs: an attribute access on an enumeration takes Python 3.11 0.07 us."""


class Job(NamedTuple):
    """One save or load of one request in one step. `kind`: a `Kind`. `epoch`: the number of the request's admission."""

    id: int
    kind: int
    request: str
    epoch: int
    rows: bytes

    def table(self) -> npt.NDArray[np.int32]:
        """Return the rows as an int32 array of shape (n, 4): group, slot, page, block."""
        return np.frombuffer(self.rows, dtype="<i4").reshape(-1, 4)

    def blocks(self) -> set[int]:
        """Return the ids of the paged blocks that the job touches."""
        return set(self.table()[:, 3].tolist())


def rows_of(group: int, slot: int, pages: Sequence[int], blocks: Sequence[int]) -> list[int]:
    """Return the rows between pages of one slot and as many blocks, one behind the other as in `Job.rows`."""
    rows = [group, slot, 0, 0] * len(blocks)
    rows[2::4], rows[3::4] = pages, blocks
    return rows


def table_of(jobs: Iterable[Job]) -> npt.NDArray[np.int32]:
    """Return the rows of all `jobs`, in their order, as an int32 array of shape (n, 4): group, slot, page, block."""
    return np.frombuffer(b"".join([job.rows for job in jobs]), dtype="<i4").reshape(-1, 4)


class TierOrder(NamedTuple):
    """Carry the first `units` units of one chunk between its slot and a tier, on every rank. Not bound to the step.

    `stores`: to the tier, else from it. `tier`: its index in the configuration. `chunk`: the chunk's name in the tier.
    `split`: the number of parts it has there; 0: each rank has a part of its own (`kvpipe.tiers.parts`).
    `space`: its namespace there; empty: the plan's.
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


class Claim(NamedTuple):
    """The KV of job `job` belongs to the LoRA adapter with vLLM's number `adapter` and the digest `digest`.

    A rank fails the job if it holds other bytes under that number, or has held others since step `since_step`.
    If `job` is 0, the rank only reports the digest that it holds under that number.
    """

    job: int
    adapter: int
    digest: bytes
    since_step: int


class StepPlan(NamedTuple):
    """One engine step's jobs and tier orders.

    `space`: the namespace of the orders' chunks. `question`: if not 0, every rank reports the digest of its weights
    under this number, before anything is computed. `claims`: one for each job of a request with an adapter.
    `wait_ms`: if not 0, nothing is computed, and a rank with asynchronous loads waits so long for one to land.
    `computes`: whether any token is computed; if not, no layer calls a hook. `used`: slots [0, used) have been handed
    out so far, to this step or an earlier one.
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


EMPTY_PLAN = StepPlan(0)


class Outcome(NamedTuple):
    """How one job ended on one rank. `why`: the reason if it has failed (not `ok`)."""

    job: Job
    ok: bool
    why: str


class Tally(NamedTuple):
    """How many ranks have finished a job or a tier order (`ok`), and how many have failed it (`bad`)."""

    ok: int
    bad: int


ONE_OK, ONE_BAD = Tally(1, 0), Tally(0, 1)
"""The tally of one rank."""


@dataclass(slots=True)
class Report:
    """What ranks report with a step's output, added up over the ranks. Everything is reported once, when it is new."""

    tallies: dict[int, Tally] = field(default_factory=dict)
    """Tallies of jobs and tier orders that have ended, by their ids."""
    lost: bool = False
    """A rank's loop thread has ended: it can neither load nor save any more."""
    rate: float = 0.0
    """Bytes per second of loads on the slowest rank; 0: no rank has loaded yet."""
    tier_rates: dict[int, float] = field(default_factory=dict)
    """By tier: bytes per second of its reads on the slowest rank of those that have read it."""
    unreadable: dict[int, frozenset[int]] = field(default_factory=dict)
    """By rank, if it has changed: the indices of the tiers that it does not read at present."""
    ready: dict[int, int] = field(default_factory=dict)
    """By rank, if it has changed: how many of its slots, from the first on, may be used."""
    weights: dict[int, tuple[int, str]] = field(default_factory=dict)
    """By rank, if a plan asked for it: (`StepPlan.question`, the digest of its weights); digest "": not known."""
    adapters: dict[int, dict[int, bytes]] = field(default_factory=dict)
    """By rank, of adapters that have changed there: digest by vLLM's number; b"": not held any more."""
    step: int = 0
    """The step in which `adapters` were held."""

    def add(self, other: Report) -> None:
        """Add another rank's report of the same step to this one."""
        self.lost |= other.lost
        self.unreadable |= other.unreadable
        self.ready |= other.ready
        self.weights |= other.weights
        self.adapters |= other.adapters
        self.step = min(self.step, other.step)
        self.rate = min(self.rate or other.rate, other.rate or self.rate)
        for tier, rate in other.tier_rates.items():
            self.tier_rates[tier] = min(rate, self.tier_rates.get(tier, rate))
        for job, tally in other.tallies.items():
            mine = self.tallies.get(job, Tally(0, 0))
            self.tallies[job] = Tally(mine.ok + tally.ok, mine.bad + tally.bad)
