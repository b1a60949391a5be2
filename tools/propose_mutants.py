"""Runs the quick tests on mutants that cosmic-ray proposes: `make propose-mutants`.

One process collects the tests in a temporary copy of the sources. The process runs the tests once to learn which
functions each test calls. If a mutant changes a function's body, a fork of that process replaces the body and
runs the tests that call the function. For any other mutant, such as a constant's, the file is imported again, and all
tests that call its functions run. Each mutant is also written to the copy, for tests that start Python processes. The
tests that start Python processes also judge functions that no test calls in this process.
"""

from __future__ import annotations

import argparse
import compileall
import difflib
import functools
import gc
import importlib
import json
import marshal
import os
import pickle
import re
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from py_compile import PycInvalidationMode
from types import CodeType, FrameType, FunctionType
from typing import Any, Final, NamedTuple

import pytest
from proposals import Proposal, changed_functions, proposals

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "docs" / "results" / "proposed_mutants.json"
FOLDERS: Final = (
    "kvpipe/cache", "kvpipe/features", "kvpipe/scheduler", "kvpipe/tiers", "kvpipe/worker", "statemachine",
)  # fmt: skip
"""The folders that are mutated."""
TESTS: Final = ("cache", "scheduler", "statemachine", "tiers", "trace", "transfer", "worker")
"""The folders of the tests that judge mutants."""
IMPORTED: Final = (
    "anyio", "hypothesis", "msgspec", "numpy", "pydantic", "pydantic_settings", "rich", "structlog", "torch", "xxhash",
    "yaml",
)  # fmt: skip
LEFT_OUT: Final = ("*.egg-info", "__pycache__", ".git", ".venv", ".cache", ".*_cache", ".hypothesis", "site")
FAILED_MAX: Final = 10
"""If more tests than this number fail without a mutant, no mutant is tried."""
LIMIT_S: Final = 60.0
"""A mutant's time limit in seconds is this number plus three times the time of the tests without a mutant."""
NOT_IN_PLACE: Final = 99
"""The exit status when a function's code cannot be changed in place."""
Where = tuple[str, int]
"""The place where a function begins: (path of the source, line)."""


class Judged(NamedTuple):
    """The result of a proposal. `outcome` is "killed", "timed out" or "survived"."""

    proposal: Proposal
    outcome: str
    diff: str
    tests: int
    """The number of tests that call the changed code."""


class _Ordered:
    """A pytest plugin: tests whose file has the module's name come first, and then the fastest files."""

    def __init__(self, related: str = "") -> None:
        self._related = related
        self._seconds: dict[str, float] = json.loads((ROOT / "tests" / "durations.json").read_text("utf-8"))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Sort the tests. The sort is stable, so tests of one file stay together."""
        items.sort(key=lambda item: self._rank(item.nodeid.partition("::")[0]))

    def _rank(self, file: str) -> tuple[bool, float, str]:
        return self._related not in file, self._seconds.get(file, 0.0), file


class _Test(NamedTuple):
    """A test: its name, whether it passes without a mutant and starts Python processes, and the functions it calls."""

    name: str
    passes: bool
    starts_python: bool
    calls: frozenset[Where]


class _Tests(_Ordered):
    """A pytest plugin that runs tests in forks, as `pipe` requests.

    A fork replaces the code of mutated functions in place.
    """

    def __init__(self, root: Path, pipe: Connection) -> None:
        super().__init__()
        self._root, self._pipe, self._report = f"{root.resolve()}/", pipe, root.parent / "report"
        self._functions: defaultdict[Where, list[FunctionType]] = defaultdict(list)
        self._called: set[Where] = set()
        self._starts_python = False
        self._failed: list[str] = []
        self._paths: dict[str, str] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Record the functions that imports call. Printing progress would need a thread, which a fork lacks."""
        config.pluginmanager.unregister(name="kvpipe-progress")
        sys.addaudithook(self._audit)
        self._trace(self._note)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self) -> None:
        """Find the functions before their objects are hidden from garbage collection."""
        self._trace(None)
        for one in gc.get_objects():
            if isinstance(one, FunctionType) and self._path(one.__code__):
                self._functions[self._where(one.__code__)].append(one)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run all tests once and record which functions each test calls. Then answer requests until none is left."""
        imported = frozenset(self._called)
        status = _forked(functools.partial(self._reach, session), 20 * LIMIT_S)
        self._pipe.send((pickle.loads(self._report.read_bytes()) if status == 0 else [], imported))  # noqa: S301  (ours)
        with suppress(EOFError):
            while True:
                numbers, code, limit_s = self._pipe.recv()
                self._pipe.send(_forked(functools.partial(self._run, session, numbers, marshal.loads(code)), limit_s))  # noqa: S302  (ours)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a failure."""
        if report.failed:
            self._failed.append(report.nodeid)

    def _reach(self, session: pytest.Session) -> int:
        self._trace(self._note)
        tests = list[_Test]()
        for number, item in enumerate(session.items):
            self._called, self._starts_python, self._failed = set(), False, []
            self._one(session.items, number, number + 1)
            tests.append(_Test(item.nodeid, not self._failed, self._starts_python, frozenset(self._called)))
        self._report.write_bytes(pickle.dumps(tests))
        return 0

    def _run(self, session: pytest.Session, numbers: Sequence[int], code: CodeType) -> int:
        for where, changed in self._codes(code):
            for function in self._functions.get(where, ()):
                if function.__code__.co_qualname == changed.co_qualname:
                    try:
                        function.__code__ = changed
                    except ValueError:  # the changed code has other free variables
                        return NOT_IN_PLACE
        items = [session.items[number] for number in numbers]
        for number in range(len(items)):
            self._one(items, number, number + 1)
            if self._failed:
                return 1
        return 0

    @staticmethod
    def _one(items: Sequence[pytest.Item], number: int, following: int) -> None:
        nextitem = items[following] if following < len(items) else None
        items[number].config.hook.pytest_runtest_protocol(item=items[number], nextitem=nextitem)

    def _codes(self, code: CodeType) -> Iterator[tuple[Where, CodeType]]:
        """Yield the code of all functions of a module."""
        for one in code.co_consts:
            if isinstance(one, CodeType):
                if not one.co_name.startswith("<"):
                    yield self._where(one), one
                yield from self._codes(one)

    def _trace(self, what: Callable[[FrameType, str, object], None] | None) -> None:
        threading.settrace(what)
        sys.settrace(what)

    def _note(self, frame: FrameType, _event: str, _argument: object) -> None:
        if self._path(frame.f_code):
            self._called.add(self._where(frame.f_code))

    def _audit(self, event: str, arguments: tuple[object, ...]) -> None:
        if event == "subprocess.Popen" and "python" in str(arguments[:2]):
            self._starts_python = True

    def _where(self, code: CodeType) -> Where:
        return self._path(code), code.co_firstlineno

    def _path(self, code: CodeType) -> str:
        """Return the path in the copy, without links, of a source that may be mutated, or "" for other files."""
        path = self._paths.get(code.co_filename)
        if path is None:
            real = os.path.realpath(code.co_filename)
            inside = real.startswith((f"{self._root}kvpipe/", f"{self._root}statemachine/"))
            path = self._paths[code.co_filename] = real.removeprefix(self._root) if inside else ""
        return path


