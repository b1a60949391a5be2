"""The owners of a node's memory: which region, with slots of its own size, may use each piece of the slots' memory.

A region may grant a slot only if it owns all pieces that the slot touches. The holder moves a piece when no slot of the
owner that touches the piece has a chunk, a grant or a lease. One store of one byte changes the owner, so a holder that
is killed at any time leaves each piece with one owner.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from kvpipe.node.layout import PIECES, REGIONS_MAX, NodeLayout

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvpipe.node.slots import Ages

    Numbers: TypeAlias = NDArray[np.int64]

N = TypeVar("N", int, "Numbers")
NOBODY: Final = REGIONS_MAX
"""The owner of the pieces of a region that was removed."""


class Owners:
    """The owner of each piece, as one byte per piece. At first region 0 owns everything."""

    def __init__(self, raw: memoryview, layout: NodeLayout) -> None:
        """Use `raw`, the bytes of a memory with `layout`."""
        self._raw = raw
        self.piece_bytes = max(1, -(-layout.slots_bytes // PIECES))
        self.count = -(-layout.slots_bytes // self.piece_bytes)

    def __getitem__(self, piece: int) -> int:
        """Return the region that owns a piece."""
        return self._raw[piece]

    def give(self, pieces: Iterable[int], region: int) -> None:
        """Make `region` the owner of `pieces`."""
        for piece in pieces:
            self._raw[piece] = region

    def all(self) -> NDArray[np.uint8]:
        """Return the owner of every piece."""
        import numpy as np  # noqa: PLC0415  (see `slots.py`)

        return np.frombuffer(self._raw, np.uint8, self.count)

    def pieces_of(self, layout: NodeLayout, first: N, stop: N) -> tuple[N, N]:
        """Return the bounds of the pieces that slots [first, stop) of a region touch."""
        size = layout.slot_bytes
        return first * size // self.piece_bytes, -(-stop * size // self.piece_bytes)

    def slots_of(self, layout: NodeLayout, first: N, stop: N) -> tuple[N, N]:
        """Return the bounds of the slots of a region that touch the pieces [first, stop)."""
        size = layout.slot_bytes
        return first * self.piece_bytes // size, -(-stop * self.piece_bytes // size)

    def pieces(self, layout: NodeLayout, first: int, stop: int) -> range:
        """Return the pieces that slots [first, stop) of a region touch."""
        return range(*self.pieces_of(layout, first, stop))

    def slots(self, layout: NodeLayout, pieces: range) -> range:
        """Return the slots of a region that touch `pieces`."""
        first, stop = self.slots_of(layout, pieces.start, pieces.stop)
        return range(first, min(layout.slots, stop))

    @staticmethod
    def reduced(by: np.ufunc, values: Ages, first: Numbers, stop: Numbers, *, empty: float) -> Ages:
        """Return `values[first:stop]`, reduced by `by`, for each pair of bounds. An empty range is `empty`."""
        import numpy as np  # noqa: PLC0415  (see `slots.py`)

        bounds = np.minimum(np.stack((first, stop), axis=1), len(values))
        found = by.reduceat(np.append(values, empty), bounds.ravel())
        found = found[::2]  # every second item is of a gap between ranges
        return np.where(bounds[:, 0] < bounds[:, 1], found, empty)

    def owns(self, layout: NodeLayout, slot: int) -> bool:
        """Whether the region of `layout` owns all pieces that a slot touches."""
        return all(self._raw[piece] == layout.region for piece in self.pieces(layout, slot, slot + 1))
