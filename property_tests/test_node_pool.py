"""Engines on one node's memory read no half-written chunk and lose no slot, wherever an engine or a holder dies."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from property_tests.profiles import examples
from tests.rigs.node_moves import NAMES, Move, Mover
from tests.rigs.node_world import NodeWorld

NUMBERS = st.integers(0, 99)
MOVES = st.lists(st.tuples(st.sampled_from(NAMES), NUMBERS, NUMBERS), max_size=300)


@examples(60)
@given(moves=MOVES)
def test_engines_and_holders_that_die_tear_and_lose_nothing(moves: list[Move]) -> None:
    """Hypothesis chooses the moves, so that a failure is a short list of moves."""
    Mover(NodeWorld()).play(moves)
