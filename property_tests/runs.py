"""Trials that several tests use. Each trial runs once."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Final, cast

from kvpipe.connectors.vllm.trial.nightly import TrialRun, run_moves
from kvpipe.connectors.vllm.trial.shapes import SHAPES
from kvpipe.connectors.vllm.trial.worlds import shape_named

REGRESSIONS = sorted((Path(__file__).parent / "regressions").glob("*.json"))


FIRST_SEEDS: Final = range(3)
"""The seeds that are tried for every shape. `make fuzz` tries seeds until its time is over, `make mutants` tries 8."""


class Runs:
    """Results of trials, kept in a folder of this test run."""

    def __init__(self, folder: Path) -> None:
        """`folder` is the same in all processes of a test run."""
        self._folder = folder

    def of_seed(self, shape: str, seed: int) -> TrialRun:
        """Return the result of the moves of a seed, with the shape named `shape`."""
        return self._once(f"{shape}-{seed}", lambda: run_moves(SHAPES[shape], seed))

    def of_sequence(self, path: Path) -> TrialRun:
        """Return the result of the kept sequence in the file `path`."""
        kept = json.loads(path.read_text(encoding="utf-8"))
        moves = [tuple(move) for move in kept["moves"]]
        return self._once(path.stem, lambda: run_moves(shape_named(kept["shape"]), kept["seed"], moves))

    def _once(self, name: str, make: Callable[[], TrialRun]) -> TrialRun:
        kept = self._folder / name
        if kept.exists():
            return cast("TrialRun", pickle.loads(kept.read_bytes()))  # noqa: S301  (its own)
        ran = make()
        written = kept.with_suffix(f".{os.getpid()}")
        written.write_bytes(pickle.dumps(ran))
        written.rename(kept)
        return ran
