"""Measures simultaneous saves of two engines into one memory. Each engine has its own process and core.

Two plain copies at once show what the memory bus leaves to each process.
"""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, Final

import numpy as np
import torch

from benchmarks.node_copies import BLOCKS, LAYERS, PAGE_BYTES, PAGES, SLOTS, copy_chunk, geometry
from benchmarks.node_forks import FORKS
from benchmarks.report import Figure
from kvpipe.node.attach import shared_slots
from kvpipe.node.segment import Segment, allocate, create
from kvpipe.transfer.base import Direction
from kvpipe.transfer.cpu import CpuEngine
from kvpipe.transfer.pages import view_pages
from kvpipe.transfer.pool import HostPool

ROUNDS: Final = 12
PHASE_S: Final = 0.15


class Saver:
    """An engine that saves chunks into its half of the slots, or copies the same bytes to private memory."""

    def __init__(self, segment: Segment, number: int) -> None:
        """Map the memory. `number` is 0 or 1."""
        self._slots = range(number * SLOTS // 2, (number + 1) * SLOTS // 2)
        pool = HostPool(geometry(), shared_slots(segment, 0, saves=True))
        caches = [torch.ones((PAGES * BLOCKS, PAGE_BYTES), dtype=torch.uint8) for _ in range(LAYERS)]
        self._engine = CpuEngine(0)
        self._engine.attach([view_pages(f"l{i}", one, len(one)) for i, one in enumerate(caches)], geometry(), pool)
        self._plain = [np.ones(pool.slot_bytes, np.uint8) for _ in range(9)]

    def node(self, at: int) -> None:
        """Save one chunk."""
        copy_chunk(self._engine, Direction.SAVE, self._slots[at % len(self._slots)])

    def plain(self, at: int) -> None:
        """Copy the bytes of one chunk by one call."""
        np.copyto(self._plain[at % 8], self._plain[8])

    def rate(self, kind: str, seconds: float) -> float:
        """Return the chunks per second that this process copies."""
        call, began, count = getattr(self, kind), time.perf_counter(), 0
        while (took := time.perf_counter() - began) < seconds:
            call(count)
            count += 1
        return count / took


def main(memory: str, number: int, core: int, orders: Connection) -> None:
    """Carry out orders until the connection is closed. `memory` is the memory's path."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    saver = Saver(Segment(os.open(memory, os.O_RDWR | os.O_CLOEXEC)), number)
    for kind in ("node", "plain"):
        for at in range(SLOTS // 2):
            getattr(saver, kind)(at)
    orders.send(0.0)
    while True:
        try:
            orders.send(saver.rate(*orders.recv()))
        except EOFError:
            return


def run() -> list[Figure]:
    """Return the rate of each of two engines that save at once, relative to plain copies of two processes at once."""
    fd = create(SLOTS, geometry().slot_bytes, rows=2)
    allocate(fd, Segment(fd, whole=False).layout, 0, SLOTS)
    cores = sorted(os.sched_getaffinity(0))[:2]
    savers = [_started(f"/proc/{os.getpid()}/fd/{fd}", number, core) for number, core in enumerate(cores)]
    alone, both = dict[str, list[float]](node=[], plain=[]), dict[str, list[float]](node=[], plain=[])
    for number in range(ROUNDS):
        for kind in ("node", "plain"):
            alone[kind] += _rates(savers[number % len(savers) :][:1], kind)
            both[kind].append(sum(_rates(savers, kind)) / len(savers))
    for process, orders in savers:
        orders.close()
        process.join()
    os.close(fd)
    kept = {kind: median(two / one for two, one in zip(both[kind], alone[kind], strict=True)) for kind in both}
    mib = geometry().slot_bytes >> 20
    beside = (
        f"{median(both['node']) * mib:.0f} of {median(alone['node']) * mib:.0f} MiB/s alone: {kept['node']:.2f}; "
        f"a plain copy {median(both['plain']) * mib:.0f} of {median(alone['plain']) * mib:.0f}: {kept['plain']:.2f}"
    )
    name = "saves of two engines at once, each, against what the memory bus leaves"
    return [Figure(name, kept["node"] / kept["plain"], 0.9, "x", beside, at_least=True)]


def _started(memory: str, number: int, core: int) -> tuple[Any, Connection]:
    mine, its = FORKS.Pipe()
    process = FORKS.Process(target=main, args=(memory, number, core, its))
    process.start()
    its.close()
    mine.recv()
    return process, mine


def _rates(savers: list[tuple[Any, Connection]], kind: str) -> list[float]:
    for _, orders in savers:
        orders.send((kind, PHASE_S))
    return [orders.recv() for _, orders in savers]
