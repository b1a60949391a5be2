"""The servers of a Redis or Valkey tier: connections, kept while they are good, and which server has which keys."""

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
    per_name,
    reason,
)
from kvpipe.tiers.redis.spec import RedisSpec

SLOTS: Final = 16384
"""A cluster maps each key to one of so many hash slots, by its CRC, and each slot to a primary."""
ASK_LANES: Final = 2
"""Connections per server for commands without values, so that these do not wait for megabytes."""
PROBES_MAX: Final = 4
"""Servers that are asked at once for the cluster's layout."""

SERVERS_MAX: Final = 1000
"""Primaries of a cluster."""
LAYOUT: Final = ReplyBounds(items=200_000, bytes=8 << 20, depth=5)

_MOVED: Final = frozenset({"MOVED", "CLUSTERDOWN"})
_ASK: Final = "ASK"
_HOST: Final = re.compile(r"[A-Za-z0-9_.:%-]{1,255}")
_THERE: Final = re.compile(r"ASK [0-9]{1,5} (?P<host>[A-Za-z0-9_.:%\[\]-]{0,255}):(?P<port>[0-9]{1,5})")
_FULL: Final = frozenset({"OOM", "READONLY", "MISCONF", "NOREPLICAS"})
_REMEDIES: Final = {
    "NOAUTH": "it wants a password; set password_env or password_file",
    "WRONGPASS": "it does not take username and password; correct what password_env or password_file names",
    "NOPERM": "its user may not do this; docs/tiers.md lists the commands that are used",
}
_T = TypeVar("_T")
_Ask = Callable[["Server", Sequence[int], bytes], Awaitable[list[Reply]]]


class Server:
    """One server: its connections, which are made when they are wanted, and kept."""

    def __init__(self, where: str, host: str, lane: Callable[[], ServerConnection], spec: RedisSpec) -> None:
        """Do not connect yet. `where`: what it is called in errors."""
        self.where, self.host = where, host
        self._lane, self._timeout_s = lane, spec.timeout_ms_max / 1000
        self._lanes = spec.lanes
        self.reads, self.writes = anyio.Semaphore(spec.lanes), anyio.Semaphore(spec.lanes)
        self._asks = anyio.Semaphore(ASK_LANES)
        self._threads = anyio.CapacityLimiter(2 * spec.lanes + ASK_LANES)
        self._idle: list[ServerConnection] = []
        self._connecting: set[ServerConnection] = set()  # also of calls that were cancelled
        self._closed = False

    async def ask(self, commands: bytes, count: int, shape: ReplyBounds = SHORT) -> list[Reply]:
        """Send `count` commands at once and return their replies, which must fit into `shape`. Raises TierError."""
        return await self.use(self._asks, lambda lane: lane.ask(commands, count, shape))

    async def use(self, gate: anyio.Semaphore, work: Callable[[ServerConnection], _T]) -> _T:
        """Run `work` with a connection in a thread, when `gate` lets it. Raises TierError.

        A connection is used again only after work that has ended well.
        """
        async with gate:
            lane = self._kept() or await self._connect()
            try:
                result = await blocking(self._threads, partial(work, lane), lane.stop)
            except BaseException as error:
                lane.close()
                if not isinstance(error, OSError):
                    raise
                self._drop()  # the others have probably failed for the same reason
                await anyio.lowlevel.checkpoint_if_cancelled()
                raise TierError(f"{self.where}: {reason(error)}") from None
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
        """Run `one` for each index over one connection: more would be no quicker, and are left to other calls.

        `asking`: a command to send before each; empty: none.
        """

        def each(lane: ServerConnection, index: int) -> Reply:
            if lane.closed:  # the value before was too long
                lane.connect()
            if asking:
                lane.ask(asking, 1)
            return one(lane, index)

        return await self.use(getattr(self, use), lambda lane: [each(lane, index) for index in at])

    def retire(self) -> None:
        """Close idle connections now, and those in use when their work has ended."""
        self._closed = True
        self._drop()

    async def close(self) -> None:
        """Wait for what is under way, and disconnect."""
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
            with anyio.fail_after(self._timeout_s):  # also for what has no time limit of its own: a name to resolve
                await anyio.to_thread.run_sync(connect, abandon_on_cancel=True, limiter=self._threads)
        except BaseException as error:
            lane.stop()
            if not isinstance(error, OSError):
                raise
            raise TierError(f"{self.where}: no connection: {_explained(reason(error))}") from None
        return lane


