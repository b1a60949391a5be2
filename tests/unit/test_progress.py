"""Tests of the order of test files in `make test`, and of the tests' distribution among workers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpipe.testing.waiting import WAIT_S
from tests import progress

ROOT = Path(__file__).parents[2]


def test_files_of_unknown_and_of_long_duration_run_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """With this order, short files run last, so no core waits long at the end.

    The order within a file does not change.
    """
    monkeypatch.setattr(progress, "_durations", lambda: {"short.py": 0.1, "long.py": 200.0})
    names = ("short.py::a", "long.py::a", "new.py::b", "new.py::a")
    items: list[Any] = [SimpleNamespace(nodeid=name) for name in names]
    progress.pytest_collection_modifyitems(items)
    assert [item.nodeid for item in items] == ["new.py::b", "new.py::a", "long.py::a", "short.py::a"]


CRASHES = """
import os, pytest
@pytest.mark.parametrize("number", range(10))
def test_one(number):
    if number == 3:
        os._exit(1)
"""


@pytest.mark.parametrize("how", ["load", "loadfile"])
def test_run_ends_when_a_worker_crashes(how: str, tmp_path: Path) -> None:
    """The test of the crash fails once. Other workers run the tests that the crashed worker has not run."""
    for name in "ab":
        (tmp_path / f"test_{name}.py").write_text(CRASHES, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.progress",
        "-n",
        "2",
        "--dist",
        how,
        "-p",
        "no:cacheprovider",
    ]
    command += ["--rootdir", str(tmp_path), "-c", "/dev/null", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=WAIT_S)
    assert "2 failed, 18 passed" in done.stdout, done.stdout


@pytest.mark.parametrize("how", ["load", "loadfile"])
def test_one_worker_runs_all_mutants_with_a_test_of_their_own(how: str) -> None:
    """Other tests are distributed one by one, or file by file."""
    options = SimpleNamespace(getoption=lambda _: how, getvalue=lambda _: ["popen"])
    scheduler: Any = progress.pytest_xdist_make_scheduler(options, None)  # type: ignore[arg-type]
    names = ("m.py::test_mutant_with_its_own_test_is_found[a]", "m.py::test_mutant_with_its_own_test_is_found[b]")
    mutants = {scheduler._split_scope(name) for name in names}
    others = {scheduler._split_scope(f"o.py::{name}") for name in "ab"}
    assert len(mutants) == 1
    assert len(others) == (1 if how == "loadfile" else 2)
