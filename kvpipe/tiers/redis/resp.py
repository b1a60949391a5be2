"""One connection to a Redis or Valkey server. Values are sent from buffers, and received into buffers, without a copy.

redis-py makes the connection: name resolution, TCP, TLS, AUTH, SELECT. kvpipe does not use redis-py's reader and
pipelines. They copy values twice, are too slow for a thousand small replies, and read lines of any length.
"""

from __future__ import annotations

import contextlib
import math
import re
import select
import socket
import ssl
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeVar

if TYPE_CHECKING:
    from redis import Connection

VALUE_BYTES_MAX: Final = 512 << 20
"""The largest size of a value that the protocol permits, in bytes."""

LINE_BYTES_MAX: Final = 4096

SHOWN_MAX: Final = 200
_WAITS: Final = 4  # the number of waits per timeout; the connection fails after 3 waits without a byte
_BITS: Final = re.compile(rb"(?::[01]\r\n)+")
_RECEIVE_BYTES, _TLS_BYTES, _PARTS_MAX = 16 << 10, 256 << 10, 512


class ReplyBounds(NamedTuple):
    """Limits on the sum of all replies to one question. The caller sets the limits, so that no server can send more."""

    items: int = 0
    """The largest number of elements of all lists together."""
    bytes: int = 0
    """The largest number of bytes of all bulk strings together."""
    depth: int = 0
    """The deepest nesting of lists."""


SHORT: Final = ReplyBounds()
"""Limits for replies that are integers, simple strings or errors."""


class ErrorReply(str):
    """An error reply to a command: a code in capital letters, and a text."""

    __slots__ = ()

    @property
    def code(self) -> str:
        """The first word of the reply."""
        return self.partition(" ")[0]


class ServerConnectionError(OSError):
    """This error means that the connection cannot be made, or cannot be used any more."""


Reply: TypeAlias = "int | bytes | ErrorReply | list[Reply] | None"
_T = TypeVar("_T")
Dial = Callable[[Callable[..., Any]], "Connection"]
"""A function that makes an unconnected connection of redis-py. Its argument is a function that makes the reader."""


def command(*words: bytes) -> bytes:
    """Encode a command in RESP."""
    return b"*%d\r\n%s" % (len(words), _words(words))


ASKING: Final = b"*1\r\n$6\r\nASKING\r\n"
"""The command ASKING. It precedes each command to a server to which the key's slot is being migrated."""


def per_name(verb: bytes, names: Iterable[bytes], *options: bytes, before: bytes) -> bytes:
    """Encode a command for every name, and put `before` in front of each command."""
    head, tail = b"%b*%d\r\n%s" % (before, 2 + len(options), _words([verb])), _words(options)
    return b"".join([b"%b$%d\r\n%b\r\n%b" % (head, len(name), name, tail) for name in names])


def _words(words: Sequence[bytes]) -> bytes:
    return b"".join([b"$%d\r\n%s\r\n" % (len(word), word) for word in words])


