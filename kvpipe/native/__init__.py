"""Compiled modules: mypyc makes C of the policy `sessions`, when kvpipe is installed where there is a C compiler.

They decide the same, in less time, and are used only if they were made of exactly the sources that are there: who edits
those runs what they wrote. Without them, or with `KVPIPE_NATIVE=0` in the environment, Python runs the sources.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import MutableSequence
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from pathlib import Path
from typing import Final

SWITCH: Final = "KVPIPE_NATIVE"
"""The environment variable: 0 runs the sources, 1 refuses to start with them."""
PACKAGE: Final = "kvpipe.cache.policy"
COMPILED: Final = ("chain", "duel", "queues", "recency", "returns", "sessions")
"""Of the package: no class of theirs can be subclassed or patched once it is compiled."""
LIBRARY: Final = "kvpipe_native__mypyc"
"""What the compiled modules share, a module itself."""
SUFFIX: Final = EXTENSION_SUFFIXES[0]
MADE: Final = "made"
"""The file that lists the others of its folder, each with its digest."""
MYPY: Final = "2.4.1"
"""The release that compiles, and no other does: the tests run what it makes."""
REMEDY: Final = f"install a C compiler, mypy {MYPY} and setuptools, then run python -m kvpipe.native.build"

_HOUSE: Final = Path(__file__).parents[1]
_READ: Final = (
    "__init__.py",
    "cache/__init__.py",
    "cache/hints.py",
    "cache/large.py",
    "cache/policy/base.py",
    "native/compiler.py",
)
_reason: list[str] = []  # why Python runs the sources, once the package is imported


def sources() -> list[str]:
    """Return what is compiled, and what the compiler reads beside it, below the folder of `kvpipe`."""
    return [*(f"cache/policy/{name}.py" for name in COMPILED), *_READ]


def off() -> bool:
    """Whether it is switched off."""
    return os.environ.get(SWITCH) == "0"


def folder(house: Path = _HOUSE) -> Path:
    """Return where what is compiled for this Python is, of the sources that are below `house` now. Raises OSError."""
    found = hashlib.sha256(MYPY.encode())
    for name in sources():
        text = (house / name).read_bytes()
        found.update(b"%s %d\n%s" % (name.encode(), len(text), text))
    return _HOUSE / "native/compiled" / SUFFIX.strip(".").removesuffix(".so") / found.hexdigest()[:32]


def contents(where: Path) -> bytes:
    """Return what `MADE` has to say of a folder. Raises OSError if not all files are there."""
    names = sorted(f"{name}{SUFFIX}" for name in (*COMPILED, LIBRARY))
    lines = (f"{hashlib.sha256((where / name).read_bytes()).hexdigest()} {name}\n" for name in names)
    return "".join(lines).encode()


def whole(where: Path) -> bool:
    """Whether a folder has all files, as they were made."""
    try:
        return (where / MADE).read_bytes() == contents(where)
    except OSError:
        return False


def unusable() -> str:
    """Return why what is there of these sources cannot be used; nothing if it can."""
    try:
        where = folder()
    except OSError as error:
        return f"its sources cannot be read ({error})"
    if not where.is_dir():
        other = where.parent.is_dir() and any(one.is_dir() for one in where.parent.iterdir())
        return "it was compiled of other sources" if other else "it is not compiled for this Python"
    return "" if whole(where) else "what is compiled is damaged"


def missing() -> str:
    """Return why Python runs the sources; nothing if it does not. It is decided once in a process."""
    importlib.import_module(PACKAGE)
    return _reason[0]


def prefer(path: MutableSequence[str]) -> None:
    """Import what is compiled of `PACKAGE`, all of it or nothing. `path`: the package's, which is being imported."""
    _reason[:] = [f"{SWITCH} is 0" if off() else unusable()]
    if _reason[0]:
        return
    where = folder()
    path.insert(0, str(where))
    try:
        _load(where)
        for name in COMPILED:
            importlib.import_module(f"{PACKAGE}.{name}")
    except Exception as error:  # noqa: BLE001  (whatever a library does when it is loaded)
        _reason[:] = [f"it cannot be loaded ({type(error).__name__}: {error})"]
        path.remove(str(where))
        for module in (LIBRARY, *(f"{PACKAGE}.{name}" for name in COMPILED)):
            sys.modules.pop(module, None)


def _load(where: Path) -> None:
    """Import the library, which the others look for by its name alone."""
    loader = ExtensionFileLoader(LIBRARY, str(where / f"{LIBRARY}{SUFFIX}"))
    spec = importlib.util.spec_from_loader(LIBRARY, loader)
    assert spec is not None  # noqa: S101  (it has a loader)
    sys.modules[LIBRARY] = importlib.util.module_from_spec(spec)
    loader.exec_module(sys.modules[LIBRARY])
