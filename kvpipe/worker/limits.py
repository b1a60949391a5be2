"""Checks the jobs of a plan before any copy, because the jobs' rows are indices into this rank's memory."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from kvpipe.protocol.messages import BROKEN, ROW_BYTES, Job, Kind, table_of

PLANNED_TO_FAIL: Final = "it was planned to fail"
FEW_ROWS: Final = 256
_KINDS: Final = frozenset(map(int, Kind))
_COLUMNS: Final = ("a group", "a slot", "a page", "a block")


class Limits(NamedTuple):
    """The limits of a job's rows. `slots_ready()` returns the number of slots that may be used by now.

    `pages` has the number of pages per chunk by cache group. `blocks` is the number of paged blocks.
    """

    pages: tuple[int, ...]
    blocks: int
    slots_ready: Callable[[], int]

    def refused(self, jobs: tuple[Job, ...]) -> dict[int, str]:
        """Return the reason for each job that cannot be carried out, by the job's index in `jobs`."""
        if len(jobs) > 1 and not self._why(jobs):
            return {}
        each = ((place, self._why((job,))) for place, job in enumerate(jobs))
        return {place: why for place, why in each if why}

    def _why(self, jobs: tuple[Job, ...]) -> str:
        """Return why some of `jobs` cannot be carried out. Return "" if all of `jobs` can be carried out."""
        for job in jobs:
            if job.kind not in _KINDS:
                return f"unknown kind {job.kind}"
            if len(job.rows) % ROW_BYTES:
                return "its rows are cut"
        count = sum(len(job.rows) for job in jobs) // ROW_BYTES
        if not count:
            return ""
        one_group = len(self.pages) == 1
        if one_group and count <= FEW_ROWS:
            least, most = _extremes(jobs)
            if least[1] > BROKEN:
                return self._wrong(least, most)
        group, slot, page, _ = table = np.ascontiguousarray(table_of(jobs).T)
        least, most = table.min(axis=1).tolist(), table.max(axis=1).tolist()
        if least[1] <= BROKEN and (slot == BROKEN).any():
            return PLANNED_TO_FAIL
        wrong = self._wrong(least, most)
        if not wrong and not one_group and (page >= np.asarray(self.pages)[group]).any():
            wrong = "a page is out of range"
        return wrong

    def _wrong(self, least: list[int], most: list[int]) -> str:
        """Return why rows whose columns have values from `least` to `most` cannot be carried out, or "" if they can."""
        ends = len(self.pages), self.slots_ready(), max(self.pages), self.blocks
        columns = zip(_COLUMNS, least, most, ends, strict=True)
        wrong = next((what for what, low, high, end in columns if low < 0 or high >= end), "")
        return f"{wrong} is out of range" if wrong else ""


def _extremes(jobs: tuple[Job, ...]) -> tuple[list[int], list[int]]:
    """Return the least and the greatest value in each column of the rows. For few rows this is faster than numpy."""
    numbers = array("i", b"".join([job.rows for job in jobs]))
    columns = [numbers[at :: len(_COLUMNS)] for at in range(len(_COLUMNS))]
    return [min(one) for one in columns], [max(one) for one in columns]
