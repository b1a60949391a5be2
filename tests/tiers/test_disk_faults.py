"""The disk tier on disks that fail: full, read-only, unmounted, locked, or without direct I/O."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import shutil
from pathlib import Path

import pytest

from kvpipe.testing.buffers import aligned, content, get, put, some_key
from kvpipe.testing.tier_conformance import run
from kvpipe.tiers.base import ALIGN_BYTES, Get, Read, TierError, TierFullError, Written
from kvpipe.tiers.disk import tier as disk_tier
from kvpipe.tiers.disk.files import ACCOUNT, TMP, ValueFiles
from tests.rigs.tier_worlds.disk import grow_old
from tests.tiers.disks import (
    KIB,
    MIB,
    ROOM,
    mount,
    names,
    opened,
    reads,
    refusing,
    small_disk,
    spec_of,
    unmount,
    walk,
)


def test_a_full_disk_refuses_and_serves_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk a write raises TierFullError and leaves no file.

    Reads work, and room that becomes free is used.
    """
    path = tmp_path / "disk"

    async def play() -> None:
        async with opened(path, bytes_max=2 * MIB) as tier:
            await tier.write([put(1, 64 * KIB)])
            path.joinpath("hog").write_bytes(bytes(MIB * 2 - 128 * KIB))
            for _ in range(3):
                with pytest.raises(TierFullError, match="No space left"):
                    await tier.write([put(2, 256 * KIB)])
            path.joinpath("hog").unlink()
            assert sorted(walk(path).values()) == [64 * KIB]
            assert tier._room.used() == 64 * KIB
            assert await reads(tier, 1) is Read.HIT
            assert await tier.write([put(2, 256 * KIB)]) == [Written.STORED]

    with small_disk(path, 2 * MIB, monkeypatch):
        run(play)


def test_where_others_fill_the_disk_the_oldest_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs fill the disk, so the tier evicts its least recently used values to make room.

    The tier logs once that it makes room for other programs.
    """
    path, noted = tmp_path / "disk", list[str]()
    monkeypatch.setattr(disk_tier, "warn", lambda name, **_: noted.append(name))

    async def play() -> None:
        async with opened(path, bytes_max=2 * MIB) as tier:
            for i in range(8):
                await tier.write([put(i, 64 * KIB)])
            assert await reads(tier, 0) is Read.HIT
            path.joinpath("hog").write_bytes(bytes(2 * MIB - 9 * 64 * KIB))
            for i in range(8, 12):
                assert await tier.write([put(i, 64 * KIB)]) == [Written.STORED]
                assert await reads(tier, i) is Read.HIT
            there = await tier.exists([some_key(i) for i in range(12)])
            assert there[:2] == [True, False]
            assert all(there[-4:])
            path.joinpath("hog").unlink()
            assert tier._room.used() == sum(walk(path).values())
        assert noted == ["tier_disk_filled"]

    with small_disk(path, 2 * MIB, monkeypatch):
        run(play)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_a_write_deletes_no_more_than_some_times_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """A disk that refuses every write does not empty the tier.

    After some attempts to make room, the write is refused.
    """

    def refusing(_: int, _at: int, _size: int) -> None:
        raise OSError(error, os.strerror(error))

    async def play() -> None:
        async with opened(tmp_path) as tier:
            for i in range(100):
                await tier.write([put(i, 4 * KIB)])
            monkeypatch.setattr(os, "posix_fallocate", refusing)
            with pytest.raises(TierFullError, match=os.strerror(error)):
                await tier.write([put(100, 16 * KIB)])
            assert len(walk(tmp_path)) == 100 - 4 * sum(disk_tier._YIELDS)
            assert tier._room.used() == sum(walk(tmp_path).values())

    run(play)


@pytest.mark.parametrize("error", [errno.EROFS, errno.EPERM])
def test_a_disk_that_refuses_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    """A disk that is read-only or denies permission is still read.

    Writes raise TierFullError until the disk is writable again.
    """
    path = tmp_path / "disk"

    async def play(mounted: bool) -> None:
        async with opened(path, bytes_max=MIB) as tier:
            await tier.write([put(1, 64 * KIB)])
            late = spec_of(path, bytes_max=MIB).make("late")
            if mounted:  # closed first, because the system makes no disk read-only while a file is open for writing
                await tier.close()
            with refusing(path, error, mounted=mounted, patch=monkeypatch):
                await late.open()
                for one in (late,) if mounted else (tier, late):
                    with pytest.raises(TierFullError, match=os.strerror(error)):
                        await one.write([put(2, 64 * KIB)])
                    assert await reads(one, 1) is Read.HIT
                    with pytest.raises(TierFullError, match=os.strerror(error)):
                        await one.delete([some_key(1)])
                with pytest.raises(TierFullError):
                    await late.health()
            await tier.open()
            for i, one in enumerate((tier, late)):
                await one.health()
                assert await one.write([put(2 + i, 64 * KIB)]) == [Written.STORED]
            await late.close()

    if error == errno.EPERM:
        path.mkdir()
        run(play, False)
        return
    with small_disk(path, 4 * MIB, monkeypatch) as mounted:
        run(play, mounted)


def test_a_limit_on_file_sizes_is_no_room(tmp_path: Path) -> None:
    """If the process may not write files of that size, a write raises TierFullError and leaves no file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    async def play() -> None:
        async with opened(tmp_path) as tier:
            resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
            try:
                with pytest.raises(TierFullError, match="File too large"):
                    await tier.write([put(1, 2 * MIB)])
                assert await tier.write([put(2, MIB)]) == [Written.STORED]
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert list(walk(tmp_path).values()) == [MIB]

    run(play)


