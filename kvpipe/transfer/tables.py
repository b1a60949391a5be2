"""Row tables for the kernel are uploaded from a ring of pinned host memory into a ring of device memory.

torch's allocators are not used, because they cache only blocks of sizes that were used before. With several steps in
flight, torch would allocate memory within a step, and such an allocation waits for the device.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvpipe.transfer.device import Device, Stream

ALIGN_BYTES: Final = 256


class _Lent(NamedTuple):
    """A range of both rings, which is in use until its table is deleted."""

    begin: int
    table: weakref.ref[torch.Tensor]


class RowTables:
    """The rings of one stream. A range is free again when its table was deleted. Ranges become free in upload order.

    The caller must keep a table until all work that was queued with the table is done.
    """

    def __init__(self, device: Device, stream: Stream, size: int) -> None:
        """`size` is the number of bytes of each ring, a multiple of `ALIGN_BYTES`."""
        self._device, self._stream, self._size = device, stream, size
        self._host, self._there = device.allocate_pinned(size), device.allocate(size)
        self._bytes: npt.NDArray[np.uint8] = self._host.numpy()
        self._lent: deque[_Lent] = deque()
        self._head = 0

    def upload(self, table: npt.NDArray[Any]) -> torch.Tensor | None:
        """Queue a copy of `table` to the device. Returns the device's tensor, or None if the ring is full.

        Raises:
            Exception: the device's exception for a failed copy.

        """
        while self._lent and self._lent[0].table() is None:
            self._lent.popleft()
        size = -(-max(1, table.nbytes) // ALIGN_BYTES) * ALIGN_BYTES
        begin = self._place(size)
        if begin is None:
            return None
        part = slice(begin, begin + table.nbytes)
        self._bytes[part] = np.ascontiguousarray(table).view(np.uint8).ravel()
        self._device.copy(self._stream, [(self._there[part], self._host[part])])
        made = self._there[part].view(torch.from_numpy(table).dtype).view(table.shape)
        self._lent.append(_Lent(begin, weakref.ref(made)))
        self._head = begin + size
        return made

    def _place(self, size: int) -> int | None:
        """Return the offset of `size` contiguous free bytes, or None if too few are free. Used bytes end at `_head`."""
        if not self._lent:
            return 0 if size <= self._size else None
        tail = self._lent[0].begin
        if self._head <= tail:
            return self._head if self._head + size <= tail else None
        if self._head + size <= self._size:
            return self._head
        return 0 if size <= tail else None