class Servers:
    """The one server that is configured, or all primaries of its cluster."""

    def __init__(self, name: str, spec: RedisSpec, lane: Callable[[str, int], ServerConnection]) -> None:
        """Not opened. `name`: the tier's; `lane` makes a connection to host and port, not yet connected."""
        self.name, self._cluster, self._spec, self._lane = name, spec.cluster, spec, lane
        self._servers: dict[tuple[str, int], Server] = {}
        """All known servers, the configured one first; empty while it is not open."""
        self._slots: list[Server | None] = []  # of a cluster; none: to be asked for
        self._layout = anyio.Lock()

    async def open(self) -> None:
        """Start without connections, also after `close`."""
        await self.close()
        at = (self._spec.host, self._spec.port)
        self._servers = {at: self._make(*at)}

    async def close(self) -> None:
        """Finish what is under way, and disconnect."""
        servers, self._servers, self._slots = self._servers, {}, []
        for server in servers.values():
            await server.close()

    async def each(self, names: Sequence[bytes], verb: bytes, *options: bytes) -> list[Reply]:
        """Send one command per name, all at once. Raises TierError if one is refused."""

        async def ask(server: Server, at: Sequence[int], asking: bytes) -> list[Reply]:
            commands = per_name(verb, [names[index] for index in at], *options, before=asking)
            each = 2 if asking else 1  # replies to a name: the last one is the command's
            return (await server.ask(commands, len(at) * each))[each - 1 :: each]

        replies = await self.spread(names, ask)
        for reply in replies:
            if isinstance(reply, ErrorReply):
                raise self.refused(reply)
        return replies

    async def spread(self, names: Sequence[bytes], ask: _Ask) -> list[Reply]:
        """Ask every server for the names (by index) that it has.

        A layout that turns out to be old is renewed, once. Names that are on their way to another server, within a slot
        that is being moved, are asked for there, this once: the layout stays.
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
        """Follow ASK redirections: ask the server to which a name's slot is being migrated."""
        homes: dict[Server, list[int]] = {}
        for index in indices:
            message = _THERE.fullmatch(str(replies[index]))
            if message is None:
                raise self.odd("ASK")
            place = (message["host"].strip("[]") or self._home(names[index]).host, int(message["port"]))
            homes.setdefault(self._reach(place, self._servers), []).append(index)
        return await self._at(homes, ask, ASKING)

    def _home(self, name: bytes) -> Server:
        slot = crc_hqx(name, 0) % SLOTS  # no name has braces
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
        """Send commands to all primaries."""
        out: list[list[Reply]] = []

        async def part(server: Server) -> None:
            out.append([self.done(reply) for reply in await server.ask(commands, count, shape)])

        await self._together(part, await self.primaries())
        return out

    async def _together(self, part: Callable[[Server], Awaitable[None]], servers: Iterable[Server]) -> None:
        """Run `part` for all servers at once, to the end. Raises the first TierError; the layout is renewed then."""
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
        """Return the servers that values are on. Raises TierError."""
        if not self._cluster:
            return [self._first()]
        await self._refresh()
        return list(dict.fromkeys(server for server in self._slots if server is not None))

    def _first(self) -> Server:
        for server in self._servers.values():
            return server
        raise TierError(f"{self.name}: it is not open")

    async def _refresh(self) -> None:
        """Learn which server has which slots, if that is not known."""
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
                for server in (first, *random.sample(others, min(len(others), PROBES_MAX - 1))):  # any will do
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
                if taken > SLOTS:  # two for one slot
                    raise ValueError  # noqa: TRY301
                slots[low : high + 1] = [self._reach(place, servers)] * (high - low + 1)
        except (TypeError, ValueError, AttributeError):
            raise self.odd("CLUSTER SLOTS") from None
        if not any(slots):
            raise TierError(f"{self.name}: the cluster has given its slots to no server")
        for place, server in self._servers.items():
            if place not in servers:
                server.retire()
        self._servers, self._slots = servers, slots

    def _reach(self, place: tuple[str, int], servers: dict[tuple[str, int], Server]) -> Server:
        """Return the server at a place that the cluster has named, and note it in `servers`. Raises TierError."""
        host, port = place
        if place not in servers:
            if not 0 < port < 1 << 16 or len(servers) >= SERVERS_MAX:
                raise self.odd("CLUSTER SLOTS")
            if not self._trusted(host):
                raise TierError(
                    f"{self.name}: the cluster names {host}:{port}, which is not {self._spec.host} and not in "
                    "cluster_hosts: it is not given the password; list the cluster's hosts in cluster_hosts"
                )
            servers[place] = self._servers.get(place) or self._make(*place)
        return servers[place]

    def _trusted(self, host: str) -> bool:
        """Whether a host may be connected to: it is sent the password at once. Anybody may be, where there is none."""
        spec = self._spec
        secret = spec.password_env or spec.password_file is not None
        return not secret or host == spec.host or hosts.among(host, spec.cluster_hosts)

    def _make(self, host: str, port: int) -> Server:
        return Server(f"{self.name} at {host}:{port}", host, partial(self._lane, host, port), self._spec)

    def odd(self, verb: str) -> TierError:
        """Return the error for an answer of another shape than the command's."""
        return TierError(f"{self.name}: the answer to {verb} cannot be read")

    def done(self, reply: Reply) -> Reply:
        """Return a reply. Raises TierError if it is a refusal."""
        if isinstance(reply, ErrorReply):
            raise self.refused(reply)
        return reply

    def refused(self, reply: ErrorReply) -> TierError:
        """Return the error for a refusal."""
        kind = TierFullError if reply.code in _FULL else TierError
        if reply.code == "MOVED" and not self._cluster:
            return kind(f"{self.name}: {reply} (it belongs to a cluster; set cluster to true)")
        return kind(f"{self.name}: {_explained(reply)}")


def _explained(text: str) -> str:
    remedy = _REMEDIES.get(text.partition(" ")[0])
    return f"{text} ({remedy})" if remedy else text
