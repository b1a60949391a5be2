"""Requests that hold blocks: room for asynchronous loads, and blocks that a failed load has spoiled."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvpipe.connectors.vllm.remedies.admission import STATE_BLOCKS_MAX, LoadAdmission
from kvpipe.connectors.vllm.remedies.invalid_blocks import ScheduledRange, Spoiled
from kvpipe.protocol.engine import LATER, MISS, Hit
from kvpipe.protocol.messages import BROKEN
from kvpipe.scheduler.lookups import LATER_STEPS_MAX
from tests.rigs.scheduler_world import SYNC, UNIT, SchedulerWorld, slots_of


def _one_loads() -> tuple[SchedulerWorld, Any, Any]:
    """Return a world and two requests with equal hits.

    The first request loads four of its six units. The second request has eight units.
    """
    world = SchedulerWorld(load="async")
    world.publish(world.request("old", 4, shared=4))
    first, second = world.request("first", 6, shared=4), world.request("second", 8, shared=4)
    assert world.admit(first) == 4 * UNIT
    del world.tables[0]["first"][4:]  # vLLM allocates only the blocks that the load needs
    world.step()
    return world, first, second


def test_an_async_load_waits_for_room() -> None:
    """Two requests that hold blocks, and need more blocks than are free, would wait for each other for ever."""
    world, first, second = _one_loads()
    # `first` needs two more blocks, and `second` needs eight
    for free, answer in ((9, LATER), (10, Hit(4 * UNIT, waits=True))):
        world.free = free
        assert world.side.lookup(second, 0) == world.side.lookup(second, 0) == answer
    world.free = 9
    for _ in range(LATER_STEPS_MAX - 1):
        assert world.side.lookup(second, 0) is LATER
        world.step()
    assert world.side.lookup(second, 0) == MISS, "it computes at last"
    world.allocate(first)
    world.step(first)
    assert world.side.lookup(second, 0) == (4 * UNIT, True), "nobody holds blocks any more without running"


def test_steps_without_a_lookup_do_not_count_towards_the_limit_of_the_wait() -> None:
    """While the head of the queue waits for blocks, vLLM makes no lookup for later requests.

    Such steps do not count towards the limit of the later requests' wait.
    """
    world, _, second = _one_loads()
    world.free = 9
    assert world.side.lookup(second, 0) is LATER
    for _ in range(2 * LATER_STEPS_MAX):
        world.step()
    for _ in range(LATER_STEPS_MAX - 1):
        assert world.side.lookup(second, 0) is LATER
        assert world.side.lookup(second, 0) is LATER, "twice in one pass counts once"
        world.step()
    assert world.side.counters["lookup_gave_up"] == 0


def test_refused_admission_does_not_restart_the_limit_of_the_wait() -> None:
    """vLLM may refuse an admission although there are enough blocks.

    Such a refusal does not restart the limit of the wait.
    """
    world, _, second = _one_loads()
    for at in range(LATER_STEPS_MAX):
        world.free = 9
        assert world.side.lookup(second, 0) is LATER, at
        world.step()
        world.free = 10
        assert world.side.lookup(second, 0) == (4 * UNIT, True), "there is room, but vLLM does not admit it"
        world.step()
    world.free = 9
    assert world.side.lookup(second, 0) == MISS
    assert world.side.counters["lookup_gave_up"] == 1
    world.side.admitted(second, world.allocate(second), 0)
    assert world.side.requests.tracked["second"].asking.put_off_steps == 0, "from its admission on, anew"


def test_an_async_load_leaves_a_session_its_room() -> None:
    """vLLM does not preempt a session that waits for input, or for its turn after a load. Such a session may grow."""
    world = SchedulerWorld(load="async")
    world.publish(world.request("old", 4, shared=4))
    session, other = world.request("session", 6), world.request("other", 8, shared=4)
    session.resumable = True
    world.admit(session)
    world.step(session)
    # the session may need 58 more blocks, and `other` needs eight
    for free, answer in ((65, MISS), (66, Hit(4 * UNIT, waits=True))):
        world.free = free
        assert world.side.lookup(other, 0) == answer
    world.free = 65
    world.side.finished(session)
    assert world.side.lookup(other, 0) == (4 * UNIT, True)


def test_a_session_leaves_an_async_load_its_room() -> None:
    """The session gets no blocks until there are enough blocks for its longest length and for the loading requests."""
    world = SchedulerWorld(load="async")
    world.publish(world.request("old", 4, shared=4))
    session, other = world.request("session", 6), world.request("other", 8, shared=4)
    session.resumable = True
    world.admit(other)
    del world.tables[0]["other"][4:]  # vLLM allocates only the blocks that the load needs
    world.step()
    world.free = 64 + 4 - 1
    for _ in range(2 * LATER_STEPS_MAX):
        assert world.side.lookup(session, 0) is LATER
        world.step()
    world.free = 64 + 4
    assert world.side.lookup(session, 0) == MISS
    world.free = 0
    world.allocate(other)
    world.step(other)
    assert world.side.lookup(session, 0) == MISS, "nobody loads any more"


def test_blocks_outside_of_a_window_are_not_held() -> None:
    """In a group with a window, a request needs the blocks of the window and of one step, minus its own blocks."""
    world = SchedulerWorld(windows=(None, 2 * UNIT), load="async")
    room = LoadAdmission(world.side.geometry, 3 * UNIT, 64 * UNIT)
    request = world.request("one", 10)
    assert room.needed(request, world.blocks) == 10 + 6
    world.allocate(request, null=4)
    del world.tables[0]["one"][6:], world.tables[1]["one"][6:]
    assert room.needed(request, world.blocks) == 4 + 4


def test_drafts_hold_blocks_behind_the_computed_tokens() -> None:
    """Tokens that are reserved for drafts may begin another block of each group, and every draft has its own state."""
    world = SchedulerWorld(windows=(None, 2 * UNIT, None), states=(2,), load="async")
    geometry, tokens, drafts = world.side.geometry, 64 * UNIT, 3
    plain = LoadAdmission(geometry, 3 * UNIT, tokens)
    drafting = LoadAdmission(geometry, 3 * UNIT, tokens, drafts, 1 + 2 * drafts)
    request = world.request("one", 10)
    assert plain.needed(request, world.blocks) == 10 + 6 + STATE_BLOCKS_MAX
    assert drafting.needed(request, world.blocks) == 11 + 7 + STATE_BLOCKS_MAX + drafts
    world.allocate(request, null=4)
    assert plain.needed(request, world.blocks) == 0
    assert drafting.needed(request, world.blocks) == 1 + 1 + 1  # a state's table of ten entries grows to thirteen
    longest = world.request("longest", 64)
    # one block more of the window, and a state per draft
    assert drafting.needed(longest, world.blocks) - plain.needed(longest, world.blocks) == 1 + drafts


def test_a_state_within_its_block_may_be_copied() -> None:
    """vLLM copies the block before a step continues in it. So the request needs one block more than its table has."""
    world = SchedulerWorld(windows=(None, None), states=(1,), load="async")
    request, geometry = world.request("one", 2), world.side.geometry
    world.allocate(request, null=1)
    for match_tokens, needed in ((0, 0), (UNIT, 1)):
        room = LoadAdmission(dataclasses.replace(geometry, match_tokens=match_tokens), 3 * UNIT, 64 * UNIT)
        assert room.needed(request, world.blocks) == needed


def test_spoiled_block_is_reported_for_the_request_that_would_read_it() -> None:
    """Two requests share a block whose load has failed.

    The request that should compute the block was aborted. So the block is reported for the second request, which
    then computes the block.
    """
    world = SchedulerWorld()
    world.publish(world.request("old", 4, shared=4))
    first, second = world.request("first", 5, shared=4), world.request("second", 5, shared=4)
    assert world.admit(first) == 4 * UNIT
    world.allocate(second)
    table = world.tables[0]
    table["second"][:4] = table["first"][:4]  # these blocks are hits in vLLM's own cache
    world.admit_local(second, 4 * UNIT)
    load, *saves = world.step(first, second)
    world.report((load, 0, 1), *((save, 1, 0) for save in saves))
    first.num_computed_tokens, second.num_computed_tokens = 0, 4 * UNIT  # vLLM takes these tokens back
    world.side.finished(first)
    del table["first"]
    reported, retried = world.step(second)
    assert (reported.kind, reported.request, reported.blocks()) == (
        SYNC,
        "second",
        {b.block_id for b in table["second"][:4]},
    )
    assert set(slots_of(reported)) == {BROKEN}
    world.report((reported, 0, 1), (retried, 1, 0))
    assert world.found(second) == 4, "what it computed from garbage is not saved"
    second.num_computed_tokens = 0
    assert world.step(second) == []
    second.num_computed_tokens = 4 * UNIT
    assert world.step(second) == [], "computed anew"
    assert world.side.catalog.leases == 0
    assert not world.side.pending


def test_block_is_not_reported_when_another_request_has_it_before_the_load_fails() -> None:
    """The load fails after its request has ended, and two other requests have its blocks.

    Only the request with the same tokens reads the blocks before it writes them.
    """
    world = SchedulerWorld()
    world.publish(world.request("old", 4, shared=4))
    loader, sharer = world.request("loader", 5, shared=4), world.request("sharer", 5, shared=2)
    assert world.admit(loader) == 4 * UNIT
    load, *saves = world.step(loader)
    world.side.finished(loader)
    table, other = world.tables[0], world.request("other", 5)
    world.allocate(sharer)
    world.allocate(other)
    table["sharer"][:2], table["other"][:2] = table["loader"][:2], table["loader"][2:4]
    del table["loader"]
    world.admit_local(sharer, 2 * UNIT)
    world.admit_local(other, 0)
    saves += world.step(sharer, other)
    world.report((load, 0, 1), *((save, 1, 0) for save in saves))
    for request in (sharer, other):
        world.grow(request, 6)
    planned = [(job.request, job.blocks()) for job in world.step(sharer, other) if job.kind == SYNC]
    assert planned == [("sharer", {block.block_id for block in table["sharer"][:2]})]


def test_loads_are_sent_when_spoiled_blocks_cannot_be_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """If reporting spoiled blocks raises an exception, the step's loads are still sent."""
    world = SchedulerWorld()
    world.publish(world.request("old", 4, shared=4))
    monkeypatch.setattr(world.remedies, "begin_step", None)
    assert world.admit(world.request("new", 6, shared=4)) == 4 * UNIT
    (load,) = world.step()
    assert load.kind == SYNC
    assert world.side.counters["spoiled_blocks_not_reported"] == 1


