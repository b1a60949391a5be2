"""Mappings that are divided into pieces behave like a dict and an `OrderedDict`, and no piece is large."""

from __future__ import annotations

import gc
import hashlib
import random
import sys
from collections import OrderedDict
from typing import Any

import pytest

from kvpipe.cache.catalog import Catalog
from kvpipe.cache.chunks import Chunk, Mark
from kvpipe.cache.policy import large, make_policy
from kvpipe.cache.policy.chain import Chain
from kvpipe.cache.policy.large import PLAIN_MAX, Shard, ShardedOrder, Shards, by_key, make_order, order, orders
from kvpipe.trace.log import Counters


def _both(call: Any, *ours_and_theirs: Any) -> None:
    """Check that both calls return equal results or raise equal errors."""
    ends = []
    for one in ours_and_theirs:
        try:
            ends.append(call(one))
        except KeyError:
            ends.append(KeyError)
    assert ends[0] == ends[1]


CALLS: list[Any] = [
    lambda d, key: d.__setitem__(key, key),
    lambda d, key: d.__setitem__(key, key),
    lambda d, key: d.__setitem__(key, -key),
    lambda d, key: d.__delitem__(key),
    lambda d, key: d.pop(key, None),
    lambda d, key: d.pop(key),
    lambda d, key: d.get(key),
    lambda d, key: d[key],
    lambda d, key: key in d,
    lambda d, key: d.setdefault(key, 7),
    lambda d, _: len(d),
    lambda d, _: bool(d),
]
KEYED: list[Any] = [
    lambda d, key: d.__setitem__(key, key[0]),
    lambda d, key: d.__setitem__(key, key[1]),
    lambda d, key: d.__setitem__(key, -1),
]
ORDERED: list[Any] = [
    *CALLS,
    lambda d, key: d.move_to_end(key),
    lambda d, _: d.popitem(last=False),
    lambda d, key: key % 7 or d.popitem(),
    lambda d, _: next(iter(d), None),
    lambda d, _: next(reversed(d), None),
]


