"""Servers send more than a client has asked for, name foreign hosts, or move keys. The client is not harmed."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import pytest

from kvpipe.errors import ConfigError
from kvpipe.testing.buffers import content, data, get, put, some_key
from kvpipe.testing.tier_conformance import run
from kvpipe.tiers import hosts
from kvpipe.tiers.base import Read, TierError, Written
from kvpipe.tiers.registry import parse_tier
from tests.rigs.servers.redis import RedisServer, certificates, polite, pretending, serving
from tests.rigs.servers.sockets import LOCAL, free_port, listening
from tests.rigs.tier_worlds.redis import OTHER, PASSWORD, PASSWORD_ENV, client, name, spec, three
from tests.tiers.memory_growth import GROWTH_BYTES_MAX, peak_growth

SLOTS = 16384


@contextmanager
def flooding(head: bytes, flood: bytes) -> Iterator[int]:
    """Answer normally while a client connects. Then send `head` once and `flood` for ever. Yields the port."""

    def serve(received: BufferedIOBase, sent: BufferedIOBase) -> None:
        while line := received.readline():
            words = [received.read(int(received.readline()[1:]) + 2)[:-2] for _ in range(int(line[1:]))]
            if words[0] in {b"CLIENT", b"AUTH", b"PING", b"SELECT"}:
                sent.write(b"+OK\r\n")
                continue
            sent.write(head)
            while True:
                sent.write(flood)

    with listening(serve) as port:
        yield port


FLOODS: dict[str, tuple[bytes, bytes]] = {
    "lists in lists": (b"*100000\r\n", b"*100000\r\n" + b":1\r\n" * 20_000),
    "a list": (b"*100000\r\n" * 7, b":1\r\n" * 20_000),
    "texts": (b"*100000\r\n" * 4, (b"$65536\r\n" + bytes(65536) + b"\r\n") * 16),
    "names": (b"*2\r\n$1\r\n7\r\n*100000\r\n", (b"$60000\r\n" + bytes(60000) + b"\r\n") * 16),
    "numbers": (b"", b":1\r\n" * 20_000),
    "a value": (b"$536870912\r\n", bytes(1 << 20)),
    "a line": (b"+", bytes(1 << 20)),
    "refusals": (b"", (b"-ERR " + b"x" * 4000 + b"\r\n") * 100),
}


@pytest.mark.parametrize("cluster", [False, True])
@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
def test_memory_is_bounded_when_the_server_never_stops_sending(flood: tuple[bytes, bytes], cluster: bool) -> None:
    """A client makes every call, and the server never stops sending. The client's memory stays below a fixed bound."""
    with flooding(*flood) as port:
        reported = {"kind": "redis", "host": LOCAL, "port": port, "cluster": cluster, "timeout_ms_max": 1000}
        assert peak_growth(reported).here < GROWTH_BYTES_MAX


@pytest.mark.parametrize(
    "layout",
    [
        b"*2\r\n" + b"*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:1\r\n" * 2,
        b"*1\r\n*3\r\n:0\r\n:99999\r\n*2\r\n$9\r\n127.0.0.1\r\n:1\r\n",
        b"*1\r\n*3\r\n:-5\r\n:5\r\n*2\r\n$9\r\n127.0.0.1\r\n:1\r\n",
        b"*1\r\n*3\r\n:5\r\n:2\r\n*2\r\n$9\r\n127.0.0.1\r\n:1\r\n",
        b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:99999\r\n",
        b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$3\r\na b\r\n:1\r\n",
        b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n*0\r\n",
        b"*2000\r\n" + b"".join(
            b"*3\r\n:%d\r\n:%d\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n" % (i, i, i + 1) for i in range(2000)
        ),
    ],
    ids=["twice", "beyond", "below", "backwards", "port", "host", "no port", "too many"],
)  # fmt: skip
def test_invalid_cluster_layout_is_refused(layout: bytes) -> None:
    """Each wrong layout raises a TierError.

    In the wrong layouts, slots are assigned twice or do not exist, hosts or ports are invalid, or there are thousands
    of servers.
    """

    async def play() -> None:
        with pytest.raises(TierError, match="the answer to CLUSTER SLOTS cannot be read"):
            async with client(port, cluster=True):
                pass

    with pretending(polite(lambda words: layout if words[0] == b"CLUSTER" else b":0\r\n")) as port:
        run(play)


