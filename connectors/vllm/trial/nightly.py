"""Runs trials by seed for a given time: `make fuzz SECONDS_MAX=3600`.

With a state file, a run continues where the last run ended. A sequence that breaks an invariant is shrunk and written
in the format of `property_tests/regressions/`, and the exit status is 1. With `--reach`, the exit status is also 1 if a
reachable cell was never reached.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from multiprocessing.pool import IMapIterator, Pool
from pathlib import Path
from typing import Any, NamedTuple

from kvpipe.connectors.vllm.trial import reach, worlds
from kvpipe.connectors.vllm.trial.children import Case, CaseRunner, warm_up
from kvpipe.connectors.vllm.trial.invariants import Watched
from kvpipe.connectors.vllm.trial.moves import trial_moves
from kvpipe.connectors.vllm.trial.shapes import KVPIPE, SHAPES, Shape
from kvpipe.connectors.vllm.trial.trial import Move, Trial
from kvpipe.connectors.vllm.trial.worlds import shape_named

REPORT_SECONDS = 15.0
STUCK_SECONDS = 600.0
SHRINK_SECONDS = 120.0
BROKEN_MAX = NEVER_MAX = 20
SEEDS = range(8)
"""The seeds of the default profile, for every shape."""
WORLDS_PER_SEED = 24
"""The number of worlds that are tried for each seed, in addition to all shapes."""


class TrialRun(NamedTuple):
    """The result of one trial. `broken` is empty if every invariant held. `made` are the moves that were made."""

    steps: int
    broken: list[str]
    made: list[Move]
    counters: Counter[str]
    cells: Counter[reach.CellPlace]


def run_moves(shape: Shape, seed: int, moves: Iterable[Move] | None = None) -> TrialRun:
    """Try `shape` with `moves`, or with the moves of `seed`. Stops at the first broken invariant."""
    trial = Trial(shape, seed)
    watched = Watched(trial)
    made: list[Move] = []
    try:
        for move in trial_moves(shape, seed) if moves is None else moves:
            made.append(move)
            trial.do(move)
            if watched.broken:
                break
    except Exception:  # noqa: BLE001  (an exception that leaves vLLM is a finding)
        watched.broken.append(f"nothing_raises: {traceback.format_exc(limit=-8)}")
    finally:
        trial.close()
    counters: Counter[str] = Counter()
    for connector in (trial.kvpipe, *(rank.kvpipe for rank in trial.ranks)):
        counters.update(getattr(connector, "counters", {}))
    return TrialRun(trial.steps, watched.broken, made, counters, reach.counts(trial))


class TrialSeed(NamedTuple):
    """One trial to run: from a seed, or from a kept sequence."""

    shape: str
    seed: int
    moves: tuple[Move, ...] | None = None

    def all_moves(self) -> tuple[Move, ...]:
        """Return the moves of the trial."""
        return self.moves if self.moves is not None else tuple(trial_moves(shape_named(self.shape), self.seed))


class Done(NamedTuple):
    """One finished trial."""

    work: TrialSeed
    ran: TrialRun


def _make(work: TrialSeed) -> Done:
    return Done(work, run_moves(shape_named(work.shape), work.seed, work.moves))


def sequences(folder: Path) -> list[TrialSeed]:
    """Return the sequences that are kept in `folder`."""
    kept = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    return [TrialSeed(one["shape"], one["seed"], tuple(tuple(move) for move in one["moves"])) for one in kept]


class Night:
    """A run over seeds. The run records its progress, and writes the record to a file if a file is given."""

    def __init__(self, state: Path | None, jobs: int = 1) -> None:
        """Continue from the file `state` if it exists. `jobs` is the number of processes."""
        self._state, self._jobs = state, jobs
        self.seed = self.steps = self.trials = 0
        self.seconds = 0.0
        self.cells: Counter[reach.CellPlace] = Counter()
        self.pairs: Counter[worlds.AxisPair] = Counter()
        self.broken: list[dict[str, object]] = []
        if state is not None and state.exists():
            kept = json.loads(state.read_text(encoding="utf-8"))
            self.seed, self.steps, self.trials = kept["seed"], kept["steps"], kept["trials"]
            self.seconds, self.broken = kept["seconds"], kept["broken"]
            self.cells.update({reach.CellPlace(*name.split("/")): times for name, times in kept["cells"].items()})
            told = {tuple(name.split()): times for name, times in kept.get("pairs", {}).items()}
            self.pairs.update({pair: told[pair] for pair in worlds.possible() if pair in told})

    def save(self) -> None:
        """Write the state file."""
        if self._state is not None:
            kept = {
                "seed": self.seed, "steps": self.steps, "trials": self.trials, "seconds": round(self.seconds, 1),
                "broken": self.broken, "cells": {"/".join(cell): n for cell, n in sorted(self.cells.items())},
                "pairs": {" ".join(pair): n for pair, n in sorted(self.pairs.items())},
            }  # fmt: skip
            self._state.parent.mkdir(parents=True, exist_ok=True)
            self._state.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")

    def go(
        self, names: list[str], first: list[TrialSeed], seconds: float, seed_stop: int, steps_stop: int, drawn: int
    ) -> None:
        """Run the trials of `first`. Then, for each seed, try every shape and `drawn` random worlds, until a limit."""
        begin = last = time.monotonic()
        seeds, steps, earlier = self.seed, self.steps, self.seconds
        with make_pool(self._jobs, forks=True) as pool:
            todo = first
            while True:
                for done in _results(pool.imap_unordered(_make, todo), todo):
                    self._account(done)
                now = time.monotonic()
                self.seconds = earlier + now - begin
                if todo is not first:
                    self.seed += 1
                over = self.seed >= seed_stop or self.steps >= steps_stop or now - begin > seconds
                if over or len(self.broken) >= BROKEN_MAX:
                    break
                rng = random.Random(f"worlds {self.seed}")  # noqa: S311
                others = itertools.islice(worlds.covering(rng, self.pairs.keys()), drawn)
                todo = [TrialSeed(name, self.seed) for name in (*names, *map(worlds.name_of, others))]
                if now - last > REPORT_SECONDS:
                    last = now
                    self.save()
                    reached, can, _ = reach.coverage(self.cells)
                    sys.stdout.write(
                        f"seed {self.seed}: {self.steps} steps, {(self.steps - steps) / (now - begin):.0f} steps/s, "
                        f"{(self.seed - seeds) / (now - begin):.2f} seeds/s of {len(names)} trials, "
                        f"{reached} of {can} cells, {len(self.pairs)} of {len(worlds.possible())} pairs, "
                        f"{len(self.broken)} broken\n"
                    )
                    sys.stdout.flush()
        self.save()

    def _account(self, done: Done) -> None:
        work, ran = done
        self.trials += 1
        self.steps += ran.steps
        self.cells += ran.cells
        if work.shape.startswith(worlds.PREFIX):
            self.pairs.update(worlds.pairs(worlds.world_named(work.shape)))
        if ran.broken:
            made = [list(move) for move in ran.made]
            self.broken.append({"shape": work.shape, "seed": work.seed, "broken": ran.broken[:3], "moves": made})
            sys.stdout.write(f"BROKEN {work.shape} seed {work.seed} after {len(made)} moves: {ran.broken[0][:600]}\n")
            sys.stdout.flush()


def _results(results: IMapIterator[Done], todo: list[TrialSeed]) -> Iterator[Done]:
    """Yield results in the order of completion.

    A process that hangs or dies counts as a finding, and ends the run.
    """
    left = list(todo)
    while left:
        try:
            done = results.next(STUCK_SECONDS)
        except multiprocessing.TimeoutError:
            hung = "no_hang: no result in time; `kvpipe fuzz` shows more"
            for work in left:
                yield Done(work, TrialRun(0, [hung], [], Counter(), Counter()))
            return
        left.remove(done.work)
        yield done


def start_process(free: multiprocessing.SimpleQueue[int]) -> None:
    """Bind this process to one of the `free` cores, and filter expected warnings out of the report."""
    import logging

    import torch

    # the threads of a trial alternate; on one core, no other core has to wake up
    if hasattr(os, "sched_setaffinity"):
        core = free.get()
        free.put(core)  # the core goes to the end of the queue, for the successor of a process that dies
        os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)


def make_pool(processes: int, *, forks: bool = False) -> Pool:
    """Return a pool with one process per core, in which a seed always leads to the same trial.

    A trial depends on the order of vLLM's sets of request ids, so its process needs the hash seed 0. If `forks` is true
    and this process has that seed, this process imports vLLM once and forks the pool's processes.
    """
    os.environ["PYTHONHASHSEED"] = "0"
    if forks := forks and not sys.flags.hash_randomization:
        warm_up()
    context = multiprocessing.get_context("fork" if forks else "spawn")
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    free: multiprocessing.SimpleQueue[int] = context.SimpleQueue()
    for i in range(processes):
        free.put(cores[i % len(cores)])
    return context.Pool(processes, start_process, (free,))


def shrink(broken: list[dict[str, object]], folder: Path) -> None:
    """Write the shortest sequence of each finding into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with make_pool(1) as pool:
        for at, one in enumerate(broken):
            kept = pool.apply(_shrink_one, (one,))
            shape = "world" if kept["shape"].startswith(worlds.PREFIX) else kept["shape"]
            path = folder / f"{shape}-{kept['seed']}-{at}.json"
            path.write_text(json.dumps(kept) + "\n", encoding="utf-8")
            sys.stdout.write(f"{len(kept['moves'])} moves in {path}\n")


