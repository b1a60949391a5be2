"""Where an engine listens for operators: a Unix socket that only its user may use, or a port on a loopback address."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import re
import socket
import stat
from pathlib import Path
from typing import Final, NamedTuple, Self

from kvpipe import files
from kvpipe.errors import ConfigError
from kvpipe.values import PATH_CHARS_MAX

ENGINE: Final = "{engine}"
UNIX: Final = "unix:"
UNIX_BYTES_MAX: Final = 107
"""The longest path of a Unix socket on Linux."""
PORT_MAX: Final = 65535
_EXAMPLES: Final = "'unix:/run/kvpipe/{engine}.sock' or '127.0.0.1:8700'"
_REMEDIES: Final = {
    errno.ENOENT: "make its folder, which only the engine's user should be able to write to",
    errno.EACCES: "use a folder that the engine's user may write to, or a port above 1023",
    errno.EROFS: "use a folder that can be written to",
    errno.ENAMETOOLONG: "use a shorter one",
}
_LOCK: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Address(NamedTuple):
    """The `path` of a Unix socket, which may contain `{engine}`; or, if it is empty, a loopback `host` and a `port`."""

    path: str
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse an address. Raises ValueError if it is malformed, or if other machines could reach it."""
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
            raise ValueError("it listens on this machine alone: use 127.0.0.1, [::1] or a Unix socket")
        return cls("", host, int(port))

    def of(self, engine: str) -> Self:
        """Return the address with `{engine}` replaced by the name `engine`."""
        return self._replace(path=self.path.replace(ENGINE, re.sub(r"[^A-Za-z0-9_.-]", "_", engine)))

    def __str__(self) -> str:
        """Return the address as it is configured."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{UNIX}{self.path}" if self.path else f"{host}:{self.port}"


class OperatorSocket:
    """A listening socket. The Unix socket of an engine that has ended is replaced; that of a living engine never is.

    Beside a Unix socket lies a file of its name with `.lock` appended, which a living engine holds locked.
    """

    def __init__(self, address: Address, engine: str, key: str) -> None:
        """Listen at `address`. `key`: the configuration key that it comes from, for errors.

        Raises:
            ConfigError: another process listens there, or the socket cannot be made.

        """
        self.address = address.of(engine)
        self._key, self._lock, self._bound, self._process = key, -1, False, os.getpid()
        self.socket = socket.socket(
            socket.AF_UNIX if address.path else socket.AF_INET6 if ":" in address.host else socket.AF_INET
        )
        try:
            if address.path:
                self._bind_path(Path(self.address.path))
            else:
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # of connections that are over
                self.socket.bind((address.host, address.port))
                self.socket.listen()
        except OSError as error:
            self.close()
            remedy = _REMEDIES.get(error.errno or 0, f"use '{UNIX}/FOLDER/{ENGINE}.sock', or another for each engine")
            raise ConfigError(f"kvpipe: {key}='{self.address}': {files.why(error)}; {remedy}") from None

    def _bind_path(self, path: Path) -> None:
        if len(os.fsencode(path)) > UNIX_BYTES_MAX:
            raise OSError(errno.ENAMETOOLONG, f"a socket's path has at most {UNIX_BYTES_MAX} bytes")
        self._lock = os.open(path.with_name(path.name + ".lock"), _LOCK, 0o600)
        if not files.try_lock(self._lock):
            raise OSError("a running engine listens there")
        with contextlib.suppress(FileNotFoundError):
            mode = path.lstat().st_mode
            if not stat.S_ISSOCK(mode):
                raise OSError(f"it is {files.kind_of(mode) or 'a file'}")
            path.unlink()
        self.socket.bind(os.fspath(path))
        self._bound = True
        path.chmod(0o600)  # nobody can connect before it listens
        self.socket.listen()

    def close(self) -> None:
        """Close the socket and delete its file. Idempotent; a fork of the process closes only what it has copies of."""
        if self._process == os.getpid():
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)  # closing is not enough where a fork has a copy
            if self._bound:
                with contextlib.suppress(OSError):
                    Path(self.address.path).unlink()
        self.socket.close()
        self._bound = False
        lock, self._lock = self._lock, -1
        if lock >= 0:
            files.unlock(lock, self._process)
