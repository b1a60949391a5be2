"""Computes digests of tensors at memory speed. A change of any bit of the weights changes the digest.

On a CPU the digest is xxh3-128. On other devices the digest is a sum of 64-bit words, each mixed with its position. The
words are integers, so the order of the additions does not matter. Neither digest is cryptographic.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import numpy as np
import torch
import xxhash
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from kvpipe.trace.log import log

PIECE_BYTES: Final = 32 << 20
"""The largest number of bytes that are digested at once."""
_WORD_BYTES: Final = 8
_LANES: Final = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)
_MIXES: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def tensors_digest(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return the digest of the tensors' names, shapes, strides, dtypes and bytes (32 hex digits).

    The order of the tensors does not matter.
    """
    return facts_digest(fact for name, tensor in named for fact in tensor_facts(name, tensor))


def facts_digest(facts: Iterable[tuple[str, ...]]) -> str:
    """Return the digest of tensors' facts (32 hex digits). The order of the facts does not matter."""
    return hashlib.sha256(repr(sorted(facts)).encode()).hexdigest()[:32]


def tensor_facts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, ...]]:
    """Yield (name, shape with strides and dtype, digest) of a tensor.

    For a wrapper, yield one such tuple for each inner tensor.
    """
    whole: Any = tensor
    parts = getattr(whole, "partitions", None)  # vLLM's wrapper of weights that several layers share
    if isinstance(parts, dict):
        for key, part in parts.items():
            yield from tensor_facts(f"{name}.{key}", part)
    elif is_traceable_wrapper_subclass(whole):  # a wrapper of other tensors, such as torchao's
        for key in whole.__tensor_flatten__()[0]:
            yield from tensor_facts(f"{name}.{key}", getattr(whole, key))
    else:
        bare = tensor.detach()
        yield name, f"{tuple(bare.shape)} {bare.stride()} {bare.dtype}", tensor_digest(bare)


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return the digest of a tensor's bytes in memory order.

    The digest is "meta" for a meta tensor, and "" for an empty tensor.
    """
    if tensor.is_meta or not tensor.numel():
        return "meta" if tensor.is_meta else ""
    if tensor.device.type != "cpu":
        return device_digest(tensor)
    digest = xxhash.xxh3_128()
    for piece in _pieces(tensor):
        data: Any = piece.numpy()
        digest.update(data)
    return digest.hexdigest()


def device_digest(tensor: torch.Tensor) -> str:
    """Return the digest of a tensor on a device. Blocks until all earlier work on the device's stream is done."""
    sums = torch.zeros(len(_LANES), dtype=torch.int64, device=tensor.device)
    add, at, rests = _adder(tensor.device), 0, []
    for piece in _pieces(tensor):
        whole = len(piece) // _WORD_BYTES * _WORD_BYTES
        aligned = piece[:whole] if piece.data_ptr() % _WORD_BYTES == 0 else piece[:whole].clone()
        words = aligned.view(torch.int64)
        add(sums, words, at)
        at += len(words)
        if whole < len(piece):
            rests.append(f"{at}+{bytes(piece[whole:].cpu().numpy()).hex()}")
            at += 1
    return ":".join([*(f"{total & (1 << 64) - 1:016x}" for total in sums.tolist()), *rests])


@functools.cache
def _adder(device: torch.device) -> Callable[[torch.Tensor, torch.Tensor, int], object]:
    """Return the function that adds words to sums: a kernel if Triton works, or else operations of PyTorch."""
    if device.type != "cuda":
        return add_words
    try:
        from kvpipe.connectors.vllm.identity import digest_kernel  # noqa: PLC0415  (only where there is Triton)

        constants = *map(_signed, _LANES), *(_signed(factor) for _, factor in _MIXES)
        add = functools.partial(digest_kernel.add_words, constants)
        why = "" if all(_agree(device, add, *case) for case in _CASES) else "its sums are wrong"
    except Exception as error:  # noqa: BLE001  (a broken install raises many things)
        why = repr(error)[:400]
    if why:
        log.info("digests_without_kernel", why=why, effect="weights are digested more slowly")
    return add_words if why else add


_CASES: Final = tuple(itertools.product((0, 1), (0, 1 << 33)))
"""Cases for `_agree`, as (`at`, `before`): Triton compiles a kernel for each alignment and each size of integers."""


def _agree(
    device: torch.device, add: Callable[[torch.Tensor, torch.Tensor, int], object], at: int, before: int
) -> bool:
    """Return whether `add` and `add_words` give equal sums. Both add the words from index `at` on."""
    words = (torch.arange(2500, device=device) * _signed(_LANES[0]))[at:]
    sums = torch.zeros(2, len(_LANES), dtype=torch.int64, device=device)
    add(sums[0], words, before)
    add_words(sums[1], words, before)
    return torch.equal(sums[0], sums[1])


def add_words(sums: torch.Tensor, words: torch.Tensor, before: int) -> None:
    """Add each of `words`, mixed with its position, to `sums`. `before` words of the tensor come before `words`."""
    places = torch.arange(before + 1, before + 1 + len(words), device=words.device)
    for lane, seed in enumerate(_LANES):
        sums[lane] += _mixed(words ^ (places * _signed(seed))).sum()


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """Mix the bits of each word. The mapping is one to one, so a change of a single word always changes the sum."""
    for shift, factor in _MIXES:
        words = (words ^ ((words >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return words ^ ((words >> 31) & ((1 << 33) - 1))


def _signed(word: int) -> int:
    return int(np.uint64(word).astype(np.int64))


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensor's bytes in memory order as uint8 tensors. A tensor with gaps is copied, some rows at a time."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    dense = tensor.permute(order)  # a transposed matrix is read in memory order
    if dense.is_contiguous():
        yield from torch.split(dense.reshape(-1).view(torch.uint8), PIECE_BYTES)
        return
    rows = max(1, PIECE_BYTES * len(tensor) // (tensor.numel() * tensor.element_size()))
    for piece in torch.split(tensor, rows):
        yield piece.contiguous().reshape(-1).view(torch.uint8)
