"""Buffers, values and keys for the tests of tiers."""

from __future__ import annotations

import hashlib
import mmap
import random
from collections.abc import Sequence
from typing import Any

from kvpipe.tiers.base import ALIGN_BYTES, Get, Key, Put

NAMESPACE = hashlib.blake2b(b"tests", digest_size=16).hexdigest()


def aligned(n: int) -> memoryview:
    """Return a writable buffer of `n` zero bytes that begins at a page boundary."""
    return memoryview(mmap.mmap(-1, n))


def content(seed: int, n: int) -> bytes:
    """Return `n` pseudo-random bytes that depend on `seed`."""
    return random.Random(seed).randbytes(n)


def value(seed: int, n: int) -> tuple[memoryview, ...]:
    """Return `content(seed, n)` in aligned buffers: the first 4096 bytes, and, if `n` is larger, the other bytes."""
    return filled(content(seed, n), (ALIGN_BYTES, n - ALIGN_BYTES) if n > ALIGN_BYTES else (n,))


def filled(data: bytes, sizes: Sequence[int]) -> tuple[memoryview, ...]:
    """Return `data` in aligned buffers of the given `sizes`, whose sum is `len(data)`."""
    parts, at = tuple(aligned(size) for size in sizes), 0
    for part in parts:
        part[:] = data[at : at + part.nbytes]
        at += part.nbytes
    return parts


def some_key(i: int, namespace: str = NAMESPACE, *, group: int = 0, rank: int = 0, ranks: int = 1) -> Key:
    """Return the key of chunk number `i`."""
    return Key(namespace, hashlib.sha256(i.to_bytes(8, "big")).digest(), group, rank, ranks)


def put(i: int, n: int, **key: Any) -> Put:
    """Return the write of chunk `i` with `n` bytes."""
    return Put(some_key(i, **key), value(i, n))


def get(i: int, *sizes: int, **key: Any) -> Get:
    """Return the read of chunk `i` into buffers of the given `sizes`."""
    return Get(some_key(i, **key), tuple(map(aligned, sizes)))


def data(parts: tuple[memoryview, ...]) -> bytes:
    """Return the joined bytes of all buffers."""
    return b"".join(parts)
