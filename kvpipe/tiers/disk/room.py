"""The room in the disk tier's folder: a limit on its bytes for all processes together that use the folder.

One file, the account, contains the number of kvpipe's bytes in the folder, unfinished files included. A process takes
the account's lock (flock) to begin a file, to give the file its name, and to delete the file. A process never holds the
lock while it reads or writes values. The kernel releases the lock of a dead process. A process that has taken the lock
first marks the account as void, and writes the new number before it releases the lock. If the process dies in between,
the next process finds the void account and counts the files.

An unfinished file is called a *draft file*. Each opened tier keeps its draft files in a folder of its own, the *desk*.
The tier's process holds a lock on the desk as long as the process lives. The next tier that is opened deletes the desks
of dead processes.
"""

from __future__ import annotations

import fcntl
import itertools
import math
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple

from kvpipe.inputs.files import try_lock
from kvpipe.tiers.base import Key, TierError, TierFullError
from kvpipe.tiers.disk.files import ACCOUNT, TMP, Root, file_at, folder, folders, folders_of, list_folder, opened, shelf
from kvpipe.tiers.disk.index import Index

_DESK = re.compile(r"[0-9a-f]{16}")
_LOCK: Final = "lock"
_ACCOUNT = re.compile(rb"[0-9]{20}\n")
_ACCOUNT_BYTES: Final = 21
_VOID: Final = b"?"
_LOW: Final = 0.95
"""Eviction deletes files until only this share of the room is used, so that the next writes need no eviction."""
_BATCH: Final = 256
"""The largest number of files that are deleted before the lock is released."""
_PAUSE_S, _PAUSE_S_MAX = 0.0001, 0.005
_BUSY: Final = "other processes have held the lock of the folder's account for timeout_ms_max"


class Draft(NamedTuple):
    """A file that is being written. `desk` is the folder with the file. `bytes` is the size of the finished file."""

    desk: str
    name: str
    bytes: int


class _Sum:
    """The account while its lock is held. `root` is the open folder. `bytes` is the number of bytes in the folder."""

    __slots__ = ("bytes", "root")

    def __init__(self, root: int, used: int) -> None:
        self.root, self.bytes = root, used


