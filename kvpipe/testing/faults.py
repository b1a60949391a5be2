"""Transfer engines that fail on demand, and copy for real otherwise."""

from __future__ import annotations

from collections.abc import Callable

from kvpipe.transfer.base import CopyPlan, Direction
from kvpipe.transfer.cpu import CpuEngine

Fail = Callable[[Direction, bool, int], bool]


class FaultyCpuEngine(CpuEngine):
    """Asks `fail(direction, is_every_second_job, layer)` for each job and layer; a failed load leaves garbage."""

    def __init__(self, threads: int, fail: Fail) -> None:
        """`fail` decides; jobs are numbered per direction in the order in which they are first seen."""
        super().__init__(threads)
        self._fail = fail
        self._seen: dict[Direction, dict[int, int]] = {Direction.SAVE: {}, Direction.LOAD: {}}

    def copy_layer(self, plan: CopyPlan, layer: int) -> frozenset[int]:
        """Copy, then spoil the bytes of the jobs that fail."""
        super().copy_layer(plan, layer)
        seen = self._seen[plan.direction]
        failed = frozenset(
            job.id
            for job in plan.jobs
            if self._fail(plan.direction, seen.setdefault(job.id, len(seen)) % 2 == 1, layer)
        )
        if plan.direction is Direction.LOAD:
            group, _ = self._geometry.layers[layer]
            for job, _slot, _page, block, pages in plan.runs[group].tolist():
                if job in failed:
                    self._views[layer].tensor[block : block + pages] = 0x7F  # large floats: no answer survives them
        return failed
