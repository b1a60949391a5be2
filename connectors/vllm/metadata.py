"""The messages between the two sides of the connector: the step's plan, and the ranks' reports."""

from __future__ import annotations

from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvpipe.messages import Claim, Job, Report, StepPlan, TierOrder


class PlanMetadata(KVConnectorMetadata):
    """A `StepPlan`, pickled as plain tuples, so that names of classes and fields are not repeated for each job."""

    __slots__ = ("plan",)

    def __init__(self, plan: StepPlan) -> None:
        """Wrap `plan`."""
        self.plan = plan

    def __reduce__(self) -> tuple[Any, ...]:
        """Flatten to builtin tuples."""
        step, jobs, orders, space, question, claims, wait_ms, computes, used = self.plan
        packed = (step, _plain(jobs), used)
        if orders or question or claims or wait_ms or (jobs and not computes):
            return _unpack, (*packed, _plain(orders), space, question, _plain(claims), wait_ms, computes)
        return _unpack, packed


_Plain = tuple[tuple[Any, ...], ...]


def _plain(rows: tuple[tuple[Any, ...], ...]) -> _Plain:
    return tuple(tuple(row) for row in rows)


def _unpack(
    step: int,
    jobs: _Plain,
    used: int,
    orders: _Plain = (),
    space: str = "",
    question: int = 0,
    claims: _Plain = (),
    wait_ms: int = 0,
    computes: bool = True,  # noqa: FBT001, FBT002  (as it was packed)
) -> PlanMetadata:
    made = tuple(Job(*job) for job in jobs), tuple(TierOrder(*order) for order in orders)
    held = tuple(Claim(*claim) for claim in claims)
    return PlanMetadata(StepPlan(step, *made, space, question, held, wait_ms, computes, used))


class Introduction(NamedTuple):
    """A rank's first report: what its chunks depend on. It comes with the rank's first step.

    `rank`: its number in the engine. `digest`: of everything that the rank's bytes depend on; "" without tiers.
    `weights`: their digest; "": not known. `slots`: of the rank's pool, ready or not. `heads`: of each group, see
    `kvpipe.tiers.parts`. `common`: a digest that does not depend on the number of ranks; "": there is none.
    `numerics`: a digest of how the rank computes, see `numerics.report`.
    """

    rank: int
    digest: str
    weights: str
    slots: int
    heads: tuple[int, ...] = ()
    common: str = ""
    numerics: str = ""


class ReportMetadata(KVConnectorWorkerMetadata):
    """A `Report` and the introductions of ranks. vLLM adds them up over the ranks.

    They do not come with vLLM's handshake: `MultiConnector` passes on one connector's handshake only, but keeps this
    metadata apart by connector.
    """

    def __init__(self, report: Report, introductions: tuple[Introduction, ...] = ()) -> None:
        """`report` is owned by this object."""
        self.report, self.introductions = report, introductions

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Add another rank's report."""
        if isinstance(other, ReportMetadata):
            self.report.add(other.report)
            self.introductions += other.introductions
        return self
