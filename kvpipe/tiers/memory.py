"""The host-memory tier: a bounded pool of fixed-size slots, one chunk each. Every rank has its own."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import torch

from kvpipe.geometry import Geometry


class HostPool:
    """`geometry.slots` slots of `geometry.slot_bytes`, page-aligned, committed by the system as they are first used."""

    def __init__(self, geometry: Geometry) -> None:
        """Reserve the address range. No memory is touched."""
        self.slots, self.slot_bytes = geometry.slots, geometry.slot_bytes
        self._map = mmap.mmap(-1, self.slots * self.slot_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # fewer faults on first use: 2 MiB at a time instead of 4 KiB; kernels without it refuse, which is fine
            try:
                self._map.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                self.huge_pages = False
            else:
                self.huge_pages = True
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8).view(self.slots, self.slot_bytes)
        self.base = self.tensor.data_ptr()

    def slot(self, index: int) -> torch.Tensor:
        """Return slot `index` as uint8, shape (slot_bytes,)."""
        return self.tensor[index]

    def pieces(self, bytes_max: int) -> Iterator[tuple[int, int]]:
        """Yield (address, bytes) of the pool in pieces of at most `bytes_max`, or one slot where that is larger.

        A piece is a number of whole slots, because a copy must not cross from one pinned piece into the next.
        """
        step = max(1, bytes_max // self.slot_bytes)
        for slot in range(0, self.slots, step):
            yield self.base + slot * self.slot_bytes, min(step, self.slots - slot) * self.slot_bytes
