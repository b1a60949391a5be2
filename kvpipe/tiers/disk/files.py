"""File access of the disk tier. Folders are opened without following symbolic links. Values are moved by direct I/O."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISREG
from typing import Final

from kvpipe.tiers.base import Key, TierError, TierFullError

ACCOUNT, TMP = "account", "tmp"
"""The names of a file and of a folder in the tier's folder. All other entries are folders of namespaces."""

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_PRIVATE: Final = 0o600
_IOV_MAX: Final = os.sysconf("SC_IOV_MAX")
_FULL: Final = frozenset(
    (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG),
)

MoveBytes = Callable[[int, Sequence[memoryview], int], int]
"""os.preadv or os.pwritev: a function that takes (file, buffers, offset) and returns the number of bytes moved."""


@contextmanager
def opened(name: str | Path, flags: int, at: int | None = None) -> Iterator[int]:
    """Open the file `name`, in the folder `at` if `at` is given. A new file gets mode 0600."""
    fd = os.open(name, flags, _PRIVATE, dir_fd=at)
    try:
        if flags & os.O_CREAT and os.fstat(fd).st_mode & 0o777 != _PRIVATE:  # the umask has cleared bits of the mode
            os.fchmod(fd, _PRIVATE)
        yield fd
    finally:
        os.close(fd)


@contextmanager
def folder(name: str, at: int, *, make: bool = False, sync: bool = False) -> Iterator[int]:
    """Open the folder `name` in the folder `at`. Raises OSError if `name` is a symbolic link.

    With `make`, the folder is created if it does not exist. With `sync`, `at` is fsynced after the creation.
    """
    try:
        fd = os.open(name, _FOLDER, dir_fd=at)
    except FileNotFoundError:
        if not make:
            raise
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=at)
            os.chmod(name, 0o700, dir_fd=at)
            if sync:
                os.fsync(at)
        fd = os.open(name, _FOLDER, dir_fd=at)
    try:
        yield fd
    finally:
        os.close(fd)


def folders_of(key: Key) -> tuple[str, str]:
    """Return the folder and the sub-folder of a key's file: the namespace, and the first byte of the chunk in hex."""
    return key.namespace, key.chunk[:1].hex()


@contextmanager
def shelf(root: int, key: Key, *, make: bool = False, sync: bool = False) -> Iterator[int]:
    """Open the folder in `root` that holds the key's file. `make` and `sync` are passed to `folder`."""
    outer, inner = folders_of(key)
    with folder(outer, root, make=make, sync=sync) as at, folder(inner, at, make=make, sync=sync) as fd:
        yield fd


def list_folder(at: int) -> list[os.DirEntry[str]]:
    """Return the entries of the folder `at`. An entry's `stat` works only while `at` is open."""
    with os.scandir(at) as entries:
        return list(entries)


def folders(at: int, name: re.Pattern[str]) -> list[os.DirEntry[str]]:
    """Return the folders in the folder `at` whose names match the pattern `name`."""
    return [entry for entry in list_folder(at) if name.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)]


def file_at(name: str, at: int) -> os.stat_result | None:
    """Return the stat result of the file `name` in the folder `at`, or None if there is no regular file `name`."""
    try:
        found = os.stat(name, dir_fd=at, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return found if S_ISREG(found.st_mode) else None


class Root:
    """The tier's folder.

    The folder is opened again for each use, because its file system may be unmounted at any time.
    """

    def __init__(self, path: Path) -> None:
        """`path` must be absolute."""
        self.path = path
        self._device: int | None = None

    def adopt(self, *, make: bool) -> None:
        """Record on which file system the folder is, for later calls of `open`.

        With `make`, the folder is created if it does not exist.

        Raises:
            TierError: the folder does not exist or cannot be created. TierError is also raised if the file system of
                the path has changed, and the folder does not exist or has no account.

        """
        with self.failures():
            if make and not self.path.exists():
                above = next(parent for parent in self.path.parents if parent.exists())
                if self._device not in {None, above.stat().st_dev}:
                    raise TierError(
                        f"{self.path} does not exist any more, and its file system is not mounted; mount it"
                    )
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
                self.path.chmod(0o700)
            with opened(self.path, os.O_RDONLY | os.O_DIRECTORY) as fd:
                device = os.fstat(fd).st_dev
                if self._device not in {None, device} and file_at(ACCOUNT, fd) is None:
                    msg = f"{self.path} is empty and on another file system than before; mount the former one"
                    raise TierError(msg)
                self._device = device

    @contextmanager
    def open(self) -> Iterator[int]:
        """Open the folder. Raises `TierError` if the folder is missing, or not on the file system of `adopt`."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise TierError(f"{self.path}: {error.strerror}") from error
        try:
            if os.fstat(fd).st_dev != self._device:
                raise TierError(f"{self.path} is on another file system than before; mount the former one")
            yield fd
        finally:
            os.close(fd)

    @contextmanager
    def failures(self, *, writing: bool = False) -> Iterator[None]:
        """Convert `OSError` to `TierError`. If `writing`, errors that refuse a write become `TierFullError`."""
        try:
            yield
        except OSError as error:
            kind = TierFullError if writing and error.errno in _FULL else TierError
            raise kind(f"{self.path}: {error.strerror or error}") from error


class ValueFiles:
    """Moves whole values between aligned buffers and files, with direct I/O if the file system supports direct I/O."""

    def __init__(self, direct: str) -> None:
        """`direct` is "on", "off" or "auto". "auto" uses direct I/O until a file system refuses direct I/O."""
        self._must, self._direct = direct == "on", direct != "off"

    def move(self, fd: int, call: MoveBytes, parts: Sequence[memoryview]) -> int:
        """Move the bytes of all `parts` with `call`.

        Returns the number of moved bytes, which is lower if the file ends early.

        Raises OSError. Raises `TierError` if `direct` is "on" and the file system has no direct I/O.
        """
        if self._direct:
            try:
                _set_direct(fd, os.O_DIRECT)
                return _all(fd, call, parts)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                if self._must:
                    raise TierError("the file system has no direct I/O, but direct=on; set direct=auto") from error
            self._direct = False
            _set_direct(fd, 0)
        return _all(fd, call, parts)


def _set_direct(fd: int, flag: int) -> None:
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT | flag)


def _all(fd: int, call: MoveBytes, parts: Sequence[memoryview]) -> int:
    left, moved = list(parts), 0
    while left:
        n = call(fd, left[:_IOV_MAX], moved)
        if n == 0:
            break
        moved += n
        while left and n >= left[0].nbytes:
            n -= left.pop(0).nbytes
        if n:
            left[0] = left[0][n:]
    return moved
