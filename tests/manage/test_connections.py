"""Connections to the management interface: clients with the token are served, in spite of clients without the token."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpipe.manage import connections, models
from kvpipe.manage.client import connect
from kvpipe.testing.waiting import WAIT_S, eventually
from tests.manage.conftest import TOKEN, Managed

AUTHORIZATION = {"Authorization": f"Bearer {TOKEN}"}
HEAD = f"POST /v1/lookup HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n".encode()
GET = f"GET /v1/switches HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
HALF = b"GET /v1/st"
BODY = b'Content-Type: application/json\r\nContent-Length: 15\r\n\r\n{"tokens": [1]}'
HOUR_S = 3600.0


@pytest.fixture(name="patient")
def _patient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Managed]:
    """Yield a server that closes no connection because of its age."""
    monkeypatch.setattr(connections, "CONNECTION_S_MAX", HOUR_S)
    monkeypatch.setattr(connections, "HEADERS_S_MAX", HOUR_S)
    managed = Managed(tmp_path)
    yield managed
    managed.server.stop()


@contextlib.contextmanager
def half_open(managed: Managed, count: int) -> Iterator[None]:
    """Hold `count` connections open. Each connection has sent half of a header."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.connect(managed.address.path)
            client.settimeout(WAIT_S)
            with contextlib.suppress(OSError):  # the server may have closed it
                client.sendall(HALF)
        yield


def opened(managed: Managed) -> socket.socket:
    """Return a new connection."""
    client = socket.socket(socket.AF_UNIX)
    client.connect(managed.address.path)
    client.settimeout(WAIT_S)
    return client


def test_a_connection_with_the_token_stays_when_many_others_are_half_open(patient: Managed) -> None:
    """An idle connection whose client has sent the token stays, although it is the oldest."""
    with contextlib.closing(connect(patient.address)) as client:
        client.request("GET", "/v1/switches", headers=AUTHORIZATION)
        assert client.getresponse().read()
        own = client.sock
        with half_open(patient, 2 * connections.UNKNOWN_MAX):
            client.request("GET", "/v1/switches", headers=AUTHORIZATION)
            assert client.getresponse().status == 200
            assert client.sock is own, "it has connected anew"
            for _ in range(5):
                assert patient.ask("GET", "/v1/switches")[0] == 200
    assert patient.refused("connections") >= connections.UNKNOWN_MAX


def test_request_with_the_token_is_read_when_half_open_connections_follow(
    patient: Managed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's queue is full of half-open connections. The server accepts all of them before it reads a byte."""
    stalled, goes_on = threading.Event(), threading.Event()

    async def lookup(_: object) -> models.HeldTokens:
        stalled.set()
        goes_on.wait(WAIT_S)  # the server's loop waits until this call
        raise ValueError

    monkeypatch.setattr(patient.engine, "lookup", lookup)
    with contextlib.closing(opened(patient)) as other:
        other.sendall(HEAD + BODY)
        assert stalled.wait(WAIT_S)
        with contextlib.closing(opened(patient)) as client:
            client.sendall(GET)
            with half_open(patient, connections.ACCEPTED_MAX - 1):
                goes_on.set()
                assert client.recv(1000).startswith(b"HTTP/1.1 200")


def test_a_header_that_does_not_end_is_cut_off_at_its_deadline(
    patient: Managed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline ends new connections and answered connections long before the limit on a connection's age."""
    with contextlib.closing(opened(patient)) as known:
        known.sendall(GET)
        answered = b""
        while not answered.endswith(b"}"):
            answered += known.recv(1000)
        monkeypatch.setattr(connections, "HEADERS_S_MAX", 0.05)
        known.sendall(HALF)
        with contextlib.closing(opened(patient)) as unknown, contextlib.suppress(ConnectionError):
            with contextlib.suppress(OSError):
                unknown.sendall(HALF)
            assert unknown.recv(1000) == b""
        with contextlib.suppress(ConnectionError):
            assert known.recv(1000) == b""
    assert patient.refused("slow") == 2


def test_the_deadline_of_a_header_begins_with_its_connection_or_its_first_byte(patient: Managed) -> None:
    """The deadline of the first header counts from the connection's start.

    The deadline of a later header counts from the header's first byte. Between requests uvicorn's own limit applies.
    """
    there = patient.server._server.server_state.connections
    with contextlib.closing(opened(patient)) as client:
        assert eventually(lambda: len(there) == 1)
        (one,) = there
        assert isinstance(one, connections.BoundedConnection)
        assert eventually(lambda: one.transport is not None)
        assert one._late is not None
        client.sendall(GET)
        assert client.recv(1000).startswith(b"HTTP/1.1 200")
        assert one._late is None
        client.sendall(HALF)
        assert eventually(lambda: one.conn.trailing_data[0] == HALF)
        assert eventually(lambda: one.idle)
        # after this request the loop has finished the call that read the half header
        patient.ask("GET", "/v1/switches")
        assert one._late is not None


def test_the_deadline_of_a_header_ends_with_the_header(patient: Managed, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the header, the deadline has no effect: an answer may take longer."""
    waits: list[object] = []

    async def lookup(_: object) -> models.HeldTokens:
        for one in patient.server._server.server_state.connections:
            assert isinstance(one, connections.BoundedConnection)
            waits.append(one._late)
        raise ValueError

    monkeypatch.setattr(patient.engine, "lookup", lookup)
    with contextlib.closing(opened(patient)) as client:
        client.sendall(HEAD + BODY)
        assert client.recv(1000).startswith(b"HTTP/1.1 ")
    assert waits == [None]


def test_a_slow_client_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that sends its header or body slowly, or that reads nothing, is cut off."""
    monkeypatch.setattr(connections, "CONNECTION_S_MAX", 0.3)
    managed = Managed(tmp_path)
    beginnings = (b"", b"GET /v1/st", HEAD + b"Content-Length: 10\r\n\r\n123")
    clients = [socket.socket(socket.AF_UNIX) for _ in beginnings]
    for client, begin in zip(clients, beginnings, strict=True):
        client.settimeout(WAIT_S)
        client.connect(managed.address.path)
        with contextlib.suppress(OSError):
            client.sendall(begin)
    for client in clients:
        with contextlib.suppress(ConnectionError):
            assert client.recv(1000) == b""
        client.close()
    assert managed.refused("slow") == 3
    managed.server.stop()


def test_a_thousand_connections(managed: Managed) -> None:
    """The server keeps only a few of a thousand connections, and serves a client with the token."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    clients = []
    try:
        for _ in range(1000):
            clients.append(connect(managed.address))
            clients[-1].connect()
        assert managed.ask("GET", "/v1/switches")[0] == 200
        assert managed.refused("connections") >= 1000 - connections.UNKNOWN_MAX
    finally:
        for client in clients:
            client.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_connections_that_have_asked_make_room(managed: Managed) -> None:
    """If a new client with the token connects when the limit is reached, the oldest idle connection ends."""
    clients = [connect(managed.address) for _ in range(connections.CONNECTIONS_MAX)]
    try:
        for client in clients:
            client.request("GET", "/v1/switches", headers={"Authorization": f"Bearer {TOKEN}"})
            assert client.getresponse().read()
        assert managed.ask("GET", "/v1/switches")[0] == 200
    finally:
        for client in clients:
            client.close()
