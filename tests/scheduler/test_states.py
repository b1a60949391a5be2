"""Tests of recurrent states on the scheduler side: which states are saved, and how they limit the length of hits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvpipe.cache.chunks import Chunk, Piece
from kvpipe.protocol.geometry import Geometry, Group, Layer
from kvpipe.protocol.messages import BROKEN
from kvpipe.scheduler.stores import Storing
from kvpipe.tiers.namespace import Namespace
from tests.rigs import scheduler_world
from tests.rigs.scheduler_world import SAVE, UNIT, SchedulerWorld

ATTENTION, STATE, OTHER = 0, 1, 2


def _world(**options: Any) -> SchedulerWorld:
    """Return a world with attention and two groups of states."""
    return SchedulerWorld(windows=(None, None, None), states=(STATE, OTHER), chunk_units=4, **options)


def _states(world: SchedulerWorld, request: Any, group: int = STATE) -> list[int]:
    """Return the boundaries of the request's prefix at which states are held."""
    index = world.side.catalog.index(group)
    return [units for units, key in enumerate(request.block_hashes, 1) if key in index]


def _sit_out(world: SchedulerWorld, request: Any, *boundaries: int) -> None:
    """Plan a step that does not include the request. VLLM offers the states of `boundaries` in this step."""
    offered = {request.request_id: [world._offer(request, g, at) for g in (STATE, OTHER) for at in boundaries]}
    states = SimpleNamespace(boundary_state_offloads=offered)
    plan = world.side.plan_step(
        SimpleNamespace(num_scheduled_tokens={}, preempted_req_ids=None, kv_connector_block_state=states)
    )
    for job in plan.jobs:
        for group, slot, page, block in job.table().tolist():
            table = world.tables[group][request.request_id]
            world.pages[slot, page] = request.block_hashes[[one.block_id for one in table].index(block)]
    world.succeed(*plan.jobs)


def _run(world: SchedulerWorld, request: Any, *boundaries: int) -> None:
    """Compute the request to its end. The request's states at `boundaries` become final."""
    world.admit(request)
    world.succeed(*world.step(request, boundaries=boundaries))
    world.side.finished(request)


def test_a_hit_ends_at_a_boundary_whose_states_are_held() -> None:
    """Attention is held up to unit 9. Each group of states holds only the state after 6 units, where the hit ends."""
    world = _world()
    first = world.request("a", 9, extra=1)
    first.num_prompt_tokens = 6 * UNIT + 1  # the other tokens are the answer
    _run(world, first, 6)
    assert _states(world, first) == _states(world, first, OTHER) == [6]
    again = world.request("b", 9, shared=9, extra=1)
    again.block_hashes[:] = first.block_hashes
    assert world.ask(again) == 6 * UNIT
    assert world.ask(again, 4 * UNIT) == 2 * UNIT  # the load begins after the tokens that the engine holds itself
    assert world.ask(again, 6 * UNIT) == 0


def test_state_is_saved_when_its_request_is_not_in_the_step() -> None:
    """A pipeline stage decodes a request only in some steps. In other steps vLLM offers its newly final states."""
    world = _world()
    first = world.request("a", 4, extra=1)
    world.admit(first)
    world.succeed(*world.step(first))
    held = world.found(first)
    _sit_out(world, first, 4)
    assert _states(world, first) == _states(world, first, OTHER) == [4]
    assert world.found(first) == held == 4
    world.side.finished(first)
    _sit_out(world, first, 4)  # the request has finished, so the offered state is ignored
    assert not world.side.counters["scheduled_unknown_request"]


@pytest.mark.parametrize("group", [ATTENTION, STATE, OTHER])
def test_a_hit_needs_every_group(group: int) -> None:
    """If the state of one group is missing, or attention ends before the boundary, an earlier boundary is tried."""
    world = _world()
    first = world.request("a", 9, extra=1)
    first.num_prompt_tokens = 3 * UNIT + 1
    _run(world, first, 3, 8)
    again = world.request("b", 9, extra=1)
    again.block_hashes[:] = first.block_hashes
    assert world.ask(again) == 8 * UNIT
    index = world.side.catalog.index(group)
    key = next(key for key in reversed(first.block_hashes[3:8]) if key in index)
    world.drop(group, key)
    assert world.ask(again) == 3 * UNIT


