"""uvicorn on a loop thread of kvpipe's own, behind a guard: it checks the token and bounds bytes, time, connections."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, Literal

import uvicorn
from h11 import LocalProtocolError
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvpipe.listening import OperatorSocket
from kvpipe.loop import LoopThread
from kvpipe.trace.log import Counters

BODY_BYTES_MAX: Final = 1 << 20
HEADER_BYTES_MAX: Final = 16 << 10
CONNECTIONS_MAX: Final = 32
CONNECTION_S_MAX: Final = 30.0
"""The longest life of a connection, in seconds, busy or not."""

_SILENT: Final = logging.getLogger("kvpipe-manage-http")  # no other's child: whoever configures one resets its children
"""uvicorn's logger, which would write lines without bound about what clients send."""
_SILENT.propagate = False
_SILENT.addHandler(logging.NullHandler())

Refusal = Literal["body", "connections", "request", "slow", "token"]
AsgiScope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
AsgiApp = Callable[[AsgiScope, Receive, Send], Awaitable[None]]


class _BrokenOffError(Exception):
    """A client has disconnected before its body's end."""


class Guard:
    """Passes requests with the token and a body within bounds to `app`. Exceptions of `app` are counted, not raised."""

    def __init__(self, app: AsgiApp, token: bytes, counters: Counters) -> None:
        """`token`: what must follow `Bearer` in the header `Authorization`."""
        self._app, self._counters = app, counters
        self._wanted = hashlib.sha256(b"Bearer " + token).digest()

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Serve one ASGI request: 401 for a wrong token, 413 for a body that is too long, else what `app` answers."""
        if scope["type"] != "http":
            return
        self._counters["manage_requests"] += 1
        headers = dict(scope["headers"])
        tokens = b", ".join(value for name, value in scope["headers"] if name == b"authorization")  # two are none
        given = hashlib.sha256(tokens).digest()  # as long as the other
        if not hmac.compare_digest(given, self._wanted):
            await self._refuse(send, 401, "token", "send 'Authorization: Bearer TOKEN' with the engine's token")
            return
        try:
            body = await self._body(headers, receive)
            if body is None:
                await self._refuse(send, 413, "body", f"a body has at most {BODY_BYTES_MAX} bytes")
                return
            await self._app(scope, _replay(body, receive), send)
        except _BrokenOffError:  # nobody is there to be answered
            return
        except Exception as error:  # noqa: BLE001  (the engine goes on)
            self._counters.fault("contained_error", where="manage", error=repr(error))

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        """Return the body; None if it is too long (then the rest is not read). Raises _BrokenOffError."""
        length = headers.get(b"content-length", b"0")
        if len(length) > len(str(BODY_BYTES_MAX)) or int(length) > BODY_BYTES_MAX:
            return None
        parts, size, more = list[bytes](), 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _BrokenOffError
            parts.append(message.get("body", b""))
            more, size = bool(message.get("more_body", False)), size + len(parts[-1])
            if size > BODY_BYTES_MAX:
                return None
        return b"".join(parts)

    async def _refuse(self, send: Send, status: int, why: Refusal, message: str) -> None:
        self._counters.count("manage_refused", why)
        text = json.dumps({"error": message}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(text)).encode())]
        with contextlib.suppress(Exception):  # it may be gone
            await send(
                {"type": "http.response.start", "status": status, "headers": [*headers, (b"connection", b"close")]}
            )
            await send({"type": "http.response.body", "body": text})


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `Receive` that yields `body`, and then what `receive` does."""
    first = [body]

    async def replayed() -> MutableMapping[str, Any]:
        if first:
            return {"type": "http.request", "body": first.pop(), "more_body": False}
        return await receive()

    return replayed


class OperatorServer:
    """Serves one engine's operators until `stop`."""

    def __init__(self, listener: OperatorSocket, app: AsgiApp, token: bytes, counters: Counters) -> None:
        """Start the thread. `stop` closes `listener`."""
        self._listener, self._counters = listener, counters
        config = Config(
            Guard(app, token, counters), http=self._protocol(), interface="asgi3", loop="none", ws="none",
            lifespan="off", log_config=None, proxy_headers=False, server_header=False, date_header=False,
            h11_max_incomplete_event_size=HEADER_BYTES_MAX, backlog=CONNECTIONS_MAX,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self.loop = LoopThread("kvpipe-manage", tasks=(self._serve,))

    def stop(self) -> None:
        """Stop serving, and close the listener. Idempotent."""
        self.loop.stop()
        self._listener.close()

    async def _serve(self) -> None:
        try:
            await self._server.serve(sockets=[self._listener.socket.dup()])  # it closes what it is given
        finally:
            for server in getattr(self._server, "servers", ()):
                server.close()
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()

    def _protocol(self) -> type[H11Protocol]:
        counters, oldest_first = self._counters, dict[Any, None]()

        class Bounded(H11Protocol):
            """A connection with a bounded life and in bounded number: the oldest idle one is closed for a new one."""

            def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  (uvicorn's)
                super().__init__(*args, **kwargs)
                self.access_log, self.logger = False, _SILENT
                self._end: Any = None

            def connection_made(self, transport: Any) -> None:  # noqa: ANN401
                """Count the connection; close the oldest idle one if there are too many, else this one."""
                super().connection_made(transport)
                if len(oldest_first) >= CONNECTIONS_MAX:
                    idle = next((one for one in oldest_first if one.cycle is None or one.cycle.response_complete), self)
                    oldest_first.pop(idle, None)
                    counters.count("manage_refused", "connections")
                    idle.transport.abort()
                    if idle is self:
                        return
                oldest_first[self] = None
                self._end = self.loop.call_later(CONNECTION_S_MAX, self._over)

            def connection_lost(self, exc: Exception | None) -> None:
                """Count the connection no more."""
                oldest_first.pop(self, None)
                if self._end is not None:
                    self._end.cancel()
                super().connection_lost(exc)

            def send_400_response(self, msg: str) -> None:
                """Count a malformed request, and answer it."""
                counters.count("manage_refused", "request")
                try:
                    super().send_400_response(msg)
                except LocalProtocolError:  # a HEAD, whose answer has no body, or an answer that has begun
                    self.transport.close()

            def _over(self) -> None:
                counters.count("manage_refused", "slow")
                self.transport.abort()

        return Bounded
