"""Measures ways in which two ranks can each read half of the heads from a value that one rank has stored.

The cost of each way for the rank that stores the value is measured, too. Decision 24 uses these figures. Each figure is
the least time over all rounds, divided by the least time of values in a rank's own layout.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from benchmarks.layouts import BLOCK_TOKENS, CHUNKS, HEAD_BYTES, HEADS, ORDERS, Ranks
from benchmarks.report import Figure
from kvpipe.tiers.envelope import pages
from tests.rigs.tier_worlds import WORLDS

VALUE_BYTES: Final = 16 << 20
LANES, ROUNDS = 4, 15
RUNS = {"heads first": HEADS // 2 * BLOCK_TOKENS * HEAD_BYTES, "tokens first": HEADS // 2 * HEAD_BYTES}
"""The number of contiguous bytes in which a rank's half of the heads lies, by the order of the KV cache."""
OWN_MAX, OTHERS_MAX = 1.03, 1.15

Bytes = npt.NDArray[np.uint8]
Way = Callable[[], float]


def run() -> list[Figure]:
    """Return all figures: the time of a value, relative to the time of a value in the rank's own layout."""
    out = [figure for kind in ("disk", "redis", "s3") for layers in (1, 16) for figure in _in_parts(kind, layers)]
    folder = Path(tempfile.mkdtemp(prefix=".bench-", dir=Path(__file__).parents[1]))
    try:
        with _files(folder) as files:
            return [*out, *_read_by_two(files), *_read_by_one(files)]
    finally:
        shutil.rmtree(folder)


def _minima(ways: Mapping[str, Way]) -> dict[str, float]:
    """Return the least time of each of `ways`. All ways run alternately."""
    took: dict[str, list[float]] = {name: [] for name in ways}
    for at in range(ROUNDS + 1):
        for name, way in ways.items():
            one = way()
            if at:  # the first round allocates memory
                took[name].append(one)
    return {name: min(some) for name, some in took.items()}


def _figures(what: str, ways: Mapping[str, Way], limit: float) -> list[Figure]:
    """Return each way's time relative to the first way, which handles values in the rank's own layout."""
    (_, own), *others = _minima(ways).items()
    beside = "{:.2f} of {:.2f} ms a value"
    return [
        Figure(f"{what}: {name}", ms / own, limit, "of its own", beside.format(ms * 1e3, own * 1e3))
        for name, ms in others
    ]


# ---- values of half the heads each --------------------------------------------------------------------------------


def _in_parts(kind: str, layers: int) -> list[Figure]:
    """Measure the cost of `share_ranks_max=2` for an engine of one rank, through its carrier."""
    out = []
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=Path(__file__).parents[1]) as folder:
        for order, rows in ORDERS.items():
            with WORLDS[kind](Path(folder)) as world, ExitStack() as stack:
                made = [Ranks(world.spec, 1, most, HEADS, rows, HEAD_BYTES, layers) for most in (1, 2)]
                for one in made:
                    stack.callback(one.carriers[0].shutdown)
                what = f"{kind}, chunks of {layers} MiB, {order}, 1 rank"
                saves = {name: partial(_save, one) for name, one in zip(("own", "saved in halves"), made, strict=True)}
                out += _figures(what, saves, OWN_MAX)
                loads = {name: _load(one) for name, one in zip(("own", "loaded in halves"), made, strict=True)}
                out += _figures(what, loads, OWN_MAX)
    return out


def _save(ranks: Ranks) -> float:
    return ranks.carry(stores=True, names=[os.urandom(32) for _ in range(CHUNKS)], split=ranks.split) / CHUNKS


def _load(ranks: Ranks) -> Way:
    names = [os.urandom(32) for _ in range(CHUNKS)]
    ranks.carry(stores=True, names=names, split=ranks.split)
    return lambda: ranks.carry(stores=False, names=names, split=ranks.split) / CHUNKS


# ---- ranges of one value, on a disk -------------------------------------------------------------------------------


@contextmanager
def _files(folder: Path) -> Iterator[list[Path]]:
    """Write `CHUNKS` files with a value of `VALUE_BYTES` each, and yield their paths."""
    whole = _buffer(VALUE_BYTES)
    files = [folder / str(at) for at in range(CHUNKS)]
    for file in files:
        with file.open("wb") as sink:
            sink.write(whole.data)
            os.fsync(sink.fileno())
    yield files


def _buffer(size: int) -> Bytes:
    made = np.frombuffer(pages(size), np.uint8)
    made[:] = 7
    return made


def _each(items: Sequence[Path], lanes: int, work: Callable[[Path], object]) -> float:
    """Return the seconds per value, with `lanes` values read in parallel."""
    begin = time.perf_counter()
    with ThreadPoolExecutor(lanes) as pool:
        list(pool.map(work, items))
    return (time.perf_counter() - begin) / CHUNKS


