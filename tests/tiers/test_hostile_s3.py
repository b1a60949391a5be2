"""Stores send more than a client has asked for, or announce a wrong length. The client is not harmed."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from typing import Any
from unittest import mock
from urllib.parse import unquote

import msgspec
import pytest

from kvpipe.testing.buffers import aligned, content, data, get, put, some_key
from kvpipe.testing.tier_conformance.worlds import TierWorld, run, with_open
from kvpipe.tiers.base import Read, Tier, TierError
from kvpipe.tiers.s3.child import Client, _reply
from kvpipe.tiers.s3.spec import S3Spec
from tests.rigs.servers.sockets import LOCAL, listening
from tests.rigs.tier_worlds.s3 import KEYS
from tests.tiers.memory_growth import CLIENT_BYTES_MAX, GROWTH_BYTES_MAX, peak_growth

SIZE = 65536
OTHER_HOST = "127.0.0.2"
FLOOD = bytes(1 << 20)
UNHURRIED_MS = 10_000
"""The `timeout_ms_max` of calls that should succeed. The client's pauses between retries are a share of this time."""
HEAD = 'HTTP/1.1 {status}\r\nETag: "1"\r\nLast-Modified: Sat, 21 Nov 2020 21:21:21 GMT\r\n{length}{range}\r\n'

Send = Callable[[bytes], object]


@contextmanager
def storing(reply: Callable[[str, dict[str, str], Send], None]) -> Iterator[dict[str, Any]]:
    """Run a store that answers with `reply`, which gets the method, the headers and a function that sends.

    Yield the specification of a client.
    """

    def serve(received: BufferedIOBase, sent: BufferedIOBase) -> None:
        while line := received.readline().decode():
            headers = {}
            while field := received.readline().decode().strip():
                name, _, value = field.partition(":")
                headers[name.lower()] = value.strip()
            received.read(int(headers.get("content-length", 0)))
            if "kvpipe-health" in unquote(line):
                sent.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            else:
                reply(line.split()[0], headers, sent.write)

    with listening(serve) as port:
        yield {
            "kind": "s3", "url": "s3://bucket/prefix", "endpoint": f"http://{LOCAL}:{port}",
            "allow_http": True, "region": "us-east-1", "timeout_ms_max": 1000,
            "access_key_env": "TESTS_S3_ACCESS", "secret_key_env": "TESTS_S3_SECRET",
        }  # fmt: skip


def use(
    reply: Callable[[str, dict[str, str], Send], None], play: Callable[[Tier], Coroutine[Any, Any, None]], **keys: Any
) -> None:
    """Run `play` with an open client of a store that answers with `reply`."""
    with storing(reply) as given, mock.patch.dict(os.environ, KEYS):
        spec = S3Spec.model_validate(given | {"timeout_ms_max": UNHURRIED_MS} | keys)
        run(with_open, TierWorld(lambda: spec.make("s3"), spec), play)


def head_of(headers: dict[str, str], length: str, *, total: int | None = None) -> bytes:
    """Return the head of an answer to a ranged request. `length` is a header, or "" for no announced length."""
    start, _, last = headers["range"].removeprefix("bytes=").partition("-")
    ranged = f"Content-Range: bytes {start}-{last}/{int(last) + 1 if total is None else total}\r\n"
    return HEAD.format(status="206 Partial Content", length=length, range=ranged).encode()


def chunked(body: bytes) -> bytes:
    """Return a part of a body without an announced length."""
    return b"%x\r\n%b\r\n" % (len(body), body)