def test_state_with_the_last_token_is_not_used() -> None:
    """The last token is computed again. A state that already includes this token would then include it twice."""
    world = _world()
    first = world.request("a", 8)
    _run(world, first, 7, 8)
    assert _states(world, first) == [7, 8]
    again = world.request("b", 8)
    again.block_hashes[:] = first.block_hashes
    assert world.ask(again) == 7 * UNIT
    longer = world.request("c", 9)
    longer.block_hashes[:8] = first.block_hashes
    assert world.ask(longer) == 8 * UNIT


def test_state_is_loaded_into_one_block() -> None:
    """A state is loaded from its own slot into the block of its boundary. Attention is loaded for all tokens."""
    world = _world()
    first = world.request("a", 8, extra=1)
    _run(world, first, 8)
    again = world.request("b", 8, extra=1)
    again.block_hashes[:] = first.block_hashes
    world.admit(again)
    (load,) = world.step(again)
    rows = [row for row in load.table().tolist() if row[0] != ATTENTION]
    assert [(group, page, block) for group, _, page, block in rows] == [
        (group, 0, world.tables[group]["b"][7].block_id) for group in (STATE, OTHER)
    ]
    assert len(load.table()) == 8 + 2


@pytest.mark.parametrize("short", [1, UNIT], ids=["in-a-block", "at-another-boundary"])
def test_load_of_fewer_tokens_than_promised_fails(short: int) -> None:
    """vLLM allocates blocks for fewer tokens than promised, up to a boundary without a state. So the load fails."""
    world = _world()
    first = world.request("a", 8, extra=1)
    _run(world, first, 8)
    again = world.request("b", 8, extra=1)
    again.block_hashes[:] = first.block_hashes
    tokens = world.ask(again) - short
    world.side.admitted(again, world.allocate(again), tokens)
    (load,) = world.step(again)
    assert any(slot == BROKEN for _, slot, _, _ in load.table().tolist())


def test_load_without_a_block_for_its_state_fails() -> None:
    """If a state cannot be loaded, the whole load fails: no load leaves a state out."""
    world = _world()
    first = world.request("a", 8, extra=1)
    _run(world, first, 8)
    again = world.request("b", 8, extra=1)
    again.block_hashes[:] = first.block_hashes
    tokens, tables = world.ask(again), world.allocate(again)
    tables[STATE][7] = tables[STATE][7]._replace(is_null=True)
    world.side.admitted(again, tables, tokens)
    (load,) = world.step(again)
    assert all(slot == BROKEN for _, slot, _, _ in load.table().tolist())
    assert world.side.counters.faults["load_not_planned"] == 1


def test_states_are_saved_at_ends_and_branches_of_prompts() -> None:
    """States are saved at the ends and branches of prompts and at boundaries of answers, but not within a prefill."""
    world = _world()
    first = world.request("a", 12, extra=1)
    first.num_prompt_tokens, first.shared_prefix_boundary = 9 * UNIT + 1, 4 * UNIT
    _run(world, first, 2, 4, 6, 9, 11)
    assert _states(world, first) == [4, 9, 11]
    again = world.request("b", 12, extra=1)
    again.block_hashes[:] = first.block_hashes
    world.admit(again)
    world.succeed(*world.step(again))
    before = world.side.counters["states_saved"]
    assert not [job for job in world.step(again, boundaries=(9,)) if job.kind == SAVE]  # the state is held already
    assert world.side.counters["states_saved"] == before


def test_offers_of_states_that_are_not_final_or_not_whole_are_ignored() -> None:
    """An offer is ignored within a unit, beyond the final tokens, or in a group without states."""
    world = _world()
    one = world.request("a", 4, extra=1)
    world.admit(one)
    one.block_hashes[3:] = []  # not final yet
    world.tables[STATE]["a"].append(world.tables[STATE]["a"][3])
    world.step(one, boundaries=(4,))
    assert world.side.counters["states_saved"] == 0


def test_aborted_request_saves_no_state() -> None:
    """A request that runs through a reset may hold KV that the reset must forget, so its states are not saved."""
    world = _world()
    one = world.request("a", 4, extra=1)
    world.admit(one)
    world.side.reset()
    assert not world.step(one, boundaries=(4,))