def _forked(work: Callable[[], int], limit_s: float) -> int | None:
    """Do `work` in a fork with its own session. Returns the fork's exit status, or None after `limit_s` seconds."""
    child = _begin(work)
    watched = os.pidfd_open(child)
    try:
        ended = select.select([watched], [], [], limit_s)[0]
    finally:  # also if this process is interrupted: end all processes that the tests have left running
        os.close(watched)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) if ended else None


def _begin(work: Callable[[], int]) -> int:
    """Begin `work` in a fork with its own session. Returns the fork's process id."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    status = int(pytest.ExitCode.INTERNAL_ERROR)
    try:
        os.setsid()
        status = work()
    except BaseException:  # noqa: BLE001  (a fork must not go on as its parent)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _stop(*_: object) -> None:
    """Raise an exception that pytest does not count as a failed test, so that the forks of this process end first."""
    raise KeyboardInterrupt


class Bench:
    """A copy of the sources in `root`, in which mutants are tried one after the other."""

    def __init__(self, root: Path, file_seconds_max: float) -> None:
        """Run the tests once without a mutant. Print and leave out the tests that fail.

        Raises:
            RuntimeError: the tests cannot be collected, or too many of them fail.

        """
        self._root, self._log, began_s = root, root.parent / "log", time.monotonic()
        self._arguments = [
            "-q", "-s", "--tb=no", "-W", "ignore::pytest.PytestAssertRewriteWarning",
            "-p", "tests.progress", "--no-vllm", "--file-seconds-max", str(file_seconds_max),
        ]  # fmt: skip
        self._pipe, theirs = Pipe()
        self._child = _begin(functools.partial(self._pytest, [f"tests/{one}" for one in TESTS], _Tests(root, theirs)))
        theirs.close()
        with ExitStack() as undo:
            undo.callback(self.close)
            self._learn()
            undo.pop_all()
        took_s = time.monotonic() - began_s
        self._limit_s = LIMIT_S + 3 * took_s
        _say(f"{len(self._tests)} tests take {took_s:.0f} s without a mutant")

    def _learn(self) -> None:
        """Store the results of the run without a mutant."""
        self._tests: list[_Test] = []
        with suppress(EOFError):
            self._tests, self._imported = self._pipe.recv()
        failed = [one.name for one in self._tests if not one.passes]
        if not self._tests or len(failed) > FAILED_MAX:
            raise RuntimeError(f"without a mutant these fail: {failed}\n{self._log.read_text('utf-8')}")
        for one in failed:
            _say(f"left out, fails without a mutant: {one}")
            self._arguments += ["--deselect", one]

    def close(self) -> None:
        """End the process of the tests."""
        os.kill(self._child, signal.SIGTERM)
        os.waitpid(self._child, 0)

    def judge(self, one: Proposal, changed: str) -> Judged:
        """Apply the proposal, run the tests that call the changed code until one test fails, and undo the change."""
        file = self._root / one.file
        source = file.read_text("utf-8")
        file.write_text(changed, "utf-8")
        try:
            status, tests = self._status(one.file, source, changed)
        finally:
            file.write_text(source, "utf-8")
        outcome = {None: "timed out", 0: "survived"}.get(status, "killed")
        diff = difflib.unified_diff(source.splitlines(), changed.splitlines(), one.file, one.file, "", "", 0, "")
        return Judged(one, outcome, "\n".join(diff), tests)

    def _status(self, file: str, source: str, changed: str) -> tuple[int | None, int]:
        """Return the tests' exit status (None: time limit), and how many tests call the changed code."""
        lines = changed_functions(source, changed)
        functions = None if lines is None else {(file, line) for line in lines}
        related = Path(file).stem.strip("_")
        if functions is not None and not functions & self._imported:
            found = [n for n, test in enumerate(self._tests) if test.passes and functions & test.calls]
            found.sort(key=lambda n: related not in self._tests[n].name.partition("::")[0])  # stable
            begin = [n for n, test in enumerate(self._tests) if test.passes and test.starts_python]
            code = compile(changed, str(self._root / file), "exec", dont_inherit=True)
            self._pipe.send((found or begin, marshal.dumps(code), self._limit_s))
            status = self._pipe.recv()
            if status != NOT_IN_PLACE:
                return status, len(found)
        using = [test for test in self._tests if any(path == file for path, _ in test.calls)] or self._tests
        files = sorted({test.name.partition("::")[0] for test in using})
        work = functools.partial(self._pytest, ["-x", *files], _Ordered(related))
        return _forked(work, self._limit_s), len(using)

    def _pytest(self, more: Sequence[str], plugin: object) -> int:
        """Run pytest in a fork."""
        signal.signal(signal.SIGTERM, _stop)
        os.chdir(self._root)
        log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(log, stream)
        sys.path[:] = [str(self._root), *(one for one in sys.path[1:] if one != str(ROOT))]
        os.environ["PYTHONPATH"] = str(self._root)
        return int(pytest.main([*self._arguments, *more], plugins=[plugin]))


