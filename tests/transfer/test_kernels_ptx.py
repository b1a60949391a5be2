"""An interpreter runs the kernel's compiled code, checks every address, and compares every byte."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest

from kvpipe.transfer.device import DIRECT_PROGRAMS, STAGED_PROGRAMS_MAX, WARPS
from tests.transfer.ptx import Kernel, Memory

CAPABILITIES, WIDTHS, ALIGNMENTS = (80, 89, 90, 100, 103, 120), (128, 512, 2048), (8, 16)
PER_KIND = 2  # the number of compiled variants of each kind; one of them is always an H100's
COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvpipe.transfer.kernels import copy_pages

names = copy_pages.arg_names
made = []
for capability, staged, save, words, align in json.loads(sys.argv[1]):
    constants = {"STAGED": staged, "SAVE": save, "WORDS": words, "ALIGN": align}
    types = dict.fromkeys(names, "i32") | {"table": "*i32", "places": "*i64", "bay": "i64", "pool": "i64"}
    types |= dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i in (0, 1)}
    source = ASTSource(copy_pages, types, {(names.index(name),): value for name, value in constants.items()}, aligned)
    options = {"num_warps": int(sys.argv[2])}
    made.append(triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"])
print(json.dumps(made))
"""
LAYERS, FIRST_LAYER, BLOCKS, SLOTS, CHUNK_PAGES = 4, 1, 23, 5, 4
COPIED = 2  # the number of copied layers, from `FIRST_LAYER` on
SPANS = ((0, 0, 4), (2, 1, 3), (4, 0, 1), (1, 3, 1), (3, 0, 4))
"""(slot, first page, number of pages) of each span."""


class Variant(NamedTuple):
    """The constants of one compiled kernel."""

    capability: int
    staged: bool
    save: bool
    words: int
    align: int


def sample() -> list[Variant]:
    """Return the variants to compile, which are the same in each run."""
    drawn = random.Random(0)
    found = []
    for staged, save in itertools.product((True, False), repeat=2):
        pairs = drawn.sample(list(itertools.product(WIDTHS, ALIGNMENTS)), PER_KIND)
        capabilities = [90, *drawn.choices(CAPABILITIES, k=PER_KIND - 1)]
        found += [Variant(one, staged, save, *pair) for one, pair in zip(capabilities, pairs, strict=True)]
    return found


VARIANTS = sample()


@pytest.fixture(scope="module")
def kernels() -> dict[Variant, str]:
    """Compile all variants in one process."""
    command = [sys.executable, "-W", "ignore", "-c", COMPILE, json.dumps(VARIANTS), str(WARPS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return dict(zip(VARIANTS, json.loads(done.stdout), strict=True))


class Case:
    """Caches, a pool and a bay in memory, the rows of a plan, and the memory's expected content after a launch."""

    def __init__(self, variant: Variant, page_words: int, seed: int) -> None:
        """Fill memory at random. With an odd `seed` the cache has gaps between blocks, and few programs run."""
        rng = np.random.default_rng(seed)
        page, staged = page_words * 8, variant.staged
        stride = page + 48 * (seed % 2)
        slot_bytes = -(-LAYERS * CHUNK_PAGES * page // 4096) * 4096
        memory = Memory(0x7F00_0000_0000, 4 << 20)

        def drawn(size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
            return rng.integers(0, 256, size, dtype=np.uint8)

        caches = [memory.allocate(drawn(BLOCKS * stride)) for _ in range(LAYERS)]
        pool = memory.allocate(drawn(SLOTS * slot_bytes), 4096)
        blocks = rng.permutation(BLOCKS).tolist()
        rows: list[tuple[int, int, int, int, int]] = [(9, 9, 9, 0, 2), (8, 8, 8, 0, 2)]  # two rows of an earlier group
        first = len(rows)
        for slot, begin, pages in SPANS:
            span = len(rows)
            rows += [(slot, begin + i, blocks.pop(), span, pages) for i in range(pages)]
        table, count = memory.allocate(np.array(rows, np.int32)), len(rows) - first
        offsets = [layer * CHUNK_PAGES * page for layer in range(LAYERS)]
        places = memory.allocate(np.array([*zip(caches, offsets, strict=True)], np.int64))
        bay = memory.allocate(drawn(COPIED * count * page)) if staged else pool
        self.memory, self.copied = memory, COPIED * count * page
        self.wanted = memory.bytes.copy()
        for deep, (number, (slot, begin, block, span, pages)) in itertools.product(
            range(COPIED), enumerate(rows[first:], first)
        ):
            layer = FIRST_LAYER + deep
            paged = caches[layer] + block * stride
            in_bay = bay + ((span - first) * COPIED + deep * pages + number - span) * page
            other = in_bay if staged else pool + slot * slot_bytes + offsets[layer] + begin * page
            to, source = (other, paged) if variant.save else (paged, other)
            self.wanted[to - memory.base :][:page] = memory.view(source, page)
        pieces = -(-page_words // variant.words)
        self.grid = min(STAGED_PROGRAMS_MAX, COPIED * count * pieces) if staged else DIRECT_PROGRAMS
        self.grid = min(self.grid, 3) if seed % 2 else self.grid
        self.parameters = (
            table, places, bay, pool, slot_bytes, stride, page // variant.align, first, count, FIRST_LAYER, COPIED,
        )  # fmt: skip

    def run(self, ptx: str) -> None:
        """Run the kernel on the memory of this case."""
        Kernel(ptx).run(self.memory, self.grid, *self.parameters)


def sizes(variant: Variant) -> tuple[int, int, int]:
    """Return page sizes in words: as many words as a program copies at once, fewer words, and more words."""
    unit = variant.align // 8
    beyond = variant.words + 130 if variant.words == max(WIDTHS) else variant.words // 2 + 2
    return variant.words, variant.words - 8 + unit % 2, beyond


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(map(str, v)))
def test_compiled_kernel_copies_the_right_bytes(variant: Variant, kernels: dict[Variant, str]) -> None:
    """The kernel writes each byte of each page once, and touches no other byte."""
    for seed, page_words in enumerate(sizes(variant)):
        case = Case(variant, page_words, seed)
        case.run(kernels[variant])
        wrong = np.flatnonzero(case.memory.bytes != case.wanted)
        assert not len(wrong), (page_words, wrong[:5])
        assert case.memory.stored == case.copied, page_words


@pytest.mark.parametrize("change", [("mul.wide.s32", "add.s64"), ("st.global", "ld.global"), (", 5", ", 6")])
def test_wrong_code_is_found(change: tuple[str, str], kernels: dict[Variant, str]) -> None:
    """A change of an instruction or a number gives wrong bytes, or an access outside of allocated memory."""
    variant = VARIANTS[0]
    assert change[0] in kernels[variant]
    case = Case(variant, variant.words, 0)
    try:
        case.run(kernels[variant].replace(*change))
    except (AssertionError, KeyError):
        return
    assert (case.memory.bytes != case.wanted).any()
