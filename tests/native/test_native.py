"""What is compiled decides as its sources do, and runs only if it was made of these."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from kvpipe import native
from kvpipe.config import load_settings
from kvpipe.errors import ConfigError
from kvpipe.native import build

ROOT = Path(__file__).parents[2]
WHERE = (
    "from kvpipe import native; from kvpipe.cache.policy import sessions; print(sessions.__file__, native.missing())"
)
needs_compiler = pytest.mark.skipif(bool([*build.lacking()]), reason=f"compiles, and has no {[*build.lacking()]}")
needs_compiled = pytest.mark.skipif(
    not (native.folder() / native.DIGEST).exists(), reason="nothing is compiled for this Python: make setup says why"
)


def _start(*command: str, cwd: Path = ROOT, switch: str = "", **environment: str) -> subprocess.Popen[str]:
    given = {key: value for key, value in os.environ.items() if key != native.SWITCH} | environment
    if switch:
        given[native.SWITCH] = switch
    return subprocess.Popen(
        [sys.executable, *command], cwd=cwd, env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def _run(*command: str, cwd: Path = ROOT, switch: str = "", **environment: str) -> tuple[int, str]:
    process = _start(*command, cwd=cwd, switch=switch, **environment)
    output, _ = process.communicate()
    return process.returncode, output


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A copy of kvpipe, with what is compiled."""
    shutil.copytree(ROOT / "kvpipe", tmp_path / "kvpipe", ignore=shutil.ignore_patterns("__pycache__", "testing"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def _where(house: Path, switch: str = "") -> str:
    status, output = _run("-c", WHERE, cwd=house, switch=switch, PYTHONPATH=str(house))
    assert status == 0, output
    return output.strip()


@pytest.mark.slow
@needs_compiled
def test_it_decides_the_same() -> None:
    """Of recorded traces, with clients' hints and without, the same chunks go in the same order."""
    processes = [_start("-m", "tests.native.decisions", switch=switch) for switch in ("", "0")]
    compiled, sources = (process.communicate()[0].splitlines() for process in processes)
    assert compiled[0].endswith(EXTENSION_SUFFIXES[0])
    assert sources[0].endswith("sessions.py")
    assert len(sources) == 5
    assert compiled[1:] == sources[1:]


@needs_compiled
def test_it_runs_unless_it_is_switched_off(house: Path) -> None:
    """It is found before its sources."""
    assert _where(house) == str(house / native.folder().relative_to(ROOT) / f"sessions{EXTENSION_SUFFIXES[0]}")
    assert _where(house, "0") == f"{house}/kvpipe/cache/policy/sessions.py {native.SWITCH} is 0"


@needs_compiled
@pytest.mark.parametrize("name", native.sources())
def test_sources_that_were_edited_run(house: Path, name: str) -> None:
    """Whoever changes one of them, or what they import, runs what was written."""
    with (house / "kvpipe" / name).open("a", encoding="utf-8") as file:
        file.write("\n")
    assert _where(house) == f"{house}/kvpipe/cache/policy/sessions.py it was compiled of other sources"


@needs_compiled
def test_a_library_that_does_not_load(house: Path) -> None:
    """The sources run, and the reason is kept."""
    (house / native.folder().relative_to(ROOT) / f"{native.LIBRARY}{EXTENSION_SUFFIXES[0]}").write_bytes(b"no library")
    assert _where(house).startswith(f"{house}/kvpipe/cache/policy/sessions.py it cannot be loaded (")


def test_nothing_compiled(house: Path) -> None:
    """The sources run."""
    shutil.rmtree(house / "kvpipe/native/compiled", ignore_errors=True)
    assert _where(house) == f"{house}/kvpipe/cache/policy/sessions.py it is not compiled for this Python"


@pytest.mark.slow
@needs_compiler
def test_it_is_compiled_once(house: Path) -> None:
    """Also with the project's settings in the working directory. Another time there is nothing to do."""
    shutil.rmtree(house / "kvpipe/native/compiled", ignore_errors=True)
    there = house / native.folder().relative_to(ROOT)
    command = ("-m", "kvpipe.native.build")
    assert _run(*command, cwd=house) == (0, f"compiled into {there}\n")
    assert _where(house) == str(there / f"sessions{EXTENSION_SUFFIXES[0]}")
    assert sorted(path.name for path in there.iterdir()) == sorted(
        [native.DIGEST, *(f"{name}{EXTENSION_SUFFIXES[0]}" for name in (*native.COMPILED, native.LIBRARY))]
    )
    assert [path.name for path in there.parent.iterdir()] == [there.name]
    assert _run(*command, cwd=house) == (0, "compiled already\n")


@needs_compiler
def test_what_cannot_be_compiled(house: Path) -> None:
    """What is there stays, and the compiler's words are shown."""
    broken = house / "kvpipe/cache/policy/chain.py"
    broken.write_text(broken.read_text(encoding="utf-8") + "\nlost: int = 'text'\n", encoding="utf-8")
    before = sorted((house / "kvpipe/native").rglob("*"))
    status, output = _run("-m", "kvpipe.native.build", cwd=house)
    assert status == 1
    assert output.startswith("not compiled: Python runs the sources. ")
    assert "Incompatible types in assignment" in output
    assert f"To mend it, {native.REMEDY}." in output
    assert sorted((house / "kvpipe/native").rglob("*")) == before


def test_without_a_compiler(house: Path) -> None:
    """It says so at once."""
    shutil.rmtree(house / "kvpipe/native/compiled", ignore_errors=True)
    status, output = _run("-m", "kvpipe.native.build", cwd=house, CC="no-such-compiler -O2")
    assert status == 1
    assert "it lacks a C compiler (no-such-compiler)" in output.replace("the package mypy, ", "")
    off = _run("-m", "kvpipe.native.build", cwd=house, switch="0")
    assert off == (0, f"{native.SWITCH} is 0: nothing is compiled\n")


@pytest.mark.slow
@needs_compiled
def test_a_wheel_has_it(tmp_path: Path) -> None:
    """It is for this platform then; else it is for every one, and has the sources alone."""
    pytest.importorskip("hatchling")
    where = native.folder().relative_to(ROOT).as_posix()
    for value, there in (("1", True), ("0", False)):
        to = tmp_path / value
        status, output = _run("-m", "hatchling", "build", "-t", "wheel", "-d", str(to), switch=value)
        assert status == 0, output
        (wheel,) = to.iterdir()
        assert wheel.name.endswith("-py3-none-any.whl") != there
        names = zipfile.ZipFile(wheel).namelist()
        assert "kvpipe/cache/policy/sessions.py" in names
        assert (f"{where}/sessions{EXTENSION_SUFFIXES[0]}" in names) == there
        assert (f"{where}/{native.DIGEST}" in names) == there


@pytest.mark.parametrize("value", ["", "yes", "2", "\x1b[31m"])
def test_a_wrong_switch(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """It is refused before the engine starts, by name and value."""
    monkeypatch.setenv(native.SWITCH, value)
    with pytest.raises(ConfigError, match=f"{native.SWITCH}: expected 0 or 1") as caught:
        load_settings()
    assert str(caught.value).isprintable()


def test_a_switch_that_requires_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 refuses where the sources would run; 0 does not."""
    monkeypatch.setattr(native, "missing", lambda: "it was compiled of other sources")
    before = load_settings()
    monkeypatch.setenv(native.SWITCH, "1")
    with pytest.raises(ConfigError, match="is 1, but it was compiled of other sources; install a C compiler"):
        load_settings()
    monkeypatch.setenv(native.SWITCH, "0")
    assert load_settings() == before
