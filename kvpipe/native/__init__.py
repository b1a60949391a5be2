"""Compiled modules: mypyc makes C of the policy `sessions`, when kvpipe is installed where there is a C compiler.

They decide the same, in less time, and are used only if they were made of exactly the sources that are there: who edits
those runs what they wrote. Without them, or with `KVPIPE_NATIVE=0` in the environment, Python runs the sources.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from collections.abc import MutableSequence
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from pathlib import Path
from typing import Final

SWITCH: Final = "KVPIPE_NATIVE"
"""The environment variable: 0 runs the sources, 1 refuses a configuration unless what is compiled is used."""
PACKAGE: Final = "kvpipe.cache.policy"
COMPILED: Final = ("chain", "duel", "queues", "recency", "returns", "sessions")
"""Of the package: no class of theirs can be subclassed or patched once it is compiled."""
LIBRARY: Final = "kvpipe_native__mypyc"
"""What the compiled modules share, a module itself."""
DIGEST: Final = "sources"
"""The file that says of which sources they were made: it has their `digest`."""
REMEDY: Final = "install a C compiler and the packages mypy and setuptools, then run python -m kvpipe.native.build"

_HOUSE: Final = Path(__file__).parents[1]
_READ: Final = (
    "__init__.py", "cache/__init__.py", "cache/hints.py", "cache/large.py", "cache/policy/base.py",
    "native/compiler.py",
)  # fmt: skip


def sources() -> list[str]:
    """Return what is compiled, and what the compiler reads beside it, below the folder of `kvpipe`."""
    return [*(f"cache/policy/{name}.py" for name in COMPILED), *_READ]


def digest(house: Path = _HOUSE) -> str:
    """Return the digest of all sources below `house`. Raises OSError."""
    found = hashlib.sha256()
    for name in sources():
        text = (house / name).read_bytes()
        found.update(b"%s %d\n%s" % (name.encode(), len(text), text))
    return found.hexdigest()


def folder() -> Path:
    """Return where the modules are that are compiled for this Python."""
    return Path(__file__).parent / "compiled" / EXTENSION_SUFFIXES[0].strip(".").removesuffix(".so")


def off() -> bool:
    """Whether it is switched off."""
    return os.environ.get(SWITCH) == "0"


@cache
def missing() -> str:
    """Return why Python runs the sources; nothing if it does not. It is decided once in a process."""
    if off():
        return f"{SWITCH} is 0"
    where = folder()
    try:
        made_of = (where / DIGEST).read_text(encoding="ascii")
    except OSError:
        return "it is not compiled for this Python"
    if made_of != digest():
        return "it was compiled of other sources"
    path = str(where / f"{LIBRARY}{EXTENSION_SUFFIXES[0]}")
    try:
        loader = ExtensionFileLoader(LIBRARY, path)
        spec = importlib.util.spec_from_file_location(LIBRARY, path, loader=loader)
        assert spec is not None  # noqa: S101  (it has a loader)
        sys.modules[LIBRARY] = importlib.util.module_from_spec(spec)
        loader.exec_module(sys.modules[LIBRARY])
    except ImportError as error:
        sys.modules.pop(LIBRARY, None)
        return f"it cannot be loaded ({error})"
    return ""


def prefer(path: MutableSequence[str]) -> None:
    """Let what is compiled of `PACKAGE` be found before its sources. `path`: the package's."""
    if not missing():
        path.insert(0, str(folder()))
