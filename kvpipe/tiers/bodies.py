"""Bodies of values. A body has the bytes of a chunk, or of a part of a chunk. Bodies are copied from and to slots."""

from __future__ import annotations

import numpy as np

from kvpipe.protocol.geometry import Geometry
from kvpipe.protocol.messages import TierOrder
from kvpipe.tiers.base import ALIGN_BYTES
from kvpipe.tiers.envelope import pages
from kvpipe.tiers.parts import Share, Slice
from kvpipe.transfer.pool import HostPool

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class Bodies:
    """Maps chunks in slots to bodies. A body is ``[layer][page]`` without gaps, padded to `ALIGN_BYTES`.

    The body of a whole chunk is the slot's own memory. The body of a shorter chunk is gathered into a new buffer.
    """

    def __init__(self, geometry: Geometry, pool: HostPool) -> None:
        """View the pool's slots as a numpy array. `geometry` is this rank's geometry."""
        self._geometry, self._is_shared, self._marks = geometry, bool(pool.token), pool.marks
        self._slots: Bytes = pool.tensor.numpy()

    def clear_mark(self, order: TierOrder) -> None:
        """Clear the mark of a slot that a fetch is about to write, if slots have marks."""
        if self._marks is not None and order.stamp:
            self._marks.clear(order.stamp)

    def write_mark(self, order: TierOrder) -> None:
        """Write the mark of a slot that a fetch has written, if slots have marks."""
        if self._marks is not None and order.stamp:
            self._marks.write(order.stamp)

    @property
    def digests(self) -> bool:
        """Whether this rank compares digests of slots."""
        return self._marks is not None and self._marks.digests

    def other_chunk(self, order: TierOrder) -> str:
        """Compare the generation of the order's slot. Returns why the slot must not be stored, or ""."""
        return self._marks.other_chunk(order.stamp) if self._marks is not None and order.stamp else ""

    def damage(self, order: TierOrder) -> str:
        """Compare the digest of the order's slot, which has marks. Returns why the slot must not be stored, or ""."""
        return self._marks.damage(order.stamp) if self._marks is not None else ""

    def size(self, group: int, units: int) -> int:
        """Return the size in bytes of the body of `units` units, padding included."""
        return -(-self._geometry.groups[group].bytes_per_block * self._pages(group, units) // ALIGN_BYTES) * ALIGN_BYTES

    def size_of(self, group: int, units: int, split: int, theirs: int) -> int:
        """Return the size in bytes of a body of a chunk that is divided into `theirs` parts.

        This rank's own chunks have `split` parts.
        """
        used = self._geometry.groups[group].bytes_per_block * self._pages(group, units) * split // theirs
        return -(-used // ALIGN_BYTES) * ALIGN_BYTES

    def whole(self, units: int) -> bool:
        """Whether `units` units are a whole chunk."""
        return units == self._geometry.units_per_chunk

    def of(self, slot: int, group: int, units: int) -> memoryview:
        """Return a view of the slot's first bytes, as long as the body of `units` units."""
        view: memoryview = self._slots[slot].data
        return view[: self.size(group, units)]

    def gather(self, slot: int, group: int, units: int) -> memoryview:
        """Return a body to be written to a tier: the slot's own memory for a whole chunk, otherwise a copy.

        If engines share the slots, a chunk that needs padding is also copied, because only the chunk's writer may write
        the slot.
        """
        used = self._geometry.groups[group].bytes_per_block * self._pages(group, units)
        if self.whole(units) and not (self._is_shared and used < self.size(group, units)):
            body = self._slots[slot][: self.size(group, units)]
        else:
            body = np.frombuffer(pages(self.size(group, units)), np.uint8)
            for mine, theirs in self._stretches(slot, group, units):
                body[mine] = theirs
        body[used:] = 0  # padding must not contain bytes of another request
        view: memoryview = body.data
        return view

    def scatter(self, body: memoryview, slot: int, group: int, units: int) -> None:
        """Copy `body`, the body of a chunk that is not whole, into the slot."""
        flat: Bytes = np.frombuffer(body, np.uint8)
        for mine, theirs in self._stretches(slot, group, units):
            theirs[:] = flat[mine]

    def move_heads(self, body: memoryview, order: TierOrder, share: Share, split: int, one: Slice) -> None:
        """Copy the KV heads of `one` between a body of another split and the slot, in the direction of `order`.

        `split` is the number of parts of this rank's own split. `share` is the layout of heads in this rank's pages. A
        body to be stored is filled completely, because this rank has all heads of the body.
        """
        flat: Bytes = np.frombuffer(body, np.uint8)
        at, pages = 0, self._pages(order.group, order.units)
        stretches = self._stretches(order.slot, order.group, order.units)
        for rows, (_, mine) in zip(share.rows, stretches, strict=True):
            size = len(mine) * split // order.split
            theirs = flat[at : at + size].reshape(pages * rows, share.heads // order.split, -1)[:, one.theirs]
            ours = mine.reshape(pages * rows, share.heads // split, -1)[:, one.mine]
            into, out_of = (theirs, ours) if order.stores else (ours, theirs)
            into[:] = out_of
            at += size
        if order.stores:
            flat[at:] = 0  # padding must not contain bytes of another request

    def _pages(self, group: int, units: int) -> int:
        return self._geometry.paging[group].pages(units)

    def _stretches(self, slot: int, group: int, units: int) -> list[tuple[slice, Bytes]]:
        out, at, pages = [], 0, self._pages(group, units)
        layers = self._geometry.groups[group].layers
        for layer, offset in zip(layers, self._geometry.layer_offsets[group], strict=True):
            size = layer.page_bytes * pages
            out.append((slice(at, at + size), self._slots[slot][offset : offset + size]))
            at += size
        return out
