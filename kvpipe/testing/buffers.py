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
    """Return `n` writable bytes, zeroed, at the beginning of a page."""
    return memoryview(mmap.mmap(-1, n))


def content(seed: int, n: int) -> bytes:
    """Return `n` bytes that only this seed gives."""
    return random.Random(seed).randbytes(n)


def value(seed: int, n: int) -> tuple[memoryview, ...]:
    """Return `content(seed, n)` in aligned parts: a header of 4096 bytes and, if there is more, the body."""
    return filled(content(seed, n), (ALIGN_BYTES, n - ALIGN_BYTES) if n > ALIGN_BYTES else (n,))


def filled(data: bytes, sizes: Sequence[int]) -> tuple[memoryview, ...]:
    """Return `data` in aligned buffers of so many bytes each, which are `len(data)` together."""
    parts, at = tuple(aligned(size) for size in sizes), 0
    for part in parts:
        part[:] = data[at : at + part.nbytes]
        at += part.nbytes
    return parts


def some_key(i: int, namespace: str = NAMESPACE, *, group: int = 0, rank: int = 0, ranks: int = 1) -> Key:
    """Return the key of chunk number `i`."""
    return Key(namespace, hashlib.sha256(i.to_bytes(8, "big")).digest(), group, rank, ranks)


def put(i: int, n: int, **key: Any) -> Put:
    """Return chunk `i`, `n` bytes long, to be written."""
    return Put(some_key(i, **key), value(i, n))


def get(i: int, *sizes: int, **key: Any) -> Get:
    """Return chunk `i` to be read into buffers of `sizes`."""
    return Get(some_key(i, **key), tuple(map(aligned, sizes)))


def data(parts: tuple[memoryview, ...]) -> bytes:
    """Return the bytes of all parts."""
    return b"".join(parts)
