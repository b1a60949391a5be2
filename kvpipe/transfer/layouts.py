"""The layouts of the paged KV caches of vLLM 0.32 and 0.33, by name.

vLLM gives every layer one logical tensor [B, H, N, C]: blocks, heads, tokens of a block (states, for compressing
models), content. The content of one token in one head is the keys followed by the values. Only the strides define the
order of bytes. A layout's name has two halves. One half names the order of the bytes within one page. The other half
names the bytes between one block and the next block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

DIMENSIONS, OPAQUE_DIMENSIONS = 4, 2
DS_MLA_BYTES = (584, 656)
"""The bytes of one token in `fp8_ds_mla`, for DeepSeek V4 (448 + 128 + 8) and V3.2 (512 + 16 + 128)."""


class Paged(NamedTuple):
    """The shape and the strides of one layer's cache.

    `shape` is the logical shape [B * r, H, N, C], with r kernel blocks per block. `strides` are counted in elements.
    `itemsize` is the number of bytes of an element. `blocks` is B, the number of the scheduler's blocks.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    blocks: int

    @property
    def split(self) -> int:
        """The number of kernel blocks per block.

        The number is 1 if the attention kernel uses the scheduler's block size.
        """
        return self.shape[0] // self.blocks

    @property
    def page(self) -> int:
        """The number of elements of one kernel block."""
        return prod(self.shape[1:])

    def lies(self, *order: int) -> bool:
        """Return whether the dimensions `order`, outermost first, are contiguous. Dimensions of size 1 always fit."""
        run = 1
        for dim in reversed(order):
            if self.shape[dim] != 1 and self.strides[dim] != run:
                return False
            run *= self.shape[dim]
        return True

    @property
    def by_stride(self) -> list[int]:
        """The dimensions inside a kernel block, sorted by stride, the largest first."""
        return sorted(range(1, len(self.shape)), key=lambda dim: self.strides[dim], reverse=True)

    @property
    def heads(self) -> int:
        """The size of the head dimension, or 0 if the shape has no head dimension."""
        return self.shape[1] if len(self.shape) == DIMENSIONS else 0


Predicate = Callable[[Paged], bool]


@dataclass(frozen=True, slots=True)
class LayoutHalf:
    """One half of a layout's name."""

    name: str
    bytes: str
    """The dimensions in the order of the bytes, outermost first."""
    sentence: str
    """One line that says which caches have this half."""
    fits: Predicate


INSIDE: tuple[LayoutHalf, ...] = (
    LayoutHalf(
        "fp8_ds_mla",
        "N C",
        "sparse MLA with an fp8 cache: one record of 656 bytes (DeepSeek V4: 584) per token",
        lambda c: c.heads == 1 and c.itemsize == 1 and c.shape[3] in DS_MLA_BYTES and c.lies(1, 2, 3),
    ),
    LayoutHalf(
        "mla",
        "N C",
        "one head, so that HND and NHD are the same bytes: MLA's latents, an indexer's keys, one KV head a rank, or a "
        "recurrent state",
        lambda c: c.heads == 1 and c.lies(1, 2, 3),
    ),
    LayoutHalf(
        "hnd",
        "H N C",
        "heads first: vLLM's LBHNC and BLHNC, the CPU build's, FlashInfer's on Blackwell",
        lambda c: c.heads > 1 and c.lies(1, 2, 3),
    ),
    LayoutHalf(
        "nhd",
        "N H C",
        "tokens first: vLLM's LBNHC and BLNHC, preferred by FLASH_ATTN, TRITON_ATTN and FLASHINFER",
        lambda c: c.heads > 1 and c.lies(2, 1, 3),
    ),
)
"""The orders of a page's bytes. The first order that fits gives the name.

So a cache with one head is `mla`, and a cache with several heads and one token per block is `hnd`.
"""

BETWEEN: tuple[LayoutHalf, ...] = (
    LayoutHalf("", "B [{}]", "block after block", lambda c: c.split == 1 and c.strides[0] == c.page),
    LayoutHalf(
        "kernel_blocks_",
        "B r [{}]",
        "r kernel blocks per block, because the attention kernel uses smaller blocks than the scheduler",
        lambda c: c.split > 1 and c.strides[0] == c.page,
    ),
    LayoutHalf(
        "cross_layer_",
        "B L [{}]",
        "a block holds the pages of L layers of one size (BLHNC, BLNHC); this is one layer's view",
        lambda c: c.split == 1 and c.strides[0] > c.page and c.strides[0] % c.page == 0,
    ),
    LayoutHalf(
        "padded_",
        "B [{}] gap",
        "pages end in padding (page_size_padded, alignment) or are packed beside pages of other sizes",
        lambda c: c.split == 1 and c.strides[0] > c.page,
    ),
)
"""The strides between blocks. The first entry that fits gives the name, so a cache padded by whole pages is
`cross_layer_`."""

