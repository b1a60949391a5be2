"""Checks a plan's jobs before anything is copied: their rows index this rank's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from kvpipe.messages import BROKEN, ROW_BYTES, Job, Kind, table_of

PLANNED_TO_FAIL: Final = "it was planned to fail"


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
            if job.kind not in Kind.__members__.values():
                return f"unknown kind {job.kind}"
            if len(job.rows) % ROW_BYTES:
                return "its rows are cut"
        group, slot, page, block = table_of(jobs).T
        if not len(group):
            return ""
        if (slot == BROKEN).any():
            return PLANNED_TO_FAIL
        pages = np.asarray(self.pages)
        wrong = {
            "a group": (group < 0) | (group >= len(pages)),
            "a slot": (slot < 0) | (slot >= self.slots_ready()),
            "a page": (page < 0) | (page >= pages[np.clip(group, 0, len(pages) - 1)]),
            "a block": (block < 0) | (block >= self.blocks),
        }
        return next((f"{what} is out of range" for what, where in wrong.items() if where.any()), "")
