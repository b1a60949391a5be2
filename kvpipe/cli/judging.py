"""Verdicts on the values of a tier, for `kvpipe cache`: whole, damaged, or not to be judged from here.

Only damage that is proven is damage. This command may lack a value's encryption key, or be older than the value. Then
the value may be a good one of another engine's.
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
"""No rank's part of a chunk is longer."""
GOOD, GONE, DAMAGED = "good", "gone", "damaged"
STALE, UNJUDGED = "stale", "unjudged"
NOT_ENCRYPTED: Final = "not encrypted"
"""Why of a GOOD value that is plain though a key is named."""
REMEDIES: Final = {
    "encrypted": "name the key",
    "another encryption key": "name the key",
    "newer version": "use the kvpipe of that version",
    "older version": "`kvpipe cache purge --stale` drops it",
    "unknown format": "it is not this version's",
    "another namespace": "it was moved from there",
}


class Judgement(NamedTuple):
    """The verdict on one value. `why`: what is wrong with it, if anything; with the remedy if it is not judged.

    `kind`: GOOD, GONE (deleted meanwhile), DAMAGED, STALE (of a format before this version's), or UNJUDGED.
    """

    kind: str
    why: str = ""

    @property
    def judged(self) -> bool:
        """Whether this version, with the keys that are named, can tell what the value is worth."""
        return self.kind not in {STALE, UNJUDGED}


_LENGTH: Final = Judgement(DAMAGED, "length")


class Judge:
    """Reads values of one tier, `lanes` at once, and judges each. Memory: `lanes` times LARGE_BYTES, or one value."""

    def __init__(self, tier: Tier, spec: TierSpec) -> None:
        """Raises `ConfigError` if the encryption keys that `spec` names cannot be used."""
        secrets = secrets_of(spec)
        self._tier, self._sealer, self._plain = tier, Sealer(secrets), Sealer()
        self._whole = Judgement(GOOD, NOT_ENCRYPTED if secrets else "")
        self._buffers = [pages(HEADER_BYTES) for _ in range(spec.lanes)]

    async def judged(self, batch: list[Entry]) -> list[Judgement]:
        """Return the verdict on each of at most `lanes` values. Larger ones are read alone. Raises `TierError`."""
        small = [entry for entry in batch if entry.bytes <= LARGE_BYTES]
        found = dict(zip(small, await self._verdicts(small, self._buffers), strict=True))
        for entry in batch:
            if entry.bytes > VALUE_BYTES_MAX:  # it is not read, whatever reports that size
                found[entry] = _LENGTH
            elif entry not in found:
                (found[entry],) = await self._verdicts([entry], [_room(entry)])
        return [found[entry] for entry in batch]

    async def _verdicts(self, batch: list[Entry], buffers: list[memoryview]) -> list[Judgement]:
        """Read and judge values. Too short buffers are replaced in `buffers`."""
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
        raise TierError(f"{entry.key.text} is {entry.bytes} bytes long, for which there is no memory here") from None


def _padded(size: int) -> int:
    return max(HEADER_BYTES, -(-size // ALIGN_BYTES) * ALIGN_BYTES)  # a torn value will not fit
