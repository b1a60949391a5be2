"""Tests of the Redis tier with real servers: its configuration, its keys and values, and its errors."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from kvpipe.errors import ConfigError
from kvpipe.testing.buffers import aligned, content, data, get, put, some_key
from kvpipe.testing.tier_conformance import run
from kvpipe.tiers.base import Entry, Put, Read, TierError, TierFullError, Written
from kvpipe.tiers.redis.resp import VALUE_BYTES_MAX
from kvpipe.tiers.redis.spec import RedisSpec
from kvpipe.tiers.registry import parse_tier
from tests.rigs.servers.proxy import Proxy
from tests.rigs.servers.redis import RedisServer, certificates, polite, pretending, serving
from tests.rigs.servers.sockets import LOCAL, free_port
from tests.rigs.tier_worlds.redis import client, name, refused, single, spec

MIB = 1 << 20
PASSWORD = "hunter2-hunter2"  # noqa: S105


@pytest.fixture(params=["redis", "valkey"])
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """Return an empty server of each kind."""
    found = single(request.param)
    found.ask("FLUSHALL")
    yield found
    found.ask("CONFIG", "SET", "maxmemory", 0)


# ---- configuration ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "keys"),
    [
        ("redis://h", {"host": "h", "port": 6379, "db": 0, "tls": False}),
        ("redis://h:7000/3", {"host": "h", "port": 7000, "db": 3}),
        ("valkey://u%20v@h?ttl_s=60", {"host": "h", "username": "u v", "ttl_s": 60}),
        ("rediss://[::1]:7000?prefix=a.b", {"host": "::1", "tls": True, "prefix": "a.b"}),
        ("valkeys://h/0?cluster=true&lanes=8", {"tls": True, "cluster": True, "lanes": 8}),
        ("redis://h?password_env=HERE", {"password_env": "HERE"}),
    ],
)
def test_urls_can_have_every_key(url: str, keys: dict[str, object]) -> None:
    """A URL sets host, port, database, user and TLS.

    The query sets any other key. All other keys have their defaults.
    """
    reported = parse_tier(url)
    assert isinstance(reported, RedisSpec)
    assert {key: getattr(reported, key) for key in keys} == keys


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (f"redis://:{PASSWORD}@h", "name a variable in password_env or a file in password_file"),
        (f"redis://h?password={PASSWORD}", "name a variable in password_env or a file in password_file"),
        (
            {"kind": "redis", "host": "h", "password": PASSWORD},
            "name a variable in password_env or a file in password_file",
        ),
        ("redis://h/zero", "the path is not the number of a database"),
        ("redis:///0", "the host is missing"),
        ({"kind": "redis"}, "host is missing"),
        ({"kind": "redis", "host": "a b"}, "host='a b' is not valid"),
        ("redis://h?prefix=a*", "prefix='a\\*' is not valid"),
        ("redis://h/2?cluster=true", "db=2: a cluster has database 0 only"),
        ("redis://h?tls_ca_file=/ca.pem", "tls_ca_file is of no use without TLS; set tls to true"),
        ("rediss://h?tls_cert_file=/c.pem", "tls_cert_file and tls_key_file belong together"),
        ("redis://h?ttl_s=-1", "ttl_s='-1' is not valid"),
        ({"kind": "redis", "host": "h", "port": True}, "port=True is not valid"),
    ],
)
def test_bad_keys_are_explained(given: str | dict[str, Any], why: str) -> None:
    """A wrong configuration is refused with the key and the remedy, and without the password."""
    with pytest.raises(ConfigError, match=why) as caught:
        parse_tier(given)
    assert PASSWORD not in str(caught.value)


def test_files_are_read_before_the_engine_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A certificate, key or password that cannot be read raises a ConfigError that names its key.

    A missing client library raises a ConfigError, too.
    """
    files, junk = certificates(tmp_path), tmp_path / "junk"
    junk.write_text("junk")
    for keys, why in (
        ({"tls_ca_file": tmp_path / "none"}, "tls_ca_file=.*none cannot be used"),
        ({"tls_ca_file": junk}, "tls_ca_file=.*junk cannot be used"),
        ({"tls_cert_file": files.cert, "tls_key_file": junk}, "tls_cert_file=.*tls_key_file=.*junk cannot be used"),
        ({"password_file": tmp_path / "none"}, "password: file .*none cannot be read"),
        (
            {"password_env": "KVPIPE_TEST_NOT_SET"},
            "password: the environment variable that password_env names is empty",
        ),
    ):
        with pytest.raises(ConfigError, match=why):
            spec(1, tls=True, **keys).make("redis")
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match=re.escape("pip install 'kvpipe[redis]'")):
        spec(1).make("redis")


