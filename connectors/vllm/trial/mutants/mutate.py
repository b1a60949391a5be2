"""Puts bugs back into the code, one at a time, to check that the test suite finds each bug: `make mutants`.

A mutant replaces text in the source of a few methods and compiles these methods again, in the running process. A
missing text is an error. Each mutant gets the default profile of the property tests, case by case, in forked children,
until an invariant is broken. A mutant that names a test gets only that test.
"""

from __future__ import annotations
import __future__

import argparse
import atexit
import contextlib
import functools
import gc
import importlib
import inspect
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import CodeType, FunctionType, MappingProxyType
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from kvpipe.connectors.vllm.trial.children import LOG_MAX, TEXT_MAX, Case, CaseLimits, CaseRunner
from kvpipe.connectors.vllm.trial.mutants import MUTANTS, Mutant, Patch
from kvpipe.connectors.vllm.trial.nightly import SEEDS, TrialSeed, make_pool, sequences
from kvpipe.connectors.vllm.trial.shapes import KVPIPE, SHAPES
from kvpipe.connectors.vllm.trial.trial import Move
from kvpipe.connectors.vllm.trial.worlds import default_worlds, name_of
from kvpipe.testing import waiting

LIMITS = CaseLimits(stuck_seconds=20.0)
SHRINK_SECONDS = 10.0
_PYTEST = ("-q", "-x", "--tb=short", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
"""The warning is ignored because mutated modules were imported before pytest."""
TEST_SECONDS_MAX = 600.0
"""The limit for a mutant's own test, in seconds. A test that hangs has no verdict."""


@contextmanager
def mutated(mutant: Mutant) -> Iterator[None]:
    """Put `mutant` into this process, and remove `mutant` at the end.

    A mutated function also changes in the modules that have imported the function.

    Raises:
        LookupError: the text that the mutant replaces does not exist, or exists more than once.
    """
    sources: dict[FunctionType, str] = {}
    codes: dict[FunctionType, CodeType] = {}
    try:
        for where, method, old, new in mutant.patches:
            module, _, name = where.partition(":")
            owner: Any = importlib.import_module(module)
            functions = dict(_functions(getattr(owner, name) if name else owner, method))
            changed = 0
            for key, function in functions.items():
                source = sources.get(function) or textwrap.dedent(inspect.getsource(function))
                if method == "*" and old not in source:
                    continue
                if old not in source or (method != "*" and source.count(old) != 1):
                    raise LookupError(f"{where}.{key} has {old!r} {source.count(old)} times; mend the mutant")
                codes.setdefault(function, function.__code__)
                sources[function] = source.replace(old, new)
                function.__code__ = _compiled(function, sources[function])
                changed += 1
            if not changed:
                raise LookupError(f"{where}.{method} has no {old!r}; mend the mutant")
        yield
    finally:
        for function, code in codes.items():
            function.__code__ = code


def _functions(owner: Any, method: str) -> Iterator[tuple[str, FunctionType]]:  # noqa: ANN401  (a class or a module)
    for key, found in vars(owner).items():
        function = _plain(found)
        if method in {"*", key} and isinstance(function, FunctionType):
            yield key, function


def _compiled(function: FunctionType, source: str) -> CodeType:
    """Return the code of `source`, a `def`, with the free variables of `function`."""
    free = function.__code__.co_freevars
    whole = f"def _({', '.join(free)}):\n{textwrap.indent(source, '    ')}\n    return {function.__name__}\n"
    made: dict[str, Any] = {}
    name = f"<mutated {function.__qualname__}>"
    exec(compile(whole, name, "exec", __future__.annotations.compiler_flag), function.__globals__, made)  # noqa: S102
    code: CodeType = _plain(made["_"](*free)).__code__
    return code


def _plain(found: Any) -> Any:  # noqa: ANN401
    """Return the function inside a static or class method, a property or a wrapper. Return anything else unchanged."""
    if isinstance(found, functools.cached_property):
        return found.func
    plain = getattr(found, "__func__", None) or getattr(found, "fget", None) or found
    return inspect.unwrap(plain) if callable(plain) else plain


# ---- trying to kill them --------------------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """The result of a mutant.

    `by` is the invariant that found the mutant, or empty. `moves` is a short sequence that finds the mutant.
    """

    name: str
    by: str
    said: str
    shape: str
    seed: int
    trials: int
    steps: int
    seconds: float
    moves: tuple[Move, ...] = ()


def killers(file: Path) -> dict[str, TrialSeed]:
    """Return, by mutant, the sequence that is known to find the mutant. `keep_killers` has written `file`."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {one["name"]: TrialSeed(one["shape"], one["seed"], _moves(one["moves"])) for one in map(json.loads, lines)}


def _moves(made: list[list[Any]]) -> tuple[Move, ...]:
    return tuple(tuple(move) for move in made)


def profile(mutant: Mutant, kept: list[TrialSeed], killer: TrialSeed | None = None) -> Iterator[Case]:
    """Yield `killer`, then the default profile: kept sequences, each shape with each seed, and worlds.

    The cases of the mutant's own shape come first.
    """
    drawn = (TrialSeed(name_of(world), seed) for seed, world in enumerate(default_worlds()))
    works = [*kept, *(TrialSeed(name, seed) for seed in SEEDS for name in SHAPES), *drawn]
    works.sort(key=lambda work: work.shape != mutant.shape)
    for work in works if killer is None else [killer, *works]:
        yield Case(KVPIPE, work.shape, work.seed, work.all_moves(), invariant=mutant.by)


def judge(
    name: str,
    kept: list[TrialSeed],
    known: Mapping[str, TrialSeed] = MappingProxyType({}),
    bench: CaseRunner | None = None,
    *,
    shrink_seconds: float = 0.0,
) -> Verdict:
    """Try the sequence that is `known` to find a mutant, and then cases of the default profile, until a case finds it.

    `bench` is an entered runner for all cases that a process judges. If `bench` is None, a new runner is made. At last,
    a shorter sequence that finds the mutant is sought, for at most `shrink_seconds`.
    """
    began, trials, steps = time.monotonic(), 0, 0
    mutant = MUTANTS[name]
    if mutant.test:
        by, message = _tested(mutant)
        return Verdict(name, by, message, "", -1, 1, 0, time.monotonic() - began)
    with ExitStack() as stack:
        bench = bench or stack.enter_context(CaseRunner(LIMITS))
        stack.enter_context(mutated(mutant))
        for case in profile(mutant, kept, known.get(name)):
            found = bench.run(case)
            trials, steps, seconds = trials + 1, steps + found.steps, time.monotonic() - began
            by = {"broken": found.name, "raised": "nothing_raises", "hung": "no_hang"}.get(found.kind, found.kind)
            if by and mutant.by in {"", by}:
                short = bench.shrink(case, found, shrink_seconds)[0] if shrink_seconds else case
                return Verdict(name, by, found.message, case.shape, case.seed, trials, steps, seconds, short.moves)
    return Verdict(name, "", "", "", -1, trials, steps, time.monotonic() - began)


def _tested(mutant: Mutant) -> tuple[str, str]:
    """Run the mutant's own test in a process of its own. Return (the name of the test if it failed, the test's output).

    Raises:
        LookupError: the mutant's text or the test does not exist.

    """
    with tempfile.NamedTemporaryFile() as log:
        status = _parent(os.getpid()).ask(log.name, mutant)
        message = log.read()[-LOG_MAX:].decode(errors="replace")
    if status not in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED}:
        raise LookupError(f"{mutant.test} ended with {status}: {message}")
    return (mutant.test.rpartition("::")[2] if status else "", message)


