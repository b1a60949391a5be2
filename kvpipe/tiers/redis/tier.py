"""The Redis and Valkey tier: values are strings on one server, or on the servers of a cluster.

The server evicts values by its own `maxmemory-policy`. Each read and each further write of a value renews the value's
time to live, and makes the value the most recently used.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Final

from kvpipe.tiers.base import Capacity, Entry, Get, Key, Put, Read, TierFullError, Written
from kvpipe.tiers.redis.dial import dialling
from kvpipe.tiers.redis.resp import VALUE_BYTES_MAX, ErrorReply, Reply, ReplyBounds, ServerConnection, command
from kvpipe.tiers.redis.servers import Server, Servers
from kvpipe.tiers.redis.spec import RedisSpec

SCAN_KEYS: Final = 1000
LISTED: Final = ReplyBounds(items=16 * SCAN_KEYS, bytes=8 << 20, depth=2)
"""Limits for a page of SCAN. A page may have more keys than COUNT."""
INFO: Final = ReplyBounds(bytes=64 << 10)


class RedisTier:
    """A `Tier` on a Redis or Valkey server, or on a cluster."""

    def __init__(self, name: str, spec: RedisSpec, password: str) -> None:
        """Make a tier, which connects in `open`. `password` is "" if there is no password."""
        self.name, self._servers = name, Servers(name, spec, dialling(spec, password))
        self._prefix, self._ttl_s = f"{spec.prefix}:", spec.ttl_s
        self._ttl = [str(spec.ttl_s).encode()] if spec.ttl_s else []

    async def open(self) -> None:
        """See `Tier.open`."""
        await self._servers.open()
        await self.health()

    async def exists(self, keys: Sequence[Key]) -> list[bool]:
        """See `Tier.exists`."""
        return [reply == 1 for reply in await self._servers.each(self._names(keys), b"EXISTS")]

    async def read(self, gets: Sequence[Get]) -> list[Read]:
        """See `Tier.read`. A hit renews the value's time to live."""
        names = self._names(get.key for get in gets)

        def one(lane: ServerConnection, index: int) -> Reply:
            commands = command(b"GET", names[index])
            if self._ttl:
                commands += command(b"EXPIRE", names[index], *self._ttl)
            return lane.fetch(commands, gets[index].into, more=len(self._ttl))

        replies = await self._servers.spread(names, lambda server, at, asking: server.bulk("reads", at, one, asking))
        return [self._seen(get, reply) for get, reply in zip(gets, replies, strict=True)]

    async def write(self, puts: Sequence[Put]) -> list[Written]:
        """See `Tier.write`. A value that the server already has is not sent, but its time to live is renewed."""
        for put in puts:
            if put.size > VALUE_BYTES_MAX:
                msg = (
                    f"{self.name}: a value of {put.size} bytes; the server takes {VALUE_BYTES_MAX}: lower chunk_tokens"
                )
                raise TierFullError(msg)
        names = self._names(put.key for put in puts)
        renewed = await self._servers.each(names, b"EXPIRE" if self._ttl else b"TOUCH", *self._ttl)
        absent = [index for index, reply in enumerate(renewed) if reply != 1]
        options = (b"NX", b"EX", *self._ttl) if self._ttl else (b"NX",)

        def one(lane: ServerConnection, at: int) -> Reply:
            return lane.store((b"SET", names[absent[at]]), puts[absent[at]].parts, options)

        replies = await self._servers.spread(
            [names[index] for index in absent], lambda server, at, asking: server.bulk("writes", at, one, asking)
        )
        out = [Written.PRESENT] * len(puts)
        for index, reply in zip(absent, replies, strict=True):
            if self._servers.done(reply) is not None:  # the reply is None if another client has stored the value first
                out[index] = Written.STORED
        return out

    async def delete(self, keys: Sequence[Key]) -> int:
        """See `Tier.delete`."""
        return sum(reply == 1 for reply in await self._servers.each(self._names(keys), b"UNLINK"))

    async def capacity(self) -> Capacity:
        """See `Tier.capacity`. The result includes keys and memory of other programs on the servers."""
        items, used, most = 0, 0, []
        for reply in await self._servers.everywhere(command(b"INFO", b"memory") + command(b"DBSIZE"), 2, INFO):
            match reply:
                case [bytes(info), int(count)]:
                    lines = dict(line.partition(b":")[::2] for line in info.splitlines())
                    items += count
                    used += _number(lines.get(b"used_memory", b""))
                    most.append(_number(lines.get(b"maxmemory", b"")))
                case _:
                    raise self._servers.odd("INFO")
        return Capacity(items, used, sum(most) if all(most) else None)

    async def health(self) -> None:
        """See `Tier.health`. In a cluster every primary must answer."""
        await self._servers.everywhere(command(b"PING"), 1)

    async def scan(self) -> AsyncIterator[Entry]:
        """See `Tier.scan`."""
        # A server may list keys twice while it resizes its table. Hashes take less memory than keys.
        seen: set[int] = set()
        for server in await self._servers.primaries():
            cursor, wanted = b"0", f"{self._prefix}*".encode()
            while True:
                ask = command(b"SCAN", cursor, b"MATCH", wanted, b"COUNT", str(SCAN_KEYS).encode())
                match self._servers.done((await server.ask(ask, 1, LISTED))[0]):
                    case [bytes(cursor), list(names)]:
                        pass
                    case _:
                        raise self._servers.odd("SCAN")
                fresh = [name for name in names if isinstance(name, bytes) and hash(name) not in seen]
                seen.update(map(hash, fresh))
                for entry in await self._entries(server, fresh):
                    yield entry
                if cursor == b"0":
                    break

    async def close(self) -> None:
        """See `Tier.close`."""
        await self._servers.close()

    # ---- keys and replies -----------------------------------------------------------------------------------------

    def _names(self, keys: Iterable[Key]) -> list[bytes]:
        return [f"{self._prefix}{key.text}".encode() for key in keys]

    async def _entries(self, server: Server, names: Sequence[bytes]) -> list[Entry]:
        """Return the entries of the `names` that belong to kvpipe and still exist."""
        age = (b"PTTL",) if self._ttl else (b"OBJECT", b"IDLETIME")
        # the age first, because STRLEN counts as a use
        asks = [command(*age, name) + command(b"STRLEN", name) for name in names]
        replies = await server.ask(b"".join(asks), 2 * len(names))
        out = []
        for name, reported, size in zip(names, replies[::2], replies[1::2], strict=True):
            if isinstance(size, int) and size:
                with contextlib.suppress(ValueError):  # the key does not belong to kvpipe
                    key = Key.parse(name.decode("ascii").removeprefix(self._prefix))
                    out.append(Entry(key, size, self._age(reported)))
        return out

    def _age(self, reported: Reply) -> float | None:
        # The age is unknown if the server counts uses instead of idle time, or if the value has no time to live.
        if not isinstance(reported, int) or reported < 0:
            return None
        return max(0.0, self._ttl_s - reported / 1000) if self._ttl else float(reported)

    def _seen(self, get: Get, reply: Reply) -> Read:
        if isinstance(reply, ErrorReply) and reply.code == "WRONGTYPE":
            return Read.DAMAGED
        size = self._servers.done(reply)
        if size is None:
            return Read.MISS
        return Read.HIT if size == get.size else Read.DAMAGED


def _number(text: bytes) -> int:
    return int(text) if text.isdigit() and len(text) < len(str(1 << 63)) else 0
