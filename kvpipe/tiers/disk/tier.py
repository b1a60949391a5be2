"""The disk tier: one file per value, in a folder that any number of processes on one or several hosts share."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AsyncExitStack
from stat import S_ISREG
from typing import Final, NamedTuple, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread

from kvpipe.tiers.base import Capacity, Entry, Get, Key, Put, Read, TierError, TierFullError, Written, blocking
from kvpipe.tiers.disk.files import Root, ValueFiles, opened, shelf
from kvpipe.tiers.disk.index import Index
from kvpipe.tiers.disk.room import DiskRoom
from kvpipe.tiers.disk.spec import DiskSpec
from kvpipe.trace.log import warn

_RENEW_S: Final = 60.0
"""A use of a file sets the file's mtime to now if the mtime is older than this number of seconds."""
_LOOK_S, _LOOK_SHARE = 0.1, 10
"""The shortest time between passes over the folder: in seconds, and in multiples of the last pass's duration."""
_ASKED_S, _SPACES_MAX = 60.0, 64
"""A pass for lookups covers at most `_SPACES_MAX` namespaces: those of lookups in the last `_ASKED_S` seconds."""
_OLD_S: Final = 0.5
"""The largest age of the index in seconds. If the index is older, a lookup waits for the next pass."""
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # O_NONBLOCK: opening a pipe must not block
_NO_FILE: Final = frozenset((errno.ELOOP, errno.ENXIO))
"""The errors that `open` raises for a symbolic link or a socket."""
_NO_SPACE: Final = frozenset((errno.ENOSPC, errno.EDQUOT))
_YIELDS: Final = (1, 2, 4)
"""How many bytes to delete before each further attempt to write to a full disk, in multiples of the value's size."""
_FILLED: Final = "other files fill the disk, so the tier deletes its oldest values to make room for new ones"
_I = TypeVar("_I")
_O = TypeVar("_O")


class _Pass(NamedTuple):
    """A pass over the folders of the namespaces `spaces`, or of all namespaces if `spaces` is None.

    `ended_s` is the time of the pass's end by `time.monotonic`. `took_s` is its duration in seconds.
    """

    spaces: frozenset[str] | None
    ended_s: float
    took_s: float