# ---- hosts ------------------------------------------------------------------------------------------------------


def layout_of(host: str, port: int) -> bytes:
    """Return an answer to CLUSTER SLOTS that gives all slots to one server."""
    return b"*1\r\n*3\r\n:0\r\n:%d\r\n*2\r\n$%d\r\n%b\r\n:%d\r\n" % (SLOTS - 1, len(host), host.encode(), port)


@pytest.mark.parametrize(
    ("given", "noted"),
    [
        ({"password_env": PASSWORD_ENV}, False),
        ({"password_env": PASSWORD_ENV, "cluster_hosts": "10.0.0.0/8,*.example,127.0.0.3"}, False),
        ({"password_env": PASSWORD_ENV, "cluster_hosts": "10.0.0.0/8, 127.0.0.0/8"}, True),
        ({"password_env": PASSWORD_ENV, "cluster_hosts": OTHER}, True),
        ({}, True),
    ],
)
def test_password_is_sent_to_configured_hosts_only(
    given: dict[str, Any], noted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster names hosts in its layout or by ASK. A client with a password connects only to configured hosts.

    For another host, the refusal names the host and the key, and the host receives nothing. A client without a
    password connects to any host.
    """
    monkeypatch.setenv(PASSWORD_ENV, PASSWORD)
    received: list[list[bytes]] = []

    def thief(words: list[bytes]) -> bytes:
        received.append(words)
        return b":1\r\n" if words[0] == b"EXISTS" else b"+OK\r\n"

    with pretending(thief, OTHER) as far:
        for way in ("layout", "ask"):

            def answer(words: list[bytes], way: str = way) -> bytes:
                if words[0] == b"CLUSTER":
                    return layout_of(OTHER, far) if way == "layout" else layout_of(LOCAL, port)
                return b"-ASK 7 %b:%d\r\n" % (OTHER.encode(), far) if words[0] == b"EXISTS" else b"+OK\r\n"

            async def play() -> None:
                tier = spec(port, cluster=True, **given).make("redis")
                try:
                    await tier.open()
                    assert await tier.exists([some_key(1)]) == [True]
                finally:
                    await tier.close()

            with pretending(polite(answer)) as port:
                received.clear()
                if noted:
                    run(play)
                    assert received
                else:
                    with pytest.raises(TierError, match=rf"{OTHER}:{far}, which is not {LOCAL} .* cluster_hosts"):
                        run(play)
                    assert received == []


@pytest.mark.parametrize(
    ("host", "text", "wanted"),
    [
        ("10.1.2.3", "10.0.0.0/8", True), ("11.1.2.3", "10.0.0.0/8", False), ("10.1.2.3", "10.1.2.3", True),
        ("a.kv.example", "*.kv.example", True), ("akv.example", "*.kv.example", False), ("KV.ex", "kv.ex", True),
        ("kv.example.evil", "*.example", False), ("fd00::1", "fd00::/8", True), ("[fd00::1]", "fd00::1", True),
        ("10.1.2.3", "fd00::/8", False), ("10.evil", "10.0.0.0/8", False), ("x", "", False), ("x", "y, x", True),
        ("example", "*.example", False),
    ],
)  # fmt: skip
def test_hosts_are_those_that_are_listed(host: str, text: str, wanted: bool) -> None:
    """An entry of the list is a name, an address, a domain with all names below it, or a network.

    Other hosts do not match.
    """
    assert hosts.among(host, hosts.check_hosts(text)) == wanted


@pytest.mark.parametrize("text", ["*", "a b", "10.0.0.0/99", "*.*", "http://x", "a,,b/"])
def test_invalid_host_names_are_refused(text: str) -> None:
    """A text that is not a host is refused with the key before anything starts.

    The key is also refused for a tier that is no cluster.
    """
    with pytest.raises(ConfigError, match=r"cluster_hosts=.+ is not valid \(.+ is not a host name, an IP address"):
        parse_tier({"kind": "redis", "host": "h", "cluster": True, "cluster_hosts": text})
    with pytest.raises(ConfigError, match="cluster_hosts is of no use without a cluster"):
        parse_tier({"kind": "redis", "host": "h", "cluster_hosts": "x"})


# ---- keys that move ---------------------------------------------------------------------------------------------


def test_redirect_by_ask_is_followed_for_one_command() -> None:
    """After a refusal with ASK, the client sends this one command to the named server, after ASKING.

    The client's layout does not change.
    """
    near: list[bytes] = []
    far: list[bytes] = []

    def old(words: list[bytes]) -> bytes:
        near.append(words[0])
        if words[0] == b"CLUSTER":
            return layout_of(LOCAL, here)
        return b"-ASK 7 %b:%d\r\n" % (LOCAL.encode(), there)

    def new(words: list[bytes]) -> bytes:
        far.append(words[0])
        return {b"ASKING": b"+OK\r\n", b"GET": b"$-1\r\n", b"SET": b"+OK\r\n"}.get(words[0], b":0\r\n")

    async def play() -> None:
        async with client(here, cluster=True) as tier:
            near.clear()
            assert await tier.exists([some_key(1), some_key(2)]) == [False, False]
            assert await tier.read([get(1, 4096)]) == [Read.MISS]
            assert await tier.write([put(1, 4096)]) == [Written.STORED]
            assert await tier.delete([some_key(1)]) == 0

    with pretending(polite(new)) as there, pretending(polite(old)) as here:
        run(play)
    assert near == [b"EXISTS", b"EXISTS", b"GET", b"TOUCH", b"SET", b"UNLINK"]
    assert far[::2] == [b"ASKING"] * 6
    assert far[1::2] == near


@pytest.mark.parametrize(
    "stated", [b"-ASK\r\n", b"-ASK 7 \r\n", b"-ASK 7 h:0\r\n", b"-ASK 7 h:99999\r\n", b"-ASK 7 a b:1\r\n"]
)
def test_an_odd_ask_is_an_error(stated: bytes) -> None:
    """A refusal with ASK that names no server is a TierError."""

    async def play() -> None:
        async with client(port, cluster=True) as tier:
            with pytest.raises(TierError, match="cannot be read"):
                await tier.exists([some_key(1)])

    with pretending(
        polite(lambda words: layout_of(LOCAL, port) if words[0] == b"CLUSTER" else stated + b"\r\n")
    ) as port:
        run(play)


def test_slot_in_migration_stays_in_use() -> None:
    """While a real cluster moves a slot, the client finds the moved values, and writes new values to the new server."""
    nodes: list[RedisServer] = three("valkey")
    for server in nodes:
        server.ask("FLUSHALL")
    slot = nodes[0].ask("CLUSTER", "KEYSLOT", name(some_key(1)))
    ids = [server.ask("CLUSTER", "MYID") for server in nodes]

    async def play() -> None:
        async with client(nodes[0].port, cluster=True) as tier:
            assert await tier.write([put(1, 65536)]) == [Written.STORED]
            home = next(at for at, node in enumerate(nodes) if node.ask("DBSIZE"))
            heir = (home + 1) % 3
            nodes[home].ask("DEL", name(some_key(1)))
            nodes[heir].ask("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[home])
            nodes[home].ask("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[heir])
            try:
                assert await tier.exists([some_key(1)]) == [False]
                assert await tier.write([put(1, 65536)]) == [Written.STORED]
                assert nodes[heir].ask("DBSIZE") == 1
                wanted = get(1, 4096, 61440)
                assert await tier.read([wanted]) == [Read.HIT]
                assert data(wanted.into) == content(1, 65536)
            finally:
                nodes[heir].ask("FLUSHALL")
                for server in nodes:
                    server.ask("CLUSTER", "SETSLOT", slot, "STABLE")

    run(play)


def test_a_port_that_is_shut_is_still_one_error() -> None:
    """If a layout names a port without a listener, calls raise a single TierError."""
    with socket.socket() as shut:
        shut.bind((LOCAL, 0))
        layout = layout_of(LOCAL, shut.getsockname()[1])

        async def play() -> None:
            with pytest.raises(TierError, match="no connection"):
                async with client(port, cluster=True):
                    pass

        with pretending(polite(lambda _: layout)) as port:
            run(play)


# ---- certificates that are replaced ---------------------------------------------------------------------------------


def test_certificates_may_be_replaced_while_a_client_runs(tmp_path: Path) -> None:
    """A server certificate of a new authority is refused until the client's files are replaced, too.

    The client then continues without being opened again. While a file is half written, errors name the key of this
    file.
    """
    mine, folders = tmp_path / "mine", [tmp_path / "old", tmp_path / "new"]
    for folder in folders:
        folder.mkdir()
    old, new = map(certificates, folders)
    shutil.copytree(tmp_path / "old", mine)
    port = free_port()
    reported = {f"tls_{key}_file": mine / f"{key}.pem" for key in ("ca", "cert", "key")}

    async def play(server: RedisServer) -> None:
        async with client(port, tls=True, **reported) as tier:
            assert await tier.write([put(1, 65536)]) == [Written.STORED]
            words = [word.removeprefix("--") for word in new.options]
            server.ask("CONFIG", "SET", *words)
            assert await tier.exists([some_key(1)]) == [True], "existing connections continue"
            server.ask("CLIENT", "KILL", "TYPE", "normal")
            with pytest.raises(TierError, match=r"certificate verify failed|no connection"):
                await tier.exists([some_key(1)])
            shutil.copy(tmp_path / "new" / "ca.pem", mine)
            shutil.copy(tmp_path / "new" / "cert.pem", mine)
            for _ in ("the key is still the old one", "half of a file"):
                with pytest.raises(TierError, match=r"tls_cert_file=.+, tls_key_file="):
                    await tier.exists([some_key(1)])
                (mine / "key.pem").write_bytes(new.key.read_bytes()[:60])
            shutil.copy(tmp_path / "new" / "key.pem", mine)
            assert await tier.read([get(1, 65536)]) == [Read.HIT]

    with serving("redis", "--tls-port", str(port), *old.options) as server:
        run(play, server)


@pytest.mark.parametrize("keys", [{}, {"ttl_s": 60}])
def test_a_value_that_is_too_long_is_not_received(keys: dict[str, Any]) -> None:
    """The server announces a value that is too long, and never sends its rest.

    The value is damaged at once. The next read uses a new connection.
    """
    value = content(2, 4096)

    def answer(words: list[bytes]) -> bytes:
        if words[0] != b"GET":
            return b":1\r\n"
        return b"$4097\r\nbegun" if words[1].endswith(some_key(1).text.encode()) else b"$4096\r\n%b\r\n" % value

    async def play() -> None:
        async with client(port, **keys) as tier:
            gets = [get(1, 4096), get(2, 4096)]
            assert await tier.read(gets) == [Read.DAMAGED, Read.HIT]
            assert data(gets[1].into) == value

    with pretending(polite(answer)) as port:
        run(play)


def test_a_refusal_shows_no_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's refusal may contain the user's name. The client's error does not show this name."""
    monkeypatch.setenv(PASSWORD_ENV, PASSWORD)

    async def play() -> None:
        async with client(port, username="tenant-seven", password_env=PASSWORD_ENV) as tier:
            with pytest.raises(TierError) as caught:
                await tier.exists([some_key(1)])
        assert "tenant-seven" not in str(caught.value)

    with pretending(polite(lambda _: b"-ERR tenant-seven may not run 'exists'\r\n")) as port:
        run(play)