# ---- values -------------------------------------------------------------------------------------------------------


def test_a_value_is_a_string_under_the_prefix(server: RedisServer) -> None:
    """A value is stored as the bytes of its parts.

    Its key is the prefix, ':' and the key's text, in the configured database.
    """

    async def play() -> None:
        async with client(server.port, prefix="a:b", db=3) as tier, client(server.port, prefix="a", db=3) as other:
            await tier.write([put(1, 12288)])
            assert await other.exists([some_key(1)]) == [False]
            assert [entry async for entry in other.scan()] == []
            assert [entry.key async for entry in tier.scan()] == [some_key(1)]

    run(play)
    import redis

    with redis.Redis(LOCAL, server.port, db=3) as there:
        assert there.keys() == [f"a:b:{some_key(1).text}".encode()]
        assert there.get(f"a:b:{some_key(1).text}") == content(1, 12288)


def test_time_to_live_is_set_and_renewed(server: RedisServer) -> None:
    """A write sets the time to live.

    A hit and a write of an existing value renew this time. A lookup does not.
    """

    async def play() -> None:
        async with client(server.port, ttl_s=1000) as tier:
            assert await tier.write([put(1, 4096)]) == [Written.STORED]
            assert 990_000 < left() <= 1_000_000
            for renew, wanted in (
                (tier.read([get(1, 4096)]), [Read.HIT]),
                (tier.write([put(1, 4096)]), [Written.PRESENT]),
            ):
                server.ask("EXPIRE", name(some_key(1)), 500)
                assert await tier.exists([some_key(1)]) == [True]
                assert left() <= 500_000
                assert await renew == wanted
                assert left() > 800_000
            server.ask("EXPIRE", name(some_key(1)), 400)
            (entry,) = [entry async for entry in tier.scan()]
            assert entry.age_s == pytest.approx(600, abs=100)
            assert await tier.read([get(2, 4096)]) == [Read.MISS]
        async with client(server.port) as tier:
            await tier.write([put(2, 4096)])
            await tier.read([get(2, 4096)])
        assert server.ask("PTTL", name(some_key(2))) == -1

    def left() -> int:
        found: int = server.ask("PTTL", name(some_key(1)))
        return found

    run(play)


def test_damaged_value_does_not_end_the_connection(server: RedisServer) -> None:
    """Values of another type or length are DAMAGED. The other values are read over the same connection."""

    async def play() -> None:
        with Proxy(server.port) as proxy:
            async with client(proxy.port, lanes=1) as tier:
                await tier.write([put(i, 8192) for i in range(4)])
                server.ask("DEL", name(some_key(1)))
                server.ask("LPUSH", name(some_key(1)), "x")
                server.ask("SET", name(some_key(2)), b"x" * 3 * MIB)
                server.ask("SET", name(some_key(3)), b"")
                open_before = proxy.connections
                gets = [get(i, 4096, 4096) for i in (0, 1, 2, 3, 4, 0)]
                damaged = [Read.DAMAGED] * 3
                assert await tier.read(gets) == [Read.HIT, *damaged, Read.MISS, Read.HIT]
                assert data(gets[0].into) == data(gets[5].into) == content(0, 8192)
                assert proxy.connections - open_before <= 1
                assert await tier.write([put(1, 8192)]) == [Written.PRESENT]
                assert await tier.delete([some_key(1)]) == 1
                assert await tier.write([put(1, 8192)]) == [Written.STORED]

    run(play)


