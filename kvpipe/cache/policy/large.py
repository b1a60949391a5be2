"""Mappings whose calls stay fast with a million entries. The garbage collector does not traverse these mappings.

A dict sometimes copies all of its entries in one call, even if the dict does not grow. The copy takes 0.3 ms for 40,000
entries, and 40 ms for 700,000 entries. Therefore these mappings consist of many small dicts. For at most `PLAIN_MAX`
entries, a plain dict is used.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Iterable, Iterator, MutableMapping
from itertools import chain
from typing import Any, Final, TypeAlias, TypeVar

K = TypeVar("K")
V = TypeVar("V")

PLAIN_MAX: Final = 1 << 14
SHARD_ENTRIES: Final = 1 << 12
SHARDS: Final = (13, 31, 61, 127, 251, 509, 1021, 2039)  # primes, because hashes of objects are their addresses
RUN_MAX: Final = 1 << 10
_MISSING: Final = object()

untracked = ctypes.pythonapi.PyObject_GC_UnTrack
"""Untracks one object: the garbage collector ignores the object, which is freed when its reference count reaches 0.

A full collection traverses all tracked objects, which takes 0.6 s for a million chunks. An untracked object must not be
part of a reference cycle, because the cycle would never be freed.
"""
untracked.argtypes, untracked.restype = [ctypes.py_object], None


class Shard(dict[K, V]):
    """One dict of a mapping.

    Unlike a plain dict, a shard is tracked by the garbage collector even while it is empty. Therefore vLLM's
    `gc.freeze` at start includes the shard.
    """

    __slots__ = ()


class Shards(MutableMapping[bytes, V]):
    """A dict that is divided into 256 dicts by the first byte of the key. Each key must be a hash.

    The dict has no order.
    """

    __slots__ = ("_shards",)

    def __init__(self) -> None:
        """Start without entries."""
        self._shards: tuple[Shard[bytes, V], ...] = tuple(Shard() for _ in range(256))

    def __getitem__(self, key: bytes) -> V:
        """Return the value of `key`. Raises KeyError if the mapping does not have `key`."""
        return self._shards[key[0]][key]

    def __setitem__(self, key: bytes, value: V) -> None:
        """Set a value, as in a dict."""
        self._shards[key[0]][key] = value

    def __delitem__(self, key: bytes) -> None:
        """Delete an entry, as in a dict, or raise KeyError. A shard that becomes empty frees its memory."""
        shard = self._shards[key[0]]
        del shard[key]
        if not shard:
            shard.clear()

    def __contains__(self, key: Any) -> bool:  # noqa: ANN401
        """Whether the mapping has the key, as in a dict."""
        return key in self._shards[key[0]]

    def get(self, key: bytes, default: Any = None) -> Any:  # noqa: ANN401
        """Return a value or the default, as a dict does."""
        return self._shards[key[0]].get(key, default)

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over the keys, in no order."""
        return chain.from_iterable(self._shards)

    def __len__(self) -> int:
        """Return the number of entries."""
        return sum(map(len, self._shards))

    def clear(self) -> None:
        """Remove all entries."""
        for shard in self._shards:
            shard.clear()

    def leading(self, keys: Iterable[bytes]) -> int:
        """Return how many of the first `keys` are in the mapping, before the first missing key."""
        shards, held = self._shards, 0
        for key in keys:
            if key not in shards[key[0]]:
                break
            held += 1
        return held


def _shards(entries_max: int) -> tuple[Shard[Any, Any], ...]:
    many = next((many for many in SHARDS if many * SHARD_ENTRIES >= entries_max), SHARDS[-1])
    return tuple(Shard() for _ in range(many))


class _Stretch:
    """A run of consecutive entries.

    `filled` counts the entries since the last compaction, including removed entries.
    """

    __slots__ = ("entries", "filled", "newer", "older")

    def __init__(self, older: _Stretch | None = None) -> None:
        self.entries: dict[Any, Any] = {}
        self.filled = 0
        self.older, self.newer = older, None  # type: tuple[_Stretch | None, _Stretch | None]


