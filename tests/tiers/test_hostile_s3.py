"""Stores that send more than they were asked for, or lie about how long it is: as the S3 tier meets them."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from typing import Any
from unittest import mock

import msgspec
import pytest

from kvpipe.testing.buffers import aligned, content, data, get, put, some_key
from kvpipe.testing.servers.sockets import LOCAL, listening
from kvpipe.testing.tier_conformance import TierWorld, run, with_open
from kvpipe.testing.tier_worlds.s3 import KEYS
from kvpipe.tiers.base import Read, Tier, TierError
from kvpipe.tiers.s3.child import _reply
from kvpipe.tiers.s3.spec import S3Spec
from tests.tiers.memory_growth import CLIENT_BYTES_MAX, GROWTH_BYTES_MAX, peak_growth

SIZE = 65536
OTHER_HOST = "127.0.0.2"
FLOOD = bytes(1 << 20)
HEAD = 'HTTP/1.1 {status}\r\nETag: "1"\r\nLast-Modified: Sat, 21 Nov 2020 21:21:21 GMT\r\n{length}{range}\r\n'

Send = Callable[[bytes], object]


@contextmanager
def storing(reply: Callable[[str, dict[str, str], Send], None]) -> Iterator[dict[str, Any]]:
    """Run a store that sends to a method and headers what `reply` has; yield the specification of a client."""

    def serve(received: BufferedIOBase, sent: BufferedIOBase) -> None:
        while line := received.readline().decode():
            headers = {}
            while field := received.readline().decode().strip():
                name, _, value = field.partition(":")
                headers[name.lower()] = value.strip()
            received.read(int(headers.get("content-length", 0)))
            if "kvpipe-health" in line:
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
    """Run `play` with an open client of a store that answers as `reply` has."""
    with storing(reply) as given, mock.patch.dict(os.environ, KEYS):
        spec = S3Spec.model_validate(given | keys)
        run(with_open, TierWorld(lambda: spec.make("s3"), spec), play)


def head_of(headers: dict[str, str], length: str, *, total: int | None = None) -> bytes:
    """Return the head of an answer to a ranged request; `length` is a header, or nothing."""
    start, _, last = headers["range"].removeprefix("bytes=").partition("-")
    ranged = f"Content-Range: bytes {start}-{last}/{int(last) + 1 if total is None else total}\r\n"
    return HEAD.format(status="206 Partial Content", length=length, range=ranged).encode()


def chunked(body: bytes) -> bytes:
    """Return a piece of a body without a length."""
    return b"%x\r\n%b\r\n" % (len(body), body)


def endless(way: str) -> Callable[[str, dict[str, str], Send], None]:
    """Return a store whose bodies have no end."""

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
def test_memory_is_bounded_by_what_was_asked(way: str) -> None:
    """Whatever length a store announces for a body, no more of it is taken than was asked for."""
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


@pytest.mark.parametrize("status", ["400 Bad Request", "403 Forbidden", "500 Internal Server Error"])
@pytest.mark.parametrize("way", ["chunked", "long", "2 GB"])
def test_memory_is_bounded_whatever_error_is_sent(way: str, status: str) -> None:
    """An error with an endless body costs bounded memory, here and in the client's process."""
    with storing(lambda _, __, send: flood(send, f"HTTP/1.1 {status}", way)) as noted:
        grown = peak_growth(noted)
    assert grown.here < GROWTH_BYTES_MAX
    assert grown.there < CLIENT_BYTES_MAX


@pytest.mark.parametrize("way", ["chunked", "long"])
def test_memory_is_bounded_whatever_is_listed(way: str) -> None:
    """So does a listing without an end."""

    def reply(method: str, headers: dict[str, str], send: Send) -> None:
        if method == "GET" and "range" not in headers:
            flood(send, "HTTP/1.1 200 OK", way)
        send(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    with storing(reply) as noted:
        grown = peak_growth(noted)
    assert grown.here < GROWTH_BYTES_MAX
    assert grown.there < CLIENT_BYTES_MAX


def test_a_listing_of_endless_pages() -> None:
    """A listing that always has one more page ends with whoever asked for it, and takes no memory meanwhile."""
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
    """Names that are too long to be keys are left out, however many: the listing goes on behind them."""
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
    """Where an answer does not fit into a message, one that reports it is sent: nobody waits for it for ever."""

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
    """A body that is shorter or longer than the store has announced is no hit; one of the right length is."""
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
    """A longer body does not run over into what lies behind the buffer that was given."""
    room = aligned(SIZE + 4096)
    room[SIZE:] = b"\xa5" * 4096

    async def play(tier: Tier) -> None:
        assert await tier.read([get(1, SIZE)._replace(into=(room[:SIZE],))]) == [Read.DAMAGED]

    use(endless("long"), play)
    assert room[SIZE:] == b"\xa5" * 4096


@pytest.mark.parametrize("status", ["301 Moved Permanently", "302 Found", "307 Temporary Redirect", "308 Permanent"])
def test_no_redirect_leads_to_another_host(status: str) -> None:
    """Neither a value is sent there, nor is a value believed that comes from there."""
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

    with listening(other, OTHER_HOST) as port:
        use(reply, play)
    assert asked == []
