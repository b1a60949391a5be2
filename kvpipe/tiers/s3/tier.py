"""The tier in an object store: S3, Google Cloud Storage or Azure. A value is an object named by its key's text.

The store keeps a value until a lifecycle rule of the bucket or a call of `delete` deletes the value. The client runs in
a separate process, `child.py`, with limited memory, because the client reads a store's answers before kvpipe can check
their length. Values pass through memory that both processes share.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any, Final, TypeVar

import anyio
from pydantic import SecretStr

from kvpipe.tiers.base import Capacity, Entry, Get, Key, Put, Read, TierError, TierFullError, Written
from kvpipe.tiers.process import ClientProcess, ClientTier, beside, copy
from kvpipe.tiers.s3.spec import S3Spec

CHILD: Final = Path(__file__).with_name("child.py")
SLOW_BYTES: Final = 4 << 20
"""The bytes that a request must move in each period of `timeout_ms_max`. A slower connection counts as failed."""
KEYS_MAX: Final = 500
"""The largest number of keys in one question. A question must fit into one message of a local socket."""
VALUE_BYTES_MAX: Final = 4 << 30
"""The largest size of a value in bytes. S3 accepts objects of up to 5 GiB in one PUT."""
ASKERS: Final = 8
"""The number of lanes for questions without values. The client sends the requests of one question concurrently."""
START_S_MAX: Final = 20.0
"""The time limit in seconds for a process to start and to load the client from a cold disk."""
UNTRUSTED: Final = "its certificate is not trusted"
"""The beginning of the client's message about a bad certificate.

The client loads the certificate authorities only when its process starts. So new authorities need a new process.
"""
PATIENCE: Final = 4
"""The time limit for one question, in multiples of the client's own limit. A question may need several requests."""
HEALTH_PATIENCE: Final = 3
"""The time limit for a health check, in multiples of `timeout_ms_max`.

After this time the client's process is replaced.
"""

_Asked = TypeVar("_Asked", Get, Put)
_End = TypeVar("_End")


