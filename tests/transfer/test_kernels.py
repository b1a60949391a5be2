"""These tests compile the kernel for real GPU targets without a GPU, and check the generated code."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys

import pytest

from kvpipe.transfer.device import WARPS, WORDS_MAX, Launch
from kvpipe.transfer.kernels import copy_pages

_COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvpipe.transfer.kernels import copy_pages

constants, capability, warps = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
names = copy_pages.arg_names
types = dict.fromkeys(names, "i32") | {"table": "*i32", "places": "*i64", "bay": "i64", "pool": "i64"}
types |= dict.fromkeys(constants, "constexpr")
place = {name: i for i, name in enumerate(names)}
source = ASTSource(copy_pages, types, {(place[name],): value for name, value in constants.items()}, {})
made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
print(json.dumps({"ptx": made.asm["ptx"], "cubin": len(made.asm["cubin"]), "shared": made.metadata.shared}))
"""


@pytest.mark.parametrize(
    ("capability", "staged", "save", "align", "vector"),
    [
        (80, True, True, 16, "v2.b64"),
        (90, True, True, 16, "v2.b64"),
        (90, True, False, 16, "v2.b64"),
        (90, False, True, 16, "v2.b64"),
        (90, False, False, 8, "b64"),
        (100, False, False, 16, "v2.b64"),
    ],
)
def test_kernel_compiles_to_accesses_of_16_bytes(
    capability: int, staged: bool, save: bool, align: int, vector: str
) -> None:
    """The kernel compiles for three generations of GPUs.

    If all addresses allow it, a thread moves 16 bytes at a time.
    """
    constants = {"STAGED": staged, "SAVE": save, "WORDS": WORDS_MAX, "ALIGN": align}
    command = [sys.executable, "-W", "ignore", "-c", _COMPILE, json.dumps(constants), str(capability), str(WARPS)]
    made = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout)
    stores = re.findall(r"st\.global\.(\S+)", made["ptx"])
    loads = re.findall(r"ld\.global\.(\S+)", made["ptx"])
    per_thread = WORDS_MAX * 8 // (WARPS * 32) // (16 if vector.startswith("v2") else 8)
    assert stores == [vector] * per_thread
    assert loads.count(vector) >= per_thread, "and those of the tables"
    assert made["shared"] == 0, "it leaves shared memory to the forward"
    assert made["cubin"]


def test_no_step_waits_for_the_compiler() -> None:
    """Triton specialises no integer argument.

    Otherwise it would compile the kernel again, during a step, for the value 1 and for multiples of 16.
    """
    parameters = inspect.signature(copy_pages.fn).parameters
    integers = [name for name in parameters if name.islower() and name not in {"table", "places"}]
    assert copy_pages.do_not_specialize == integers
    small = Launch("table", "places", None, 1 << 40, 1, 1, 64, 0, 1, 0, 1, saving=True, align=16)
    large = small._replace(slot_bytes=1 << 26, stride=1 << 20, first=16, rows=4096, layer=16, layers=80)
    assert small.constants == large.constants
    assert [type(a) for a in small.arguments] == [type(a) for a in large.arguments]
    assert list(parameters) == [*parameters][: len(small.arguments)] + list(small.constants)


def test_a_launch_without_a_bay_has_a_64_bit_address_all_the_same() -> None:
    """Without a bay, the pool's address is passed in place of the bay's.

    For 0, a 32-bit integer, Triton would compile the kernel again.
    """
    launch = Launch("table", "places", None, 1 << 40, 4096, 64, 64, 0, 1, 0, 1, saving=True, align=16)
    assert launch.arguments[2] == 1 << 40
    assert launch.constants["STAGED"] is False


@pytest.mark.parametrize(("page_bytes", "words"), [(8, 1), (64, 8), (656 * 16, 2048), (8 << 10, 1024), (1 << 20, 2048)])
def test_a_program_takes_a_page_or_sixteen_kibibytes(page_bytes: int, words: int) -> None:
    """The words per iteration are the smallest power of two that holds a page, but at most 2048."""
    launch = Launch("table", "places", 1 << 40, 1 << 41, 4096, 64, page_bytes, 0, 3, 0, 2, saving=True, align=16)
    assert launch.constants["WORDS"] == words
    assert launch.programs == min(512, 2 * 3 * -(-page_bytes // (8 * words)))
    assert launch._replace(rows=0).programs == 1, "an empty grid is an error to CUDA"