def row(judged: Sequence[Judged]) -> dict[str, Any]:
    """Return the counts of a folder's mutants and the survivors."""
    outcomes = [one.outcome for one in judged]
    lived = [one for one in judged if one.outcome == "survived"]
    return {
        "mutants": len(judged),
        "killed": outcomes.count("killed"),
        "timed_out": outcomes.count("timed out"),
        "survived": len(lived),
        "survivors": [
            {"at": f"{one.proposal.file}:{one.proposal.line}", "tests": one.tests, "diff": one.diff} for one in lived
        ],
    }


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Try a sample of each folder; print survivors and counts; write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", help=f"one of {', '.join(FOLDERS)}; default: all")
    parser.add_argument("--sample", type=int, default=60, help="how many mutants of each folder (60)")
    parser.add_argument("--seed", type=int, default=0, help="draws the sample (0)")
    parser.add_argument("--file-seconds-max", type=float, default=3.0, help="leave out slower test files (3)")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the results are kept (%(default)s)")
    asked = parser.parse_args()
    unknown = [one for one in asked.folders if re.sub("/$", "", one) not in FOLDERS]
    if unknown:
        parser.error(f"folder {unknown[0]!r} is unknown; name one of {', '.join(FOLDERS)}")
    signal.signal(signal.SIGTERM, _stop)  # ends the tests' process too
    for name in IMPORTED:
        importlib.import_module(name)
    results = json.loads(asked.json.read_text("utf-8")) if asked.json.exists() else {}
    folders = [one.rstrip("/") for one in asked.folders] or FOLDERS
    with tempfile.TemporaryDirectory(prefix="kvpipe-mutants-") as made:
        root = Path(made) / "copy"
        shutil.copytree(ROOT, root, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
        (root / ".venv").symlink_to((ROOT / ".venv").resolve())
        # Python compares sources by hash, because a mutant may have the same size and time as the file
        for folder in folders:
            compileall.compile_dir(root / folder, quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
        with closing(Bench(root, asked.file_seconds_max)) as bench:
            for folder in folders:
                results[folder] = {"seed": asked.seed, **_tried(bench, root, folder, asked.sample, asked.seed)}
                asked.json.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n", "utf-8")


def _tried(bench: Bench, root: Path, folder: str, sample: int, seed: int) -> dict[str, Any]:
    """Try the sample of a folder, and print the result of each mutant. Returns the counts and the survivors."""
    judged = []
    for one, changed in proposals(root, folder, sample, seed):
        judged.append(bench.judge(one, changed))
        _say(f"{judged[-1].outcome:9} {one.file}:{one.line} {one.operator}, {judged[-1].tests} tests")
        if judged[-1].outcome == "survived":
            _say(judged[-1].diff)
    found = row(judged)
    _say(f"{folder}: { ({name: value for name, value in found.items() if name != 'survivors'}) }")
    return found


if __name__ == "__main__":
    main()