def _shrink_one(broken: dict[str, Any]) -> dict[str, Any]:
    shape, seed = broken["shape"], broken["seed"]
    with CaseRunner() as bench:
        case = Case(KVPIPE, shape, seed, tuple(tuple(move) for move in broken["moves"]))
        found = bench.run(case)
        if found.kind:
            case, found = bench.shrink(case, found, SHRINK_SECONDS)
    sentence = f"{found.name}: {found.message}" if found.kind else f"it did not happen again: {broken['broken']}"
    return {"sentence": sentence, "shape": shape, "seed": seed, "moves": [list(move) for move in case.moves]}


def main(arguments: list[str] | None = None) -> int:
    """Run the trials, and print what they covered."""
    parser = argparse.ArgumentParser(prog="python -m kvpipe.connectors.vllm.trial.nightly", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long")
    parser.add_argument("--seeds", type=int, default=1 << 60, help="stop before this seed")
    parser.add_argument("--steps", type=int, default=1 << 60, help="stop after so many steps")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--shape", action="append", choices=sorted(SHAPES), help="only this shape; may be repeated")
    parser.add_argument("--sequences", type=Path, help="folder with kept sequences to begin with")
    parser.add_argument("--state", type=Path, help="file from which the run continues, and to which it writes")
    parser.add_argument("--out", type=Path, default=Path(".cache/fuzz"), help="folder for shrunk findings")
    parser.add_argument("--reach", action="store_true", help="fail if a reachable cell was not reached")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args(arguments)
    import vllm

    night = Night(options.state, options.jobs)
    known = len(night.broken)
    first = sequences(options.sequences) if options.sequences is not None else []
    names, drawn = options.shape or list(SHAPES), 0 if options.shape else WORLDS_PER_SEED
    night.go(names, first, options.seconds, options.seeds, options.steps, drawn)
    found = night.broken[known:]
    if found:
        shrink(found, options.out)
    reached, can, missed = reach.coverage(night.cells)
    rate = night.steps / max(night.seconds, 1e-9)
    sys.stdout.write(
        f"vLLM {vllm.__version__}: {night.trials} trials to seed {night.seed}, {night.steps} steps in "
        f"{night.seconds:.0f} s ({rate:.0f}/s), {len(night.broken)} broken\n"
        f"cells reached: {reached} of {can}\n" + "".join(f"  never: {cell}\n" for cell in missed)
    )
    never = sorted(worlds.possible() - night.pairs.keys())
    sys.stdout.write(
        f"pairs of settings reached: {len(night.pairs)} of {len(worlds.possible())}\n"
        + "".join(f"  never: {one} with {other}\n" for one, other in never[:NEVER_MAX])
    )
    if options.reach and missed:
        sys.stdout.write("some reachable cells were not reached: run for a longer time\n")
    if options.json:
        kept = {"version": vllm.__version__, "broken": night.broken, "seed": night.seed, "never": never}
        sys.stdout.write(json.dumps(kept) + "\n")
    return 1 if found or (options.reach and missed) else 0


if __name__ == "__main__":
    sys.exit(main())
