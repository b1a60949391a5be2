"""Mutants that cosmic-ray proposes, each under the quick tests of its folder: `make propose-mutants`.

Everything happens in a copy of the sources in a temporary directory. Each mutant is written there and tested in a fork
of this process, which has imported the other packages that tests need, and nothing of kvpipe.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import difflib
import importlib
import json
import os
import random
import re
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import Any, Final, NamedTuple

import pytest
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "docs" / "results" / "proposed_mutants.json"
TESTS: Final = {
    "kvpipe/cache": ("tests/cache", "tests/scheduler"),
    "kvpipe/scheduler": ("tests/scheduler", "tests/cache"),
    "kvpipe/tiers": ("tests/tiers", "tests/scheduler"),
    "kvpipe/worker": ("tests/worker", "tests/transfer"),
    "statemachine": ("tests/statemachine", "tests/scheduler"),
}
"""The folders that are mutated, each with the folders whose tests judge it."""
IMPORTED: Final = (
    "anyio", "hypothesis", "msgspec", "numpy", "pydantic", "pydantic_settings", "rich", "structlog", "torch", "xxhash",
    "yaml",
)  # fmt: skip
LEFT_OUT: Final = ("*.egg-info", "__pycache__", ".git", ".venv", ".cache", ".*_cache", ".hypothesis", "site")
FAILED_MAX: Final = 3
"""With more tests that fail without a mutant, nothing is tried."""
LIMIT_S: Final = 60.0
"""A mutant has this time, and three times what the tests take without one."""


class Proposal(NamedTuple):
    """A change that cosmic-ray makes: the `occurrence` of an operator in a file, at a line."""

    file: str
    line: int
    operator: str
    occurrence: int


class Judged(NamedTuple):
    """How a proposal fared: "killed", "timed out" or "survived"."""

    proposal: Proposal
    outcome: str
    diff: str


def proposals(root: Path, folder: str, sample: int, seed: int) -> Iterator[tuple[Proposal, str]]:
    """Yield `sample` proposals for `folder` with the mutated source: first a place is drawn, then a change of it.

    A place that many operators can change counts once. Changes of annotations alone are not proposed.
    """
    random_ = random.Random(seed)  # noqa: S311  (a sample)
    places: defaultdict[tuple[str, tuple[int, int]], list[Proposal]] = defaultdict(list)
    for file in sorted((root / folder).rglob("*.py")):
        name, tree = file.relative_to(root).as_posix(), get_ast(file.read_text("utf-8"))
        for operator in operator_names():
            kind = get_operator(operator)
            if kind.arguments():
                continue
            made = (start for node in ast_nodes(tree) for start, _ in kind().mutation_positions(node))
            for occurrence, start in enumerate(made):
                places[name, start].append(Proposal(name, start[0], operator, occurrence))
    order = sorted(places)
    random_.shuffle(order)
    for place in order:
        if not sample:
            return
        one = random_.choice(places[place])
        source = (root / one.file).read_text("utf-8")
        changed = mutate_code(source, get_operator(one.operator)(), one.occurrence)
        if changed and _meaning(changed) != _meaning(source):
            sample -= 1
            yield one, changed


class _Unannotated(ast.NodeTransformer):
    """Takes annotations out of a tree."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for field in ("annotation", "returns"):
            if isinstance(getattr(node, field, None), ast.expr):
                setattr(node, field, ast.Constant(None))
        return super().generic_visit(node)


def _meaning(source: str) -> str:
    try:
        return ast.dump(_Unannotated().visit(ast.parse(source)))
    except SyntaxError:
        return ast.dump(ast.parse(""))


class _Related:
    """A pytest plugin: tests whose file has the module's name come first, and then the fastest files."""

    def __init__(self, module: str, failed: Path) -> None:
        self._stem, self._failed = Path(module).stem.strip("_"), failed
        self._seconds: dict[str, float] = json.loads((ROOT / "tests" / "durations.json").read_text("utf-8"))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Sort the tests; the sort is stable, so those of one file stay together."""
        items.sort(key=lambda item: self._rank(item.nodeid.partition("::")[0]))

    def _rank(self, file: str) -> tuple[bool, float, str]:
        return self._stem not in file, self._seconds.get(file, 0.0), file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the name of a test that fails to a file, for the run without a mutant."""
        if report.failed:
            with self._failed.open("a", encoding="utf-8") as file:
                file.write(f"{report.nodeid}\n")


