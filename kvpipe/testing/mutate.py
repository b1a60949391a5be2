"""Put bugs back in, one at a time: `python -m kvpipe.testing.mutate`. A suite that lets one live is too weak.

A mutant replaces text in the source of a few methods and compiles them anew, in the running process; where the text
is no longer there it says so. Each is given the default profile of the property tests, case by case, in forked
children, until an invariant is broken.
"""

from __future__ import annotations
import __future__

import argparse
import functools
import importlib
import inspect
import json
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from kvpipe.testing.children import Bench, Case, Limits
from kvpipe.testing.mutants import MUTANTS, Mutant
from kvpipe.testing.nightly import SEEDS, Work, make_pool, sequences
from kvpipe.testing.shapes import KVPIPE, SHAPES

STUCK_SECONDS = 20.0


@contextmanager
def mutated(mutant: Mutant) -> Iterator[None]:
    """Put `mutant` into this process, and take it out again.

    Raises:
        LookupError: the text that it replaces is not there, or not once.

    """
    undo: list[tuple[type, str, Callable[..., Any]]] = []
    try:
        for where, method, old, new in mutant.patches:
            module, _, name = where.partition(":")
            owner = getattr(importlib.import_module(module), name)
            functions = {k: f for k, f in vars(owner).items() if inspect.isfunction(f) and method in {"*", k}}
            changed = 0
            for key, function in functions.items():
                source = _source(function)
                if method == "*" and old not in source:
                    continue
                if old not in source or (method != "*" and source.count(old) != 1):
                    raise LookupError(f"{where}.{key} has {old!r} {source.count(old)} times; mend the mutant")
                undo.append((owner, key, function))
                setattr(owner, key, _compiled(function, source.replace(old, new)))
                changed += 1
            if not changed:
                raise LookupError(f"{where}.{method} has no {old!r}; mend the mutant")
        yield
    finally:
        for owner, key, function in reversed(undo):
            setattr(owner, key, function)


def _source(function: Callable[..., Any]) -> str:
    made: str | None = getattr(function, "mutated_source", None)
    return made if made is not None else textwrap.dedent(inspect.getsource(function))


def _compiled(function: Callable[..., Any], source: str) -> Callable[..., Any]:
    made: dict[str, Any] = {}
    code = compile(source, f"<mutated {function.__qualname__}>", "exec", __future__.annotations.compiler_flag)
    exec(code, inspect.unwrap(function).__globals__, made)  # noqa: S102  (our own text)
    (mutant,) = made.values()
    mutant.mutated_source = source
    return mutant  # type: ignore[no-any-return]


# ---- trying to kill them --------------------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """How a mutant fared: `by` is the invariant that killed it, or empty."""

    name: str
    by: str
    said: str
    shape: str
    seed: int
    trials: int
    steps: int
    seconds: float


def profile(mutant: Mutant, kept: list[Work]) -> Iterator[Case]:
    """Yield what is kept and each shape by each seed, as in the default profile; the mutant's own shape comes first."""
    works = [*kept, *(Work(name, seed) for seed in SEEDS for name in SHAPES)]
    for work in sorted(works, key=lambda work: work.shape != mutant.shape):
        yield Case(KVPIPE, work.shape, work.seed, work.all_moves(), invariant=mutant.by)


def judge(name: str, kept: list[Work]) -> Verdict:
    """Give a mutant the cases of the default profile until one finds it."""
    began, trials, steps = time.monotonic(), 0, 0
    mutant = MUTANTS[name]
    with Bench(Limits(STUCK_SECONDS)) as bench, mutated(mutant):
        for case in profile(mutant, kept):
            found = bench.run(case)
            trials, steps = trials + 1, steps + found.steps
            by = {"broken": found.name, "raised": "nothing_raises", "hung": "no_hang"}.get(found.kind, found.kind)
            if by and mutant.by in {"", by}:
                return Verdict(name, by, found.said, case.shape, case.seed, trials, steps, time.monotonic() - began)
    return Verdict(name, "", "", "", -1, trials, steps, time.monotonic() - began)


def main(arguments: list[str] | None = None) -> int:
    """Judge all mutants; return 1 when one lives."""
    parser = argparse.ArgumentParser(prog="python -m kvpipe.testing.mutate", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="MUTANT", help="only these")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--sequences", type=Path, help="folder with kept sequences, which are part of the profile")
    parser.add_argument("--json", type=Path, help="file for the verdicts")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(MUTANTS):
        parser.error(f"no mutant {', '.join(sorted(unknown))}; choose from {', '.join(MUTANTS)}")
    kept = sequences(options.sequences) if options.sequences is not None else []
    verdicts = []
    with make_pool(options.jobs) as pool:
        for verdict in pool.imap_unordered(functools.partial(judge, kept=kept), options.names or list(MUTANTS)):
            verdicts.append(verdict)
            how = f"killed by {verdict.by}" if verdict.by else "LIVES"
            sys.stdout.write(
                f"{verdict.name:40} {how:50} {verdict.trials:3} trials "
                f"{verdict.steps:6} steps {verdict.seconds:6.1f} s\n"
            )
            sys.stdout.flush()
    verdicts.sort(key=lambda verdict: list(MUTANTS).index(verdict.name))
    alive = [verdict.name for verdict in verdicts if not verdict.by]
    if options.json is not None:
        text = json.dumps([verdict._asdict() for verdict in verdicts], indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")
    sys.stdout.write(f"{len(verdicts) - len(alive)} of {len(verdicts)} mutants killed\n")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