class ShardedOrder(MutableMapping[K, V]):
    """An `OrderedDict` that consists of runs of at most `RUN_MAX` entries, and of an index from each key to its run."""

    __slots__ = ("_first", "_last", "_len", "_many", "_shards")

    def __init__(self, entries_max: int, shards: tuple[Shard[K, _Stretch], ...] = ()) -> None:
        """Start without entries. Calls take longer if there are more than `entries_max` entries.

        `shards` is an index that several orders share. At any time a key may be in only one of these orders. Calls with
        this key may be made only on that order.
        """
        self._shards = shards or _shards(entries_max)
        self._many, self._len = len(self._shards), 0
        self._first = self._last = _Stretch()

    def __getitem__(self, key: K) -> V:
        """Return a value, or raise KeyError, as a dict does."""
        value: V = self._shards[hash(key) % self._many][key].entries[key]
        return value

    def get(self, key: K, default: Any = None) -> Any:  # noqa: ANN401
        """Return a value or the default, as a dict does."""
        run = self._shards[hash(key) % self._many].get(key)
        return default if run is None else run.entries[key]

    def __setitem__(self, key: K, value: V) -> None:
        """Set a value. As in an `OrderedDict`, an existing key keeps its position."""
        shard = self._shards[hash(key) % self._many]
        run = shard.get(key)
        if run is None:
            run = self._last
            if run.filled >= RUN_MAX:
                run = self._open()
            shard[key] = run
            run.filled += 1
            self._len += 1
        run.entries[key] = value

    def __delitem__(self, key: K) -> None:
        """Delete an entry. Raises KeyError if the key is missing."""
        self.pop(key)

    def pop(self, key: K, default: Any = _MISSING) -> Any:  # noqa: ANN401
        """Remove an entry and return its value, as a dict does."""
        run = self._shards[hash(key) % self._many].pop(key, None)
        if run is None:
            if default is _MISSING:
                raise KeyError(key)
            return default
        self._len -= 1
        entries = run.entries
        value = entries.pop(key)
        if len(entries) * 4 < run.filled and run is not self._last:
            self._shrink(run)
        return value

    def popitem(self, last: bool = True) -> tuple[K, V]:  # noqa: FBT001, FBT002  (as of OrderedDict)
        """Remove and return the newest entry, or the oldest if `last` is False.

        Raises:
            KeyError: there are no entries.
        """
        key = next(reversed(self) if last else iter(self), _MISSING)
        if key is _MISSING:
            raise KeyError
        return key, self.pop(key)  # type: ignore[arg-type, return-value]

    def move_to_end(self, key: K) -> None:
        """Make the entry the newest. Raises KeyError if the key is missing."""
        self[key] = self.pop(key)

    def __contains__(self, key: object) -> bool:
        """Whether the mapping has the key, as in a dict."""
        return key in self._shards[hash(key) % self._many]

    def __iter__(self) -> Iterator[K]:
        """Iterate over the keys, the oldest first."""
        run: _Stretch | None = self._first
        while run is not None:
            yield from run.entries
            run = run.newer

    def __reversed__(self) -> Iterator[K]:
        """Iterate over the keys, the newest first."""
        run: _Stretch | None = self._last
        while run is not None:
            yield from reversed(run.entries)
            run = run.older

    def __len__(self) -> int:
        """Return the number of entries."""
        return self._len

    def _open(self) -> _Stretch:
        """Return a run for a new entry.

        The last run has no room, because it has had `RUN_MAX` entries, including removed entries.
        """
        last = self._last
        if len(last.entries) * 2 < RUN_MAX:
            _fill(last, dict(last.entries))
            return last
        untracked(last.entries)
        last.newer = self._last = _Stretch(last)
        return self._last

    def _shrink(self, run: _Stretch) -> None:
        """Compact `run`, or join `run` with a small neighbour. `run` has few entries left, and is not the last run."""
        older, newer = run.older, run.newer
        if not run.entries:
            self._unlink(run)
        elif older is not None and len(older.entries) + len(run.entries) <= RUN_MAX // 2:
            self._join(older, run)
        elif newer is not None and newer is not self._last and len(newer.entries) + len(run.entries) <= RUN_MAX // 2:
            self._join(run, newer)
        else:
            _fill(run, dict(run.entries))
            untracked(run.entries)

    def _join(self, older: _Stretch, newer: _Stretch) -> None:
        for key in newer.entries:
            self._shards[hash(key) % self._many][key] = older
        _fill(older, older.entries | newer.entries)
        untracked(older.entries)
        self._unlink(newer)

    def _unlink(self, run: _Stretch) -> None:
        """Remove `run`, which is not the last run, from the list of runs."""
        older, newer = run.older, run.newer
        assert newer is not None  # noqa: S101
        newer.older = older
        if older is None:
            self._first = newer
        else:
            older.newer = newer


Ordered: TypeAlias = OrderedDict[K, V] | ShardedOrder[K, V]


def _fill(run: _Stretch, entries: dict[Any, Any]) -> None:
    run.entries, run.filled = entries, len(entries)


def by_key(entries_max: int) -> MutableMapping[bytes, V]:
    """Return an empty dict, or `Shards` if `entries_max` is large. The keys must be hashes."""
    return {} if entries_max <= PLAIN_MAX else Shards()


def make_order(entries_max: int) -> MutableMapping[K, V]:
    """Return an empty dict, or a `ShardedOrder` if `entries_max` is large."""
    return {} if entries_max <= PLAIN_MAX else ShardedOrder(entries_max)


def order(entries_max: int) -> Ordered[K, V]:
    """Return an empty `OrderedDict`, or a `ShardedOrder` if `entries_max` is large."""
    return OrderedDict() if entries_max <= PLAIN_MAX else ShardedOrder(entries_max)


def orders(entries_max: int, count: int) -> tuple[Ordered[K, V], ...]:
    """Return `count` mappings, each as `order` returns it.

    A key may be in only one of these mappings at a time, because large mappings share an index.
    """
    if entries_max <= PLAIN_MAX:
        return tuple(OrderedDict() for _ in range(count))
    shards = _shards(entries_max)
    return tuple(ShardedOrder(entries_max, shards) for _ in range(count))