class Bench:
    """A copy of the sources in `root`, in which a folder's mutants are tried one after the other."""

    def __init__(self, root: Path, folder: str, file_seconds_max: float) -> None:
        """Run the tests once without a mutant. Tests that fail then are left out, and named.

        Raises:
            RuntimeError: the tests cannot be collected, or too many of them fail.

        """
        self._root, self._log = root, root.parent / "log"
        self._failed = root.parent / "failed"
        self._failed.write_text("", "utf-8")
        self._arguments = [
            "-q", "--tb=no", "-W", "ignore::pytest.PytestAssertRewriteWarning",
            "-p", "tests.progress", "--no-vllm", "--file-seconds-max", str(file_seconds_max),
            *TESTS[folder],
        ]  # fmt: skip
        began_s = time.monotonic()
        status = self._fork("", [], 20 * LIMIT_S)
        self._limit_s = LIMIT_S + 3 * (time.monotonic() - began_s)
        failed = sorted(set(self._failed.read_text("utf-8").splitlines()))
        if status not in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED} or len(failed) > FAILED_MAX:
            raise RuntimeError(f"tests end with {status} without a mutant: {failed}\n{self._log.read_text('utf-8')}")
        for one in failed:
            _say(f"left out, fails without a mutant: {one}")
        self._arguments += [part for one in failed for part in ("--deselect", one)]
        _say(f"{folder}: the tests take {time.monotonic() - began_s:.0f} s without a mutant")

    def judge(self, one: Proposal, changed: str) -> Judged:
        """Put the proposal in, run the tests until one fails, and take it out again."""
        file = self._root / one.file
        source = file.read_text("utf-8")
        file.write_text(changed, "utf-8")
        try:
            status = self._fork(one.file, ["-x"], self._limit_s)
        finally:
            file.write_text(source, "utf-8")
        outcome = {None: "timed out", 0: "survived"}.get(status, "killed")
        lines = difflib.unified_diff(source.splitlines(), changed.splitlines(), one.file, one.file, "", "", 0, "")
        return Judged(one, outcome, "\n".join(lines))

    def _fork(self, module: str, more: Sequence[str], limit_s: float) -> int | None:
        """Run pytest in a fork and in a session of its own. Returns its exit status; None when time is over."""
        child = os.fork()
        if not child:
            self._in_the_child(module, more)
        watched = os.pidfd_open(child)
        try:
            ended = select.select([watched], [], [], limit_s)[0]
        finally:  # also when this process is interrupted: what the tests started and left behind ends, too
            os.close(watched)
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status) if ended else None

    def _in_the_child(self, module: str, more: Sequence[str]) -> None:
        status = int(pytest.ExitCode.INTERNAL_ERROR)
        try:
            os.setsid()
            os.chdir(self._root)
            log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(log, stream)
            sys.path[:] = [str(self._root), *(one for one in sys.path[1:] if one != str(ROOT))]
            os.environ["PYTHONPATH"] = str(self._root)
            status = int(pytest.main([*self._arguments, *more], plugins=[_Related(module, self._failed)]))
        except BaseException:  # noqa: BLE001  (a fork must not go on as its parent)
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


def row(judged: Sequence[Judged]) -> dict[str, Any]:
    """Return the counts of a folder's mutants and the survivors."""
    outcomes = [one.outcome for one in judged]
    lived = [one for one in judged if one.outcome == "survived"]
    return {
        "mutants": len(judged),
        "killed": outcomes.count("killed"),
        "timed_out": outcomes.count("timed out"),
        "survived": len(lived),
        "survivors": [{"at": f"{one.proposal.file}:{one.proposal.line}", "diff": one.diff} for one in lived],
    }


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Try a sample of each folder; print survivors and counts; write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", help=f"one of {', '.join(TESTS)}; default: all")
    parser.add_argument("--sample", type=int, default=60, help="how many mutants of each folder (60)")
    parser.add_argument("--seed", type=int, default=0, help="draws the sample (0)")
    parser.add_argument("--file-seconds-max", type=float, default=3.0, help="leave out slower test files (3)")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the results are kept (%(default)s)")
    asked = parser.parse_args()
    unknown = [one for one in asked.folders if re.sub("/$", "", one) not in TESTS]
    if unknown:
        parser.error(f"folder {unknown[0]!r} is unknown; name one of {', '.join(TESTS)}")
    for name in IMPORTED:
        importlib.import_module(name)
    results = json.loads(asked.json.read_text("utf-8")) if asked.json.exists() else {}
    for folder in [one.rstrip("/") for one in asked.folders] or TESTS:
        with tempfile.TemporaryDirectory(prefix="kvpipe-mutants-") as made:
            root = Path(made) / "copy"
            shutil.copytree(ROOT, root, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
            (root / ".venv").symlink_to((ROOT / ".venv").resolve())
            for part in ("kvpipe", "statemachine", "connectors"):  # by hash: a mutant may be as long and as old
                compileall.compile_dir(root / part, quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
            bench = Bench(root, folder, asked.file_seconds_max)
            judged = []
            for one, changed in proposals(root, folder, asked.sample, asked.seed):
                judged.append(bench.judge(one, changed))
                _say(f"{judged[-1].outcome:9} {one.file}:{one.line} {one.operator}")
                if judged[-1].outcome == "survived":
                    _say(judged[-1].diff)
        results[folder] = {"seed": asked.seed, **row(judged)}
        counts = {name: value for name, value in results[folder].items() if name != "survivors"}
        _say(f"{folder}: {counts}")
        asked.json.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
