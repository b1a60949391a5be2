"""The Mooncake tier. Values are in the memory that the members of a Mooncake Store cluster lend to the cluster.

Mooncake's client runs in a separate process, `child.py`. Values pass through memory that both processes share. In the
engine's process, the client would violate the tier protocol:

* The client connects and disconnects while it holds the GIL, for seconds if the master is down.
* A fork of a process that has loaded the client crashes at its exit.
* The client's library installs a second run-time with its own signal handlers.
* The client abandons a transfer without stopping the transfer.
* The client's process opens a port through which the network can access memory.

If engines share slots, the client's process maps the slots, and reads values directly into slots (`SlotFills`).
"""

from __future__ import annotations

import mmap
import os
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import anyio
import anyio.to_thread

from kvpipe.tiers.base import Capacity, Entry, Get, Key, Put, Read, TierError, TierFullError, Written
from kvpipe.tiers.mooncake.fills import SlotFills
from kvpipe.tiers.mooncake.spec import MooncakeSpec
from kvpipe.tiers.process import ClientChannel, ClientProcess, ClientTier, beside, copy

if TYPE_CHECKING:
    from kvpipe.transfer.pool import SharedSlots

CHILD: Final = Path(__file__).with_name("child.py")
ASKERS: Final = 2
"""The number of lanes for questions without values: the number of such questions that can be in progress at once."""
KEYS_MAX: Final = 1000
"""The largest number of keys in one question. A question must fit into one message of a local socket."""
BATCH_BYTES: Final = 32 << 20
"""The largest number of bytes of values in one question. A larger value is read or written by a separate question."""
MOVERS: Final = 2
"""The number of batches in progress per direction: one on the network, and one that is copied from or to buffers."""
SLOWEST_BYTES_S: Final = 16 << 20
"""The lowest rate in bytes per second. A client that moves fewer bytes per second is treated as stalled."""
START_S_MAX: Final = 20.0
"""The time limit in seconds for a process to start and to load the library from a cold disk."""

ALREADY_THERE, FULL, GONE, OTHER_SIZE = -705, -200, frozenset({-703, -704, -707, -710, -712}), -600
CODES: Final = {
    -1: "internal error", -200: "no room", -600: "refused its parameters", -703: "not written yet", -704: "not found",
    -705: "there already", -706: "leased", -708: "being copied", -800: "the transfer failed", -801: "wrong checksum",
    -900: "the master cannot be reached", -901: "the master did not answer in time",
    -1010: "the master is not serving yet",
}  # fmt: skip

_Asked = TypeVar("_Asked", Get, Put)
_End = TypeVar("_End")


