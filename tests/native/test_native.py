"""What is compiled decides as its sources do, and runs only if it was made of these."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
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
ALL = ", ".join(native.COMPILED)
FILES = f"from kvpipe.cache.policy import {ALL}; print(*(one.__file__ for one in ({ALL})))"


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


def _compiled(house: Path) -> Path:
    return house / native.folder().relative_to(ROOT)


def _where(house: Path, switch: str = "") -> str:
    status, output = _run("-c", WHERE, cwd=house, switch=switch, PYTHONPATH=str(house))
    assert status == 0, output
    return output.strip()


@pytest.mark.slow
def test_it_decides_the_same() -> None:
    """Of recorded traces, with clients' hints and without, the same chunks go in the same order."""
    processes = [_start("-m", "tests.native.decisions", switch=switch) for switch in ("", "0")]
    compiled, sources = (process.communicate()[0].splitlines() for process in processes)
    assert compiled[0].endswith(native.SUFFIX)
    assert sources[0].endswith("sessions.py")
    assert len(sources) == 5
    assert compiled[1:] == sources[1:]


def test_setup_has_compiled_it() -> None:
    """`make setup` installs what that takes; what there is not is named."""
    assert [*build.lacking()] == []
    assert native.unusable() == ""


def test_it_runs_unless_it_is_switched_off(house: Path) -> None:
    """It is found before its sources."""
    assert _where(house) == str(_compiled(house) / f"sessions{native.SUFFIX}")
    assert _where(house, "0") == f"{house}/kvpipe/cache/policy/sessions.py {native.SWITCH} is 0"


@pytest.mark.parametrize("name", native.sources())
def test_sources_that_were_edited_run(house: Path, name: str) -> None:
    """Whoever changes one of them, or what they import, runs what was written."""
    with (house / "kvpipe" / name).open("a", encoding="utf-8") as file:
        file.write("\n")
    assert _where(house) == f"{house}/kvpipe/cache/policy/sessions.py it was compiled of other sources"


@pytest.mark.parametrize("name", [native.MADE, *(f"{one}{native.SUFFIX}" for one in ("chain", native.LIBRARY))])
@pytest.mark.parametrize("damage", ["lost", "empty", "other"])
def test_what_is_damaged(house: Path, name: str, damage: str) -> None:
    """The sources run, and another build mends it."""
    path = _compiled(house) / name
    path.unlink() if damage == "lost" else path.write_bytes(b"\xff other" if damage == "other" else b"")
    assert _where(house) == f"{house}/kvpipe/cache/policy/sessions.py what is compiled is damaged"


@pytest.mark.parametrize("name", ["chain", "sessions", native.LIBRARY])
def test_what_does_not_load(house: Path, name: str) -> None:
    """All of it, or nothing: where one does not load, the sources of all run."""
    there = _compiled(house)
    (there / f"{name}{native.SUFFIX}").write_bytes(b"no library")
    (there / native.MADE).write_bytes(native.contents(there))
    path, why = _where(house).split(" ", 1)
    assert path == f"{house}/kvpipe/cache/policy/sessions.py"
    assert why.startswith("it cannot be loaded (ImportError: ")
    status, files = _run("-c", FILES, cwd=house, PYTHONPATH=str(house))
    assert status == 0, files
    assert all(one.endswith(".py") for one in files.split())


def test_sources_that_are_gone(house: Path) -> None:
    """What is compiled is not used, as nobody can tell whether it is of what runs."""
    (house / "kvpipe/cache/hints.py").rename(house / "kvpipe/cache/gone")
    status, output = _run("-c", "from kvpipe import native; print(native.unusable())", cwd=house)
    assert status == 0
    assert output.startswith("its sources cannot be read (")


def test_nothing_compiled(house: Path) -> None:
    """The sources run."""
    shutil.rmtree(house / "kvpipe/native/compiled", ignore_errors=True)
    assert _where(house) == f"{house}/kvpipe/cache/policy/sessions.py it is not compiled for this Python"


@pytest.mark.slow
def test_it_is_compiled_once(house: Path) -> None:
    """Also by two at a time, and where something damaged is. Another time there is nothing to do."""
    there, command = _compiled(house), ("-m", "kvpipe.native.build")
    shutil.rmtree(house / "kvpipe/native/compiled", ignore_errors=True)
    there.mkdir(parents=True)
    (there / native.MADE).write_text("damaged", encoding="ascii")
    old = there.with_name("old")
    old.mkdir()
    os.utime(old, (0, 0))
    builds = [_start(*command, cwd=house) for _ in range(2)]
    assert {build.communicate()[0] for build in builds} <= {f"compiled into {there}\n", "compiled already\n"}
    assert [build.returncode for build in builds] == [0, 0]
    assert _where(house) == str(there / f"sessions{native.SUFFIX}")
    assert sorted(path.name for path in there.iterdir()) == sorted(
        [native.MADE, *(f"{name}{native.SUFFIX}" for name in (*native.COMPILED, native.LIBRARY))]
    )
    assert [path.name for path in there.parent.iterdir()] == [there.name]
    assert _run(*command, cwd=house) == (0, "compiled already\n")


