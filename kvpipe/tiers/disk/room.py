"""The room in the disk tier's folder: a bound on its bytes that holds across all processes that use it.

One file, the account, holds the number of kvpipe's bytes in the folder, unfinished files included. A process that
changes the number holds the file's lock (flock): before a file is begun, when it gets its name, and when it is deleted;
never while bytes are moved. The kernel releases the lock of a dead process. While the number is being changed the
account is marked as void; if the process dies then, the next one counts the files.

Unfinished files (drafts) are in a folder (desk) of their own for each opened tier, which holds a lock on it as long as
it lives. The next tier that is opened deletes the desks of dead ones.
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

from kvpipe.files import try_lock
from kvpipe.tiers.base import Key, TierError, TierFullError
from kvpipe.tiers.disk.files import ACCOUNT, TMP, Root, file_at, folder, folders, listed, opened, place, shelf
from kvpipe.tiers.disk.index import Index

_DESK = re.compile(r"[0-9a-f]{16}")
_LOCK: Final = "lock"
_ACCOUNT = re.compile(rb"[0-9]{20}\n")
_ACCOUNT_BYTES: Final = 21
_VOID: Final = b"?"
_LOW: Final = 0.95
"""Files are deleted until only this share of the room is taken, so that not every write has to delete some."""
_BATCH: Final = 256
"""Files deleted while the lock is held once."""
_PAUSE_S, _PAUSE_S_MAX = 0.0001, 0.005
_BUSY: Final = "others have held the account's lock for timeout_ms_max"


class Draft(NamedTuple):
    """A file that is being written: its name, in the folder of the desk that made it, and its size."""

    desk: str
    name: str
    bytes: int


class _Sum:
    """The account while its lock is held: the folder, and the bytes in it."""

    __slots__ = ("bytes", "root")

    def __init__(self, root: int, used: int) -> None:
        self.root, self.bytes = root, used


class _Desk:
    """A folder for drafts, locked as long as this lives."""

    def __init__(self, tmp: int) -> None:
        self.name, self._numbers = secrets.token_hex(8), itertools.count()
        with folder(self.name, tmp, make=True) as at:
            self._lock = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=at)
            os.fchmod(self._lock, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def draft(self, size: int) -> Draft:
        """Return a draft with an unused name."""
        return Draft(self.name, str(next(self._numbers)), size)

    def leave(self) -> None:
        """Release the lock: other processes may delete the remaining drafts."""
        os.close(self._lock)


class DiskRoom:
    """One opened tier's access to the folder's account. On any thread. Every method may raise OSError and TierError."""

    def __init__(self, root: Root, index: Index, bytes_max: int, wait_s_max: float, *, sync: bool) -> None:
        """`bytes_max`: of all files together. `wait_s_max`: for the lock. `sync`: fsync new folders."""
        self._root, self._index, self._bytes_max = root, index, bytes_max
        self._wait_s_max, self._sync = wait_s_max, sync
        self._mine = threading.Lock()
        self._desk: _Desk | None = None
        self.stopping = threading.Event()
        """Set it to end a count early; the count raises `TierError` then."""

    def open(self) -> None:
        """Make a desk. Delete the drafts of dead processes, and count the files if no other process is alive."""
        self._leave()
        with self._held() as held:
            self._set_up(held)
        vacant = self._index.vacant()
        for begin in range(0, len(vacant), _BATCH):
            with self._held() as held:
                for one in vacant[begin : begin + _BATCH]:
                    _remove(held.root, one)

    def close(self) -> None:
        """Give up the desk, and delete its drafts. The last process leaves nothing in a folder without values."""
        if self._desk is not None:
            self._leave()
            with self._held() as held:
                with folder(TMP, held.root) as tmp:
                    alone = self._sweep(held, tmp)
                if alone and all(one.name in {ACCOUNT, TMP} for one in listed(held.root)):
                    with suppress(OSError):  # somebody else's file is in there
                        os.rmdir(TMP, dir_fd=held.root)
                        os.unlink(ACCOUNT, dir_fd=held.root)

    def yield_bytes(self, size: int) -> bool:
        """Delete the oldest files, at least `size` bytes of them, as others have filled the disk. At most one batch.

        Returns False if nothing was deleted: there are no files, or not enough of them to free `size` bytes.
        """
        with self._held() as held:
            if not self._index.oldest(1):
                held.bytes = self._count(held.root)  # others' files
            before, found = held.bytes, os.fstatvfs(held.root)
            if self._index.total()[1] + found.f_bavail * found.f_frsize < size:
                return False
            self._evict(held, before - size)
            return held.bytes < before

    def check(self) -> None:
        """Raise an error if nothing can be written."""
        desk = self._desk
        if desk is None:
            self.open()
            return
        try:
            with self._root.open() as root, _drafts(root, desk.name) as at:
                os.utime(_LOCK, dir_fd=at, follow_symlinks=False)
        except FileNotFoundError:  # somebody has removed the folder, or cleared it
            self.open()

    def used(self) -> int:
        """Return the account's number: the bytes of all files, unfinished ones included."""
        with self._held() as held:
            return held.bytes

    def begin(self, size: int) -> Draft:
        """Reserve `size` bytes for a file, deleting the oldest files if there is no room.

        Raises:
            TierFullError: unfinished files take all the room, or `size` is more than `bytes_max`.

        """
        if size > self._bytes_max:
            raise TierFullError(f"a value of {size} bytes is more than bytes_max={self._bytes_max}; set a larger one")
        goal = self._bytes_max
        while True:
            with self._held() as held:
                desk, nothing = self._desk or self._set_up(held), False
                if held.bytes + size > goal and (goal == self._bytes_max or not self._evict(held, goal - size)):
                    held.bytes, goal = self._count(held.root), int(self._bytes_max * _LOW)  # others' doings too
                    nothing = not self._index.oldest(1)
                if held.bytes + size <= (self._bytes_max if nothing else goal):
                    return self._draft(held, desk, size)
                if nothing:
                    raise TierFullError(f"bytes_max={self._bytes_max} is taken by values that are being written")

    @contextmanager
    def opened(self, draft: Draft) -> Iterator[int]:
        """Open a draft for writing."""
        with self._root.open() as root, _drafts(root, draft.desk) as at:
            fd = os.open(draft.name, os.O_WRONLY | os.O_NOFOLLOW, dir_fd=at)
        try:
            yield fd
        finally:
            os.close(fd)

    def finish(self, draft: Draft, key: Key) -> bool:
        """Give a written draft its name. Returns False if a value or a folder has it; the draft is deleted then.

        A folder with files is somebody else's and stays: this key costs misses, and the tier stays in use.
        """
        with self._held() as held, shelf(held.root, key, make=True, sync=self._sync) as at:
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
        """Delete a draft."""
        with self._held() as held:
            self._drop(held, draft)

    def delete(self, keys: Sequence[Key]) -> int:
        """Delete files. Returns how many there were."""
        count = 0
        for begin in range(0, len(keys), _BATCH):
            with self._held() as held:
                count += sum(self._delete(held, key) for key in keys[begin : begin + _BATCH])
        return count

    # ---- with the lock held ---------------------------------------------------------------------------------------

    @contextmanager
    def _held(self) -> Iterator[_Sum]:
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
        """Delete the drafts of dead processes. Returns whether no other process is alive."""
        alone = True
        for desk in folders(tmp, _DESK):
            with folder(desk.name, tmp) as at:
                if _is_held(at):
                    alone = False
                    continue
                for file in listed(at):
                    held.bytes -= file.stat(follow_symlinks=False).st_size
                    os.unlink(file.name, dir_fd=at)
            os.rmdir(desk.name, dir_fd=tmp)
        return alone

    def _count(self, root: int) -> int:
        """Return the bytes of all files, drafts included, after a pass of the index."""
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
        except FileNotFoundError:  # somebody has cleared the folder: the next write makes it anew
            self._leave()
            raise
        held.bytes += size
        return draft

    def _drop(self, held: _Sum, draft: Draft) -> None:
        with _drafts(held.root, draft.desk) as at:
            os.unlink(draft.name, dir_fd=at)
        held.bytes -= draft.bytes

    def _evict(self, held: _Sum, goal: int) -> bool:
        """Delete the oldest files until `goal` bytes are left, at most one batch. Returns False if there are none."""
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
                if found is not None and found.st_mtime > unless_used_since_s:  # by another process
                    self._index.add(key, found.st_size, found.st_mtime)
                    return False
                os.unlink(key.text, dir_fd=at)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            found = None
        held.bytes -= found.st_size if found else 0
        self._index.forget(key)
        if self._index.is_vacant(key):
            _remove(held.root, place(key))
        return found is not None


