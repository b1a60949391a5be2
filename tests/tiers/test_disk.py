"""The disk tier: what its files are, what it does when the disk fails it, its bound, and what it knows of others."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from stat import S_IMODE
from typing import Any
from urllib.parse import urlsplit

import anyio
import pytest
from pydantic import ValidationError

from kvpipe.errors import ConfigError
from kvpipe.tiers import disk_files, disk_index
from kvpipe.tiers.base import ALIGN_BYTES, Capacity, Get, Key, Read, TierError, TierFullError, Written
from kvpipe.tiers.disk import DiskSpec, DiskTier
from kvpipe.tiers.disk_files import ACCOUNT, TMP, Mover, place
from tests.tiers.buffers import NAMESPACE, aligned, content, data, get, put, some_key
from tests.tiers.worlds import run

KIB, MIB = 1 << 10, 1 << 20
ROOM = 16 * 64 * KIB


def spec_of(path: Path, **given: Any) -> DiskSpec:
    """Return a specification of a tier in `path`, of 1 GiB if nothing else is said."""
    return DiskSpec.model_validate({"path": path, "bytes_max": 1 << 30, **given})


@contextlib.asynccontextmanager
async def opened(path: Path, *, writes: bool = True, **given: Any) -> Any:
    """Open a tier in `path`, and close it."""
    tier = spec_of(path, **given).make("disk", writes=writes)
    await tier.open()
    try:
        yield tier
    finally:
        await tier.close()


def file_of(path: Path, i: int) -> Path:
    """Return the file of chunk `i`."""
    return path.joinpath(*place(some_key(i)), some_key(i).text)


def names(path: Path) -> list[Path]:
    """Return all there is in a folder."""
    return sorted(path.rglob("*"))


def walk(path: Path) -> dict[str, int]:
    """Return the sizes of the tier's files, unfinished ones included, by their names."""
    return {
        os.path.relpath(os.path.join(folder, name), path): os.lstat(os.path.join(folder, name)).st_size  # noqa: PTH118
        for folder, _, names in os.walk(path)
        for name in names
        if name not in {ACCOUNT, "lock"} and not os.path.islink(os.path.join(folder, name))  # noqa: PTH114, PTH118
    }


async def reads(tier: DiskTier, i: int, size: int = 64 * KIB) -> Read:
    """Read chunk `i`; a hit must be what was written."""
    wanted = get(i, size)
    (read,) = await tier.read([wanted])
    assert read is not Read.HIT or data(wanted.into) == content(i, size)
    return read


def mount(path: Path, *options: str) -> bool:
    """Mount; False where that is not permitted."""
    return _ran("mount", *options, str(path))


def unmount(path: Path) -> None:
    """Unmount, also what is in use."""
    assert _ran("umount", "--lazy", str(path))


