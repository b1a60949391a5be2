"""A tier that needs no entry in `limits`: it has a bound, works in threads, and can fail like an external store."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import anyio
from pydantic import ByteSize, Field, PrivateAttr

from kvpipe.inputs.values import Size
from kvpipe.testing.tier_conformance import TierWorld
from kvpipe.tiers.base import Capacity, Entry, Get, Key, Put, Read, TierError, TierFullError, Written, blocking
from kvpipe.tiers.spec import TierSpec

OLDER_S = 120
T = TypeVar("T")


class Value(NamedTuple):
    """A value and the time of its last use."""

    bytes: bytes
    used_s: float


@dataclass
class Shelf:
    """The store that all clients share.

    While it is `broken`, every use of it raises an exception of the store's own type.
    """

    values: dict[str, Value] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)
    broken: bool = False

    @contextmanager
    def used(self) -> Iterator[dict[str, Value]]:
        """Lock the values for the context."""
        if self.broken:
            raise ConnectionResetError("the shelf has fallen")
        with self.lock:
            yield self.values

    @contextmanager
    def fallen(self) -> Iterator[None]:
        """Break the shelf during the context."""
        self.broken = True
        yield
        self.broken = False

    def age(self) -> None:
        """Make every value older."""
        for name, value in self.values.items():
            self.values[name] = value._replace(used_s=value.used_s - OLDER_S)


class WholeTier:
    """A tier on a shelf. Subclasses override one method to add a bug."""

    def __init__(self, shelf: Shelf, bytes_max: int) -> None:
        """Start without opening anything."""
        self.name, self.shelf, self.bytes_max = "whole", shelf, bytes_max
        self._limiter, self._fd = anyio.CapacityLimiter(4), -1

    async def open(self) -> None:
        """See `Tier.open`."""
        if self._fd < 0:
            self._fd = os.open(os.devnull, os.O_RDONLY)
        await self.health()

    async def exists(self, keys: Sequence[Key]) -> list[bool]:
        """See `Tier.exists`."""
        return await self._each(self._exists, keys)

    async def read(self, gets: Sequence[Get]) -> list[Read]:
        """See `Tier.read`."""
        return await self._each(self._read, gets)

    async def write(self, puts: Sequence[Put]) -> list[Written]:
        """See `Tier.write`."""
        return await self._each(self._write, puts)

    async def delete(self, keys: Sequence[Key]) -> int:
        """See `Tier.delete`."""
        return sum(await self._each(self._delete, keys))

    async def capacity(self) -> Capacity:
        """See `Tier.capacity`."""
        (values,) = await self._each(self._all, [None])
        return Capacity(len(values), sum(len(value.bytes) for _, value in values), self.bytes_max)

    async def health(self) -> None:
        """See `Tier.health`."""
        await self._each(self._all, [None])

    async def scan(self) -> AsyncIterator[Entry]:
        """See `Tier.scan`."""
        (values,) = await self._each(self._all, [None])
        for name, value in values:
            yield Entry(Key.parse(name), len(value.bytes), time.time() - value.used_s)

    async def close(self) -> None:
        """See `Tier.close`."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    async def _each(self, work: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
        if self._fd < 0:
            raise TierError("it is not open")
        stop = threading.Event()
        try:
            return await self._in_thread(lambda: [work(item) for item in items if not stop.is_set()], stop.set)
        except OSError as error:
            raise self._failed(error) from None

    def _failed(self, error: OSError) -> Exception:
        return TierError(str(error))

    async def _in_thread(self, work: Callable[[], T], stop: Callable[[], None]) -> T:
        return await blocking(self._limiter, work, stop)

    def _all(self, _: object) -> list[tuple[str, Value]]:
        with self.shelf.used() as values:
            return list(values.items())

    def _exists(self, key: Key) -> bool:
        with self.shelf.used() as values:
            return key.text in values

    def _delete(self, key: Key) -> bool:
        with self.shelf.used() as values:
            return values.pop(key.text, None) is not None

    def _read(self, get: Get) -> Read:
        with self.shelf.used() as values:
            found = values.get(get.key.text)
        if found is None:
            return Read.MISS
        if len(found.bytes) != get.size:
            return Read.DAMAGED
        at = 0
        for part in get.into:
            part[:] = found.bytes[at : at + part.nbytes]
            at += part.nbytes
        return Read.HIT

    def _write(self, put: Put) -> Written:
        whole = b"".join(put.parts)
        with self.shelf.used() as values:
            if put.key.text in values:
                self._renew(put.key.text, values)
                return Written.PRESENT
            self._make_room(put.size, values)
            values[put.key.text] = Value(whole, time.time())
            return Written.STORED

    def _renew(self, name: str, values: dict[str, Value]) -> None:
        values[name] = values[name]._replace(used_s=time.time())

    def _make_room(self, size: int, values: dict[str, Value]) -> None:
        if size > self.bytes_max:
            raise TierFullError(f"a value of {size} bytes is more than bytes_max={self.bytes_max}")
        used = sum(len(value.bytes) for value in values.values())
        while used + size > self.bytes_max:
            oldest = min(values, key=lambda name: values[name].used_s)
            used -= len(values.pop(oldest).bytes)


class WholeSpec(TierSpec):
    """The configuration of a tier on one shelf."""

    kind: Literal["whole"] = "whole"
    bytes_max: Annotated[Size, Field(gt=0)] = ByteSize(1 << 30)
    _shelf: Shelf = PrivateAttr(default_factory=Shelf)
    _client: type[WholeTier] = WholeTier

    def make(self, name: str, *, writes: bool = True) -> WholeTier:  # noqa: ARG002
        """See `TierSpec.make`."""
        return self._client(self._shelf, int(self.bytes_max))


def whole_world(client: type[WholeTier] = WholeTier) -> TierWorld:
    """Return an empty shelf. All its clients have the same bug, or no bug."""
    spec = WholeSpec.model_validate({})
    spec._client = client
    return TierWorld(partial(spec.make, "whole"), spec, broken=spec._shelf.fallen, older=spec._shelf.age)
