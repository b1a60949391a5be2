"""A tier in a package of its own, as `docs/extending.md` has it: built, installed, configured and held to the suite."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvpipe.testing.environments import PIP, environment, run

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tests" / "third_party_tier"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with two wheels, kvpipe's and the package's."""
    folder = tmp_path_factory.mktemp("clean")
    run(*PIP, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, PACKAGE, ROOT, cwd=folder)
    wheels = sorted(folder.glob("*.whl"))
    assert len(wheels) == 2
    return environment(folder / "venv", *wheels).parents[2] / "bin" / "python"


def test_it_keeps_the_protocol(python: Path, tmp_path: Path) -> None:
    """All claims of `kvpipe.testing.tier_conformance`, and its own tests, where nothing but the wheel is there."""
    test = tmp_path / "test_sqlite_tier.py"
    test.write_bytes((PACKAGE / test.name).read_bytes())
    message = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", test, cwd=tmp_path)
    assert "28 passed" in message


def test_it_is_configured_like_ours(python: Path, tmp_path: Path) -> None:
    """The command finds it by its URL, shows its keys, and refuses a misspelt one with its suggestion."""
    check = (python, "-m", "kvpipe", "check")
    url = f"sqlite://{tmp_path}/kv.db"
    assert "'kind': 'sqlite', " in run(*check, f'{{"tiers": "{url}?lanes=2"}}', cwd=tmp_path)
    message = run(*check, f'{{"tiers": "{url}?byte_max=1GiB"}}', cwd=tmp_path, ok=False)
    assert "tier 1 (sqlite): unknown key 'byte_max'; did you mean 'bytes_max'?" in message
    assert "items" in run(python, "-m", "kvpipe", "cache", "stats", url, "--json", cwd=tmp_path)


def test_its_types_are_those_of_the_wheel(python: Path, tmp_path: Path) -> None:
    """A type checker takes kvpipe's annotations: the package is right by the strictest rules, and a mistake is seen."""
    mypy = (sys.executable, "-m", "mypy", "--strict", "--config-file", "", "--python-executable", python, "--cache-dir")
    right = tmp_path / "kvpipe_sqlite_tier.py"
    right.write_bytes((PACKAGE / right.name).read_bytes())
    run(*mypy, tmp_path / "cache", right, cwd=tmp_path)
    wrong = tmp_path / "wrong.py"
    wrong.write_text("from kvpipe.tiers.base import Capacity, Key\nKey.parse(7)\nCapacity.nothing\n", encoding="utf-8")
    message = run(*mypy, tmp_path / "cache", wrong, cwd=tmp_path, ok=False)
    assert 'Argument 1 to "parse" of "Key" has incompatible type "int"; expected "str"' in message
    assert '"type[Capacity]" has no attribute "nothing"' in message
