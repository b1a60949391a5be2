"""A policy, guarded or not, gets all chunks of a request in one call."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvpipe.cache.catalog import Catalog
from kvpipe.cache.chunks import Chunk, Owner
from kvpipe.cache.policy import Lru
from kvpipe.cache.policy.base import Evictable
from kvpipe.cache.policy.guard import GuardedPolicy
from kvpipe.trace.log import Counters


def _saved(catalog: Catalog, key: bytes) -> Chunk:
    chunk = catalog.reserve(0)
    assert chunk is not None
    assert catalog.landed(catalog.write(chunk, 1, key, keep=True))
    return chunk


def test_a_victim_is_out_of_the_policy_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy itself removes the victim that it names.

    So the catalog calls `remove` only for evictions by operators.
    """
    removed = list[Evictable]()
    monkeypatch.setattr(Lru, "remove", lambda _, chunk: removed.append(chunk))
    catalog = Catalog(1, 1, Lru(), Counters())
    _saved(catalog, b"a")
    second = _saved(catalog, b"b")
    assert not removed
    assert catalog.evict(second)
    assert removed == [second]


class _Batched(Lru):
    """A policy that gets a request's chunks in one call, and raises when chunks are inserted."""

    def __init__(self) -> None:
        """Start empty."""
        super().__init__()
        self.received: list[tuple[str, int]] = []

    def insert_all(self, chunks: Sequence[Evictable], *, hit: bool) -> None:
        """Record the chunks, and fail half way."""
        self.received.append(("insert", len(chunks)))
        self.insert(chunks[0], hit=hit)
        raise ValueError

    def remove_all(self, chunks: Sequence[Evictable]) -> None:
        """Record the chunks."""
        self.received.append(("remove", len(chunks)))
        for chunk in chunks:
            self.remove(chunk)

    def refresh_all(self, chunks: Sequence[Evictable]) -> None:
        """Record the chunks."""
        self.received.append(("refresh", len(chunks)))


def test_a_guarded_policy_gets_a_requests_chunks_at_once() -> None:
    """If the policy raises in the middle of the call, all chunks can still be evicted."""
    batched, faults = _Batched(), list[str]()
    catalog = Catalog(
        4, 1, GuardedPolicy(batched, "batched", lambda *_, **stated: faults.append(stated["why"])), Counters()
    )
    chunks = list[Chunk]()
    for key in (b"a", b"b", b"c"):
        chunks.append(_saved(catalog, key))
    catalog.refresh(chunks[::-1])
    catalog.lease(Owner("r", 1), chunks)
    assert not faults
    catalog.release(Owner("r", 1))
    assert batched.received == [("refresh", 3), ("remove", 3), ("insert", 3)]
    assert faults == ["ValueError()"]
    assert sum(catalog.reserve(0) is not None for _ in range(5)) == 4
