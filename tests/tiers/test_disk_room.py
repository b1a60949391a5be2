"""The limit of the disk tier applies to the files of all processes together."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvpipe.testing.buffers import content, put, some_key
from kvpipe.testing.tier_conformance import run
from kvpipe.testing.waiting import WAIT_S
from kvpipe.tiers.base import Capacity, Read, TierFullError, Written
from kvpipe.tiers.disk import room
from kvpipe.tiers.disk.files import ACCOUNT, TMP
from tests.tiers.disks import (
    KIB,
    ROOM,
    file_of,
    opened,
    reads,
    walk,
)


def test_the_oldest_make_room(tmp_path: Path) -> None:
    """A write beyond bytes_max deletes the least recently used values. A read counts as a use.

    The account equals the sizes of the files.
    """

    async def play() -> None:
        async with opened(tmp_path, bytes_max=ROOM) as tier:
            for i in range(16):
                await tier.write([put(i, 64 * KIB)])
            assert (await tier.capacity()).bytes_used == ROOM
            assert await reads(tier, 0) is Read.HIT
            await tier.write([put(16, 64 * KIB)])
            assert await tier.exists([some_key(i) for i in range(17)]) == [True, False, False] + [True] * 14
            assert tier._room.used() == sum(walk(tmp_path).values()) == (await tier.capacity()).bytes_used

    run(play)


def test_files_are_counted_once_for_a_write_that_evicts_several_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counting files lists the whole folder while other processes wait for the lock.

    So one write counts only once, even if it evicts several batches.
    """
    counts, count = list[int](), room.DiskRoom._count

    def counting(self: room.DiskRoom, root: int) -> int:
        counts.append(root)
        return count(self, root)

    async def play() -> None:
        async with opened(tmp_path, bytes_max=ROOM) as tier:
            for i in range(16):
                await tier.write([put(i, 64 * KIB)])
            monkeypatch.setattr(room, "_BATCH", 2)
            monkeypatch.setattr(room.DiskRoom, "_count", counting)
            await tier.write([put(16, 12 * 64 * KIB)])
            assert len(walk(tmp_path)) == 4

    run(play)
    assert len(counts) == 1


def test_age_outlives_a_restart(tmp_path: Path) -> None:
    """A tier that is opened on a folder knows which values are oldest.

    Values that another process has used since are kept.
    """

    async def play() -> None:
        async with opened(tmp_path, bytes_max=ROOM) as tier:
            for i in range(16):
                await tier.write([put(i, 64 * KIB)])
        for i in range(16):
            when = time.time() - 1000 + (i * 7 % 16)
            os.utime(file_of(tmp_path, i), (when, when))
        async with opened(tmp_path, bytes_max=ROOM) as tier, opened(tmp_path, bytes_max=ROOM, writes=False) as other:
            order = sorted(range(16), key=lambda i: i * 7 % 16)
            assert await reads(other, order[0]) is Read.HIT
            assert time.time() - file_of(tmp_path, order[0]).stat().st_mtime < 10
            await tier.write([put(16, 64 * KIB)])
            assert set(range(17)) - {i for i in range(17) if file_of(tmp_path, i).exists()} == set(order[1:3])

    run(play)


def test_value_larger_than_the_limit_is_refused(tmp_path: Path) -> None:
    """A value larger than bytes_max raises a TierFullError that names the key, and nothing is deleted for it."""

    async def play() -> None:
        async with opened(tmp_path, bytes_max=ROOM) as tier:
            await tier.write([put(1, 64 * KIB)])
            with pytest.raises(TierFullError, match="bytes_max=1048576"):
                await tier.write([put(2, ROOM + 4096)])
            assert await reads(tier, 1) is Read.HIT
            assert await tier.write([put(2, ROOM)]) == [Written.STORED]
            assert (await tier.capacity()) == Capacity(1, ROOM, ROOM)

    run(play)