@pytest.mark.parametrize(
    ("parts", "read"),
    [
        ([("a", 0, 32), ("b", 32, 40)], {}),  # "a" computes the whole block first
        ([("a", 0, 31), ("b", 32, 40)], {"b": [1]}),  # "a" does not compute the block to its end
        ([("b", 32, 40)], {"b": [1]}),
        ([("b", 20, 40)], {"b": [1]}),
        ([("b", 0, 40)], {}),
        ([("c", 32, 40)], {}),  # "c" has other blocks
    ],
)
def test_block_is_spoiled_unless_it_is_computed_again_before_it_is_read(
    parts: list[tuple[str, int, int]], read: dict[str, list[int]]
) -> None:
    """A spoiled block is reported if a request would read it before the same or an earlier step computes it again."""
    spoiled = Spoiled(32)
    spoiled.add({1})
    tables = {"a": [1, 2], "b": [1, 3], "c": [4, 5]}
    assert spoiled.readers([ScheduledRange(request, tables[request], *span) for request, *span in parts]) == read


def test_a_spoiled_block_is_computed_piece_by_piece() -> None:
    """One request may compute a block over several steps.

    Other requests may read the block only after the last step.
    """
    spoiled = Spoiled(32)
    spoiled.add({1, 7})
    assert spoiled.readers([ScheduledRange("a", [1], 0, 20)]) == {}
    assert spoiled.readers([ScheduledRange("a", [1], 20, 31), ScheduledRange("b", [1, 2], 32, 33)]) == {"b": [1]}
    assert spoiled.readers([ScheduledRange("a", [1], 31, 33), ScheduledRange("b", [1, 2], 32, 33)]) == {}
    assert spoiled
    spoiled.keep({1})
    assert not spoiled
