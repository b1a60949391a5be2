"""Asks a running engine, with nothing but the standard library."""

from __future__ import annotations

import http.client
import json
import socket
import time
from typing import Any, Final

from kvpipe import files
from kvpipe.errors import UsageError
from kvpipe.listening import Address
from kvpipe.manage.start import check_token

ANSWER_S_MAX: Final = 60.0
ANSWER_BYTES_MAX: Final = 16 << 20
_AGAIN_S: Final = 0.01


class _OverUnix(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        until_s = time.monotonic() + (self.timeout or 0)
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        while True:
            try:
                self.sock.connect(self._path)
            except BlockingIOError:  # many are waiting to be taken
                if time.monotonic() > until_s:
                    raise
                time.sleep(_AGAIN_S)
            else:
                return


def connect(address: Address, answer_s_max: float = ANSWER_S_MAX) -> http.client.HTTPConnection:
    """Return a connection to the engine that listens at `address`, not yet made."""
    if address.path:
        return _OverUnix(address.path, answer_s_max)
    return http.client.HTTPConnection(address.host, address.port, timeout=answer_s_max)


def ask(
    address: Address, token: str, method: str, path: str, body: object = None, answer_s_max: float = ANSWER_S_MAX
) -> Any:  # noqa: ANN401  (JSON)
    """Return what the engine answers.

    Raises:
        UsageError: nobody listens there, the engine has refused, or no header can hold the token.

    """
    check_token(token)  # a header's error would show it
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    connection = connect(address, answer_s_max)
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        told = json.loads(answer.read(ANSWER_BYTES_MAX))
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise UsageError(f"kvpipe: no engine answers at {address} ({files.why(error)})") from None
    finally:
        connection.close()
    if answer.status not in {http.client.OK, http.client.ACCEPTED}:
        why = told.get("error", told.get("detail", "")) if isinstance(told, dict) else ""
        raise UsageError(f"kvpipe: the engine has refused ({answer.status}): {why}")
    return told
