"""A region takes the least recently used memory of other regions, and regions do not take memory back and forth."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvpipe.node.layout import READY, VERSION
from kvpipe.node.messages import Hello
from kvpipe.testing.node_integrity import check_regions
from tests.rigs.node_regions import SIZES, SLOTS, RegionsWorld, SizedEngine


def _busy(world: RegionsWorld) -> tuple[SizedEngine, SizedEngine]:
    """Return engines of two sizes, whose chunks use most of the memory."""
    first, second = world.start(SIZES[0]), world.start(SIZES[1])
    world.saves(first, range(100))
    world.saves(second, range(20))
    return first, second


def _grown(world: RegionsWorld) -> list[int]:
    """Return how often each region has taken memory from the other region."""
    return [keeper.counts["grown"] for _, keeper in world.memory.regions.values()]


def test_one_call_does_not_return_memory_to_its_old_region(world: RegionsWorld) -> None:
    """The slots that a region has just got are free. Another busy region must not take these slots as unused."""
    _busy(world)
    for _, keeper in world.memory.regions.values():
        keeper.short = math.inf
    before = sum(_grown(world))
    assert world.memory.share()
    assert sum(_grown(world)) == before + 1


def test_region_with_the_more_recent_victims_gets_memory_first(world: RegionsWorld) -> None:
    """The order of the regions' numbers does not matter."""
    _busy(world)
    for shorts in ((1e6, 2e6), (2e6, 1e6)):
        before = _grown(world)
        for (_, keeper), short in zip(world.memory.regions.values(), shorts, strict=True):
            keeper.short = short
        assert world.memory.share()
        assert [now - then for now, then in zip(_grown(world), before, strict=True)] == [
            int(short == max(shorts)) for short in shorts
        ]


def test_region_gets_no_memory_that_was_used_later(world: RegionsWorld) -> None:
    """If the other region used all its memory later, a region evicts its own chunks instead."""
    _busy(world)
    (_, loser), (_, keeper) = world.memory.regions.values()
    for short, may_grow in ((min(loser.used), False), (max(use for use in loser.used if use < math.inf) + 1, True)):
        before = world.usable
        keeper.short = float(short)
        assert world.memory.share() == may_grow
        assert (world.usable != before) == may_grow


def test_regions_with_equal_need_get_memory_in_turn(world: RegionsWorld) -> None:
    """Without turns, regions that have no chunk to evict would get memory in the order of their numbers."""
    _busy(world)
    before = _grown(world)
    for _ in range(6):
        for _, keeper in world.memory.regions.values():
            keeper.short = math.inf
        assert world.memory.share()
    check_regions(world.memory)
    assert [now - then for now, then in zip(_grown(world), before, strict=True)] == [3, 3]


def test_leases_of_old_chunks_do_not_stop_growth(world: RegionsWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks with leases cannot be evicted, so later searches try other memory."""
    monkeypatch.setattr("kvpipe.node.memory.WINDOWS_MAX", 1)
    first = world.start(SIZES[0])
    world.saves(first, range(SLOTS))
    second = world.start(SIZES[1])
    assert all(first.pin(key) for key in sorted(first.index(), key=int)[:10])
    before = world.memory.regions[1].keeper.counts["grown"]
    world.saves(second, range(60))
    assert world.memory.regions[1].keeper.counts["grown"] > before
    assert {key for _, _, key in first.pinned} <= first.index().keys()


@pytest.mark.parametrize("how", ["takeover", "rank", "refused"])
def test_only_a_new_engine_gets_memory_at_once(world: RegionsWorld, how: str) -> None:
    """Known engines greet again after a takeover. Then the holder evicts no chunk of another size for their stock."""
    first = world.start(SIZES[0])
    others = [world.start(SIZES[1]) for _ in range(4)]
    world.saves(first, range(300))
    before = first.index().keys()
    if how == "takeover":
        world.take_over()
    elif how == "refused":
        world.start(SIZES[1])
        assert world.counts["refused"] == 1
    else:
        hello = Hello(VERSION, "rank", others[0].token, b"n" * 32, SLOTS, SIZES[1])
        world.memory.greet(world.memory.region_for(hello), hello, others[0].process)
    assert first.index().keys() == before
    assert len(world.memory.regions[1].keeper._usable) < SLOTS * SIZES[0] // SIZES[1] // 4


def test_single_region_takes_no_slot_of_a_new_engine(world: RegionsWorld) -> None:
    """A region could evict nothing before its slots had memory.

    When slots of another size are added later, this old need must not count.
    """
    world.start(SIZES[0])
    world.memory.regions[0].keeper.short = math.inf
    world.start(SIZES[1])  # the step of the holder also searches memory for regions that need more
    assert _grown(world)[0] == 0
    assert world.usable[1] >= SLOTS * SIZES[0] // SIZES[1] // 4


def test_search_for_small_slots_looks_at_each_piece_once(world: RegionsWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece may have thousands of small slots.

    A long search would stop the holder's clock, and engines would kill the holder.
    """
    _busy(world)
    segment, _ = world.memory.regions[1]
    monkeypatch.setattr(world.memory._owners, "piece_bytes", 8 * SIZES[1])
    found = world.memory._windows(segment, np.zeros(100), 1, math.inf, 100)
    assert [window.start for window in found] == [*range(0, int(segment.words[READY]), 8)]
