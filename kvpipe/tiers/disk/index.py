"""The disk tier's index in memory: the files in the folder, their sizes, and the order of their last use.

Other processes add and delete files. So the index lists the folder again from time to time: such a listing is a *pass*.
If the mtime of a sub-folder has not changed since its last listing, a pass skips the sub-folder. So a pass over an
unchanged folder takes one `stat` per sub-folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from typing import Final

from kvpipe.tiers.base import Key
from kvpipe.tiers.disk.files import folder, folders, folders_of, list_folder

_SPACE, _SHELF = re.compile(r"[0-9a-f]{32}"), re.compile(r"[0-9a-f]{2}")
_SHELVES: Final = [f"{byte:02x}" for byte in range(256)]
_GRAIN_S, _COARSE_S = 0.05, 2.0
"""Two changes within `_GRAIN_S` seconds may have the same mtime.

`_COARSE_S` replaces `_GRAIN_S` for file systems that record times in whole seconds.
"""
_CHUNK_BYTES: Final = range(16, 65)
_SPACE_CHARS: Final = 32
_WRITTEN_MAX: Final = 4096
"""The largest number of keys that are reported as written and not yet listed. The oldest key is dropped first."""


class _Shelf:
    """One folder of files.

    `keys` has the keys of the files. `changed_ns` is the folder's mtime at the last listing, or None if the folder may
    have changed after that listing. `seen_ns` is also the mtime at the last listing. All listings since `seen_s`
    (`time.monotonic`) have seen this mtime. Once an mtime is old enough, any further change gives the folder a
    different mtime. The age of an mtime is the time since `seen_s` by this machine's clock, because the file system's
    clock may differ.
    """

    __slots__ = ("changed_ns", "keys", "seen_ns", "seen_s")

    def __init__(self) -> None:
        self.forget_time()
        self.keys: set[Key] = set()

    def forget_time(self) -> None:
        """Make the next pass list the folder, even if the folder's mtime is unchanged."""
        self.changed_ns: int | None = None
        self.seen_ns, self.seen_s = -1, 0.0


