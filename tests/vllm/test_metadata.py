"""Metadata that the scheduler's side sends arrives unchanged."""

from __future__ import annotations

import pickle

import pytest

from kvpipe.connectors.vllm.metadata import PlanMetadata
from kvpipe.protocol.messages import Claim, Job, StepPlan, TierOrder

_JOB = Job(1, 0, "r", 1, b"\0" * 16)


@pytest.mark.parametrize(
    "plan",
    [
        StepPlan(1),
        StepPlan(2, (_JOB,)),
        StepPlan(3, (_JOB,), computes=False),
        StepPlan(4, (), (TierOrder(2, True, 0, 1, 0, 4, b"name"),), "space"),
        StepPlan(5, (_JOB,), (), "", 7, (Claim(1, 2, b"digest", 3),), wait_ms=4),
    ],
    ids=lambda plan: str(plan.step),
)
def test_plan_arrives_complete_in_few_bytes(plan: StepPlan) -> None:
    """All fields of the plan arrive, in few bytes, and the message names only one class of kvpipe."""
    assert pickle.loads(pickle.dumps(PlanMetadata(plan))).plan == plan  # noqa: S301
