"""Connections to Redis and Valkey servers through redis-py, plain or with TLS. This module imports the client."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import redis

from kvpipe.tiers.redis.resp import ServerConnection
from kvpipe.tiers.redis.spec import RedisSpec


def dialling(spec: RedisSpec, password: str) -> Callable[[str, int], ServerConnection]:
    """Return a function that makes an unconnected `ServerConnection` for a host and port."""
    options: dict[str, Any] = {"db": spec.db, "username": spec.username or None, "password": password or None}
    options |= dict.fromkeys(("socket_timeout", "socket_connect_timeout"), spec.timeout_ms_max / 1000)

    class Connection(redis.Connection):
        """A connection of redis-py, plain or with TLS.

        redis-py's own class for TLS is not used, because it reads the system's certificate authorities for every
        connection. This takes 30 ms.
        """

        def _connect(self) -> socket.socket:
            sock: socket.socket = super()._connect()  # type: ignore[no-untyped-call]
            if not spec.tls:
                return sock
            try:
                return spec.tls_context().wrap_socket(sock, server_hostname=self.host)
            except OSError:
                sock.close()
                raise

    def dial(host: str, port: int, reader: Callable[..., ServerConnection]) -> redis.Connection:
        return Connection(host=host, port=port, protocol=2, parser_class=reader, **options)  # type: ignore[no-untyped-call]

    return lambda host, port: ServerConnection(partial(dial, host, port), password, spec.username)
