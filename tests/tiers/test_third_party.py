"""`kvpipe new-tier` makes the package of a tier. The package is tested in place, built, installed and configured."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvpipe.cli.main import main
from kvpipe.testing.waiting import WAIT_S
from tests.rigs.environments import PIP, environment, run

ROOT = Path(__file__).parents[2]


def made(name: str, folder: Path) -> Path:
    """Make a package in `folder`, and return the folder of the package."""
    assert main(["new-tier", name, "--into", str(folder)]) == 0
    return folder / f"kvpipe-{name}-tier"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a package."""
    return made("sqlite", tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="module")
def python(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment in which two wheels are installed: kvpipe's and the package's."""
    folder = tmp_path_factory.mktemp("clean")
    run(*PIP, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, package, ROOT, cwd=folder)
    wheels = sorted(folder.glob("*.whl"))
    assert len(wheels) == 2
    return environment(folder / "venv", *wheels).parents[2] / "bin" / "python"


def test_new_package_keeps_the_protocol_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's tests pass without changes and without an installation, for any name of the package."""
    folder = made("shed", tmp_path)
    words = [path.read_text(encoding="utf-8") for path in folder.rglob("*") if path.is_file()]
    assert not any(re.search(r"kvpipe.sqlite|Sqlite|\bsqlite\b", text) for text in words)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False, timeout=5 * WAIT_S)
    assert "36 passed" in done.stdout, done.stdout + done.stderr


def test_installed_suite_runs(python: Path, package: Path) -> None:
    """The two wheels contain every module that the package's tests import."""
    test = package / "tests" / "test_sqlite_tier.py"
    words = ("-q", "-p", "no:cacheprovider", "-k", "health", "-c", "/dev/null", "--rootdir", package, test)
    assert "1 passed" in run(python, "-m", "pytest", *words, cwd=package)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("S3", "is not a name for a tier; use 1 to 31 lower-case letters"),
        ("7zip", "is not a name for a tier; use 1 to 31 lower-case letters and digits, a letter first"),
        (
            "class",
            "is not a name for a tier; use 1 to 31 lower-case letters and digits, a letter first, and no keyword",
        ),
        ("disk", "is taken by an installed"),
    ],
)
def test_new_tier_refuses_a_bad_name(name: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message is one sentence with the name and the remedy. No file is written."""
    assert main(["new-tier", name, "--into", str(tmp_path)]) == 2
    assert f"NAME={name!r} {why}" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_new_tier_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An existing folder does not change."""
    folder = made("shed", tmp_path)
    (folder / "README.md").write_text("mine", encoding="utf-8")
    assert main(["new-tier", "shed", "--into", str(tmp_path)]) == 2
    assert "File exists; choose another folder with --into" in capsys.readouterr().err
    assert (folder / "README.md").read_text(encoding="utf-8") == "mine"


def test_check_finds_and_checks_a_third_party_tier(python: Path, tmp_path: Path) -> None:
    """`kvpipe check` finds the tier by its URL, shows its keys, and refuses a misspelt key with a suggestion."""
    check = (python, "-m", "kvpipe", "check")
    url = f"sqlite://{tmp_path}/kv.db"
    assert "{kind: sqlite, " in run(*check, f'{{"tiers": "{url}?lanes=2"}}', cwd=tmp_path)
    message = run(*check, f'{{"tiers": "{url}?byte_max=1GiB"}}', cwd=tmp_path, ok=False)
    assert "tier 1 (sqlite): unknown key 'byte_max'; did you mean 'bytes_max'?" in message
    run(python, "-m", "kvpipe", "cache", "stats", url, cwd=tmp_path, ok=False)
    assert not (tmp_path / "kv.db").exists()
    (tmp_path / "kv.db").touch()
    assert "items" in run(python, "-m", "kvpipe", "cache", "stats", url, "--json", cwd=tmp_path)


def test_third_party_tier_passes_the_type_check(python: Path, package: Path, tmp_path: Path) -> None:
    """A type checker uses kvpipe's annotations. The package passes the strictest rules, and a mistake is reported.

    Torch and its imports are not read: they are 1,900 modules, and the interface of a tier does not use them.
    """
    rules = tmp_path / "mypy.ini"
    rules.write_text("[mypy]\nstrict = True\n[mypy-torch.*]\nfollow_imports = skip\n", encoding="utf-8")
    mypy = (sys.executable, "-m", "mypy", "--config-file", rules, "--python-executable", python, "--cache-dir")
    right = tmp_path / "kvpipe_sqlite_tier.py"
    right.write_bytes((package / "src" / right.stem / "__init__.py").read_bytes())
    run(*mypy, tmp_path / "cache", right, cwd=tmp_path)
    wrong = tmp_path / "wrong.py"
    wrong.write_text("from kvpipe.tiers.base import Capacity, Key\nKey.parse(7)\nCapacity.nothing\n", encoding="utf-8")
    message = run(*mypy, tmp_path / "cache", wrong, cwd=tmp_path, ok=False)
    assert 'Argument 1 to "parse" of "Key" has incompatible type "int"; expected "str"' in message
    assert '"type[Capacity]" has no attribute "nothing"' in message
