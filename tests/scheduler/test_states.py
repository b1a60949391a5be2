"""Recurrent states on the scheduler's side: what is saved of them, and how long a hit is that needs them."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from kvpipe.cache.catalog import Chunk
from kvpipe.connectors.vllm.trial import scheduler_world
from kvpipe.connectors.vllm.trial.scheduler_world import SAVE, UNIT, SchedulerWorld
from kvpipe.geometry import Geometry, Group, Layer
from kvpipe.messages import BROKEN
from kvpipe.scheduler.stores import Storing
from kvpipe.tiers.namespace import Namespace
from kvpipe.trace.log import Counters

ATTENTION, STATE, OTHER = 0, 1, 2


def _world(**options: Any) -> SchedulerWorld:
    """Attention, and two groups of states."""
    return SchedulerWorld(windows=(None, None, None), states=(STATE, OTHER), chunk_units=4, **options)


def _states(world: SchedulerWorld, request: Any, group: int = STATE) -> list[int]:
    """Return the boundaries of the request's prefix whose states are held."""
    index = world.side.catalog.index(group)
    return [units for units, key in enumerate(request.block_hashes, 1) if key in index]


def _sit_out(world: SchedulerWorld, request: Any, *boundaries: int) -> None:
    """Plan a step without the request, in which the states of `boundaries` are offered."""
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
    """Compute the request to its end; the states of `boundaries` become final."""
    world.admit(request)
    world.succeed(*world.step(request, boundaries=boundaries))
    world.side.finished(request)


def test_a_hit_ends_at_a_boundary_whose_states_are_held() -> None:
    """Attention is held to unit 9: of states only the one after 6 units, of every group."""
    world = _world()
    first = world.request("a", 9, extra=1)
    first.num_prompt_tokens = 6 * UNIT + 1  # the rest is its answer
    _run(world, first, 6)
    assert _states(world, first) == _states(world, first, OTHER) == [6]
    again = world.request("b", 9, shared=9, extra=1)
    again.block_hashes[:] = first.block_hashes
    assert world.ask(again) == 6 * UNIT
    assert world.ask(again, 4 * UNIT) == 2 * UNIT  # beyond what the engine holds itself
    assert world.ask(again, 6 * UNIT) == 0


def test_a_state_is_saved_though_its_request_sits_the_step_out() -> None:
    """A stage of a pipeline decodes a request every few steps: what is confirmed in between is offered in between."""
    world = _world()
    first = world.request("a", 4, extra=1)
    world.admit(first)
    world.succeed(*world.step(first))
    held = world.found(first)
    _sit_out(world, first, 4)
    assert _states(world, first) == _states(world, first, OTHER) == [4]
    assert world.found(first) == held == 4
    world.side.finished(first)
    _sit_out(world, first, 4)  # nobody knows it any more
    assert not world.side.counters["scheduled_unknown_request"]


@pytest.mark.parametrize("group", [ATTENTION, STATE, OTHER])
def test_a_hit_needs_every_group(group: int) -> None:
    """Without one group's state, or with attention that ends before the boundary, the boundary before is tried."""
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


def test_a_state_that_has_the_last_token_is_of_no_use() -> None:
    """The last token is computed anew: a state that it is in already would count it twice."""
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


def test_what_is_loaded_of_a_state_is_one_block() -> None:
    """Into the block in which the boundary lies, from a slot of its own; attention comes whole."""
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
def test_less_than_was_promised_fails(short: int) -> None:
    """The engine allocates for fewer tokens than were promised: nobody has that state, and the load fails."""
    world = _world()
    first = world.request("a", 8, extra=1)
    _run(world, first, 8)
    again = world.request("b", 8, extra=1)
    again.block_hashes[:] = first.block_hashes
    tokens = world.ask(again) - short
    world.side.admitted(again, world.allocate(again), tokens)
    (load,) = world.step(again)
    assert any(slot == BROKEN for _, slot, _, _ in load.table().tolist())


def test_no_block_for_the_state_fails() -> None:
    """A state that cannot be loaded is never left out."""
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


def test_what_is_saved() -> None:
    """Where the prompt ends or branches, and what comes after: no state of the steps of a prefill."""
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
    assert not [job for job in world.step(again, boundaries=(9,)) if job.kind == SAVE]  # it is held
    assert world.side.counters["states_saved"] == before


def test_offers_of_what_is_not_final_or_not_whole() -> None:
    """A boundary within a unit, one beyond the tokens that are final, one of a group that has no states."""
    world = _world()
    one = world.request("a", 4, extra=1)
    world.admit(one)
    one.block_hashes[3:] = []  # not final yet
    world.tables[STATE]["a"].append(world.tables[STATE]["a"][3])
    world.step(one, boundaries=(4,))
    assert world.side.counters["states_saved"] == 0


def test_a_request_that_was_given_up_saves_no_state() -> None:
    """What goes on through a reset may hold what was to be forgotten."""
    world = _world()
    one = world.request("a", 4, extra=1)
    world.admit(one)
    world.side.reset()
    assert not world.step(one, boundaries=(4,))


def test_a_failed_save_loses_the_state_only() -> None:
    """Nothing is found of it, and it is counted; attention is saved again, the state when it is offered again."""
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
    assert world.side.counters["states_not_saved"] == 2  # there was none in it
    world.succeed(*world.step(one))
    assert world.found(one) == 5
    assert world.ask(world.request("b", 4)) == 0
    again = world.request("c", 5, extra=1)
    again.block_hashes[:] = one.block_hashes
    _run(world, again, 4, 5)
    assert _states(world, again) == [5]  # where the prompt ends
    assert world.side.counters["states_not_saved"] == 2


