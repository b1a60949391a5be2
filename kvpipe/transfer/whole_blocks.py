"""Whole blocks: if the pages of all layers of a block are adjacent in memory, one copy moves the whole block.

vLLM's cross-layer layouts (BLHNC, BLNHC) store blocks in this way. If all layers of a group are copied at once, the
group counts as a single layer whose page is the block. In this case a slot holds ``[page][layer]`` instead of
``[layer][page]``, and adjacent blocks are one copy for all layers. So tiers must not mix chunks of these two orders.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from kvpipe.protocol.geometry import Geometry, Layer
from kvpipe.transfer.pages import PageView


class WholeBlocks(NamedTuple):
    """A rank's caches with one layer per group: the geometry, and one view per group."""

    geometry: Geometry
    views: tuple[PageView, ...]


def whole_blocks(geometry: Geometry, views: Sequence[PageView]) -> WholeBlocks | None:
    """Return the caches with one layer per group, or None unless the blocks of every group can be copied whole.

    `views` has one view per layer, in the order of `geometry.layers`. The result is also None if every group has only
    one layer.
    """
    groups, merged, first = [], [], 0
    for group in geometry.groups:
        mine = views[first : first + len(group.layers)]
        first += len(mine)
        view, block = mine[0], mine[0].page_bytes * len(mine)
        if any(layer.page_bytes != view.page_bytes for layer in group.layers) or not _side_by_side(mine):
            return None
        tensor = view.tensor.as_strided((view.blocks, block), (view.stride_bytes, 1))
        merged.append(dataclasses.replace(view, page_bytes=block, tensor=tensor))
        groups.append(dataclasses.replace(group, layers=(Layer(view.name, block),)))
    if len(groups) == len(views):
        return None
    return WholeBlocks(dataclasses.replace(geometry, groups=tuple(groups)), tuple(merged))


def _side_by_side(views: Sequence[PageView]) -> bool:
    """Whether the pages of a block in all `views` are adjacent, in the order of `views`."""
    first = views[0]
    memory, size = first.tensor.untyped_storage().data_ptr(), first.page_bytes
    return first.stride_bytes >= size * len(views) and all(
        view.kind == first.kind
        and view.base == first.base + number * size
        and view.tensor.untyped_storage().data_ptr() == memory
        for number, view in enumerate(views)
    )
