"""Compiles: `python -m kvpipe.native.build`. Does nothing if what is there was made of these sources.

With `--once` it does not try again what has failed with these sources before.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from kvpipe import native

_HOUSE: Final = Path(__file__).parents[1]
_LINES_MAX: Final = 12  # of what a compiler says
_OLD_S: Final = 86400.0
_TRIES_MAX: Final = 10  # to take the place of what is damaged, which others may do, too


class BuildError(Exception):
    """It cannot be compiled here; the message says why."""


def build(to: Path | None = None) -> Path:
    """Compile into the folder `to`; None: where it is looked for. Returns the folder.

    Raises:
        BuildError: a package or a compiler is missing, or has failed. What was there before stays.

    """
    if missing := [*lacking()]:
        msg = f"there is no {', no '.join(missing)}"
        raise BuildError(msg)
    try:
        (to or native.folder()).parent.mkdir(parents=True, exist_ok=True)  # before it takes long
        with tempfile.TemporaryDirectory(prefix="kvpipe-native-", ignore_cleanup_errors=True) as work:
            _compile(Path(work))
            to = to or native.folder(Path(work, "kvpipe"))
            _keep(Path(work), to)
    except OSError as error:
        raise BuildError(str(error)) from error
    return to


def compiler() -> str:
    """Return the program that compiles C; nothing if there is none."""
    try:
        command = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    except ValueError:
        return ""
    return shutil.which(command[0]) or "" if command else ""


def lacking() -> Iterator[str]:
    """Yield what it takes to compile and is not there."""
    try:
        found = version("mypy")
    except PackageNotFoundError:
        found = ""
    if found != native.MYPY:
        yield f"mypy {native.MYPY}{f' (but {found})' if found else ''}"
    if importlib.util.find_spec("setuptools") is None:
        yield "setuptools"
    if not compiler():
        yield "C compiler"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        yield "Python.h, the headers of this Python"


def _compile(work: Path) -> None:
    """Compile a copy of the sources in the folder `work`."""
    for name in native.sources():
        target = work / "kvpipe" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(_HOUSE / name, target)
    (work / "kvpipe/cache/policy/__init__.py").touch()  # the real one imports more than the compiler is to read
    files = [f"kvpipe/cache/policy/{name}.py" for name in native.COMPILED]
    script = str(Path(__file__).with_name("compiler.py"))
    command = [sys.executable, "-P", script, native.LIBRARY.removesuffix("__mypyc"), *files]
    done = subprocess.run(  # noqa: S603  (ours)
        command, cwd=work, env={key: value for key, value in os.environ.items() if key != "MYPYPATH"}, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip
    if done.returncode:
        why = "\n".join(done.stdout.strip().splitlines()[-_LINES_MAX:])
        with contextlib.suppress(OSError):
            failed = native.folder().with_suffix(".failed")
            failed.parent.mkdir(parents=True, exist_ok=True)
            failed.write_text(why, encoding="utf-8")
        raise BuildError(why)


def _keep(work: Path, to: Path) -> None:
    """Put what was compiled in `work` into the folder `to`, in one step: others may be looking, or compiling too."""
    with tempfile.TemporaryDirectory(prefix=".new-", dir=to.parent, ignore_cleanup_errors=True) as made:
        new = Path(made, "new")
        new.mkdir()
        for name in native.COMPILED:
            shutil.copyfile(work / f"kvpipe/cache/policy/{name}{native.SUFFIX}", new / f"{name}{native.SUFFIX}")
        shutil.copyfile(work / f"{native.LIBRARY}{native.SUFFIX}", new / f"{native.LIBRARY}{native.SUFFIX}")
        (new / native.MADE).write_bytes(native.contents(new))
        for number in range(_TRIES_MAX):
            try:
                new.rename(to)
                break
            except OSError:
                if native.whole(to):  # another was quicker
                    break
                if number + 1 == _TRIES_MAX:
                    raise
            with contextlib.suppress(FileNotFoundError):
                to.rename(Path(made, f"damaged{number}"))
    _forget_old(to.parent)


def _forget_old(there: Path) -> None:
    """Remove from the folder `there` what was made of other sources, or left behind, more than a day ago."""
    for one in there.iterdir():
        with contextlib.suppress(OSError):  # another may remove it, too
            if one.stat().st_mtime < time.time() - _OLD_S:
                shutil.rmtree(one) if one.is_dir() else one.unlink()


def main(*, once: bool = False) -> int:
    """Compile what is not compiled yet, and say so. `once`: not again what has failed with these sources.

    Returns 0 if there is nothing more to do, else 1.
    """
    if native.off():
        print(f"{native.SWITCH} is 0: nothing is compiled")
        return 0
    if not native.unusable():
        print("compiled already")
        return 0
    try:
        failed = native.folder().with_suffix(".failed")
        if once and failed.exists():
            return 1
        print(f"compiled into {build()}")
    except (BuildError, OSError) as error:
        print(f"not compiled: Python runs the sources. {error}\nTo mend it, {native.REMEDY}.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(once="--once" in sys.argv))
