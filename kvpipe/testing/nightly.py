"""Trials by the seed, for as long as one likes: `python -m kvpipe.testing.nightly --seconds 3600 --state FILE`.

With a state file a run goes on where the last one ended. Exits with 1 when an invariant was broken, and with `--reach`
also when a cell that can be reached never was.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from kvpipe.testing import reach
from kvpipe.testing.invariants import Watched
from kvpipe.testing.moves import random_moves
from kvpipe.testing.shapes import SHAPES, Shape
from kvpipe.testing.trial import Move, Trial

MOVES_PER_SEED = 200
REPORT_SECONDS = 15.0
BROKEN_MAX = 20


class Ran(NamedTuple):
    """One trial's end. `broken` is empty when every invariant held; `made` are the moves up to there."""

    steps: int
    broken: list[str]
    made: list[Move]
    counters: Counter[str]


def run(shape: Shape, seed: int, moves: Iterable[Move] | None = None) -> Ran:
    """Try `shape` with the moves of `seed`, or with `moves`; stop at the first broken invariant."""
    trial = Trial(shape, seed, wire=seed % 2 == 0)
    watched = Watched(trial)
    made: list[Move] = []
    try:
        for move in random_moves(seed, MOVES_PER_SEED) if moves is None else moves:
            made.append(move)
            trial.do(move)
            if move[0] == "drain":
                watched.after_drain()
            if watched.broken:
                break
    except Exception:  # noqa: BLE001  (whatever came out of vLLM is the finding)
        watched.broken.append(f"nothing_raises: {traceback.format_exc(limit=-8)}")
    finally:
        trial.close()
    counters: Counter[str] = Counter()
    for connector in (trial.scheduler.connector, *(rank.connector for rank in trial.ranks)):
        counters.update(getattr(connector, "counters", {}))
    return Ran(trial.steps, watched.broken, made, counters)


class Night:
    """A run over seeds: what it has done so far, kept in a file if one is given."""

    def __init__(self, state: Path | None) -> None:
        """Go on where `state` says."""
        self._state = state
        self.seed = self.steps = self.trials = 0
        self.seconds = 0.0
        self.cells: Counter[reach.Cell] = Counter()
        self.broken: list[dict[str, object]] = []
        if state is not None and state.exists():
            kept = json.loads(state.read_text(encoding="utf-8"))
            self.seed, self.steps, self.trials = kept["seed"], kept["steps"], kept["trials"]
            self.seconds, self.broken = kept["seconds"], kept["broken"]
            self.cells.update({reach.Cell(*name.split("/")): times for name, times in kept["cells"].items()})

    def save(self, cells: Counter[reach.Cell]) -> None:
        """Write the state file."""
        if self._state is not None:
            kept = {
                "seed": self.seed, "steps": self.steps, "trials": self.trials, "seconds": round(self.seconds, 1),
                "broken": self.broken, "cells": {"/".join(cell): n for cell, n in sorted(cells.items())},
            }  # fmt: skip
            self._state.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")

    def go(self, names: list[str], seconds: float, seed_stop: int, steps_stop: int) -> Counter[reach.Cell]:
        """Run every shape per seed until one of the limits; return the cells reached."""
        begin = last = time.monotonic()
        before, earlier = self.steps, self.seconds
        while self.seed < seed_stop and self.steps < steps_stop and len(self.broken) < BROKEN_MAX:
            for name in names:
                ran = run(SHAPES[name], self.seed)
                self.steps += ran.steps
                self.trials += 1
                if ran.broken:
                    self.broken.append({"shape": name, "seed": self.seed, "broken": ran.broken[:3]})
                    sys.stdout.write(f"BROKEN {name} seed {self.seed} after {len(ran.made)} moves: {ran.broken[0]}\n")
            self.seed += 1
            now = time.monotonic()
            self.seconds = earlier + now - begin
            if now - last > REPORT_SECONDS:
                last = now
                cells = self.cells + reach.counts()
                self.save(cells)
                reached, can, _ = reach.report(cells)
                rate = (self.steps - before) / (now - begin)
                sys.stdout.write(
                    f"seed {self.seed}: {self.steps} steps, {rate:.0f}/s, {rate / self.steps * self.seed:.1f} seeds/s, "
                    f"{reached} of {can} cells, {len(self.broken)} broken\n"
                )
                sys.stdout.flush()
            if now - begin > seconds:
                break
        cells = self.cells + reach.counts()
        self.save(cells)
        return cells


def main(arguments: list[str] | None = None) -> int:
    """Run, and say what was covered."""
    parser = argparse.ArgumentParser(prog="python -m kvpipe.testing.nightly", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long")
    parser.add_argument("--seeds", type=int, default=1 << 60, help="stop before this seed")
    parser.add_argument("--steps", type=int, default=1 << 60, help="stop after so many steps")
    parser.add_argument("--shape", action="append", choices=sorted(SHAPES), help="only this shape; may be repeated")
    parser.add_argument("--state", type=Path, help="file to go on from, and to write")
    parser.add_argument("--reach", action="store_true", help="fail when a cell that can be reached was not")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args(arguments)
    import vllm

    night = Night(options.state)
    cells = night.go(options.shape or list(SHAPES), options.seconds, options.seeds, options.steps)
    reached, can, missed = reach.report(cells)
    rate = night.steps / max(night.seconds, 1e-9)
    sys.stdout.write(
        f"vLLM {vllm.__version__}: {night.trials} trials to seed {night.seed}, {night.steps} steps in "
        f"{night.seconds:.0f} s ({rate:.0f}/s), {len(night.broken)} broken\n"
        f"cells reached: {reached} of {can}\n" + "".join(f"  never: {cell}\n" for cell in missed)
    )
    if options.json:
        sys.stdout.write(json.dumps({"version": vllm.__version__, "broken": night.broken, "seed": night.seed}) + "\n")
    return 1 if night.broken or (options.reach and missed) else 0


if __name__ == "__main__":
    sys.exit(main())
