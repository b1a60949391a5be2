"""The first hash of an engine's keys, stored in a tier. Engines with different first hashes share no chunks.

A tier cannot distinguish keys of another hash chain from keys that were never written. So each engine stores its first
hash under two keys that do not depend on the first hash. The first key is for the engine's namespace. The second key is
for the whole tier (`ANY`). `kvpipe doctor` reads the second key.
"""

from __future__ import annotations

import contextlib
import hashlib
from typing import Final

from kvpipe.tiers.base import ALIGN_BYTES, Get, Key, Put, Read, Tier
from kvpipe.tiers.envelope import HEADER_BYTES, DamagedError, Sealer, pages
from kvpipe.tiers.guard import GuardedTier

ANY: Final = "0" * 32
"""The second namespace under which every engine that uses the tier stores its first hash."""
NAME: Final = hashlib.sha256(b"kvpipe first hash").digest()
"""The name under which first hashes are stored, instead of the name of a chunk."""


def _key(space: str) -> Key:
    return Key(space, NAME, 0, 0, 1)


async def read_first_hash(tier: Tier | GuardedTier, sealer: Sealer, space: str) -> str:
    """Return the first hash that the previous engine has stored in `space`, or "" if no hash can be read.

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
    """Store the hash `first` in `space`. The old hash is deleted first, because a tier does not overwrite values.

    Raises:
        TierError: the tier cannot be used.

    """
    names, body = tier.sealer.names(_key(space)), pages(ALIGN_BYTES)
    body[: len(first)] = first.encode()
    await tier.delete(list(names))
    await tier.write([Put(names[0], tier.sealer.seal(names[0], 0, body))])


class FirstHash:
    """Stores the engine's first hash once in each tier and namespace. Other engines compare their hashes with it."""

    def __init__(self, *, leaves: bool) -> None:
        """`leaves` says whether this rank stores the first hash."""
        self.text = ""  # the first hash, or "" while unknown; set before the first store
        self._leaves, self._left = leaves, set[tuple[int, str]]()

    def is_due(self, place: int, space: str) -> bool:
        """Whether `leave` must be called now for the tier with the index `place`."""
        return self._leaves and bool(self.text) and (place, space) not in self._left

    async def leave(self, tier: GuardedTier, place: int, space: str) -> None:
        """Store the first hash for the namespace `space` and for the whole tier.

        Raises `TierError` if the tier cannot be used. After an error `is_due` stays True.
        """
        self._left.add((place, space))
        try:
            for one in (space, ANY):
                await leave_first_hash(tier, one, self.text)
        except BaseException:
            self._left.discard((place, space))
            raise
