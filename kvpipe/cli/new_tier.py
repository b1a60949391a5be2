"""`kvpipe new-tier` makes a package with a working tier, and with tests that run kvpipe's suite on the tier."""

from __future__ import annotations

import argparse
import keyword
import re
from pathlib import Path
from typing import Final

from kvpipe.errors import UsageError
from kvpipe.inputs import plugins

_TEMPLATE: Final = Path(__file__).with_name("tier_package")
_NAME: Final = re.compile(r"[a-z][a-z0-9]{0,30}")
_ACCEPTED: Final = "1 to 31 lower-case letters and digits, a letter first, and no keyword of Python"
_FILES: Final = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "kvpipe_sqlite_tier.py": "src/kvpipe_{name}_tier/__init__.py",
    "test_sqlite_tier.py": "tests/test_{name}_tier.py",
}
"""The files of the template, and their places in a package."""
_NAMES: Final = re.compile(r"(?<=kvpipe[_-])sqlite(?=[_-]tier)|Sqlite|(?<=\")sqlite(?=\")|sqlite(?= = |://)")
"""The tier's name in the template. `sqlite3`, `sqlite_errorcode` and SQLite do not match: they name the database."""
_CONFTEST: Final = """import pytest

pytest.register_assert_rewrite("kvpipe.testing.tier_conformance")
"""


def add_arguments(new: argparse.ArgumentParser) -> None:
    """Add the arguments of `kvpipe new-tier`, and set `run`."""
    new.add_argument("name", metavar="NAME", help=f"the tier's kind and the scheme of its URLs: {_ACCEPTED}")
    new.add_argument(
        "--into", type=Path, default=Path(), help="folder in which the package's folder is created (default: .)"
    )
    new.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the package's files, and print the command that runs its tests.

    Raises UsageError if the name or the folder cannot be used.
    """
    name = args.name
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise UsageError(f"kvpipe: NAME={name!r} is not a name for a tier; use {_ACCEPTED}")
    if name in plugins.names(plugins.TIERS):
        raise UsageError(f"kvpipe: NAME={name!r} is taken by an installed tier; choose another one")
    folder = args.into / f"kvpipe-{name}-tier"
    texts = {_FILES[file.name].format(name=name): file for file in _TEMPLATE.iterdir() if file.name in _FILES}
    try:
        folder.mkdir()
        for place, file in texts.items():
            text = file.read_text(encoding="utf-8")
            path = folder / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(
                _NAMES.sub(lambda one: name.title() if one[0] == "Sqlite" else name, text), encoding="utf-8"
            )
        (folder / "src" / f"kvpipe_{name}_tier" / "py.typed").touch()
        (folder / "tests" / "conftest.py").write_text(_CONFTEST, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"kvpipe: {folder}: {error.strerror}; choose another folder with --into") from None
    print(f"{folder} has a working tier, which uses a SQLite database. Test it: cd {folder} && python -m pytest")  # noqa: T201
    return 0