class ServerConnection:
    """One connection, used by one thread at a time. Any thread may call `stop` at any time.

    All methods except `stop` and `close` may raise OSError. After an OSError only `close` may be called. If no byte
    moves, no wait is longer than the connection's `socket_timeout`.
    """

    def __init__(self, dial: Dial, *secrets: str) -> None:
        """Make an unconnected connection. `secrets` are the password and the user, which messages never show."""
        self._connection = dial(lambda **_: self)
        self._secrets = sorted(filter(None, secrets), key=len, reverse=True)
        self._sock: socket.socket | None = None
        self._stopped = False
        self._buffer = bytearray()
        self._at = 0  # the number of bytes of the buffer that have been consumed
        self._items = self._bytes = 0  # the numbers of elements and bytes that the remaining replies may have

    def connect(self) -> None:
        """Connect. Raises ServerConnectionError with a reason that contains no secret."""
        from redis import RedisError  # noqa: PLC0415  (heavy, and not always installed)

        try:
            self._connection.connect()  # type: ignore[no-untyped-call]
        except (RedisError, OSError) as error:
            self.close()
            cause = error.__context__ if isinstance(error.__context__, OSError) else error  # the original error
            raise ServerConnectionError(self._shown(connection_reason(cause))) from None
        if self._stopped:  # the caller was cancelled
            self.close()
            raise ServerConnectionError("stopped")
        sock = self._socket()
        if not isinstance(sock, ssl.SSLSocket) and (timeout_s := sock.gettimeout()):
            # The kernel waits for a whole value. Python would wait about ten times per value, and the thread would have
            # to reacquire the GIL after each wait.
            fraction, whole = math.modf(timeout_s / _WAITS)
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(whole), int(fraction * 1e6)))
            sock.settimeout(None)

    @property
    def closed(self) -> bool:
        """Whether the connection is not connected, as before `connect`, or after `close` or a failure."""
        return self._sock is None

    @property
    def usable(self) -> bool:
        """Whether the socket seems to be connected, and has no unread bytes and no end of the stream."""
        if self._sock is None or self._at < len(self._buffer):
            return False
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return not poll.poll(0)

    def stop(self) -> None:
        """Make the call that uses the connection in another thread raise OSError without delay."""
        self._stopped = True
        if (sock := self._sock) is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)  # SSLSocket.shutdown would drop TLS

    def close(self) -> None:
        """Disconnect. Later calls have no effect."""
        self._connection.disconnect()  # type: ignore[no-untyped-call]

    # ---- commands -------------------------------------------------------------------------------------------------

    def ask(self, commands: bytes, count: int, shape: ReplyBounds = SHORT) -> list[Reply]:
        """Send `count` commands in one batch and return their replies. The limits `shape` apply to all replies."""
        self._send([commands])
        self._items, self._bytes = shape.items, shape.bytes
        replies: list[Reply] = []
        while len(replies) < count:
            # Runs of the replies 0 and 1 are parsed at once, because parsing a thousand replies one by one would take a
            # millisecond.
            if bits := _BITS.match(self._buffer, self._at):
                replies += [byte - ord("0") for byte in self._buffer[self._at + 1 : bits.end() : len(b":0\r\n")]]
                self._at = bits.end()
            else:
                replies.append(self._reply(shape.depth))
        if len(replies) > count:
            raise ServerConnectionError("the server has sent more replies than it got commands")
        return replies

    def fetch(self, commands: bytes, into: Sequence[memoryview], more: int = 0) -> int | ErrorReply | None:
        """Send commands, the first of which asks for a value, and receive the value into the buffers `into`.

        Returns the value's length in bytes, None if the server has no such value, or the error reply. If the value is
        shorter than the buffers, the buffers are filled in part. If the value is longer, the connection is closed,
        because receiving the whole value may take long. The replies to `more` further commands are discarded.
        """
        self._send([commands])
        line = self._line()
        found: int | ErrorReply | None
        if line[:1] == b"-":
            found = ErrorReply(self._shown(line[1:]))
        elif (size := self._count(line, b"$", VALUE_BYTES_MAX)) < 0:
            found = None
        else:
            found, room = size, [part.cast("B") for part in into]
            if size > sum(part.nbytes for part in room):
                self.close()
                return found
            self._receive([part[: max(0, size - at)] for at, part in _placed(room)])
        for _ in range(more):
            self._short()
        return found

    def store(self, before: Sequence[bytes], parts: Sequence[memoryview], after: Sequence[bytes]) -> Reply:
        """Send one command and return its reply.

        The words of the command are `before`, all `parts` as one word, and `after`.
        """
        size = sum(part.nbytes for part in parts)
        head = b"*%d\r\n%s$%d\r\n" % (len(before) + 1 + len(after), _words(before), size)
        self._send([head, *parts, b"\r\n" + _words(after)])
        return self._short()

    # ---- methods that redis-py calls on its reader while redis-py connects ------------------------------------------

    def on_connect(self, connection: Any) -> None:  # noqa: ANN401  (redis-py's types lack the socket)
        """Take the socket. redis-py calls this method after the TCP connection and the TLS handshake."""
        self._sock = connection._sock  # noqa: SLF001  (redis-py's own readers do the same)
        if self._stopped:  # `stop` was called during the attempt, or before redis-py tried again
            self.stop()

    def on_disconnect(self) -> None:
        """Drop the socket and all buffered bytes. redis-py calls this method when it disconnects."""
        self._sock = None
        self._buffer.clear()
        self._at = 0

    def read_response(self, **_: object) -> object:
        """Return the reply to a command that redis-py has sent."""
        from redis import ResponseError  # noqa: PLC0415

        reply = self._short()
        return ResponseError(str(reply)) if isinstance(reply, ErrorReply) else reply

    # ---- bytes ----------------------------------------------------------------------------------------------------

    def _socket(self) -> socket.socket:
        if self._sock is None:
            raise ServerConnectionError("it is not connected")
        return self._sock

    def _wait(self, move: Callable[[], _T]) -> _T:
        """Call `move` until it moves bytes. Raises TimeoutError after `_WAITS - 1` calls that moved no byte.

        The kernel ends each call after 1 / `_WAITS` of the timeout.
        """
        for _ in range(_WAITS - 1):
            with contextlib.suppress(BlockingIOError):
                return move()
        raise TimeoutError

    def _send(self, pieces: Sequence[bytes | memoryview]) -> None:
        sock = self._socket()
        left = [memoryview(piece).cast("B") for piece in pieces]
        while left:
            if isinstance(sock, ssl.SSLSocket):  # the timeout of an SSLSocket already applies to each call of `send`
                sent = sock.send(left[0][:_TLS_BYTES])
            else:
                sent = self._wait(partial(sock.sendmsg, left[:_PARTS_MAX]))
            left = _after(left, sent)

    def _receive(self, into: Sequence[memoryview]) -> None:
        """Receive a value into the buffers `into`, and the end of its line."""
        sock, end = self._socket(), bytearray(2)
        left = [part.cast("B") for part in (*into, memoryview(end)) if part.nbytes]
        while left and self._at < len(self._buffer):  # these bytes were received together with the reply's first line
            count = min(len(self._buffer) - self._at, left[0].nbytes)
            left[0][:count] = self._buffer[self._at : self._at + count]
            self._at += count
            left = _after(left, count)
        while left:
            if isinstance(sock, ssl.SSLSocket):
                count = sock.recv_into(left[0])
            else:
                count = self._wait(partial(sock.recvmsg_into, left[:_PARTS_MAX], 0, socket.MSG_WAITALL))[0]
            if not count:
                raise ServerConnectionError("the server has closed the connection")
            left = _after(left, count)
        if end != b"\r\n":
            raise self._nonsense(end)

    def _refill(self) -> None:
        del self._buffer[: self._at]
        self._at = 0
        data = self._wait(partial(self._socket().recv, _RECEIVE_BYTES))
        if not data:
            raise ServerConnectionError("the server has closed the connection")
        self._buffer += data

    # ---- replies --------------------------------------------------------------------------------------------------

    def _short(self) -> Reply:
        self._items = self._bytes = 0
        return self._reply(0)

    def _reply(self, depth: int) -> Reply:
        """Read a reply with at most `depth` nested lists, and at most `_items` elements and `_bytes` bytes."""
        line = self._line()
        kind = line[:1]
        if kind == b":":
            return self._count(line, b":", 1 << 63)
        if kind == b"+":
            return line[1:]
        if kind == b"-":
            return ErrorReply(self._shown(line[1:]))
        if kind == b"*" and depth:
            count = self._count(line, b"*", self._items)
            self._items -= max(count, 0)
            return None if count < 0 else [self._reply(depth - 1) for _ in range(count)]
        if (size := self._count(line, b"$", self._bytes)) < 0:
            return None
        self._bytes -= size
        text = bytearray(size)
        self._receive([memoryview(text)])
        return bytes(text)

    def _line(self) -> bytes:
        while (end := self._buffer.find(b"\r\n", self._at)) < 0:
            if len(self._buffer) - self._at > LINE_BYTES_MAX:
                raise self._nonsense(self._buffer[self._at : self._at + LINE_BYTES_MAX])
            self._refill()
        line = bytes(self._buffer[self._at : end])
        self._at = end + 2
        return line

    def _count(self, line: bytes, kind: bytes, highest: int) -> int:
        try:
            count = int(line[1:])
        except ValueError:
            raise self._nonsense(line) from None
        if line[:1] != kind or count > highest or count < (-1 if kind != b":" else -highest):
            raise self._nonsense(line)
        return count

    def _nonsense(self, answer: bytes | bytearray) -> ServerConnectionError:
        return ServerConnectionError(f"the server does not speak the Redis protocol: {self._shown(answer, 40)!r}")

    def _shown(self, answer: bytes | bytearray | str, length_max: int = SHOWN_MAX) -> str:
        """Return the server's text for a message: short, printable and without secrets."""
        text = answer if isinstance(answer, str) else answer.decode("utf-8", "replace")
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return "".join(char if char.isprintable() else "?" for char in text[:length_max])


def connection_reason(error: BaseException) -> str:
    """Return a short reason why a connection has failed."""
    if isinstance(error, TimeoutError):
        return "no answer within timeout_ms_max"
    return str(getattr(error, "strerror", None) or error) or type(error).__name__


def _placed(views: list[memoryview]) -> Iterator[tuple[int, memoryview]]:
    """Yield each view with the number of bytes before it."""
    at = 0
    for view in views:
        yield at, view
        at += view.nbytes


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """Return `views` without their first `count` bytes."""
    for index, view in enumerate(views):
        if count < view.nbytes:
            return [view[count:], *views[index + 1 :]]
        count -= view.nbytes
    return []
