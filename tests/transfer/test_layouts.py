"""Tests of every known layout, and of the layouts that vLLM's own code makes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvpipe.errors import UnsupportedError
from kvpipe.transfer import layouts
from kvpipe.transfer.layouts import ADAPTERS, BETWEEN, INSIDE, Paged
from kvpipe.transfer.pages import PageView, view_pages

B, N, C, L = 6, 4, 8, 3  # the numbers of blocks, tokens per block, elements of content, and layers
DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn]
FULL = [name for name in ADAPTERS if name.endswith(("hnd", "nhd"))]
ONE = [name for name in ADAPTERS if name.endswith("mla")]


def make(
    name: str, dtype: torch.dtype, *, heads: int, content: int = C, split: int = 2
) -> tuple[list[torch.Tensor], int]:
    """Return a logical [B * r, H, N, C] tensor per layer, and r.

    The tensors are views of one buffer in the layout `name`. Each name has its own code here. The code follows vLLM's
    `create_kv_cache_views`.
    """
    between = name.removesuffix("hnd").removesuffix("nhd").removesuffix("fp8_ds_mla").removesuffix("mla")
    inner = (N, heads, content) if name.endswith("nhd") else (heads, N, content)
    page, gap = N * heads * content, 0
    r = 1
    if between == "kernel_blocks_":
        r = split
    if between == "cross_layer_":
        pages = [_bytes(B * L * page, dtype).view(B, L, *inner)[:, layer] for layer in range(L)]
    elif between == "padded_":
        gap = 16
        pages = [_bytes(B * (page + gap), dtype).view(B, page + gap)[:, :page].view(B, *inner) for _ in range(L)]
    else:
        pages = list(_bytes(L * B * r * page, dtype).view(L, B * r, *inner))
    return [p.transpose(1, 2) if name.endswith("nhd") else p for p in pages], r


def _bytes(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return `count` elements of random bytes."""
    generator = torch.Generator().manual_seed(count)
    raw = torch.randint(0, 256, (count * torch.empty(0, dtype=dtype).element_size(),), generator=generator)
    return raw.to(torch.uint8).view(dtype)


def as_bytes(cache: torch.Tensor) -> torch.Tensor:
    """Return the bytes of `cache` as a flat copy in logical order."""
    return cache.contiguous().flatten().view(torch.uint8)


def check_bytes(cache: torch.Tensor, view: PageView, r: int) -> None:
    """Check that page b of `view` has the bytes of logical block b, and that a write changes only these bytes."""
    blocks = view.blocks
    for b in range(blocks):
        assert view.tensor[b].data_ptr() == view.base + b * view.stride_bytes
        assert torch.equal(view.tensor[b].sort().values, as_bytes(cache[b * r : b * r + r]).sort().values)
    storage = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
    before, logical = storage.clone(), as_bytes(cache).clone()
    for b in range(blocks):
        view.tensor[b].bitwise_not_()
        assert torch.equal(as_bytes(cache[b * r : b * r + r]), ~logical.view(blocks, -1)[b])
        assert int((storage != before).sum()) == (b + 1) * view.page_bytes
    assert torch.equal(as_bytes(cache), ~logical)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FULL)
def test_cache_with_several_heads_has_the_expected_name(name: str, dtype: torch.dtype) -> None:
    """With two or more heads, the cache has the expected name, and a page has a block's bytes."""
    for heads in (2, 3, 8):
        caches, r = make(name, dtype, heads=heads)
        for cache in caches:
            view = view_pages("x", cache, B)
            assert view.layout == name
            assert (view.blocks, view.page_bytes) == (B, r * heads * N * C * cache.element_size())
            assert view.dense == name.startswith(("hnd", "nhd", "kernel_blocks"))
            check_bytes(cache, view, r)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ONE)
