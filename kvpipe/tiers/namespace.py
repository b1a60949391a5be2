"""The namespace of an engine's chunks in tiers."""

from __future__ import annotations

import hashlib
import uuid


class Namespace:
    """`base` is a hash of all that the bytes depend on beside tokens; until it is known there is no namespace.

    Once renewed it is never one that was used before, even if `base` changes, or becomes known only later.
    """

    def __init__(self) -> None:
        """Nothing is known."""
        self.base = ""
        self.second = ""
        self.bound: dict[str, float] = {}
        """Why only engines of one layout share chunks: 1 for the reason, 0 for former ones; empty: all share."""
        self._own = ""

    @property
    def name(self) -> str:
        """32 hex digits; empty: tiers must not be used yet."""
        if not self.base or not self._own:
            return self.base
        return hashlib.sha256(f"{self.base}{self._own}".encode()).hexdigest()[:32]

    @property
    def also(self) -> str:
        """A second namespace that may have chunks with the same bytes; empty: none."""
        return "" if self._own or not self.base or self.second == self.base else self.second

    def bind(self, why: str) -> bool:
        """Set why only engines of one layout share chunks; empty: all do. Returns whether it changed."""
        before = [reason for reason, holds in self.bound.items() if holds]
        self.bound = dict.fromkeys(self.bound, 0.0) | ({why: 1.0} if why else {})
        return before != ([why] if why else [])

    def renew(self) -> None:
        """Abandon all chunks stored so far: take a new namespace, even if `base` becomes known only later."""
        self._own = str(uuid.uuid4())