def test_a_failed_save_loses_the_state_only() -> None:
    """The failed save of a state is counted, and the state is not found.

    Attention is saved again. The state is saved again if vLLM offers it again.
    """
    world = _world()
    one = world.request("a", 4, extra=1)
    world.admit(one)
    (job,) = world.step(one, boundaries=(4,))
    assert world.side.counters["states_not_saved"] == 0
    world.report((job, 0, 1))
    assert _states(world, one) == []
    assert world.side.counters["states_not_saved"] == 2
    world.grow(one, 5)
    world.report((world.step(one)[0], 0, 1))
    assert world.side.counters["states_not_saved"] == 2  # the failure of both states is counted once
    world.succeed(*world.step(one))
    assert world.found(one) == 5
    assert world.ask(world.request("b", 4)) == 0
    again = world.request("c", 5, extra=1)
    again.block_hashes[:] = one.block_hashes
    _run(world, again, 4, 5)
    assert _states(world, again) == [5]  # this boundary is the end of the prompt
    assert world.side.counters["states_not_saved"] == 2


def test_a_state_whose_save_cannot_be_planned_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """If planning a job fails after its states were claimed, these states are lost and counted."""
    world = _world()
    one = world.request("a", 4, extra=1)
    world.admit(one)
    monkeypatch.setattr(world.side.jobs, "_begin", lambda *_: 1 // 0)
    assert not world.step(one, boundaries=(4,))
    assert world.side.counters.faults["save_not_planned"] == 1
    assert world.side.counters["states_not_saved"] == 2
    assert _states(world, one) == []


def test_a_branch_is_found_when_its_chunk_has_grown() -> None:
    """At a branch of prompts, which lies within a chunk, the state and the attention up to the branch are kept."""
    world = _world()
    _run(world, world.request("a", 9, shared=6, extra=1))
    second = world.request("b", 9, shared=6, extra=1)
    second.shared_prefix_boundary = 6 * UNIT
    world.admit(second)
    second.num_tokens = 6 * UNIT  # the request's step ends at the branch
    world.succeed(*world.step(second, boundaries=(6,)))
    second.num_tokens = 9 * UNIT + 1
    world.succeed(*world.step(second))
    third = world.request("c", 9, shared=6, extra=1)
    assert world.ask(third) == 6 * UNIT


@pytest.mark.parametrize("resumable", [False, True])
def test_session_saves_nothing_when_the_model_has_states(resumable: bool) -> None:
    """A session drops its last token when its next input comes, but its state already contains this token."""
    world = _world()
    session = world.request("a", 6, extra=1)
    session.resumable = resumable
    world.admit(session)
    assert any(job.kind == SAVE for job in world.step(session, boundaries=(6,))) is not resumable


def test_answer_of_a_short_prompt_keeps_no_mark_behind_the_prompt() -> None:
    """A prompt of less than one unit has no boundary, so the answer's chunk is found only at its end."""
    world = _world()
    request = world.request("a", 1)
    request.num_prompt_tokens = 5
    world.admit(request)
    world.succeed(*world.step(request))
    world.grow(request, 2)
    world.succeed(*world.step(request))
    assert _states(world, request, ATTENTION) == [2]


def test_states_count_as_used_with_their_attention() -> None:
    """A prefix in vLLM's own cache counts as used, both its attention and its states. States are evicted last."""
    world = _world()
    first = world.request("a", 9, extra=1)
    _run(world, first, 9)
    used = list(world.side.prefixes.chunks_from_the_end(first, 9))
    assert [chunk.group for chunk in used] == [STATE, OTHER, ATTENTION, ATTENTION]


def test_attention_up_to_a_state_is_stored_in_mid_chunk() -> None:
    """A prompt ends within a chunk, and the chunk grows afterwards.

    Tiers also get the chunk up to the prompt's end, because the state needs no more.
    """
    world = _world()
    side, space = world.side, Namespace()
    space.base = "space"
    tier = SimpleNamespace(name="near", spec=SimpleNamespace(store="all"))
    finder: Any = SimpleNamespace(tiers=[tier], split=None)
    stores = Storing(side.context, finder, space, new_id=side.jobs.new_id, stores=True, loads=True)
    first = world.request("a", 5, extra=1)
    world.admit(first)
    world.succeed(*world.step(first, boundaries=(5,)))
    for group in (ATTENTION, STATE, OTHER):
        for chunk in set(side.catalog.index(group).values()):
            assert isinstance(chunk, Chunk)
            last = chunk.marks[-1]
            stores.landed(side.requests.tracked["a"], Piece(chunk, 0, last.units, last.key, last.keep))
    offered = sorted((offer.chunk.group, offer.units) for offer in stores._offers.values())
    assert offered == [(ATTENTION, 1), (ATTENTION, 4), (STATE, 1), (OTHER, 1)]


def test_state_in_a_block_of_another_request_is_not_saved() -> None:
    """vLLM may have offered the state before the step that is planned now.

    In this step, another request may write the state's block.
    """
    world = _world()
    one = world.request("a", 4, extra=1)
    world.admit(one)
    world.known[world.tables[STATE]["a"][3].block_id] = SimpleNamespace(block_hash=None)
    world.succeed(*world.step(one, boundaries=(4,)))
    assert (_states(world, one), _states(world, one, OTHER)) == ([], [4])
    assert world.side.counters["states_not_saved"] == 1


def test_with_a_drafter_states_end_at_their_boundary_and_attention_behind_it() -> None:
    """With a drafter, the key of a unit of attention includes the next token.

    So this key is known later than the key of the state, and a hit needs both.
    """
    world = _world(ahead_tokens=1)
    first = world.request("a", 6, extra=1)
    _run(world, first, 5, 6)
    assert _states(world, first) == [5, 6]
    other = world.request("b", 6, extra=1)
    other.block_hashes[:5] = first.block_hashes[:5]
    assert world.ask(other) == 0  # the prompt differs in unit 6, on which the attention of unit 5 depends
    again = world.request("c", 7)
    again.block_hashes[:6] = first.block_hashes
    assert world.ask(again) == 5 * UNIT
    assert world.admit(again) == 5 * UNIT
    load, *_ = world.step(again)
    assert len(load.table()) == 5 + 2


class _Divided(SchedulerWorld):
    """A world in which four ranks divide each block of attention. A block is four units."""

    def check(self) -> None:
        """Do not check pages, because a page is a block here, not a unit."""


def test_a_request_that_ended_within_a_block_is_found_to_the_block_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another request continues the first request's chunk.

    The first request is still found, up to three units before its last unit.
    """
    groups = (Group((Layer("a", 64),), 4 * UNIT, ranks=4), Group((Layer("s", 64),), UNIT, state=True))
    monkeypatch.setattr(scheduler_world, "geometry_of_windows", lambda *_: Geometry(groups, 16 * UNIT, 64 * 4096))
    world = _Divided(windows=(None, None), states=(1,))
    goes_on, ends = (world.request(name, 2, shared=9, extra=1) for name in ("goes on", "ends"))
    for one in (goes_on, ends):
        one.shared = 9
        world.admit(one)
        world.succeed(*world.step(one))
    for one, units in ((goes_on, 5), (ends, 7)):
        world.grow(one, units)
        world.succeed(*world.step(one))
    world.side.finished(ends)
    world.grow(goes_on, 9)
    world.succeed(*world.step(goes_on))
    index = world.side.catalog.index(0)
    assert [units for units in range(1, 8) if ends.block_hashes[units - 1] in index] == [2, 4]
    assert goes_on.block_hashes[7] in index


def test_state_within_a_block_is_saved_and_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hit ends within a block, into which the state is loaded. Earlier blocks are null."""
    groups = (Group((Layer("a", 64),), 2 * UNIT), Group((Layer("s", 64),), 4 * UNIT, state=True))
    made = Geometry(groups, 16 * UNIT, 64 * 4096, match_tokens=UNIT)
    monkeypatch.setattr(scheduler_world, "geometry_of_windows", lambda *_: made)
    assert (made.unit_tokens, made.units_per_block, made.whole_units) == (UNIT, (2, 4), 4)
    world = _Divided(windows=(None, None), states=(1,))
    first = world.request("a", 7, extra=1)
    world.admit(first)
    table = world.tables[1]["a"]
    world.known[table[1].block_id] = SimpleNamespace(block_hash=first.block_hashes[6] + (1).to_bytes(4, "big"))
    offered = {"a": [(1, table[1].block_id, at * UNIT) for at in (6, 7)]}
    plan = world.side.plan_step(
        SimpleNamespace(
            num_scheduled_tokens={"a": 7 * UNIT + 1},
            preempted_req_ids=None,
            kv_connector_block_state=SimpleNamespace(boundary_state_offloads=offered),
        )
    )
    world.succeed(*plan.jobs)
    world.side.finished(first)
    assert _states(world, first) == [7]
    again = world.request("b", 9, shared=9)
    again.block_hashes[:7] = first.block_hashes
    assert world.ask(again) == 7 * UNIT
    tables = world.allocate(again, null=1)
    del tables[1][2:]  # the request keeps the blocks of 7 units
    world.side.admitted(again, tables, 7 * UNIT)
    (load,) = world.step()
    assert [row[3] for row in load.table().tolist() if row[0] == 1] == [tables[1][1].block_id]