OPAQUE = LayoutHalf(
    "bytes",
    "P",
    "kvpipe's own scratch pages, [B, P]",
    lambda c: len(c.shape) == OPAQUE_DIMENSIONS and c.lies(1),
)


@dataclass(frozen=True, slots=True)
class LayoutAdapter:
    """A known layout, made of two halves."""

    inside: LayoutHalf
    between: LayoutHalf

    @property
    def name(self) -> str:
        """The layout's name in traces and errors."""
        return self.between.name + self.inside.name

    @property
    def bytes(self) -> str:
        """The dimensions in the order of the bytes. Brackets enclose the dimensions of one page."""
        return self.between.bytes.format(self.inside.bytes)

    @property
    def sentence(self) -> str:
        """One line that says which caches have this layout."""
        return f"{self.inside.sentence}; {self.between.sentence}"

    def fits(self, cache: Paged) -> bool:
        """Return whether a cache has this layout."""
        shape, blocks = cache.shape, cache.blocks
        # `split` needs a whole number of kernel blocks per block. Empty pages have no known layout.
        whole = len(shape) > 1 and blocks > 0 and prod(shape) > 0 and shape[0] % blocks == 0
        return whole and self.inside.fits(cache) and self.between.fits(cache)


_PLAIN, _, _, _PADDED = BETWEEN
ADAPTERS: dict[str, LayoutAdapter] = {
    adapter.name: adapter
    for adapter in (
        *(LayoutAdapter(inside, between) for inside in INSIDE for between in BETWEEN),
        LayoutAdapter(OPAQUE, _PLAIN),
        LayoutAdapter(OPAQUE, _PADDED),
    )
}
"""The layouts by name. A cache has the first layout that fits."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A reason to refuse a cache that no adapter fits."""

    why: str
    sentence: str
    """One line that says which caches are refused for this reason."""
    fits: Predicate


KV_OUTERMOST = "keys and values are two outermost planes, so one block is two runs of bytes"
HEADS_OUTERMOST = "the blocks of one head lie together, so the bytes of one block are not contiguous"
NOT_CONTIGUOUS = "the bytes of one block are not contiguous"
OVERLAP = "its blocks overlap"
KERNEL_BLOCKS_APART = "its kernel blocks are not contiguous within a block"
UNKNOWN_ORDER = "the bytes of one block are contiguous, but in no known order"

NOT_WHOLE = "its first dimension is not a multiple of the {blocks} blocks"
REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        KV_OUTERMOST,
        "attention backends before vLLM 0.32, [2, B, …]; none in 0.32 and 0.33",
        lambda c: len(c.shape) > 2 and c.shape[0] == 2 != c.blocks and c.blocks > 0 and c.shape[1] % c.blocks == 0,  # noqa: PLR2004
    ),
    Refusal(
        NOT_WHOLE,
        "no known release of vLLM",
        lambda c: len(c.shape) < OPAQUE_DIMENSIONS or c.blocks <= 0 or c.shape[0] % c.blocks != 0,
    ),
    Refusal(
        "it does not have the 4 dimensions [B, H, N, C], or one of them is empty",
        "attention backends before vLLM 0.32",
        lambda c: len(c.shape) not in {OPAQUE_DIMENSIONS, DIMENSIONS} or not prod(c.shape),
    ),
    Refusal(
        HEADS_OUTERMOST,
        "`VLLM_KV_CACHE_LAYOUT` LHBNC or BHLNC and more than one head; LHBNC is ROCm's own choice",
        lambda c: c.heads > 1 and c.lies(2, 3) and c.strides[1] > prod(c.shape[2:]),
    ),
    Refusal(NOT_CONTIGUOUS, "no known release of vLLM", lambda c: not c.lies(*c.by_stride)),
    Refusal(OVERLAP, "no known release of vLLM", lambda c: c.strides[0] < c.page),
    Refusal(
        KERNEL_BLOCKS_APART,
        "no known release of vLLM: 0.32 and 0.33 do not split packed or padded blocks",
        lambda c: c.split > 1 and c.strides[0] != c.page,
    ),
    Refusal(UNKNOWN_ORDER, "no known release of vLLM", lambda _: True),
)
"""The first refusal that fits gives the reason. A refusal may assume that no earlier refusal fits."""


def find_layout(cache: Paged) -> LayoutAdapter | None:
    """Return the layout of a cache. Return None if the layout is not known."""
    return next((one for one in ADAPTERS.values() if one.fits(cache)), None)


def why_unknown(cache: Paged) -> str:
    """Return the reason why no layout is known for a cache."""
    return next(one.why for one in REFUSALS if one.fits(cache)).format(blocks=cache.blocks)