def test_files_copied_in_by_hand_are_counted(tmp_path: Path) -> None:
    """Files that a user copies in or deletes are counted when the tier next makes room, and after a restart."""

    async def play() -> None:
        async with opened(tmp_path, bytes_max=ROOM) as tier:
            for i in range(16):
                await tier.write([put(i, 64 * KIB)])
            for i in range(8):
                file_of(tmp_path, i).unlink()
            await tier.write([put(16, 64 * KIB)])
            assert len(walk(tmp_path)) == 9
            for i in range(100, 115):
                file_of(tmp_path, i).parent.mkdir(parents=True, exist_ok=True)
                file_of(tmp_path, i).write_bytes(content(i, 64 * KIB))
            for i in range(20, 28):
                await tier.write([put(i, 64 * KIB)])
            assert sum(walk(tmp_path).values()) <= ROOM
            assert tier._room.used() == sum(walk(tmp_path).values())
        file_of(tmp_path, 27).unlink()
        async with opened(tmp_path, bytes_max=ROOM) as tier:
            assert tier._room.used() == sum(walk(tmp_path).values())

    run(play)


def test_an_account_that_is_void_is_counted(tmp_path: Path) -> None:
    """If the account is invalid, or its last writer died while writing it, the tier counts the bytes of its files."""

    async def play() -> None:
        async with opened(tmp_path, bytes_max=ROOM) as tier:
            await tier.write([put(i, 64 * KIB) for i in range(4)])
            for text in ("?" + "0" * 19 + "\n", "", "12", "x" * 21, "0" * 20 + "\n\n"):
                (tmp_path / ACCOUNT).write_text(text)
                assert tier._room.used() == 256 * KIB

    run(play)


WRITER = """
import sys
from pathlib import Path
from kvpipe.testing.buffers import put
from tests.tiers.disks import KIB, ROOM, opened
from kvpipe.testing.tier_conformance import run
async def play():
    async with opened(Path(sys.argv[1]), bytes_max=4 * ROOM) as tier:
        for i in range(int(sys.argv[2]), 10**9):
            await tier.write([put(4 * i + j, 64 * KIB) for j in range(4)])
run(play)
"""


def test_the_bound_holds_for_all_processes_together(tmp_path: Path) -> None:
    """Three processes write into one folder. The folder's files, including unfinished files, never exceed bytes_max."""
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    children = [subprocess.Popen([*command, str(10_000 * n)]) for n in range(3)]
    most, seen = 0, set[str]()
    try:
        until = time.monotonic() + WAIT_S
        while len(seen) < 200 and time.monotonic() < until:
            with contextlib.suppress(FileNotFoundError), (tmp_path / ACCOUNT).open("r+") as account:
                # the lock keeps other processes from moving files while the test counts them
                fcntl.flock(account, fcntl.LOCK_EX)
                found = walk(tmp_path)
                most = max(most, sum(found.values()))
                seen.update(name for name in found if not name.startswith(TMP))
            time.sleep(0.02)
        assert all(child.poll() is None for child in children)
    finally:
        for child in children:
            child.send_signal(signal.SIGKILL)
            child.wait()
    assert len(seen) >= 200
    assert ROOM * 3 < most <= ROOM * 4


def test_drafts_of_living_processes_are_kept(tmp_path: Path) -> None:
    """Opening a tier deletes the drafts of dead processes only. Closing a tier leaves no draft."""

    async def play() -> None:
        async with opened(tmp_path) as tier:
            draft = tier._room.begin_draft(64 * KIB)
            dead = tmp_path / TMP / ("d" * 16)
            dead.mkdir()
            dead.joinpath("lock").touch()
            dead.joinpath("0").write_bytes(bytes(4096))
            async with opened(tmp_path):
                assert not dead.exists()
                assert list(walk(tmp_path).values()) == [64 * KIB]
            tier._room.drop(draft)
            assert walk(tmp_path) == {}
            assert tier._room.used() == 0

    run(play)
    assert list(tmp_path.iterdir()) == []
