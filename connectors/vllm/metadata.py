"""The messages between the connector's two roles: the step's plan, and the ranks' reports."""

from __future__ import annotations

from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvpipe.protocol.messages import Claim, Job, Report, StepPlan, TierOrder


class PlanMetadata(KVConnectorMetadata):
    """A `StepPlan`.

    The plan is pickled as plain tuples, so that class and field names are not repeated for each job.
    """

    __slots__ = ("plan",)

    def __init__(self, plan: StepPlan) -> None:
        """Wrap `plan`."""
        self.plan = plan

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the plan as builtin tuples. The fields that most plans do not use are left out if none is set."""
        step, jobs, orders, space, question, claims, wait_ms, computes, used, pool = self.plan
        packed = (step, _plain(jobs), used)
        if orders or question or claims or wait_ms or pool or (jobs and not computes):
            return _unpack, (*packed, _plain(orders), space, question, _plain(claims), wait_ms, computes, pool)
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
    computes: bool = True,  # noqa: FBT001, FBT002  (positional, as `__reduce__` has packed it)
    pool: bytes = b"",
) -> PlanMetadata:
    made = tuple(Job(*job) for job in jobs), tuple(TierOrder(*order) for order in orders)
    held = tuple(Claim(*claim) for claim in claims)
    return PlanMetadata(StepPlan(step, *made, space, question, held, wait_ms, computes, used, pool))


class Introduction(NamedTuple):
    """A rank's first report: the facts on which its chunks depend. The rank sends the report with its first step.

    `rank` is the rank's number in the engine. `digest` is the digest of everything that the rank's bytes depend on, or
    "" without tiers. `weights` is the digest of the weights, or "" if unknown. `slots` is the number of slots
    of the rank's pool, ready or not. `heads` has the KV heads of each group, see `kvpipe.tiers.parts`. `common` is a
    digest that does not depend on the number of ranks, or "". `numerics` is a digest of how the rank computes, see
    `numerics_digest`. `pool` is the token of the node's memory that the rank uses, or b"" with a private
    pool.
    """

    rank: int
    digest: str
    weights: str
    slots: int
    heads: tuple[int, ...] = ()
    common: str = ""
    numerics: str = ""
    pool: bytes = b""


class ReportMetadata(KVConnectorWorkerMetadata):
    """A `Report` and the introductions of ranks. vLLM aggregates these objects over the ranks.

    Introductions do not use vLLM's handshake, because `MultiConnector` passes on the handshake of only one connector.
    `MultiConnector` keeps worker metadata separate for each connector.
    """

    def __init__(self, report: Report, introductions: tuple[Introduction, ...] = ()) -> None:
        """Take ownership of `report`, because `aggregate` changes it."""
        self.report, self.introductions = report, introductions

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Add another rank's report and introductions to this object, and return this object."""
        if isinstance(other, ReportMetadata):
            self.report.add(other.report)
            self.introductions += other.introductions
        return self
