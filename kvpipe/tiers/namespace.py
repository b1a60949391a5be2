"""The namespace of an engine's chunks in tiers."""

from __future__ import annotations

import hashlib
import uuid


class Namespace:
    """The present namespace. `base`: a hash of everything that bytes depend on beside tokens; "": not known yet.

    `second`: another namespace whose chunks have the same bytes, or "". After `renew` the namespace is never one that
    was used before, even if `base` changes, or becomes known only later.
    """

    def __init__(self) -> None:
        """Start without a namespace."""
        self.base = ""
        self.second = ""
        self.bound: dict[str, float] = {}
        """The reason why only engines of one layout share chunks, with 1; former ones, with 0. Empty: all share."""
        self._own = ""

    @property
    def name(self) -> str:
        """The namespace, 32 hex digits; "": tiers must not be used yet."""
        if not self.base or not self._own:
            return self.base
        return hashlib.sha256(f"{self.base}{self._own}".encode()).hexdigest()[:32]

    @property
    def also(self) -> str:
        """A second namespace that may have chunks with the same bytes; "": none."""
        return "" if self._own or not self.base or self.second == self.base else self.second

    def bind(self, why: str) -> bool:
        """Set the reason why only engines of one layout share chunks; "": all do. Returns whether it has changed."""
        before = [reason for reason, holds in self.bound.items() if holds]
        self.bound = dict.fromkeys(self.bound, 0.0) | ({why: 1.0} if why else {})
        return before != ([why] if why else [])

    def renew(self) -> None:
        """Abandon all chunks stored so far: the namespace is a new one from now on."""
        self._own = str(uuid.uuid4())
