"""Named caches: engines that use one name must have one layout. The name's record is kept while an engine lives."""

from __future__ import annotations

import fcntl
import json
import os
import re
from pathlib import Path
from typing import Any

from kvpipe.errors import ConfigError


def default_state_dir() -> Path:
    """Return where records are kept: `$XDG_STATE_HOME/kvpipe`, else `~/.local/state/kvpipe`."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "kvpipe"


class NameClaim:
    """A shared claim on a name by one engine. The record of a name that no living engine holds is replaced."""

    def __init__(self, name: str, facts: dict[str, Any], state_dir: Path | None = None) -> None:
        """Claim `name` for an engine that `facts` identify.

        Raises:
            ConfigError: the name is no file name, or a living engine of another layout holds it.

        """
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name):
            msg = f"kvpipe: name={name!r} is not valid; use letters, digits, '_', '.' and '-' (64 at most)"
            raise ConfigError(msg)
        folder = state_dir or default_state_dir()
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{name}.json").open("a+", encoding="utf-8")
        try:
            self._claim(name, json.loads(json.dumps(facts)))  # as they will be read back: a tuple becomes a list
        except BaseException:
            self._file.close()
            raise

    def _claim(self, name: str, facts: dict[str, Any]) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(self._file, fcntl.LOCK_SH)
            self._file.seek(0)
            theirs = json.loads(self._file.read() or "{}")
            differs = sorted(k for k in {*facts, *theirs} if facts.get(k) != theirs.get(k))
            if differs:
                key = differs[0]
                msg = (
                    f"kvpipe: name={name!r} is used by a running engine whose {key} is {_short(theirs.get(key))}, "
                    f"here it is {_short(facts.get(key))}; choose another name for this engine"
                )
                raise ConfigError(msg) from None
            return
        self._file.seek(0)
        self._file.truncate()
        self._file.write(json.dumps(facts, sort_keys=True))
        self._file.flush()
        fcntl.flock(self._file, fcntl.LOCK_SH)

    def release(self) -> None:
        """Give the name back. Idempotent."""
        self._file.close()


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."  # noqa: PLR2004
