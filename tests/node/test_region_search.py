"""The search for memory in other regions finds the same windows as plain loops over slots and pieces."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvpipe.node.layout import READY
from kvpipe.node.memory import NodeMemory
from kvpipe.node.owners import NOBODY, Owners
from kvpipe.node.segment import Segment
from kvpipe.node.slots import NEVER
from kvpipe.statemachine import node_slot as m
from tests.rigs.node_regions import SIZES, RegionsWorld

if TYPE_CHECKING:
    from kvpipe.node.slots import Ages

ages_of, windows_of = NodeMemory._ages, NodeMemory._windows


def _use(memory: NodeMemory, region: int, slot: int) -> float:
    keeper = memory.regions[region].keeper
    states = {m.FREE: NEVER, m.PUBLISHED: float(keeper.used[slot])}
    return states.get(keeper._slots[slot].state.name, math.inf)


def _age(memory: NodeMemory, piece: int, but: int) -> float:
    owner = memory._owners[piece]
    if owner in {but, NOBODY}:
        return math.nan if owner == but else NEVER
    slots = memory._owners.slots(memory.regions[owner].segment.layout, range(piece, piece + 1))
    return max((_use(memory, owner, slot) for slot in slots), default=NEVER)


def _searched(memory: NodeMemory, segment: Segment, uses: Ages, count: int, short: float, most: int) -> list[range]:
    """Return the windows that `NodeMemory._windows` should find."""
    found, layout, owners = [], segment.layout, memory._owners
    for first in range(0, segment.words[READY] - count + 1, max(count, owners.piece_bytes // layout.slot_bytes)):
        pieces = owners.pieces(layout, first, first + count)
        foreign = [age for age in uses[pieces.start : pieces.stop].tolist() if not math.isnan(age)]
        if foreign and (mean := sum(foreign) / len(foreign)) < short:
            found.append((mean, first))
    return [range(first, first + count) for _, first in sorted(found)[:most]]


@pytest.mark.parametrize("pieces", [5, 128, 1000])
def test_search_finds_the_windows_that_plain_loops_find(monkeypatch: pytest.MonkeyPatch, pieces: int) -> None:
    """Engines of several sizes save and pin.

    Some slots are larger and some smaller than a piece, and some pieces are unowned.
    """
    found = list[int]()

    def ages(memory: NodeMemory, but: int) -> Ages:
        made = ages_of(memory, but)
        assert np.array_equal(made, [_age(memory, piece, but) for piece in range(len(made))], equal_nan=True)
        return made

    def windows(memory: NodeMemory, segment: Segment, ages: Ages, count: int, short: float, most: int) -> list[range]:
        made = windows_of(memory, segment, ages, count, short, most)
        assert made == _searched(memory, segment, ages, count, short, most)
        found.append(len(made))
        return made

    monkeypatch.setattr("kvpipe.node.owners.PIECES", pieces)
    monkeypatch.setattr("kvpipe.node.memory.REGIONS_MAX", 2)
    monkeypatch.setattr(NodeMemory, "_ages", ages)
    monkeypatch.setattr(NodeMemory, "_windows", windows)
    chance, world = random.Random(pieces), RegionsWorld()
    engines = [world.start(size) for size in SIZES[:2]]
    for turn in range(12):
        engine = chance.choice(engines)
        world.saves(engine, range(100 * turn, 100 * turn + chance.randrange(40)))
        for key in sorted(engine.index())[:3]:
            engine.pin(key)
        if turn % 4 == 2:
            world.take_over()
        if turn == 8:
            world.end(engines.pop())
            engines.append(world.start(SIZES[2]))  # this region replaces the region before it
        engine.unpin()
    world.close()
    assert max(found) > 1
    assert 0 in found


@given(
    st.lists(st.integers(-2, 9), max_size=9), st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=9)
)
@example([3, 1], [(0, 2), (1, 2), (2, 5), (0, 1)])
def test_reduced_ranges_are_those_of_slices(values: list[int], bounds: list[tuple[int, int]]) -> None:
    """Ranges may overlap, be empty, or end behind the last value."""
    pairs = np.array(bounds, np.int64).reshape(-1, 2)
    for by, plain in ((np.maximum, max), (np.add, sum)):
        made = Owners.reduced(by, np.array(values, float), pairs[:, 0], pairs[:, 1], empty=7)
        assert made.tolist() == [plain(values[first:stop]) if values[first:stop] else 7 for first, stop in bounds]