def _is_free(name: str, at: int) -> bool:
    """Whether a file may get this name. A rename replaces links and pipes; an empty folder is removed here."""
    try:
        os.rmdir(name, dir_fd=at)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return True


def _remove(root: int, at: tuple[str, str]) -> None:
    """Remove folders that are empty. Writers make folders with the account's lock held, too, so no file is lost."""
    outer, inner = at
    with suppress(OSError):  # it is not empty, or somebody else's, or gone
        if inner:
            with folder(outer, root) as fd:
                os.rmdir(inner, dir_fd=fd)
        os.rmdir(outer, dir_fd=root)


@contextmanager
def _locked(root: int, until: float) -> Iterator[int]:
    """Open the account and hold its lock. Raises `TierError` if it is not free `until` then, by `time.monotonic`."""
    while True:
        with opened(ACCOUNT, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, root) as fd:
            pause_s = _PAUSE_S
            while not try_lock(fd):
                if time.monotonic() > until:
                    raise TierError(_BUSY)
                time.sleep(pause_s)
                pause_s = min(pause_s * 2, _PAUSE_S_MAX)
            try:
                if os.fstat(fd).st_nlink:  # else it was deleted meanwhile, and others lock a new one
                    yield fd
                    return
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough where a fork has a copy


def _is_held(desk: int) -> bool:
    """Whether the process that made the folder `desk` is alive."""
    try:
        with opened(_LOCK, os.O_RDWR | os.O_NOFOLLOW, desk) as fd:
            return not try_lock(fd)
    except FileNotFoundError:
        return False


@contextmanager
def _drafts(root: int, desk: str) -> Iterator[int]:
    """Open a desk."""
    with folder(TMP, root) as tmp, folder(desk, tmp) as at:
        yield at


def _draft_sizes(root: int) -> list[int]:
    """Return the sizes of all drafts of all processes."""
    with folder(TMP, root, make=True) as tmp:
        sizes = []
        for desk in folders(tmp, _DESK):
            with folder(desk.name, tmp) as at:
                sizes += [file.stat(follow_symlinks=False).st_size for file in listed(at)]
        return sizes
