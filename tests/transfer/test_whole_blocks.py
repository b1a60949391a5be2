"""A block is copied whole if the pages of all its layers are side by side. Otherwise it is copied layer by layer."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from kvpipe.config.settings import load_settings
from kvpipe.protocol.geometry import Geometry, Group, Layer
from kvpipe.protocol.messages import Job, Kind, StepPlan
from kvpipe.testing.fake_device import FakeDevice
from kvpipe.testing.transfer_worlds import make_job
from kvpipe.transfer.base import CopyPlan, Direction
from kvpipe.transfer.cpu import CpuEngine
from kvpipe.transfer.cuda import CudaEngine
from kvpipe.transfer.movers import Mover
from kvpipe.transfer.pages import PageView, view_pages
from kvpipe.transfer.pool import HostPool
from kvpipe.transfer.whole_blocks import whole_blocks
from kvpipe.worker.caches import Hooks, PagedCaches
from kvpipe.worker.context import RankContext
from kvpipe.worker.side import WorkerSide
from tests.transfer.test_layouts import make_caches

NAMES = ["layer.0", "layer.1", "layer.2"]
BLOCKS, PAGES = 6, 4
Caches = dict[str, torch.Tensor]


def vllm_caches(order: str, *, windows: bool = False, dtype: torch.dtype = torch.bfloat16) -> Caches:
    """Return the caches of three layers as vLLM allocates them.

    With `windows` there is a second group of two layers.
    """
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec

    common: Any = {"block_size": 16, "num_kv_heads": 4, "head_size": 64, "dtype": dtype}
    groups = [KVCacheGroupSpec(NAMES, FullAttentionSpec(**common))]
    if windows:
        groups.append(KVCacheGroupSpec(["w.0", "w.1"], SlidingWindowSpec(sliding_window=64, **common)))
    return make_caches([TritonAttentionBackend] * len(groups), groups, order, BLOCKS)


def geometry_of(caches: Caches, *names: list[str]) -> Geometry:
    """Return the geometry of groups with the layers `names`. A chunk has `PAGES` blocks."""
    sizes = {name: view_pages(name, cache, BLOCKS).page_bytes for name, cache in caches.items()}
    groups = (Group(tuple(Layer(name, sizes[name]) for name in group), 16) for group in names)
    return Geometry(tuple(groups), 16 * PAGES, 1 << 22)


def views_of(caches: Caches, names: list[str]) -> list[PageView]:
    """Return the views of the layers `names`."""
    return [view_pages(name, caches[name], BLOCKS) for name in names]


def fill(caches: Caches) -> None:
    """Fill every block of every layer with different bytes."""
    for number, (name, cache) in enumerate(caches.items()):
        for block in range(BLOCKS):
            view_pages(name, cache, BLOCKS).tensor[block] = 1 + (number * BLOCKS + block) % 251


def page(caches: Caches, name: str, block: int) -> torch.Tensor:
    """Return the bytes of a block of a layer."""
    return view_pages(name, caches[name], BLOCKS).tensor[block]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
@pytest.mark.parametrize("order", ["BLNHC", "BLHNC"])
def test_cross_layer_blocks_are_one_copy_in_the_order_page_layer(order: str, dtype: torch.dtype) -> None:
    """Adjacent blocks are one run of bytes for all layers. VLLM's own code makes the caches."""
    caches = vllm_caches(order, dtype=dtype)
    fill(caches)
    geometry = geometry_of(caches, NAMES)
    whole = whole_blocks(geometry, views_of(caches, NAMES))
    assert whole is not None
    assert whole.geometry.slot_bytes == geometry.slot_bytes
    assert whole.geometry.pages_per_chunk == geometry.pages_per_chunk
    (view,) = whole.views
    assert view.dense
    pool, engine = HostPool(whole.geometry), CpuEngine(0)
    engine.attach(whole.views, whole.geometry, pool)
    blocks = [1, 2, 3, 0]
    save = CopyPlan(Direction.SAVE, [make_job(1, [(0, 0, at, block) for at, block in enumerate(blocks)])], 1)
    assert [run.pages for run in save.run_list(0)] == [3, 1]
    engine.copy_layer(save, 0)
    wanted = torch.cat([page(caches, name, block) for block in blocks for name in NAMES])
    assert torch.equal(pool.tensor[0, : len(wanted)], wanted)
    before = {name: cache.clone() for name, cache in caches.items()}
    fill(caches)
    load = CopyPlan(Direction.LOAD, [make_job(2, [(0, 0, 2, 1)])], 1)
    engine.copy_layer(load, 0)
    for name in NAMES:
        assert torch.equal(page(caches, name, 1), page(before, name, blocks[2]))
        assert torch.equal(page(caches, name, 2), page(before, name, 2))


