"""The eviction protocol. A policy sees only chunks that are evictable now: held ones are taken out and put back."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol


class Evictable(Protocol):
    """What a policy may look at."""

    @property
    def identity(self) -> Hashable:
        """What the chunk holds: equal for the same content, also after an eviction."""


class Policy(Protocol):
    """Decides which chunk goes when a slot is needed. Every operation is O(1) amortised."""

    def insert(self, chunk: Evictable, *, hit: bool) -> None:
        """A chunk became evictable: first written (`hit` False), or given back after a load (`hit` True)."""

    def remove(self, chunk: Evictable) -> None:
        """A chunk is held, or gone. Unknown chunks are ignored."""

    def refresh(self, chunk: Evictable) -> None:
        """A chunk was of use without being loaded: order among equals, not evidence of popularity."""

    def victim(self) -> Evictable | None:
        """Take out the next chunk to evict, or None when nothing is evictable."""

    def __len__(self) -> int:
        """How many chunks are evictable."""