def test_what_cannot_be_compiled(house: Path) -> None:
    """The compiler's words are shown, and what is there stays. Who asks for it once is not kept waiting again."""
    broken = house / "kvpipe/cache/policy/chain.py"
    broken.write_text(broken.read_text(encoding="utf-8") + "\nlost: int = 'text'\n", encoding="utf-8")
    before = {path for path in (house / "kvpipe/native").rglob("*") if path.is_file() and path.suffix != ".pyc"}
    command = ("-m", "kvpipe.native.build")
    for _ in range(2):
        status, output = _run(*command, cwd=house)
        assert status == 1
        assert output.startswith("not compiled: Python runs the sources. ")
        assert "Incompatible types in assignment" in output
        assert f"To mend it, {native.REMEDY}." in output
    after = {path for path in (house / "kvpipe/native").rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert before <= after
    assert [path.suffix for path in after - before] == [".failed"]
    assert _run(*command, "--once", cwd=house) == (1, "")


@pytest.mark.parametrize("program", ["no-such-compiler -O2", " ", '"'])
def test_without_a_compiler(house: Path, program: str) -> None:
    """It says so at once; with one, `--once` tries again."""
    shutil.rmtree(house / "kvpipe/native/compiled", ignore_errors=True)
    for once in ((), ("--once",)):
        status, output = _run("-m", "kvpipe.native.build", *once, cwd=house, CC=program)
        assert status == 1
        assert "no C compiler" in output
    off = _run("-m", "kvpipe.native.build", cwd=house, switch="0")
    assert off == (0, f"{native.SWITCH} is 0: nothing is compiled\n")


def test_where_nothing_may_be_written(house: Path) -> None:
    """It says so, and nothing else."""
    shutil.rmtree(house / "kvpipe/native/compiled", ignore_errors=True)
    (house / "kvpipe/native/compiled").write_text("no folder", encoding="utf-8")
    status, output = _run("-m", "kvpipe.native.build", cwd=house)
    assert status == 1
    assert output.startswith("not compiled: Python runs the sources. [Errno ")


@pytest.mark.slow
def test_a_wheel_has_it(house: Path) -> None:
    """It is for this platform then; else it is for every one.

    What is compiled in the tree is left out, also where no `.gitignore` says so; the tree stays as it is.
    """
    shutil.copytree(ROOT / "tools", house / "tools")
    shutil.copy(ROOT / "README.md", house)
    stray = _compiled(house) / "stray.so"
    stray.parent.mkdir(parents=True, exist_ok=True)
    stray.touch()
    before = sorted(house.rglob("*"))
    for switch, has in (("", True), ("0", False)):
        to = house / "dist" / (switch or "1")
        command = ("-m", "hatchling", "build", "-t", "wheel", "-d", str(to))
        status, output = _run(*command, cwd=house, switch=switch, PYTHONDONTWRITEBYTECODE="1")
        assert status == 0, output
        (wheel,) = to.iterdir()
        assert wheel.name.endswith("-py3-none-any.whl") != has
        names = zipfile.ZipFile(wheel).namelist()
        assert "kvpipe/cache/policy/sessions.py" in names
        files = [name for name in names if name.startswith("kvpipe/native/compiled/")]
        assert (_compiled(Path()) / f"sessions{native.SUFFIX}").as_posix() in files or not has
        assert len(files) == (len(native.COMPILED) + 2 if has else 0)
    shutil.rmtree(house / "dist")
    assert sorted(house.rglob("*")) == before


def test_the_compiler_is_the_one_that_is_tested() -> None:
    """Its release is what the tests are run with, and what developers install."""
    assert f'"mypy=={native.MYPY}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lock = (ROOT / "requirements/cpu.lock").read_text(encoding="utf-8").split()
    assert f"mypy=={native.MYPY}" in lock


@pytest.mark.parametrize("value", ["", "yes", "2", "\x1b[31m"])
def test_a_wrong_switch(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """It is refused before the engine starts, by name and value."""
    monkeypatch.setenv(native.SWITCH, value)
    with pytest.raises(ConfigError, match=f"{native.SWITCH}: expected 0 or 1") as caught:
        load_settings()
    assert str(caught.value).isprintable()


def test_a_switch_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """In small letters it would have no effect."""
    monkeypatch.setenv(native.SWITCH.lower(), "0")
    with pytest.raises(ConfigError, match=f"has no effect; write {native.SWITCH}"):
        load_settings()


def test_a_switch_that_requires_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 refuses where the sources would run; 0 does not, nor where another policy evicts."""
    monkeypatch.setattr(native, "missing", lambda: "it was compiled of other sources")
    before = load_settings()
    monkeypatch.setenv(native.SWITCH, "1")
    with pytest.raises(ConfigError, match="is 1, but it was compiled of other sources; install a C compiler"):
        load_settings()
    assert load_settings({"policy": "lru"}).policy == "lru"
    monkeypatch.setenv(native.SWITCH, "0")
    assert load_settings() == before
