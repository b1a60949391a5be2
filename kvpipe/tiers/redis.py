"""Redis and Valkey: values are strings of the server, one server or a cluster.

The server makes room by its own `maxmemory-policy`; a value's time to live and its place in the server's order of use
are renewed whenever it is read or offered again.
"""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Final, Literal, Self
from urllib.parse import SplitResult, unquote

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from kvpipe.errors import ConfigError
from kvpipe.tiers import hosts
from kvpipe.tiers.base import Capacity, Entry, Get, Key, Put, Read, Tier, TierFullError, Written
from kvpipe.tiers.redis_servers import Server, Servers
from kvpipe.tiers.resp import VALUE_BYTES_MAX, Lane, Refusal, Reply, Shape, command, reason
from kvpipe.tiers.spec import TierSpec, secret
from kvpipe.values import LocalPath, Variable, no_bool

PORT: Final = 6379
SCAN_KEYS: Final = 1000
LISTED: Final = Shape(items=16 * SCAN_KEYS, bytes=8 << 20, depth=2)
"""Of a page of names; a server may send some more than it is asked for."""
INFO: Final = Shape(bytes=64 << 10)
_REMEDY: Final = "name a variable in password_env or a file in password_file instead"


class RedisSpec(TierSpec):
    """What a Redis or Valkey tier can be told."""

    schemes: ClassVar[tuple[str, ...]] = ("redis", "rediss", "valkey", "valkeys")

    kind: Literal["redis"] = "redis"
    host: str = Field(
        description="Name or address of the server, or of any server of the cluster.",
        pattern=r"^[^\s/@?#=&\x00]+$",
        max_length=255,
    )
    port: Annotated[int, BeforeValidator(no_bool), Field(gt=0, lt=65536)] = Field(PORT, description="Its port.")
    db: Annotated[int, BeforeValidator(no_bool), Field(ge=0, lt=1 << 31)] = Field(0, description="Database number.")
    cluster: bool = Field(default=False, description="It is a cluster: values are spread over its primaries.")
    cluster_hosts: Annotated[str, AfterValidator(hosts.check)] = Field(
        "",
        description="Hosts of the cluster, beside `host`, that are given the password: names, addresses, `*.DOMAIN` or "
        "networks such as `10.0.0.0/8`, separated by commas.",
        max_length=4000,
    )
    username: str = Field("", description="User of its access control list; empty: `default`.")
    password_env: Variable = Field("", description="Environment variable with the password.")
    password_file: LocalPath | None = Field(None, description="File with the password.")
    tls: bool = Field(default=False, description="Encrypt the connection; certificate and host name are verified.")
    tls_ca_file: LocalPath | None = Field(None, description="Authorities to trust instead of the system's (PEM).")
    tls_cert_file: LocalPath | None = Field(None, description="Certificate to show to the server (PEM).")
    tls_key_file: LocalPath | None = Field(None, description="Its private key (PEM).")
    ttl_s: Annotated[int, BeforeValidator(no_bool), Field(ge=0, le=10 * 366 * 86400)] = Field(
        0, description="Values that were not used for so long are dropped by the server; 0: never for their age."
    )
    prefix: str = Field(
        "kvpipe", description="What the server's keys begin with, before a ':'.", pattern=r"^[A-Za-z0-9_.:-]{1,64}$"
    )

    @model_validator(mode="before")
    @classmethod
    def _no_password(cls, given: object) -> object:
        if isinstance(given, dict) and "password" in given:
            raise ValueError(f"a password is not written into the configuration; {_REMEDY}")
        return given

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.cluster and self.db:
            raise ValueError(f"db={self.db}: a cluster has database 0 only; leave db out")
        if self.cluster_hosts and not self.cluster:
            raise ValueError("cluster_hosts is of no use without a cluster; set cluster to true, or leave it out")
        for key in ("tls_ca_file", "tls_cert_file", "tls_key_file"):
            if getattr(self, key) is not None and not self.tls:
                raise ValueError(f"{key} is of no use without TLS; set tls to true, or write rediss://")
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file belong together; set both or neither")
        return self

    @classmethod
    def from_url(cls, url: SplitResult) -> dict[str, Any]:
        """See `TierSpec.from_url`: redis://HOST:6379/DB, rediss:// for TLS."""
        if url.password is not None:
            raise ValueError(f"a password is not written into a URL; {_REMEDY}")
        if not url.hostname:
            raise ValueError("the host is missing; write redis://HOST:6379/0")
        db = url.path.strip("/")
        if not re.fullmatch(r"[0-9]{0,10}", db):
            raise ValueError("its path is no number of a database; write redis://HOST:6379/0")
        said = {
            "host": url.hostname,
            "port": url.port,
            "db": int(db) if db else None,
            "username": unquote(url.username or "") or None,
            "tls": url.scheme in {"rediss", "valkeys"} or None,
        }
        return {key: value for key, value in said.items() if value is not None}

    def make(self, name: str, *, writes: bool = True) -> Tier:  # noqa: ARG002  (connections are made when they are wanted)
        """See `TierSpec.make`."""
        try:
            import redis  # noqa: PLC0415
        except ImportError:
            raise ConfigError(f"kvpipe: tier {name} needs the redis client; run pip install 'kvpipe[redis]'") from None
        try:
            password = secret(self.password_env, self.password_file, "password")
            if self.tls:
                self._tls()
        except (ValueError, OSError) as error:
            raise ConfigError(f"kvpipe: tier {name}: {error}") from None
        hidden = password.get_secret_value() if password else ""
        options: dict[str, Any] = {"db": self.db, "username": self.username or None, "password": hidden or None}
        options |= dict.fromkeys(("socket_timeout", "socket_connect_timeout"), self.timeout_ms_max / 1000)
        spec = self

        class Connection(redis.Connection):
            """Plain or TLS. redis-py's own with TLS reads the system's authorities for every connection: 30 ms each."""

            def _connect(self) -> socket.socket:
                sock: socket.socket = super()._connect()  # type: ignore[no-untyped-call]
                if not spec.tls:
                    return sock
                try:
                    return spec._tls().wrap_socket(sock, server_hostname=self.host)
                except OSError:
                    sock.close()
                    raise

        def dial(host: str, port: int, reader: Callable[..., Lane]) -> redis.Connection:
            return Connection(host=host, port=port, protocol=2, parser_class=reader, **options)  # type: ignore[no-untyped-call]

        return RedisTier(self, Servers(name, self, lambda *at: Lane(partial(dial, *at), hidden)))

    def _tls(self) -> ssl.SSLContext:
        """Read the certificates, which may have been renewed. Raises OSError naming the key whose file is wrong."""
        what = f"tls_ca_file={self.tls_ca_file}"
        try:
            context = ssl.create_default_context(cafile=self.tls_ca_file)
            if self.tls_cert_file is not None:
                what = f"tls_cert_file={self.tls_cert_file}, tls_key_file={self.tls_key_file}"
                context.load_cert_chain(self.tls_cert_file, self.tls_key_file, password="")  # never ask the terminal
        except OSError as error:
            raise OSError(f"{what} cannot be used ({reason(error)}); give readable PEM files") from None
        return context


