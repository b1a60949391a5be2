"""Checks a plan's jobs before anything is copied: their rows index this rank's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from kvpipe.messages import BROKEN, ROW_BYTES, Job, Kind, table_of

PLANNED_TO_FAIL: Final = "it was planned to fail"
_KINDS: Final = frozenset(map(int, Kind))
_COLUMNS: Final = ("a group", "a slot", "a page", "a block")


class Limits(NamedTuple):
    """`pages`: per chunk, by cache group. `blocks`: number of paged blocks. `slots_ready()`: slots usable by now."""

    pages: tuple[int, ...]
    blocks: int
    slots_ready: Callable[[], int]

    def refused(self, jobs: tuple[Job, ...]) -> dict[int, str]:
        """Return why jobs cannot be carried out, by their indices in `jobs`; empty if all can be."""
        if len(jobs) > 1 and not self._why(jobs):
            return {}
        each = ((place, self._why((job,))) for place, job in enumerate(jobs))
        return {place: why for place, why in each if why}

    def _why(self, jobs: tuple[Job, ...]) -> str:
        """Return why not all of `jobs` can be carried out; "" if all can be."""
        for job in jobs:
            if job.kind not in _KINDS:
                return f"unknown kind {job.kind}"
            if len(job.rows) % ROW_BYTES:
                return "its rows are cut"
        group, slot, page, _ = table = np.ascontiguousarray(table_of(jobs).T)
        if not len(group):
            return ""
        least, most = table.min(axis=1).tolist(), table.max(axis=1).tolist()
        if least[1] <= BROKEN and (slot == BROKEN).any():
            return PLANNED_TO_FAIL
        ends = len(self.pages), self.slots_ready(), max(self.pages), self.blocks
        columns = zip(_COLUMNS, least, most, ends, strict=True)
        wrong = [what for what, low, high, end in columns if low < 0 or high >= end]
        if not wrong and len(self.pages) > 1 and (page >= np.asarray(self.pages)[group]).any():
            wrong = ["a page"]
        return f"{wrong[0]} is out of range" if wrong else ""