def test_existing_value_is_not_sent_again(server: RedisServer) -> None:
    """A write of an existing value sends only the value's key."""

    async def play() -> None:
        async with client(server.port) as tier:
            await tier.write([put(1, MIB)])
            before = received()
            assert await tier.write([put(1, MIB)]) == [Written.PRESENT]
            assert received() - before < 4096

    def received() -> int:
        found: int = server.ask("INFO", "stats")["total_net_input_bytes"]
        return found

    run(play)


def test_a_value_longer_than_the_protocol_is_refused(server: RedisServer) -> None:
    """A value of more than 512 MiB raises a TierFullError with the reason, before a byte is sent."""

    async def play() -> None:
        async with client(server.port) as tier:
            long = Put(some_key(1), (aligned(4096), aligned(VALUE_BYTES_MAX)))
            with pytest.raises(TierFullError, match=r"a value of 536875008 bytes; the server takes 536870912"):
                await tier.write([put(2, 4096), long])
            assert await tier.exists([some_key(2)]) == [False]

    run(play)


def test_scan_lists_only_keys_of_kvpipe(server: RedisServer) -> None:
    """Keys that are not kvpipe's, or that are no strings, are left out. Ages are listed if the server knows them."""

    async def play() -> None:
        async with client(server.port) as tier:
            await tier.write([put(1, 4096)])
            server.ask("SET", "kvpipe:other", "x")
            server.ask("SET", "kvpipe:\xff", "x")
            server.ask("LPUSH", name(some_key(2)), "x")
            for policy, known in (("allkeys-lru", True), ("allkeys-lfu", False)):
                server.ask("CONFIG", "SET", "maxmemory-policy", policy)
                (entry,) = [entry async for entry in tier.scan()]
                assert entry._replace(age_s=None) == Entry(some_key(1), 4096, None)
                assert (entry.age_s is not None) == known

    try:
        run(play)
    finally:
        server.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")


def test_a_thousand_keys_are_one_round_trip() -> None:
    """A lookup of 1,000 keys sends all its commands before it reads an answer, and each answer belongs to its key."""
    asked: list[bytes] = []

    def answer(words: list[bytes]) -> bytes:
        asked.append(words[1])
        return b"" if len(asked) < 1000 else b"".join(b":%d\r\n" % (i % 3 == 0) for i in range(1000))

    async def play() -> None:
        async with client(port) as tier:
            assert await tier.exists([some_key(i) for i in range(1000)]) == [i % 3 == 0 for i in range(1000)]

    with pretending(polite(answer)) as port:
        run(play)
    assert asked == [name(some_key(i)).encode() for i in range(1000)]


def test_connections_are_bounded_and_kept(server: RedisServer) -> None:
    """Any number of calls may be in flight.

    The connections are at most: lanes for reads, lanes for writes, and two more.
    """

    async def play() -> None:
        with Proxy(server.port) as proxy:
            async with client(proxy.port, lanes=3) as tier:

                async def one(i: int) -> None:
                    assert await tier.write([put(i, 65536)]) == [Written.STORED]
                    assert await tier.exists([some_key(i)]) == [True]
                    assert await tier.read([get(i, 65536)]) == [Read.HIT]

                async with anyio.create_task_group() as group:
                    for i in range(60):
                        group.start_soon(one, i)
                assert proxy.connections <= 3 + 3 + 2

    run(play)


# ---- refusals -----------------------------------------------------------------------------------------------------