def test_cache_with_one_head_is_mla(name: str, dtype: torch.dtype) -> None:
    """A cache with one head is `mla` in either order of heads and tokens. `fp8_ds_mla` is recognised by its record."""
    records = [584, 656] if "ds_mla" in name else [C, 576]
    for content in records:
        caches, r = make(name, dtype, heads=1, content=content)
        again, _ = make(name.replace("fp8_ds_mla", "nhd").replace("mla", "nhd"), dtype, heads=1, content=content)
        wanted = name if dtype.itemsize == 1 else name.replace("fp8_ds_mla", "mla")
        for cache in (*caches, *again):
            view = view_pages("x", cache, B)
            assert view.layout == wanted
            assert view.page_bytes == r * N * content * cache.element_size()
            check_bytes(cache, view, r)


def test_every_adapter_has_a_test() -> None:
    """Every name of the table has a test in this file, and one line about its source."""
    assert {*FULL, *ONE, "bytes", "padded_bytes"} == set(ADAPTERS)
    assert len(ADAPTERS) == len(INSIDE) * len(BETWEEN) + 2
    for adapter in ADAPTERS.values():
        assert adapter.sentence
        assert "\n" not in adapter.sentence


@pytest.mark.parametrize("gap", [0, 8, 64])
def test_cache_of_two_dimensions_is_scratch_memory(gap: int) -> None:
    """A cache of the shape [B, P] is kvpipe's own scratch memory."""
    cache = _bytes(B * (64 + gap), torch.uint8).view(B, 64 + gap)[:, :64]
    view = view_pages("x", cache, B)
    assert view.layout == ("padded_bytes" if gap else "bytes")
    check_bytes(cache, view, 1)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("split", [2, 4])
def test_cache_with_smaller_kernel_blocks_is_split(heads: int, split: int) -> None:
    """A cache is `split` if the kernel's blocks are smaller than the scheduler's blocks.

    If they are equal, the layout has its plain name.
    """
    (cache, *_), r = make("kernel_blocks_hnd", torch.bfloat16, heads=heads, split=split)
    inside = "mla" if heads == 1 else "hnd"
    assert view_pages("x", cache, B).layout == f"kernel_blocks_{inside}"
    assert view_pages("x", cache, B * r).layout == inside


def test_one_token_a_block_is_heads_first() -> None:
    """With one token per block, both orders of heads and tokens have the same bytes. So both orders have one name."""
    for cache in (torch.zeros(B, 3, 1, C), torch.zeros(B, 1, 3, C).transpose(1, 2)):
        assert view_pages("x", cache, B).layout == "hnd"


def test_cache_matches_exactly_one_layout() -> None:
    """A cache with several heads matches exactly one name of the table.

    Padding of whole pages counts as a cross-layer layout.
    """
    for name in FULL:
        (cache, *_), _ = make(name, torch.bfloat16, heads=2)
        fitting = [n for n, a in ADAPTERS.items() if a.fits(Paged(tuple(cache.shape), cache.stride(), 2, B))]
        assert fitting in ([name], [name, name.replace("cross_layer", "padded")])


