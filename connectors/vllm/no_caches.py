"""What the connector calls while it has no worker side: before vLLM has registered the caches, and beside a scheduler.

VLLM makes a rank's connector before it allocates the caches, and registers them before the first step. Warm-up runs may
call the hooks of layers meanwhile, without a step. No plan has jobs before every rank has reported its slots, and for
that it must have caches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpipe.statemachine.core import Cursor
from kvpipe.statemachine.step import STEP

if TYPE_CHECKING:
    from kvpipe.messages import Report, StepPlan
    from kvpipe.trace.log import Counters
    from kvpipe.trace.totals import Totals


class NoCaches:
    """In a `WorkerSide`'s place: nothing can be copied. Every call is allowed, and none does anything."""

    def __init__(self, counters: Counters) -> None:
        """`counters`: of the connector."""
        self._counters = counters
        self.step = Cursor(STEP.compile(), "step")  # idle for ever

    def handle_preemptions(self) -> None:
        """No save reads any block."""

    def bind(self, plan: StepPlan) -> None:
        """A step begins. One with jobs is a bug of whoever has sent it: it is counted, and nobody carries them out."""
        if plan.jobs or plan.orders:
            self._counters.fault("plan_without_caches", jobs=len(plan.jobs), orders=len(plan.orders))

    def start_loads(self, context: object) -> None:
        """There are none."""

    def wait_layer(self, name: str) -> None:
        """Nothing is loaded."""

    def save_layer(self, name: str) -> None:
        """Nothing is saved."""

    def end_step(self) -> None:
        """Nothing was submitted."""

    def unbind(self) -> None:
        """The step is over."""

    def collect(self) -> tuple[set[str], set[str]]:
        """Return no requests: none has loaded, and none has failed to."""
        return set(), set()

    def take_bad_blocks(self) -> set[int]:
        """Return no blocks."""
        return set()

    def take_report(self) -> Report | None:
        """Return nothing to report."""
        return None

    def totals(self) -> Totals:
        """Return no metrics."""
        return {}

    def shutdown(self) -> None:
        """There is no thread."""
