"""Tests of tensor digests: every bit and every position count, on a CPU and in the sums that a device computes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from kvpipe.connectors.vllm.identity import digest
from kvpipe.connectors.vllm.identity.digest import device_digest, tensor_digest, tensors_digest

DIGESTS = pytest.mark.parametrize("digest_of", [tensor_digest, device_digest])
Digest = Callable[[torch.Tensor], str]


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    size = torch.empty(shape, dtype=dtype).element_size()
    words = torch.randint(0, 256, (*shape, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))
    return words.view(dtype).reshape(shape)


@DIGESTS
def test_every_bit_counts(digest_of: Digest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flipped bit changes the digest: in the first word, between two pieces, or in an incomplete last word."""
    monkeypatch.setattr(digest, "PIECE_BYTES", 64)
    data = _random(135, dtype=torch.uint8)
    found = {digest_of(data)}
    for bit in range(len(data) * 8):
        other = data.clone()
        other[bit // 8] ^= 1 << bit % 8
        found.add(digest_of(other))
    assert len(found) == len(data) * 8 + 1


@DIGESTS
def test_positions_of_values_count(digest_of: Digest) -> None:
    """The digest changes if rows, columns or words are exchanged, or if words change without changing their sum."""
    data = _random(16, 16, dtype=torch.int64)
    added = data.clone()
    added[0, 0] += 1
    added[9, 9] -= 1
    others = [data, data.flip(0), data.flip(1), data.roll(1, 1), data.t().contiguous(), added]
    swapped = data.clone()
    swapped[3, 3], swapped[7, 11] = data[7, 11], data[3, 3]
    assert len({digest_of(one) for one in [*others, swapped]}) == len(others) + 1


@DIGESTS
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool, torch.complex64]
)
def test_tensor_of_every_type_is_digested_without_gaps(
    digest_of: Digest, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor of any type can be digested. In a tensor with gaps, the bytes in the gaps do not count."""
    monkeypatch.setattr(digest, "PIECE_BYTES", 100)
    data = _random(13, 9, dtype=torch.uint8) % 2
    data = data.to(dtype)
    gaps = data[:, ::2]
    assert not gaps.is_contiguous()
    before = digest_of(gaps)
    data[:, 1::2] = data[:, :-1:2]
    assert digest_of(gaps) == before
    data[4, 4] = bool(data[4, 4] == 0)
    assert digest_of(gaps) != before


@DIGESTS
def test_tensor_without_dimensions_has_bytes(digest_of: Digest) -> None:
    """A tensor without dimensions has bytes. An empty tensor and a meta tensor have none."""
    assert digest_of(torch.tensor(1.0)) != digest_of(torch.tensor(2.0))
    assert tensor_digest(torch.empty(0)) == ""
    assert tensor_digest(torch.empty(3, device="meta")) == "meta"


def test_names_and_shapes_count() -> None:
    """The name, type and shape of a tensor change the digest of the weights. The order of tensors does not."""
    a, b = _random(4, 4), _random(4, 4) + 1
    reported = tensors_digest([("a", a), ("b", b)])
    assert reported == tensors_digest([("b", b), ("a", a)])
    assert reported == tensors_digest([("a", torch.nn.Parameter(a)), ("b", b)])
    for other in (
        [("a", b), ("b", a)],
        [("a", a), ("c", b)],
        [("a", a)],
        [("a", a.reshape(2, 8)), ("b", b)],
        [("a", a.view(torch.int32)), ("b", b)],
        [("a", a.t()), ("b", b)],
        [("a", a), ("b", b), ("c", torch.empty(0))],
    ):
        assert tensors_digest(other) != reported


_COMPARE = """
import contextlib
import functools
import torch
from kvpipe.connectors.vllm.identity import digest, digest_kernel

torch.cuda.device = contextlib.nullcontext
digest_kernel.PROGRAMS = 3
constants = *map(digest._signed, digest._LANES), *(digest._signed(factor) for _, factor in digest._MIXES)
host = torch.device("cpu")
add = functools.partial(digest_kernel.add_words, constants)
assert all(digest._agree(host, add, *case) for case in digest._CASES)
assert not digest._agree(host, lambda sums, words, before: None, 0, 0)
"""


def test_the_kernel_gives_the_sums_of_pytorch() -> None:
    """Engines with the kernel and engines without it share chunks.

    In this test Triton's interpreter runs the kernel.
    """
    command = [sys.executable, "-W", "ignore", "-c", _COMPARE]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
