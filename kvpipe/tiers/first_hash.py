"""What an engine's keys begin with, left in a tier: engines with another first hash find nothing of each other.

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
_NAME: Final = hashlib.sha256(b"kvpipe first hash").digest()


def _key(space: str) -> Key:
    return Key(space, _NAME, 0, 0, 1)


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