def endless(way: str) -> Callable[[str, dict[str, str], Send], None]:
    """Return a store whose bodies never end."""

    def reply(method: str, headers: dict[str, str], send: Send) -> None:
        lengths = {"chunked": "Transfer-Encoding: chunked\r\n", "long": f"Content-Length: {1 << 40}\r\n", "none": ""}
        if method != "GET" or "range" not in headers:
            send(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            return
        send(head_of(headers, lengths[way]))
        while True:
            send(chunked(FLOOD) if way == "chunked" else FLOOD)

    return reply


@pytest.mark.parametrize("way", ["chunked", "long", "none"])
def test_client_reads_no_more_of_a_body_than_it_asked_for(way: str) -> None:
    """A store may announce any length. The client reads no more bytes of a body than it asked for."""
    with storing(endless(way)) as noted:
        grown = peak_growth(noted)
    assert grown.here < GROWTH_BYTES_MAX
    assert grown.there < CLIENT_BYTES_MAX


def flood(send: Send, head: str, way: str) -> None:
    """Send an answer that begins with `head` and whose body has no end."""
    lengths = {
        "chunked": "Transfer-Encoding: chunked",
        "long": f"Content-Length: {1 << 40}",
        "2 GB": f"Content-Length: {2 << 30}",
    }
    send(f"{head}\r\nContent-Type: application/xml\r\n{lengths[way]}\r\n\r\n".encode())
    while True:
        send(chunked(FLOOD) if way == "chunked" else FLOOD)


@pytest.mark.parametrize(
    ("way", "status"),
    [
        ("chunked", "400 Bad Request"),
        ("chunked", "500 Internal Server Error"),
        ("long", "403 Forbidden"),
        ("2 GB", "400 Bad Request"),
        ("2 GB", "500 Internal Server Error"),
    ],
)
def test_endless_error_costs_bounded_memory(way: str, status: str) -> None:
    """An error's body never ends. The memory of this process and of the client's process stays bounded."""
    with storing(lambda _, __, send: flood(send, f"HTTP/1.1 {status}", way)) as noted:
        grown = peak_growth(noted)
    assert grown.here < GROWTH_BYTES_MAX
    assert grown.there < CLIENT_BYTES_MAX


@pytest.mark.parametrize("way", ["chunked", "long"])
def test_endless_listing_costs_bounded_memory(way: str) -> None:
    """A listing never ends. The memory of this process and of the client's process stays bounded."""

    def reply(method: str, headers: dict[str, str], send: Send) -> None:
        if method == "GET" and "range" not in headers:
            flood(send, "HTTP/1.1 200 OK", way)
        send(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    with storing(reply) as noted:
        grown = peak_growth(noted)
    assert grown.here < GROWTH_BYTES_MAX
    assert grown.there < CLIENT_BYTES_MAX


def test_a_listing_of_endless_pages() -> None:
    """A listing always has one more page. The listing ends when its caller stops, and takes no memory."""
    entries = "".join(
        f"<Contents><Key>prefix/{some_key(i).text}</Key><LastModified>2020-11-21T21:21:21.000Z</LastModified>"
        f"<Size>4096</Size><ETag>1</ETag></Contents>"
        for i in range(1000)
    )
    page = (
        f"<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>1</NextContinuationToken>{entries}"
        "</ListBucketResult>"
    ).encode()

    def reply(method: str, headers: dict[str, str], send: Send) -> None:
        if method == "GET" and "range" not in headers:
            send(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/xml\r\nContent-Length: %d\r\n\r\n%b" % (len(page), page)
            )
        else:
            send(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    with storing(reply) as noted:
        grown = peak_growth(noted)
    assert grown.here < GROWTH_BYTES_MAX
    assert grown.there < CLIENT_BYTES_MAX


def test_a_listing_of_long_names() -> None:
    """Any number of names that are too long to be keys are left out. The listing continues after these names."""
    names = [f"prefix/{i}{'x' * 600}" for i in range(600)] + [f"prefix/{some_key(1).text}"]
    entries = "".join(
        f"<Contents><Key>{name}</Key><LastModified>2020-11-21T21:21:21.000Z</LastModified>"
        f"<Size>4096</Size><ETag>1</ETag></Contents>"
        for name in names
    )
    page = f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>".encode()

    def reply(_: str, __: dict[str, str], send: Send) -> None:
        send(b"HTTP/1.1 200 OK\r\nContent-Type: application/xml\r\nContent-Length: %d\r\n\r\n%b" % (len(page), page))

    async def play(tier: Tier) -> None:
        for _ in range(2):
            assert [entry.key async for entry in tier.scan()] == [some_key(1)]

    use(reply, play)


def test_an_answer_that_is_too_long_is_a_failure() -> None:
    """If an answer does not fit into a message, a short message reports this, so no caller waits for ever."""

    async def play() -> None:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with here, there:
            there.setblocking(False)
            task = asyncio.ensure_future(asyncio.sleep(0, bytes(16 << 20)))
            await task
            _reply(there, task)
            assert msgspec.msgpack.decode(here.recv(1 << 20)) == ["the client's answer cannot be sent", None]

    run(play)


@pytest.mark.parametrize("extra", [-4096, -1, 0, 1, 4096, 1 << 20])
@pytest.mark.parametrize("size", [SIZE, 3 << 20])
def test_a_body_of_another_length_is_damaged(extra: int, size: int) -> None:
    """A body that is shorter or longer than announced is damaged. A body of the right length is a hit."""
    body = (content(1, size) + bytes(1 << 20))[: size + extra]

    def reply(_: str, headers: dict[str, str], send: Send) -> None:
        begin, last = (int(number) for number in headers["range"].removeprefix("bytes=").split("-"))
        part = body[begin : last + 1 + extra] if last + 1 == size else body[begin : last + 1]
        send(head_of(headers, f"Content-Length: {len(part)}\r\n", total=size))
        for at in range(0, len(part), 50_000):
            send(part[at : at + 50_000])

    async def play(tier: Tier) -> None:
        wanted = get(1, 4096, size - 4096)
        try:
            ended = await tier.read([wanted])
        except TierError:
            ended = [Read.DAMAGED]
        assert ended == ([Read.HIT] if extra == 0 else [Read.DAMAGED])
        if extra == 0:
            assert data(wanted.into) == body

    use(reply, play, read_bytes=2 << 20)


def test_nothing_beyond_the_buffer_is_touched() -> None:
    """A longer body does not overwrite the memory behind the given buffer."""
    room = aligned(SIZE + 4096)
    room[SIZE:] = b"\xa5" * 4096

    async def play(tier: Tier) -> None:
        assert await tier.read([get(1, SIZE)._replace(into=(room[:SIZE],))]) == [Read.DAMAGED]

    use(endless("long"), play)
    assert room[SIZE:] == b"\xa5" * 4096


def other_cloud(scheme: str, given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings of another cloud's client for the same store, and the variables that name the store."""
    where = given["endpoint"]
    settings = {key: given[key] for key in ("kind", "allow_http", "timeout_ms_max")}
    if scheme == "gs":
        account = {"gcs_base_url": where, "disable_oauth": True, "client_email": "", "private_key": ""}
        return settings | {"url": "gs://bucket/prefix"}, {
            "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account | {"private_key_id": ""})
        }
    return settings | {"url": "az://account/bucket/prefix"}, {
        "AZURE_STORAGE_ENDPOINT": where,
        "AZURE_SKIP_SIGNATURE": "true",
    }


@pytest.mark.parametrize(
    ("status", "scheme", "variables"),
    [
        ("301 Moved Permanently", "s3", {}),
        ("302 Found", "s3", {}),
        ("307 Temporary Redirect", "s3", {}),
        ("308 Permanent", "s3", {}),
        ("302 Found", "gs", {}),
        ("307 Temporary Redirect", "az", {}),
        ("302 Found", "s3", {"https_proxy": "http://127.0.0.3:1", "no_proxy": f"{LOCAL},{OTHER_HOST}"}),
    ],
    ids=["301", "302", "307", "308", "gs", "az", "a proxy for other hosts"],
)
def test_no_redirect_leads_to_another_host(status: str, scheme: str, variables: dict[str, str]) -> None:
    """The client sends no value to the other host, and accepts no value from this host."""
    asked: list[bytes] = []

    def other(received: BufferedIOBase, sent: BufferedIOBase) -> None:
        asked.append(received.readline())
        sent.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    def reply(method: str, _: dict[str, str], send: Send) -> None:
        if method == "HEAD":
            send(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        else:
            location = f"Location: http://{OTHER_HOST}:{port}/bucket/prefix/x\r\n"
            send(f"HTTP/1.1 {status}\r\n{location}Content-Length: 0\r\n\r\n".encode())

    async def play(tier: Tier) -> None:
        for call in (tier.read([get(1, SIZE)]), tier.write([put(1, SIZE)])):
            with pytest.raises(TierError):
                await call
        with pytest.raises(TierError):
            [one async for one in tier.scan()]

    with listening(other, OTHER_HOST) as port, storing(reply) as noted:
        given = noted | {"timeout_ms_max": 3000}  # long, because the client repeats each call after a pause
        settings, named = (given, KEYS) if scheme == "s3" else other_cloud(scheme, given)
        with mock.patch.dict(os.environ, named | variables):
            spec = S3Spec.model_validate(settings)
            run(with_open, TierWorld(lambda: spec.make("s3"), spec), play)
    assert asked == []


def test_private_store_cannot_redirect_to_a_host_of_the_cloud() -> None:
    """The cloud may provide keys.

    So the client connects to the hosts that provide keys, but to no other host of the cloud.
    """
    made = Client(
        {
            "name": "s3", "timeout_s": 1, "read_bytes": 1 << 20, "lanes": 1, "allow_http": True, "keys": {},
            "endpoint": f"http://{LOCAL}:1", "region": "eu-west-1", "url": "s3://bucket/prefix",
        }
    )  # fmt: skip
    hosts = str(made._elsewhere("s3")["proxy_excludes"]).split(",")
    assert {LOCAL, "sts.eu-west-1.amazonaws.com", "169.254.169.254"} < {*hosts}
    assert not {"amazonaws.com", "amazonaws.com.cn", "api.aws"} & {*hosts}


def test_an_azure_container_is_that_of_the_url() -> None:
    """The URL begins with the account. The client library expects the container in this place."""
    asked: list[str] = []

    def serve(received: BufferedIOBase, sent: BufferedIOBase) -> None:
        while line := received.readline().decode():
            asked.append(line.split()[1])
            while received.readline().strip():
                pass
            sent.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    async def play(tier: Tier) -> None:
        assert await tier.exists([some_key(1)]) == [False]

    with listening(serve) as port:
        given = {"kind": "s3", "endpoint": f"http://{LOCAL}:{port}", "allow_http": True, "timeout_ms_max": UNHURRIED_MS}
        settings, variables = other_cloud("az", given)
        with mock.patch.dict(os.environ, variables):
            spec = S3Spec.model_validate(settings)
            run(with_open, TierWorld(lambda: spec.make("s3"), spec), play)
    assert asked
    assert all(path.startswith("/bucket/prefix") for path in asked)
