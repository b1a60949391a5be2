"""A request, a load or a lookup that ends or raises half way leaves no lease, no job and no answer behind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from kvpipe.protocol.engine import LATER
from kvpipe.statemachine.core import IllegalTransition
from tests.rigs.scheduler_world import (
    SYNC,
    UNIT,
    SchedulerWorld,
)


def _boom(*_: object, **__: object) -> None:
    raise RuntimeError("boom")


def _in_turn(*calls: Callable[..., object]) -> Callable[..., object]:
    turns = iter(calls)

    def call(*args: object) -> object:
        return next(turns)(*args)

    return call


@pytest.mark.parametrize("old", ["hit", "later"])
def test_a_lookup_that_raises_leaves_no_answer(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine continues as after a miss.

    The scheduler side forgets the answer of the lookup, and that earlier lookups were put off.
    """
    world = SchedulerWorld(load="async")
    world.publish(world.request("old", 4, shared=4))
    request = world.request("new", 6, shared=4)
    if old == "later":
        world.side.weights.suspect("reset")
    assert (world.side.lookup(request, 0) is LATER) == (old == "later")
    with monkeypatch.context() as patch:
        patch.setattr(world.side.requests, "add", _boom)
        with pytest.raises(RuntimeError, match="boom"):
            world.side.lookup(request, 0)
    world.side.admitted(request, world.allocate(request), 0)
    tracked = world.side.requests.tracked["new"]
    assert tracked.asking.state.row == "UNASKED"
    assert tracked.saving.saved_units == 0
    assert not world.side.counters["illegal_transition"]


