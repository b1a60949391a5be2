"""uvicorn on a loop thread of kvpipe. A guard checks the token and the size of each request."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, Literal

import uvicorn
from uvicorn.config import Config

from kvpipe.inputs.listening import OperatorSocket
from kvpipe.manage.connections import ACCEPTED_MAX, HEADERS_S_MAX, Places
from kvpipe.threads.loop import LoopThread, Task
from kvpipe.trace.log import Counters

BODY_BYTES_MAX: Final = 1 << 20
HEADER_BYTES_MAX: Final = 16 << 10

RefusalReason = Literal["body", "connections", "request", "slow", "token"]
AsgiScope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
AsgiApp = Callable[[AsgiScope, Receive, Send], Awaitable[None]]


class _BrokenOffError(Exception):
    """This error means that a client has disconnected before it sent its whole body."""


class Guard:
    """Passes requests with the token and a short enough body to `app`. Exceptions of `app` are counted, not raised."""

    def __init__(self, app: AsgiApp, token: bytes, counters: Counters) -> None:
        """`token` must follow `Bearer` in the header `Authorization` of every request."""
        self._app, self._counters = app, counters
        self._wanted = hashlib.sha256(b"Bearer " + token).digest()

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Serve one ASGI request.

        A wrong token is answered with status 401, a too long body with status 413. `app` answers all other requests.
        """
        if scope["type"] != "http":
            return
        self._counters["manage_requests"] += 1
        headers = dict(scope["headers"])
        if not self.admits(scope):
            await self._refuse(send, 401, "token", "send 'Authorization: Bearer TOKEN' with the engine's token")
            return
        try:
            body = await self._body(headers, receive)
            if body is None:
                await self._refuse(send, 413, "body", f"a body has at most {BODY_BYTES_MAX} bytes")
                return
            await self._app(scope, _replay(body, receive), send)
        except _BrokenOffError:  # the client has disconnected, so no answer is sent
            return
        except Exception as error:  # noqa: BLE001  (the engine must continue)
            self._counters.fault("contained_error", where="manage", error=repr(error))

    def admits(self, scope: AsgiScope) -> bool:
        """Whether a request has the token."""
        # two such headers fail
        tokens = b", ".join(value for name, value in scope["headers"] if name == b"authorization")
        # digests have equal lengths, so comparing them does not reveal the token's length
        given = hashlib.sha256(tokens).digest()
        return hmac.compare_digest(given, self._wanted)

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        """Return the body. Returns None, and stops reading, if the body is too long. Raises _BrokenOffError."""
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

    async def _refuse(self, send: Send, status: int, why: RefusalReason, message: str) -> None:
        self._counters.count("manage_refused", why)
        text = json.dumps({"error": message}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(text)).encode())]
        with contextlib.suppress(Exception):  # the client may have disconnected
            await send(
                {"type": "http.response.start", "status": status, "headers": [*headers, (b"connection", b"close")]}
            )
            await send({"type": "http.response.body", "body": text})


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `Receive` that returns `body` at its first call, and the result of `receive` at each later call."""
    first = [body]

    async def replayed() -> MutableMapping[str, Any]:
        if first:
            return {"type": "http.request", "body": first.pop(), "more_body": False}
        return await receive()

    return replayed


class OperatorServer:
    """Serves one engine's operators until `stop` is called."""

    def __init__(
        self, listener: OperatorSocket, app: AsgiApp, token: bytes, counters: Counters, tasks: tuple[Task, ...] = ()
    ) -> None:
        """Start the server's thread, which also runs `tasks`. `stop` closes `listener`."""
        self._listener, self._counters, self.address = listener, counters, listener.address
        guard = Guard(app, token, counters)
        config = Config(
            guard, http=Places(guard.admits, counters).protocol(), interface="asgi3", loop="none", ws="none",
            lifespan="off", log_config=None, proxy_headers=False, server_header=False, date_header=False,
            h11_max_incomplete_event_size=HEADER_BYTES_MAX, backlog=ACCEPTED_MAX, timeout_keep_alive=int(HEADERS_S_MAX),
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self.loop = LoopThread("kvpipe-manage", tasks=(self._serve, *tasks))

    def stop(self) -> None:
        """Stop the server, and close the listener. Later calls have no effect."""
        self.loop.stop()
        self._listener.close()

    async def _serve(self) -> None:
        try:
            # a copy, because uvicorn closes the socket that it gets
            await self._server.serve(sockets=[self._listener.socket.dup()])
        finally:
            for server in getattr(self._server, "servers", ()):
                server.close()
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()