def test_a_full_server_still_reads(server: RedisServer) -> None:
    """At maxmemory without eviction, a write raises TierFullError, values are read, and the capacity has the limit."""

    async def play() -> None:
        async with client(server.port, ttl_s=1000) as tier:
            await tier.write([put(1, MIB)])
            before = await tier.capacity()
            server.ask("CONFIG", "SET", "maxmemory", before.bytes_used + MIB // 2)
            with pytest.raises(TierFullError, match="OOM command not allowed"):
                await tier.write([put(i, MIB) for i in range(2, 6)])
            assert await tier.read([get(1, MIB)]) == [Read.HIT]
            held = await tier.capacity()
            assert (before.bytes_max, held.bytes_max) == (None, before.bytes_used + MIB // 2)
            assert before.items == 1

    run(play)


def test_a_replica_reads_and_is_full(server: RedisServer) -> None:
    """A read-only replica serves its values, even values with a time to live. A write raises TierFullError."""

    async def play() -> None:
        async with client(server.port, ttl_s=1000) as tier:
            await tier.write([put(1, 65536)])
            server.ask("REPLICAOF", LOCAL, free_port())
            try:
                assert await tier.read([get(1, 65536)]) == [Read.HIT]
                with pytest.raises(TierFullError, match="READONLY"):
                    await tier.write([put(2, 65536)])
            finally:
                server.ask("REPLICAOF", "NO", "ONE")
            assert await tier.write([put(2, 65536)]) == [Written.STORED]

    run(play)


@pytest.mark.parametrize(
    ("stated", "kind"),
    [
        ("OOM command not allowed when used memory > 'maxmemory'.", TierFullError),
        ("MISCONF Redis is configured to save RDB snapshots, but it cannot", TierFullError),
        ("NOREPLICAS Not enough good replicas to write.", TierFullError),
        ("TRYAGAIN Multiple keys request during rehashing of slot", TierError),
        ("LOADING Redis is loading the dataset in memory", TierError),
        ("NOPERM this user has no permissions to run the 'exists' command", TierError),
        ("ERR " + "x" * 3000, TierError),
    ],
)
def test_refusals_become_errors(stated: str, kind: type[TierError]) -> None:
    """A refusal raises a TierError with the server's shortened text.

    A refusal to write raises a TierFullError.
    """

    async def play() -> None:
        async with client(port) as tier:
            for call in (tier.exists([some_key(1)]), tier.read([get(1, 4096)]), tier.write([put(1, 4096)])):
                with pytest.raises(TierError) as caught:
                    await call
                assert type(caught.value) is kind
                assert stated[:150] in str(caught.value)
                assert len(str(caught.value)) < 400

    with pretending(polite(lambda _: f"-{stated}\r\n".encode())) as port:
        run(play)


def test_passwords_are_used_and_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The right password works. The error of a wrong or missing password names the setting, and hides the password."""
    with serving("redis") as server:
        server.ask("CONFIG", "SET", "requirepass", PASSWORD)
        file = tmp_path / "password"
        file.write_text(f"{PASSWORD}\n")
        monkeypatch.setenv("KVPIPE_TEST_WRONG", "wr0ng-wr0ng")

        async def play() -> None:
            async with client(server.port, password_file=str(file)) as tier:
                await tier.health()
                assert PASSWORD not in repr(vars(tier))

        run(play)
        missing = refused(spec(server.port))
        wrong = refused(spec(server.port, password_env="KVPIPE_TEST_WRONG"))  # noqa: S106
        user = refused(spec(server.port, password_file=str(file), username="nobody"))
    assert "the server requires a password; set password_env or password_file" in missing
    assert "correct username, or the password that password_env" in wrong
    assert "WRONGPASS" in user
    assert not any(secret in text for text in (missing, wrong, user) for secret in (PASSWORD, "wr0ng"))


def test_an_echo_of_the_password_is_hidden(tmp_path: Path) -> None:
    """A server that echoes its input, well-formed or not, does not cause an error that shows the password."""
    file = tmp_path / "password"
    file.write_text(PASSWORD)
    for form in (b"-ERR %b\r\n", b"you said %b\r\n", b"%b" * 400):
        with pretending(lambda words, form=form: form.replace(b"%b", words[-1])) as port:  # type: ignore[misc]
            text = refused(spec(port, password_file=str(file)))
        assert "***" in text
        assert PASSWORD not in text


def test_a_wrong_database_is_reported(server: RedisServer) -> None:
    """A database that the server does not have raises a TierError with the server's text."""
    assert "DB index is out of range" in refused(spec(server.port, db=99))
