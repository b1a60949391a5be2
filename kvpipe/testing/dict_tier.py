"""The reference tier, which stores values in a dictionary."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import anyio.lowlevel

from kvpipe.tiers.base import Capacity, Entry, Get, Key, Put, Read, Written


class DictTier:
    """A tier that keeps values in this process and never evicts a value."""

    def __init__(self, name: str = "dict") -> None:
        """Make a tier without values."""
        self.name = name
        self.values: dict[str, bytes] = {}

    async def open(self) -> None:
        """Do nothing, because the dictionary needs no connection."""

    async def exists(self, keys: Sequence[Key]) -> list[bool]:
        """Return, for each key, whether the dictionary has a value."""
        await anyio.lowlevel.checkpoint()
        return [key.text in self.values for key in keys]

    async def read(self, gets: Sequence[Get]) -> list[Read]:
        """Copy each value into its buffers."""
        await anyio.lowlevel.checkpoint()
        return [self._read(get) for get in gets]

    def _read(self, get: Get) -> Read:
        value = self.values.get(get.key.text)
        if value is None:
            return Read.MISS
        if len(value) != get.size:
            return Read.DAMAGED
        at = 0
        for part in get.into:
            part[:] = value[at : at + part.nbytes]
            at += part.nbytes
        return Read.HIT

    async def write(self, puts: Sequence[Put]) -> list[Written]:
        """Store each value whose key the dictionary does not have yet."""
        await anyio.lowlevel.checkpoint()
        out = []
        for put in puts:
            out.append(Written.PRESENT if put.key.text in self.values else Written.STORED)
            if out[-1] is Written.STORED:
                self.values[put.key.text] = b"".join(put.parts)
        return out

    async def delete(self, keys: Sequence[Key]) -> int:
        """Remove values. Returns the number of removed values."""
        return sum(self.values.pop(key.text, None) is not None for key in keys)

    async def capacity(self) -> Capacity:
        """Return the number of values and the sum of their sizes. The tier has no bound."""
        return Capacity(len(self.values), sum(map(len, self.values.values())), None)

    async def health(self) -> None:
        """Do nothing, because the dictionary can always be used."""

    async def scan(self) -> AsyncIterator[Entry]:
        """Yield every key with the size of its value. The ages of values are unknown."""
        for name, value in list(self.values.items()):
            yield Entry(Key.parse(name), len(value), None)

    async def close(self) -> None:
        """Do nothing. The values are kept."""
