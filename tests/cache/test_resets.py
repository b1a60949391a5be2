"""A reset drops all chunks at once. Later calls remove these chunks from the catalog, a few chunks per call."""

from __future__ import annotations

import pytest

from kvpipe.cache.catalog import SWEEP_SLOTS, Catalog
from kvpipe.cache.chunks import Chunk, Owner
from kvpipe.cache.policy import make_policy
from kvpipe.testing.catalog_integrity import check_integrity
from kvpipe.trace.log import Counters
from kvpipe.trace.miss_reasons import RESET

ME = Owner("r", 1)


def _catalog(slots: int, policy: str = "lru") -> Catalog:
    return Catalog(slots, 1, make_policy(policy, slots), Counters())


def _publish(catalog: Catalog, key: bytes) -> Chunk:
    chunk = catalog.reserve(0)
    assert chunk is not None
    assert catalog.landed(catalog.write(chunk, 1, key, keep=False))
    return chunk


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "sessions"])
def test_reset_chunks_are_removed_from_the_index_in_slices(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reset drops all chunks at once, and their slots count as free.

    Each later call removes some of the dropped chunks from the index. Reasons of misses are kept.
    """
    slots = 8 * SWEEP_SLOTS
    catalog = _catalog(slots, policy)
    keys = [i.to_bytes(4) for i in range(slots)]
    old = [_publish(catalog, key) for key in keys]
    drops = 0

    def counted(self: Catalog, chunk: Chunk, why: str, *, taken: bool = False) -> None:
        nonlocal drops
        drops += 1
        real(self, chunk, why, taken=taken)

    real = Catalog._drop
    monkeypatch.setattr(Catalog, "_drop", counted)
    assert catalog.reset() == slots
    assert drops <= SWEEP_SLOTS
    assert (catalog.used, list(catalog.chunks()), len(catalog.index(0))) == (0, [], 0)
    assert not any(catalog.known(0, key) or catalog.at(slot) for slot, key in enumerate(keys))
    assert all(key in catalog.reset_index(0) or catalog.lost_keys.why(0, key) == RESET for key in keys)
    with pytest.raises(ValueError, match="forgotten"):
        catalog.lease(ME, [old[-1]])
    with pytest.raises(ValueError, match="forgotten"):
        catalog.write(old[-1], 2, b"more", keep=False)
    assert not catalog.evict(old[-1])
    catalog.release(ME)
    new = [_publish(catalog, key) for key in keys]
    assert catalog.counters["evicted"] == 0
    assert catalog.used == slots == len({chunk.slot for chunk in new})
    assert [catalog.find(0, key) for key in keys] == new
    assert catalog.stale == 0
    assert not any(catalog.reset_index(0))
    check_integrity(catalog)
    while catalog.used:
        assert catalog._evict_one()
    assert catalog.counters["evicted"] == slots


def test_second_reset_before_the_end_of_the_first_drops_all_chunks() -> None:
    """The second reset also drops chunks that were saved since the first reset.

    Sweeps remove the chunks of both resets.
    """
    catalog = _catalog(4 * SWEEP_SLOTS)
    for i in range(3 * SWEEP_SLOTS):
        _publish(catalog, i.to_bytes(4))
    assert catalog.reset() == 3 * SWEEP_SLOTS
    _publish(catalog, b"new")
    assert catalog.reset() == 1
    assert catalog.reset() == 0
    assert catalog.find(0, b"new") is None
    assert catalog.used == 0
    for _ in range(4):
        check_integrity(catalog)
        catalog.sweep()
    assert catalog.stale == 0
    assert len(catalog._policy) == 0
