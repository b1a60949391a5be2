"""The tier protocol: the methods of a store of chunks beyond host memory, and the guarantees that a tier must give.

A tier keeps *values*. A value is an opaque byte string of known length under a key. A tier does not use tokens, headers
or checksums. `envelope.py` defines the content of a value, and detects wrong bytes. So a tier may return wrong bytes,
be slow, or be down at any time. A tier must report errors. When a call has ended, the tier must not touch the buffers
that the call received.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeVar, runtime_checkable

import anyio
import anyio.to_thread

from kvpipe.errors import TransferError

if TYPE_CHECKING:
    from kvpipe.transfer.pool import SharedSlots

ALIGN_BYTES: Final = 4096
"""Addresses and lengths of buffers are multiples of this number of bytes, because direct I/O requires alignment."""

_KEY = re.compile(
    r"(?P<namespace>[0-9a-f]{32})-(?P<chunk>(?:[0-9a-f]{2}){16,64})"
    r"-g(?P<group>[0-9]{1,4})-r(?P<rank>[0-9]{1,6})of(?P<ranks>[0-9]{1,6})"
)
_T = TypeVar("_T")


class TierError(TransferError):
    """This error means that a tier is down or slow, refuses the call, or does not match its configuration."""


class TierFullError(TierError):
    """This error means that a tier has no room, or does not permit writes. The tier's values can still be read."""


class Key(NamedTuple):
    """The name of one part of one chunk.

    `namespace` has 32 hex digits: a hash of all inputs except tokens on which the bytes depend (weights, dtype, layout
    …). `chunk` is the hash of the token prefix up to the chunk's end, 16 to 64 bytes. `group` is the KV cache group.
    `rank` is the index of the part, and `ranks` is the number of parts of the chunk (`kvpipe.tiers.parts`).
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
        """Return the key whose `text` property equals `text`. Raises ValueError if `text` is not the name of a key."""
        match = _KEY.fullmatch(text)
        if match is None:
            msg = f"{text!r} is no key of a chunk"
            raise ValueError(msg)
        chunk, numbers = bytes.fromhex(match["chunk"]), (int(match[part]) for part in ("group", "rank", "ranks"))
        key = cls(match["namespace"], chunk, *numbers)
        if key.text != text:  # a number has leading zeros, so that this text is a second name of the key
            msg = f"{text!r} is no key of a chunk"
            raise ValueError(msg)
        return key


class Put(NamedTuple):
    """A value to be written: the concatenation of `parts`.

    The buffers are aligned (`ALIGN_BYTES`). The caller must not change their content during the write.
    """

    key: Key
    parts: tuple[memoryview, ...]

    @property
    def size(self) -> int:
        """Bytes of the value."""
        return sum(part.nbytes for part in self.parts)


class Get(NamedTuple):
    """A value to be read into the writable, aligned (`ALIGN_BYTES`) buffers `into`, which are filled in order.

    The value must be exactly as long as all buffers together. If the read does not end as `Read.HIT`, the content of
    the buffers is undefined.
    """

    key: Key
    into: tuple[memoryview, ...]

    @property
    def size(self) -> int:
        """Bytes of the value."""
        return sum(part.nbytes for part in self.into)


class Read(Enum):
    """How the read of one value ended. `HIT`: the buffers hold the whole value.

    `MISS`: the tier does not have the value. `DAMAGED`: the tier has a value that differs from the written value, or
    from the buffers' length.
    """

    HIT = "hit"
    MISS = "miss"  # the tier does not have the value
    DAMAGED = "damaged"  # the tier has a value that differs from the written value, for example in its length


class Written(Enum):
    """How the write of one value ended. `STORED`: the value was written.

    `PRESENT`: the tier had the value already, wrote nothing, and reset the value's age.
    """

    STORED = "stored"
    PRESENT = "present"  # the tier had the value already


class Capacity(NamedTuple):
    """How many values and bytes a tier holds, as far as the tier knows."""

    items: int
    bytes_used: int
    bytes_max: int | None  # None: no limit is known


class Entry(NamedTuple):
    """One value in a listing of a tier's values."""

    key: Key
    bytes: int
    age_s: float | None  # seconds since the value was written or last used; None: not known