class _Parent:
    """A process that has imported the modules that most tests need.

    The process itself runs no test. Each test runs in a fork of the process.
    """

    def __init__(self) -> None:
        command = [sys.executable, "-m", "kvpipe.connectors.vllm.trial.mutants.mutate", "--forks"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603  (ours)

    def ask(self, log: str, mutant: Mutant) -> int:
        """Run the test of `mutant` with the mutant in place, and return pytest's exit status. `log` gets the output."""
        process = self._process
        assert process.stdin is not None  # noqa: S101  (for mypy)
        assert process.stdout is not None  # noqa: S101  (for mypy)
        print(json.dumps([log, mutant]), file=process.stdin, flush=True)
        return int(process.stdout.readline())


@functools.cache
def _parent(_process: int) -> _Parent:
    """Return the process that forks the tests of this process."""
    return _Parent()


def _serve_forks() -> int:
    """Fork for each line of standard input, which names a log and a mutant. Print the child's exit status."""
    gc.disable()  # until all imports are done: modules are no garbage, but each collection would search them
    import hypothesis  # noqa: F401  (imported once, for all)

    import kvpipe.connectors.vllm.tiny.engine  # noqa: F401  (sets the environment, before vllm is imported)
    from kvpipe.connectors.vllm import connector  # noqa: F401  (imported once, for all)

    with contextlib.redirect_stdout(sys.stderr):  # imports pytest's plugins once, for all
        pytest.main(["--collect-only", "-qq", "tests/statemachine/test_flags.py", *_PYTEST])
    gc.freeze()
    gc.enable()
    for line in sys.stdin:
        log, mutant = json.loads(line)
        if not (child := os.fork()):
            with Path(log).open("ab") as file, Path(os.devnull).open("rb") as nothing:
                for standard, other in enumerate((nothing, file, file)):
                    os.dup2(other.fileno(), standard)
            status = int(pytest.ExitCode.INTERNAL_ERROR)  # only pytest's own status is a failure of the test
            try:
                status = _run_test(mutant)
            except BaseException:  # noqa: BLE001  (whatever a mutant brings about)
                traceback.print_exc()
            atexit._run_exitfuncs()  # noqa: SLF001  (a fork ends without them)
            sys.stdout.flush()
            os._exit(status)
        sys.stdout.write(f"{_ended(child)}\n")
        sys.stdout.flush()
    gc.unfreeze()
    return 0


def _ended(child: int) -> int:
    """Wait at most `TEST_SECONDS_MAX` for a child. Return its exit status, or -9 if the child had to be killed."""
    handle = os.pidfd_open(child)
    try:
        if not select.select([handle], [], [], TEST_SECONDS_MAX)[0]:
            os.kill(child, signal.SIGKILL)
    finally:
        os.close(handle)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _run_test(made: list[Any]) -> int:
    """Run the test of a mutant with the mutant in place. Returns pytest's exit status.

    `made` is the mutant as a list, because it was sent as JSON.
    """
    does, patches, *rest = made
    mutant = Mutant(does, tuple(Patch(*patch) for patch in patches), *rest)
    try:
        with mutated(mutant), patch.object(waiting, "EVENTUALLY_S", LIMITS.stuck_seconds):
            return int(pytest.main([mutant.test, *_PYTEST]))
    except LookupError:
        traceback.print_exc()
        return int(pytest.ExitCode.USAGE_ERROR)


def main(arguments: list[str] | None = None) -> int:
    """Judge all mutants. Return 1 if a mutant was not found, otherwise 0."""
    parser = argparse.ArgumentParser(prog="python -m kvpipe.connectors.vllm.trial.mutants.mutate", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="MUTANT", help="only these")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--sequences", type=Path, help="folder with kept sequences, which are part of the profile")
    parser.add_argument("--json", type=Path, help="file for the verdicts")
    parser.add_argument("--killers", type=Path, help="file for a short sequence that finds each")
    parser.add_argument("--forks", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.forks:
        return _serve_forks()
    if unknown := set(options.names) - set(MUTANTS):
        parser.error(f"no mutant {', '.join(sorted(unknown))}; choose from {', '.join(MUTANTS)}")
    kept = sequences(options.sequences) if options.sequences is not None else []
    verdicts = []
    seconds = SHRINK_SECONDS if options.killers is not None else 0.0
    with make_pool(options.jobs) as pool:
        judged = functools.partial(judge, kept=kept, shrink_seconds=seconds)
        for verdict in pool.imap_unordered(judged, options.names or list(MUTANTS)):
            verdicts.append(verdict)
            how = f"killed by {verdict.by}" if verdict.by else "LIVES"
            sys.stdout.write(
                f"{verdict.name:40} {how:50} {verdict.trials:3} trials "
                f"{verdict.steps:6} steps {verdict.seconds:6.1f} s\n"
            )
            sys.stdout.flush()
    alive = [verdict.name for verdict in verdicts if not verdict.by]
    if options.json is not None:
        keep(options.json, verdicts)
    if options.killers is not None:
        keep_killers(options.killers, verdicts)
    sys.stdout.write(f"{len(verdicts) - len(alive)} of {len(verdicts)} mutants killed\n")
    return 1 if alive else 0


def keep(file: Path, verdicts: list[Verdict]) -> None:
    """Write `verdicts` into `file`.

    Older verdicts on the same mutants are replaced. Verdicts on mutants that do not exist any more are dropped.
    """
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    every = {one["name"]: one for one in known} | {
        one.name: one._replace(said=one.said[:TEXT_MAX])._asdict() for one in verdicts
    }
    for one in every.values():
        one.pop("moves", None)
    text = json.dumps([every[name] for name in MUTANTS if name in every], indent=1)
    file.write_text(text + "\n", encoding="utf-8")


def keep_killers(file: Path, verdicts: list[Verdict]) -> None:
    """Write the moves that find the mutants of `verdicts` into `file`, one mutant per line.

    Older moves are replaced.
    """
    every = {name: work for name, work in killers(file).items() if name in MUTANTS and not MUTANTS[name].test}
    every |= {one.name: TrialSeed(one.shape, one.seed, one.moves) for one in verdicts if one.moves}
    lines = [json.dumps({"name": name, **every[name]._asdict()}) for name in sorted(every)]
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
