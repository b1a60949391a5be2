"""Ports of loopback, and servers whose answers a test defines."""

from __future__ import annotations

import atexit
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from io import BufferedIOBase

LOCAL = "127.0.0.1"

_held = ExitStack()
atexit.register(_held.close)


def free_port() -> int:
    """Return a port of loopback on which no process listens.

    A socket that does not listen holds the port until this process ends, so the system gives the port to no other
    process. Servers can still listen on the port, because they set SO_REUSEADDR, as this socket does.
    """
    holder = _held.enter_context(socket.socket())
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((LOCAL, 0))
    return int(holder.getsockname()[1])


@contextmanager
def listening(serve: Callable[[BufferedIOBase, BufferedIOBase], None], host: str = LOCAL) -> Iterator[int]:
    """Run `serve(received, sent)` in its own thread for every connection to a port. Yields the port."""

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
