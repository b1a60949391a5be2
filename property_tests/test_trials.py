"""Trials of vLLM's real scheduler with kvpipe on both sides: after any moves, every invariant holds in every step."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import event, note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvpipe.cache import catalog
from kvpipe.connectors.vllm.trial import reach
from kvpipe.connectors.vllm.trial.invariants import Watched
from kvpipe.connectors.vllm.trial.moves import ARGUMENTS, trial_moves
from kvpipe.connectors.vllm.trial.nightly import SEEDS, run_moves
from kvpipe.connectors.vllm.trial.shapes import CONSUMER, PRODUCER, SHAPES, Shape
from kvpipe.connectors.vllm.trial.trial import MOVES, Move, Trial
from kvpipe.connectors.vllm.trial.worlds import WORLDS, default_worlds, name_of, pairs, possible, shape_named, shape_of
from property_tests.profiles import examples
from property_tests.runs import FIRST_SEEDS, REGRESSIONS, Runs

STEPS_BEFORE_SHUTDOWN = 25
SMALL_POOL_SLOTS = 6
"""The largest pool, in slots, that a few sequences certainly fill."""


class Trials(RuleBasedStateMachine):
    """Runs one trial per example. The code below the class adds one rule per move."""

    trial: Trial
    watched: Watched

    @initialize(name=st.sampled_from(sorted(SHAPES)), seed=st.integers(0, 7))
    def start(self, name: str, seed: int) -> None:
        """Build an engine."""
        self.name, self.seed = name, seed
        self.moves: list[Move] = []
        self.trial = Trial(SHAPES[name], seed)
        self.watched = Watched(self.trial)

    def make(self, move: Move) -> None:
        """Make one move. Every invariant is checked after each step of the move."""
        self.moves.append(move)
        self.trial.do(move)
        if self.watched.broken:
            note(json.dumps({"shape": self.name, "seed": self.seed, "moves": self.moves}))
        assert not self.watched.broken

    @precondition(lambda self: self.trial.steps > STEPS_BEFORE_SHUTDOWN)
    @rule(place=st.sampled_from(*ARGUMENTS["shutdown"]))
    def shutdown(self, place: int) -> None:
        """Shut down while work is in flight."""
        self.make(("shutdown", place))

    def teardown(self) -> None:
        """End everything, and report the cells that this example has reached."""
        if not hasattr(self, "trial"):
            return
        if not self.trial.is_down and not self.watched.broken:
            self.make(("probe",))
        self.trial.close()
        for cell in reach.counts(self.trial):
            event(str(cell))


def _rule_for(name: str) -> Any:
    def make(self: Trials, arguments: tuple[Any, ...]) -> None:
        self.make((name, *arguments))

    make.__name__ = make.__qualname__ = name
    make.__doc__ = MOVES[name]
    return rule(arguments=st.tuples(*map(st.sampled_from, ARGUMENTS[name])))(make)


for _name in set(MOVES) - {"probe", "shutdown"}:
    setattr(Trials, _name, _rule_for(_name))

TestTrials = Trials.TestCase
TestTrials.settings = examples(100, 60)


@pytest.mark.parametrize("at", range(WORLDS))
def test_every_invariant_holds_in_a_world(at: int) -> None:
    """A world has one value of every axis of a configuration, also combinations that no shape has."""
    world = default_worlds()[at]
    ran = run_moves(shape_of(world), at)
    assert ran.broken == [], f"{name_of(world)} {at}: {json.dumps(ran.made)}"


def test_worlds_have_every_pair_of_settings() -> None:
    """Each value of an axis is tried with each value of each other axis, except for conflicting values."""
    reached = {pair for world in default_worlds() for pair in pairs(world)}
    assert reached == possible()


def test_a_world_is_built_from_its_name() -> None:
    """The name is enough to build the world, so a kept sequence stores only the name."""
    for world in default_worlds():
        assert shape_named(name_of(world)) == shape_of(world)


def never_reached(shape: Shape, counters: Counter[str]) -> list[str]:
    """Return what trials of `shape` should do at least once and have not done, by their `counters`."""
    wanted = ["preempted"]
    wanted += ["lookup_hit", "tokens_loaded"] if shape.role != PRODUCER else []
    wanted += ["pieces_published"] if shape.role != CONSUMER else ["chunks_fetched"]
    wanted += ["evicted"] if shape.pool_slots <= SMALL_POOL_SLOTS else []
    return [what for what in wanted if not counters[what]]


@pytest.mark.parametrize("shape", SHAPES)
def test_invariants_hold_under_random_moves(shape: str, runs: Runs) -> None:
    """Under weighted random moves every invariant holds, and the moves cause what `never_reached` lists.

    If the first seeds do not cause all of this, more seeds follow.
    """
    counters: Counter[str] = Counter()
    for seed in SEEDS:
        if seed not in FIRST_SEEDS and not never_reached(SHAPES[shape], counters):
            break
        ran = runs.of_seed(shape, seed)
        assert ran.broken == [], f"{shape} {seed}: {json.dumps(ran.made)}"
        counters += ran.counters
    assert never_reached(SHAPES[shape], counters) == []
    role = SHAPES[shape].role
    refused = ("lookup_hit", "tokens_loaded") if role == PRODUCER else ("pieces_published",) if role == CONSUMER else ()
    assert not any(counters[what] for what in refused)


@pytest.mark.parametrize("path", REGRESSIONS, ids=lambda path: path.stem)
def test_invariants_hold_in_a_kept_sequence(path: Path, runs: Runs) -> None:
    """A sequence that once broke an invariant, or that reaches a rare cell, breaks no invariant."""
    kept = json.loads(path.read_text(encoding="utf-8"))
    ran = runs.of_sequence(path)
    assert ran.broken == [], kept["sentence"]
    assert set(kept.get("cells", ())) <= set(map(str, ran.cells))


@pytest.mark.parametrize("shape", ["async-load", "two-tiers", "states", "hints", "operators", "quotas"])
def test_chunks_from_before_a_reset_are_never_found(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reset drops all chunks at once, and the chunks' entries are removed one by one much later.

    Before all entries are removed, every invariant holds too.
    """
    monkeypatch.setattr(catalog, "SWEEP_SLOTS", 1)
    for seed in SEEDS[:3]:
        ran = run_moves(SHAPES[shape]._replace(events=False), seed)
        assert ran.broken == [], f"{shape} {seed}: {json.dumps(ran.made)}"