@pytest.mark.parametrize("seed", range(8))
def test_an_order_is_an_ordered_dict(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same random calls leave equal items in an `OrderedDict` and a `ShardedOrder` with runs of eight entries."""
    monkeypatch.setattr(large, "RUN_MAX", 8)
    rng, ours, theirs = random.Random(seed), ShardedOrder[int, int](100), OrderedDict[int, int]()
    for step in range(6000):
        key, call = rng.randrange(1, 20 if seed % 2 else 400), rng.choice(ORDERED[: 3 if step % 500 < 100 else None])
        _both(lambda d, key=key, call=call: call(d, key), ours, theirs)
        if step % 10 == 0:
            assert list(ours.items()) == list(theirs.items())
            assert list(reversed(ours)) == list(reversed(theirs))
    while theirs:
        assert ours.popitem(last=False) == theirs.popitem(last=False)
    assert not ours
    assert ours._first is ours._last


@pytest.mark.parametrize("size", [100, PLAIN_MAX + 1])
def test_orders_that_share_an_index_are_each_an_ordered_dict(size: int) -> None:
    """Each key is in at most one of the orders at a time."""
    rng, theirs = random.Random(0), [OrderedDict[int, int]() for _ in range(3)]
    ours: tuple[Any, ...] = orders(size, 3)
    for step in range(6000):
        key, call = rng.randrange(1, 400), rng.choice(ORDERED)
        at = next((at for at, one in enumerate(theirs) if key in one), rng.randrange(3))
        _both(lambda d, key=key, call=call: call(d, key), ours[at], theirs[at])
        if step % 10 == 0:
            assert [[*one.items()] for one in ours] == [[*one.items()] for one in theirs]


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "sessions"])
def test_a_policy_of_a_large_pool_is_small_at_first(policy: str) -> None:
    """A pool may have 257 policies, one per quota. So an empty policy has few dicts, even in a large pool."""
    before = sum(type(one) is Shard for one in gc.get_objects())
    made = make_policy(policy, 1_000_000)
    assert sum(type(one) is Shard for one in gc.get_objects()) - before <= 12 * large.SHARDS[4]
    assert not len(made)


@pytest.mark.parametrize("seed", range(2))
def test_shards_behave_as_a_dict(seed: int) -> None:
    """The same random calls leave equal items in a dict and in a `Shards`."""
    rng, ours, theirs = random.Random(seed), Shards[int](), dict[bytes, int]()
    none = bytes(4)
    for _ in range(4000):
        key, call = rng.randrange(1, 400).to_bytes(4, "little"), rng.choice(CALLS[3:] + KEYED)
        _both(lambda d, key=key, call=call: call(d, key), ours, theirs)
        keys = [rng.choice([*theirs, none]) for _ in range(5)]
        assert ours.leading(keys) == (keys.index(none) if none in keys else 5)
        assert len(ours) == len(theirs)
    assert dict(ours) == theirs


def test_sparse_runs_of_an_order_are_joined() -> None:
    """If most entries are deleted, a `ShardedOrder` joins its sparse runs, so that few runs are left."""
    kept = ShardedOrder[int, int](100_000)
    for i in range(100_000):
        kept[i] = i
    for i in range(100_000):
        if i % 100:
            del kept[i]
    assert list(kept) == list(range(0, 100_000, 100))
    run, runs = kept._first, 1
    while run.newer is not None:
        run, runs = run.newer, runs + 1
    assert runs <= 1 + 2 * len(kept) // (large.RUN_MAX // 4)


def test_no_piece_is_large() -> None:
    """With 100,000 entries, each inner dict of `Shards` and `ShardedOrder` stays small, also with objects as keys."""
    objects = [object() for _ in range(100_000)]
    shards, queue = Shards[int](), ShardedOrder[object, int](1_000_000)
    for i, one in enumerate(objects):
        queue[one] = 1
        shards[hashlib.sha256(i.to_bytes(4)).digest()] = 1
    assert max(map(len, shards._shards)) <= 2 * len(objects) // 256
    assert max(map(len, queue._shards)) <= 3 * len(objects) // len(queue._shards)
    assert len(queue._first.entries) == large.RUN_MAX
    assert len(queue._shards) * large.SHARD_ENTRIES >= 1_000_000


def test_empty_piece_releases_its_memory() -> None:
    """Each piece releases its memory when its last entry is removed, so no single call has to release all memory."""
    shards, empty = Shards[int](), sys.getsizeof(Shard())
    keys = [hashlib.sha256(i.to_bytes(4)).digest() for i in range(20_000)]
    shards.update(dict.fromkeys(keys, 1))
    assert min(map(sys.getsizeof, shards._shards)) > empty
    for key in keys:
        del shards[key]
    assert {*map(sys.getsizeof, shards._shards)} == {empty}


def test_small_order_is_a_plain_dict() -> None:
    """Pools of usual sizes use plain dicts."""
    assert type(make_order(PLAIN_MAX)) is dict
    assert type(order(PLAIN_MAX)) is OrderedDict
    assert type(by_key(PLAIN_MAX)) is dict
    assert type(make_order(PLAIN_MAX + 1)) is ShardedOrder
    assert type(by_key(PLAIN_MAX + 1)) is Shards
    assert type(order(PLAIN_MAX + 1)) is ShardedOrder
    assert [*map(type, orders(PLAIN_MAX, 2))] == [OrderedDict] * 2
    assert [*map(type, orders(PLAIN_MAX + 1, 2))] == [ShardedOrder] * 2


def _walked() -> list[object]:
    """Return the number of objects that a full garbage collection visits."""
    gc.collect()
    return [one for one in gc.get_objects() if isinstance(one, Chunk | Mark | Chain)]


@pytest.mark.parametrize("policy", ["lru", "sessions"])
def test_the_garbage_collector_walks_no_chunk(policy: str) -> None:
    """A full garbage collection visits no chunk, so its duration does not grow with the number of held chunks."""
    before = len(_walked())
    catalog = Catalog(64, 1, make_policy(policy, 64), Counters())
    for i in range(96):
        chunk = catalog.reserve(0)
        assert chunk is not None
        catalog.landed(catalog.write(chunk, 16, bytes([i]), keep=False))
        catalog.refresh([chunk])
    assert catalog.used == 64
    assert len(_walked()) == before
    assert not any(gc.is_tracked(chunk.marks) for chunk in catalog.chunks())