class _Desk:
    """A folder for draft files. The folder stays locked until `leave` is called or the process dies."""

    def __init__(self, tmp: int) -> None:
        self.name, self._numbers = secrets.token_hex(8), itertools.count()
        with folder(self.name, tmp, make=True) as at:
            self._lock = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=at)
            os.fchmod(self._lock, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def draft(self, size: int) -> Draft:
        """Return a draft file with an unused name."""
        return Draft(self.name, str(next(self._numbers)), size)

    def leave(self) -> None:
        """Release the lock, so that other processes may delete the remaining draft files."""
        os.close(self._lock)


class DiskRoom:
    """One opened tier's access to the folder's account. Any thread may call the methods.

    Every method may raise OSError and TierError.
    """

    def __init__(self, root: Root, index: Index, bytes_max: int, wait_s_max: float, *, sync: bool) -> None:
        """`bytes_max` limits the bytes of all files. `wait_s_max` is the longest wait for the lock, in seconds.

        With `sync`, the parent of a new folder is fsynced.
        """
        self._root, self._index, self._bytes_max = root, index, bytes_max
        self._wait_s_max, self._sync = wait_s_max, sync
        self._mine = threading.Lock()
        self._desk: _Desk | None = None
        self.stopping = threading.Event()
        """Set this event to end a count of the files early. The count then raises `TierError`."""

    def open(self) -> None:
        """Make a desk. Delete the draft files of dead processes, and count the files if no other process is alive."""
        self._leave()
        with self._locked() as held:
            self._set_up(held)
        vacant = self._index.vacant()
        for begin in range(0, len(vacant), _BATCH):
            with self._locked() as held:
                for one in vacant[begin : begin + _BATCH]:
                    _remove(held.root, one)

    def close(self) -> None:
        """Release the desk, and delete its draft files. If no value is left, the last process deletes the account."""
        if self._desk is not None:
            self._leave()
            with self._locked() as held:
                with folder(TMP, held.root) as tmp:
                    alone = self._sweep(held, tmp)
                if alone and all(one.name in {ACCOUNT, TMP} for one in list_folder(held.root)):
                    with suppress(OSError):  # the folder contains a file that does not belong to kvpipe
                        os.rmdir(TMP, dir_fd=held.root)
                        os.unlink(ACCOUNT, dir_fd=held.root)

    def yield_bytes(self, size: int) -> bool:
        """Delete at least `size` bytes of the oldest files, but at most one batch.

        Called if files of other programs fill the disk. If kvpipe's files together have less than `size` bytes, delete
        no file and return False.
        """
        with self._locked() as held:
            if not self._index.oldest(1):
                held.bytes = self._count(held.root)  # the index may lack files of other processes
            before, found = held.bytes, os.fstatvfs(held.root)
            if self._index.total()[1] + found.f_bavail * found.f_frsize < size:
                return False
            self._evict(held, before - size)
            return held.bytes < before

    def check(self) -> None:
        """Raise an error if the folder cannot be written to."""
        desk = self._desk
        if desk is None:
            self.open()
            return
        try:
            with self._root.open() as root, _drafts(root, desk.name) as at:
                os.utime(_LOCK, dir_fd=at, follow_symlinks=False)
        except FileNotFoundError:  # a user has removed the folder or its content
            self.open()

    def used(self) -> int:
        """Return the number in the account: the number of bytes of all files, draft files included."""
        with self._locked() as held:
            return held.bytes

    def begin_draft(self, size: int) -> Draft:
        """Reserve `size` bytes for a file, and make the draft file. Delete the oldest files if there is no room.

        Raises:
            TierFullError: draft files take all the room, or `size` is more than `bytes_max`.

        """
        if size > self._bytes_max:
            raise TierFullError(f"a value of {size} bytes is more than bytes_max={self._bytes_max}; raise bytes_max")
        goal = self._bytes_max
        while True:
            with self._locked() as held:
                desk, nothing = self._desk or self._set_up(held), False
                if held.bytes + size > goal and (goal == self._bytes_max or not self._evict(held, goal - size)):
                    held.bytes, goal = self._count(held.root), int(self._bytes_max * _LOW)
                    nothing = not self._index.oldest(1)
                if held.bytes + size <= (self._bytes_max if nothing else goal):
                    return self._draft(held, desk, size)
                if nothing:
                    raise TierFullError(
                        f"bytes_max={self._bytes_max} is used up by values that are being written; raise bytes_max"
                    )

    @contextmanager
    def opened(self, draft: Draft) -> Iterator[int]:
        """Open a draft file for writing."""
        with self._root.open() as root, _drafts(root, draft.desk) as at:
            fd = os.open(draft.name, os.O_WRONLY | os.O_NOFOLLOW, dir_fd=at)
        try:
            yield fd
        finally:
            os.close(fd)

    def finish(self, draft: Draft, key: Key) -> bool:
        """Give a written draft file the name of `key`. If the name is in use, delete the draft file and return False.

        A value or a folder may have the name. A folder with files does not belong to kvpipe, and stays. In this case
        lookups of `key` miss, and the tier remains usable.
        """
        with self._locked() as held, shelf(held.root, key, make=True, sync=self._sync) as at:
            stored = file_at(key.text, at) is None and _is_free(key.text, at)
            if stored:
                with _drafts(held.root, draft.desk) as drafts:
                    os.rename(draft.name, key.text, src_dir_fd=drafts, dst_dir_fd=at)
            else:
                self._drop(held, draft)
            found = file_at(key.text, at)
            if found is not None:
                self._index.add(key, found.st_size, found.st_mtime)
        return stored

    def drop(self, draft: Draft) -> None:
        """Delete a draft file."""
        with self._locked() as held:
            self._drop(held, draft)

    def delete(self, keys: Sequence[Key]) -> int:
        """Delete the files of `keys`. Returns how many of the files existed."""
        count = 0
        for begin in range(0, len(keys), _BATCH):
            with self._locked() as held:
                count += sum(self._delete(held, key) for key in keys[begin : begin + _BATCH])
        return count

    # ---- with the lock held ---------------------------------------------------------------------------------------

    @contextmanager
    def _locked(self) -> Iterator[_Sum]:
        until = time.monotonic() + self._wait_s_max
        if not self._mine.acquire(timeout=self._wait_s_max):
            raise TierError(_BUSY)
        try:
            with self._root.open() as root, _locked(root, until) as fd:
                text = os.pread(fd, _ACCOUNT_BYTES + 1, 0)
                os.pwrite(fd, _VOID, 0)
                held = _Sum(root, int(text) if _ACCOUNT.fullmatch(text) else self._count(root))
                try:
                    yield held
                finally:
                    os.pwrite(fd, b"%020d\n" % max(held.bytes, 0), 0)
        finally:
            self._mine.release()

    def _set_up(self, held: _Sum) -> _Desk:
        with folder(TMP, held.root, make=True, sync=self._sync) as tmp:
            alone = self._sweep(held, tmp)
            self._desk = desk = _Desk(tmp)
        if alone:
            held.bytes = self._count(held.root)
        return desk

    def _leave(self) -> None:
        desk, self._desk = self._desk, None
        if desk is not None:
            desk.leave()

    def _sweep(self, held: _Sum, tmp: int) -> bool:
        """Delete the desks of dead processes. Returns True if no other process has a desk."""
        alone = True
        for desk in folders(tmp, _DESK):
            with folder(desk.name, tmp) as at:
                if _is_held(at):
                    alone = False
                    continue
                for file in list_folder(at):
                    held.bytes -= file.stat(follow_symlinks=False).st_size
                    os.unlink(file.name, dir_fd=at)
            os.rmdir(desk.name, dir_fd=tmp)
        return alone

    def _count(self, root: int) -> int:
        """Update the index by a pass, and return the bytes of all files, draft files included."""
        self._index.refresh(root, self.stopping)
        if self.stopping.is_set():
            raise TierError("it was closed")
        return self._index.total()[1] + sum(_draft_sizes(root))

    def _draft(self, held: _Sum, desk: _Desk, size: int) -> Draft:
        draft = desk.draft(size)
        try:
            with (
                _drafts(held.root, draft.desk) as at,
                opened(draft.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, at) as fd,
            ):
                try:
                    os.ftruncate(fd, size)
                except OSError:
                    os.unlink(draft.name, dir_fd=at)
                    raise
        except FileNotFoundError:  # a user has emptied the folder; the next write makes a new desk
            self._leave()
            raise
        held.bytes += size
        return draft

    def _drop(self, held: _Sum, draft: Draft) -> None:
        with _drafts(held.root, draft.desk) as at:
            os.unlink(draft.name, dir_fd=at)
        held.bytes -= draft.bytes

    def _evict(self, held: _Sum, goal: int) -> bool:
        """Delete the oldest files, at most one batch, until `goal` bytes are left. Returns False if no file exists."""
        oldest = self._index.oldest(_BATCH)
        for key, used_s in oldest:
            if held.bytes <= goal:
                break
            self._delete(held, key, used_s)
        return bool(oldest)

    def _delete(self, held: _Sum, key: Key, unless_used_since_s: float = math.inf) -> bool:
        try:
            with shelf(held.root, key) as at:
                found = file_at(key.text, at)
                if found is not None and found.st_mtime > unless_used_since_s:  # another process has used the file
                    self._index.add(key, found.st_size, found.st_mtime)
                    return False
                os.unlink(key.text, dir_fd=at)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            found = None
        held.bytes -= found.st_size if found else 0
        self._index.forget(key)
        if self._index.is_vacant(key):
            _remove(held.root, folders_of(key))
        return found is not None


def _is_free(name: str, at: int) -> bool:
    """Whether a file can be renamed to `name`. Removes an empty folder. The rename itself replaces a link or pipe."""
    try:
        os.rmdir(name, dir_fd=at)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return True


def _remove(root: int, at: tuple[str, str]) -> None:
    """Remove empty folders. No file is lost, because writers also hold the account's lock when they use a folder."""
    outer, inner = at
    with suppress(OSError):  # a folder is not empty, has another owner, or is already removed
        if inner:
            with folder(outer, root) as fd:
                os.rmdir(inner, dir_fd=fd)
        os.rmdir(outer, dir_fd=root)


@contextmanager
def _locked(root: int, until: float) -> Iterator[int]:
    """Open the account and hold its lock. Raises `TierError` if the lock is not free by `until` (`time.monotonic`)."""
    while True:
        with opened(ACCOUNT, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, root) as fd:
            pause_s = _PAUSE_S
            while not try_lock(fd):
                if time.monotonic() > until:
                    raise TierError(_BUSY)
                time.sleep(pause_s)
                pause_s = min(pause_s * 2, _PAUSE_S_MAX)
            try:
                if os.fstat(fd).st_nlink:  # 0 means that the file was deleted, and that other processes lock a new file
                    yield fd
                    return
            finally:
                # closing is not enough: a forked process's copy of the descriptor would keep the lock
                fcntl.flock(fd, fcntl.LOCK_UN)


def _is_held(desk: int) -> bool:
    """Whether the process that made the folder `desk` is alive."""
    try:
        with opened(_LOCK, os.O_RDWR | os.O_NOFOLLOW, desk) as fd:
            return not try_lock(fd)
    except FileNotFoundError:
        return False


@contextmanager
def _drafts(root: int, desk: str) -> Iterator[int]:
    """Open the folder of the desk `desk`."""
    with folder(TMP, root) as tmp, folder(desk, tmp) as at:
        yield at


def _draft_sizes(root: int) -> list[int]:
    """Return the size in bytes of each draft file of all processes."""
    with folder(TMP, root, make=True) as tmp:
        sizes = []
        for desk in folders(tmp, _DESK):
            with folder(desk.name, tmp) as at:
                sizes += [file.stat(follow_symlinks=False).st_size for file in list_folder(at)]
        return sizes
