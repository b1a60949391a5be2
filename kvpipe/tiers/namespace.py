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

    def renew(self) -> None:
        """Never again share what was kept so far, also where `base` becomes known only later."""
        self._own = str(uuid.uuid4())
