"""Compiles: `python -m kvpipe.native.build`. Does nothing if what is there was made of these sources."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final

from kvpipe import native

NEEDED: Final = ("mypy", "setuptools")
_HOUSE: Final = Path(__file__).parents[1]
_LINES_MAX: Final = 12  # of what a compiler says


class BuildError(Exception):
    """It cannot be compiled here; the message says why."""


def build(to: Path | None = None) -> Path:
    """Compile into `to`; None: where it is looked for. Returns the folder.

    Raises:
        BuildError: a package or a compiler is missing, or has failed. What was there before stays.

    """
    to = to or native.folder()
    if missing := [*lacking()]:
        msg = f"it lacks {', '.join(missing)}"
        raise BuildError(msg)
    with tempfile.TemporaryDirectory(prefix="kvpipe-native-") as work:
        _compile(Path(work))
        _keep(Path(work), to)
    return to


def lacking() -> Iterator[str]:
    """Yield what it takes to compile and is not there."""
    yield from (f"the package {name}" for name in NEEDED if importlib.util.find_spec(name) is None)
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    if shutil.which(compiler) is None:
        yield f"a C compiler ({compiler})"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        yield "the headers of this Python (Python.h)"


def _compile(work: Path) -> None:
    """Compile a copy of the sources in the folder `work`."""
    for name in native.sources():
        target = work / "kvpipe" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(_HOUSE / name, target)
    (work / "kvpipe/cache/policy/__init__.py").touch()  # the real one imports more than the compiler is to read
    script, files = (
        Path(__file__).with_name("compiler.py"),
        [f"kvpipe/cache/policy/{name}.py" for name in native.COMPILED],
    )
    command = [sys.executable, "-P", str(script), native.LIBRARY.removesuffix("__mypyc"), *files]
    done = subprocess.run(  # noqa: S603  (ours)
        command, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False
    )
    if done.returncode:
        raise BuildError("\n".join(done.stdout.strip().splitlines()[-_LINES_MAX:]))


def _keep(work: Path, to: Path) -> None:
    """Put what was compiled in `work` in the place of the folder `to`, in one step: others may be reading there."""
    suffix = EXTENSION_SUFFIXES[0]
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=to.parent) as made:
        new, old = Path(made, "new"), Path(made, "old")
        new.mkdir()
        for name in native.COMPILED:
            shutil.copyfile(work / f"kvpipe/cache/policy/{name}{suffix}", new / f"{name}{suffix}")
        shutil.copyfile(work / f"{native.LIBRARY}{suffix}", new / f"{native.LIBRARY}{suffix}")
        (new / native.DIGEST).write_text(native.digest(work / "kvpipe"), encoding="ascii")
        if to.exists():
            to.rename(old)
        new.rename(to)


def main() -> int:
    """Compile what is not compiled yet, and say so."""
    if native.off():
        print(f"{native.SWITCH} is 0: nothing is compiled")
        return 0
    if not native.missing():
        print("compiled already")
        return 0
    try:
        print(f"compiled into {build()}")
    except BuildError as error:
        print(f"not compiled: Python runs the sources. {error}\nTo mend it, {native.REMEDY}.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
