"""The client sends the token only to an engine of its own user or of root, and to no other listener at a socket."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpipe.cli import main as cli
from kvpipe.errors import ConfigError
from kvpipe.inputs.listening import Address, OperatorSocket
from kvpipe.manage import client
from kvpipe.testing.waiting import WAIT_S
from tests.manage.conftest import TOKEN, Managed
from tests.rigs.forks import done_in_fork, forked
from tests.rigs.servers.sockets import free_port

_ANOTHER = 65533


@contextlib.contextmanager
def _another_listens(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Listen as another user.

    Only root can become another user. If this process is not root, the test fakes the listener's user.
    """
    user = os.geteuid()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        if not user:
            try:
                os.seteuid(_ANOTHER)
            except OSError:  # in some containers, root may not become another user
                monkeypatch.setattr(client, "_listener", lambda _: _ANOTHER)
        try:
            listener.listen()  # the kernel now remembers the listener's user
        finally:
            os.seteuid(user)
        if user:
            monkeypatch.setattr(os, "geteuid", lambda: _ANOTHER)
        yield listener


def test_fork_does_not_close_the_socket_of_its_parent(managed: Managed) -> None:
    """A fork may garbage-collect its copy of the engine.

    The operators' socket still exists, and the engine serves it.
    """
    assert done_in_fork(managed.server.stop)
    assert managed.ask("GET", "/v1/switches")[0] == http.client.OK
    with pytest.raises(ConfigError, match="a running engine listens there"):
        OperatorSocket(Address.parse(managed.settings.manage), "e1", "manage")


@pytest.mark.parametrize("kind", ["path", "port"])
def test_address_is_free_again_while_a_fork_lives(kind: str, tmp_path: Path) -> None:
    """A fork has copies of the socket and the lock. The next engine in the process must still get the address."""
    at = f"unix:{tmp_path}/e1.sock" if kind == "path" else f"127.0.0.1:{free_port()}"
    first = Managed(tmp_path, manage=at)
    with forked():
        first.server.stop()
        second = Managed(tmp_path, manage=at)
        assert second.ask("GET", "/v1/switches")[0] == http.client.OK
        second.server.stop()


@pytest.mark.parametrize("command", [["engine", "state"], ["cache", "pins"], ["top", "--once"]])
def test_token_is_not_sent_to_the_socket_of_another_user(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command does not send the token. Its message names the address, the user and the remedy."""
    token, path = tmp_path / "token", tmp_path / "e1.sock"
    token.write_text(TOKEN, encoding="utf-8")
    with _another_listens(path, monkeypatch) as listener:
        assert cli.main([*command, "--at", f"unix:{path}", "--token-file", str(token)]) in {1, 2}
        listener.settimeout(WAIT_S)
        taken, _ = listener.accept()
        with taken:
            taken.settimeout(WAIT_S)
            assert taken.recv(1) == b""
    stated = " ".join("".join(capsys.readouterr()).split())
    assert f"unix:{path}: the user " in stated
    assert "no token is sent; ask as `sudo -u " in stated


@pytest.mark.parametrize("user", [0, 1000])
def test_socket_of_this_user_or_of_root_is_asked(
    user: int, managed: Managed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user with the token can operate the user's own engines and root's engines, but no other user's engines."""
    monkeypatch.setattr(client, "_listener", lambda _: user)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    at = ["--at", str(managed.address), "--token-file", str(tmp_path / "token")]
    assert cli.main(["engine", "state", *at]) == 0
    monkeypatch.setattr(os, "geteuid", lambda: 1001)
    assert cli.main(["engine", "state", *at]) == (0 if user == 0 else 2)