def test_a_state_whose_save_cannot_be_planned_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong between the claim and the job loses what was claimed."""
    world = _world()
    one = world.request("a", 4, extra=1)
    world.admit(one)
    monkeypatch.setattr(world.side.jobs, "_begin", lambda *_: 1 // 0)
    assert not world.step(one, boundaries=(4,))
    assert world.side.counters.faults["save_not_planned"] == 1
    assert world.side.counters["states_not_saved"] == 2
    assert _states(world, one) == []


def test_a_branch_is_found_when_its_chunk_has_grown() -> None:
    """Where prompts were seen to part a state is kept, and so is the attention up to there, in mid-chunk."""
    world = _world()
    _run(world, world.request("a", 9, shared=6, extra=1))
    second = world.request("b", 9, shared=6, extra=1)
    second.shared_prefix_boundary = 6 * UNIT
    world.admit(second)
    second.num_tokens = 6 * UNIT  # its step ends there
    world.succeed(*world.step(second, boundaries=(6,)))
    second.num_tokens = 9 * UNIT + 1
    world.succeed(*world.step(second))
    third = world.request("c", 9, shared=6, extra=1)
    assert world.ask(third) == 6 * UNIT


@pytest.mark.parametrize("resumable", [False, True])
def test_of_sessions_nothing_is_saved(resumable: bool) -> None:
    """An engine cuts a session's tokens back when its next input comes; its state has the token that was cut."""
    world = _world()
    session = world.request("a", 6, extra=1)
    session.resumable = resumable
    world.admit(session)
    assert any(job.kind == SAVE for job in world.step(session, boundaries=(6,))) is not resumable


def test_states_count_as_used_with_their_attention() -> None:
    """A prefix that the engine holds itself keeps both from being evicted, the last state before the chunks."""
    world = _world()
    first = world.request("a", 9, extra=1)
    _run(world, first, 9)
    used = list(world.side.prefixes.chunks_from_the_end(first, 9))
    assert [chunk.group for chunk in used] == [STATE, OTHER, ATTENTION, ATTENTION]


def test_attention_up_to_a_state_is_stored_in_mid_chunk() -> None:
    """A chunk that goes on behind a prompt's end is offered to tiers as far as that, too: the state needs no more."""
    world = _world()
    side, space = world.side, Namespace()
    space.base = "space"
    stores = Storing(
        side.catalog,
        side.geometry,
        space,
        policies=["all"],
        bytes_in_flight_max=1 << 30,
        counters=Counters(),
        new_id=itertools.count(1).__next__,
    )
    first = world.request("a", 5, extra=1)
    world.admit(first)
    world.succeed(*world.step(first, boundaries=(5,)))
    for group in (ATTENTION, STATE, OTHER):
        for chunk in set(side.catalog.index(group).values()):
            assert isinstance(chunk, Chunk)
            stores.landed(side.requests.tracked["a"], chunk, chunk.marks[-1].units)
    offered = sorted((offer.chunk.group, offer.units) for offer in stores._offers.values())
    assert offered == [(ATTENTION, 1), (ATTENTION, 4), (STATE, 1), (OTHER, 1)]


def test_a_state_in_a_block_that_others_have_by_now_is_not_saved() -> None:
    """An offer may be older than the step that is planned: then its block may be written in that very step."""
    world = _world()
    one = world.request("a", 4, extra=1)
    world.admit(one)
    world.known[world.tables[STATE]["a"][3].block_id] = SimpleNamespace(block_hash=None)
    world.succeed(*world.step(one, boundaries=(4,)))
    assert (_states(world, one), _states(world, one, OTHER)) == ([], [4])
    assert world.side.counters["states_not_saved"] == 1


def test_with_a_drafter_states_end_at_their_boundary_and_attention_behind_it() -> None:
    """Attention of a unit has a key when the unit behind it is known, a state at once: a hit needs both."""
    world = _world(ahead_tokens=1)
    first = world.request("a", 6, extra=1)
    _run(world, first, 5, 6)
    assert _states(world, first) == [5, 6]
    other = world.request("b", 6, extra=1)
    other.block_hashes[:5] = first.block_hashes[:5]
    assert world.ask(other) == 0  # it parts in the unit that the attention before it depends on
    again = world.request("c", 7)
    again.block_hashes[:6] = first.block_hashes
    assert world.ask(again) == 5 * UNIT
    assert world.admit(again) == 5 * UNIT
    load, *_ = world.step(again)
    assert len(load.table()) == 5 + 2


class _Divided(SchedulerWorld):
    """A block of attention is divided among four ranks, and is four units."""

    def check(self) -> None:
        """Pages are of blocks, not of units: what lies in them is not looked at."""


def test_a_request_that_ended_within_a_block_is_found_to_the_block_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though another has gone on in the same chunk: the end is saved up to three units before the last one."""
    groups = (Group((Layer("a", 64),), 4 * UNIT, ranks=4), Group((Layer("s", 64),), UNIT, state=True))
    monkeypatch.setattr(scheduler_world, "make_geometry", lambda *_: Geometry(groups, 16 * UNIT, 64 * 4096))
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


def test_a_state_within_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hit ends there, and the state goes into the block that its last token is in; all before that is null."""
    groups = (Group((Layer("a", 64),), 2 * UNIT), Group((Layer("s", 64),), 4 * UNIT, state=True))
    made = Geometry(groups, 16 * UNIT, 64 * 4096, match_tokens=UNIT)
    monkeypatch.setattr(scheduler_world, "make_geometry", lambda *_: made)
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
    del tables[1][2:]  # as many as hold 7 units
    world.side.admitted(again, tables, 7 * UNIT)
    (load,) = world.step()
    assert [row[3] for row in load.table().tolist() if row[0] == 1] == [tables[1][1].block_id]