REFUSED = {
    layouts.KV_OUTERMOST: [(torch.zeros(2, 5, N, 3, C), 5), (torch.zeros(2, 5, C), 5), (torch.zeros(2, 10, 3, C), 5)],
    layouts.HEADS_OUTERMOST: [
        (torch.zeros(3, B, N, C).transpose(0, 1), B),  # the order LHBNC
        (torch.zeros(B, 3, L, N, C)[:, :, 1], B),  # the order BHLNC
        (torch.zeros(3, B * 2, N, C).transpose(0, 1), B),
        (torch.zeros(4, 2, N, C).transpose(0, 1), 2),  # the dimension of 2 is the blocks, not keys and values
    ],
    layouts.NOT_CONTIGUOUS: [
        (torch.zeros(B, 3, N, 2 * C)[..., :C], B),  # the view has only the keys
        (torch.zeros(B, 3, N, C)[:, :, ::2], B),
        (torch.zeros(B, N, 2, 3, C)[:, :, 0].transpose(1, 2), B),  # the view has only the keys, with tokens first
        (torch.zeros(B, 1, 1, C).expand(B, 3, N, C), B),
        (torch.zeros(B, 2 * C)[:, ::2], B),
    ],
    layouts.UNKNOWN_ORDER: [
        (torch.zeros(B, C, 3, N).permute(0, 2, 3, 1), B),
        (torch.zeros(B, 3, C, N).transpose(2, 3), B),
        (torch.zeros(B, 1, C, N).transpose(2, 3), B),
    ],
    layouts.KERNEL_BLOCKS_APART: [
        (torch.zeros(B * 2, L, 3, N, C)[:, 1], B),
        (torch.zeros(B * 2, 3 * N * C + 8)[:, : 3 * N * C].view(B * 2, 3, N, C), B),
        (torch.zeros(B * 2, 2 * C)[:, :C], B),
    ],
    layouts.OVERLAP: [
        (torch.as_strided(torch.zeros(100), (4, 16), (8, 1)), 4),
        (torch.as_strided(torch.zeros(1000), (B, 3, N, C), (N * C, N * C, C, 1)), B),
    ],
    "it does not have the 4 dimensions [B, H, N, C], or one of them is empty": [
        (torch.zeros(B, 2, N, 3, C), B),  # the order [B, K and V, …]
        (torch.zeros(B, N, C), B),
        (torch.zeros(B, 3, 0, C), B),
        (torch.zeros(B, 1, 0, C), B),
    ],
    "its first dimension is not a multiple of the 5 blocks": [
        (torch.zeros(7, 8), 5),
        (torch.zeros(7, 3, N, C), 5),
        (torch.zeros(5), 5),
    ],
}


@pytest.mark.parametrize(
    ("why", "cache", "blocks"),
    [pytest.param(why, *one, id=f"{why[:28]} {i}") for why, all_ in REFUSED.items() for i, one in enumerate(all_)],
)
def test_unknown_layouts_are_refused(why: str, cache: torch.Tensor, blocks: int) -> None:
    """The refusal names layer, shape, strides, the reason and the remedy."""
    with pytest.raises(UnsupportedError) as caught:
        view_pages("deep.1", cache, blocks)
    for message in ("'deep.1'", str(tuple(cache.shape)), str(cache.stride()), why, "VLLM_KV_CACHE_LAYOUT"):
        assert message in str(caught.value)


def test_every_reason_is_tested() -> None:
    """Every reason of refusal has a test."""
    assert {one.why.format(blocks=5) for one in layouts.REFUSALS} == set(REFUSED)


# ---- vLLM's own code ------------------------------------------------------------------------------------------------

ABSENT = {
    "CUSTOM": "a placeholder",
    "CUTLASS_MLA": "asks for the number of SMs when imported",
    "FLASHINFER": "needs flashinfer",
    "FLASHINFER_MLA": "needs flashinfer",
    "FLASH_ATTN_MLA": "needs CUDA's flash attention",
    "FLASH_ATTN_MLA_SPARSE": "needs CUDA's flash attention",
    "MINIMAX_M3_SPARSE": "needs torchvision",
    "NO_ATTENTION": "there is no such module",
    "ROCM_FLASHMLA_SPARSE_DSV4": "loads ROCm's operators, which ends the process",
    "TORCH_SDPA": "a placeholder",
    "TRITON_FLASHINFER": "needs flashinfer",
    "ULTRAQUANT": "needs Triton",
}
"""Backends that cannot be imported without a GPU.

They inherit vLLM's default placement, or the placement of a backend that is imported here.
"""
BLOCKS, BLOCK_TOKENS = 3, 256
Case = tuple[str, str, str]  # case, expected layout, found layout


