"""Requests to a running engine's management interface, by the HTTP client of the standard library."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import pwd
import shlex
import socket
import struct
import time
from typing import Any, Final

from kvpipe.errors import UsageError
from kvpipe.inputs import config_errors, files
from kvpipe.inputs.listening import UNIX, Address
from kvpipe.manage.start import check_token

ANSWER_S_MAX: Final = 60.0
ANSWER_BYTES_MAX: Final = 16 << 20
_AGAIN_S: Final = 0.01
_NUMBER_END: Final = 1 << 63
_SHOWN_DIGITS: Final = 20
_ROOT: Final = 0
_CREDENTIALS: Final = struct.Struct("iII")  # ucred: pid, uid, gid


class _OverUnix(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        """Connect. Raises OSError if no process listens, UsageError if the listening user must not get the token."""
        until_s = time.monotonic() + (self.timeout or 0)
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        while True:
            try:
                self.sock.connect(self._path)
            except BlockingIOError:  # the listener's queue of connections is full
                if time.monotonic() > until_s:
                    raise
                time.sleep(_AGAIN_S)
            else:
                break
        _check_listener(self.sock, self._path)


def _check_listener(connected: socket.socket, path: str) -> None:
    """Raise UsageError unless this user or root listens at `path`.

    Any user who can write to the folder of `path` could listen there.
    """
    listens, trusted = _listener(connected), dict.fromkeys((os.geteuid(), _ROOT))
    if listens not in trusted:
        who = _name(listens)
        raise UsageError(
            f"kvpipe: {UNIX}{path}: the user {who} listens there, not {' or '.join(map(_name, trusted))}: no token is "
            f"sent; ask as `sudo -u {shlex.quote(who)}` if the engine is that user's, else use a folder that "
            "only you may write to"
        )


def _listener(connected: socket.socket) -> int:
    """Return the id of the user who listens at a Unix socket. The kernel reports the id (SO_PEERCRED)."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return int(user)


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"#{user}"  # the form in which sudo accepts the id of a user


class _NumberError(ValueError):
    """This error means that a number in an answer is not finite, or too large for an engine's answer."""


def _integer(text: str) -> int:
    """Parse a whole number. Raises `_NumberError` if its absolute value is 2**63 or more."""
    if len(text) > len(str(_NUMBER_END)) or abs(int(text)) >= _NUMBER_END:
        raise _NumberError(f"a number of {len(text)} digits")
    return int(text)


def _real(text: str) -> float:
    """Parse a number. Raises `_NumberError` if its absolute value is 2**63 or more, or if it is NaN."""
    value = float(text)
    if not abs(value) < _NUMBER_END:
        raise _NumberError(f"the number {text[:_SHOWN_DIGITS]}")
    return value


def connect(address: Address, answer_s_max: float = ANSWER_S_MAX) -> http.client.HTTPConnection:
    """Return a connection object for the engine at `address`. The object connects at its first request.

    `answer_s_max` is the timeout, in seconds, of each operation on the socket.
    """
    if address.path:
        return _OverUnix(address.path, answer_s_max)
    return http.client.HTTPConnection(address.host, address.port, timeout=answer_s_max)


def send_request(
    address: Address, token: str, method: str, path: str, body: object = None, answer_s_max: float = ANSWER_S_MAX
) -> dict[str, Any]:
    """Send a request and return the decoded JSON of the answer. `answer_s_max` limits each operation on the socket.

    Raises:
        UsageError: no engine answers at `address`, or another user listens there. Or the answer has a number that is
            too large or not finite, or a status other than 200 and 202. Or the token has characters that no HTTP header
            can hold.

    """
    check_token(token)  # before the request, because http.client's error about a bad header would show the token
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    content = None if body is None else json.dumps(body, separators=(",", ":"))
    connection = connect(address, answer_s_max)
    try:
        connection.connect()
        # the engine has refused the request before it read the whole body
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.request(method, path, content, headers)
        answer = connection.getresponse()
        found = json.loads(answer.read(ANSWER_BYTES_MAX), parse_int=_integer, parse_float=_real, parse_constant=_real)
        if not isinstance(found, dict):
            raise http.client.HTTPException("the answer is not an engine's")  # noqa: TRY301
    except UsageError:
        raise
    except _NumberError as error:
        raise UsageError(f"kvpipe: {address}: its answer is unreadable ({error})") from None
    except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
        why = config_errors.pydantic_reason(files.why(error))  # the text may come from another program than an engine
        raise UsageError(f"kvpipe: no engine answers at {address} ({why})") from None
    finally:
        connection.close()
    if answer.status not in {http.client.OK, http.client.ACCEPTED}:
        if "error" in found:
            why = config_errors.pydantic_reason(str(found["error"]))
            raise UsageError(f"kvpipe: the engine has refused ({answer.status}): {why}")
        why = "this is not a management interface; use the address in the engine's `manage`"
        raise UsageError(f"kvpipe: {address}: status {answer.status}: {why}")
    return found
