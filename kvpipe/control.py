"""Switching a running engine from outside: a small file that the engine looks at twice a second."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio

POLL_S = 0.5
_WORDS = {"on": True, "off": False}


def write_freeze(path: Path, *, on: bool) -> None:
    """Tell the engine that watches `path` to freeze or to go on saving."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    partial.write_text(f"freeze: {'on' if on else 'off'}\n", encoding="utf-8")
    partial.replace(path)


def read_freeze(text: str) -> bool | None:
    """Return what the file says, or None when it says nothing that is understood."""
    key, _, value = text.strip().partition(":")
    return _WORDS.get(value.strip().lower()) if key.strip() == "freeze" else None


async def watch_control_file(path: Path, set_freeze: Callable[[bool], None]) -> None:
    """Call `set_freeze` whenever the file says something else than before. Runs until cancelled."""
    last: bool | None = None
    file = anyio.Path(path)
    while True:
        try:
            wanted = read_freeze(await file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError):  # absent, being replaced, or no text
            wanted = None
        if wanted is not None and wanted != last:
            set_freeze(wanted)
            last = wanted
        await anyio.sleep(POLL_S)
