"""A tier in a package of its own, as `docs/extending.md` has it: built, installed, configured and held to the suite."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from kvpipe.testing.waiting import WAIT_S

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tests" / "third_party_tier"


def run(*command: str | Path, cwd: Path, ok: bool = True) -> str:
    """Return what a command prints; it knows nothing of this tree but what is installed."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "KVPIPE", "VIRTUAL"))}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=5 * WAIT_S, check=False)
    assert (done.returncode == 0) == ok, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of its own with two wheels, kvpipe's and the package's; it sees what kvpipe needs, and no tree."""
    folder = tmp_path_factory.mktemp("clean")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, PACKAGE, ROOT, cwd=folder)
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    made = folder / "venv" / "bin" / "python"
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (site / "what-kvpipe-needs.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    wheels = sorted(folder.glob("*.whl"))
    assert len(wheels) == 2
    run(*pip, "--python", made, "install", "-q", "--no-deps", "--no-index", *wheels, cwd=folder)
    return made


def test_kvpipe_is_whole(python: Path, tmp_path: Path) -> None:
    """Every module of the tree is in its wheel, also those behind links; what it registers is read of its metadata."""
    code = "import kvpipe, pathlib; print(pathlib.Path(kvpipe.__file__).parent)"
    there = Path(run(python, "-c", code, cwd=tmp_path).strip())
    assert ROOT not in there.parents
    tree = {
        file.relative_to(top.parent)
        for top in (ROOT / "kvpipe", ROOT / "kvpipe" / "statemachine", ROOT / "kvpipe" / "connectors")
        for file in top.rglob("*.py")
    }
    tree = {Path("kvpipe", one) if one.parts[0] != "kvpipe" else one for one in tree}
    assert len(tree) > 200
    assert {file.relative_to(there.parent) for file in there.rglob("*.py")} == tree
    code = (
        "from kvpipe import plugins as p; print([len(p.own(one)) for one in (p.TIERS, p.POLICIES, p.TRANSFER_ENGINES)])"
    )
    assert run(python, "-c", code, cwd=tmp_path).strip() == "[4, 3, 2]"
    assert "policy = sessions\n" in run(python, "-m", "kvpipe", "check", '{"policy": "sessions"}', cwd=tmp_path)


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
