"""The segment is the memory of a node: a memfd without a name, sealed against any change of its size."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from collections.abc import Callable
from typing import Final

from kvpipe.errors import ConfigError
from kvpipe.machine.headroom import tightest
from kvpipe.node.layout import PAGE_BYTES, TOKEN_BYTES, WORDS, NodeLayout, OtherVersionError, unpack_layout
from kvpipe.node.pages import give_memory
from kvpipe.node.processes import MEMORY

SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""The seals of the memory. A client that could shrink the file would kill all other processes by SIGBUS."""

PIECE_BYTES: Final = 1 << 20


class Segment:
    """A mapping of a region of a segment. `words` has the words, `generations` one word per slot.

    `leases` has the counters of leases as rows of `layout.lease_row_bytes // 4` integers. `slots` has the memory of the
    slots, or is None if only the tables are mapped.
    """

    def __init__(self, fd: int, *, region: int = 0, whole: bool = True) -> None:
        """Map a region of the segment of descriptor `fd`, which the caller keeps open.

        If `whole`, the slots are mapped, too.

        Raises:
            OtherVersionError: the descriptor is not a segment of this version, or the segment has no such region.
            ConfigError: the segment is not sealed or not complete, or cannot be mapped.
        """
        self.fd, self.layout = fd, layout_of(fd, region)
        layout = self.layout
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS or os.fstat(fd).st_size != layout.size:
            raise ConfigError("the node's memory is not sealed, or its size differs from the size in its header")
        self.buffer = self._mapped(layout.at, layout.tables_bytes)
        self.words = self._cast(PAGE_BYTES, WORDS * 8, "Q")
        self.generations = self._cast(layout.generations_at, layout.slots * 8, "Q")
        self.leases = self._cast(layout.leases_at, layout.rows * layout.lease_row_bytes, "I")
        self.slots = self._mapped(layout.slots_at, layout.slots * layout.slot_bytes) if whole else None

    def _mapped(self, at: int, size: int) -> memoryview:
        try:
            mapping = mmap.mmap(self.fd, size, offset=at)
        except OSError as error:
            raise ConfigError(f"{size} bytes of the node's memory cannot be mapped: {error}") from None
        mapping.madvise(mmap.MADV_DONTFORK)
        return memoryview(mapping)

    def _cast(self, at: int, size: int, kind: str) -> memoryview:
        return self.buffer[at : at + size].cast(kind)  # type: ignore[call-overload,no-any-return]

    def slot(self, index: int) -> memoryview:
        """Return the memory of a slot."""
        assert self.slots is not None, "this mapping has only the tables"  # noqa: S101
        size = self.layout.slot_bytes
        return self.slots[index * size : (index + 1) * size]

    def leases_of(self, row: int) -> memoryview:
        """Return the counters of one client, one per slot. While the client lives, nothing else may write to them."""
        width = self.layout.lease_row_bytes // 4
        return self.leases[row * width : row * width + self.layout.slots]


def layout_of(fd: int, region: int = 0) -> NodeLayout:
    """Return the sizes of a region of a segment.

    Raises:
        OtherVersionError: the descriptor is not a segment of this version, or the segment has no such region.
    """
    first = unpack_layout(os.pread(fd, PAGE_BYTES, 0))
    if not region:
        return first
    header = unpack_layout(os.pread(fd, PAGE_BYTES, first.tables_at(region)))
    if (header.region, header.token) != (region, first.token):
        raise OtherVersionError(f"the node's memory has no region {region}")
    return first.with_slots(region, header.slot_bytes)


def create(slots: int, slot_bytes: int, *, rows: int = 64, ring: int = 1 << 15) -> int:
    """Create a segment and return its descriptor. The tables have memory. `allocate` gives memory to the slots.

    Raises:
        ConfigError: the system refuses the memory.
    """
    layout = NodeLayout(slots, slot_bytes, rows, ring, secrets.token_bytes(TOKEN_BYTES))
    room = tightest()
    size = layout.slots_at + layout.slots_bytes
    if room is not None and size > room.total:
        raise ConfigError(
            f"a node's memory of {size} bytes is larger than {room.total} bytes ({room.where}); set a smaller "
            "pool_bytes_max (it is for the whole node)"
        )
    fd = os.memfd_create(MEMORY, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, layout.size)
        os.posix_fallocate(fd, 0, layout.tables_bytes)
        os.pwrite(fd, layout.pack(), 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except OSError as error:
        os.close(fd)
        raise ConfigError(
            f"a node's memory of {slots} slots of {slot_bytes} bytes cannot be allocated ({error}); set a smaller "
            "pool_bytes_max (it is for the whole node)"
        ) from None
    return fd


def remove_region(fd: int, layout: NodeLayout) -> None:
    """Clear the header of a region, so that the segment has no such region."""
    os.pwrite(fd, bytes(PAGE_BYTES), layout.at)


def add_region(fd: int, layout: NodeLayout, beat: Callable[[], None]) -> None:
    """Write the tables of a region that does not exist yet.

    The header is written last, because a region with a header exists.

    `beat` advances the holder's clock between two pieces.

    Raises:
        ConfigError: the machine has too little free memory.
        OSError: the system has no memory left.
    """
    room = tightest()
    if room is not None and room.spare < layout.tables_bytes:
        raise ConfigError(f"{layout.tables_bytes} bytes are needed, but only {room.spare} are free ({room.where})")
    os.posix_fallocate(fd, layout.at, layout.tables_bytes)
    for at in range(PAGE_BYTES, layout.tables_bytes, PIECE_BYTES):
        beat()
        os.pwrite(fd, bytes(min(PIECE_BYTES, layout.tables_bytes - at)), layout.at + at)
    os.pwrite(fd, layout.pack(), layout.at)


def allocate(fd: int, layout: NodeLayout, first: int, stop: int) -> bool:
    """Give memory to slots [first, stop), charged to this process. Slots that have memory already keep their bytes.

    Returns whether the memory has huge pages.

    Raises:
        OSError: the system has no memory left.
    """
    return give_memory(fd, layout.slots_at + first * layout.slot_bytes, (stop - first) * layout.slot_bytes)


def lock(fd: int) -> int | None:
    """Become the only holder of a segment. Returns the lock's descriptor, or None if another process holds the segment.

    The lock is released when the process ends. The lock is taken on a separate open file description, because clients
    share the description of `fd`.
    """
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(own)
        return None
    return own
