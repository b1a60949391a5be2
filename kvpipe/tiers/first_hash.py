"""The first hash of an engine's keys, left in a tier: engines with another first hash find nothing of each other.

A tier cannot tell keys of another chain from keys that nobody has written. So each engine leaves a digest of its first
hash under a key that does not depend on it, one for its namespace and one for the whole tier (`ANY`, for `doctor`).
"""

from __future__ import annotations

import contextlib
import hashlib
from typing import Final

from kvpipe.tiers.base import ALIGN_BYTES, Get, Key, Put, Read, Tier
from kvpipe.tiers.envelope import HEADER_BYTES, DamagedError, Sealer, pages
from kvpipe.tiers.guard import GuardedTier

ANY: Final = "0" * 32
"""In place of a namespace: of all engines that use the tier."""
NAME: Final = hashlib.sha256(b"kvpipe first hash").digest()
"""In place of a chunk's name."""


def _key(space: str) -> Key:
    return Key(space, NAME, 0, 0, 1)


async def read_first_hash(tier: Tier | GuardedTier, sealer: Sealer, space: str) -> str:
    """Return the first hash that the engine before has left in `space`; "": there is none that can be read.

    Raises:
        TierError: the tier cannot be read.

    """
    for name in sealer.names(_key(space)):
        header, body = pages(HEADER_BYTES), pages(ALIGN_BYTES)
        (read,) = await tier.read([Get(name, (header, body))])
        if read is Read.HIT:
            with contextlib.suppress(DamagedError):
                sealer.unseal(name, 0, header, body)
                return bytes(body).rstrip(b"\0").decode(errors="replace")
    return ""


async def leave_first_hash(tier: GuardedTier, space: str, first: str) -> None:
    """Leave the hash `first` in `space`, in place of another one: a tier does not write over values.

    Raises:
        TierError: the tier cannot be used.

    """
    names, body = tier.sealer.names(_key(space)), pages(ALIGN_BYTES)
    body[: len(first)] = first.encode()
    await tier.delete(list(names))
    await tier.write([Put(names[0], tier.sealer.seal(names[0], 0, body))])


class FirstHash:
    """Leaves the engine's first hash in each tier and namespace, once, for engines that have another."""

    def __init__(self, *, leaves: bool) -> None:
        """`leaves`: whether this rank does so."""
        self.text = ""  # set before the first store; "": it is not known
        self._leaves, self._left = leaves, set[tuple[int, str]]()

    def is_due(self, place: int, space: str) -> bool:
        """Whether it is to be left now in the tier with the index `place`."""
        return self._leaves and bool(self.text) and (place, space) not in self._left

    async def leave(self, tier: GuardedTier, place: int, space: str) -> None:
        """Leave it for the namespace, and for the whole tier. Raises `TierError`: then it is still due."""
        self._left.add((place, space))
        try:
            for one in (space, ANY):
                await leave_first_hash(tier, one, self.text)
        except BaseException:
            self._left.discard((place, space))
            raise
