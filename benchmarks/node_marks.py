"""Measures the cost of the marks of shared slots: saves and loads of chunks of 8 MiB with and without marks.

Each round makes one save and one load in each of three ways, one after the other: without marks, with generations
(`pool: node`), and with generations and digests (`pool_checksums`). A real rank makes the copies.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch

from benchmarks.node_copies import BLOCKS, PAGES, geometry
from benchmarks.report import Figure
from kvpipe.config.settings import load_settings
from kvpipe.node.attach import node_slot_bytes, rank_slots
from kvpipe.node.layout import READY
from kvpipe.node.replica import stamp_of
from kvpipe.node.segment import Segment, allocate, create
from kvpipe.protocol.messages import Job, Kind, StepPlan, rows_of
from kvpipe.transfer.cpu import CpuEngine
from kvpipe.worker.caches import Hooks, PagedCaches
from kvpipe.worker.context import RankContext
from kvpipe.worker.side import WorkerSide

SLOTS: Final = 8
ROUNDS: Final = 24
PER_JOB: Final = 4
"""The number of chunks of one save or load."""
POLL_S: Final = 0.000_2
WAYS: Final = ("without marks", "generations", "digests")


class Rank:
    """A rank whose slots have marks in one of the `WAYS`."""

    def __init__(self, fd: int, way: str) -> None:
        """Make a rank on the memory `fd`."""
        self.segment = Segment(fd)
        shared = rank_slots(self.segment, geometry(), 1, 0, digests=way == "digests")
        if way == "without marks":
            shared = shared._replace(marks_at=None)
        layer = geometry().groups[0].layers[0]
        shape = PAGES * BLOCKS, 1, 16, layer.page_bytes // 16 // 4
        tensors = {one.name: torch.ones(shape) for one in geometry().groups[0].layers}
        caches = PagedCaches(geometry(), tensors, PAGES * BLOCKS, Hooks(frozenset(tensors)))
        self.side = WorkerSide(RankContext(load_settings({})), caches, engine=CpuEngine(0), shared=shared)
        self._numbers = 0

    def job(self, kind: Kind, first: int) -> tuple[float, float]:
        """Save or load `PER_JOB` chunks until the rank reports the job.

        Returns the time, and the CPU time of all threads, in seconds.
        """
        self._numbers += 1
        rows, stamps = list[int](), b""
        for slot in range(first, first + PER_JOB):
            block = slot % BLOCKS * PAGES
            rows += rows_of(0, slot, range(PAGES), range(block, block + PAGES))
            stamps += stamp_of(slot, 1)
        job = Job(self._numbers, int(kind), "r", 1, np.asarray(rows, dtype="<i4").tobytes(), stamps)
        began, cpu_began = time.perf_counter(), time.process_time()
        plan = StepPlan(self._numbers, (job,), pool=self.segment.layout.token)
        while True:
            self.side.bind(plan)
            self.side.start_loads()
            self.side.end_step()
            self.side.collect()
            self.side.unbind()
            report = self.side.take_report()
            if report is not None and job.id in report.tallies:
                assert report.tallies[job.id].ok == 1
                return time.perf_counter() - began, time.process_time() - cpu_began
            time.sleep(POLL_S)
            plan = StepPlan(self._numbers, pool=self.segment.layout.token)


@contextmanager
def _ranks() -> Iterator[dict[str, Rank]]:
    """Make a rank for each of the `WAYS`, each on a memory of its own."""
    made, files = dict[str, Rank](), list[int]()
    try:
        for way in WAYS:
            fd = create(SLOTS, node_slot_bytes(geometry(), 1), rows=1)
            files.append(fd)
            made[way] = Rank(fd, way)
            allocate(fd, made[way].segment.layout, 0, SLOTS)
            made[way].segment.words[READY] = SLOTS
        yield made
    finally:
        for rank in made.values():
            rank.side.shutdown()
        for fd in files:
            os.close(fd)


def run() -> list[Figure]:
    """Return the time of saves and loads with marks, divided by the time without marks."""
    taken = {(way, kind): list[tuple[float, float]]() for way in WAYS for kind in (Kind.SAVE, Kind.LOAD_SYNC)}
    with _ranks() as ranks:
        for number in range(ROUNDS):
            for way in sorted(WAYS, key=lambda way: (WAYS.index(way) + number) % len(WAYS)):
                for kind in (Kind.SAVE, Kind.LOAD_SYNC):
                    took = ranks[way].job(kind, number * PER_JOB % SLOTS)
                    if number >= SLOTS // PER_JOB:  # the first rounds touch the slots for the first time
                        taken[way, kind].append(took)
    out = list[Figure]()
    for kind in (Kind.SAVE, Kind.LOAD_SYNC):
        name = "save" if kind is Kind.SAVE else "load"
        without = np.array(taken[WAYS[0], kind])
        for way, limit in (("generations", 1.02), ("digests", 1.5)):
            mine = np.array(taken[way, kind])
            ratio, cpu_ratio = np.median(mine / without, axis=0).tolist()  # of each round, so that load changes less
            for what, value, column in (("", ratio, 0), (", CPU time", cpu_ratio, 1)):
                times = (np.median(one[:, column]) * 1e3 for one in (mine, without))
                beside = "{:.1f} ms, without marks {:.1f} ms, for {} chunks of 8 MiB".format(*times, PER_JOB)
                out.append(Figure(f"{name} with {way}{what}", value, limit, "x", beside))
    return out
