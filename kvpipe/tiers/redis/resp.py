"""One connection to a Redis or Valkey server: commands out, replies in, values straight out of and into buffers.

redis-py connects: names, TCP, TLS, AUTH, SELECT. Its reader and its pipelines are not used: they copy values twice,
take longer for a thousand small replies than a lookup may, and read lines of any length.
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
"""The longest value that the protocol knows."""

LINE_BYTES_MAX: Final = 4096

SHOWN_MAX: Final = 200
_WAITS: Final = 4  # parts that a wait for whole values is cut into; after all but one without a byte it is over
_BITS: Final = re.compile(rb"(?::[01]\r\n)+")
_RECEIVE_BYTES, _TLS_BYTES, _PARTS_MAX = 16 << 10, 256 << 10, 512


class ReplyBounds(NamedTuple):
    """Bounds on all replies to one question together, set by the question, so that a server cannot exceed them."""

    items: int = 0
    """Elements of all lists."""
    bytes: int = 0
    """The most bytes of all bulk strings together."""
    depth: int = 0
    """Nesting of lists."""


SHORT: Final = ReplyBounds()
"""Bounds on replies that are integers, simple strings or errors."""


class ErrorReply(str):
    """An error reply to a command: a code in capitals, and a text."""

    __slots__ = ()

    @property
    def code(self) -> str:
        """The first word."""
        return self.partition(" ")[0]


class ServerConnectionError(OSError):
    """The connection cannot be made, or is of no use any more."""


Reply: TypeAlias = "int | bytes | ErrorReply | list[Reply] | None"
_T = TypeVar("_T")
Dial = Callable[[Callable[..., Any]], "Connection"]
"""Makes a connection of redis-py, not yet connected, that reads replies with what the given function returns."""


def command(*words: bytes) -> bytes:
    """Encode a command in RESP."""
    return b"*%d\r\n%s" % (len(words), _words(words))


ASKING: Final = b"*1\r\n$6\r\nASKING\r\n"
"""Sent before a command for a key whose slot is being migrated to that server."""


def per_name(verb: bytes, names: Iterable[bytes], *options: bytes, before: bytes) -> bytes:
    """Encode the same command for every name, each preceded by `before`."""
    head, tail = b"%b*%d\r\n%s" % (before, 2 + len(options), _words([verb])), _words(options)
    return b"".join([b"%b$%d\r\n%b\r\n%b" % (head, len(name), name, tail) for name in names])


def _words(words: Sequence[bytes]) -> bytes:
    return b"".join([b"$%d\r\n%s\r\n" % (len(word), word) for word in words])


class ServerConnection:
    """One connection, used by one thread at a time; `stop` may be called by any, at any time.

    All methods but `stop` and `close` raise OSError; the lane is good for nothing but `close` then. No wait without a
    byte moving is longer than the connection's `socket_timeout`.
    """

    def __init__(self, dial: Dial, *secrets: str) -> None:
        """Do not connect yet. `secrets`, the password and the user, are masked in what is shown of answers."""
        self._connection = dial(lambda **_: self)
        self._secrets = sorted(filter(None, secrets), key=len, reverse=True)
        self._sock: socket.socket | None = None
        self._stopped = False
        self._buffer = bytearray()
        self._at = 0  # what comes before it in the buffer is used up
        self._items = self._bytes = 0  # that may still come of the replies that are being read

    def connect(self) -> None:
        """Connect. Raises ServerConnectionError, with a reason that holds no secret."""
        from redis import RedisError  # noqa: PLC0415  (heavy, and not always installed)

        try:
            self._connection.connect()  # type: ignore[no-untyped-call]
        except (RedisError, OSError) as error:
            self.close()
            cause = error.__context__ if isinstance(error.__context__, OSError) else error  # redis-py words it anew
            raise ServerConnectionError(self._shown(reason(cause))) from None
        if self._stopped:  # whoever asked for it is gone
            self.close()
            raise ServerConnectionError("stopped")
        sock = self._socket()
        if not isinstance(sock, ssl.SSLSocket) and (timeout_s := sock.gettimeout()):
            # The kernel waits for whole values: quicker than a wait of Python's for each of ten pieces or so, and the
            # interpreter's lock is wanted back once.
            fraction, whole = math.modf(timeout_s / _WAITS)
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(whole), int(fraction * 1e6)))
            sock.settimeout(None)

    @property
    def closed(self) -> bool:
        """Whether it is not connected: not yet, or not any more."""
        return self._sock is None

    @property
    def usable(self) -> bool:
        """Whether it is still connected, as far as can be seen, and nothing came that was not asked for."""
        if self._sock is None or self._at < len(self._buffer):
            return False
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return not poll.poll(0)

    def stop(self) -> None:
        """Make the thread that uses it end soon, with an OSError."""
        self._stopped = True
        if (sock := self._sock) is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)  # not SSLSocket's, which would go on in plain text

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self._connection.disconnect()  # type: ignore[no-untyped-call]

    # ---- commands -------------------------------------------------------------------------------------------------

    def ask(self, commands: bytes, count: int, shape: ReplyBounds = SHORT) -> list[Reply]:
        """Send `count` commands at once and return their replies, which must fit into `shape`."""
        self._send([commands])
        self._items, self._bytes = shape.items, shape.bytes
        replies: list[Reply] = []
        while len(replies) < count:
            if bits := _BITS.match(self._buffer, self._at):  # a thousand at once: one by one they take a millisecond
                replies += [byte - ord("0") for byte in self._buffer[self._at + 1 : bits.end() : len(b":0\r\n")]]
                self._at = bits.end()
            else:
                replies.append(self._reply(shape.depth))
        if len(replies) > count:
            raise ServerConnectionError("the server has answered more than it was asked")
        return replies

    def fetch(self, commands: bytes, into: Sequence[memoryview], more: int = 0) -> int | ErrorReply | None:
        """Send commands, the first of which asks for a value; it is received into `into` if it is exactly as long.

        Returns the value's length in bytes, or None if there is no such value. The replies of `more` further commands
        are thrown away. The connection is closed if the value is longer: to receive all of it may take long.
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
        """Send one command and return its reply. The words are `before`, `parts` (together one word) and `after`."""
        size = sum(part.nbytes for part in parts)
        head = b"*%d\r\n%s$%d\r\n" % (len(before) + 1 + len(after), _words(before), size)
        self._send([head, *parts, b"\r\n" + _words(after)])
        return self._short()

    # ---- what redis-py wants of a reader, while it connects ---------------------------------------------------------

    def on_connect(self, connection: Any) -> None:  # noqa: ANN401  (its socket is not in its types)
        """Called by redis-py when TCP, and TLS, are connected."""
        self._sock = connection._sock  # noqa: SLF001  (what redis-py's own readers do)
        if self._stopped:  # meanwhile, or before redis-py has tried again
            self.stop()

    def on_disconnect(self) -> None:
        """Called by redis-py when it disconnects."""
        self._sock = None
        self._buffer.clear()
        self._at = 0

    def read_response(self, **_: object) -> object:
        """Return the reply to a command of redis-py's."""
        from redis import ResponseError  # noqa: PLC0415

        reply = self._short()
        return ResponseError(str(reply)) if isinstance(reply, ErrorReply) else reply

    # ---- bytes ----------------------------------------------------------------------------------------------------

    def _socket(self) -> socket.socket:
        if self._sock is None:
            raise ServerConnectionError("it is not connected")
        return self._sock

    def _wait(self, move: Callable[[], _T]) -> _T:
        """Let bytes move. A wait for whole values ends by itself, having moved some or, here, none."""
        for _ in range(_WAITS - 1):
            with contextlib.suppress(BlockingIOError):
                return move()
        raise TimeoutError

    def _send(self, pieces: Sequence[bytes | memoryview]) -> None:
        sock = self._socket()
        left = [memoryview(piece).cast("B") for piece in pieces]
        while left:
            if isinstance(sock, ssl.SSLSocket):  # as much as is sent before its wait begins anew
                sent = sock.send(left[0][:_TLS_BYTES])
            else:
                sent = self._wait(partial(sock.sendmsg, left[:_PARTS_MAX]))
            left = _after(left, sent)

    def _receive(self, into: Sequence[memoryview]) -> None:
        """Receive a value and the end of its line."""
        sock, end = self._socket(), bytearray(2)
        left = [part.cast("B") for part in (*into, memoryview(end)) if part.nbytes]
        while left and self._at < len(self._buffer):  # what came along with the reply's first line
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
        """Read a reply of `depth` lists in each other at most, and of what is left of `_items` and `_bytes`."""
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
        return ServerConnectionError(f"what answers does not speak the protocol of Redis: {self._shown(answer, 40)!r}")

    def _shown(self, answer: bytes | bytearray | str, length_max: int = SHOWN_MAX) -> str:
        """Return the server's text for a message: short, printable and without secrets."""
        text = answer if isinstance(answer, str) else answer.decode("utf-8", "replace")
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return "".join(char if char.isprintable() else "?" for char in text[:length_max])


def reason(error: BaseException) -> str:
    """Return why a connection has failed, in short."""
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
    """Return what is left of `views` behind their first `count` bytes."""
    for index, view in enumerate(views):
        if count < view.nbytes:
            return [view[count:], *views[index + 1 :]]
        count -= view.nbytes
    return []
