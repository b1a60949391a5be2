"""Compares the disk tier with plain direct I/O on the same disk, and measures lookups, the index and checksums."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median

import anyio
import anyio.to_thread
import xxhash

from benchmarks.report import Figure, median_s
from kvpipe.tiers.base import Get, Key, Put, Read, Written
from kvpipe.tiers.disk.files import folders_of
from kvpipe.tiers.disk.spec import DiskSpec
from kvpipe.tiers.disk.tier import DiskTier
from kvpipe.tiers.envelope import HEADER_BYTES

MIB = 1 << 20
ROUNDS, BATCH_BYTES = 7, 128 * MIB
FILES, ASKED = 100_000, 1000
NAMESPACE = "b" * 32


def run() -> list[Figure]:
    """Return all figures. The disk is the repository's, because /tmp may be in memory."""
    folder = Path(tempfile.mkdtemp(prefix=".bench-", dir=Path(__file__).parents[1]))
    try:
        return [*anyio.run(_moves, folder), *anyio.run(_lookups, folder), *_checksums()]
    finally:
        shutil.rmtree(folder)


def _key(number: int) -> Key:
    return Key(NAMESPACE, xxhash.xxh3_128_digest(number.to_bytes(8, "big")) * 2, 0, 0, 1)


def _buffers(size: int, count: int) -> list[tuple[memoryview, memoryview]]:
    """Return aligned buffers for values of `size` bytes, filled with random bytes that no disk can compress."""
    noise, out = os.urandom(size), []
    for _ in range(count):
        view = memoryview(mmap.mmap(-1, size))
        view[:] = noise
        out.append((view[:HEADER_BYTES], view[HEADER_BYTES:]))
    return out