def _ran(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@contextlib.contextmanager
def small_disk(path: Path, size: int, patch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Make `path` a file system of `size` bytes; where nothing may be mounted, a folder that is full at that size."""
    path.mkdir()
    if mount(path, "-t", "tmpfs", "-o", f"size={size}", "none"):
        try:
            yield True
        finally:
            _ran("umount", "--lazy", str(path))  # the test may have done so
        return
    real = os.posix_fallocate

    def limited(fd: int, at: int, n: int) -> None:
        if sum(walk(path).values()) > size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd, at, n)

    with patch.context() as patched:
        patched.setattr(os, "posix_fallocate", limited)
        yield False


@contextlib.contextmanager
def refusing(path: Path, error: int, *, mounted: bool, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let nothing be written in `path`, for EROFS or EPERM: by the file system's own means where they may be used."""
    if error == errno.EROFS and mounted:
        assert mount(path, "-o", "remount,ro")
        try:
            yield
        finally:
            assert mount(path, "-o", "remount,rw")
        return
    inner = [path, *(p for p in path.rglob("*") if not p.is_symlink())]
    if error == errno.EPERM and _immutable(inner, "+i"):
        try:
            yield
        finally:
            assert _immutable(inner, "-i")
        return
    real = os.open

    def refused(name: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(error, os.strerror(error))
        return real(name, flags, *rest, **named)

    with patch.context() as patched:
        patched.setattr(os, "open", refused)
        patched.setattr(os, "access", lambda *_: False)
        yield


def _immutable(paths: list[Path], flag: str) -> bool:
    return _ran("chattr", flag, *map(str, paths))


# ---- what a user writes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("path", "var/kv", "absolute path"),
        ("path", "~nobody-is-called-so/kv", "absolute path"),
        ("bytes_max", 0, "greater than 0"),
        ("bytes_max", True, "not true or false"),
        ("bytes_max", "many", "bytes"),
        ("direct", "maybe", "'auto', 'on' or 'off'"),
        ("fsync", "perhaps", "boolean"),
    ],
)
def test_a_wrong_key_is_refused(key: str, value: object, said: str) -> None:
    """A value that cannot be meant is refused, and the report names its key."""
    with pytest.raises(ValidationError, match=said) as raised:
        DiskSpec.model_validate({"path": "/var/kv", key: value})
    assert raised.value.errors()[0]["loc"][0] == key


def test_a_url_stands_for_the_keys() -> None:
    """A file URL gives the path, decoded, and its query the other keys; `~` is the home folder."""
    given = DiskSpec.parse_url(urlsplit("file:///var/a%20b%23c?bytes_max=50GiB&direct=off"))
    spec = DiskSpec.model_validate(given)
    assert (spec.path, spec.bytes_max, spec.direct) == (Path("/var/a b#c"), 50 << 30, "off")
    assert DiskSpec.model_validate({"path": "~/kv"}).path == Path.home() / "kv"
    for wrong in ("file://var/kv", "file:var/kv", "file:///kv#part"):
        with pytest.raises(ValueError, match=r"three slashes|%23"):
            DiskSpec.parse_url(urlsplit(wrong))


def test_an_unfit_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file, a disk that is too small, a folder that cannot be written to are refused with the key and the remedy."""
    tmp_path.joinpath("file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"path='.+': .+ is no folder; name another path"):
            spec_of(path).make("disk")
    with pytest.raises(ConfigError, match=r"bytes_max=\d+ is more than the \d+ bytes .+; set a smaller bytes_max"):
        spec_of(tmp_path, bytes_max=1 << 60).make("disk")
    spec_of(tmp_path, bytes_max=1 << 60, store="never").make("disk")
    path = tmp_path / "disk"
    with (
        small_disk(path, 4 * MIB, monkeypatch) as mounted,
        refusing(path, errno.EROFS, mounted=mounted, patch=monkeypatch),
    ):
        with pytest.raises(ConfigError, match=r"cannot be written to; .+ store=never"):
            spec_of(path, bytes_max=MIB).make("disk")
        spec_of(path, bytes_max=MIB, store="never").make("disk")


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [0o000, 0o077, 0o277])
def test_files_are_private(tmp_path: Path, mask: int) -> None:
    """Files are 0600 and folders 0700, whatever the umask; a value is in a file that is called as its key."""

    async def play() -> None:
        before = os.umask(mask)
        try:
            async with opened(tmp_path / "kv") as tier:
                await tier.write([put(1, 8 * KIB)])
                assert file_of(tmp_path / "kv", 1).read_bytes() == content(1, 8 * KIB)
                found = [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]
                modes = {(path.is_dir(), S_IMODE(path.stat().st_mode)) for path in found}
                assert modes == {(True, 0o700), (False, 0o600)}
        finally:
            os.umask(before)

    run(play)


def test_foreign_files_are_not_touched(tmp_path: Path) -> None:
    """Files whose names are no keys, or in the wrong folder, are not counted, listed, evicted or deleted."""
    here, name = file_of(tmp_path, 1).parent, some_key(1).text
    names = ("notes", name + ".tmp", name.upper(), name.replace("-g0", "-g00"), name.replace("-r0", "-r+0"))
    foreign = [here / n for n in names]
    foreign += [here.parent / name, tmp_path / name, here.parent / "zz" / name, tmp_path / "tmp" / "mine" / "0"]
    foreign += [tmp_path / "lost+found" / "x", here.parent / f"{int(here.name, 16) ^ 1:02x}" / name]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"mine")

    async def play() -> None:
        async with opened(tmp_path, bytes_max=ROOM) as tier:
            assert (await tier.capacity()).items == 0
            for i in range(40):
                await tier.write([put(i, 64 * KIB)])
            await tier.delete([some_key(i) for i in range(40)])
            assert [entry async for entry in tier.scan()] == []
            assert await tier.capacity() == Capacity(0, 0, ROOM)

    run(play)
    assert all(path.read_bytes() == b"mine" for path in foreign)


def test_a_file_that_vanished_is_a_miss(tmp_path: Path) -> None:
    """A file that is deleted between lookup and read is a MISS, is not found any more, and may be written again."""

    async def play() -> None:
        async with opened(tmp_path) as tier:
            await tier.write([put(1, 64 * KIB), put(2, 64 * KIB)])
            assert await tier.exists([some_key(1)]) == [True]
            file_of(tmp_path, 1).unlink()
            assert await reads(tier, 1) is Read.MISS
            assert await tier.exists([some_key(1), some_key(2)]) == [False, True]
            assert await tier.write([put(1, 64 * KIB)]) == [Written.STORED]
            shutil.rmtree(file_of(tmp_path, 1).parent.parent)
            assert await reads(tier, 1) is Read.MISS

    run(play)


@pytest.mark.parametrize("size", [0, 1, 64 * KIB - 1, 64 * KIB - 4096, 64 * KIB + 1, 128 * KIB])
def test_a_file_of_another_length_is_damaged(tmp_path: Path, size: int) -> None:
    """A file that was cut or lengthened is DAMAGED; deleted, it makes room for a new value."""

    async def play() -> None:
        async with opened(tmp_path) as tier:
            await tier.write([put(1, 64 * KIB)])
            os.truncate(file_of(tmp_path, 1), size)
            assert await reads(tier, 1) is Read.DAMAGED
            assert await tier.delete([some_key(1)]) == 1
            assert await tier.write([put(1, 64 * KIB)]) == [Written.STORED]
            assert await reads(tier, 1) is Read.HIT

    run(play)


@pytest.mark.parametrize("kind", ["folder", "pipe", "link"])
def test_what_is_no_file_is_no_value(tmp_path: Path, kind: str) -> None:
    """A folder, a pipe or a link that has a key's name is not found, not followed, and stops nothing."""
    here, secret = file_of(tmp_path / "kv", 1), tmp_path / "secret"
    here.parent.mkdir(parents=True)
    secret.write_bytes(content(1, 64 * KIB))
    if kind == "folder":
        here.mkdir()
        here.joinpath("inside").touch()
    elif kind == "pipe":
        os.mkfifo(here)
    else:
        here.symlink_to(secret)

    async def play() -> None:
        async with opened(tmp_path / "kv") as tier:
            assert await tier.exists([some_key(1)]) == [False]
            assert await reads(tier, 1) is Read.DAMAGED
            assert await tier.delete([some_key(1)]) == 0
            with contextlib.suppress(TierError):
                assert await tier.write([put(1, 64 * KIB)]) == [Written.STORED]
                assert await reads(tier, 1) is Read.HIT
            assert here.is_dir() == (kind == "folder")
            assert await tier.write([put(2, 64 * KIB)]) == [Written.STORED]
            assert sum(walk(tmp_path / "kv").values()) == (await tier.capacity()).bytes_used

    run(play)
    assert secret.read_bytes() == content(1, 64 * KIB)


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_links_lead_nowhere(tmp_path: Path, depth: int) -> None:
    """A link in place of a folder or of the account is not followed: nothing beyond it is read, written or deleted."""
    root, beyond = tmp_path / "kv", tmp_path / "beyond"
    link = (root / TMP, root / NAMESPACE, file_of(root, 1).parent, root / ACCOUNT)[depth]
    below = beyond / (file_of(root, 1).relative_to(link) if link in file_of(root, 1).parents else "")
    below.parent.mkdir(parents=True, exist_ok=True)
    below.mkdir() if below == beyond else below.write_bytes(content(1, 64 * KIB))
    link.parent.mkdir(parents=True)
    link.symlink_to(beyond)
    before = walk(beyond)

    async def play() -> None:
        async with opened(root, store="never") as tier:
            assert await tier.exists([some_key(1)]) == [False]
            assert await reads(tier, 1) is Read.MISS
        with contextlib.suppress(TierError):
            async with opened(root) as tier:
                with pytest.raises(TierError):
                    await tier.write([put(1, 64 * KIB)])
                with contextlib.suppress(TierError):
                    assert await tier.delete([some_key(1)]) == 0

    run(play)
    assert walk(beyond) == before
    assert link.is_symlink()


# ---- faults ---------------------------------------------------------------------------------------------------------


def test_a_full_disk_refuses_and_serves_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the disk is full a write raises TierFullError and leaves nothing; the rest is served; room is used again."""
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


@pytest.mark.parametrize("error", [errno.EROFS, errno.EPERM])
def test_a_disk_that_refuses_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    """A disk that is read only, or denies permission, is read on; writing raises TierFullError until it is back."""
    path = tmp_path / "disk"

    async def play(mounted: bool) -> None:
        async with opened(path, bytes_max=MIB) as tier:
            await tier.write([put(1, 64 * KIB)])
            late = spec_of(path, bytes_max=MIB).make("late")
            if mounted:  # the system lets no disk with an open file become read only
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
    """Where the process may not write files of that size, a write raises TierFullError and leaves nothing."""
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
    """With fsync, a value that could not be synced is not found, and the write raises TierError."""

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
                for ask in (tier.health, tier.capacity, lambda: tier.read([get(1, 4096)])):
                    with pytest.raises(TierError):
                        await ask()
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
    """When its disk is unmounted a tier writes nothing to the one below, also opened anew, until it is back."""
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
            await anyio.sleep(0.6)  # what is known is old
            for ask in (lambda: tier.write([put(2, 4096)]), lambda: tier.exists([some_key(1)]), tier.open) * 2:
                with pytest.raises(TierError, match="is it mounted"):
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
    """While a process holds the account's lock, writes end after timeout_ms_max in TierError, and reads go on."""

    async def play() -> None:
        async with opened(tmp_path, timeout_ms_max=100) as tier:
            await tier.write([put(1, 64 * KIB)])
            with (tmp_path / ACCOUNT).open("r+") as account:
                fcntl.flock(account, fcntl.LOCK_EX)
                begin = time.monotonic()
                with pytest.raises(TierError, match="lock"):
                    await tier.write([put(2, 64 * KIB)])
                assert time.monotonic() - begin < 5
                assert await reads(tier, 1) is Read.HIT
            assert await tier.write([put(2, 64 * KIB)]) == [Written.STORED]

    run(play)


def test_direct_io_is_left_where_there_is_none(tmp_path: Path) -> None:
    """On a file system without direct I/O `auto` reads through the page cache, and `on` raises TierError."""
    into = (aligned(4096), aligned(4096))
    with Path("/proc/self/maps").open("rb") as file:
        with pytest.raises(TierError, match="set direct=auto"):
            Mover("on").move(file.fileno(), os.preadv, into)
        assert Mover("auto").move(file.fileno(), os.preadv, into) > 0
    with (tmp_path / "odd").open("wb+") as file:  # where the disk's blocks are larger than what is moved
        file.write(bytes(4096))
        file.flush()
        mover = Mover("auto")
        assert mover.move(file.fileno(), os.pwritev, (memoryview(b"abc"),)) == 3
    assert (tmp_path / "odd").read_bytes()[:4] == b"abc\0"


def test_a_value_may_have_many_parts(tmp_path: Path) -> None:
    """A value of more parts than the system moves at once is written and read whole."""
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


# ---- the bound ------------------------------------------------------------------------------------------------------


def test_the_oldest_make_room(tmp_path: Path) -> None:
    """Writing beyond bytes_max deletes what was not used for longest; a read is a use; the account is what is there."""

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


def test_age_outlives_a_restart(tmp_path: Path) -> None:
    """A tier opened on a folder knows what is oldest there; what another process has used since is kept."""

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


def test_what_is_too_large_is_refused(tmp_path: Path) -> None:
    """A value larger than bytes_max raises TierFullError that names the key, and nothing is deleted for it."""

    async def play() -> None:
        async with opened(tmp_path, bytes_max=ROOM) as tier:
            await tier.write([put(1, 64 * KIB)])
            with pytest.raises(TierFullError, match="bytes_max=1048576"):
                await tier.write([put(2, ROOM + 4096)])
            assert await reads(tier, 1) is Read.HIT
            assert await tier.write([put(2, ROOM)]) == [Written.STORED]
            assert (await tier.capacity()) == Capacity(1, ROOM, ROOM)

    run(play)


def test_files_that_others_add_are_counted(tmp_path: Path) -> None:
    """Files that are copied in or deleted by hand are in the account when room is made next, and after a restart."""

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
    """An account whose keeper died in the middle, or that is nonsense, is made from the files."""

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
from tests.tiers.test_disk import opened, put, some_key, KIB, ROOM
from tests.tiers.worlds import run
async def play():
    async with opened(Path(sys.argv[1]), bytes_max=4 * ROOM) as tier:
        for i in range(int(sys.argv[2]), 10**9):
            await tier.write([put(4 * i + j, 64 * KIB) for j in range(4)])
run(play)
"""


def test_the_bound_holds_for_all_processes_together(tmp_path: Path) -> None:
    """While three processes write into one folder, its files, unfinished ones too, are never more than bytes_max."""
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    children = [subprocess.Popen([*command, str(10_000 * n)]) for n in range(3)]
    most, seen = 0, set[str]()
    try:
        until = time.monotonic() + 60
        while len(seen) < 200 and time.monotonic() < until:
            with contextlib.suppress(FileNotFoundError), (tmp_path / ACCOUNT).open("r+") as account:
                fcntl.flock(account, fcntl.LOCK_EX)  # else files are moved while they are counted
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


def test_drafts_of_the_living_are_left_alone(tmp_path: Path) -> None:
    """Opening a tier deletes what dead processes left unfinished, and nothing of those that live."""

    async def play() -> None:
        async with opened(tmp_path) as tier:
            draft = tier._room.begin(64 * KIB)
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
    assert list((tmp_path / TMP).iterdir()) == []


# ---- others ---------------------------------------------------------------------------------------------------------


def test_others_values_are_found_soon(tmp_path: Path) -> None:
    """What another client writes or deletes is known within a second, also to one that only reads."""

    async def known(tier: DiskTier, wanted: list[bool]) -> None:
        until = time.monotonic() + 1
        while await tier.exists([some_key(1), some_key(2)]) != wanted:
            assert time.monotonic() < until
            await anyio.sleep(0.02)

    async def play() -> None:
        async with opened(tmp_path, writes=False) as reader, opened(tmp_path) as tier, opened(tmp_path) as other:
            for wanted in ([True, False], [True, True]):
                await other.write([put(sum(wanted), 64 * KIB)])
                for one in (reader, tier):
                    await known(one, wanted)
            await other.delete([some_key(1)])
            for one in (reader, tier):
                await known(one, [False, True])

    run(play)


def test_a_folder_may_go_and_come_back(tmp_path: Path) -> None:
    """What is in a folder that is moved away is not found, and is found again when the folder is back as it was."""

    async def play() -> None:
        async with opened(tmp_path) as tier:
            await tier.write([put(1, 64 * KIB)])
            await anyio.sleep(0.1)  # until the folder's time says that nothing has changed since
            assert (await tier.capacity()).items == 1
            (tmp_path / NAMESPACE).rename(tmp_path / "aside")
            assert await tier.capacity() == Capacity(0, 0, 1 << 30)
            (tmp_path / "aside").rename(tmp_path / NAMESPACE)
            assert await tier.capacity() == Capacity(1, 64 * KIB, 1 << 30)
            assert await tier.exists([some_key(1)]) == [True]

    run(play)


def test_a_reader_leaves_no_trace(tmp_path: Path) -> None:
    """With store=never nothing is made or written; a missing folder is said, and found when it is there."""

    async def play() -> None:
        reader = spec_of(tmp_path / "kv", store="never").make("disk")
        with pytest.raises(TierError, match="No such file"):
            await reader.open()
        assert names(tmp_path) == []
        async with opened(tmp_path / "kv") as tier:
            await tier.write([put(1, 64 * KIB)])
            before = names(tmp_path)
            await reader.open()
            assert await reads(reader, 1) is Read.HIT
            with pytest.raises(TierFullError, match="only read"):
                await reader.write([put(2, 64 * KIB)])
            await reader.health()
            await reader.close()
            assert names(tmp_path) == before

    run(play)


def test_what_happens_during_a_listing_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process writes and deletes while a folder is listed is newer than the listing."""
    same = [key for i in range(4000) if (key := some_key(i)).chunk[0] == some_key(0).chunk[0]][:3]
    real = disk_files.listed

    async def play() -> None:
        async with opened(tmp_path) as tier:
            await tier.write([put(0, 4096)._replace(key=key) for key in same[:2]])

            def meanwhile(at: int) -> Any:
                found = real(at)
                monkeypatch.setattr("kvpipe.tiers.disk_index.listed", real)
                assert tier._room.delete(same[:1]) == 1
                assert tier._write(put(0, 4096)._replace(key=same[2])) is Written.STORED
                return found

            await anyio.sleep(0.06)
            monkeypatch.setattr("kvpipe.tiers.disk_index.listed", meanwhile)
            tier._index._shelves[place(same[0])].changed_ns = None
            tier._pass()
            assert tier._index.holds(same) == [False, True, True]
            assert tier._index.total() == (2, 8192)
            tier._pass()
            assert tier._index.holds(same) == [False, True, True]

    run(play)


def test_what_is_deleted_during_a_listing_stays_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of another's that this process deletes after a listing has seen it is not found."""

    async def play() -> None:
        async with opened(tmp_path) as tier, opened(tmp_path) as other:
            await other.write([put(1, 4096)])

            @contextlib.contextmanager
            def folder(*args: Any) -> Iterator[int]:
                with disk_files.folder(*args) as fd:
                    yield fd
                deleted.extend([tier._room.delete([some_key(1)])] if not deleted else [])

            deleted: list[int] = []
            monkeypatch.setattr("kvpipe.tiers.disk_index.folder", folder)
            tier._pass()
            assert deleted == [1]
            assert tier._index.holds([some_key(1)]) == [False]
            assert tier._index.total() == (0, 0)

    run(play)


def test_names_are_read_as_keys_are() -> None:
    """The index knows a file by its name exactly if that is a key's text."""
    index, base = disk_index.Index(), some_key(1).text
    names = [base, *(some_key(i).text for i in range(5)), base.upper(), base + "0", base[1:], base.replace("-", "_")]
    names += [re.sub("-[0-9a-f]{64}", f"-{chunk}", base) for chunk in ("", "ab" * 15, "ab" * 16, "ab" * 65, "ab " * 20)]
    for name in names:
        try:
            wanted: Key | None = Key.parse(name)
        except ValueError:
            wanted = None
        assert index._key(name) == wanted, name
