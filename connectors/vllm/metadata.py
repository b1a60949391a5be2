"""What travels between the two sides of the connector: the step's plan out, the ranks' reports back."""

from __future__ import annotations

from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvpipe.plan import Claim, Job, Order, StepPlan


class PlanMetadata(KVConnectorMetadata):
    """A `StepPlan`, pickled as plain tuples: names of classes and fields do not travel once per job."""

    __slots__ = ("plan",)

    def __init__(self, plan: StepPlan) -> None:
        """Wrap `plan`."""
        self.plan = plan

    def __reduce__(self) -> tuple[Any, ...]:
        """Flatten to builtin tuples."""
        step, jobs, orders, space, question, claims = self.plan
        packed = (step, _plain(jobs))
        if orders or question or claims:
            return _unpack, (*packed, _plain(orders), space, question, _plain(claims))
        return _unpack, packed


_Plain = tuple[tuple[Any, ...], ...]


def _plain(rows: tuple[tuple[Any, ...], ...]) -> _Plain:
    return tuple(tuple(row) for row in rows)


def _unpack(
    step: int, jobs: _Plain, orders: _Plain = (), space: str = "", question: int = 0, claims: _Plain = ()
) -> PlanMetadata:
    made = tuple(Job(*job) for job in jobs), tuple(Order(*order) for order in orders)
    return PlanMetadata(StepPlan(step, *made, space, question, tuple(Claim(*claim) for claim in claims)))


class LayoutMetadata(KVConnectorHandshakeMetadata):
    """What one rank says when its caches are there: what its chunks depend on, as digests, and its `ready` slots."""

    def __init__(self, rank: int, digest: str, ready: int = 0, weights: str = "") -> None:
        """`rank`: of the engine's ranks. `digest`: empty without tiers. `weights`: as loaded; empty: it cannot say."""
        self.rank, self.digest, self.ready, self.weights = rank, digest, ready, weights


class Tally(NamedTuple):
    """How many ranks finished a job, and how many failed it."""

    ok: int
    bad: int


class ReportMetadata(KVConnectorWorkerMetadata):
    """Job outcomes of one step, per job id, added up over the ranks that reported. `lost`: a rank's tier is.

    `rate`: bytes per second of the slowest rank's loads; 0: none has loaded yet.
    """

    def __init__(
        self,
        tallies: dict[int, Tally],
        *,
        lost: bool = False,
        rate: float = 0.0,
        unreadable: dict[int, frozenset[int]] | None = None,
        ready: dict[int, int] | None = None,
        weights: dict[int, tuple[int, str]] | None = None,
        adapters: dict[int, dict[int, bytes]] | None = None,
    ) -> None:
        """`tallies` is owned by the report. By rank, if that is new: tiers that it leaves alone, its ready slots.

        `weights`: by rank, which weights it has, and the question that asked for it. `adapters`: by rank, digests by
        number, empty of those that it does not hold any more.
        """
        self.tallies, self.lost, self.rate, self.unreadable = tallies, lost, rate, unreadable or {}
        self.ready, self.weights, self.adapters = ready or {}, weights or {}, adapters or {}

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Add another rank's report."""
        if isinstance(other, ReportMetadata):
            self.lost |= other.lost
            self.unreadable |= other.unreadable
            self.ready |= other.ready
            self.weights |= other.weights
            self.adapters |= other.adapters
            self.rate = min(self.rate or other.rate, other.rate or self.rate)
            for job, tally in other.tallies.items():
                mine = self.tallies.get(job, Tally(0, 0))
                self.tallies[job] = Tally(mine.ok + tally.ok, mine.bad + tally.bad)
        return self
