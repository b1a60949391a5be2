"""An operator's wrong request is answered with the engine's reason, or with the name of the wrong option."""

from __future__ import annotations

import contextlib
import io
import json
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from kvpipe.cli import main as cli
from kvpipe.cli import seen
from kvpipe.errors import ConfigError, UsageError
from kvpipe.inputs.listening import Address, OperatorSocket
from kvpipe.manage.client import send_request
from kvpipe.testing.waiting import WAIT_S
from tests.manage.conftest import TOKEN, Managed
from tests.rigs.servers.sockets import free_port

LONG = {"tokens": [100_000] * 145_000}
"""A prompt that does not fit into a socket's buffer.

In the page's form of JSON, the prompt fits into the largest accepted body.
"""


def test_a_long_prompt_fits(managed: Managed) -> None:
    """A prompt of 150,000 tokens with six digits fits, with every JSON writer."""
    assert send_request(managed.address, TOKEN, "POST", "/v1/lookup", LONG)["held_tokens"] == 0


@pytest.mark.parametrize("port", [False, True])
@pytest.mark.parametrize(("token", "times", "wording"), [("x" * 32, 1, r"refused \(401\)"), (TOKEN, 4, "at most 1048")])
def test_a_refusal_before_the_body_is_read(tmp_path: Path, port: bool, token: str, times: int, wording: str) -> None:
    """The server refuses a request and closes the connection before the client has sent the whole body.

    The client still reads the refusal.
    """
    managed = Managed(tmp_path, manage=f"127.0.0.1:{free_port()}" if port else f"unix:{tmp_path}/e1.sock")
    try:
        with pytest.raises(UsageError, match=wording):
            send_request(managed.address, token, "POST", "/v1/lookup", {"tokens": LONG["tokens"] * times})
    finally:
        managed.server.stop()


@contextlib.contextmanager
def answering(path: Path, answer: bytes) -> Iterator[None]:
    """Listen at an engine's address, and answer one request."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            one, _ = listener.accept()
            with one:
                one.recv(1 << 16)
                one.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        thread.join(WAIT_S)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        ("200 OK", b"[" * 100_000), ("200 OK", b'["x"]'), ("200 OK", b"<html>\x1b[2J"), ("200 OK", b"\xff"),
        ("418 \x1b[2J", b'{"error": "\\u001b[2J"}'), ("404 Not Found", b'{"detail": ["\\u009b2J"]}'),
        ("x\x1b[2J", b""), ("200 OK", b'{"tiers": [1], "\\u001b": "\\u001b[2J"}'),
    ],
)  # fmt: skip
def test_another_program_at_the_address_does_no_harm(
    status: str, body: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another program listens at the address.

    The answer of that program cannot control the terminal, and causes no traceback.
    """
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    (tmp_path / "token").write_text(TOKEN, encoding="utf-8")
    with answering(tmp_path / "x.sock", head + body):
        at = ["--at", f"unix:{tmp_path}/x.sock", "--token-file", str(tmp_path / "token")]
        assert cli.main(["engine", "state", *at]) == (0 if b"tiers" in body else 2)
    out = "".join(capsys.readouterr())
    assert "404" not in status or "this is not a management interface" in out
    assert out.removesuffix("\n").replace("\n", " ").isprintable()


@pytest.mark.parametrize(
    ("path", "status", "wording"),
    [
        ("/v1/state?request_max=1", 422, "query: unknown key 'request_max'; this path has requests_max"),
        ("/v1/state?requests_max=1&requests_max=2", 422, "query.requests_max: it is given 2 times; give it once"),
        ("/v1/counters?%1b%5b2J=1", 422, "query: unknown key '\\\\x1b[2J'; this path has none"),
        ("/v1/state/", 404, "Not Found"),
    ],
)
def test_unknown_keys_of_a_path_are_refused(managed: Managed, path: str, status: int, wording: str) -> None:
    """The server refuses unknown keys. If a misspelt limit were ignored, the default would silently be used.

    The server redirects no path.
    """
    assert managed.ask("GET", path) == (status, {"error": wording})
    assert managed.refused("request") == 1


