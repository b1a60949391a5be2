"""Allocates physical memory for a range of a node's memory, in huge pages if the kernel allows huge pages."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path
from typing import Final

from kvpipe.machine.huge_pages import shared_huge_pages

ROLLUP: Final = Path("/proc/self/smaps_rollup")
_MADV_POPULATE_WRITE: Final = 23
_libc = ctypes.CDLL(None, use_errno=True)  # unlike mmap.madvise, it releases the interpreter's lock


def give_memory(fd: int, at: int, size: int) -> bool:
    """Give memory to the bytes [at, at + size) of a file in memory. Returns whether the memory has huge pages.

    Bytes that have memory already do not change. Bytes outside the range may get memory, too, if these bytes share a
    huge page with the range.

    Raises:
        OSError: the system has no memory left.
    """
    huge = shared_huge_pages()
    got = huge.allowed and _populate(fd, at, size, huge.page_bytes)
    os.posix_fallocate(fd, at, size)
    return got


def _populate(fd: int, at: int, size: int, page_bytes: int) -> bool:
    """Map the range for a moment and write to the mapping: the kernel may give huge pages only to mappings."""
    low = at // page_bytes * page_bytes
    high = min(-(-(at + size) // page_bytes) * page_bytes, os.fstat(fd).st_size)
    with mmap.mmap(fd, high - low, offset=low) as mapped:
        mapped.madvise(mmap.MADV_HUGEPAGE)
        start = ctypes.c_char.from_buffer(mapped)
        try:
            if _libc.madvise(ctypes.byref(start), ctypes.c_size_t(high - low), _MADV_POPULATE_WRITE) != 0:
                number = ctypes.get_errno()
                if number != errno.EINVAL:  # a kernel before 5.14 does not know this advice
                    raise OSError(number, os.strerror(number))
        finally:
            del start  # otherwise the mapping cannot be closed
        return _mapped_huge()


def _mapped_huge() -> bool:
    """Return whether this process maps shared memory with huge pages now."""
    try:
        lines = ROLLUP.read_text(encoding="ascii").splitlines()
    except OSError:
        return False
    return any(line.startswith("ShmemPmdMapped:") and line.split()[1] != "0" for line in lines)
