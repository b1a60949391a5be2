"""Stands in for the worker side before vLLM has registered the caches.

vLLM makes a rank's connector before it allocates the caches, and registers the caches before the first step. Before the
caches are registered, warm-up runs may call the hooks of layers without a step. A plan has no jobs until every rank has
reported its slots, and a rank has slots only after the rank has caches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpipe.statemachine.core import Cursor
from kvpipe.statemachine.step import STEP

if TYPE_CHECKING:
    from kvpipe.protocol.messages import Report, StepPlan
    from kvpipe.tiers.totals import Totals
    from kvpipe.trace.log import Counters


class NoCaches:
    """Stands in for a `WorkerSide` and copies nothing. Every call is allowed and has no effect."""

    def __init__(self, counters: Counters) -> None:
        """Keep the connector's `counters`."""
        self._counters = counters
        self.step = Cursor(STEP.compile(), "step")  # always idle

    def release(self) -> None:
        """Do nothing, because no copy is in flight."""

    def restore(self) -> None:
        """Do nothing, because there are no caches to restore."""

    def handle_preemptions(self) -> None:
        """Do nothing, because no save reads any block."""

    def bind(self, plan: StepPlan) -> None:
        """Begin a step.

        A plan with jobs is a bug of the scheduler. Such a plan counts as a fault, and its jobs do not run.
        """
        if plan.jobs or plan.orders:
            self._counters.fault("plan_without_caches", jobs=len(plan.jobs), orders=len(plan.orders))

    def start_loads(self, context: object) -> None:
        """Do nothing, because the plan has no loads."""

    def wait_layer(self, name: str) -> None:
        """Do nothing, because no load is in flight."""

    def save_layer(self, name: str) -> None:
        """Do nothing, because the plan has no saves."""

    def end_step(self) -> None:
        """Do nothing, because no save was submitted."""

    def unbind(self) -> None:
        """Do nothing at the end of a step."""

    def collect(self) -> tuple[set[str], set[str]]:
        """Return two empty sets: no request's load has ended, and no request's load has failed."""
        return set(), set()

    def take_bad_blocks(self, *, late: bool = True) -> set[int]:  # noqa: ARG002  (as of `WorkerSide`)
        """Return no blocks."""
        return set()

    def take_report(self) -> Report | None:
        """Return None, because no job has ended."""
        return None

    def puts_off_metrics(self) -> bool:
        """Return False, because no later step is known."""
        return False

    def totals(self) -> Totals:
        """Return no metrics."""
        return {}

    def shutdown(self) -> None:
        """Do nothing, because there is no thread to end."""