class RedisTier:
    """See `Tier`."""

    def __init__(self, spec: RedisSpec, servers: Servers) -> None:
        """Not opened."""
        self.name, self._servers = servers.name, servers
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
        """See `Tier.read`. A value that is there gets its whole time to live again."""
        names = self._names(get.key for get in gets)

        def one(lane: Lane, index: int) -> Reply:
            commands = command(b"GET", names[index])
            if self._ttl:
                commands += command(b"EXPIRE", names[index], *self._ttl)
            return lane.fetch(commands, gets[index].into, more=len(self._ttl))

        replies = await self._servers.spread(names, lambda server, at, asking: server.bulk("reads", at, one, asking))
        return [self._seen(get, reply) for get, reply in zip(gets, replies, strict=True)]

    async def write(self, puts: Sequence[Put]) -> list[Written]:
        """See `Tier.write`. What is there already is not sent; it gets its whole time to live again."""
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

        def one(lane: Lane, at: int) -> Reply:
            return lane.store((b"SET", names[absent[at]]), puts[absent[at]].parts, options)

        replies = await self._servers.spread(
            [names[index] for index in absent], lambda server, at, asking: server.bulk("writes", at, one, asking)
        )
        out = [Written.PRESENT] * len(puts)
        for index, reply in zip(absent, replies, strict=True):
            if self._servers.done(reply) is not None:  # else another was quicker
                out[index] = Written.STORED
        return out

    async def delete(self, keys: Sequence[Key]) -> int:
        """See `Tier.delete`."""
        return sum(reply == 1 for reply in await self._servers.each(self._names(keys), b"UNLINK"))

    async def capacity(self) -> Capacity:
        """See `Tier.capacity`. It is that of the whole servers: all keys of the database, all memory in use."""
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
        seen: set[int] = set()  # a server lists keys twice while it grows its table; hashes are shorter than keys
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
        """Return those of `names` that are values of kvpipe's and still there."""
        age = (b"PTTL",) if self._ttl else (b"OBJECT", b"IDLETIME")
        asks = [command(b"STRLEN", name) + command(*age, name) for name in names]
        replies = await server.ask(b"".join(asks), 2 * len(names))
        out = []
        for name, size, told in zip(names, replies[::2], replies[1::2], strict=True):
            if isinstance(size, int) and size:
                with contextlib.suppress(ValueError):  # a key of somebody else's
                    key = Key.parse(name.decode("ascii").removeprefix(self._prefix))
                    out.append(Entry(key, size, self._age(told)))
        return out

    def _age(self, told: Reply) -> float | None:
        if not isinstance(told, int) or told < 0:  # it counts uses instead of time, or the value lives for ever
            return None
        return max(0.0, self._ttl_s - told / 1000) if self._ttl else float(told)

    def _seen(self, get: Get, reply: Reply) -> Read:
        if isinstance(reply, Refusal) and reply.code == "WRONGTYPE":
            return Read.DAMAGED
        size = self._servers.done(reply)
        if size is None:
            return Read.MISS
        return Read.HIT if size == get.size else Read.DAMAGED


def _number(text: bytes) -> int:
    return int(text) if text.isdigit() and len(text) < len(str(1 << 63)) else 0
