"""Unauthorized, malformed, oversized and silent clients are refused and counted, and cost the engine little time."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import socket
import stat
import sys
import threading
from pathlib import Path
from typing import Any

import anyio
import pytest

from kvpipe.cli import main as cli
from kvpipe.config.settings import load_settings
from kvpipe.errors import ConfigError
from kvpipe.inputs.listening import Address, OperatorSocket
from kvpipe.manage import models, server
from kvpipe.manage.client import connect
from kvpipe.manage.start import read_token
from kvpipe.testing.waiting import WAIT_S
from tests.manage.conftest import TOKEN, Managed, settings
from tests.rigs.servers.sockets import free_port

_HEAD = f"POST /v1/lookup HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n".encode()


def _answer(managed: Managed, sent: bytes) -> bytes:
    """Return the beginning of the answer to these bytes."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(WAIT_S)
        client.connect(managed.address.path)
        client.sendall(sent)
        return client.recv(100)


@pytest.mark.parametrize("token", ["", "t0", "t0" * 16 + "x", "x" * 9000])
@pytest.mark.parametrize("path", ["/v1/state", "/v1/nothing", "/openapi.json"])
def test_without_the_token_nothing_is_shown(managed: Managed, token: str, path: str) -> None:
    """Without the token, a client does not even learn which paths exist."""
    status, answered = managed.ask("GET", path, token=token)
    assert (status, list(answered)) == (401, ["error"])
    assert managed.refused("token") == 1


def test_a_body_without_the_token_is_not_read(managed: Managed) -> None:
    """The refusal comes before the body is read."""
    sent = b"POST /v1/lookup HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"
    assert _answer(managed, sent).startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize("chunked", [False, True])
def test_a_huge_body_is_not_read_to_its_end(managed: Managed, chunked: bool) -> None:
    """A huge body is refused early, whether or not it announces its length."""
    connection = connect(managed.address)
    connection.timeout = WAIT_S
    size = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: 99999999999999999999"[:40]
    connection.connect()
    client = connection.sock
    assert client is not None
    client.sendall(_HEAD + size + b"\r\n\r\n")
    block = b"10000\r\n" + b"1" * 0x10000 + b"\r\n"
    answered = b""
    with contextlib.suppress(OSError):  # the server may have closed the connection by now
        for _ in range(64 if chunked else 0):  # four times the largest accepted body
            client.sendall(block)
    with contextlib.suppress(ConnectionError):
        answered = client.recv(100)
    assert answered == b"" or answered.startswith((b"HTTP/1.1 413", b"HTTP/1.1 400"))
    connection.close()
    assert managed.ask("GET", "/v1/switches")[0] == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"[]", b"null", b'{"tokens": []}', b'{"tokens": [-1]}', b'{"tokens": [2147483648]}',
        b'{"tokens": [1.5]}', b'{"tokens": ["1"]}', b'{"tokens": [true]}', b'{"tokens": "abc"}',
        b'{"tokens": [1], "salt": "a"}', b'{"tokens": [1], "cache_salt": ""}', b'{"tokens": [1], "cache_salt": 1}',
        b'{"tokens": [1], "adapter": "x"}', b'{"tokens": [1], "adapter": {"name": "x", "number": 0, "path": "/x"}}',
        b'{"tokens": [' + b"1," * 300_000 + b"1]}", b"[" * 500_000, b'{"tokens": [' + b"9" * 500_000 + b"]}",
        b"\xff\xfe", b'{"tokens": [1e999]}', b'{"tokens": [NaN]}',
    ],
)  # fmt: skip
def test_nonsense_is_refused_in_a_sentence(managed: Managed, raw: bytes) -> None:
    """Nonsense is refused in one sentence. The sentence does not repeat the nonsense."""
    status, answered = managed.ask("POST", "/v1/lookup", raw=raw)
    assert (status in {400, 422}, list(answered)) == (True, ["error"])
    assert len(json.dumps(answered)) < 600
    assert managed.refused("request") == 1


@pytest.mark.parametrize("body", [{"freeze": 1}, {"freeze": "on"}, {"frieze": True}, {"freeze": True, "bypass": True}])
def test_switch_is_changed_by_an_explicit_boolean_only(managed: Managed, body: dict[str, Any]) -> None:
    """Only `true` or `false` changes a switch."""
    assert managed.ask("PUT", "/v1/switches", body)[0] == 422
    assert managed.good("GET", "/v1/switches") == {"freeze": False, "bypass": False}


