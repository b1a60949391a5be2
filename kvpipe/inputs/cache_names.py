"""Names of caches. Engines that use the same name must have the same layout.

Each name has a file, the name's *record*, with the layout. A running engine holds a shared lock on the record.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from pathlib import Path
from typing import Any, Final

from kvpipe.errors import ConfigError
from kvpipe.inputs import config_errors, files

LOCK_S_MAX: Final = 5.0
"""The longest wait for another process's exclusive lock. An engine holds this lock only while it writes the record."""
RECORD_BYTES_MAX: Final = 1 << 20
_POLL_S: Final = 0.05
_SHOWN_CHARS: Final = 60
_OPEN: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_HOLDERS_MAX: Final = 3
_PROC: Final = Path("/proc")
_MODEL_CHARS_MAX: Final = 20
_HOST_CHARS_MAX: Final = 19


def default_state_dir() -> Path:
    """Return the folder of the records: `kvpipe` in `$XDG_STATE_HOME`, by default in `~/.local/state`."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "kvpipe"


def check_name(name: str) -> str:
    """Return `name` if it is valid as a record's file name. Otherwise raise ValueError."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name):
        msg = "use letters, digits, '_', '.' and '-' (64 at most)"
        raise ValueError(msg)
    return name


def default_engine_name(model: str, host: str) -> str:
    """Return the default name of an engine: the beginning of its model's name and the end of its host's name.

    The engine has the same name after a restart. The name is short, because the path of a Unix socket must be short.
    """
    parts = model.rstrip("/").rpartition("/")[2][:_MODEL_CHARS_MAX], host.partition(".")[0][-_HOST_CHARS_MAX:]
    words = [re.sub(r"[^A-Za-z0-9_.-]+", "_", part).strip("_.-") for part in parts]
    return "-".join(filter(None, words)) or "engine"


class NameClaim:
    """One rank's shared claim on a name. If no running engine holds the name's record, the record is overwritten."""

    def __init__(self, name: str, facts: dict[str, Any], state_dir: Path | None = None, *, rank: int = 0) -> None:
        """Claim `name` for a rank whose layout is `facts`. Waits at most `LOCK_S_MAX` seconds.

        Each `rank` has its own record, because a rank knows only its own layout.

        Raises:
            ConfigError: the name is not valid, or a running engine with another layout holds the name. Also raised if
                the name's record cannot be opened, locked or read.

        """
        try:
            check_name(name)
        except ValueError as error:
            raise ConfigError(f"kvpipe: name={config_errors.safe_name(name)!r} is not valid; {error}") from None
        self._name, self._process = name, os.getpid()
        self._fd = -1
        try:
            folder = state_dir or default_state_dir()
            # no other name has this file, because no valid name has a plus sign
            self._path = folder / (f"{name}+{rank}.json" if rank else f"{name}.json")
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(self._path, _OPEN, 0o600)
            if kind := files.file_type(os.fstat(self._fd).st_mode):
                raise files.OddFileError(f"it is {kind}")  # noqa: TRY301
            # converted as in the record, where a tuple is a list, so that both can be compared
            self._claim(json.loads(json.dumps(facts)))
        except (OSError, RuntimeError, ValueError) as error:
            self.release()
            if isinstance(error, ConfigError):
                raise
            where = f" {str(self._path)!r}" if hasattr(self, "_path") else ""
            msg = (
                f"kvpipe: name={name!r}: its record{where} cannot be used ({files.why(error)}); set state_dir to a "
                "folder of this user's"
            )
            raise ConfigError(msg) from None
        except BaseException:
            self.release()
            raise

    def _claim(self, facts: dict[str, Any]) -> None:
        if files.try_lock(self._fd):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, json.dumps(facts, sort_keys=True).encode(), 0)
            if files.try_lock(self._fd, fcntl.LOCK_SH):
                return  # the lock fails only if another engine has locked the record since `try_lock` above
        until = time.monotonic() + LOCK_S_MAX
        while not files.try_lock(self._fd, fcntl.LOCK_SH):
            if time.monotonic() > until:
                msg = (
                    f"kvpipe: name={self._name!r}: its record {str(self._path)!r} has been locked for {LOCK_S_MAX:.0f} "
                    f"s by {_holders(self._fd)}; end that process, or choose another name or state_dir"
                )
                raise ConfigError(msg)
            time.sleep(_POLL_S)
        theirs = self._theirs()
        differs = sorted(k for k in {*facts, *theirs} if facts.get(k) != theirs.get(k))
        if differs:
            key = differs[0]
            msg = (
                f"kvpipe: name={self._name!r} is used by a running engine whose {_short(key)} is "
                f"{_short(theirs.get(key))}, here it is {_short(facts.get(key))}; choose another name for this engine"
            )
            raise ConfigError(msg)

    def _theirs(self) -> dict[str, Any]:
        """Return the record's content: the layout of a running engine."""
        data = os.pread(self._fd, RECORD_BYTES_MAX + 1, 0)
        try:
            theirs = json.loads(data or "{}") if len(data) <= RECORD_BYTES_MAX else None
        except (ValueError, RecursionError):
            theirs = None
        if not isinstance(theirs, dict):
            msg = (
                f"kvpipe: name={self._name!r}: its record {str(self._path)!r} is damaged, and held by "
                f"{_holders(self._fd)}; end the engines of that name and delete the file, or choose another name"
            )
            raise ConfigError(msg)
        return theirs

    def release(self) -> None:
        """Release the name. A call in a forked process releases nothing. Later calls have no effect."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            files.unlock(fd, self._process)


def _holders(fd: int) -> str:
    """Return a text that names the visible processes that hold a lock on an open file."""
    at = os.fstat(fd)
    place = f"{os.major(at.st_dev):02x}:{os.minor(at.st_dev):02x}:{at.st_ino}"
    pids = []
    try:
        for line in (_PROC / "locks").read_text(encoding="ascii", errors="replace").splitlines():
            words = line.split()  # an example: 1: FLOCK  ADVISORY  WRITE 4711 08:01:131074 0 EOF
            pid = words[words.index(place) - 1] if place in words and "->" not in words else "0"
            if pid not in {"0", "-1", str(os.getpid())}:
                pids.append(pid)
    except OSError:
        pass
    if not pids:
        return "a process that cannot be seen from here"
    return " and ".join(_process(pid) for pid in dict.fromkeys(pids[:_HOLDERS_MAX]))


def _process(pid: str) -> str:
    try:
        command = (_PROC / pid / "comm").read_text(encoding="utf-8", errors="replace").strip()
        return f"process {pid} ({_short(command)}) of {files.owner_of((_PROC / pid).stat().st_uid)}"
    except OSError:
        return f"process {pid}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."