@pytest.mark.parametrize("first", ["new", "preempted", "unknown", "untrackable"])
def test_a_lookup_that_raises_is_a_miss(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine admits the request. The request is tracked and saved, and its KV is checked for old weights."""
    world = SchedulerWorld(load="async")
    request, stale = world.request("new", 3), list[str]()
    if first == "preempted":
        world.admit(request)
        world.succeed(*world.step(request))
        world.preempt(request)
        world.drop(0, request.block_hashes[2])
    with monkeypatch.context() as patch:
        patch.setattr(world.remedies, "admitted", lambda request_id, _: stale.append(request_id))
        with monkeypatch.context() as broken:
            if first in {"unknown", "untrackable"}:
                one_more = _boom if first == "untrackable" else world.side.requests.add
                broken.setattr(world.side.requests, "add", _in_turn(_boom, one_more))
            else:
                world.side.on_new_request(request)
                broken.setattr(world.side._lookups, "_why_not", _boom)
            with pytest.raises(RuntimeError, match="boom"):
                world.side.lookup(request, 0)
        world.side.admitted(request, world.allocate(request), 0)
    tracked = world.side.requests.tracked["new"]
    assert (tracked.state.row, tracked.asking.state.row) == ("RUNNING", "UNASKED")
    assert stale == ["new"]
    assert tracked.epoch > 1
    world.succeed(*world.step(request))
    assert world.found(request) == 3
    assert not world.side.counters["illegal_transition"]


def test_lookup_that_raises_during_a_load_is_a_miss() -> None:
    """The lookup has no answer, because the request already has blocks.

    VLLM itself makes lookups only for requests without blocks.
    """
    world = SchedulerWorld(load="async")
    world.publish(world.request("old", 4, shared=4))
    request = world.request("new", 6, shared=4)
    world.admit(request)
    (load,) = world.step()
    with pytest.raises(IllegalTransition, match="LOADING"):
        world.side.lookup(request, 0)
    assert world.side.requests.tracked["new"].asking.state.row == "UNASKED"
    world.succeed(load)


@pytest.mark.parametrize("where", ["remedies", "stage", "catalog"])
@pytest.mark.parametrize("hit", [False, True])
def test_an_admission_that_fails_half_way_saves_nothing(where: str, hit: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is saved, because it is unknown whether the request's blocks hold KV of old weights."""
    world = SchedulerWorld(load="sync")
    world.publish(world.request("old", 4, shared=4))
    request, side = world.request("new", 6, shared=4), world.side
    tokens = world.ask(request, UNIT if hit else 4 * UNIT)
    side.requests.tracked["new"].stage = object()  # type: ignore[assignment]
    broken = {
        "remedies": (world.remedies, "admitted"),
        "stage": (side.requests, "end_stage"),
        "catalog": (side.catalog, "refresh"),
    }[where]
    with monkeypatch.context() as patch:
        patch.setattr(*broken, _boom)
        with pytest.raises(RuntimeError, match="boom") if where == "catalog" or not hit else contextlib.nullcontext():
            side.admitted(request, world.allocate(request), tokens)
    assert [job.kind for job in world.step(request)] == [SYNC] * hit


@pytest.mark.parametrize("where", ["catalog", "requests", "jobs"])
def test_a_load_that_cannot_be_planned_to_fail_leaves_nothing(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No lease and no job of the load is left."""
    world = SchedulerWorld()
    request = world.request("one", 2)
    world.admit(request)
    side = world.side
    monkeypatch.setattr(world.remedies, "begin_step", lambda *_, **__: {"gone" if where == "requests" else "one": [1]})
    broken = {"catalog": (side.catalog, "lease"), "requests": (world, "grow"), "jobs": (type(side.tracer), "begun")}[
        where
    ]
    with monkeypatch.context() as patch:
        patch.setattr(*broken, _boom)
        world.step()
    assert side.counters["spoiled_blocks_not_reported"] == 1
    assert side.catalog.leases == 0
    assert not side.catalog.leased
    assert not side.jobs.in_flight
    assert not side.jobs.sync_loads


def test_load_of_a_request_that_ends_first_is_not_sent() -> None:
    """The load is not sent, no part waits for it, and the request holds nothing.

    VLLM itself never makes calls in this order.
    """
    world = SchedulerWorld()
    world.publish(world.request("old", 4, shared=4))
    request = world.request("new", 6, shared=4)
    world.admit(request)
    assert world.side.catalog.leases == 1
    with pytest.raises(IllegalTransition, match="ALLOCATED"):
        world.side.finished(request)
    assert world.side.catalog.leases == 0
    assert world.step() == []
    assert not world.side.pending
    assert "new" not in world.side.requests.tracked


def test_failed_load_ends_when_other_loads_cannot_be_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leases of the failed load end, its request is computed, and other jobs of the report are processed."""
    world = SchedulerWorld(load="sync")
    world.publish(world.request("old", 4, shared=4))
    request, other = world.request("new", 6, shared=4), world.request("other", 2)
    world.admit(request)
    world.admit(other)
    load, *saves = world.step(request, other)
    monkeypatch.setattr(world.side.events, "load_failed", _boom)
    world.report((load, 0, 1), *((save, 1, 0) for save in saves))
    assert world.side.counters["contained_error"] == 1
    assert world.side.catalog.leases == 0
    assert not world.side.jobs.in_flight
    assert world.side.requests.tracked["new"].state.row == "RECOMPUTING"
    assert world.found(other) == 2


def test_blocks_of_a_request_that_is_over_are_forgotten_only_while_loads_may_fail() -> None:
    """The request has ended, and none of its loads can fail any more.

    If a later load fails, the request's blocks stay in vLLM's cache.
    """
    world = SchedulerWorld(load="sync")
    world.publish(world.request("old", 4, shared=4))
    first, reader, last = (world.request(name, 6, shared=4) for name in ("first", "reader", "last"))
    world.admit(first)
    world.admit(reader)
    jobs = world.step(first, reader)
    theirs = {block.block_id for block in world.tables[0]["reader"]}
    world.side.finished(reader)
    world.succeed(*jobs)
    world.step()
    world.admit(last)
    (load, *saves) = world.step(last)
    world.report((load, 0, 1), *((save, 1, 0) for save in saves))
    assert world.forgotten
    assert not world.forgotten & theirs
