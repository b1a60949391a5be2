"""The management interface over TLS, with nginx beside the engine and stunnel beside the operator, as in `deploy/`."""

from __future__ import annotations

import http.client
import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvpipe.cli.main import main
from kvpipe.testing.waiting import WAIT_S, eventually
from tests.manage.conftest import TOKEN, Managed
from tests.rigs.servers.redis import Certificates, certificates
from tests.rigs.servers.sockets import LOCAL, free_port

DEPLOY = Path(__file__).parents[2] / "deploy"


@contextmanager
def _serving(port: int, *command: str | Path) -> Iterator[None]:
    """Run a server that stays in the foreground and listens on a port of loopback."""
    with subprocess.Popen(command) as process:

        def begun() -> bool:
            with socket.socket() as probe:
                return process.poll() is not None or probe.connect_ex((LOCAL, port)) == 0

        try:
            assert eventually(begun)
            assert process.poll() is None
            yield
        finally:
            process.terminate()
            process.wait(WAIT_S)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Managed]:
    """Yield an engine that serves on a port to which nginx connects."""
    one = Managed(tmp_path, manage=f"{LOCAL}:{free_port()}")
    yield one
    one.server.stop()


@pytest.fixture
def files(tmp_path: Path) -> Certificates:
    """Return the files of a certificate authority, and a certificate that both sides show."""
    return certificates(tmp_path)


@pytest.fixture
def tls_port(engine: Managed, files: Certificates, tmp_path: Path) -> Iterator[int]:
    """Yield the port of nginx with `deploy/nginx.conf`, with this test's ports and files."""
    port = free_port()
    text = (DEPLOY / "nginx.conf").read_text(encoding="utf-8")
    for old, new in {
        "/tmp/": f"{tmp_path}/",  # noqa: S108  (the container's own)
        "/etc/nginx/tls/server.crt": str(files.cert),
        "/etc/nginx/tls/server.key": str(files.key),
        "/etc/nginx/tls/clients.crt": str(files.ca),
        "127.0.0.1:9400": str(engine.address),
        "listen 9443": f"listen {LOCAL}:{port}",
        "/dev/stdout": f"{tmp_path}/access.log",
    }.items():
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "nginx.conf").write_text(text, encoding="utf-8")
    program = shutil.which("nginx") or "/usr/sbin/nginx"
    with _serving(port, program, "-c", tmp_path / "nginx.conf", "-g", "daemon off;"):
        yield port


def _status(port: int, files: Certificates, *, shows: bool, token: str = TOKEN) -> int:
    """Request the engine's state and return the status. With `shows` the client shows its certificate."""
    context = ssl.create_default_context(cafile=str(files.ca))
    if shows:
        context.load_cert_chain(files.cert, files.key)
    connection = http.client.HTTPSConnection("localhost", port, context=context, timeout=WAIT_S)
    try:
        connection.request("GET", "/v1/state", headers={"Authorization": f"Bearer {token}"})
        return connection.getresponse().status
    finally:
        connection.close()


def test_nginx_lets_in_certificate_and_token(tls_port: int, files: Certificates) -> None:
    """A client without the certificate is refused by nginx, and a client without the token by the engine."""
    assert _status(tls_port, files, shows=True) == http.client.OK
    assert _status(tls_port, files, shows=True, token="wrong" * 8) == http.client.UNAUTHORIZED
    assert _status(tls_port, files, shows=False) == http.client.BAD_REQUEST


def test_kvpipe_asks_through_stunnel(
    tls_port: int, files: Certificates, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`kvpipe engine state --at 127.0.0.1:PORT` reaches the engine through stunnel and nginx."""
    port = free_port()
    text = (DEPLOY / "stunnel-client.conf").read_text(encoding="utf-8")
    for old, new in {
        r"^accept = .*": f"accept = {LOCAL}:{port}",
        r"^connect = .*": f"connect = {LOCAL}:{tls_port}",
        r"^checkHost = .*": "checkHost = localhost",
        r"^CAfile = .*": f"CAfile = {files.ca}",
        r"^cert = .*": f"cert = {files.cert}",
        r"^key = .*": f"key = {files.key}",
    }.items():
        text, count = re.subn(old, new, text, flags=re.MULTILINE)
        assert count == 1
    (tmp_path / "stunnel.conf").write_text(text, encoding="utf-8")
    with _serving(port, "stunnel", tmp_path / "stunnel.conf"):
        status = main(["engine", "state", "--at", f"{LOCAL}:{port}", "--token-file", str(tmp_path / "token"), "--json"])
    assert status == 0
    assert '"engine":"e1"' in capsys.readouterr().out.replace(" ", "")