class MooncakeTier(ClientTier):
    """A `Tier` on a Mooncake Store cluster. `MooncakeSpec` describes its configuration.

    Values in the segment that this process lends are lost when the process ends. Other values stay until the master
    evicts them.
    """

    def __init__(self, name: str, spec: MooncakeSpec, *, writes: bool) -> None:
        """Make a closed tier. `open` starts its client."""
        super().__init__(name, spec.timeout_ms_max)
        self._spec, self._writes = spec, writes
        self._bytes = Counter[str]()  # bytes in transfer, by direction
        self._fills = SlotFills(self._limit_s)

    def share(self, slots: SharedSlots) -> None:
        """See `FillsSlots`. Slots are used only over TCP, because writes of a network card (RDMA) cannot be stopped."""
        if self._spec.protocol == "tcp":
            self._fills.share(slots)

    async def open(self) -> None:
        """See `Tier.open`. A running client is kept, because the memory that it lends would be lost at its end."""
        async with self._opening, self._notified():
            if self._child is not None:
                with suppress(ConnectionError):  # the client's process has died
                    await self._check()
                    return
                await self._drop()
            host, port = await self._reached()
            await self._started(self._start, self._settings(host, port), START_S_MAX + self._limit_s)
            await self._check()
            self._opened = True

    async def _reached(self) -> tuple[str, int]:
        """Return the master's host and port. Raises TierError if no connection to the master can be made."""
        host, port = self._spec.master.rsplit(":", 1)
        host = host.strip("[]")
        try:
            with anyio.fail_after(self._limit_s):
                await (await anyio.connect_tcp(host, int(port))).aclose()
        except OSError:
            raise TierError(f"the master at {self._spec.master} cannot be reached") from None
        return host, int(port)

    def _start(self) -> ClientProcess:
        spec = self._spec
        lane_bytes = spec.buffer_bytes // (2 * MOVERS) // mmap.PAGESIZE * mmap.PAGESIZE
        counts = {"read": MOVERS, "write": MOVERS if self._writes else 0, "ask": ASKERS, "scan": 1, "revoke": 1}
        return ClientProcess(CHILD, counts, lane_bytes, _environment(spec.timeout_ms_max), log=_log())

    def _settings(self, host: str, port: int) -> dict[str, Any]:
        return self._spec.model_dump(
            include={"master", "metrics", "metadata_server", "local_host", "protocol", "device", "replicas"}
        ) | {
            "host": host,
            "port": port,
            "timeout_s": self._limit_s,
            "segment_bytes": int(self._spec.segment_bytes) if self._writes else 0,
        }

    async def exists(self, keys: Sequence[Key]) -> list[bool]:
        """See `Tier.exists`."""
        async with self._notified():
            codes = await self._each("exists", keys)
            return [bool(_checked(code)) for code in codes]

    async def read(self, gets: Sequence[Get]) -> list[Read]:
        """See `Tier.read`."""
        return await self._batches(gets, self._read)

    async def write(self, puts: Sequence[Put]) -> list[Written]:
        """See `Tier.write`. The master makes room by evicting the least recently used values that are not leased."""
        if puts and not self._writes:
            raise TierFullError(f"{self.name}: this process may only look up and read values")
        return await self._batches(puts, self._write)

    async def delete(self, keys: Sequence[Key]) -> int:
        """See `Tier.delete`."""
        async with self._notified():
            codes = await self._each("delete", keys)
            return sum(code not in GONE and _checked(code) == 0 for code in codes)

    async def capacity(self) -> Capacity:
        """See `Tier.capacity`. The numbers include values of other programs in the cluster.

        Raises TierError if `metrics` is not configured.
        """
        self._needs_metrics()
        async with self._notified():
            return Capacity(*await self._ask("ask", "capacity"))

    async def _check(self) -> None:
        for code in await self._ask("ask", "exists", ["kvpipe"]):
            _checked(code)

    async def scan(self) -> AsyncIterator[Entry]:
        """See `Tier.scan`. Raises TierError if `metrics` is not configured."""
        self._needs_metrics()
        async with self._notified(), self._running().pools["scan"].lane(self._limit_s) as lane:
            await lane.ask(["begin_scan"], self._limit_s)
            while (page := await lane.ask(["scan"], self._limit_s)) is not None:
                keys = [key for key in map(_parsed, page) if key is not None]
                sizes = await lane.ask(["sizes", [key.text for key in keys]], self._limit_s)
                for key, size in zip(keys, sizes, strict=True):
                    if size >= 0:
                        yield Entry(key, size, None)

    # ---- questions ------------------------------------------------------------------------------------------------

    def _needs_metrics(self) -> None:
        self._running()
        if not self._spec.metrics:
            msg = f"{self.name}: the master lists and counts over HTTP only; set `metrics` to its HOST:PORT"
            raise TierError(msg)

    async def _ask(self, use: str, *question: object) -> Any:  # noqa: ANN401
        async with self._running().pools[use].lane(self._limit_s) as lane:
            return await lane.ask([*question], self._limit_s)

    async def _each(self, operation: str, keys: Sequence[Key]) -> list[int]:
        """Ask for `operation` on all keys, `KEYS_MAX` per question. Returns the codes in the order of `keys`."""
        self._running()
        names, codes = [key.text for key in keys], []
        for at in range(0, len(names), KEYS_MAX):
            codes += await self._ask("ask", operation, names[at : at + KEYS_MAX])
        return codes

    # ---- values ---------------------------------------------------------------------------------------------------

    async def _batches(
        self, asked: Sequence[_Asked], move: Callable[[list[_Asked]], Awaitable[list[_End]]]
    ) -> list[_End]:
        """Move all values in concurrent batches. After all batches, raise the error of the first failed batch."""
        async with self._notified():
            batches = _split(asked, self._running().lane_bytes)
            ended: list[list[_End] | Exception] = [[]] * len(batches)

            async def one(at: int) -> None:
                try:
                    ended[at] = await move(batches[at])
                except (TierError, OSError) as error:
                    ended[at] = error

            if len(batches) == 1:
                await one(0)
            else:
                async with anyio.create_task_group() as group:
                    for at in range(len(batches)):
                        group.start_soon(one, at)
            out: list[_End] = []
            for end in ended:
                if isinstance(end, Exception):
                    raise end
                out += end
            return out

    async def _read(self, gets: list[Get]) -> list[Read]:
        sizes, names, copied = [get.size for get in gets], [get.key.text for get in gets], [get.into for get in gets]
        client = self._running()
        places = await self._fills.places(client, gets)
        async with self._moving(client, "read", sizes) as (lane, limit_s):
            if places:
                copied = [get.into[:1] for get in gets]
                head = gets[0].into[0].nbytes
                codes = await self._fills.ask(client, lane, [names, sizes, head, places], limit_s)
            else:
                codes = await lane.ask(["read", names, sizes], limit_s)
            copies, at = [], 0
            for into, size, code in zip(copied, sizes, codes, strict=True):
                room = sum(part.nbytes for part in into)
                if code == size:
                    copies += beside(into, lane.room(at + room), at)
                at += room
            await copy(copies, self._copies)
        return [_read_as(code, size) for code, size in zip(codes, sizes, strict=True)]

    async def _write(self, puts: list[Put]) -> list[Written]:
        sizes = [put.size for put in puts]
        async with self._moving(self._running(), "write", sizes) as (lane, limit_s):
            await lane.settle(limit_s)
            copies, at = [], 0
            for put in puts:
                copies += [(into, part) for part, into in beside(put.parts, lane.room(sum(sizes)), at)]
                at += put.size
            await copy(copies, self._copies)
            codes = await lane.ask(["write", [put.key.text for put in puts], sizes], limit_s)
        return [Written.PRESENT if _checked(code) else Written.STORED for code in codes]

    @asynccontextmanager
    async def _moving(
        self, client: ClientProcess, use: str, sizes: Sequence[int]
    ) -> AsyncIterator[tuple[ClientChannel, float]]:
        """Yield a lane for values, and the limit of each wait in seconds. The limit covers all batches in progress."""
        size = sum(sizes)
        self._bytes[use] += size
        try:
            limit_s = self._limit_s + self._bytes[use] / SLOWEST_BYTES_S
            async with client.pools[use].lane(limit_s) as lane:
                yield lane, limit_s
        finally:
            self._bytes[use] -= size