def test_failed_request_is_counted(managed: Managed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug in the server fails only the request at hand, and is counted."""
    monkeypatch.setattr(managed.side, "stats", lambda: 1 / 0)
    failed = {"error": "the request failed; the reason is in the engine's log"}
    assert managed.ask("GET", "/v1/counters") == (503, failed)
    assert managed.ask("GET", "/v1/switches")[0] == 200
    monkeypatch.setattr(managed.engine, "switches", lambda: 1 / 0)
    assert managed.ask("GET", "/v1/switches") == (500, failed)
    managed.server.stop()
    assert managed.side.counters["contained_error"] == 2


def test_loggers_of_the_host_are_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An API server in the same process keeps its access log. This log gets no lines of kvpipe's server."""
    log, stream = logging.getLogger("uvicorn.access"), logging.StreamHandler(io.StringIO())
    monkeypatch.setattr(log, "handlers", [stream])  # uvicorn's own configuration sets handlers in this way
    monkeypatch.setattr(log, "propagate", True)
    caplog.set_level(logging.INFO, "uvicorn.access")
    managed = Managed(tmp_path)
    managed.good("GET", "/v1/switches")
    managed.server.stop()
    assert (log.handlers, log.propagate, log.disabled, log.level) == ([stream], True, False, logging.INFO)
    assert [record for record in caplog.records if record.name == log.name] == []
    log.info("theirs")
    assert stream.stream.getvalue() == "theirs\n"


_ODD = (
    b"GET /v1/switches HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: h\r\n\r\n",
    b"\x00\x01\x02 nonsense\r\n\r\n",
    _HEAD + b'Transfer-Encoding: chunked\r\n\r\n3\r\n{"f\r\nnonsense\r\n',
    _HEAD + b"Content-Length: 10\r\n\r\n123",
    b"HEAD / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
)


def test_a_body_that_breaks_off_does_nothing(managed: Managed) -> None:
    """A body that breaks off does nothing, even if the received part would be a complete request."""
    head = _HEAD.replace(b"POST /v1/lookup", b"PUT /v1/switches") + b"Content-Type: application/json\r\n"
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(WAIT_S)
        client.connect(managed.address.path)
        client.sendall(head + b'Content-Length: 20\r\n\r\n{"freeze": true}')
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1000) == b""
    assert managed.good("GET", "/v1/switches") == {"freeze": False, "bypass": False}


def test_odd_requests_log_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Odd, broken or unfinished requests log nothing. Broken requests are counted."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # warnings then go to standard error
    managed = Managed(tmp_path)
    for sent in _ODD:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(WAIT_S)
            client.connect(managed.address.path)
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                while client.recv(1000):
                    pass
    asked = threading.Event()

    async def lookup(_: object) -> models.HeldTokens:
        asked.set()
        await anyio.sleep_forever()
        raise AssertionError

    monkeypatch.setattr(managed.engine, "lookup", lookup)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(managed.address.path)
        client.sendall(_HEAD + b'Content-Length: 15\r\n\r\n{"tokens": [1]}')
        assert asked.wait(WAIT_S)
        managed.server.stop()
    assert managed.refused("request") == 4
    assert "".join(capfd.readouterr()) == ""


def test_server_ends_with_open_connections(tmp_path: Path) -> None:
    """The server's thread ends even if connections are open, and the server's socket is removed."""
    managed = Managed(tmp_path)
    client = socket.socket(socket.AF_UNIX)
    client.connect(managed.address.path)
    managed.server.stop()
    managed.server.stop()
    client.close()
    assert "kvpipe-manage" not in {thread.name for thread in threading.enumerate()}
    assert not Path(managed.address.path).exists()


# ---- where it listens -----------------------------------------------------------------------------------------------


def test_the_socket_is_its_users_alone(managed: Managed) -> None:
    """Only its user can open the socket, which has mode 0600. The socket's name is the engine's name."""
    found = Path(managed.address.path).stat()
    assert stat.S_ISSOCK(found.st_mode)
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert managed.address.path.endswith("/e1.sock")


def test_interface_works_over_tcp(tmp_path: Path) -> None:
    """The interface also works over TCP. A second engine at the same port does not start."""
    at = f"127.0.0.1:{free_port()}"
    managed = Managed(tmp_path, manage=at)
    assert managed.ask("GET", "/v1/switches")[0] == 200
    with pytest.raises(ConfigError, match=rf"manage='{at}': Address already in use; use 'unix:/FOLDER/\{{engine\}}"):
        Managed(tmp_path, manage=at)
    managed.server.stop()


def test_two_engines_at_one_path(managed: Managed, tmp_path: Path) -> None:
    """The second engine is refused, and the first engine continues. With `{engine}` each engine has its own path."""
    with pytest.raises(ConfigError, match="a running engine listens there; set another engine_name for each engine"):
        Managed(tmp_path)
    assert managed.ask("GET", "/v1/switches")[0] == 200
    other = OperatorSocket(Address.parse(managed.settings.manage), "../e2", "manage")
    assert other.address.path == f"{tmp_path}/.._e2.sock"
    other.close()


