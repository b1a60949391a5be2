"""Under which name an engine's chunks are kept in tiers."""

from __future__ import annotations

import hashlib
import uuid


class Namespace:
    """Has no name until `base` is known, a hash of all that the bytes depend on. Renewed, it shares nothing.

    `base` may become another one, and become known late: what was renewed stays so.
    """

    def __init__(self) -> None:
        """Nothing is known."""
        self.base = ""
        self.second = ""
        self.bound: dict[str, float] = {}
        """Why only engines of one layout share it: 1 at the reason, 0 at those that were; none: others do, too."""
        self._own = ""

    @property
    def name(self) -> str:
        """32 hex digits, or nothing: tiers are not to be used."""
        if not self.base or not self._own:
            return self.base
        return hashlib.sha256(f"{self.base}{self._own}".encode()).hexdigest()[:32]

    @property
    def also(self) -> str:
        """Where chunks with the same bytes may be, too; or nothing."""
        return "" if self._own or not self.base or self.second == self.base else self.second

    def bind(self, why: str) -> bool:
        """Only engines of one layout share it, by the reason; none: others do, too. Returns whether that is new."""
        before = [reason for reason, holds in self.bound.items() if holds]
        self.bound = dict.fromkeys(self.bound, 0.0) | ({why: 1.0} if why else {})
        return before != ([why] if why else [])

    def renew(self) -> None:
        """Never again share what was kept so far, also where `base` becomes known only later."""
        self._own = str(uuid.uuid4())
