"""What the scheduler side sends the workers in one step, and what they report. Small on the wire, by design.

A job's `rows` are little-endian int32 quadruples (group, slot, page, block): block `block` of the group's paged
cache, in every layer of the group, to or from page `page` of slot `slot`. That is 16 bytes per block.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

ROW_BYTES = 16
BROKEN = -1
"""A slot that no rank accepts: a job with such a row is reported as failed by all of them."""


class Kind(IntEnum):
    """What a job does."""

    SAVE = 0
    LOAD_SYNC = 1
    LOAD_ASYNC = 2


SAVE, LOAD_SYNC, LOAD_ASYNC = Kind
"""The members of `Kind`, for loops over jobs: Python 3.11 takes 0.07 us to find one by its name."""


class Job(NamedTuple):
    """One save or load of one request in one step. `epoch`: the number of the request's admission."""

    id: int
    kind: int
    request: str
    epoch: int
    rows: bytes

    def table(self) -> npt.NDArray[np.int32]:
        """Return the rows as an (n, 4) array of group, slot, page, block."""
        return np.frombuffer(self.rows, dtype="<i4").reshape(-1, 4)

    def blocks(self) -> set[int]:
        """Return the ids of the paged blocks that the job touches."""
        return set(self.table()[:, 3].tolist())


def table_of(jobs: Iterable[Job]) -> npt.NDArray[np.int32]:
    """Return the rows of all `jobs`, whose rows are whole, one job's after the other's."""
    return np.frombuffer(b"".join([job.rows for job in jobs]), dtype="<i4").reshape(-1, 4)


class TierOrder(NamedTuple):
    """Carry the first `units` units of one chunk between its slot and a tier, on every rank. Not bound to the step.

    `stores`: to the tier, else from it. `tier`: its place in the configuration. `chunk`: its name there.
    `split`: how many parts it has there; 0: one of each rank's own (`kvpipe.tiers.parts`).
    `space`: its namespace there, where that is not the plan's.
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
    """Job `job` is of KV computed with a LoRA adapter, `adapter` by vLLM's number, whose bytes come to `digest`.

    A rank that holds other bytes under that number fails the job; and if it has held others since `since_step`.
    Without a job (0) it is a question: the rank reports what it holds under that number.
    """

    job: int
    adapter: int
    digest: bytes
    since_step: int


class StepPlan(NamedTuple):
    """One engine step's jobs, and what is to be carried besides. A step without work has none.

    `space`: the namespace of the orders' chunks. `question`: the number under which ranks report which weights they
    have, before anything is computed; 0: they are not asked. `claims`: of the jobs of requests with adapters.
    `wait_ms`: nothing is computed in it, and a rank with asynchronous loads under way waits so long for one to land.
    `computes`: whether anything is: else no layer calls a hook.
    """

    step: int
    jobs: tuple[Job, ...] = ()
    orders: tuple[TierOrder, ...] = ()
    space: str = ""
    question: int = 0
    claims: tuple[Claim, ...] = ()
    wait_ms: int = 0
    computes: bool = True


EMPTY_PLAN = StepPlan(0)


class Outcome(NamedTuple):
    """How one job ended on one rank."""

    job: Job
    ok: bool
    why: str


class Tally(NamedTuple):
    """How many ranks finished a job or an order, and how many failed it."""

    ok: int
    bad: int


ONE_OK, ONE_BAD = Tally(1, 0), Tally(0, 1)
"""What one rank reports."""


@dataclass(slots=True)
class Report:
    """What ranks report with a step's output, added up over those that have reported. Each thing is reported once."""

    tallies: dict[int, Tally] = field(default_factory=dict)
    """Tallies of jobs and orders that have ended, by their numbers."""
    lost: bool = False
    """A rank's loop thread has ended: it can neither load nor save any more."""
    rate: float = 0.0
    """Bytes per second of the slowest rank's loads; 0: none has loaded yet."""
    unreadable: dict[int, frozenset[int]] = field(default_factory=dict)
    """By rank, when it has changed: the tiers that it does not read at present."""
    ready: dict[int, int] = field(default_factory=dict)
    """By rank, if that is new: how many of its slots, from the first on, may be used."""
    weights: dict[int, tuple[int, str]] = field(default_factory=dict)
    """By rank: the question that asked for its weights, and their digest; empty: it is not known."""
    adapters: dict[int, dict[int, bytes]] = field(default_factory=dict)
    """By rank, of adapters that it holds otherwise than before: digests by number; empty: not held any more."""
    step: int = 0
    """In which `adapters` were held."""

    def add(self, other: Report) -> None:
        """Add another rank's report of the same step."""
        self.lost |= other.lost
        self.unreadable |= other.unreadable
        self.ready |= other.ready
        self.weights |= other.weights
        self.adapters |= other.adapters
        self.step = min(self.step, other.step)
        self.rate = min(self.rate or other.rate, other.rate or self.rate)
        for job, tally in other.tallies.items():
            mine = self.tallies.get(job, Tally(0, 0))
            self.tallies[job] = Tally(mine.ok + tally.ok, mine.bad + tally.bad)
