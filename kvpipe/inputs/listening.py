"""An engine listens for operators at a Unix socket that only its user may use, or at a port of a loopback address."""

from __future__ import annotations

import contextlib
import errno
import glob
import ipaddress
import os
import re
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple, Self

from kvpipe.errors import ConfigError
from kvpipe.inputs import files
from kvpipe.inputs.values import PATH_CHARS_MAX

ENGINE: Final = "{engine}"
UNIX: Final = "unix:"
UNIX_BYTES_MAX: Final = 107
"""The greatest length of a Unix socket's path on Linux, in bytes."""
PORT_MAX: Final = 65535
_EXAMPLES: Final = "'unix:/run/kvpipe/{engine}.sock' or '127.0.0.1:8700'"
_REMEDIES: Final = {
    errno.ENOENT: "make its folder, which only the engine's user should be able to write to",
    errno.EACCES: "use a folder that the engine's user may write to, or a port above 1023",
    errno.EROFS: "use a folder that can be written to",
    errno.ENAMETOOLONG: "use a shorter one",
}
LOCK_S_MAX: Final = 0.5
"""The longest wait for a socket's lock, in seconds.

The lock may be held by a starting engine, which checks whether other engines' sockets are stale.
"""
NUMBER_MAX: Final = 64
"""The largest number that is appended to an engine's default name."""
_POLL_S: Final = 0.02
_LOCK: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Address(NamedTuple):
    """An address of an engine: the `path` of a Unix socket, or a loopback `host` and a `port` if `path` is empty.

    The path may contain `{engine}`.
    """

    path: str
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse an address. Raises ValueError if the address is malformed, or if other machines could reach it."""
        if len(text) > PATH_CHARS_MAX or not text.isprintable():
            raise ValueError(f"write {_EXAMPLES}")
        if text.startswith(UNIX):
            path = text.removeprefix(UNIX)
            if not path.startswith("/"):
                raise ValueError("expected an absolute path after 'unix:'")
            return cls(path, "", 0)
        host, colon, port = text.rpartition(":")
        host = "127.0.0.1" if host == "localhost" else host.removeprefix("[").removesuffix("]")
        if not colon or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) <= PORT_MAX:
            raise ValueError(f"write {_EXAMPLES}")
        try:
            own = ipaddress.ip_address(host).is_loopback
        except ValueError:
            own = False
        if not own:
            raise ValueError("write an address that only this machine can reach: 127.0.0.1, [::1] or a Unix socket")
        return cls("", host, int(port))

    def of(self, engine: str) -> Self:
        """Return the address with `{engine}` replaced by the name `engine`."""
        return self._replace(path=self.path.replace(ENGINE, re.sub(r"[^A-Za-z0-9_.-]", "_", engine)))

    def __str__(self) -> str:
        """Return the address in the form of the configuration."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{UNIX}{self.path}" if self.path else f"{host}:{self.port}"


class InUseError(ConfigError):
    """This error means that a running engine listens at the address."""


class _BusyError(OSError):
    pass


def sockets(address: Address) -> Iterator[Address]:
    """Yield `address`. If the path has `{engine}`, yield the address of each existing socket that matches the path."""
    if ENGINE not in address.path:
        yield address
        return
    pattern = "*".join(map(glob.escape, address.path.split(ENGINE)))
    for path in sorted(glob.glob(pattern)):  # noqa: PTH207  (a pattern from the root)
        with contextlib.suppress(OSError):  # the file was deleted after `glob`
            if stat.S_ISSOCK(os.stat(path).st_mode):  # noqa: PTH116  (as globbed)
                yield address._replace(path=path)


def is_stale(address: Address) -> bool:
    """Return True if no process listens at a Unix socket. This function connects, but sends nothing."""
    with socket.socket(socket.AF_UNIX) as asking:
        try:
            asking.settimeout(LOCK_S_MAX)
            asking.connect(address.path)
        except (ConnectionRefusedError, FileNotFoundError):
            return True
        except OSError:  # the socket belongs to another user, or its process is very busy
            return False
    return False