class Index:
    """The values in the folder. Any thread may use the index. `holds` never waits for another thread."""

    def __init__(self) -> None:
        """Make an empty index."""
        # Two dictionaries of numbers instead of one of objects, because the garbage collector need not visit numbers.
        self._used_s: OrderedDict[Key, float] = OrderedDict()
        self._sizes: dict[Key, int] = {}
        self._unsorted: dict[Key, float] = {}
        self._shelves: dict[tuple[str, str], _Shelf] = {}
        self._bytes = 0
        self._lock, self._pass = threading.Lock(), threading.Lock()
        self._passing, self._own = False, set[Key]()
        self._frames: dict[tuple[str, str], Key] = {}
        self._bare: set[str] = set()  # namespaces whose folders contain no sub-folder
        # keys reported as written, each with the number of the pass at that time
        self._written: OrderedDict[Key, int] = OrderedDict()
        self._passes = 0
        self.on_gone: Callable[[Key], object] | None = None
        """This attribute is explained in `kvpipe.tiers.base.Noticing`."""

    def holds(self, keys: Sequence[Key]) -> list[bool]:
        """Return, for each key, whether the key's value is in the folder."""
        sizes, reported = self._sizes, self._written
        return [key in sizes or key in reported for key in keys]

    def record_written(self, keys: Sequence[Key]) -> None:
        """Record that another process has written `keys`. The keys count as held until a later pass has ended."""
        with self._lock:
            for key in keys:
                self._written[key] = self._passes
                self._written.move_to_end(key)
            while len(self._written) > _WRITTEN_MAX:
                self._written.popitem(last=False)

    def add(self, key: Key, size: int, used_s: float) -> None:
        """Add a value of `size` bytes as the most recently used. `used_s` is its mtime in seconds since the epoch."""
        with self._lock:
            self._note(key)
            self._bytes += size - self._sizes.get(key, 0)
            self._sizes[key] = size
            self._used_s[key] = used_s
            self._used_s.move_to_end(key)
            self._shelves.setdefault(folders_of(key), _Shelf()).keys.add(key)

    def forget(self, key: Key) -> None:
        """Remove a value that is not in the folder any more."""
        with self._lock:
            self._note(key)
            self._forget(key)

    def oldest(self, count: int) -> list[tuple[Key, float]]:
        """Return the `count` least recently used keys, each with its file's mtime in seconds since the epoch."""
        with self._lock:
            self._sort()
            return list(islice(self._used_s.items(), count))

    def all(self) -> list[tuple[Key, int, float]]:
        """Return (key, size in bytes, mtime in seconds since the epoch) of every value."""
        with self._lock:
            return [(key, self._sizes[key], used_s) for key, used_s in self._used_s.items()]

    def total(self) -> tuple[int, int]:
        """Return (number of values, bytes of all values together)."""
        with self._lock:
            return len(self._sizes), self._bytes

    def refresh(self, root: int, stopping: threading.Event, spaces: AbstractSet[str] | None = None) -> None:
        """Update the index by a pass over the folder `root`, or only over its sub-folders `spaces`.

        The pass ends early when `stopping` is set. The index keeps the files that the pass has listed so far.

        Raises:
            OSError: a folder cannot be read.

        """
        seen: set[tuple[str, str]] = set()
        new: dict[Key, float] = {}
        with self._pass, self._watched():
            self._passes += 1
            found = spaces if spaces is not None else [space.name for space in folders(root, _SPACE)]
            for space in found:
                with _vanishing(), folder(space, root) as at:
                    for shelf in folders(at, _SHELF):
                        if stopping.is_set():
                            return
                        seen.add((space, shelf.name))
                        with _vanishing():
                            self._look(at, space, shelf, new)
            with self._lock:
                for gone in [place for place in self._shelves if place not in seen]:
                    if spaces is None or gone[0] in spaces:
                        for key in self._shelves[gone].keys - self._own:
                            self._forget(key)
                        # needed because a folder of this name may reappear with the same mtime
                        self._shelves[gone].forget_time()
                        if not self._shelves[gone].keys:
                            del self._shelves[gone]
                self._unsorted |= new
                self._merge_written(spaces)
                if spaces is None:
                    self._bare = {space for space in found if not any((space, shelf) in seen for shelf in _SHELVES)}

    def _merge_written(self, spaces: AbstractSet[str] | None) -> None:
        """Drop the keys that were reported before this pass began, because this pass has listed their files."""
        for key, before in list(self._written.items()):
            if before < self._passes and (spaces is None or key.namespace in spaces):
                del self._written[key]
                if key not in self._sizes:
                    self._notice(key)

    def vacant(self) -> list[tuple[str, str]]:
        """Return (folder, sub-folder) of every empty sub-folder, and (folder, "") of every empty namespace folder."""
        with self._lock:
            bare, self._bare = self._bare, set()
            return [*(place for place, shelf in self._shelves.items() if not shelf.keys), *((one, "") for one in bare)]

    def is_vacant(self, key: Key) -> bool:
        """Whether the index has no value in the folder of `key`."""
        shelf = self._shelves.get(folders_of(key))
        return shelf is None or not shelf.keys

    def _look(self, at: int, space: str, entry: os.DirEntry[str], new: dict[Key, float]) -> None:
        """List one folder if it has changed. Add the found files to the index, and their times of use to `new`."""
        shelf = self._shelves.setdefault((space, entry.name), _Shelf())
        if entry.stat(follow_symlinks=False).st_mtime_ns == shelf.changed_ns:
            return
        prefix = f"{space}-{entry.name}"
        with folder(entry.name, at) as fd:
            changed_ns, now_s = os.fstat(fd).st_mtime_ns, time.monotonic()
            if changed_ns != shelf.seen_ns:
                shelf.seen_ns, shelf.seen_s = changed_ns, now_s
            settled = now_s - shelf.seen_s > (_GRAIN_S if changed_ns % 1_000_000_000 else _COARSE_S)
            found: set[Key] = set()
            sizes: dict[Key, int] = {}
            used_s: dict[Key, float] = {}
            for file in list_folder(fd):
                key = self._key(file.name) if file.name.startswith(prefix) else None
                if key is not None and file.is_file(follow_symlinks=False):
                    found.add(key)
                    if key not in shelf.keys:
                        try:  # `suppress` is slower, and a pass spends most of its time here
                            stat = file.stat(follow_symlinks=False)
                        except FileNotFoundError:
                            continue
                        sizes[key], used_s[key] = stat.st_size, stat.st_mtime
        with self._lock:
            for key in shelf.keys - found - self._own:
                self._forget(key)
            for key in self._own.intersection(sizes):
                del sizes[key], used_s[key]
            shelf.keys.update(sizes)
            self._sizes.update(sizes)
            self._used_s.update(used_s)
            self._bytes += sum(sizes.values())
        new.update(used_s)
        shelf.changed_ns = changed_ns if settled else None

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Record the keys that this process adds and removes during a pass, as the pass may list an older state."""
        self._passing = True
        try:
            yield
        finally:
            with self._lock:
                self._passing = False
                self._own.clear()

    def _sort(self) -> None:
        """Sort the keys that passes have found into the order of use. Called only when the order is needed."""
        for key in sorted(self._unsorted, key=self._unsorted.__getitem__):
            if self._used_s.get(key) == self._unsorted[key]:  # the value was neither used nor deleted after the pass
                self._used_s.move_to_end(key)
        self._unsorted.clear()

    def _note(self, key: Key) -> None:
        if self._passing:
            self._own.add(key)

    def _forget(self, key: Key) -> None:
        self._bytes -= self._sizes.pop(key, 0)
        self._used_s.pop(key, None)
        self._unsorted.pop(key, None)
        if folders_of(key) in self._shelves:
            self._shelves[folders_of(key)].keys.discard(key)
        self._notice(key)

    def _notice(self, key: Key) -> None:
        """Report a lost value, unless another process has reported the value as written since the last listing."""
        if self.on_gone is not None and key not in self._written:
            self.on_gone(key)

    def _key(self, name: str) -> Key | None:
        """Return the key whose file is named `name`, or None if `name` is not the name of a key's file.

        The method is three times as fast as `Key.parse`. If names differ only in the chunk, only the chunk is parsed
        again.
        """
        space = name[:_SPACE_CHARS]
        chunk, _, tail = name[_SPACE_CHARS + 1 :].partition("-")
        frame = self._frames.get((space, tail))
        try:
            if frame is None:
                return self._frames.setdefault((space, tail), Key.parse(name))
            raw = bytes.fromhex(chunk)
        except ValueError:
            return None
        if raw.hex() != chunk or len(raw) not in _CHUNK_BYTES:
            return None
        namespace, _, group, rank, ranks = frame
        return Key(namespace, raw, group, rank, ranks)


@contextlib.contextmanager
def _vanishing() -> Iterator[None]:
    """Ignore the error if a folder is deleted or replaced while a pass reads the folder."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        yield
