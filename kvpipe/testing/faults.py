"""A transfer engine that fails copies on demand, and copies real bytes otherwise."""

from __future__ import annotations

from collections.abc import Callable

from kvpipe.transfer.base import CopyPlan, Direction
from kvpipe.transfer.cpu import CpuEngine

Fail = Callable[[Direction, bool, int], bool]


class FaultyCpuEngine(CpuEngine):
    """Calls `fail(direction, is_every_second_job, layer)` for each job and layer. A failed load leaves garbage."""

    def __init__(self, threads: int, fail: Fail) -> None:
        """`fail` returns whether a job fails. Every second job of a direction, by first use, is marked."""
        super().__init__(threads)
        self._fail = fail
        self._seen: dict[Direction, dict[int, int]] = {Direction.SAVE: {}, Direction.LOAD: {}}

    def copy_layer(self, plan: CopyPlan, layer: int) -> frozenset[int]:
        """Copy a layer, then overwrite the blocks of loads that fail."""
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
                    self._views[layer].tensor[block : block + pages] = 0x7F  # large floats, which change every answer
        return failed
