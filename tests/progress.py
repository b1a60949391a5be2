"""A pytest plugin for `make test`: progress every ten seconds, failures at once, the longest files first.

Use the plugin with `-p tests.progress --part NAME`, in one process or with pytest-xdist.
"""

from __future__ import annotations

import functools
import json
import math
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Generator
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Final

import pytest

EVERY_S: Final = 10.0
ROOT: Final = Path(__file__).parents[1]
DURATIONS: Final = ROOT / "tests" / "durations.json"
"""The measured seconds of every test file. Files that take long are started first.

`make durations` writes this file.
"""
MEASURED: Final = ROOT / ".cache" / "tests"
"""The folder with each part's last run.

NAME.json has the seconds and CPU seconds of its test files, NAME.failed the failed tests.
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of a part."""
    parser.addoption("--part", default="tests", help="the name of this part in progress lines")
    parser.addoption("--no-vllm", action="store_true", help="refuse every import of vLLM, which takes ten seconds")
    parser.addoption("--file-seconds-max", type=float, help="leave out files that took longer, by tests/durations.json")


def pytest_configure(config: pytest.Config) -> None:
    """Report progress, but not in a worker of pytest-xdist. Refuse vLLM if an option requires this."""
    if config.getoption("no_vllm"):
        sys.meta_path.insert(0, _NoVllm())
    config.pluginmanager.register(Processor())
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(str(config.getoption("part"))), "kvpipe-progress")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files that take longer than the option allows."""
    seconds_max = config.getoption("file_seconds_max")
    if seconds_max is None or not collection_path.is_relative_to(ROOT):
        return None
    return _durations().get(collection_path.relative_to(ROOT).as_posix(), 0.0) > seconds_max or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the files that take longest first, so that no core waits for a long file at the end.

    A file that was never measured may take long, so it is started first.
    """
    seconds = _durations()
    items.sort(key=lambda item: -seconds.get(_file(item.nodeid), math.inf))


class _NoVllm(MetaPathFinder):
    """Refuses to import vLLM."""

    def find_spec(self, fullname: str, *_: object) -> None:
        """Raise ImportError for vLLM and its modules."""
        if fullname.partition(".")[0] == "vllm":
            message = f"tests without vLLM import {fullname}: name this test in tools/test.sh (with_vllm)"
            raise ImportError(message)


class Processor:
    """Adds to each report the CPU seconds of this process and its ended children since the previous report."""

    def __init__(self) -> None:
        self._cpu_s = _cpu_s()

    def pytest_collection_finish(self) -> None:
        """Start counting after the imports, so that imports are not counted for the first test."""
        self._cpu_s = _cpu_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Add the attribute `cpu_s`, which pytest-xdist passes on."""
        report = yield
        before, self._cpu_s = self._cpu_s, _cpu_s()
        vars(report)["cpu_s"] = self._cpu_s - before
        return report


def _cpu_s() -> float:
    return sum(os.times()[:4])


@functools.cache
def _durations() -> dict[str, float]:
    """Return the recorded seconds of each file, by its path."""
    found: dict[str, float] = json.loads(DURATIONS.read_text(encoding="utf-8")) if DURATIONS.is_file() else {}
    return found


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


class Progress:
    """Counts and prints results, and writes down the duration of every file."""

    def __init__(self, part: str) -> None:
        """`part` is the name in each line of output."""
        self._part, self._total, self._done = part, 0, 0
        self._failed: list[str] = []
        # a copy of stdout, which stays the terminal while pytest captures a test's output
        self._out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        self._began_s, self._ended = time.monotonic(), threading.Event()
        self._running: dict[str, None] = {}
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._cpu_s: defaultdict[str, float] = defaultdict(float)

    def pytest_sessionstart(self) -> None:
        """Begin to print."""
        self._began_s = time.monotonic()
        threading.Thread(target=self._tick, name="progress", daemon=True).start()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Record the number of tests if all tests run in one process."""
        self._total = len(session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Record the number of tests that a worker reports."""
        self._total = len(ids)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Record that a test runs."""
        self._running[nodeid] = None

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Count a test that has ended."""
        self._running.pop(nodeid, None)
        self._done += 1

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print a failure at once."""
        self._seconds[_file(report.nodeid)] += report.duration
        self._cpu_s[_file(report.nodeid)] += getattr(report, "cpu_s", 0.0)
        if report.failed:
            self._failed.append(f"{report.nodeid} ({report.when})")
            self._print(f"FAILED {report.nodeid} ({report.when})\n{report.longreprtext}")
            for title, content in report.sections:
                self._print(f"--- {title} ---\n{content}")

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Print no dot for a test that passed."""
        return ("passed", "", "PASSED") if report.passed and report.when == "call" else None

    def pytest_sessionfinish(self) -> None:
        """Record how long every file took and which tests failed, and print the last line."""
        self._ended.set()
        self._line()
        MEASURED.mkdir(parents=True, exist_ok=True)
        seconds, cpu_s = (
            {name: round(took, 1) for name, took in sorted(of.items())} for of in (self._seconds, self._cpu_s)
        )
        wall_s = round(time.monotonic() - self._began_s, 1)
        found = {"wall_s": wall_s, "tests": self._done, "files": seconds, "files_cpu_s": cpu_s}
        (MEASURED / f"{self._part}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        failed = "".join(f"{self._part}: {test}\n" for test in self._failed)
        (MEASURED / f"{self._part}.failed").write_text(failed, encoding="utf-8")

    def _tick(self) -> None:
        while not self._ended.wait(EVERY_S):
            self._line()

    def _line(self) -> None:
        running = next(iter(list(self._running)), "")
        took_s = time.monotonic() - self._began_s
        total = self._total or "?"
        now = f", running {running}" if running else ""
        self._print(f"[{self._part}] {took_s:4.0f} s: {self._done}/{total} done, {len(self._failed)} failed{now}")

    def _print(self, text: str) -> None:
        self._out.write(text + "\n")
        self._out.flush()


def main() -> None:
    """Merge the measurements of the last runs of all parts into `tests/durations.json`."""
    seconds: dict[str, float] = {}
    for part in MEASURED.glob("*.json"):
        seconds |= json.loads(part.read_text(encoding="utf-8"))["files"]
    DURATIONS.write_text(json.dumps(dict(sorted(seconds.items())), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