def test_a_failed_sync_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fsync, a write whose sync fails raises TierError, and the value is not found."""

    def failing(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async def play() -> None:
        async with opened(tmp_path, fsync=True) as tier:
            await tier.write([put(1, 64 * KIB)])
            with monkeypatch.context() as patched:
                patched.setattr(os, "fsync", failing)
                with pytest.raises(TierError, match="Input/output error"):
                    await tier.write([put(2, 64 * KIB)])
            assert await tier.exists([some_key(1), some_key(2)]) == [True, False]
            assert list(walk(tmp_path).values()) == [64 * KIB]

    run(play)


@pytest.mark.parametrize("gone", [TMP, ACCOUNT, "."])
def test_folders_that_vanish_are_made_again(tmp_path: Path, gone: str) -> None:
    """When the drafts' folder, the account or the whole folder is deleted, the tier works again."""
    path = tmp_path / "kv"

    async def play() -> None:
        async with opened(path, bytes_max=ROOM) as tier:
            await tier.write([put(1, 64 * KIB)])
            shutil.rmtree(path / gone) if (path / gone).is_dir() else (path / gone).unlink()
            if gone != ACCOUNT:
                with pytest.raises(TierError):
                    await tier.write([put(2, 64 * KIB)])
            if gone == ".":
                for ask in (tier.capacity, lambda: tier.read([get(1, 4096)])):
                    with pytest.raises(TierError):
                        await ask()
                await tier.health()
                assert path.is_dir()
                shutil.rmtree(path)
                path.touch()
                with pytest.raises(TierError):
                    await tier.open()
                path.unlink()
                await tier.open()
            assert await tier.write([put(3, 64 * KIB)]) == [Written.STORED]
            await tier.health()
            assert await reads(tier, 3) is Read.HIT
            assert tier._room.used() == sum(walk(path).values()) == (await tier.capacity()).bytes_used

    run(play)


def test_what_is_under_a_mount_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the tier's disk is unmounted, the tier does not write to the file system below.

    This also holds for a tier that is opened afterwards.
    """
    path = tmp_path / "disk"

    async def play(mounted: bool, undo: contextlib.ExitStack) -> None:
        async with opened(path, bytes_max=MIB) as tier:
            await tier.write([put(1, 64 * KIB)])
            aside = tmp_path / "aside"
            if mounted:
                aside.mkdir()
                assert mount(aside, "--bind", str(path))
                undo.callback(unmount, aside)
                unmount(path)
            else:
                path.rename(aside)
                path.mkdir()
                tier._root._device = -1
            grow_old(tier)
            for ask in (lambda: tier.write([put(2, 4096)]), lambda: tier.exists([some_key(1)]), tier.open) * 2:
                with pytest.raises(TierError, match=r"; mount (the former one|it)$"):
                    await ask()
            assert names(path) == []
            if mounted:
                assert mount(path, "--bind", str(aside))
            else:
                path.rmdir()
                aside.rename(path)
            await tier.open()
            assert await reads(tier, 1) is Read.HIT

    with small_disk(path, 4 * MIB, monkeypatch) as mounted, contextlib.ExitStack() as undo:
        run(play, mounted, undo)


def test_a_lock_that_is_held_is_not_waited_for_long(tmp_path: Path) -> None:
    """While a process holds the account's lock, writes end after timeout_ms_max with TierError, and reads work."""

    async def play() -> None:
        async with opened(tmp_path, timeout_ms_max=100) as tier:
            await tier.write([put(1, 64 * KIB)])
            with (tmp_path / ACCOUNT).open("r+") as account:
                fcntl.flock(account, fcntl.LOCK_EX)
                with pytest.raises(TierError, match="lock"):
                    await tier.write([put(2, 64 * KIB)])
                assert await reads(tier, 1) is Read.HIT
            assert await tier.write([put(2, 64 * KIB)]) == [Written.STORED]

    run(play)


def test_direct_io_is_left_where_there_is_none(tmp_path: Path) -> None:
    """On a file system without direct I/O, `auto` reads through the page cache, and `on` raises TierError."""
    into = (aligned(4096), aligned(4096))
    with Path("/proc/self/maps").open("rb") as file:
        with pytest.raises(TierError, match="set direct=auto"):
            ValueFiles("on").move(file.fileno(), os.preadv, into)
        assert ValueFiles("auto").move(file.fileno(), os.preadv, into) > 0
    # direct I/O is refused if the disk's blocks are larger than a transfer
    with (tmp_path / "odd").open("wb+") as file:
        file.write(bytes(4096))
        file.flush()
        mover = ValueFiles("auto")
        assert mover.move(file.fileno(), os.pwritev, (memoryview(b"abc"),)) == 3
    assert (tmp_path / "odd").read_bytes()[:4] == b"abc\0"


def test_a_value_may_have_many_parts(tmp_path: Path) -> None:
    """A value with more parts than the system transfers at once is written and read completely."""
    count = os.sysconf("SC_IOV_MAX") + 10
    room = aligned(count * ALIGN_BYTES)
    room[:] = content(5, count * ALIGN_BYTES)
    parts = tuple(room[at : at + ALIGN_BYTES] for at in range(0, room.nbytes, ALIGN_BYTES))

    async def play() -> None:
        async with opened(tmp_path) as tier:
            assert await tier.write([put(5, 4096)._replace(parts=parts)]) == [Written.STORED]
            room[:] = bytes(room.nbytes)
            assert await tier.read([Get(some_key(5), parts)]) == [Read.HIT]
            assert room == content(5, room.nbytes)

    run(play)