def remove_stale(address: Address) -> None:
    """Delete this user's stale sockets at `address`. A socket is stale if its engine has ended without deleting it.

    The sockets' lock files stay. If lock files were deleted, two engines could lock two different files of one name.
    """
    for one in sockets(address) if ENGINE in address.path else ():
        path = Path(one.path)
        try:
            lock = os.open(_lock_of(path), _LOCK & ~os.O_CREAT)
        except OSError:  # this file is not an engine's socket, or belongs to another user
            continue
        try:
            if files.try_lock(lock) and is_stale(one):
                path.unlink()
        except OSError:
            pass
        finally:
            files.unlock(lock, os.getpid())


def _lock_of(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def listen(address: Address, name: str, key: str, *, numbered: bool) -> OperatorSocket:
    """Listen at `address` as the engine `name`, and delete stale sockets there.

    If `numbered` and a running engine has the name, the first free name of `name-2`, `name-3` and so on is used.

    Raises:
        ConfigError: `OperatorSocket` has refused the address.

    """
    remove_stale(address)
    last = NUMBER_MAX if numbered and ENGINE in address.path else 1
    for number in range(1, last):
        with contextlib.suppress(InUseError):
            return OperatorSocket(address, name if number == 1 else f"{name}-{number}", key)
    return OperatorSocket(address, name if last == 1 else f"{name}-{last}", key)


class OperatorSocket:
    """A listening socket.

    A new `OperatorSocket` replaces the Unix socket of an engine that has ended, but never the socket of a running
    engine. Beside each Unix socket is a lock file, whose name is the socket's name with `.lock` appended. A running
    engine holds the lock of its file.
    """

    def __init__(self, address: Address, engine: str, key: str) -> None:
        """Listen at `address`. `key` is the configuration key of the address, for messages.

        Raises:
            InUseError: a running engine listens at the address.
            ConfigError: another process listens at the address, or the socket cannot be made.

        """
        self.name, self.address = engine, address.of(engine)
        self._key, self._lock, self._bound, self._process = key, -1, False, os.getpid()
        self.socket = socket.socket(
            socket.AF_UNIX if address.path else socket.AF_INET6 if ":" in address.host else socket.AF_INET
        )
        try:
            if address.path:
                self._bind_path(Path(self.address.path))
            else:
                # Without this option, a port cannot be used for some time after its connections are closed.
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                self.socket.bind((address.host, address.port))
                self.socket.listen()
        except OSError as error:
            self.close()
            own = f"use '{UNIX}/FOLDER/{ENGINE}.sock', or another for each engine"
            if ENGINE in address.path:
                own = "set another engine_name for each engine"
            remedy = _REMEDIES.get(error.errno or 0, own)
            kind = InUseError if isinstance(error, _BusyError) else ConfigError
            raise kind(f"kvpipe: {key}='{self.address}': {files.why(error)}; {remedy}") from None

    def _bind_path(self, path: Path) -> None:
        if len(os.fsencode(path)) > UNIX_BYTES_MAX:
            raise OSError(errno.ENAMETOOLONG, f"a socket's path has at most {UNIX_BYTES_MAX} bytes")
        self._lock = os.open(_lock_of(path), _LOCK, 0o600)
        until_s = time.monotonic() + LOCK_S_MAX
        while not files.try_lock(self._lock):
            if time.monotonic() > until_s:
                raise _BusyError("a running engine listens there")
            time.sleep(_POLL_S)
        with contextlib.suppress(FileNotFoundError):
            mode = path.lstat().st_mode
            if not stat.S_ISSOCK(mode):
                raise OSError(f"it is {files.file_type(mode) or 'a file'}")
            path.unlink()
        self.socket.bind(os.fspath(path))
        self._bound = True
        path.chmod(0o600)  # must be done before `listen`, so that other users can never connect
        self.socket.listen()

    def close(self) -> None:
        """Close the socket and delete its file. A forked process only closes its copies. Later calls have no effect."""
        if self._process == os.getpid():
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)  # needed because a forked process may have a copy of the socket
            if self._bound:
                with contextlib.suppress(OSError):
                    Path(self.address.path).unlink()
        self.socket.close()
        self._bound = False
        lock, self._lock = self._lock, -1
        if lock >= 0:
            files.unlock(lock, self._process)