class Tier(Protocol):
    """A store for values. All methods are coroutines on one event loop.

    Calls may run concurrently, except `open` and `close`, which one owner calls.

    A call may be cancelled at any time. A method may raise `TierError` or the cancellation, and no other exception.
    When `read` or `write` has returned, raised, or been cancelled, nothing touches its buffers any more. If a write is
    cancelled or raises, the value is either stored completely or absent, never stored in part. No call waits longer
    than the tier's `timeout_ms_max` while no byte moves. If a client cannot observe moving bytes, the limit is
    `timeout_ms_max` plus a time in proportion to the number of bytes.
    """

    name: str
    """The tier's name in traces, metrics and errors: the tier's kind, with a number if an earlier tier has the kind."""

    async def open(self) -> None:
        """Connect, create folders, and rebuild an index. May be called again after a failure, or after `close`."""

    async def exists(self, keys: Sequence[Key]) -> list[bool]:
        """Return, for each key, whether the tier has a value under it. One call takes one round trip per server."""

    async def read(self, gets: Sequence[Get]) -> list[Read]:
        """Read values directly into their buffers. Returns how each read ended, in the order of `gets`."""

    async def write(self, puts: Sequence[Put]) -> list[Written]:
        """Write values. Returns how each write ended, in the order of `puts`.

        A bounded tier evicts its oldest values to make room. Raises `TierFullError` if the tier cannot make room.
        """

    async def delete(self, keys: Sequence[Key]) -> int:
        """Delete values. Returns how many values the tier had."""

    async def capacity(self) -> Capacity:
        """Return how many values and bytes the tier holds."""

    async def health(self) -> None:
        """Check that the tier can be used. If it cannot be used, raise `TierError` with the reason."""

    def scan(self) -> AsyncIterator[Entry]:
        """Yield an entry for every value that kvpipe stored, in any order. Reads and writes may run in parallel."""

    async def close(self) -> None:
        """Finish the calls in progress, then release all connections and threads. Later calls have no effect.

        A tier must release every resource here, and not only when the process exits.
        """


@runtime_checkable
class Listed(Protocol):
    """A tier that answers `exists` from a listing, which may lack the latest writes of another process."""

    def stored(self, keys: Sequence[Key]) -> None:
        """Add the values of `keys`, which this engine's ranks have written, to the listing. Called on any thread."""


@runtime_checkable
class Noticing(Protocol):
    """A tier that reports the loss of a value. The report may come late, or only during a lookup."""

    on_gone: Callable[[Key], object] | None
    """The tier calls this function, on any thread, for each lost value. None: the tier reports no losses."""


@runtime_checkable
class FillsSlots(Protocol):
    """A tier whose client runs in a process of its own, and can read values into slots that engines share."""

    def share(self, slots: SharedSlots) -> None:
        """Make the client map `slots`. Buffers of reads may lie in these slots. Called before `open`."""


async def blocking(
    limiter: anyio.CapacityLimiter, work: Callable[[], _T], stop: Callable[[], object] | None = None
) -> _T:
    """Run `work` in a thread and return its result, or raise the exception that `work` raises.

    A cancellation calls `stop`, which should make `work` end early, and then waits for the thread. So no thread touches
    a buffer after the coroutine that started the thread has ended.
    """
    ended: list[_T | Exception] = []
    done = anyio.Event()

    async def run() -> None:
        with anyio.CancelScope(shield=True):
            try:
                ended.append(await anyio.to_thread.run_sync(work, limiter=anyio.CapacityLimiter(1)))
            except Exception as error:  # noqa: BLE001  (raised below, so that no exception group wraps it)
                ended.append(error)
            done.set()

    async with limiter, anyio.create_task_group() as group:
        group.start_soon(run)  # started in a task, so that a cancellation before its start starts no thread
        try:
            await done.wait()
        except anyio.get_cancelled_exc_class():
            if stop is not None:
                stop()
            raise  # the task group waits for the thread
    if isinstance(ended[0], Exception):
        raise ended[0]
    return ended[0]
