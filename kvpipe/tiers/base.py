"""The tier protocol: the calls to a place beyond host memory that keeps chunks, and what it must guarantee.

A tier keeps *values*: opaque bytes of a known length under a key. It knows nothing of tokens, headers or checksums.
`envelope.py` defines what a value contains, and detects a tier that returns other bytes than were written. So a tier
may be wrong, slow or gone at any time. It must report errors, and never touch a buffer after the call that got it.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Sequence
from enum import Enum
from typing import Final, NamedTuple, Protocol, TypeVar, runtime_checkable

import anyio
import anyio.to_thread

from kvpipe.errors import TransferError

ALIGN_BYTES: Final = 4096
"""Addresses and lengths of buffers are multiples of so many bytes, as direct I/O requires."""

_KEY = re.compile(
    r"(?P<namespace>[0-9a-f]{32})-(?P<chunk>(?:[0-9a-f]{2}){16,64})"
    r"-g(?P<group>[0-9]{1,4})-r(?P<rank>[0-9]{1,6})of(?P<ranks>[0-9]{1,6})"
)
_T = TypeVar("_T")


class TierError(TransferError):
    """The tier cannot be used now: it is down, slow, refuses, or is not what its configuration describes."""


class TierFullError(TierError):
    """The tier has no room, or may not be written to. What it holds can still be read."""


class Key(NamedTuple):
    """One part of one chunk.

    `namespace`: 32 hex digits, what the bytes depend on beside the tokens (weights, dtype, layout, ranks …).
    `chunk`: hash of the token prefix up to the chunk's end, 16 to 64 bytes.
    `group`: KV cache group. `rank`, `ranks`: which part, of how many (`kvpipe.tiers.parts`).
    """

    namespace: str
    chunk: bytes
    group: int
    rank: int
    ranks: int

    @property
    def text(self) -> str:
        """The key as a name: lower-case letters, digits and '-' only, at most 190 characters."""
        return f"{self.namespace}-{self.chunk.hex()}-g{self.group}-r{self.rank}of{self.ranks}"

    @classmethod
    def parse(cls, text: str) -> Key:
        """Return the key whose `text` this is. Raises ValueError if it is none."""
        match = _KEY.fullmatch(text)
        if match is None:
            msg = f"{text!r} is no key of a chunk"
            raise ValueError(msg)
        chunk, numbers = bytes.fromhex(match["chunk"]), (int(match[part]) for part in ("group", "rank", "ranks"))
        key = cls(match["namespace"], chunk, *numbers)
        if key.text != text:  # a number with leading zeros: two names for one key
            msg = f"{text!r} is no key of a chunk"
            raise ValueError(msg)
        return key


class Put(NamedTuple):
    """A value to be written: the concatenation of `parts`, which are aligned (`ALIGN_BYTES`) and must not change."""

    key: Key
    parts: tuple[memoryview, ...]

    @property
    def size(self) -> int:
        """Bytes of the value."""
        return sum(part.nbytes for part in self.parts)


class Get(NamedTuple):
    """A value to be read into the writable, aligned (`ALIGN_BYTES`) buffers `into`, one after the other.

    The value must be exactly as long as all of them together. Unless the read ends as `Read.HIT`, their content is
    undefined.
    """

    key: Key
    into: tuple[memoryview, ...]

    @property
    def size(self) -> int:
        """Bytes of the value."""
        return sum(part.nbytes for part in self.into)


class Read(Enum):
    """How the read of one value ended."""

    HIT = "hit"
    MISS = "miss"  # not there
    DAMAGED = "damaged"  # there, but it cannot be what was written: of another length, for one


class Written(Enum):
    """How the write of one value ended."""

    STORED = "stored"
    PRESENT = "present"  # it was there already: nothing was written, its age is renewed


class Capacity(NamedTuple):
    """How many values and bytes a tier holds, as far as it knows."""

    items: int
    bytes_used: int
    bytes_max: int | None  # None: it has no limit that it knows of


class Entry(NamedTuple):
    """One value in a listing."""

    key: Key
    bytes: int
    age_s: float | None  # seconds since it was written or last used; None: the tier does not know


class Tier(Protocol):
    """A place for values. All methods are coroutines on one event loop.

    They may run concurrently, except `open` and `close`, which one owner calls.

    Every method may raise `TierError`, and nothing else but a cancellation. All may be cancelled at any time. When
    `read` or `write` has returned, raised, or been cancelled, nothing touches its buffers any more. A value whose write
    did not return is either wholly there or not there at all, never torn. No call waits longer than the tier's
    `timeout_ms_max` without a byte moving; where a client cannot see bytes move, than that plus a time in proportion to
    the bytes.
    """

    name: str
    """Its name in traces, metrics and errors: its kind; from the second tier of a kind on, with a number."""

    async def open(self) -> None:
        """Connect; make folders; rebuild an index. May be called again after a failure, or after `close`."""

    async def exists(self, keys: Sequence[Key]) -> list[bool]:
        """Return, for each key, whether its value is there. It takes one round trip per server."""

    async def read(self, gets: Sequence[Get]) -> list[Read]:
        """Read values directly into their buffers. Returns how each read ended, in the order of `gets`."""

    async def write(self, puts: Sequence[Put]) -> list[Written]:
        """Write values. Returns how each write ended, in the order of `puts`.

        A bounded tier drops its oldest values to make room. Raises `TierFullError` if there is none.
        """

    async def delete(self, keys: Sequence[Key]) -> int:
        """Delete values. Returns how many were there."""

    async def capacity(self) -> Capacity:
        """Return how many values and bytes are held."""

    async def health(self) -> None:
        """Return soon if the tier can be used. Raises `TierError` with the reason if not."""

    def scan(self) -> AsyncIterator[Entry]:
        """Yield an entry for every value of kvpipe's, in any order, while others may read and write."""

    async def close(self) -> None:
        """Finish the calls under way, release connections and threads. Idempotent. Nothing is left to process exit."""


@runtime_checkable
class Listed(Protocol):
    """A tier that answers `exists` from a listing, which may be older than the last write of another process."""

    def stored(self, keys: Sequence[Key]) -> None:
        """Add values that this engine's ranks have written to the listing. On any thread."""


async def blocking(
    limiter: anyio.CapacityLimiter, work: Callable[[], _T], stop: Callable[[], object] | None = None
) -> _T:
    """Run `work` in a thread and return its result, or raise what it raises.

    A cancellation calls `stop`, which should make `work` end soon, and waits for the thread. So no thread touches a
    buffer after its coroutine has ended.
    """
    ended: list[_T | Exception] = []
    done = anyio.Event()

    async def run() -> None:
        with anyio.CancelScope(shield=True):
            try:
                ended.append(await anyio.to_thread.run_sync(work, limiter=anyio.CapacityLimiter(1)))
            except Exception as error:  # noqa: BLE001  (raised below, not wrapped in a group)
                ended.append(error)
            done.set()

    async with limiter, anyio.create_task_group() as group:
        group.start_soon(run)  # a task that is cancelled before it has begun never runs: then nothing was begun
        try:
            await done.wait()
        except anyio.get_cancelled_exc_class():
            if stop is not None:
                stop()
            raise  # the group waits for the thread
    if isinstance(ended[0], Exception):
        raise ended[0]
    return ended[0]
