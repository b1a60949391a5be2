"""Tests of the arithmetic of units, chunks and slots."""

from __future__ import annotations

import pytest

from kvpipe.errors import ConfigError
from kvpipe.protocol.geometry import SLOT_ALIGN_BYTES, Geometry, Group, Layer
from kvpipe.transfer.pool import HostPool


def _mixed(chunk_tokens: int = 96, pool_bytes_max: int = 1 << 20) -> Geometry:
    full = Group((Layer("a", 1000), Layer("b", 500)), block_tokens=16)
    window = Group((Layer("c", 3000),), block_tokens=24, window_tokens=100)
    return Geometry((full, window), chunk_tokens, pool_bytes_max)


def test_units_of_groups_with_different_block_sizes() -> None:
    """A unit is the least common multiple of the block sizes. So it consists of whole blocks of every group."""
    g = _mixed()
    assert g.unit_tokens == 48
    assert g.units_per_chunk == 2
    assert g.pages_per_unit == (3, 2)
    assert g.pages_per_chunk == (6, 4)
    assert [p * group.block_tokens for p, group in zip(g.pages_per_chunk, g.groups, strict=True)] == [96, 96]


def test_layers_lie_one_after_another_in_a_slot() -> None:
    """A layer is one slice of the slot. The slice begins behind the pages of the group's earlier layers."""
    g = _mixed()
    assert g.layer_offsets == ((0, 6000), (0,))
    assert g.groups[0].bytes_per_block == 1500
    assert g.layers == ((0, 0), (0, 1), (1, 0))


def test_a_slot_is_the_largest_chunk_aligned() -> None:
    """The largest chunk of any group has 12,000 bytes here. A slot has this size, rounded up to whole memory pages."""
    g = _mixed()
    assert g.slot_bytes == 12288
    assert g.slot_bytes % SLOT_ALIGN_BYTES == 0
    assert g.slots == (1 << 20) // 12288


def test_unit_is_a_block_with_one_group() -> None:
    """With one group, a unit is one block."""
    g = Geometry((Group((Layer("a", 64),), block_tokens=32),), 256, 4096)
    assert (g.unit_tokens, g.units_per_chunk, g.pages_per_unit, g.slots) == (32, 8, (1,), 1)


@pytest.mark.parametrize(("chunk", "near"), [(100, 96), (1, 48), (47, 48), (130, 144)])
def test_a_chunk_that_is_no_multiple_is_refused(chunk: int, near: int) -> None:
    """The refusal names the key, the value, the block size and the nearest size that works."""
    with pytest.raises(ConfigError) as caught:
        _mixed(chunk_tokens=chunk)
    assert f"chunk_tokens={chunk} is not a multiple of the engine's block size 48" in str(caught.value)
    assert str(caught.value).endswith(f"set chunk_tokens={near}")
    assert _mixed(chunk_tokens=near).chunk_tokens == near


def test_a_pool_smaller_than_a_chunk_is_refused() -> None:
    """The refusal names the key, the value and the smallest value that works."""
    with pytest.raises(ConfigError, match=r"pool_bytes_max=12287B .*at least 12KiB") as caught:
        _mixed(pool_bytes_max=12287)
    assert "96 tokens" in str(caught.value)
    assert _mixed(pool_bytes_max=12288).slots == 1


def test_the_pool_has_the_geometrys_slots() -> None:
    """The pool's slots are page-aligned, adjacent and do not overlap."""
    g = _mixed(pool_bytes_max=3 * 12288 + 5)
    pool = HostPool(g)
    assert pool.tensor.shape == (3, 12288)
    assert pool.base % SLOT_ALIGN_BYTES == 0
    pool.slot(1).fill_(7)
    assert [int(pool.slot(i).sum()) for i in range(3)] == [0, 7 * 12288, 0]
    assert pool.slot(2).data_ptr() == pool.base + 2 * 12288


def test_end_of_a_window_within_a_unit_is_stored() -> None:
    """If a window is shorter than a unit, only the last blocks of a unit are needed, so only these are stored.

    With a long window, all blocks are stored.
    """
    layers = (Layer("x", 64),)
    full, state, short = Group(layers, 256), Group(layers, 4, 8), Group(layers, 64, 128)
    long, one, local = Group(layers, 64, 258), Group(layers, 64, 1), Group(layers, 64, 256, local=True)
    g = Geometry((full, state, short, long, one, local), chunk_tokens=512, pool_bytes_max=1 << 20)
    assert g.blocks_per_unit == (1, 64, 4, 4, 4, 4)
    assert g.pages_per_unit == (1, 2, 2, 4, 1, 4)
    assert g.pages_per_chunk == (2, 4, 4, 8, 2, 8)
    assert g.tails
    assert not Geometry((full, long, local), chunk_tokens=512, pool_bytes_max=1 << 20).tails
    table = range(200)
    assert list(g.paging[1].stored(table, 1, 3)) == [126, 127, 190, 191]
    assert list(g.paging[3].stored(table, 1, 3)) == list(range(4, 12))
    assert list(g.paging[1].stored(table[:190], 1, 3)) == [126, 127]


def test_small_part_of_a_long_prompt_is_read_for_windows() -> None:
    """All KV of a window is stored, but a long prompt reads only the last window.

    So the bytes read per token count only full attention.
    """
    layers = (Layer("x", 64),)
    groups = Group(layers, 16), Group(layers, 16, window_tokens=128), Group(layers, 64, state=True)
    g = Geometry(groups, chunk_tokens=256, pool_bytes_max=1 << 20)
    assert (g.token_bytes, g.whole_token_bytes) == (2 * 64 / 16, 64 / 16)
    assert Geometry(groups[1:2], chunk_tokens=256, pool_bytes_max=1 << 20).whole_token_bytes == 0


def test_where_ranks_divide_blocks_a_prefix_ends_within_one() -> None:
    """A state may end within a block of attention.

    So a unit is a block of states, and the last page of attention may be filled only in part.
    """
    layers = (Layer("x", 64),)
    full, state = Group(layers, 128, ranks=4), Group(layers, 32, state=True)
    g = Geometry((full, state), chunk_tokens=256, pool_bytes_max=1 << 20)
    assert (g.unit_tokens, g.units_per_chunk, g.units_per_block, g.whole_units) == (32, 8, (4, 1), 4)
    assert g.pages_per_chunk == (2, 1)
    assert g.token_bytes == 64 / 128
    assert [g.paging[0].pages(units) for units in range(9)] == [0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert [list(g.paging[0].stored(range(9), 4, units)) for units in (5, 8, 9)] == [[1], [1], [1, 2]]
    assert list(g.paging[1].stored(range(9), 4, 6)) == [4, 5]
    assert Geometry((full,), chunk_tokens=128, pool_bytes_max=1 << 20).unit_tokens == 128
    with pytest.raises(ConfigError, match="block size 128; set chunk_tokens=128"):
        Geometry((full, state), chunk_tokens=160, pool_bytes_max=1 << 20)
