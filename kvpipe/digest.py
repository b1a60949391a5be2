"""Digests of tensors that distinguish weights by every bit, computed at memory speed.

On a CPU it is xxh3-128. On a device it is a sum of 64-bit words, each mixed with its position: integers, so the order
of the additions does not matter. Both distinguish weights; neither is cryptographic.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
import torch
import xxhash
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

PIECE_BYTES: Final = 32 << 20
"""Bytes that are digested at once."""
_WORD_BYTES: Final = 8
_LANES: Final = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)
_MIXES: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def tensors_digest(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return a digest of 32 hex digits over every tensor's name, shape, strides, dtype and bytes, in any order."""
    return facts_digest(fact for name, tensor in named for fact in tensor_facts(name, tensor))


def facts_digest(facts: Iterable[tuple[str, ...]]) -> str:
    """Return the digest of tensors' facts (32 hex digits). Their order does not matter."""
    return hashlib.sha256(repr(sorted(facts)).encode()).hexdigest()[:32]


def tensor_facts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, ...]]:
    """Yield (name, shape with strides and dtype, digest) of one tensor, or of each of the tensors it is made of."""
    whole: Any = tensor
    parts = getattr(whole, "partitions", None)  # vLLM's weights that several layers share
    if isinstance(parts, dict):
        for key, part in parts.items():
            yield from tensor_facts(f"{name}.{key}", part)
    elif is_traceable_wrapper_subclass(whole):  # such as torchao's, whose bytes are in tensors within
        for key in whole.__tensor_flatten__()[0]:
            yield from tensor_facts(f"{name}.{key}", getattr(whole, key))
    else:
        bare = tensor.detach()
        yield name, f"{tuple(bare.shape)} {bare.stride()} {bare.dtype}", tensor_digest(bare)


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return the digest of a tensor's bytes in memory order; "meta" for a meta tensor, "" for an empty one."""
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
    """Return the digest of a tensor on a device. Blocks until work queued on its stream before is done."""
    sums = torch.zeros(len(_LANES), dtype=torch.int64, device=tensor.device)
    at, rests = 0, []
    for piece in _pieces(tensor):
        whole = len(piece) // _WORD_BYTES * _WORD_BYTES
        aligned = piece[:whole] if piece.data_ptr() % _WORD_BYTES == 0 else piece[:whole].clone()
        words = aligned.view(torch.int64)
        places = torch.arange(at + 1, at + 1 + len(words), device=tensor.device)
        for lane, seed in enumerate(_LANES):
            sums[lane] += _mixed(words ^ (places * _signed(seed))).sum()
        at += len(words)
        if whole < len(piece):
            rests.append(f"{at}+{bytes(piece[whole:].cpu().numpy()).hex()}")
            at += 1
    return ":".join([*(f"{total & (1 << 64) - 1:016x}" for total in sums.tolist()), *rests])


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """Mix the bits of each word. It is one to one, so a change of a single word always changes the sum."""
    for shift, factor in _MIXES:
        words = (words ^ ((words >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return words ^ ((words >> 31) & ((1 << 33) - 1))


def _signed(word: int) -> int:
    return int(np.uint64(word).astype(np.int64))


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensor's bytes in memory order, as uint8 tensors; a tensor with gaps is copied piece by piece."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    dense = tensor.permute(order)  # a transposed matrix is read as it lies
    if dense.is_contiguous():
        yield from torch.split(dense.reshape(-1).view(torch.uint8), PIECE_BYTES)
        return
    rows = max(1, PIECE_BYTES * len(tensor) // (tensor.numel() * tensor.element_size()))
    for piece in torch.split(tensor, rows):
        yield piece.contiguous().reshape(-1).view(torch.uint8)
