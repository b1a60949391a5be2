"""A real S3 server (moto) in its own process, on a free port of loopback."""

from __future__ import annotations

import atexit
import functools
import http.client
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Self

from kvpipe.testing.waiting import WAIT_S
from tests.rigs.servers import signals
from tests.rigs.servers.sockets import LOCAL, free_port

BUCKET = "kvpipe-tests"

_numbers = itertools.count(1)


class S3Server:
    """A server with an empty bucket. The objects are lost when the server ends."""

    def __init__(self, **environment: str) -> None:
        """Make a server that is not started yet. `environment`: additional variables for the server."""
        self.port = free_port()
        self._environment = os.environ | environment
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """The server's URL."""
        return f"http://{LOCAL}:{self.port}"

    def start(self) -> Self:
        """Start the server on the same port as before, and return when the bucket exists."""
        command = [sys.executable, "-m", "moto.server", "-H", LOCAL, "-p", str(self.port)]
        self._process = subprocess.Popen(
            command, env=self._environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until = time.monotonic() + WAIT_S
        while True:
            try:
                assert self.ask("PUT", f"/{BUCKET}") == http.client.OK
            except OSError:
                assert self._process.poll() is None, "it has ended"
                assert time.monotonic() < until, "it does not listen"
                time.sleep(0.05)
            else:
                return self

    def ask(self, method: str, path: str, body: bytes | None = None) -> int:
        """Make a request without a signature, and return its status."""
        connection = http.client.HTTPConnection(LOCAL, self.port, timeout=WAIT_S)
        try:
            connection.request(method, path, body)
            return connection.getresponse().status
        finally:
            connection.close()

    def __enter__(self) -> Self:
        """Start the server."""
        return self.start()

    def __exit__(self, *_: object) -> None:
        """End the server."""
        self.kill()

    def kill(self) -> None:
        """Kill the server. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @contextmanager
    def without_bucket(self) -> Iterator[None]:
        """Remove the bucket and all objects for the context, and make an empty bucket at its end."""
        assert self.ask("POST", "/moto-api/reset") == http.client.OK
        try:
            yield
        finally:
            assert self.ask("PUT", f"/{BUCKET}") == http.client.OK

    def pause(self) -> None:
        """Stop the process: the kernel still accepts connections, but nothing is answered."""
        assert self._process is not None
        signals.send(self._process, signal.SIGSTOP)

    def resume(self) -> None:
        """Continue the process."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)


Answer = tuple[int, str]
"""The status of HTTP, and the code of S3's error, which is empty for no error."""


@contextmanager
def answering(answer: Callable[[str, bool], Answer]) -> Iterator[str]:
    """Serve answers that a real server cannot be made to give. Yields the URL.

    `answer` gets the method, and whether the request requires that no such object exists. The request's body is
    received only after `answer` has returned.
    """

    class S3Handler(BaseHTTPRequestHandler):
        def handle_one(self) -> None:
            status, code = answer(self.command, "If-None-Match" in self.headers)
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = f"<Error><Code>{code}</Code></Error>".encode() if code and self.command != "HEAD" else b""
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", '"1"')
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_HEAD = do_PUT = do_POST = handle_one  # noqa: N815

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer((LOCAL, 0), S3Handler)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://{LOCAL}:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@functools.cache
def shared() -> S3Server:
    """Return the server that all tests of a run share. Each test uses its own prefix."""
    server = S3Server().start()
    atexit.register(server.kill)
    return server


def fresh_prefix() -> str:
    """Return a prefix that no test has used."""
    return f"run-{os.getpid()}/{next(_numbers)}"
