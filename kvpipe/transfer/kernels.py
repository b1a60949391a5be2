"""The kernel `copy_pages` copies pages between the paged cache and a staging bay, or the slots of the host pool.

A row locates one page: (slot, page in the slot, block, first row of its span, rows of its span), int32. A *span* is a
range of adjacent pages of one slot. A bay holds ``[span][layer][page of the span]``. So a span of one layer is one
contiguous copy to or from the span's slot. A span that is a whole chunk is one contiguous copy for all layers together.

Triton compiles the kernel at run time, so no extension is installed. Triton does not specialise the kernel on integers.
Therefore one compiled kernel per combination of the constants serves every step, and no step waits for the compiler.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["bay", "pool", "slot_bytes", "stride", "vectors", "first", "count", "layer", "layers"],
)
def copy_pages(  # type: ignore[no-untyped-def]  # noqa: ANN201
    table,  # noqa: ANN001  (int32, rows x 5)
    places,  # noqa: ANN001  (int64, layers x 2: address of the layer's cache, offset of the layer in a slot)
    bay,  # noqa: ANN001  (address of the staging bay)
    pool,  # noqa: ANN001  (address of the host pool)
    slot_bytes,  # noqa: ANN001
    stride,  # noqa: ANN001  (bytes from block to block)
    vectors,  # noqa: ANN001  (units of ALIGN bytes of a page)
    first,  # noqa: ANN001  (number of the first row)
    count,  # noqa: ANN001  (number of rows)
    layer,  # noqa: ANN001  (number of the first layer)
    layers,  # noqa: ANN001  (number of layers)
    STAGED: tl.constexpr,  # noqa: N803
    SAVE: tl.constexpr,  # noqa: N803
    WORDS: tl.constexpr,  # noqa: N803
    ALIGN: tl.constexpr,  # noqa: N803
):
    """Copy `layers` x `count` pages. With n programs, each program copies every n-th range of at most WORDS words."""
    words = vectors * (ALIGN // 8)  # a visible multiple of ALIGN, so that the mask splits no access
    pieces = (words + WORDS - 1) // WORDS
    for item in range(tl.program_id(0), layers * count * pieces, tl.num_programs(0)):
        number = item // pieces
        row = first + number % count
        deep = number // count
        at = table + row * 5
        slot = tl.load(at).to(tl.int64)
        page = tl.load(at + 1).to(tl.int64)
        block = tl.load(at + 2).to(tl.int64)
        base = tl.load(places + (layer + deep) * 2)
        offset = tl.load(places + (layer + deep) * 2 + 1)
        lanes = (item % pieces) * WORDS + tl.arange(0, WORDS)
        inside = lanes < words
        if STAGED:
            span = tl.load(at + 3).to(tl.int64)
            pages = tl.load(at + 4).to(tl.int64)
            place = (span - first) * layers + deep * pages + row - span
            where = bay + place * words * 8
        else:
            where = pool + slot * slot_bytes + offset + page * words * 8
        paged = tl.multiple_of((base + block * stride).to(tl.pointer_type(tl.int64)), ALIGN) + lanes
        other = tl.multiple_of(where.to(tl.pointer_type(tl.int64)), ALIGN) + lanes
        if SAVE:
            tl.store(other, tl.load(paged, mask=inside), mask=inside)
        else:
            tl.store(paged, tl.load(other, mask=inside), mask=inside)