class DiskTier:
    """A `Tier` on a disk. Every file operation runs in a thread. `exists` is answered from the index in memory."""

    def __init__(self, spec: DiskSpec, name: str, *, writes: bool) -> None:
        """`writes` is explained in `TierSpec.make`. The folder is not accessed before `open`."""
        self.name, self.spec = name, spec
        self.timeout_s = spec.timeout_ms_max / 1000
        self._makes, self._writes = spec.store != "never", writes and spec.store != "never"
        self._root, self._index, self._mover = Root(spec.path), Index(), ValueFiles(spec.direct)
        self._room = DiskRoom(self._root, self._index, spec.bytes_max, self.timeout_s, sync=spec.fsync)
        self._open = self._yields = False
        self._reads, self._puts = anyio.CapacityLimiter(spec.lanes), anyio.CapacityLimiter(spec.lanes)
        self._looker: threading.Thread | None = None
        self._seen = anyio.Event()  # set at the end of the pass in progress
        self._looks = False
        # The time of the last lookup of each namespace, in the order of these times.
        self._asked: OrderedDict[str, float] = OrderedDict()
        self._last, self._trouble = _Pass(frozenset(), -math.inf, 0.0), ""

    async def open(self) -> None:
        """See `Tier.open`. A folder that cannot be written to is opened for reading only."""
        self._room.stopping.clear()
        self._reads, self._puts = anyio.CapacityLimiter(self.spec.lanes), anyio.CapacityLimiter(self.spec.lanes)
        self._looks = False

        def start() -> None:
            self._root.adopt(make=self._makes)
            self._listed()
            if self._writes:
                with contextlib.suppress(TierFullError), self._root.failures(writing=True):
                    self._room.open()

        await blocking(self._puts, start, self._room.stopping.set)
        self._open = True

    async def exists(self, keys: Sequence[Key]) -> list[bool]:
        """See `Tier.exists`.

        Values of other engines are found at most 0.5 s after the write, or after ten times the duration of a pass if
        that time is longer. This engine's own values are found at once (`Listed`).
        """
        self._check_open()
        await anyio.lowlevel.checkpoint()
        await self._fresh({key.namespace for key in keys})
        return self._index.holds(keys)

    def stored(self, keys: Sequence[Key]) -> None:
        """See `Listed`."""
        self._index.record_written(keys)

    @property
    def on_gone(self) -> Callable[[Key], object] | None:
        """See `Noticing`. A pass notices the values that any process has deleted. Lookups begin passes."""
        return self._index.on_gone

    @on_gone.setter
    def on_gone(self, call: Callable[[Key], object] | None) -> None:
        self._index.on_gone = call

    async def read(self, gets: Sequence[Get]) -> list[Read]:
        """See `Tier.read`."""
        return await self._each(self._reads, self._read, gets)

    async def write(self, puts: Sequence[Put]) -> list[Written]:
        """See `Tier.write`."""
        self._check_open()
        if puts and not self._writes:
            raise TierFullError(f"{self.spec.path}: this process may only read the tier")
        return await self._each(self._puts, self._write, puts)

    async def delete(self, keys: Sequence[Key]) -> int:
        """See `Tier.delete`."""

        def work(keys: Sequence[Key]) -> int:
            with self._root.failures(writing=True):
                return self._room.delete(keys)

        return sum(await self._each(self._puts, work, [keys] if keys else []))

    async def capacity(self) -> Capacity:
        """See `Tier.capacity`."""
        await self._each(self._reads, self._listed, [None])
        return Capacity(*self._index.total(), self.spec.bytes_max)

    async def health(self) -> None:
        """See `Tier.health`."""

        def work(_: None) -> None:
            with self._root.failures(writing=True):
                if self._makes and not self._root.path.exists():  # a user has removed the folder
                    self._root.adopt(make=True)
                with self._root.open() as root:
                    os.fstatvfs(root)
                if self._writes:
                    self._room.check()

        await self._each(self._reads, work, [None])

    async def scan(self) -> AsyncIterator[Entry]:
        """See `Tier.scan`."""
        await self._each(self._reads, self._listed, [None])
        for key, size, used_s in self._index.all():
            yield Entry(key, size, max(0.0, time.time() - used_s))

    async def close(self) -> None:
        """See `Tier.close`."""
        self._open = False
        for limiter in (self._reads, self._puts):
            async with AsyncExitStack() as places:
                for _ in range(self.spec.lanes):  # once `close` holds every token, no operation is in progress
                    user = object()
                    await limiter.acquire_on_behalf_of(user)
                    places.callback(limiter.release_on_behalf_of, user)

        def end() -> None:
            self._room.stopping.set()
            if self._looker is not None:
                self._looker.join(self.timeout_s)
            self._room.stopping.clear()
            with contextlib.suppress(TierError), self._root.failures():
                self._room.close()

        await blocking(self._puts, end)

    # ---- on the loop thread ---------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if not self._open:
            raise TierError(f"{self.spec.path} is not open")

    async def _each(self, limiter: anyio.CapacityLimiter, work: Callable[[_I], _O], items: Sequence[_I]) -> list[_O]:
        """Return `work(item)` for each item, computed in up to `lanes` threads. Raises the first TierError."""
        self._check_open()
        todo, done, failed = deque(enumerate(items)), dict[int, _O](), list[TierError]()

        def lane() -> None:
            while True:
                try:
                    at, item = todo.popleft()
                except IndexError:
                    return
                try:
                    done[at] = work(item)
                except TierError as error:
                    failed.append(error)
                    todo.clear()

        async with anyio.create_task_group() as group:
            for _ in range(min(len(items), self.spec.lanes)):
                group.start_soon(blocking, limiter, lane, todo.clear)
        if failed:
            raise failed[0]
        return [done[at] for at in range(len(items))]

    async def _fresh(self, spaces: AbstractSet[str]) -> None:
        """Begin a pass over the namespaces' folders if the last pass is not recent.

        If the last pass is too old for lookups, the call waits for the new pass. All lookups wait for the same pass. A
        waiting lookup uses no thread. Raises TierError if the pass takes too long.
        """
        now_s = time.monotonic()
        for space in spaces:
            self._asked[space] = now_s
            self._asked.move_to_end(space)
        while len(self._asked) > max(_SPACES_MAX, len(spaces)):
            self._asked.popitem(last=False)
        try:
            with anyio.fail_after(self.timeout_s):
                while True:
                    last = self._last
                    age_s = (
                        time.monotonic() - last.ended_s if last.spaces is None or spaces <= last.spaces else math.inf
                    )
                    if age_s > max(_LOOK_S, last.took_s * _LOOK_SHARE) and not self._looks:
                        self._look()
                    if age_s <= max(_OLD_S, last.took_s * _LOOK_SHARE):
                        break
                    await self._seen.wait()
        except TimeoutError:
            msg = f"{self.spec.path}: no listing in timeout_ms_max={self.spec.timeout_ms_max}"
            raise TierError(msg) from None
        if self._trouble:
            raise TierError(self._trouble)

    def _look(self) -> None:
        """Begin a pass over the folders of the namespaces that recent lookups have asked for."""
        loop, seen = asyncio.get_running_loop(), anyio.Event()
        old_s = time.monotonic() - _ASKED_S
        spaces = frozenset(space for space, asked_s in self._asked.items() if asked_s > old_s)

        def ended() -> None:
            if self._seen is seen:
                self._looks = False
            seen.set()

        def work() -> None:
            try:
                self._pass(spaces)
            finally:
                with contextlib.suppress(RuntimeError):  # the loop is closed, so no lookup waits any more
                    loop.call_soon_threadsafe(ended)

        looker = threading.Thread(target=work, name=f"kvpipe-{self.name}", daemon=True)
        looker.start()
        self._looker, self._seen, self._looks = looker, seen, True

    # ---- in threads -----------------------------------------------------------------------------------------------

    def _pass(self, spaces: frozenset[str] | None = None) -> None:
        """Update the index for the namespaces `spaces`, or for all if `spaces` is None.

        Set `_trouble` to the error, or to "".
        """
        begin_s = time.monotonic()
        try:
            with self._root.failures(), self._root.open() as root:
                self._index.refresh(root, self._room.stopping, spaces)
            self._trouble = ""
        except TierError as error:
            self._trouble = str(error)
        end_s = time.monotonic()
        self._last = _Pass(spaces, end_s, end_s - begin_s)

    def _listed(self, _: None = None) -> None:
        self._pass()
        if self._trouble:
            raise TierError(self._trouble)

    def _read(self, get: Get) -> Read:
        with self._root.failures(), self._root.open() as root:
            try:
                with shelf(root, get.key) as at, opened(get.key.text, _READ, at) as fd:
                    found = os.fstat(fd)
                    if not S_ISREG(found.st_mode) or found.st_size != get.size:
                        return Read.DAMAGED
                    if self._mover.move(fd, os.preadv, get.into) < get.size:
                        return Read.DAMAGED
                    self._index.add(get.key, get.size, _renewed(fd, found))
                    return Read.HIT
            except (FileNotFoundError, NotADirectoryError):
                self._index.forget(get.key)
                return Read.MISS
            except OSError as error:
                if error.errno not in _NO_FILE:
                    raise
                return Read.DAMAGED

    def _write(self, put: Put) -> Written:
        with self._root.failures(writing=True):
            if self._present(put.key):
                return Written.PRESENT
            first = self._put(put)
            if self.spec.fsync:
                with (
                    contextlib.suppress(FileNotFoundError),  # the file was evicted, and its folder was removed
                    self._root.open() as root,
                    shelf(root, put.key) as at,
                ):
                    os.fsync(at)
        return Written.STORED if first else Written.PRESENT

    def _put(self, put: Put) -> bool:
        """Write a value. If other files fill the disk, delete the oldest values. Returns whether the value is new.

        Raises `TierError` and OSError. An OSError is also raised if the disk stays full after all permitted deletions.
        """
        for times in _YIELDS:
            try:
                return self._try_put(put)
            except OSError as error:
                if error.errno not in _NO_SPACE or not self._room.yield_bytes(put.size * times):
                    raise
            if not self._yields:
                self._yields = True
                warn(
                    "tier_disk_filled",
                    path=str(self.spec.path),
                    why=_FILLED,
                    remedy="free disk space, or lower bytes_max",
                )
        return self._try_put(put)

    def _try_put(self, put: Put) -> bool:
        draft = self._room.begin_draft(put.size)
        try:
            with self._room.opened(draft) as fd:
                self._fill(fd, put)
            return self._room.finish(draft, put.key)
        except BaseException:
            with contextlib.suppress(OSError, TierError):
                self._room.drop(draft)
            raise

    def _present(self, key: Key) -> bool:
        """Whether the tier has the value of `key`. The call counts as a use of the value."""
        try:
            with (
                self._root.open() as root,
                shelf(root, key) as at,
                opened(key.text, _READ, at) as fd,
            ):
                found = os.fstat(fd)
                if S_ISREG(found.st_mode):
                    self._index.add(key, found.st_size, _renewed(fd, found))
                return S_ISREG(found.st_mode)
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno not in _NO_FILE:
                raise
            return False

    def _fill(self, fd: int, put: Put) -> None:
        try:
            os.posix_fallocate(fd, 0, put.size)  # raises an error for a full disk before bytes are written
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:  # the file system may lack this function
                raise
        if self._mover.move(fd, os.pwritev, put.parts) < put.size:
            raise TierError(f"{self.spec.path}: a write ended early")
        if self.spec.fsync:
            os.fsync(fd)


def _renewed(fd: int, found: os.stat_result) -> float:
    """Set a file's mtime to now if the mtime is older than `_RENEW_S`. Returns the file's mtime."""
    if time.time() - found.st_mtime > _RENEW_S:
        with contextlib.suppress(OSError):  # a read-only disk refuses the change
            os.utime(fd)
            return os.fstat(fd).st_mtime
    return found.st_mtime
