"""Measures the time of an engine's first copies of a node's slots: `python -m benchmarks.node_pages [ROUNDS]`.

Each round maps the memory again, as a new engine does. The round copies chunks from and to slots that this process
either touches for the first time, or that `Readier` has mapped before. The memory has huge pages if the kernel's
setting allows huge pages.
"""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import Final

import numpy as np

from kvpipe.machine.huge_pages import shared_huge_pages
from kvpipe.node.attach import shared_slots
from kvpipe.node.layout import READY
from kvpipe.node.segment import Segment, allocate, create
from kvpipe.protocol.geometry import Geometry, Group, Layer
from kvpipe.transfer.pool import HostPool
from kvpipe.transfer.ready import Readier

SLOT_BYTES: Final = 8 << 20
SLOTS: Final = 32
PER_GIB: Final = (1 << 30) / (SLOTS * SLOT_BYTES)
GEOMETRY: Final = Geometry((Group((Layer("a", SLOT_BYTES // 16),), 1),), 16, SLOTS * SLOT_BYTES)


class FirstCopies:
    """The measured times in milliseconds, by name."""

    def __init__(self, rounds: int, pages: str) -> None:
        """`pages` is the kind of pages."""
        self._rounds, self._pages, self.ms = rounds, pages, defaultdict[str, list[float]](list)
        self._chunk = np.ones(SLOT_BYTES, np.uint8)

    def _time(self, what: str, call: Callable[[], object], times: float = 1) -> None:
        began = time.perf_counter()
        call()
        self.ms[f"{self._pages} pages: {what}"].append((time.perf_counter() - began) * 1e3 * times)

    def measure(self) -> None:
        """Measure copies in new mappings of a new memory."""
        fd = create(SLOTS, SLOT_BYTES, rows=1)
        segment = Segment(fd)
        self._time("give memory to 1 GiB", lambda: allocate(fd, segment.layout, 0, SLOTS), PER_GIB)
        segment.words[READY] = SLOTS
        first = HostPool(GEOMETRY, shared_slots(segment, 0, saves=True)).tensor
        self._time("first write of 1 GiB", lambda: first.fill_(1), PER_GIB)
        for _ in range(self._rounds):
            for mapped in (False, True):
                self._copy(Segment(fd), mapped=mapped)
        os.close(fd)

    def _copy(self, segment: Segment, *, mapped: bool) -> None:
        pool = HostPool(GEOMETRY, shared_slots(segment, 0, saves=True))
        if mapped:
            readier = Readier(pool, lambda *_: True, piece_bytes=SLOTS * SLOT_BYTES)
            self._time("map 1 GiB", lambda: readier.begin("start"), PER_GIB)
            readier.stop()
        when, slots, chunk = "mapped before" if mapped else "first touch", pool.tensor.numpy(), self._chunk
        for number, slot in enumerate(slots):
            if number % 2:
                self._time(f"load 8 MiB, {when}", lambda slot=slot: np.copyto(chunk, slot))  # type: ignore[misc]
            else:
                self._time(f"save 8 MiB, {when}", lambda slot=slot: np.copyto(slot, chunk))  # type: ignore[misc]


def main(rounds: int = 5) -> None:
    """Print the median of each time."""
    run = FirstCopies(rounds, "huge" if shared_huge_pages().allowed else "small")
    run.measure()
    for name, times in run.ms.items():
        print(f"{name}: median {median(times):.2f} ms, worst {max(times):.2f} ms")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
