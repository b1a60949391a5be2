"""Processes are killed while they save to a disk tier: no value is torn or lost, and no file is left over."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest

from kvpipe.testing.buffers import aligned, some_key
from kvpipe.testing.waiting import WAIT_S
from kvpipe.tiers.base import Capacity, Get, Key, Read
from kvpipe.tiers.disk.files import TMP
from kvpipe.tiers.disk.tier import DiskTier
from kvpipe.tiers.envelope import HEADER_BYTES
from tests.tiers.crash_writer import SEALER, UNITS, spec_of
from tests.tiers.disks import walk

ROUNDS, CHILDREN, LIFE_S_MAX, PER_CHILD = 10, 10, 0.15, 100_000
MIB = 1 << 20


class Killer:
    """Starts children that save, kills them at random times, and keeps their reports."""

    def __init__(self, folder: Path, bytes_max: int) -> None:
        command = [sys.executable, "-m", "tests.tiers.crash_writer", str(folder), str(bytes_max)]
        self.server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.stored: set[int] = set()
        self.kills = 0
        self._pids: list[int] = []
        self._reported, self._open = threading.Semaphore(0), threading.Semaphore(0)
        self._reader = threading.Thread(target=self._listen)
        self._reader.start()

    def _listen(self) -> None:
        assert self.server.stdout is not None
        for line in self.server.stdout:
            if line.startswith("pid "):
                self._pids.append(int(line[4:]))
                self._reported.release()
            elif line == "open\n":
                self._open.release()
            elif line.startswith("+"):
                self.stored.add(int(line))
            else:
                self.stored.discard(-int(line))

    def round(self, chance: random.Random) -> None:
        """Start CHILDREN children, and kill each child at a random moment, some of them while they open the tier."""
        early = self._start(CHILDREN // 4)
        self._kill(early, chance, LIFE_S_MAX / 4)
        while self._open.acquire(blocking=False):
            pass
        late = self._start(CHILDREN - len(early))
        for _ in late:
            assert self._open.acquire(timeout=WAIT_S)
        self._kill(late, chance, LIFE_S_MAX)

    def _start(self, count: int) -> list[int]:
        assert self.server.stdin is not None
        for _ in range(count):
            self.server.stdin.write(f"{len(self._pids) * PER_CHILD}\n")
            self.server.stdin.flush()
            assert self._reported.acquire(timeout=WAIT_S)
        return self._pids[-count:]

    def _kill(self, pids: list[int], chance: random.Random, life_s_max: float) -> None:
        now = time.monotonic()
        for at, pid in sorted((now + chance.uniform(0, life_s_max), pid) for pid in pids):
            time.sleep(max(0.0, at - time.monotonic()))
            os.kill(pid, signal.SIGKILL)  # raises an error if the child has ended by itself
            self.kills += 1
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            time.sleep(0.001)

    def stop(self) -> None:
        """End the server and the remaining children."""
        self.server.kill()
        for pid in self._pids:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)
        self.server.wait()
        self._reader.join()


@contextmanager
def killer(folder: Path, bytes_max: int) -> Iterator[Killer]:
    """Start the children's parent."""
    made = Killer(folder, bytes_max)
    try:
        yield made
    finally:
        made.stop()


async def all_whole(tier: DiskTier, sizes: dict[Key, int]) -> None:
    """Read values, each of which must exist and be the value that was sealed under its key."""
    keys = list(sizes)
    for first in range(0, len(keys), 64):
        part = keys[first : first + 64]
        gets = [Get(key, (aligned(HEADER_BYTES), aligned(sizes[key] - HEADER_BYTES))) for key in part]
        assert await tier.read(gets) == [Read.HIT] * len(gets)
        for key, (header, body) in gets:
            SEALER.unseal(key, UNITS, header, body)


@pytest.mark.slow
@pytest.mark.parametrize(("bytes_max", "lives"), [(1024 * MIB, False), (6 * MIB, True)], ids=["room", "evictions"])
def test_kills_tear_and_lose_nothing(tmp_path: Path, bytes_max: int, *, lives: bool) -> None:
    """After kill -9 at random moments every value is whole, no draft is left, and the account equals the files' sizes.

    The first case has room for all values, and loses no stored value. In the second case values are evicted, and
    another process has the tier open all the time.
    """
    seed = random.randrange(1 << 32)
    chance, unfinished = random.Random(seed), 0
    spec = spec_of(tmp_path / "kv", bytes_max)

    async def play() -> None:
        nonlocal unfinished
        whole: set[Key] = set()
        living = spec.make("living")
        if lives:
            await living.open()
        with killer(spec.path, bytes_max) as reaper:
            for last in [False] * (ROUNDS - 1) + [True]:
                reaper.round(chance)
                unfinished += sum(name.startswith(TMP) for name in walk(spec.path))
                tier = spec.make("new")
                await tier.open()
                files, sizes = walk(spec.path), {entry.key: entry.bytes async for entry in tier.scan()}
                assert {Path(name).name: size for name, size in files.items()} == {
                    key.text: size for key, size in sizes.items()
                }, seed
                assert await tier.capacity() == Capacity(len(files), sum(files.values()), bytes_max), seed
                assert tier._room.used() == sum(files.values()) <= bytes_max, seed
                assert lives or {some_key(i) for i in reaper.stored} <= sizes.keys(), seed
                await all_whole(tier, {key: size for key, size in sizes.items() if last or key not in whole})
                whole |= sizes.keys()
                await tier.close()
        assert reaper.kills == ROUNDS * CHILDREN
        await living.close()

    anyio.run(play)
    assert unfinished > ROUNDS, "the kills came when nothing was being written"