def test_groups_that_overlay_each_other_have_whole_blocks_of_their_own() -> None:
    """In a group with fewer layers, there is a gap between adjacent blocks."""
    caches = vllm_caches("BLHNC", windows=True)
    geometry = geometry_of(caches, NAMES, ["w.0", "w.1"])
    whole = whole_blocks(geometry, views_of(caches, [*NAMES, "w.0", "w.1"]))
    assert whole is not None
    assert [view.page_bytes // caches["w.0"][0].nbytes for view in whole.views] == [3, 2]
    assert [view.dense for view in whole.views] == [True, False]


@pytest.mark.parametrize("order", ["LBNHC", "LBHNC"])
def test_usual_layouts_have_no_whole_blocks(order: str) -> None:
    """In usual layouts all blocks of a layer come before the blocks of the next layer, so no block is copied whole."""
    caches = vllm_caches(order)
    assert whole_blocks(geometry_of(caches, NAMES), views_of(caches, NAMES)) is None


def test_layers_in_another_order_within_a_block_are_copied_by_layer() -> None:
    """Such blocks are copied by layer, because whole copies would give a slot another order of layers."""
    caches = vllm_caches("BLNHC")
    names = ["layer.0", "layer.2", "layer.1"]
    assert whole_blocks(geometry_of(caches, names), views_of(caches, names)) is None


def test_blocks_with_gaps_or_without_neighbours_are_copied_by_layer() -> None:
    """Blocks with padding are not copied whole. A group of one layer has no layers to merge."""
    caches = vllm_caches("BLNHC")
    sizes = [Layer(name, 2 * page(caches, name, 0).numel()) for name in NAMES]
    padded = Geometry((Group(tuple(sizes), 16),), 16 * PAGES, 1 << 22)
    assert whole_blocks(padded, views_of(caches, NAMES)) is None
    for some in (["layer.0", "layer.2"], ["layer.1"]):
        assert whole_blocks(geometry_of(caches, some), views_of(caches, some)) is None
    apart = {name: cache.clone() for name, cache in vllm_caches("BLNHC").items()}
    assert whole_blocks(geometry_of(apart, NAMES), views_of(apart, NAMES)) is None


def test_hooks_keep_the_layers_of_a_block_apart() -> None:
    """If any layer calls its hook, no layers are merged, because the layer's copies follow the layer's attention."""
    caches = vllm_caches("BLNHC", windows=True)
    geometry = geometry_of(caches, NAMES, ["w.0", "w.1"])
    whole = PagedCaches(geometry, caches, BLOCKS, Hooks(frozenset(caches)))
    assert whole.whole
    assert whole.index == dict.fromkeys(NAMES, 0) | dict.fromkeys(["w.0", "w.1"], 1)
    assert whole.hooks.unhooked == {0, 1}
    by_layer = PagedCaches(geometry, caches, BLOCKS, Hooks(frozenset(caches) - {"w.1"}))
    assert not by_layer.whole
    assert by_layer.geometry is geometry
    assert by_layer.hooks.unhooked == {0, 1, 2, 3}


@pytest.mark.parametrize("mover", [Mover.DMA, Mover.STAGED, Mover.DIRECT])
def test_a_device_saves_and_loads_whole_blocks_also_after_a_sleep(mover: Mover) -> None:
    """After a sleep the caches have other addresses, and chunks that were saved before can be loaded."""
    caches, again = vllm_caches("BLNHC"), vllm_caches("BLNHC")
    fill(caches)
    geometry, device = geometry_of(caches, NAMES), FakeDevice()
    engine = CudaEngine(device, mover=mover, calibrate_s_max=0)
    paged = PagedCaches(geometry, caches, BLOCKS, Hooks(frozenset(NAMES)))
    side = WorkerSide(RankContext(load_settings({"prefault": "use"})), paged, engine=engine)
    runs = threading.Event()
    turns = threading.Thread(target=lambda: [device.step(0) for _ in iter(runs.is_set, True)])
    turns.start()
    try:
        save = make_job(1, [(0, 0, at, block) for at, block in enumerate([1, 2, 3, 0])])
        _step(side, save)
        side.release()
        assert side.restore(again)
        assert not side.lost
        _step(side, make_job(2, [(0, 0, 0, 3)], Kind.LOAD_SYNC))
        side.release()
    finally:
        runs.set()
        side.shutdown()
        turns.join()
    for name in NAMES:
        assert torch.equal(page(again, name, 3), page(caches, name, 1))
        assert not page(again, name, 2).any()


def _step(side: WorkerSide, job: Job) -> None:
    side.bind(StepPlan(1, (job,)))
    side.start_loads(None)
    for name in NAMES:
        side.wait_layer(name)
        side.save_layer(name)
    side.end_step()
    side.collect()
    side.unbind()
