"""uvicorn's connections, bounded in number and time. Clients without the token take no places from those with it."""

from __future__ import annotations

import logging
from collections.abc import Callable, MutableMapping
from typing import Any, Final

from h11 import LocalProtocolError
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvpipe.trace.log import Counters

CONNECTIONS_MAX: Final = 32
"""Connections of clients that have sent the token."""
UNKNOWN_MAX: Final = 128
"""Connections of which no request with the token has come yet."""
ACCEPTED_MAX: Final = 32
"""How many connections the loop accepts at once. It accepts up to 3 times as many before it reads the first request."""
CONNECTION_S_MAX: Final = 30.0
"""The longest life of a connection, in seconds, busy or not."""
HEADERS_S_MAX: Final = 5.0
"""How long a connection may be without a complete header, in seconds: from its beginning, or after an answer."""

_SILENT: Final = logging.getLogger("kvpipe-manage-http")  # no other's child: whoever configures one resets its children
"""uvicorn's logger, which would write lines without bound about what clients send."""
_SILENT.propagate = False
_SILENT.addHandler(logging.NullHandler())


class Places:
    """The open connections of one server. Two kinds are counted apart: those that have sent the token, and others.

    If there are too many others, the oldest is closed. If too many have sent the token, the oldest idle one is closed.
    """

    def __init__(self, admits: Callable[[MutableMapping[str, Any]], bool], counters: Counters) -> None:
        """`admits(scope)`: whether a request has the token."""
        self.admits, self._counters = admits, counters
        self._unknown, self._known = (
            dict[BoundedConnection, None](),
            dict[BoundedConnection, None](),
        )  # the oldest first

    def protocol(self) -> type[H11Protocol]:
        """Return the class of this server's connections, for uvicorn."""
        return type("Connection", (BoundedConnection,), {"places": self})

    def enter(self, one: BoundedConnection) -> None:
        """Count a new connection."""
        if len(self._unknown) >= UNKNOWN_MAX:
            self._close(next(iter(self._unknown)))
        self._unknown[one] = None

    def asks(self, one: BoundedConnection) -> None:
        """A connection has sent the whole header of a request."""
        if one not in self._unknown or not self.admits(one.scope):  # type: ignore[arg-type]
            return
        del self._unknown[one]
        if len(self._known) >= CONNECTIONS_MAX:
            idle = next((other for other in self._known if other.idle), one)
            self._close(idle)
            if idle is one:
                return
        self._known[one] = None

    def leave(self, one: BoundedConnection) -> None:
        """Count a connection no more."""
        self._unknown.pop(one, None)
        self._known.pop(one, None)

    def _close(self, one: BoundedConnection) -> None:
        self.refused("connections")
        self.leave(one)
        one.transport.abort()

    def refused(self, why: str) -> None:
        """Count a refusal."""
        self._counters.count("manage_refused", why)


class BoundedConnection(H11Protocol):
    """A connection with a bounded life, and a deadline for the header of each request."""

    places: Places

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  (uvicorn's)
        """See `H11Protocol`."""
        super().__init__(*args, **kwargs)
        self.access_log, self.logger = False, _SILENT
        self._end: Any = None
        self._late: Any = None

    @property
    def idle(self) -> bool:
        """Whether no request is being answered: its header has not come, or the answer is complete."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:  # noqa: ANN401
        """Take a place, and begin the deadlines."""
        super().connection_made(transport)
        self._end = self.loop.call_later(CONNECTION_S_MAX, self._over)
        self._late = self.loop.call_later(HEADERS_S_MAX, self._over)
        self.places.enter(self)

    def data_received(self, data: bytes) -> None:
        """Begin the header's deadline with its first byte, and end it with its last."""
        super().data_received(data)
        if self.idle:
            self._late = self._late or self.loop.call_later(HEADERS_S_MAX, self._over)
        else:
            self._cancel_late()
            self.places.asks(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Give the place back."""
        self.places.leave(self)
        self._cancel_late()
        if self._end is not None:
            self._end.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Count a malformed request, and answer it."""
        self.places.refused("request")
        try:
            super().send_400_response(msg)
        except LocalProtocolError:  # a HEAD, whose answer has no body, or an answer that has begun
            self.transport.close()

    def _cancel_late(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _over(self) -> None:
        self.places.refused("slow")
        self.transport.abort()
