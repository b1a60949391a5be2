"""Access to small files that other users may control. Reads are bounded and do not block. Replacement is atomic."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import secrets
import stat
from pathlib import Path

_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # opening a pipe without a writer must not block
_DRAFT = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFLNK: "a link",
}


class OddFileError(OSError):
    """This error means that a file is not a regular file or is too long. The message has the reason."""


def file_type(mode: int) -> str:
    """Return the type of a file in words, or "" for a regular file. `mode` is the file's `st_mode`."""
    return _KINDS.get(stat.S_IFMT(mode), "")


def owner_of(uid: int) -> str:
    """Return a user's name and uid, for messages."""
    with contextlib.suppress(KeyError):
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    return f"uid {uid}"


def doubts(path: Path) -> str:
    """Return why other users can write to a file or folder, or can read a file. Return "" if they can do neither."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return ""
    if found.st_uid not in {os.geteuid(), 0}:
        return f"it belongs to {owner_of(found.st_uid)}"
    if stat.S_ISREG(found.st_mode) and found.st_mode & 0o066:
        return (
            f"its mode {stat.S_IMODE(found.st_mode):04o} lets others {'write' if found.st_mode & 0o022 else 'read'} it"
        )
    return "everybody may write to it" if stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_IWOTH else ""


def read_small(path: Path, bytes_max: int) -> bytes:
    """Return the content of a regular file. Links are followed.

    Raises:
        OSError: the file cannot be read.
        OddFileError: the file is not a regular file, or is longer than `bytes_max`.

    """
    try:
        fd = os.open(path, _READ)
    except ValueError:  # the name has a zero byte
        raise OddFileError("no path") from None
    try:
        if kind := file_type(os.fstat(fd).st_mode):
            raise OddFileError(f"it is {kind}")
        data = b""
        while len(data) <= bytes_max and (more := os.read(fd, bytes_max + 1 - len(data))):
            data += more
    finally:
        os.close(fd)
    if len(data) > bytes_max:
        raise OddFileError(f"it is longer than {bytes_max} bytes")
    return data


def replace_text(path: Path, text: str, mode: int = 0o600) -> None:
    """Replace a file's text atomically. Other users cannot guess the name of the temporary file.

    Raises:
        OSError: the file cannot be written.

    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(draft, _DRAFT, mode)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def try_lock(fd: int, how: int = fcntl.LOCK_EX) -> bool:
    """Try to lock an open file, without waiting. Return whether the file is locked."""
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(fd: int, process: int) -> None:
    """Close an open file that `process` may have locked.

    If the caller is `process`, the lock is released, too, even if a forked process still has the file open. If the
    caller is a forked process, only its own copy of the file is closed.
    """
    if process == os.getpid():
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def why(error: Exception) -> str:
    """Return the reason why a file could not be used. The reason is the system's message without the file's name."""
    return str(getattr(error, "strerror", None) or error) or type(error).__name__
