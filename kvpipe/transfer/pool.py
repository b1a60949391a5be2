"""The host pool: a bounded number of fixed-size slots, one chunk each. Every rank has its own."""

from __future__ import annotations

import mmap

import torch

from kvpipe.errors import ConfigError
from kvpipe.geometry import Geometry


class HostPool:
    """`geometry.slots` slots of `geometry.slot_bytes` bytes, page-aligned. The system commits memory at the first use.

    `tensor`: uint8, shape (slots, slot_bytes). `base`: its address. `ready`: how many slots, from the first on, may be
    used; a `Readier` sets it to 0 and lets it grow. `near`: cores near the device; empty: not known, or any.
    """

    def __init__(self, geometry: Geometry) -> None:
        """Reserve the address range. No memory is touched.

        Raises:
            ConfigError: the system refuses so much address space.

        """
        self.slots, self.slot_bytes = geometry.slots, geometry.slot_bytes
        self.ready = self.slots
        self.near: frozenset[int] = frozenset()
        # Private, because shared memory gets no huge pages on most systems; and not for children: a page that is pinned
        # must not be copied when both sides of a fork write to it.
        try:
            self._map = mmap.mmap(-1, self.slots * self.slot_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            msg = (
                f"kvpipe: pool_bytes_max={geometry.pool_bytes_max} cannot be had on this machine ({error}); "
                "set a smaller pool_bytes_max (it is per rank)"
            )
            raise ConfigError(msg) from None
        self._map.madvise(mmap.MADV_DONTFORK)
        try:
            # fewer faults and less work in pinning: 2 MiB at a time instead of 4 KiB; kernels without it refuse: fine
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
