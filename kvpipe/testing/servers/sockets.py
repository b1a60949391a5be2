"""Ports of loopback, and servers on them that answer whatever a test wants."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedIOBase

LOCAL = "127.0.0.1"


def free_port() -> int:
    """Return a port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((LOCAL, 0))
        return int(probe.getsockname()[1])


@contextmanager
def listening(serve: Callable[[BufferedIOBase, BufferedIOBase], None], host: str = LOCAL) -> Iterator[int]:
    """Run `serve(received, sent)` for every connection to a port, which is yielded, in a thread of its own."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            serve(self.rfile, self.wfile)

    class Listener(socketserver.ThreadingTCPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            """Ignore clients that disconnect."""

    with Listener((host, 0), Handler) as listener:
        thread = threading.Thread(target=listener.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield listener.server_address[1]
        finally:
            listener.shutdown()
            thread.join()