def test_socket_without_a_listener_is_replaced(tmp_path: Path) -> None:
    """A socket without a listener is replaced."""
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(tmp_path / "e1.sock"))
    left.close()
    managed = Managed(tmp_path)
    assert managed.ask("GET", "/v1/switches")[0] == 200
    managed.server.stop()


def test_a_server_that_cannot_start_leaves_no_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next server can use the same path."""

    def full(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(server, "LoopThread", full)
        with pytest.raises(RuntimeError, match="new thread") as caught:
            Managed(tmp_path)
    assert not (tmp_path / "e1.sock").exists()
    Managed(tmp_path).server.stop()
    assert caught.tb is not None  # the exception's frames have kept the first server alive until here


def test_file_at_the_address_of_a_socket_is_not_replaced(tmp_path: Path) -> None:
    """A file, a folder or a link at the path, or a missing folder, is refused in one sentence."""
    (tmp_path / "e1.sock").write_text("precious", encoding="utf-8")
    with pytest.raises(ConfigError, match="it is a file"):
        Managed(tmp_path)
    assert (tmp_path / "e1.sock").read_text(encoding="utf-8") == "precious"
    with pytest.raises(ConfigError, match="No such file or directory"):
        Managed(tmp_path, manage=f"unix:{tmp_path}/none/x.sock")
    with pytest.raises(ConfigError, match="at most 107 bytes"):
        Managed(tmp_path, manage=f"unix:{tmp_path}/{'x' * 120}")


@pytest.mark.parametrize(
    ("address", "wording"),
    [
        ("0.0.0.0:80", "only this machine"), ("10.1.2.3:80", "only this machine"), ("example.com:80", "this machine"),
        ("127.0.0.1", "write 'unix:"), ("127.0.0.1:0", "write 'unix:"), ("127.0.0.1:70000", "write 'unix:"),
        ("unix:x.sock", "absolute path"), ("8700", "write 'unix:"), ("unix:/a\0b", "write 'unix:"),
    ],
)  # fmt: skip
def test_address_that_other_machines_can_reach_is_refused(address: str, wording: str) -> None:
    """The configuration is refused if the address is malformed, or if other machines can reach it."""
    with pytest.raises(ConfigError, match=wording):
        load_settings({"manage": address})


def test_address_is_parsed_and_written_in_the_same_form() -> None:
    """An address is parsed and written in the same form."""
    for text in ("127.0.0.1:8700", "[::1]:8700", "unix:/run/{engine}.sock"):
        assert str(Address.parse(text)) == text
    assert str(Address.parse("localhost:80")) == "127.0.0.1:80"


def test_bad_token_is_refused_without_showing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing, short or unprintable token is refused, and so is a token that others can read.

    The refusal is one sentence and does not show the token.
    """
    good = settings(tmp_path)
    assert read_token(good) == TOKEN.encode()
    monkeypatch.setenv("OPERATORS", "word" * 8)
    by_env = load_settings({"manage": "127.0.0.1:1", "manage_token_env": "OPERATORS"})
    assert read_token(by_env) == b"word" * 8
    with pytest.raises(ConfigError, match="without a token; set manage_token_file"):
        read_token(load_settings({"manage": "127.0.0.1:1"}))
    for text, wording in (
        ("short", "fewer than 16"),
        ("long" * 1025, "or more than 4096"),
        ("two words, or three", "printable ASCII"),
        ("ü" * 20, "printable"),
    ):
        (tmp_path / "token").write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=wording) as caught:
            read_token(good)
        assert text not in str(caught.value)
    (tmp_path / "token").chmod(0o644)
    with pytest.raises(ConfigError, match="other users may read the file"):
        read_token(good)
    (tmp_path / "token").unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(good)


def test_a_token_in_the_wrong_place_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """If a token is given instead of the name of a variable or file, the message does not show the token."""
    for key in ("manage_token_env", "manage_token_file"):
        extra = json.dumps({"manage": "127.0.0.1:1", key: TOKEN})
        assert cli.main(["check", extra]) == 2
        assert TOKEN not in "".join(capsys.readouterr())
        with pytest.raises(ConfigError) as caught:
            read_token(load_settings(json.loads(extra)))
        assert TOKEN not in str(caught.value)


def test_missing_fastapi_is_reported_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If FastAPI is not installed, the message names the remedy."""
    monkeypatch.delitem(sys.modules, "kvpipe.manage.api", raising=False)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvpipe\[manage\]'"):
        Managed(tmp_path)


def test_bytes_without_http_get_an_http_error(managed: Managed) -> None:
    """Bytes that are no HTTP request get an HTTP error."""
    assert _answer(managed, b"\x00\x01\x02 nonsense\r\n\r\n").startswith(b"HTTP/1.1 400")