def _split(asked: Sequence[_Asked], bytes_max: int) -> list[list[_Asked]]:
    """Divide `asked` into batches of consecutive values. Raises TierError for a value larger than `bytes_max`."""
    batches: list[list[_Asked]] = []
    room, keys = 0, set[Key]()
    for one in asked:
        size = one.size
        if size > bytes_max:
            msg = f"a value of {size} bytes is more than a quarter of buffer_bytes, {bytes_max}; raise buffer_bytes"
            raise TierError(msg)
        # a key may be in a batch only once, because the client would fill only one of the two buffers
        again = one.key in keys
        if size > room or len(keys) == KEYS_MAX or again:
            batches.append([])
            keys.clear()
            room = max(min(BATCH_BYTES, bytes_max), size)
        batches[-1].append(one)
        keys.add(one.key)
        room -= size
    return batches


def _parsed(name: str) -> Key | None:
    """Return the key whose text is `name`, or None if the value does not belong to kvpipe."""
    try:
        return Key.parse(name)
    except ValueError:
        return None


def _checked(code: int) -> int:
    """Return `code` if it means success, or 1 if the cluster already has the value. Otherwise raise TierError."""
    if code == ALREADY_THERE:
        return 1
    if code == FULL:
        msg = "the cluster has no room: its members lend too little memory, or every value was used just now"
        raise TierFullError(msg)
    if code < 0:
        raise TierError(f"{CODES.get(code, 'failed')} (code {code})")
    return code


def _read_as(code: int, size: int) -> Read:
    if code in GONE:
        return Read.MISS
    if code == OTHER_SIZE:  # the value is longer than its buffer
        return Read.DAMAGED
    return Read.HIT if _checked(code) == size else Read.DAMAGED


def _environment(timeout_ms: int) -> dict[str, str]:
    """Return the environment of the client, which limits its waits and its log. Variables set by the user are kept."""
    seconds = str(-(-timeout_ms // 1000))
    bounds = dict.fromkeys(("MC_RPC_TIMEOUT_MS", "MC_RPC_CONNECT_TIMEOUT_MS"), str(timeout_ms))
    waits = ("MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TCP_STATUS_TIMEOUT_SEC", "MC_HANDSHAKE_CONNECT_TIMEOUT")
    quiet = {"MC_STORE_CLIENT_METRIC": "0", "MC_STORE_CLIENT_SETUP_RETRIES": "3"}
    no_device = {"CUDA_VISIBLE_DEVICES": ""}  # an empty list, so that the client uses no GPU memory
    return bounds | dict.fromkeys(waits, seconds) | quiet | os.environ | no_device


def _log() -> int | None:
    """Return the destination of the client's log. The log is discarded unless the user has set its level."""
    return None if "MC_LOG_LEVEL" in os.environ else subprocess.DEVNULL
