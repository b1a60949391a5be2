"""Verdicts on the values of a tier, for `kvpipe cache`: good, damaged, or not judged.

A value is reported as damaged only if the damage is proven. A value is not judged if this command lacks the value's
encryption key, or is older than the value's format. Such a value may be a good value of another engine.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import anyio
import anyio.to_thread

from kvpipe.tiers.base import ALIGN_BYTES, Entry, Get, Read, Tier, TierError
from kvpipe.tiers.envelope import (
    HEADER_BYTES,
    VERSION,
    Cipher,
    DamagedError,
    Sealer,
    UnjudgedError,
    describe,
    pages,
    version_of,
)
from kvpipe.tiers.keyring import secrets_of
from kvpipe.tiers.spec import TierSpec

LARGE_BYTES: Final = 256 << 20
VALUE_BYTES_MAX: Final = 8 << 30
"""The largest possible size of a value, in bytes. No rank's part of a chunk is larger."""
GOOD, GONE, DAMAGED = "good", "gone", "damaged"
STALE, UNJUDGED = "stale", "unjudged"
NOT_ENCRYPTED: Final = "not encrypted"
"""The value of `why` for a GOOD value that is not encrypted although an encryption key is configured."""
REMEDIES: Final = {
    "encrypted": "name the key",
    "another encryption key": "name the key",
    "newer version": "use the kvpipe of that version",
    "older version": "`kvpipe cache purge --stale` drops it",
    "unknown format": "it is not this version's",
    "another namespace": "it was moved from there",
}


class Judgement(NamedTuple):
    """The verdict on one value. `why` is the value's problem, or "". For UNJUDGED values, `why` includes a solution.

    `kind` is GOOD, GONE (deleted after the listing), DAMAGED, STALE (of an older format), or UNJUDGED.
    """

    kind: str
    why: str = ""

    @property
    def judged(self) -> bool:
        """Whether this version of kvpipe, with the configured keys, can tell whether the value is damaged."""
        return self.kind not in {STALE, UNJUDGED}


_LENGTH: Final = Judgement(DAMAGED, "length")


class Judge:
    """Reads values of one tier, `lanes` values at once, and judges each of them.

    The buffers take `lanes` times LARGE_BYTES of memory. A larger value is read alone, into a buffer of its own.
    """

    def __init__(self, tier: Tier, spec: TierSpec) -> None:
        """Make the buffers. Raises `ConfigError` if the encryption keys that `spec` names cannot be used."""
        secrets = secrets_of(spec)
        self._tier, self._sealer, self._plain = tier, Sealer(secrets), Sealer()
        self._whole = Judgement(GOOD, NOT_ENCRYPTED if secrets else "")
        self._buffers = [pages(HEADER_BYTES) for _ in range(spec.lanes)]

    async def judged(self, batch: list[Entry]) -> list[Judgement]:
        """Return the verdict on each of at most `lanes` values. Raises `TierError` if the tier fails.

        Values of more than LARGE_BYTES are read one by one.
        """
        small = [entry for entry in batch if entry.bytes <= LARGE_BYTES]
        found = dict(zip(small, await self._verdicts(small, self._buffers), strict=True))
        for entry in batch:
            if entry.bytes > VALUE_BYTES_MAX:  # an entry of this size is not a value of kvpipe, and is not read
                found[entry] = _LENGTH
            elif entry not in found:
                (found[entry],) = await self._verdicts([entry], [_room(entry)])
        return [found[entry] for entry in batch]

    async def _verdicts(self, batch: list[Entry], buffers: list[memoryview]) -> list[Judgement]:
        """Read and judge values. If a buffer is too short, a longer buffer replaces it in `buffers`."""
        parts = []
        for at, entry in enumerate(batch):
            size = _padded(entry.bytes)
            if size > buffers[at].nbytes:
                buffers[at] = pages(size)
            parts.append((buffers[at][:HEADER_BYTES], buffers[at][HEADER_BYTES:size]))
        gets = [Get(entry.key, tuple(filter(len, part))) for entry, part in zip(batch, parts, strict=True)]
        read = await self._tier.read(gets)

        def verdict(entry: Entry, got: Read, header: memoryview, body: memoryview) -> Judgement:
            if got is not Read.HIT:
                return Judgement(GONE) if got is Read.MISS else _LENGTH
            return self._verdict(entry, header, body)

        return await anyio.to_thread.run_sync(
            lambda: [verdict(entry, got, *part) for entry, got, part in zip(batch, read, parts, strict=True)]
        )

    def _verdict(self, entry: Entry, header: memoryview, body: memoryview) -> Judgement:
        try:
            found = describe(header)
            sealer = self._plain if found.cipher is Cipher.PLAIN else self._sealer
            sealer.unseal(entry.key, found.units, header, body)
        except UnjudgedError as error:
            kind = STALE if 0 < version_of(header) < VERSION else UNJUDGED
            return Judgement(kind, f"{error}: {REMEDIES[str(error)]}")
        except DamagedError as error:
            return Judgement(DAMAGED, str(error))
        return Judgement(GOOD) if found.cipher is not Cipher.PLAIN else self._whole


def _room(entry: Entry) -> memoryview:
    try:
        return pages(_padded(entry.bytes))
    except OSError:
        raise TierError(f"{entry.key.text} is {entry.bytes} bytes long, more than the free memory") from None


def _padded(size: int) -> int:
    # rounded up, because a partly written value may have any size
    return max(HEADER_BYTES, -(-size // ALIGN_BYTES) * ALIGN_BYTES)
