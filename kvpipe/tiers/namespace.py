"""The namespace of an engine's chunks in tiers."""

from __future__ import annotations

import hashlib
import uuid


class Namespace:
    """The current namespace of an engine.

    `base` is a hash of all inputs except tokens on which the bytes of chunks depend, or "" while it is not known.
    `second` is another namespace whose chunks have the same bytes, or "". After `renew`, the namespace differs from
    every earlier namespace, even if `base` changes or becomes known after `renew`.
    """

    def __init__(self) -> None:
        """Start without a namespace."""
        self.base = ""
        self.second = ""
        self.bound: dict[str, float] = {}
        """The reasons why only engines of one layout share chunks.

        The value is 1 for the current reason, 0 for earlier reasons. If the dictionary is empty, engines of all layouts
        share chunks.
        """
        self._own = ""

    @property
    def name(self) -> str:
        """The namespace as 32 hex digits. While `base` is not known, it is "", and tiers must not be used."""
        if not self.base or not self._own:
            return self.base
        return hashlib.sha256(f"{self.base}{self._own}".encode()).hexdigest()[:32]

    @property
    def also(self) -> str:
        """A second namespace that may have chunks with the same bytes, or "" if there is no second namespace."""
        return "" if self._own or not self.base or self.second == self.base else self.second

    def bind(self, why: str) -> bool:
        """Set the reason why only engines of one layout share chunks. "" means that engines of all layouts share them.

        Returns whether the reason changed.
        """
        before = [reason for reason, holds in self.bound.items() if holds]
        self.bound = dict.fromkeys(self.bound, 0.0) | ({why: 1.0} if why else {})
        return before != ([why] if why else [])

    def renew(self) -> None:
        """Change to a new namespace, so that chunks that were stored before this call are not found any more."""
        self._own = str(uuid.uuid4())
