"""The servers of a Redis or Valkey tier: their reusable connections, and the mapping from keys to servers."""

from __future__ import annotations

import random
import re
from binascii import crc_hqx
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, Literal, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread

from kvpipe.tiers import hosts
from kvpipe.tiers.base import TierError, TierFullError, blocking
from kvpipe.tiers.redis.resp import (
    ASKING,
    SHORT,
    ErrorReply,
    Reply,
    ReplyBounds,
    ServerConnection,
    command,
    connection_reason,
    per_name,
)
from kvpipe.tiers.redis.spec import RedisSpec

SLOTS: Final = 16384
"""The number of hash slots of a cluster. A key's CRC selects its slot, and each slot belongs to a primary."""
ASK_LANES: Final = 2
"""The number of connections per server for commands without values. Such commands do not wait for values."""
PROBES_MAX: Final = 4
"""The largest number of servers that are asked at once for the cluster's layout."""

SERVERS_MAX: Final = 1000
"""The largest number of primaries of a cluster."""
LAYOUT: Final = ReplyBounds(items=200_000, bytes=8 << 20, depth=5)

_MOVED: Final = frozenset({"MOVED", "CLUSTERDOWN"})
_ASK: Final = "ASK"
_HOST: Final = re.compile(r"[A-Za-z0-9_.:%-]{1,255}")
_THERE: Final = re.compile(r"ASK [0-9]{1,5} (?P<host>[A-Za-z0-9_.:%\[\]-]{0,255}):(?P<port>[0-9]{1,5})")
_FULL: Final = frozenset({"OOM", "READONLY", "MISCONF", "NOREPLICAS"})
_REMEDIES: Final = {
    "NOAUTH": "the server requires a password; set password_env or password_file",
    "WRONGPASS": "the server refuses username and password; correct username, or the password that password_env or "
    "password_file names",
    "NOPERM": "the server's user may not run this command; allow the user +ping +select +get +set +expire +touch "
    "+exists +unlink +strlen +object|idletime +pttl +scan +dbsize +info, and in a cluster +cluster|slots",
}
_T = TypeVar("_T")
_Ask = Callable[["Server", Sequence[int], bytes], Awaitable[list[Reply]]]