async def _moves(folder: Path) -> list[Figure]:
    """Measure the rates of writes and reads by the tier and by plain I/O.

    Tier and plain I/O alternate, because a disk's rate changes within seconds.
    """
    spec = DiskSpec.model_validate({"path": folder / "moves", "bytes_max": 8 << 30, "direct": "on"})
    tier = spec.make("disk")
    await tier.open()
    out = []
    for body in (2 * MIB, 4 * MIB, 8 * MIB):
        size = body + HEADER_BYTES
        buffers = _buffers(size, BATCH_BYTES // body)
        keys = [_key(body + i) for i in range(len(buffers))]
        plain = _Plain(folder / "plain", size, buffers, spec.lanes)
        took: dict[str, list[float]] = {}

        for _ in range(ROUNDS):
            times = {"plain write": await anyio.to_thread.run_sync(_timed, plain.files)}
            plain.clear()
            times["over"] = await anyio.to_thread.run_sync(_timed, partial(plain.each, os.pwritev))
            begin = time.perf_counter()
            ends = await tier.write([Put(key, parts) for key, parts in zip(keys, buffers, strict=True)])
            times["write"] = time.perf_counter() - begin
            assert ends == [Written.STORED] * len(keys)
            times["plain read"] = await anyio.to_thread.run_sync(_timed, partial(plain.each, os.preadv))
            begin = time.perf_counter()
            reads = await tier.read([Get(key, parts) for key, parts in zip(keys, buffers, strict=True)])
            times["read"] = time.perf_counter() - begin
            assert reads == [Read.HIT] * len(keys)
            await tier.delete(keys)
            for name, one in times.items():
                took.setdefault(name, []).append(one)
        plain.close()
        for what in ("write", "read"):
            rates = [size * len(keys) / median(took[name]) / 1e9 for name in (what, f"plain {what}")]
            beside = f"{rates[0]:.2f} of {rates[1]:.2f} GB/s, {spec.lanes} at once"
            if what == "write":
                beside += f"; over old bytes {size * len(keys) / median(took['over']) / 1e9:.2f}"
            name = f"{what} of {body // MIB} MiB values"
            out.append(Figure(name, rates[0] / rates[1], 0.8, "of plain", beside, at_least=True))
    out.append(_alone(tier))
    await tier.close()
    return out


def _alone(tier: DiskTier) -> Figure:
    """Measure the time that the tier's thread needs for a write in addition to writing the bytes."""

    def one(number: int) -> float:
        begin = time.perf_counter()
        draft = tier._room.begin_draft(2 * HEADER_BYTES)
        assert tier._room.finish(draft, _key(number))
        return time.perf_counter() - begin

    return Figure("write, all but the bytes: room, draft, rename", median(map(one, range(300))) * 1e3, 1, "ms")


class _Plain:
    """Plain direct I/O, by as many threads as the tier has lanes.

    As in the tier, each value is written into a new file. For comparison, and for reads, values are also written over
    old bytes of one large file, which needs no new blocks on the disk.
    """

    def __init__(self, path: Path, size: int, buffers: list[tuple[memoryview, memoryview]], lanes: int) -> None:
        self._size, self._buffers, self._pool = size, buffers, ThreadPoolExecutor(lanes)
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        self.each(os.pwritev)

    def each(self, call: Callable[[int, tuple[memoryview, memoryview], int], int]) -> None:
        """Read or write every buffer at its place in the large file, with `call`."""
        done = self._pool.map(lambda i: call(self._fd, self._buffers[i], i * self._size), range(len(self._buffers)))
        assert set(done) == {self._size}

    def files(self) -> None:
        """Write every buffer into a file of its own."""
        assert set(self._pool.map(self._file, range(len(self._buffers)))) == {self._size}

    def _file(self, i: int) -> int:
        fd = os.open(f"{self._path}-{i}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
        try:
            return os.pwritev(fd, self._buffers[i], 0)
        finally:
            os.close(fd)

    def clear(self) -> None:
        """Delete the files that `files` has written."""
        for i in range(len(self._buffers)):
            Path(f"{self._path}-{i}").unlink()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()
        os.close(self._fd)


async def _lookups(folder: Path) -> list[Figure]:
    """Measure how fast the index of a folder with many files is built, and how long a lookup takes."""
    path = folder / "many"
    keys = [_key(i) for i in range(FILES)]
    for key in keys:
        file = path.joinpath(*folders_of(key), key.text)
        file.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600))
    spec = DiskSpec.model_validate({"path": path, "bytes_max": 1 << 30})
    rates, plain, asked = [], [], 0.0
    for _ in range(5):
        plain.append(_timed(partial(_look, path)))
        tier = spec.make("disk", writes=False)
        begin = time.perf_counter()
        await tier.open()
        rates.append(FILES / (time.perf_counter() - begin))
        samples = []
        for first in range(0, FILES, ASKED):
            begin = time.perf_counter()
            there = await tier.exists([*keys[first : first + ASKED // 2], *keys[: ASKED // 2]])
            samples.append(time.perf_counter() - begin)
            assert all(there)
        asked = median(samples)
        await tier.close()
    beside = f"{FILES / median(plain) / 1e3:.0f} by scandir and stat alone"
    return [
        Figure("index of 100,000 files, rebuilt", median(rates) / 1e3, 100, "thousand/s", beside, at_least=True),
        Figure("lookup of 1,000 keys", asked * 1e3, 1, "ms"),
    ]


def _look(path: Path) -> None:
    for folder in next(path.iterdir()).iterdir():
        with os.scandir(folder) as files:
            for file in files:
                file.stat(follow_symlinks=False)


def _timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _checksums() -> list[Figure]:
    ((_, body),) = _buffers(4 * MIB + HEADER_BYTES, 1)
    rate = body.nbytes / median_s(lambda: xxhash.xxh3_128_digest(body), 50) / 1e9
    return [Figure("xxh3-128 of 4 MiB, of a core per GB/s moved", 100 / rate, 10, "%", f"{rate:.1f} GB/s")]
