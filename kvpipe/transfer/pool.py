"""The host pool is a fixed number of slots of one size. A slot holds one chunk. Every rank has its own pool."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import NamedTuple

import torch

from kvpipe.errors import ConfigError
from kvpipe.protocol.geometry import Geometry
from kvpipe.transfer.marks import MarkPlace, SlotMarks


class SlotsFile(NamedTuple):
    """How a helper of this rank maps the shared slots.

    The helper sends `hello` to the holder's `socket`, and receives the descriptor of the memory's file. The slots begin
    at byte `offset` of that file. From then on, the holder frees no slot of this rank before the helper has ended.
    """

    socket: str
    hello: bytes
    offset: int


class SharedSlots(NamedTuple):
    """Memory of slots that several engines share. A slot has `slot_bytes` bytes. This rank's part begins at byte `at`.

    `token` names the memory. `saves` is False if another rank saves the same bytes to the same part. `with_memory`
    returns the number of slots, from the first slot on, that have memory. If `with_memory` is None, all slots have
    memory. `file` is None if no other process can map the slots. The mark of this rank's part begins at byte `marks_at`
    of each slot, or slots have no marks. `digests` says whether marks have digests (see `SlotMarks`).
    """

    memory: memoryview
    slot_bytes: int
    at: int
    token: bytes
    saves: bool = True
    with_memory: Callable[[], int] | None = None
    file: SlotsFile | None = None
    marks_at: int | None = None
    digests: bool = False


class HostPool:
    """A pool of slots. A slot has a chunk of `geometry.slot_bytes` bytes. The system commits memory at the first use.

    The pool begins at a page of memory. `tensor` is the pool's memory, uint8, one row per slot, at the address `base`.
    `slot_bytes` is the distance of two slots. `flat` has all bytes from `base` on. The first `ready` slots may be used.
    A `Readier` sets `ready` to 0 and then increases `ready`. `near` has the cores near the device. If these cores are
    not known, or if any core may be used, `near` is empty.

    Engines may share slots (`shared`). A shared slot has `part_bytes` bytes of this rank, and may also have parts of
    other ranks, marks and a note. `token` is b"" for a private pool. `marks` is None if slots have no marks.
    """

    def __init__(self, geometry: Geometry, shared: SharedSlots | None = None) -> None:
        """Reserve the pool's address range, or use `shared` slots. No memory is touched.

        Raises:
            ConfigError: the system refuses an address range of this size.

        """
        self.near: frozenset[int] = frozenset()
        self.token, self._with_memory = (b"", None) if shared is None else (shared.token, shared.with_memory)
        self.part_bytes = geometry.slot_bytes
        self.marks: SlotMarks | None = None
        if shared is not None:
            self._share(geometry, shared)
            return
        self.slots, self.slot_bytes = geometry.slots, geometry.slot_bytes
        self.ready = self.slots
        # The map is private, because shared memory gets no huge pages on most systems. A forked child does not inherit
        # the map, because the kernel would copy a pinned page as soon as parent and child write to it.
        try:
            self._map = mmap.mmap(-1, self.slots * self.slot_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            msg = (
                f"kvpipe: pool_bytes_max={geometry.pool_bytes_max} cannot be reserved on this machine ({error}); "
                "set a smaller pool_bytes_max (it is per rank)"
            )
            raise ConfigError(msg) from None
        self._map.madvise(mmap.MADV_DONTFORK)
        try:
            # Huge pages need fewer faults and less work to pin: 2 MiB at a time instead of 4 KiB.A kernel without huge
            # pages refuses this advice, which does no harm.
            self._map.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            self.huge_pages = False
        else:
            self.huge_pages = True
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8).view(self.slots, self.slot_bytes)
        self.flat = self.tensor.view(-1)
        self.base = self.tensor.data_ptr()

    def _share(self, geometry: Geometry, shared: SharedSlots) -> None:
        self._memory = shared.memory  # kept only because this reference keeps the memory mapped
        whole = torch.frombuffer(shared.memory, dtype=torch.uint8)
        self.slot_bytes, self.slots = shared.slot_bytes, whole.numel() // shared.slot_bytes
        self.ready, self.huge_pages = self.slots, False
        self.flat = torch.frombuffer(shared.memory, dtype=torch.uint8, offset=shared.at)
        self.base = self.flat.data_ptr()
        self.tensor = whole.view(self.slots, self.slot_bytes)[:, shared.at : shared.at + geometry.slot_bytes]
        if shared.marks_at is not None:
            place = MarkPlace(shared.slot_bytes, shared.marks_at, shared.at, self.part_bytes)
            self.marks = SlotMarks(shared.memory, place, digests=shared.digests)

    @property
    def with_memory(self) -> int:
        """The number of slots, from the first slot on, that this rank may touch.

        The holder of shared slots gives memory to the slots. If the rank touched a slot without memory, the system
        would allocate memory and count it as the rank's memory.
        """
        return self.slots if self._with_memory is None else min(self._with_memory(), self.slots)

    def parts(self, first: int, stop: int) -> list[tuple[int, int]]:
        """Return (offset from `base`, bytes) of this rank's parts of slots [first, stop). Adjacent parts are joined."""
        # true if no other rank has a part of the slots; a slot may still end with a note
        if self.slot_bytes < 2 * self.part_bytes:
            return [(first * self.slot_bytes, (stop - first) * self.slot_bytes)]
        return [(slot * self.slot_bytes, self.part_bytes) for slot in range(first, stop)]

    def slot(self, index: int) -> torch.Tensor:
        """Return slot `index` as a uint8 tensor, shape (slot_bytes,)."""
        return self.tensor[index]