@pytest.mark.slow
def test_every_layout_of_vllm_has_the_expected_name() -> None:
    """vLLM's own code makes the caches of every backend in every layout. Each cache has the expected name.

    The code runs in another process. On a machine without a GPU, the import of some backends ends the process.
    """
    done = subprocess.run([sys.executable, "-m", __name__], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line.partition("@")[2]) for line in done.stdout.splitlines() if line.startswith("layouts@")]
    asked = {name for name, _, _ in found}
    absent = {name: why for name, why, _ in found if why}
    assert set(absent) <= set(ABSENT), (absent, done.stderr[-4000:])
    assert asked - set(absent) > {
        *MADE,
        "FLASH_ATTN",
        "TRITON_ATTN",
        "FLASHMLA_SPARSE",
        "TRITON_MLA",
        "CPU_ATTN",
        "B12X",
    }
    cases: list[Case] = [tuple(case) for _, _, cases in found for case in cases]
    assert [case for case in cases if case[1] != case[2]] == []
    # every known layout occurs in the cases
    assert {name for _, _, name in cases} == {*FULL, *ONE, layouts.HEADS_OUTERMOST}


def _expected(order: str, heads: int, *, split: bool, layers: int, record: bool) -> str:
    """Return kvpipe's name for vLLM's layout `order`, derived from the letters of `order`."""
    if heads > 1 and (order == "LHBNC" or (order == "BHLNC" and layers > 1)):
        return layouts.HEADS_OUTERMOST
    heads_first = order.index("H") < order.index("N")
    inside = ("fp8_ds_mla" if record else "mla") if heads == 1 else "hnd" if heads_first else "nhd"
    between = "kernel_blocks_" if split else "cross_layer_" if order[0] == "B" and layers > 1 else ""
    return between + inside


def _layout_of(name: str, cache: torch.Tensor, blocks: int) -> str:
    """Check the bytes and return the layout's name, or return the reason of the refusal."""
    try:
        view = view_pages(name, cache, blocks)
    except UnsupportedError as exc:
        return next(one.why for one in layouts.REFUSALS if one.why in str(exc))
    facts = (tuple(cache.shape), cache.stride(), cache.dtype, blocks)
    if facts not in PROVEN:  # the proof runs once per kind of cache, because most backends make the same caches
        _prove(cache, view)
        PROVEN.add(facts)
    return view.layout


PROVEN: set[Any] = set()


def _prove(cache: torch.Tensor, view: PageView) -> None:
    """Check that page b of `view` is block b as vLLM groups kernel blocks. A write must change no other byte."""
    from vllm.v1.kv_cache_interface import group_kernel_blocks

    storage = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
    storage.zero_()
    for b in range(view.blocks):
        view.tensor[b].fill_(b + 1)
        assert int(storage.count_nonzero()) == (b + 1) * view.page_bytes
    for b, block in enumerate(group_kernel_blocks(cache, view.blocks)):
        assert bool((block.view(torch.uint8) == b + 1).all())
        assert block.numel() * block.element_size() == view.page_bytes


def make_caches(backends: list[Any], groups: list[Any], order: str, blocks: int = BLOCKS) -> dict[str, torch.Tensor]:
    """Return the caches by layer as vLLM makes them: groups, placement, kernel blocks, allocation and views."""
    try:  # the function's module in vLLM 0.33
        from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups
    except ImportError:
        from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import AttentionGroup, allocate_kv_cache, prepare_kernel_block_sizes

    layout = KVCacheLayout[order]
    cache_config = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: layout,
        num_gpu_blocks_override=blocks,
        prefix_cache_retention_interval=None,
    )
    config: Any = SimpleNamespace(cache_config=cache_config, attention_config=SimpleNamespace(hisparse_config=None))
    made = get_kv_cache_config_from_groups(config, groups, 1 << 40)
    attention = [
        [AttentionGroup(backend, g.layer_names, g.kv_cache_spec, i)]
        for i, (backend, g) in enumerate(zip(backends, groups, strict=True))
    ]
    kernel_blocks = prepare_kernel_block_sizes(made, attention)
    return allocate_kv_cache(made, torch.device("cpu"), layout, kernel_blocks)


