"""Helpers for tests of the disk tier: tiers in their own folders, their files, and disks that are small or refuse."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpipe.testing.buffers import content, data, get, some_key
from kvpipe.testing.waiting import PATIENT
from kvpipe.tiers.base import Read
from kvpipe.tiers.disk.files import ACCOUNT, folders_of
from kvpipe.tiers.disk.spec import DiskSpec
from kvpipe.tiers.disk.tier import DiskTier

KIB, MIB = 1 << 10, 1 << 20
ROOM = 16 * 64 * KIB


def spec_of(path: Path, **given: Any) -> DiskSpec:
    """Return the specification of a tier in `path`. The default size is 1 GiB."""
    return DiskSpec.model_validate({"path": path, "bytes_max": 1 << 30, **PATIENT, **given})


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
    return path.joinpath(*folders_of(some_key(i)), some_key(i).text)


def names(path: Path) -> list[Path]:
    """Return the names of everything in a folder."""
    return sorted(path.rglob("*"))


def walk(path: Path) -> dict[str, int]:
    """Return the sizes of the tier's files by their names. Unfinished files are included."""
    return {
        os.path.relpath(os.path.join(folder, name), path): os.lstat(os.path.join(folder, name)).st_size  # noqa: PTH118
        for folder, _, names in os.walk(path)
        for name in names
        if name not in {ACCOUNT, "lock"} and not os.path.islink(os.path.join(folder, name))  # noqa: PTH114, PTH118
    }


async def reads(tier: DiskTier, i: int, size: int = 64 * KIB, **key: Any) -> Read:
    """Read chunk `i`. A hit must have the bytes that were written."""
    wanted = get(i, size, **key)
    (read,) = await tier.read([wanted])
    assert read is not Read.HIT or data(wanted.into) == content(i, size)
    return read


def mount(path: Path, *options: str) -> bool:
    """Mount, and return False if mounting is not permitted."""
    return ran("mount", *options, str(path))


def unmount(path: Path) -> None:
    """Unmount, even if the mount is in use."""
    assert ran("umount", "--lazy", str(path))


def ran(*command: str) -> bool:
    """Run a command, and return whether it succeeded."""
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@contextlib.contextmanager
def small_disk(path: Path, size: int, patch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Make `path` a file system of `size` bytes.

    If mounting is not permitted, make a folder that counts as full at that size.
    """
    path.mkdir()
    if mount(path, "-t", "tmpfs", "-o", f"size={size}", "none"):
        try:
            yield True
        finally:
            ran("umount", "--lazy", str(path))  # the test may have unmounted the disk
        return
    real = os.posix_fallocate

    def limited(fd: int, at: int, n: int) -> None:
        if sum(walk(path).values()) > size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd, at, n)

    def free(_: int) -> Any:
        left = max(0, size - sum(walk(path).values())) // (4 * KIB)
        return os.statvfs_result((4 * KIB, 4 * KIB, size // (4 * KIB), left, left, 0, 0, 0, 0, 255))

    with patch.context() as patched:
        patched.setattr(os, "posix_fallocate", limited)
        patched.setattr(os, "fstatvfs", free)
        yield False


@contextlib.contextmanager
def refusing(path: Path, error: int, *, mounted: bool, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make writes to `path` fail with EROFS or EPERM. The file system itself refuses them, if this is permitted."""
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
    return ran("chattr", flag, *map(str, paths))
