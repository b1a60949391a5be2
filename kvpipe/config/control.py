"""The control file: a small file that switches a running engine, which reads the file twice a second."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from kvpipe.errors import ConfigError
from kvpipe.inputs import files

POLL_S = 0.5
CONTROL_BYTES_MAX = 4096
_MODE = 0o644  # the engine that reads the file may run as another user
_WORDS = {"on": True, "off": False}


def validate_control_file(path: Path) -> None:
    """Refuse a path that cannot be a control file. The file may be missing, and may be a link to a file.

    Raises:
        ConfigError: the path is a folder, a pipe or a device, or its type cannot be read.

    """
    try:
        kind = files.file_type(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        kind = f"a path that cannot be inspected ({files.why(error)})"
    if kind:
        raise ConfigError(f"kvpipe: control_file={str(path)!r} is {kind}; name a file, which need not exist yet")


def write_freeze(path: Path, *, on: bool) -> None:
    """Write the control file `path`. With `on`, the engine that reads the file freezes. Without `on`, it saves again.

    Raises:
        ConfigError: `path` is not a regular file, or cannot be written.

    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = files.file_type(path.lstat().st_mode) if path.exists() or path.is_symlink() else ""
        if not kind:
            files.replace_text(path, f"freeze: {'on' if on else 'off'}\n", _MODE)
            return
        why = f"it is {kind}"
    except (OSError, ValueError) as error:
        why = files.why(error)
    msg = f"kvpipe: control_file={str(path)!r} cannot be written ({why}); name a file in a folder that you may write to"
    raise ConfigError(msg)


def read_freeze(text: str) -> bool | None:
    """Parse the text of the control file. True means freeze, False means save. Any other text is returned as None."""
    key, _, value = text.strip().partition(":")
    return _WORDS.get(value.strip().lower()) if key.strip() == "freeze" else None


async def watch_control_file(path: Path, set_freeze: Callable[[bool], None]) -> None:
    """Call `set_freeze` with the control file's value of `freeze` each time the value has changed.

    Run until cancelled. A file that is missing, cannot be read, or has other content changes nothing.
    """
    last: bool | None = None
    read = partial(files.read_small, path, CONTROL_BYTES_MAX)
    while True:
        try:
            wanted = read_freeze((await anyio.to_thread.run_sync(read, abandon_on_cancel=True)).decode())
        except (OSError, UnicodeDecodeError):  # the file is missing, is being replaced, or is not a text file
            wanted = None
        if wanted is not None and wanted != last:
            set_freeze(wanted)
            last = wanted
        await anyio.sleep(POLL_S)
