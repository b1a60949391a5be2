"""The suite of policies finds bugs: each claim of the suite fails for a policy with the bug that the claim is about."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import pytest

from kvpipe.cache.policy import Lru, Policy
from kvpipe.cache.policy.base import Evictable
from kvpipe.testing.policy_conformance import PolicyConformance

SUITE = PolicyConformance()


class EvictsTwice(Lru):
    """A policy whose victim stays in the policy's list."""

    def victim(self) -> Evictable | None:
        """Return a victim without removing it."""
        return next(iter(self._order), None)


class EvictsHeld(Lru):
    """A policy that sometimes keeps a held chunk in its list, and removes another chunk instead."""

    removals = 0

    def remove(self, chunk: Evictable) -> None:
        """Remove another chunk."""
        self.removals += 1
        if self.removals % 50 or len(self) < 2 or chunk not in self._order:
            return super().remove(chunk)
        self._order.pop(next(one for one in self._order if one is not chunk))
        return None


class TakesEqualForOne(Lru):
    """A policy that confuses chunks with equal content."""

    def __init__(self, slots: int = 0) -> None:
        """Start empty."""
        super().__init__(slots)
        self._by: dict[Hashable, Evictable] = {}

    def insert(self, chunk: Evictable, *, hit: bool) -> None:
        """Replace an equal chunk."""
        super().remove(self._by.pop(chunk.identity, chunk))
        self._by[chunk.identity] = chunk
        super().insert(chunk, hit=hit)


class RemembersForEver(Lru):
    """A policy that remembers every chunk for ever, in a place where a test does not easily see it."""

    def __init__(self, slots: int = 0) -> None:
        """Start empty."""
        super().__init__(slots)
        self._ghosts: list[set[Hashable]] = [set()]

    def insert(self, chunk: Evictable, *, hit: bool) -> None:
        """Remember the content."""
        self._ghosts[0].add(chunk.identity)
        super().insert(chunk, hit=hit)


BUGS: list[tuple[Callable[[Callable[[int], Policy]], None], Callable[[int], Policy]]] = [
    (SUITE.test_every_chunk_goes_once, EvictsTwice),
    (SUITE.test_any_moves, EvictsHeld),
    (SUITE.test_equal_content_is_another_chunk, TakesEqualForOne),
    (SUITE.test_its_bookkeeping_is_bounded, RemembersForEver),
]


@pytest.mark.parametrize(("claim", "policy"), BUGS, ids=lambda one: one.__name__)
def test_a_claim_can_fail(claim: Callable[[Callable[[int], Policy]], None], policy: Callable[[int], Policy]) -> None:
    """A policy with one bug fails the claim that is about this bug."""
    claim(Lru)
    with pytest.raises((AssertionError, ValueError)):
        claim(policy)


def test_every_claim_is_tried() -> None:
    """The list above has a policy with a bug for each claim of the suite."""
    assert {claim.__name__ for claim, _ in BUGS} == {name for name in dir(SUITE) if name.startswith("test_")}
