"""The worlds of the Redis tier: Redis, Valkey, a cluster of three, and a server with TLS and a restricted user."""

from __future__ import annotations

import atexit
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import pytest

from kvpipe.testing.tier_conformance.worlds import Limit, TierWorld, run, tried
from kvpipe.testing.waiting import PATIENT
from kvpipe.tiers.base import Key, Tier, TierError
from kvpipe.tiers.redis.spec import RedisSpec
from tests.rigs.servers.redis import Certificates, RedisServer, certificates, cluster, serving
from tests.rigs.servers.sockets import LOCAL, free_port

COMMANDS = "ping select get set expire touch exists unlink strlen object|idletime pttl scan dbsize info"
"""The commands that the user must be allowed to use.

In a cluster, CLUSTER SLOTS is needed, too. docs/tiers.md lists them.
"""
UNBOUNDED: Final[frozenset[Limit]] = frozenset({"unbounded"})
"""The server's `maxmemory` bounds the store."""
PASSWORD_ENV, PASSWORD = "TEST_REDIS_PASSWORD", "correct horse battery staple"

OTHER = "127.0.0.2"
"""An address that reaches the server with TLS, but is not in the server's certificate."""

_running = ExitStack()
atexit.register(_running.close)


@cache
def single(kind: str) -> RedisServer:
    """Return the server that all tests of this process share."""
    return _running.enter_context(serving(kind))


@cache
def three(kind: str) -> list[RedisServer]:
    """Return the cluster that all tests of this process share."""
    return _running.enter_context(cluster(kind))


@cache
def guarded() -> tuple[RedisServer, int, Certificates]:
    """Return a server, its port for TLS, and the certificates of both sides. The user `kv` has a password."""
    files = certificates(Path(_running.enter_context(tempfile.TemporaryDirectory())))
    port = free_port()
    server = _running.enter_context(serving("redis", "--tls-port", str(port), "--bind", LOCAL, OTHER, *files.options))
    allowed = [f"+{command}" for command in COMMANDS.split()]
    server.ask("ACL", "SETUSER", "kv", "on", f">{PASSWORD}", "~kvpipe:*", *allowed)
    return server, port, files


def spec(port: int, **keys: Any) -> RedisSpec:
    """Return the specification of a client of a server on loopback."""
    return RedisSpec.model_validate({"host": LOCAL, "port": port, **PATIENT, **keys})


def guarded_spec(**keys: Any) -> RedisSpec:
    """Return the specification of a client of `guarded`."""
    _, port, files = guarded()
    os.environ[PASSWORD_ENV] = PASSWORD
    tls = {"tls": True, "tls_ca_file": files.ca, "tls_cert_file": files.cert, "tls_key_file": files.key}
    reported = {"host": "localhost", "port": port, "username": "kv", "password_env": PASSWORD_ENV}
    return RedisSpec.model_validate(PATIENT | reported | tls | keys)


@asynccontextmanager
async def client(port: int, **keys: Any) -> AsyncIterator[Tier]:
    """Open a tier and close it. With a short `timeout_ms_max`, repeat the opening until it succeeds."""
    tier = spec(port, **keys).make("redis")
    try:
        await (tried(tier.open) if "timeout_ms_max" in keys else tier.open())
        yield tier
    finally:
        await tier.close()


def refused(given: RedisSpec) -> str:
    """Return the error of opening a tier."""

    async def play() -> None:
        tier = given.make("redis")
        try:
            await tier.open()
        finally:
            await tier.close()

    with pytest.raises(TierError) as caught:
        run(play)
    return str(caught.value)


def name(key: Key) -> str:
    """Return the server's name of a key."""
    return f"kvpipe:{key.text}"


def _alone(kind: str) -> list[RedisServer]:
    return [single(kind)]


@contextmanager
def refusing(servers: list[RedisServer]) -> Iterator[None]:
    """During the context, let users do nothing except restore their rights."""
    users = [(server, user) for server in servers for user in server.ask("ACL", "USERS")]
    rights = {(server.port, user): _rights(server, user) for server, user in users}
    try:
        for server, user in users:
            server.ask("ACL", "SETUSER", user, "-@all", "+acl")
        yield
    finally:
        for server, user in users:
            server.ask("ACL", "SETUSER", user, "-acl", *rights[server.port, user])


def _rights(server: RedisServer, user: bytes) -> list[bytes]:
    (line,) = (line for line in server.ask("ACL", "LIST") if line.split()[1] == user)
    return [word for word in line.split() if word[:1] in b"+-"]


def age(servers: list[RedisServer]) -> None:
    """Make every value older by two minutes: each value is restored with this idle time."""
    for server in servers:
        for key in server.ask("KEYS", "*"):
            server.ask("RESTORE", key, 0, server.ask("DUMP", key), "REPLACE", "IDLETIME", 120)


def _world(
    run: Callable[[], list[RedisServer]], spec_for: Callable[[list[RedisServer]], RedisSpec]
) -> Callable[[Path], AbstractContextManager[TierWorld]]:
    @contextmanager
    def world(_folder: Path) -> Iterator[TierWorld]:
        servers = run()
        for server in servers:
            server.ask("FLUSHALL")
        made = spec_for(servers)
        aged, broken = partial(age, servers), partial(refusing, servers)
        yield TierWorld(lambda: made.make("redis"), made, UNBOUNDED, broken=broken, older=aged)

    return world


WORLDS = {
    "redis": _world(partial(_alone, "redis"), lambda servers: spec(servers[0].port)),
    "valkey": _world(partial(_alone, "valkey"), lambda servers: spec(servers[0].port)),
    "valkey-cluster": _world(partial(three, "valkey"), lambda servers: spec(servers[0].port, cluster=True)),
    "redis-tls": _world(lambda: [guarded()[0]], lambda _: guarded_spec()),
}