@pytest.mark.parametrize("tokens", [("", TOKEN), (TOKEN, TOKEN), (TOKEN, "x"), ("x", TOKEN)])
def test_two_authorization_headers_are_refused(managed: Managed, tokens: tuple[str, str]) -> None:
    """A proxy in front of the server may have checked one header, while the server would use the other header.

    So both orders are refused.
    """
    head = "".join(f"Authorization: Bearer {token}\r\n" for token in tokens)
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(WAIT_S)
        client.connect(managed.address.path)
        client.sendall(f"GET /v1/switches HTTP/1.1\r\nHost: x\r\n{head}\r\n".encode())
        assert client.recv(100).startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize(
    ("place", "wording"),
    [
        ("none/x.sock", "No such file or directory; make its folder"),
        ("x" * 120, "at most 107 bytes; use a shorter one"),
        ("file", "it is a file; use 'unix:/FOLDER/{engine}.sock', or another"),
    ],
)
def test_message_names_the_remedy_for_the_fault(tmp_path: Path, place: str, wording: str) -> None:
    """The message names the action that fits the fault: create a folder, use a shorter path, or use another address."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as caught:
        OperatorSocket(Address.parse(f"unix:{tmp_path}/{place}"), "e1", "manage")
    assert wording in str(caught.value)


def test_only_sockets_are_engines(managed: Managed, tmp_path: Path) -> None:
    """The path `{engine}` may match other files, such as a lock. The command does not take these files for engines."""
    watch = seen.EngineList([Address.parse(f"unix:{tmp_path}/{{engine}}")], TOKEN)

    async def looked() -> None:
        async with anyio.create_task_group() as group:
            await watch.look(group, WAIT_S)

    anyio.run(looked)
    assert {path.name for path in tmp_path.iterdir()} == {"e1.sock", "e1.sock.lock", "token"}
    assert [(one.address, one.error) for one in watch.engines] == [(managed.address, "")]


@pytest.mark.parametrize(
    ("given", "wording"),
    [
        (["cache", "pin", "1", "--seconds", "nan"], "--seconds: 'nan' is not a number of seconds"),
        (["cache", "warm", "1", "--seconds", "inf"], "--seconds: 'inf' is not a number of seconds"),
        (["cache", "evict-matching", "--idle-s", "1e999"], "--idle-s: '1e999' is not a number of seconds"),
        (["cache", "holders", "--rows", "many"], "--rows: 'many' is not a count"),
        (["cache", "unpin", "9" * 5000], "is not a count"),
        (["engine", "state", "--requests", "-1"], "--requests: '-1' is not a count"),
        (["top", "--requests", "-1"], "--requests: '-1' is not a count"),
        (["top", "--interval", "soon"], "--interval: 'soon' is not a number of seconds"),
        (["doctor", "--ranks", "0"], "--ranks: '0' is not a count: write a number from 1 on"),
        (["trace", "show", "x", "--slowest", "-1"], "--slowest: '-1' is not a count"),
    ],
)
def test_wrong_numbers_are_named(given: list[str], wording: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The message names the option, and the command asks no engine."""
    with pytest.raises(SystemExit, match="2"):
        cli.main(given)
    assert wording in capsys.readouterr().err


@pytest.mark.parametrize(
    ("piped", "wording"), [(b"\xff\n", "is not UTF-8 text"), (b"\n", "is empty"), (b"", "is empty")]
)
def test_empty_salt_has_no_digest(
    piped: bytes, wording: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty salt has no digest."""
    (tmp_path / "token").write_text(TOKEN, encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(piped), encoding="utf-8"))
    assert cli.main(["cache", "salt", "-", "--token-file", str(tmp_path / "token")]) == 2
    assert wording in capsys.readouterr().err


def test_a_negative_deadline_is_refused_by_the_engine(managed: Managed) -> None:
    """The engine also refuses a huge time. In both cases the engine pins no chunk."""
    for seconds in (-5, 0, 1e10, 1e308):
        with pytest.raises(UsageError, match=r"refused \(422\): seconds: "):
            send_request(managed.address, TOKEN, "POST", "/v1/pins", {"tokens": [1], "seconds": seconds})
    assert json.dumps(managed.good("GET", "/v1/pins")["pins"]) == "[]"
