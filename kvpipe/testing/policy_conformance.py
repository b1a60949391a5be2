"""The suite that every eviction policy must pass. The suite tests the protocol of `kvpipe/cache/policy/base.py`.

A test module of a policy has a subclass of `PolicyConformance`. The subclass's fixture `make` returns a function or
class that makes a policy for a number of slots:

    class TestNewest(PolicyConformance):
        @pytest.fixture
        def make(self):
            return Newest
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import pytest

from kvpipe.cache.policy.base import Policy
from kvpipe.testing.overriding import not_overridden

__all__ = ["Item", "PolicyConformance"]

SLOTS, MOVES = 20, 5000


class Item:
    """A chunk as a policy sees it. An item is equal only to itself. `identity` stands for the chunk's content."""

    def __init__(self, identity: str, before: str = "") -> None:
        """`identity` identifies the content. `before` is the preceding chunk's identity, or "" for a first chunk."""
        self.identity, self.before, self.place = identity, before, 0


class PolicyConformance:
    """The tests of an eviction policy."""

    @pytest.fixture
    def make(self) -> Any:
        """Return a function from a number of slots to a policy. Subclasses override this fixture."""
        not_overridden(self, "make", "a function from a number of slots to a policy")

    def test_every_chunk_goes_once(self, make: Callable[[int], Policy]) -> None:
        """Each chunk is a victim once. A held or unknown chunk is never a victim, and an empty policy has no victim."""
        policy = make(SLOTS)
        assert policy.victim() is None
        items = [Item(str(i)) for i in range(10)]
        for i, item in enumerate(items):
            policy.insert(item, hit=i % 3 == 0)
        policy.remove(items[4])
        policy.remove(items[4])
        policy.remove(Item("unknown"))
        policy.refresh(items[4])
        policy.refresh(Item("unknown"))
        assert len(policy) == 9
        victims = [policy.victim() for _ in range(9)]
        assert {id(v) for v in victims} == {id(i) for i in items if i is not items[4]}
        assert len(policy) == 0
        assert policy.victim() is None

    def test_any_moves(self, make: Callable[[int], Policy]) -> None:
        """After inserts, holds, releases and evictions in any order, every victim is a chunk that may be evicted."""
        policy, rng = make(SLOTS), random.Random(0)
        free, held = list[Item](), list[Item]()
        for move in range(MOVES):
            if len(free) + len(held) == SLOTS:
                victim = policy.victim()
                assert (victim is None) == (not free)
                if victim is not None:
                    assert isinstance(victim, Item)
                    free.remove(victim)
            if free and rng.random() < 0.5:
                held.append(free.pop(rng.randrange(len(free))))
                policy.remove(held[-1])
            if held and rng.random() < 0.5:
                free.append(held.pop(rng.randrange(len(held))))
                policy.insert(free[-1], hit=rng.random() < 0.5)
            if free:
                policy.refresh(rng.choice(free))
            if len(free) + len(held) < SLOTS:
                free.append(Item(str(rng.randrange(2 * SLOTS) if move % 2 else move)))
                policy.insert(free[-1], hit=False)
            assert len(policy) == len(free)

    def test_equal_content_is_another_chunk(self, make: Callable[[int], Policy]) -> None:
        """Two chunks with the same identity are separate: each is held and evicted independently."""
        policy, one, other = make(SLOTS), Item("same"), Item("same")
        policy.insert(one, hit=False)
        policy.insert(other, hit=False)
        assert len(policy) == 2
        policy.remove(one)
        assert len(policy) == 1
        assert policy.victim() is other
        assert policy.victim() is None

    def test_its_bookkeeping_is_bounded(self, make: Callable[[int], Policy]) -> None:
        """The memory that a policy needs to remember evicted chunks has a bound."""
        policy, gone, held_bytes = make(SLOTS), 200 * SLOTS, list[int]()
        for turn in range(2):
            for i in range(gone):
                policy.insert(Item(f"{turn}/{i}"), hit=False)
                if len(policy) > SLOTS:
                    policy.victim()
            held_bytes.append(_held_bytes(policy))
        assert held_bytes[1] - held_bytes[0] < gone, "not a byte for each that went"


def _held_bytes(policy: Policy) -> int:
    """Return the size in bytes of all objects that `policy` refers to, directly or indirectly."""
    found: dict[int, object] = {}
    new: list[object] = [policy]
    while new:
        one = new.pop()
        if id(one) not in found and not isinstance(one, type | ModuleType | FunctionType):
            found[id(one)] = one
            new += gc.get_referents(one)
    return sum(map(sys.getsizeof, found.values()))