def _specs(backend: Any) -> Iterator[tuple[str, Any, bool]]:
    """Yield vLLM's attention layers for `backend` as (name, specification, whether the cache has records)."""
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, MLAAttentionSpec
    from vllm.v1.worker.utils import customize_attention_spec

    size = (backend.get_supported_head_sizes() or [576 if backend.is_mla() else 128])[-1]
    takes = backend.get_supported_kernel_block_sizes(None)
    smallest = min(one.base if isinstance(one, MultipleOf) else one for one in takes)
    for tokens in sorted({max(smallest, 16), BLOCK_TOKENS}):
        common: Any = {"block_size": tokens, "head_size": size}
        for dtype in (torch.bfloat16, torch.uint8, torch.float8_e4m3fn):
            fp8 = KVQuantMode.NONE if dtype is torch.bfloat16 else KVQuantMode.FP8_PER_TENSOR
            for heads in (1,) if backend.is_mla() else (1, 4):
                kind = MLAAttentionSpec if backend.is_mla() else FullAttentionSpec
                spec = kind(num_kv_heads=heads, dtype=dtype, kv_quant_mode=fp8, **common)
                yield f"{heads} heads {dtype} {tokens} tokens", customize_attention_spec(backend, spec), False
        if backend.is_mla():
            for record in layouts.DS_MLA_BYTES:
                spec = MLAAttentionSpec(num_kv_heads=1, dtype=torch.uint8, state_content_bytes=record, **common)
                yield f"fp8_ds_mla {record} {tokens} tokens", customize_attention_spec(backend, spec), True


def _ask(backend: Any) -> Iterator[Case]:
    """Yield the cases of one backend."""
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec
    from vllm.v1.kv_cache_layout import KVCacheLayout

    for what, spec, record in _specs(backend):
        for layout in backend.supported_kv_cache_layouts() or tuple(KVCacheLayout):
            for layers in (1, 3):
                names = [f"layer.{i}" for i in range(layers)]
                try:
                    caches = make_caches([backend], [KVCacheGroupSpec(names, spec)], layout.name)
                except ValueError as exc:  # vLLM makes no such cache
                    if "kernel blocks" not in str(exc) and "No common block size" not in str(exc):
                        raise
                    continue
                for name, cache in caches.items():
                    split = cache.shape[0] > BLOCKS
                    wanted = _expected(layout.name, cache.shape[1], split=split, layers=layers, record=record)
                    yield f"{layout.name} {layers} layers {what}", wanted, _layout_of(name, cache, BLOCKS)


def _nvfp4() -> Iterator[Case]:
    """Yield FLASHINFER's nvfp4 caches: keys and values are separate heads, and 128 elements of a head take 72 bytes."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    for heads in (1, 4):
        common: Any = {"num_kv_heads": heads, "head_size": 128, "dtype": torch.uint8}
        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_head_slots=2 * heads, state_content_bytes=72, **common)
        for order, wanted in (("LBHNC", "hnd"), ("LBNHC", "nhd"), ("BLHNC", "cross_layer_hnd")):
            yield from _of_groups(f"nvfp4 {heads} heads", [{f"layer.{i}": (spec, wanted) for i in range(3)}], order)


def _mixed() -> Iterator[Case]:
    """Yield sparse MLA's latents and its indexer's keys in one group.

    Pages have two sizes, and are side by side if packed.
    """
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    common: Any = {"block_size": 64, "num_kv_heads": 1}
    record = MLAAttentionSpec(head_size=576, dtype=torch.uint8, state_content_bytes=656, **common)
    keys = MLAAttentionSpec(head_size=132, dtype=torch.uint8, **common)
    aligned = MLAAttentionSpec(head_size=512, dtype=torch.uint8, state_content_bytes=584, alignment=576, **common)
    even = MLAAttentionSpec(head_size=64, dtype=torch.bfloat16, alignment=16384, **common)
    for order, way in (("LBNHC", ""), ("LBHNC", ""), ("BLHNC", "padded_"), ("BLNHC", "padded_")):
        layers = {"a": (record, f"{way}fp8_ds_mla"), "b": (keys, f"{way}mla"), "c": (record, f"{way}fp8_ds_mla")}
        yield from _of_groups("latents and keys", [layers], order)
        yield from _of_groups("aligned", [{"a": (aligned, "padded_fp8_ds_mla")}], order)
        yield from _of_groups("aligned to whole pages", [{"a": (even, "cross_layer_mla")}], order)


def _hybrid() -> Iterator[Case]:
    """Yield full and sliding-window layers in groups that overlay each other, with and without padded pages."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    common: Any = {"block_size": 16, "num_kv_heads": 4, "dtype": torch.bfloat16}
    full = FullAttentionSpec(head_size=64, **common)
    window = SlidingWindowSpec(head_size=64, sliding_window=64, **common)
    short = SlidingWindowSpec(head_size=48, sliding_window=64, page_size_padded=full.page_size_bytes, **common)
    for order, wanted in (
        ("LBHNC", "hnd"),
        ("LBNHC", "nhd"),
        ("BLHNC", "cross_layer_hnd"),
        ("BLNHC", "cross_layer_nhd"),
    ):
        groups = [{f"{kind}.{i}": (spec, wanted) for i in range(2)} for kind, spec in (("f", full), ("w", window))]
        yield from _of_groups("two groups", groups, order)
        gap = "padded_" + wanted[-3:]
        groups = [{"f": (full, wanted[-3:])}, {"s": (short, gap)}]
        yield from _of_groups("a padded group", groups, order)


