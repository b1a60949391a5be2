"""vLLM's real scheduler, kvpipe on both sides, any sequence of moves: every invariant holds after every step."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import event, note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvpipe.testing import reach
from kvpipe.testing.invariants import Watched
from kvpipe.testing.moves import ARGUMENTS
from kvpipe.testing.nightly import run
from kvpipe.testing.shapes import SHAPES
from kvpipe.testing.trial import MOVES, Move, Trial
from property_tests.profiles import examples

REGRESSIONS = sorted((Path(__file__).parent / "regressions").glob("*.json"))
SEEDS = range(8)
REACHED_MIN = 0.9
STEPS_BEFORE_SHUTDOWN = 25


class Trials(RuleBasedStateMachine):
    """One trial per example; a rule per move, added below."""

    trial: Trial
    watched: Watched

    @initialize(name=st.sampled_from(sorted(SHAPES)), seed=st.integers(0, 7))
    def start(self, name: str, seed: int) -> None:
        """Build an engine."""
        self.name, self.seed = name, seed
        self.moves: list[Move] = []
        self.cells = reach.counts()
        self.trial = Trial(SHAPES[name], seed, wire=seed % 2 == 0)
        self.watched = Watched(self.trial)

    def make(self, move: Move) -> None:
        """Make one move; every invariant is checked after each step of it."""
        self.moves.append(move)
        self.trial.do(move)
        if move[0] == "drain":
            self.watched.after_drain()
        if self.watched.broken:
            note(json.dumps({"shape": self.name, "seed": self.seed, "moves": self.moves}))
        assert not self.watched.broken

    @precondition(lambda self: self.trial.steps > STEPS_BEFORE_SHUTDOWN)
    @rule()
    def shutdown(self) -> None:
        """Stop in mid-flight."""
        self.make(("shutdown",))

    def teardown(self) -> None:
        """End everything and say which cells this example has reached."""
        if not hasattr(self, "trial"):
            return
        if not self.trial.is_down and not self.watched.broken:
            self.make(("drain",))
        self.trial.close()
        for cell in reach.counts() - self.cells:
            event(str(cell))


def _rule_for(name: str) -> Any:
    def make(self: Trials, arguments: tuple[Any, ...]) -> None:
        self.make((name, *arguments))

    make.__name__ = make.__qualname__ = name
    make.__doc__ = MOVES[name]
    return rule(arguments=st.tuples(*map(st.sampled_from, ARGUMENTS[name])))(make)


for _name in set(MOVES) - {"shutdown"}:
    setattr(Trials, _name, _rule_for(_name))

TestTrials = Trials.TestCase
TestTrials.settings = examples(200, 60)


@pytest.mark.parametrize("shape", SHAPES)
def test_seeds(shape: str) -> None:
    """Under weighted random moves every invariant holds, and the moves do what they are for."""
    counters: Counter[str] = Counter()
    for seed in SEEDS:
        ran = run(SHAPES[shape], seed)
        assert ran.broken == [], f"{shape} {seed}: {json.dumps(ran.made)}"
        counters += ran.counters
    for what in ("lookup_hit", "tokens_loaded", "preempted", "pieces_published", "evicted"):
        assert counters[what], f"never reached: {what}"


@pytest.mark.parametrize("path", REGRESSIONS, ids=lambda path: path.stem)
def test_regression(path: Path) -> None:
    """A sequence that once broke an invariant, or leads to a rare cell, holds them all."""
    kept = json.loads(path.read_text(encoding="utf-8"))
    before = reach.counts()
    ran = run(SHAPES[kept["shape"]], kept["seed"], [tuple(move) for move in kept["moves"]])
    assert ran.broken == [], kept["sentence"]
    taken = {str(cell) for cell in reach.counts() - before}
    assert set(kept.get("cells", ())) <= taken


def test_most_cells_were_reached() -> None:
    """The tests of this module have taken nearly every cell that vLLM's calls can lead to."""
    reached, can, missed = reach.report(reach.counts())
    assert reached >= REACHED_MIN * can, [str(cell) for cell in missed]