def _read(file: Path, into: Sequence[memoryview], at: int, flags: int = os.O_DIRECT) -> None:
    fd = os.open(file, os.O_RDONLY | flags)
    try:
        for first in range(0, len(into), 1024):
            some = into[first : first + 1024]
            left = sum(one.nbytes for one in some)
            while left:  # the loop is needed for a single buffer only, because a read into it may return fewer bytes
                got = os.preadv(fd, some if len(some) > 1 else [some[0][-left:]], at)
                at, left = at + got, left - got
                assert len(some) == 1 or not left
    finally:
        os.close(fd)


def _read_by_two(files: list[Path]) -> list[Figure]:
    """Measure reads by two ranks in parallel. In their own layout, each rank reads and checks half a value."""
    half, twice = VALUE_BYTES // 2, [file for file in files for _ in range(2)]
    spare = [_buffer(VALUE_BYTES) for _ in range(2 * LANES)]
    slots = [_buffer(half) for _ in range(2 * LANES)]

    def own(file: Path) -> None:
        slot = slots.pop()
        _read(file, [slot.data], 0)
        xxhash.xxh3_128_digest(slot.data)
        slots.append(slot)

    def whole(file: Path, *, flags: int, run: int, halves: int) -> None:
        body = spare.pop()
        _read(file, [body.data], 0, flags)
        xxhash.xxh3_128_digest(body.data)
        for which in range(halves):
            slot = slots.pop()
            slot.reshape(-1, run)[:] = body.reshape(-1, 2, run)[:, which]
            slots.append(slot)
        spare.append(body)

    def in_place(file: Path, *, run: int) -> None:
        slot = slots.pop()
        fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
        for at in range(0, half, run):
            assert os.preadv(fd, [slot[at : at + run].data], 2 * at) == run
        os.close(fd)
        xxhash.xxh3_128_digest(slot.data)
        slots.append(slot)

    def cold(work: Callable[[Path], object]) -> float:
        for file in files:
            with file.open("rb") as one:
                os.posix_fadvise(one.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return _each(twice, 2 * LANES, work)

    ways: dict[str, Way] = {"own": lambda: _each(twice, 2 * LANES, own)}
    for order, run in RUNS.items():
        both = partial(whole, flags=os.O_DIRECT, run=run, halves=2)
        ways |= {
            f"each all of it, {order}": partial(
                _each, twice, 2 * LANES, partial(whole, flags=os.O_DIRECT, run=run, halves=1)
            ),
            f"each all of it, by the page cache, {order}": partial(cold, partial(whole, flags=0, run=run, halves=1)),
            f"all of it read once for both, {order}": partial(_each, files, LANES, both),
        }
    for run in (32 << 10, 256 << 10, 1 << 20):
        name = f"ranges in runs of {run >> 10} KiB, as they lie"
        ways[name] = partial(_each, twice, 2 * LANES, partial(in_place, run=run))
    return _figures("disk, 16 MiB, 2 ranks", ways, OTHERS_MAX)


def _read_by_one(files: list[Path]) -> list[Figure]:
    """Measure reads by the rank that stored a value, if each half of the value were stored contiguously.

    In this case the rank has to move both halves to their places in the rank's slot.
    """
    slots, spare = ([_buffer(VALUE_BYTES) for _ in range(LANES)] for _ in range(2))

    def own(file: Path) -> None:
        slot = slots.pop()
        _read(file, [slot.data], 0)
        xxhash.xxh3_128_digest(slot.data)
        slots.append(slot)

    def scattered(file: Path, *, run: int) -> None:
        slot = slots.pop()
        rows = slot.reshape(-1, 2, run)
        into = [rows[at, which].data for which in range(2) for at in range(len(rows))]
        _read(file, into, 0)
        for which in range(2):
            check = xxhash.xxh3_128()
            for one in into[which * len(rows) : (which + 1) * len(rows)]:
                check.update(one)
        slots.append(slot)

    def copied(file: Path, *, run: int) -> None:
        slot, body = slots.pop(), spare.pop()
        _read(file, [body.data], 0)
        for which, one in enumerate(np.split(body, 2)):
            xxhash.xxh3_128_digest(one.data)
            slot.reshape(-1, 2, run)[:, which] = one.reshape(-1, run)
        slots.append(slot)
        spare.append(body)

    ways: dict[str, Way] = {"own": lambda: _each(files, LANES, own)}
    ways["halves in one piece, scattered by the system, heads first"] = partial(
        _each, files, LANES, partial(scattered, run=RUNS["heads first"])
    )
    for order, run in RUNS.items():
        ways[f"halves in one piece, copied, {order}"] = partial(_each, files, LANES, partial(copied, run=run))
    return _figures("disk, 16 MiB, 1 rank", ways, OWN_MAX)
