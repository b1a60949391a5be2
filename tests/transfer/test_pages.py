"""A known layout of vLLM's paged caches is viewed block by block. A layout in which a block is scattered is refused."""

from __future__ import annotations

import pytest
import torch

from kvpipe.errors import UnsupportedError
from kvpipe.transfer.pages import view_pages

B, H, N, C, L = 6, 2, 4, 8, 3  # the numbers of blocks, heads, tokens per block, elements of content, and layers
LAYOUTS = {"LBHNC": "hnd", "LBNHC": "nhd", "BLHNC": "cross_layer_hnd", "BLNHC": "cross_layer_nhd"}


def _layers(physical: str, *, heads: int = H, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return one logical [B, H, N, C] tensor per layer over one buffer. Its dimensions have the order `physical`."""
    size = {"L": L, "B": B, "H": heads, "N": N, "C": C}
    count = L * B * heads * N * C
    buffer = torch.arange(count, dtype=torch.int32).to(dtype).view([size[d] for d in physical])
    logical = buffer.permute([physical.index(d) for d in "LBHNC"])
    return [logical[i] for i in range(L)]


@pytest.mark.parametrize("physical", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_known_layouts_view_the_bytes_of_each_block(physical: str, dtype: torch.dtype) -> None:
    """View block b holds exactly the elements of logical block b, and a write to it changes only logical block b."""
    for layer in _layers(physical, dtype=dtype):
        view = view_pages("x", layer, B)
        assert view.layout == LAYOUTS[physical]
        assert (view.blocks, view.page_bytes) == (B, H * N * C * layer.element_size())
        assert view.dense == (physical[0] == "L")
        assert view.tensor.shape == (B, view.page_bytes)
        for b in range(B):
            seen = view.tensor[b].view(dtype).sort().values
            assert torch.equal(seen, layer[b].flatten().sort().values)
            assert view.tensor[b].data_ptr() == view.base + b * view.stride_bytes
        before = layer.clone()
        view.tensor[2].zero_()
        assert not layer[2].any()
        keep = [b for b in range(B) if b != 2]
        assert torch.equal(layer[keep], before[keep])


@pytest.mark.parametrize("physical", ["LHBNC", "BHLNC"])
def test_layouts_that_cut_a_block_up_are_refused(physical: str) -> None:
    """With several heads these layouts scatter a block. The refusal names the layer, the shape and the remedy."""
    layer = _layers(physical)[1]
    with pytest.raises(UnsupportedError, match=r"'deep\.1'") as caught:
        view_pages("deep.1", layer, B)
    assert str(tuple(layer.shape)) in str(caught.value)
    assert "not contiguous" in str(caught.value)
    assert "VLLM_KV_CACHE_LAYOUT" in str(caught.value)


@pytest.mark.parametrize(("physical", "name"), [("LHBNC", "mla"), ("BHLNC", "cross_layer_mla")])
def test_cache_with_one_head_is_plain(physical: str, name: str) -> None:
    """With one head (MLA), each block is one run of bytes in the same layouts."""
    for layer in _layers(physical, heads=1):
        view = view_pages("x", layer, B)
        assert view.layout == name
        assert view.page_bytes == N * C * 4
        for b in range(B):
            assert torch.equal(view.tensor[b].view(torch.float32), layer[b].flatten())


def test_kernel_blocks_within_a_block() -> None:
    """If a block has r kernel blocks, the view takes r kernel blocks as one block."""
    cache = torch.arange(B * 4 * H * N * C, dtype=torch.float32).view(B * 4, H, N, C)
    view = view_pages("x", cache, B)
    assert (view.blocks, view.page_bytes, view.dense) == (B, 4 * H * N * C * 4, True)
    assert torch.equal(view.tensor[3].view(torch.float32), cache[12:16].flatten())


def test_gaps_between_kernel_blocks_are_refused() -> None:
    """A gap between kernel blocks of one block is refused, because with a gap the block is not one run of bytes."""
    cache = torch.zeros(B * 2, 3, H * N * C)[:, 1].view(B * 2, H, N, C)
    with pytest.raises(UnsupportedError, match="kernel blocks are not contiguous"):
        view_pages("x", cache, B)
    assert not view_pages("x", cache, B * 2).dense


def test_padded_pages_and_an_offset() -> None:
    """Pages include neither the padding between blocks nor the bytes before a storage offset."""
    buffer = torch.arange(5 + B * 100, dtype=torch.float32)
    cache = torch.as_strided(buffer, (B, H, N, C), (100, N * C, C, 1), 5)
    view = view_pages("x", cache, B)
    assert (view.page_bytes, view.stride_bytes, view.dense) == (256, 400, False)
    assert torch.equal(view.tensor[4].view(torch.float32), cache[4].flatten())


@pytest.mark.parametrize(
    ("cache", "blocks"),
    [(torch.zeros(7, 8), 2), (torch.zeros(8), 8), (torch.zeros(4, 8), 0)],
    ids=["no multiple", "one dimension", "no blocks"],
)
def test_a_first_dimension_that_is_not_the_blocks_is_refused(cache: torch.Tensor, blocks: int) -> None:
    """The first dimension must be the number of blocks, or a multiple of it."""
    with pytest.raises(UnsupportedError, match="first dimension"):
        view_pages("x", cache, blocks)


def test_overlapping_blocks_are_refused() -> None:
    """Blocks that share bytes would overwrite each other."""
    with pytest.raises(UnsupportedError, match="overlap"):
        view_pages("x", torch.as_strided(torch.zeros(100), (4, 16), (8, 1)), 4)
