"""The holder's listening socket, which rests while the holder has no descriptor for another connection."""

from __future__ import annotations

import contextlib
import errno
import logging
import selectors
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

NO_DESCRIPTOR: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
"""The errors after which a connection stays in the socket's queue."""
_log = logging.getLogger("kvpipe.node")


class Listener:
    """Accepts connections, in the selector of the holder."""

    def __init__(
        self, path: Path, selector: selectors.BaseSelector, rest_s: float, accepted: Callable[[socket.socket], None]
    ) -> None:
        """Listen on `path`. `accepted` gets each connection. Without a descriptor, no call accepts for `rest_s`."""
        self._selector, self._rest_s, self._accepted = selector, rest_s, accepted
        self._rests_until_s: float | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        self._socket.bind(str(path))
        path.chmod(0o600)
        self._socket.listen(64)
        self._socket.setblocking(False)  # noqa: FBT003
        self._listen()

    def _listen(self) -> None:
        self._selector.register(self._socket, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        try:
            wire, _ = self._socket.accept()
        except OSError as error:
            if error.errno in NO_DESCRIPTOR:
                self._rest(error)
            return
        self._rests_until_s = None
        wire.setblocking(False)  # noqa: FBT003
        self._accepted(wire)

    def _rest(self, error: OSError) -> None:
        """Take the socket out of the selector, because the waiting connection would wake the holder in a loop."""
        if self._rests_until_s is None:
            _log.warning("connections wait, because the holder has no descriptor for them: %s", error)
        self._rests_until_s = time.monotonic() + self._rest_s
        self._selector.unregister(self._socket)

    def step(self) -> None:
        """Listen again if the rest is over."""
        rests = self._rests_until_s is not None and self._socket.fileno() not in self._selector.get_map()
        if rests and time.monotonic() >= (self._rests_until_s or 0):
            self._listen()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