class Server:
    """One server and its connections. A connection is made when a call needs it, and kept for later calls."""

    def __init__(self, where: str, host: str, lane: Callable[[], ServerConnection], spec: RedisSpec) -> None:
        """Make a server without connections. `where` is the server's name in errors."""
        self.where, self.host = where, host
        self._lane, self._timeout_s = lane, spec.timeout_ms_max / 1000
        self._lanes = spec.lanes
        self.reads, self.writes = anyio.Semaphore(spec.lanes), anyio.Semaphore(spec.lanes)
        self._asks = anyio.Semaphore(ASK_LANES)
        self._threads = anyio.CapacityLimiter(2 * spec.lanes + ASK_LANES)
        self._idle: list[ServerConnection] = []
        self._connecting: set[ServerConnection] = set()  # includes connections of cancelled calls
        self._closed = False

    async def ask(self, commands: bytes, count: int, shape: ReplyBounds = SHORT) -> list[Reply]:
        """Send `count` commands in one batch and return their replies. `shape` limits the replies. Raises TierError."""
        return await self.use(self._asks, lambda lane: lane.ask(commands, count, shape))

    async def use(self, gate: anyio.Semaphore, work: Callable[[ServerConnection], _T]) -> _T:
        """Acquire `gate`, then run `work` with a connection in a thread. Raises TierError.

        A connection is reused only if `work` has ended without an exception.
        """
        async with gate:
            lane = self._kept() or await self._connect()
            try:
                result = await blocking(self._threads, partial(work, lane), lane.stop)
            except BaseException as error:
                lane.close()
                if not isinstance(error, OSError):
                    raise
                self._drop()  # the idle connections have probably failed, too
                await anyio.lowlevel.checkpoint_if_cancelled()
                raise TierError(f"{self.where}: {connection_reason(error)}") from None
            self._idle.append(lane)
            if self._closed:
                self._drop()
            return result

    async def bulk(
        self,
        use: Literal["reads", "writes"],
        at: Iterable[int],
        one: Callable[[ServerConnection, int], Reply],
        asking: bytes,
    ) -> list[Reply]:
        """Run `one` for each index over one connection, because several connections would not be faster.

        If `asking` is not empty, this command is sent before each call of `one`.
        """

        def each(lane: ServerConnection, index: int) -> Reply:
            if lane.closed:  # the previous value was too long, so its connection was closed
                lane.connect()
            if asking:
                lane.ask(asking, 1)
            return one(lane, index)

        return await self.use(getattr(self, use), lambda lane: [each(lane, index) for index in at])

    def retire(self) -> None:
        """Close idle connections now, and each connection in use at the end of its work."""
        self._closed = True
        self._drop()

    async def close(self) -> None:
        """Wait for the calls in progress, and disconnect."""
        self.retire()
        for gate, count in ((self.reads, self._lanes), (self.writes, self._lanes), (self._asks, ASK_LANES)):
            for _ in range(count):
                await gate.acquire()

    def _drop(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _kept(self) -> ServerConnection | None:
        while self._idle:
            lane = self._idle.pop()
            if lane.usable:
                return lane
            lane.close()
        return None

    async def _connect(self) -> ServerConnection:
        if len(self._connecting) >= self._threads.total_tokens:
            raise TierError(f"{self.where}: too many connections are being made; its name may take long to resolve")
        lane = self._lane()

        def connect() -> None:
            self._connecting.add(lane)
            try:
                lane.connect()
            finally:
                self._connecting.discard(lane)

        try:
            with anyio.fail_after(self._timeout_s):  # needed for name resolution, which has no time limit of its own
                await anyio.to_thread.run_sync(connect, abandon_on_cancel=True, limiter=self._threads)
        except BaseException as error:
            lane.stop()
            if not isinstance(error, OSError):
                raise
            raise TierError(f"{self.where}: no connection: {_explained(connection_reason(error))}") from None
        return lane


class Servers:
    """The configured server, or all primaries of its cluster."""

    def __init__(self, name: str, spec: RedisSpec, lane: Callable[[str, int], ServerConnection]) -> None:
        """Make closed servers. `name` is the tier's name. `lane` makes an unconnected connection for (host, port)."""
        self.name, self._cluster, self._spec, self._lane = name, spec.cluster, spec, lane
        self._servers: dict[tuple[str, int], Server] = {}
        """All known servers, the configured server first. The dict is empty before `open` and after `close`."""
        self._slots: list[Server | None] = []  # the primary of each hash slot, or [] if the layout is not known
        self._layout = anyio.Lock()

    async def open(self) -> None:
        """Open without connecting. May be called again after `close`."""
        await self.close()
        at = (self._spec.host, self._spec.port)
        self._servers = {at: self._make(*at)}

    async def close(self) -> None:
        """Finish the calls in progress, and disconnect."""
        servers, self._servers, self._slots = self._servers, {}, []
        for server in servers.values():
            await server.close()

    async def each(self, names: Sequence[bytes], verb: bytes, *options: bytes) -> list[Reply]:
        """Send one command per name, in one batch per server. Raises TierError if a server refuses a command."""

        async def ask(server: Server, at: Sequence[int], asking: bytes) -> list[Reply]:
            commands = per_name(verb, [names[index] for index in at], *options, before=asking)
            each = 2 if asking else 1  # the number of replies per name; the last reply answers the command
            return (await server.ask(commands, len(at) * each))[each - 1 :: each]

        replies = await self.spread(names, ask)
        for reply in replies:
            if isinstance(reply, ErrorReply):
                raise self.refused(reply)
        return replies

    async def spread(self, names: Sequence[bytes], ask: _Ask) -> list[Reply]:
        """Call `ask` for every server with the indices of the names that the server has.

        If a reply shows that the layout is outdated, the layout is read again, but only once. If a name's slot is being
        migrated and the name has moved already, `ask` is called for the new server. The stored layout then stays
        unchanged.
        """
        everything = range(len(names))
        if not self._cluster:
            (server,) = await self.primaries()
            return await ask(server, everything, b"") if names else []
        replies = await self._by_slot(names, everything, ask)
        if moved := [index for index in everything if getattr(replies[index], "code", "") in _MOVED]:
            self._slots = []
            replies |= await self._by_slot(names, moved, ask)
        if moving := [index for index in everything if getattr(replies[index], "code", "") == _ASK]:
            replies |= await self._meanwhile(names, moving, replies, ask)
        return [replies[index] for index in everything]

    async def _by_slot(self, names: Sequence[bytes], indices: Sequence[int], ask: _Ask) -> dict[int, Reply]:
        await self._refresh()
        homes: dict[Server, list[int]] = {}
        for index in indices:
            homes.setdefault(self._home(names[index]), []).append(index)
        return await self._at(homes, ask, b"")

    async def _meanwhile(
        self, names: Sequence[bytes], indices: Sequence[int], replies: dict[int, Reply], ask: _Ask
    ) -> dict[int, Reply]:
        """Follow ASK redirections: call `ask` for the server to which a name's slot is being migrated."""
        homes: dict[Server, list[int]] = {}
        for index in indices:
            message = _THERE.fullmatch(str(replies[index]))
            if message is None:
                raise self.odd("ASK")
            place = (message["host"].strip("[]") or self._home(names[index]).host, int(message["port"]))
            homes.setdefault(self._reach(place, self._servers), []).append(index)
        return await self._at(homes, ask, ASKING)

    def _home(self, name: bytes) -> Server:
        slot = crc_hqx(name, 0) % SLOTS  # the CRC of the whole name, because no name has braces
        server = self._slots[slot] if self._slots else None
        if server is None:
            raise TierError(f"{self.name}: no server of the cluster has slot {slot}")
        return server

    async def _at(self, homes: dict[Server, list[int]], ask: _Ask, asking: bytes) -> dict[int, Reply]:
        replies: dict[int, Reply] = {}

        async def part(server: Server) -> None:
            replies.update(zip(homes[server], await ask(server, homes[server], asking), strict=True))

        await self._together(part, homes)
        return replies

    async def everywhere(self, commands: bytes, count: int, shape: ReplyBounds = SHORT) -> list[list[Reply]]:
        """Send the same commands to all primaries, and return the replies of each primary."""
        out: list[list[Reply]] = []

        async def part(server: Server) -> None:
            out.append([self.done(reply) for reply in await server.ask(commands, count, shape)])

        await self._together(part, await self.primaries())
        return out

    async def _together(self, part: Callable[[Server], Awaitable[None]], servers: Iterable[Server]) -> None:
        """Run `part` for all servers concurrently until every call has ended. Raises the first TierError.

        After an error the next call reads the layout again.
        """
        errors: list[TierError] = []

        async def one(server: Server) -> None:
            try:
                await part(server)
            except TierError as error:
                errors.append(error)

        async with anyio.create_task_group() as group:
            for server in servers:
                group.start_soon(one, server)
        if errors:
            self._slots = []
            raise errors[0]

    async def primaries(self) -> list[Server]:
        """Return the servers that store values. Raises TierError."""
        if not self._cluster:
            return [self._first()]
        await self._refresh()
        return list(dict.fromkeys(server for server in self._slots if server is not None))

    def _first(self) -> Server:
        for server in self._servers.values():
            return server
        raise TierError(f"{self.name}: it is not open")

    async def _refresh(self) -> None:
        """Ask servers for the mapping from slots to servers, if the mapping is not known."""
        async with self._layout:
            if self._slots:
                return
            first, others = self._first(), [*self._servers.values()][1:]
            found: list[tuple[Server, Reply]] = []
            errors: list[TierError] = []

            async def probe(server: Server) -> None:
                try:
                    (reply,) = await server.ask(command(b"CLUSTER", b"SLOTS"), 1, LAYOUT)
                    found.append((server, self.done(reply)))
                except TierError as error:
                    errors.append(error)
                else:
                    group.cancel_scope.cancel()

            async with anyio.create_task_group() as group:
                for server in (first, *random.sample(others, min(len(others), PROBES_MAX - 1))):  # any reply is enough
                    group.start_soon(probe, server)
            if not found:
                raise errors[0]
            self._lay_out(*found[0])

    def _lay_out(self, asked: Server, layout: Any) -> None:  # noqa: ANN401  (checked here)
        slots: list[Server | None] = [None] * SLOTS
        servers = {(self._spec.host, self._spec.port): self._first()}
        taken = 0
        try:
            for low, high, (host, port, *_), *_ in layout:
                place = (asked.host if host in {None, b"", b"?"} else host.decode("ascii"), port)
                if not (0 <= low <= high < SLOTS and isinstance(port, int) and _HOST.fullmatch(place[0])):
                    raise ValueError  # noqa: TRY301
                taken += high - low + 1
                if taken > SLOTS:  # the layout is wrong: some slot has two primaries
                    raise ValueError  # noqa: TRY301
                slots[low : high + 1] = [self._reach(place, servers)] * (high - low + 1)
        except (TypeError, ValueError, AttributeError):
            raise self.odd("CLUSTER SLOTS") from None
        if not any(slots):
            raise TierError(f"{self.name}: no server of the cluster has any slots")
        for place, server in self._servers.items():
            if place not in servers:
                server.retire()
        self._servers, self._slots = servers, slots

    def _reach(self, place: tuple[str, int], servers: dict[tuple[str, int], Server]) -> Server:
        """Return the server at `place`, which the cluster has named, and add it to `servers`. Raises TierError."""
        host, port = place
        if place not in servers:
            if not 0 < port < 1 << 16 or len(servers) >= SERVERS_MAX:
                raise self.odd("CLUSTER SLOTS")
            if not self._trusted(host):
                raise TierError(
                    f"{self.name}: the cluster names {host}:{port}, which is not {self._spec.host} and not in "
                    "cluster_hosts, so the password is not sent to it; list the cluster's hosts in cluster_hosts"
                )
            servers[place] = self._servers.get(place) or self._make(*place)
        return servers[place]

    def _trusted(self, host: str) -> bool:
        """Whether kvpipe may connect to `host`, which receives the password. Without a password any host is trusted."""
        spec = self._spec
        secret = spec.password_env or spec.password_file is not None
        return not secret or host == spec.host or hosts.among(host, spec.cluster_hosts)

    def _make(self, host: str, port: int) -> Server:
        return Server(f"{self.name} at {host}:{port}", host, partial(self._lane, host, port), self._spec)

    def odd(self, verb: str) -> TierError:
        """Return the error for a reply to the command `verb` that has an unexpected form."""
        return TierError(f"{self.name}: the answer to {verb} cannot be read")

    def done(self, reply: Reply) -> Reply:
        """Return `reply`. Raises TierError if `reply` is an error reply."""
        if isinstance(reply, ErrorReply):
            raise self.refused(reply)
        return reply

    def refused(self, reply: ErrorReply) -> TierError:
        """Return the error to raise for an error reply."""
        kind = TierFullError if reply.code in _FULL else TierError
        if reply.code == "MOVED" and not self._cluster:
            return kind(f"{self.name}: {reply} (the server belongs to a cluster; set cluster to true)")
        return kind(f"{self.name}: {_explained(reply)}")


def _explained(text: str) -> str:
    remedy = _REMEDIES.get(text.partition(" ")[0])
    return f"{text} ({remedy})" if remedy else text