def test_hints_arrive_with_requests_of_the_shape_with_hints_only(runs: Runs) -> None:
    """Good and bad hints come with requests of the shape with hints, and of no other shape."""
    hinted, plain = (
        sum((runs.of_seed(shape, seed).counters for seed in FIRST_SEEDS), Counter[str]())
        for shape in ("hints", "async-load")
    )
    for what in ("ignored", "applied.retain", "applied.demote", "applied.resume"):
        assert hinted[f"hints_{what}"], f"never reached: {what}"
    assert not [name for name in plain if name.startswith("hints_")]


def test_a_sequence_has_one_outcome() -> None:
    """The outcome does not depend on when threads are scheduled, so a finding can be reproduced."""

    def outcome(shape: str, moves: list[Move]) -> list[tuple[object, ...]]:
        steps: list[tuple[object, ...]] = []
        trial = Trial(SHAPES[shape], 0)
        trial.on_schedule = lambda out: steps.append((
            dict(out.num_scheduled_tokens),
            [new.block_ids for new in out.scheduled_new_reqs],
            out.scheduled_cached_reqs.new_block_ids,
        ))  # fmt: skip
        for move in moves:
            trial.do(move)
        trial.close()
        return steps

    for shape in ("async-load", "hybrid", "hints"):
        moves = list(trial_moves(SHAPES[shape], 0))
        once = outcome(shape, moves)
        assert all(outcome(shape, moves) == once for _ in range(2))