def _of_groups(what: str, groups: list[dict[str, Any]], order: str) -> Iterator[Case]:
    """Yield the cases of groups of {layer: (specification, expected layout)} that have no backend."""
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, UniformTypeKVCacheSpecs

    made = []
    for layers in groups:
        specs = {name: spec for name, (spec, _) in layers.items()}
        one = next(iter(specs.values()))
        mixed = len(set(specs.values())) > 1
        group = UniformTypeKVCacheSpecs(block_size=one.block_size, kv_cache_specs=specs) if mixed else one
        made.append(KVCacheGroupSpec(list(layers), group))
    wanted = {name: layout for layers in groups for name, (_, layout) in layers.items()}
    for name, cache in make_caches([TritonAttentionBackend] * len(groups), made, order).items():
        yield f"{order} {what} {name}", wanted[name], _layout_of(name, cache, BLOCKS)


MADE = {"FLASHINFER nvfp4": _nvfp4, "mixed pages": _mixed, "groups": _hybrid}


def _answers() -> dict[str, tuple[Callable[[], Any], Callable[[Any], Iterator[Case]]]]:
    """Return (import, function) by name, for every backend of vLLM and for other groups.

    `function` yields the cases of the import's result.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    made: dict[str, Any] = {name: (lambda one=one: one, lambda ask: ask()) for name, one in MADE.items()}
    return {one.name: (one.get_class, _ask) for one in AttentionBackendEnum} | made


def _report(names: list[str], out: int) -> None:
    """Write a line of JSON per name to `out`: [name, reason of a failed import or "", cases]."""
    answers = _answers()
    for name in names:
        load, ask = answers[name]
        try:
            found = load()
        except Exception as exc:  # noqa: BLE001  (whatever an import raises; the caller knows which may)
            line: list[Any] = [name, repr(exc)[:200], []]
        else:
            line = [name, "", list(ask(found))]
        os.write(out, (json.dumps(line) + "\n").encode())


def _main() -> None:
    """Compute the cases in a child process.

    If importing a backend ends the child, a new child continues with the next backend.
    """
    import vllm.v1.attention.backends.triton_attn  # noqa: F401  (children inherit the modules that all backends import)

    torch.set_num_threads(1)
    names = list(_answers())
    while names:
        sys.stdout.flush()
        end, out = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                _report(names, out)
            except BaseException:  # noqa: BLE001  (the child must not go on as the parent)
                traceback.print_exc()
            os._exit(0)
        os.close(out)
        with os.fdopen(end, encoding="utf-8") as lines:
            for line in lines:
                sys.stdout.write(f"layouts@{line}")
                names.pop(0)
        _, status = os.waitpid(child, 0)
        if names:
            sys.stdout.write(f"layouts@{json.dumps([names.pop(0), f'it ended the process: {status}', []])}\n")


if __name__ == "__main__":
    _main()