class S3Tier(ClientTier):
    """A `Tier` of objects in a bucket.

    Clients can share a bucket, because objects appear whole and are not overwritten.
    """

    def __init__(self, name: str, spec: S3Spec, keys: dict[str, SecretStr], *, writes: bool) -> None:
        """Make a closed tier. `open` starts its client. `keys` has access key and secret key by the client's names."""
        super().__init__(name, spec.timeout_ms_max)
        self.spec, self._keys, self._writes = spec, keys, writes

    async def open(self) -> None:
        """See `Tier.open`. A running client is kept, unless it must be restarted to load new certificates."""
        async with self._opening, self._notified():
            if self._child is not None and await self._answers():
                return
            await self._drop()
            await self._started(self._start, self.settings(), START_S_MAX)
            try:
                await self._health()
            except BaseException:
                if not self._opened:
                    await self._drop()
                raise
            self._opened = True

    async def _answers(self) -> bool:
        """Return whether the client's process can be kept, because it answers and trusts the store's certificate.

        Raises TierError for any other failure of the health check.
        """
        try:
            await self._health()
        except (ConnectionError, TimeoutError):
            return False
        except TierError as error:
            if UNTRUSTED not in str(error):
                raise
            return False
        return True

    async def _health(self) -> None:
        """Ask the client for the store's health, on a separate lane. Raises TierError if the store does not answer."""
        limit_s = self._limit_s * HEALTH_PATIENCE
        async with self._running().pools["health"].lane(limit_s) as lane:
            await lane.ask(["health"], limit_s)

    def _start(self) -> ClientProcess:
        lanes = self.spec.lanes
        bounds = {"TOKIO_WORKER_THREADS": str(min(lanes, os.cpu_count() or 1)), "MALLOC_ARENA_MAX": "2"}
        stacks = {"RUST_MIN_STACK": str(1 << 20), "RUST_BACKTRACE": "0"}
        counts = {"read": lanes, "write": lanes if self._writes else 0, "ask": ASKERS, "scan": 1, "health": 1}
        return ClientProcess(CHILD, counts, VALUE_BYTES_MAX, {**os.environ, **bounds, **stacks}, cancels=True)

    def settings(self) -> dict[str, Any]:
        """Return the settings that are sent to the client, secrets included."""
        return self.spec.model_dump(include={"url", "endpoint", "region", "allow_http", "lanes", "read_bytes"}) | {
            "name": self.name,
            "keys": {key: value.get_secret_value() for key, value in self._keys.items()},
            "timeout_s": self._limit_s,
            "slow_bytes": SLOW_BYTES,
        }

    # ---- values ---------------------------------------------------------------------------------------------------

    async def exists(self, keys: Sequence[Key]) -> list[bool]:
        """See `Tier.exists`. Each key needs a request, because a listing would contain the values of all engines."""
        async with self._notified():
            return [found for names in self._parts(keys) for found in await self._ask("exists", names)]

    async def delete(self, keys: Sequence[Key]) -> int:
        """See `Tier.delete`."""
        async with self._notified():
            return sum([await self._ask("delete", names) for names in self._parts(dict.fromkeys(keys))])

    def _parts(self, keys: Iterable[Key]) -> list[list[str]]:
        """Return the names of `keys`, divided into lists of at most `KEYS_MAX` names."""
        self._running()
        names = [key.text for key in keys]
        return [names[at : at + KEYS_MAX] for at in range(0, len(names), KEYS_MAX)]

    async def read(self, gets: Sequence[Get]) -> list[Read]:
        """See `Tier.read`."""
        return await self._each(gets, self._read)

    async def _read(self, get: Get) -> Read:
        limit_s = self._patience_s(get.size)
        async with self._running().pools["read"].lane(inf) as lane:
            ended = Read(await lane.ask(["read", get.key.text, get.size], limit_s))
            if ended is Read.HIT:
                await copy(beside(get.into, lane.room(get.size), 0), self._copies)
        return ended

    async def write(self, puts: Sequence[Put]) -> list[Written]:
        """See `Tier.write`."""
        if puts and not self._writes:
            raise TierFullError(f"{self.name}: this process may only look up and read values")
        return await self._each(puts, self._write)

    async def _write(self, put: Put) -> Written:
        limit_s = self._patience_s(put.size)
        async with self._running().pools["write"].lane(inf) as lane:
            await lane.settle(limit_s)
            await copy([(into, part) for part, into in beside(put.parts, lane.room(put.size), 0)], self._copies)
            stored = await lane.ask(["write", put.key.text, put.size], limit_s)
        return Written.STORED if stored else Written.PRESENT

    async def _each(self, asked: Sequence[_Asked], move: Callable[[_Asked], Awaitable[_End]]) -> list[_End]:
        """Move values concurrently. If a move fails, cancel all other moves and raise the failure."""
        ends: dict[int, _End] = {}
        errors: list[Exception] = []

        async def one(at: int, ended: anyio.CancelScope) -> None:
            try:
                ends[at] = await move(asked[at])
            except (TierError, OSError) as error:
                errors.append(error)
                ended.cancel()

        async with self._notified():
            self._running()
            async with anyio.create_task_group() as group:
                for at in range(len(asked)):
                    group.start_soon(one, at, group.cancel_scope)
            if errors:
                raise errors[0]
        return [ends[at] for at in range(len(asked))]

    async def capacity(self) -> Capacity:
        """See `Tier.capacity`. The values are counted by a listing, which takes one request per 1000 values."""
        items = bytes_used = 0
        async for entry in self.scan():
            items += 1
            bytes_used += entry.bytes
        return Capacity(items, bytes_used, None)

    async def scan(self) -> AsyncIterator[Entry]:
        """See `Tier.scan`."""
        limit_s = self._patience_s(0)
        async with self._notified(), self._running().pools["scan"].lane(inf) as lane:
            await lane.ask(["begin_scan"], limit_s)
            while (page := await lane.ask(["scan"], limit_s)) is not None:
                for name, size, age_s in page:
                    with suppress(ValueError):  # the object does not belong to kvpipe
                        yield Entry(Key.parse(name), size, max(0.0, age_s))

    # ---- questions ------------------------------------------------------------------------------------------------

    def _patience_s(self, size: int) -> float:
        """Return how many seconds to wait for the client's process. The client's own limits are shorter.

        Raises TierError if `size` is larger than `VALUE_BYTES_MAX`.
        """
        if size > VALUE_BYTES_MAX:
            raise TierError(
                f"a value of {size} bytes is more than the tier's limit of {VALUE_BYTES_MAX}; lower chunk_tokens"
            )
        return self._limit_s * (1 + size / SLOW_BYTES) * PATIENCE

    async def _ask(self, operation: str, names: Sequence[str]) -> Any:  # noqa: ANN401
        limit_s = self._patience_s(0) + self._limit_s * len(names)
        async with self._running().pools["ask"].lane(inf) as lane:
            return await lane.ask([operation, names], limit_s)
