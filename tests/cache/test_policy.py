"""Tests of eviction: the order of LRU, the resistance of S3-FIFO to scans, and the memory bounds of both policies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from kvpipe.cache.policy import Lru, Policy, S3Fifo, make_policy
from kvpipe.inputs import plugins
from kvpipe.testing.policy_conformance import Item, PolicyConformance

SLOTS = 20


@pytest.mark.parametrize("name", plugins.own(plugins.POLICIES))
class TestOurPolicies(PolicyConformance):
    """The suite for both policies."""

    @pytest.fixture
    def make(self, name: str) -> Callable[[int], Policy]:
        """Return a function that builds one of kvpipe's policies."""
        return partial(make_policy, name)


def test_an_unknown_policy_is_a_key_error() -> None:
    """An unknown name raises an error. No default policy silently replaces it."""
    with pytest.raises(KeyError):
        make_policy("random", SLOTS)


def test_lru_evicts_the_least_recently_used_chunk() -> None:
    """An insertion, a hit and a refresh count as uses. The chunk whose last use is oldest is evicted first."""
    policy = Lru()
    a, b, c, d = (Item(x) for x in "abcd")
    for item in (a, b, c, d):
        policy.insert(item, hit=False)
    policy.remove(a)
    policy.insert(a, hit=True)
    policy.refresh(b)
    assert [policy.victim() for _ in range(4)] == [c, d, a, b]


def _survivors(make: Callable[[], Policy]) -> int:
    """Fill a pool, use five chunks again, then insert 200 one-time chunks.

    Return how many of the five are still held.
    """
    policy = make()
    hot = [Item(f"hot{i}") for i in range(5)]
    for item in (*hot, *(Item(f"cold{i}") for i in range(SLOTS - 5))):
        policy.insert(item, hit=False)
    for item in hot:  # a load leases and releases the chunk
        policy.remove(item)
        policy.insert(item, hit=True)
    gone = []
    for i in range(200):
        gone.append(policy.victim())
        policy.insert(Item(f"scan{i}"), hit=False)
    assert len(policy) == SLOTS
    return sum(item not in gone for item in hot)


def test_a_scan_flushes_lru_but_not_s3fifo() -> None:
    """After 200 one-time chunks, LRU has lost its whole hot set, and S3-FIFO has kept its whole hot set."""
    assert _survivors(Lru) == 0
    assert _survivors(lambda: S3Fifo(SLOTS)) == 5


def test_chunk_that_is_written_again_soon_goes_to_the_main_queue() -> None:
    """A chunk that was evicted without a use, and is soon written again, stays longer than a new chunk."""
    policy = S3Fifo(SLOTS)
    for i in range(5):
        policy.insert(Item(f"filler{i}"), hit=False)
    policy.insert(Item("again"), hit=False)
    while (victim := policy.victim()) is not None and victim.identity != "again":
        pass
    assert victim is not None
    again = Item("again")
    policy.insert(again, hit=False)
    newcomers = [Item(f"new{i}") for i in range(SLOTS)]
    for item in newcomers:
        policy.insert(item, hit=False)
    kept = 2  # the small queue's share of 20 slots
    assert [policy.victim() for _ in range(SLOTS - kept)] == newcomers[: SLOTS - kept]
    assert policy.victim() is again


def test_hit_chunk_stays_for_a_second_round() -> None:
    """In the main queue, a loaded chunk stays one round longer than a chunk that was only written again."""
    policy = S3Fifo(SLOTS)
    policy.insert(Item("back"), hit=False)
    policy.victim()
    hit, back = Item("hit"), Item("back")
    policy.insert(hit, hit=True)
    policy.insert(back, hit=False)
    assert [policy.victim(), policy.victim()] == [back, hit]


def test_the_ghost_list_is_bounded() -> None:
    """S3-FIFO remembers at most as many evicted chunks as there are slots."""
    policy = S3Fifo(SLOTS)
    for i in range(1000):
        policy.insert(Item(f"x{i}"), hit=False)
        if len(policy) > SLOTS:
            policy.victim()
    assert len(policy) == SLOTS
    assert len(policy._ghost) == SLOTS
    assert list(policy._ghost)[-1] == f"x{999 - SLOTS}"


def test_refresh_keeps_the_queue() -> None:
    """A refresh changes the order of equal chunks. A refresh does not move a new chunk into the main queue."""
    policy = S3Fifo(SLOTS)
    a, b, c, hit = (Item(x) for x in ("a", "b", "c", "hit"))
    policy.insert(hit, hit=True)
    for item in (a, b, c):
        policy.insert(item, hit=False)
    policy.refresh(a)
    assert policy.victim() is b
    assert (len(policy._small), len(policy._main)) == (2, 1)
