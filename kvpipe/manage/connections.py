"""uvicorn's connections, with a limited number and a limited lifetime.

Clients with the token and clients without the token have separate limits. So clients without the token do not use up
the connections of clients with the token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, MutableMapping
from typing import Any, Final

from h11 import LocalProtocolError
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvpipe.trace.log import Counters

CONNECTIONS_MAX: Final = 32
"""The largest number of open connections of clients that have sent the token."""
UNKNOWN_MAX: Final = 128
"""The largest number of open connections over which no request with the token was received yet."""
ACCEPTED_MAX: Final = 32
"""The largest number of connections that the loop accepts at once.

The loop may accept 3 times this number of connections before it reads a request.
"""
CONNECTION_S_MAX: Final = 30.0
"""The longest lifetime of a connection in seconds. This limit also ends a request in progress."""
HEADERS_S_MAX: Final = 5.0
"""The deadline of a header in seconds: from the connection's start, or from the first byte of a later header.

An idle connection is closed this number of seconds after its last answer.
"""

# a name without a dot, because configuring a parent logger would reset this logger
_SILENT: Final = logging.getLogger("kvpipe-manage-http")
"""The logger of uvicorn's connections. This logger is silent, because clients could cause any number of lines."""
_SILENT.propagate = False
_SILENT.addHandler(logging.NullHandler())


class Places:
    """The open connections of one server. Connections with the token and without the token are counted separately.

    If more than `UNKNOWN_MAX` connections have not sent the token, the oldest such connection is closed. If more than
    `CONNECTIONS_MAX` connections have sent the token, the oldest idle connection with the token is closed.
    """

    def __init__(self, admits: Callable[[MutableMapping[str, Any]], bool], counters: Counters) -> None:
        """`admits(scope)` tells whether a request has the token."""
        self.admits, self._counters = admits, counters
        self._unknown, self._known = (
            dict[BoundedConnection, None](),
            dict[BoundedConnection, None](),
        )  # both in order of age, the oldest first

    def protocol(self) -> type[H11Protocol]:
        """Return the class of this server's connections, for uvicorn."""
        return type("Connection", (BoundedConnection,), {"places": self})

    def enter(self, one: BoundedConnection) -> None:
        """Add a new connection. If too many connections are without the token, close the oldest such connection."""
        if len(self._unknown) >= UNKNOWN_MAX:
            self._close(next(iter(self._unknown)))
        self._unknown[one] = None

    def asks(self, one: BoundedConnection) -> None:
        """Handle a complete request header of the connection `one`.

        If the header has the token, move `one` to the connections with the token.
        """
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
        """Remove a connection."""
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
    """A connection with a bounded lifetime, and a deadline for the header of each request."""

    places: Places

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  (uvicorn's)
        """See `H11Protocol`."""
        super().__init__(*args, **kwargs)
        self.access_log, self.logger = False, _SILENT
        self._end: Any = None
        self._late: Any = None

    @property
    def idle(self) -> bool:
        """Whether no request is being answered, because no header is complete or the last answer is complete."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:  # noqa: ANN401
        """Add this connection to `places`, and start its deadlines."""
        super().connection_made(transport)
        self._end = self.loop.call_later(CONNECTION_S_MAX, self._over)
        self._late = self.loop.call_later(HEADERS_S_MAX, self._over)
        self.places.enter(self)

    def data_received(self, data: bytes) -> None:
        """Start the header's deadline at the header's first byte, and cancel the deadline at the header's end."""
        super().data_received(data)
        if self.idle:
            self._late = self._late or self.loop.call_later(HEADERS_S_MAX, self._over)
        else:
            self._cancel_late()
            self.places.asks(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove this connection from `places`, and cancel its deadlines."""
        self.places.leave(self)
        self._cancel_late()
        if self._end is not None:
            self._end.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Count a malformed request, and answer it with status 400."""
        self.places.refused("request")
        try:
            super().send_400_response(msg)
        except LocalProtocolError:  # the request is a HEAD, whose answer has no body, or an answer has begun
            self.transport.close()

    def _cancel_late(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _over(self) -> None:
        self.places.refused("slow")
        self.transport.abort()
