"""Views of an engine's paged KV cache as (blocks, page bytes), for any order of the bytes inside a page.

The order of the bytes (heads first or tokens first, K and V packed) does not matter to a copy. Only the namespaces of
tiers depend on the order. A copy needs each block of one layer to be one contiguous range of bytes. All layouts of
`kvpipe.transfer.layouts` have this property. A tensor of any other layout is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from kvpipe.errors import UnsupportedError
from kvpipe.transfer.layouts import Paged, find_layout, why_unknown


@dataclass(frozen=True, slots=True)
class PageView:
    """One layer's paged cache: `blocks` pages of `page_bytes` bytes, `stride_bytes` apart, from address `base` on."""

    name: str
    base: int
    blocks: int
    page_bytes: int
    stride_bytes: int
    tensor: torch.Tensor
    """A uint8 view of the engine's cache, shape (blocks, page_bytes), strides (stride_bytes, 1)."""
    layout: str = "bytes"
    """The name of the layout in `kvpipe.transfer.layouts.ADAPTERS`."""

    @property
    def kind(self) -> tuple[int, int, int, str]:
        """All properties of this view that a copy depends on, except the address."""
        return self.blocks, self.page_bytes, self.stride_bytes, self.layout

    @property
    def dense(self) -> bool:
        """Whether block b + 1 follows block b without a gap, so that adjacent blocks are one copy."""
        return self.stride_bytes == self.page_bytes


def view_pages(name: str, cache: torch.Tensor, blocks: int) -> PageView:
    """View one layer's cache by block.

    Args:
        name: the layer's name, for messages.
        cache: logical shape (blocks * r, ...): vLLM's ``[B, H, N, C]`` with r kernel blocks per block (r >= 1).
        blocks: the number of blocks that vLLM's scheduler allocates from.

    Raises:
        UnsupportedError: no known layout has this shape and these strides.

    """
    shape, strides, itemsize = tuple(cache.shape), cache.stride(), cache.element_size()
    paged = Paged(shape, strides, itemsize, blocks)
    adapter = find_layout(paged)
    if adapter is None:
        msg = (
            f"kvpipe: the KV cache of layer {name!r} has shape {shape} and strides {strides}, a layout that kvpipe "
            f"does not know ({why_unknown(paged)}); choose another attention backend or "
            "VLLM_KV_CACHE_LAYOUT"
        )
        raise UnsupportedError(msg)
    split = shape[0] // blocks
    page, stride = prod(shape[1:]) * split * itemsize, strides[0] * split * itemsize
    flat = torch.empty(0, dtype=torch.uint8, device=cache.device)
    flat.set_(cache.untyped_storage(), cache.storage_offset() * itemsize, (blocks, page), (stride, 1))
    return PageView(name, flat.data_ptr(), blocks, page, stride, flat, adapter.name)
