"""Views of an engine's paged KV cache as (blocks, page bytes), whatever order the bytes inside a page have.

The order inside a page (heads first or tokens first, K and V packed) does not matter to a copy; it is part of the
cache's identity instead. What matters is that one block of one layer is one contiguous run of bytes. A tensor for
which that does not hold is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvpipe.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class PageView:
    """One layer's paged cache: `blocks` pages of `page_bytes`, `stride_bytes` apart, from address `base`."""

    name: str
    base: int
    blocks: int
    page_bytes: int
    stride_bytes: int
    tensor: torch.Tensor
    """uint8, shape (blocks, page_bytes), strides (stride_bytes, 1), aliasing the engine's cache."""

    @property
    def dense(self) -> bool:
        """Whether block b + 1 follows block b without a gap, so that adjacent blocks are one copy."""
        return self.stride_bytes == self.page_bytes


def view_pages(name: str, cache: torch.Tensor, blocks: int) -> PageView:
    """View one layer's cache by block.

    Args:
        name: the layer's name, for errors.
        cache: logical shape (blocks * r, ...): vLLM's ``[B, H, N, C]`` with r kernel blocks per block (r >= 1).
        blocks: the number of blocks that the scheduler hands out.

    Raises:
        UnsupportedError: the first dimension is not the blocks, or a block's bytes are not contiguous.

    """
    if cache.dim() < 2 or blocks <= 0 or cache.shape[0] % blocks:  # noqa: PLR2004
        _refuse(name, cache, f"its first dimension is not a multiple of the {blocks} blocks")
    split = cache.shape[0] // blocks
    itemsize = cache.element_size()
    run = 1
    inner = sorted(zip(cache.stride()[1:], cache.shape[1:], strict=True))
    for stride, size in inner:
        if size == 1:
            continue
        if stride != run:
            _refuse(name, cache, "the bytes of one block are not contiguous")
        run *= size
    stride0 = cache.stride(0)
    if split > 1 and stride0 != run:
        _refuse(name, cache, "its kernel blocks are not contiguous within a block")
    page, stride = run * split * itemsize, stride0 * split * itemsize
    if stride < page:
        _refuse(name, cache, "its blocks overlap")
    flat = torch.empty(0, dtype=torch.uint8, device=cache.device)
    flat.set_(cache.untyped_storage(), cache.storage_offset() * itemsize, (blocks, page), (stride, 1))
    return PageView(name, flat.data_ptr(), blocks, page, stride, flat)


def _refuse(name: str, cache: torch.Tensor, why: str) -> None:
    msg = (
        f"kvpipe: the KV cache of layer {name!r} has shape {tuple(cache.shape)} and strides {cache.stride()}, a layout "
        f"that kvpipe does not know ({why}); choose another attention backend or VLLM_KV_CACHE_LAYOUT"
    )
    raise UnsupportedError(msg)
