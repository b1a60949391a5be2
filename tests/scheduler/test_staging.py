"""Tests of the scheduler side of tiers without an engine: namespaces, stores, and lanes of prefetches."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from kvpipe.protocol.engine import LATER
from kvpipe.protocol.messages import ONE_BAD, ONE_OK
from kvpipe.scheduler.fetches import ORDERS_PER_LANE
from kvpipe.scheduler.stores import REST_STEPS, Storing
from kvpipe.testing.held_tier import DictSpec, HeldTier
from kvpipe.testing.waiting import PATIENT, eventually
from kvpipe.tiers.base import Key
from kvpipe.tiers.guard import FIND, guarded
from kvpipe.tiers.namespace import Namespace
from kvpipe.tiers.prefix_keys import chunk_name
from tests.rigs.scheduler_world import UNIT, SchedulerWorld

SPACE, CHUNK, LANES = "1" * 32, 4, 2


@contextmanager
def tiered(*tiers: HeldTier, **world: Any) -> Iterator[tuple[SchedulerWorld, Any]]:
    """Yield a scheduler side with tiers, and its staging. No rank carries out the tier orders."""
    spec = DictSpec.model_validate(PATIENT | {"lanes": LANES})
    uses = guarded([(tier.name, spec, tier) for tier in tiers], (FIND,))
    made = SchedulerWorld(tiers=uses, chunk_units=CHUNK, **world)
    try:
        yield made, made.side.staging
    finally:
        made.side.shutdown()


def prompt_in(tier: HeldTier, world: SchedulerWorld, name: str, chunks: int) -> Any:
    """Return a request whose prompt has `chunks` chunks, all of which the tier holds."""
    request = world.request(name, chunks * CHUNK)
    for key in request.block_hashes[CHUNK - 1 :: CHUNK]:
        tier.values[Key(SPACE, chunk_name(key), 0, 0, 1).text] = b""
    return request


@pytest.mark.parametrize("restarted", [False, True])
def test_both_namespaces_follow_the_weights(*, restarted: bool) -> None:
    """Ranks report new weights after a call of the engine, or because the engine has restarted the ranks."""
    with tiered(HeldTier(), also_of="layout of {}".format) as (world, staging):
        world.side.ranks_ready({0: 256}, ["first"])
        assert (staging.space.name, staging.space.also) == ("first", "layout of first")
        for digest in ("second", "", "first"):
            if restarted:
                world.side.ranks_ready({0: 256}, [digest])
            else:
                world.side.weights.suspect()
                world.side.weighed({0: (world.side.weights.next_question(), digest)})
            assert staging.space.name == digest
            assert staging.space.also == (f"layout of {digest}" if digest else "")


@pytest.mark.parametrize("late", [False, True])
def test_last_chunk_of_a_request_is_stored_when_its_save_lands(*, late: bool) -> None:
    """The save may land before or after the request's end. A chunk that the request may still fill is not stored."""
    with tiered(HeldTier()) as (world, staging):
        request = world.request("a", CHUNK + 2)
        world.admit(request)
        staging.space.base = SPACE  # set only now, because otherwise the lookup above would wait for the tier
        jobs = world.step(request)
        if not late:
            world.succeed(*jobs)
            assert [order.units for order in staging.plan(stores=True)] == [CHUNK]
        world.side.finished(request)
        if late:
            world.succeed(*jobs)
        stored = [order.units for order in staging.plan(stores=True)]
        assert stored == ([CHUNK, 2] if late else [2])


def _stored_in(staging: Any, steps: int) -> list[int]:
    """Report all stores as done that the next `steps` steps plan, and return the tiers of these stores."""
    tiers = []
    for _ in range(steps):
        for order in staging.plan(stores=True):
            tiers.append(order.tier)
            staging.reported(order.id, ONE_OK)
        staging.stores._context.steps.planned += 1
    return tiers


def test_tier_gets_its_stores_when_a_store_in_another_tier_fails() -> None:
    """The failed tier gets no stores for some steps, and the chunks offered to it are dropped."""
    with tiered(HeldTier("near"), HeldTier("far")) as (world, staging):
        requests = [world.request(name, CHUNK) for name in "abcd"]
        for request in requests:
            world.admit(request)
        staging.space.base, staging.stores._in_flight_max = SPACE, 1
        world.succeed(*world.step(*requests[:2]))
        near, far = staging.plan(stores=True)
        assert (near.tier, far.tier) == (0, 1)
        staging.reported(near.id, ONE_BAD)
        staging.reported(far.id, ONE_OK)
        assert _stored_in(staging, 3) == [1]
        world.succeed(*world.step(requests[2]))
        assert _stored_in(staging, 3) == [1]
        assert world.side.counters["store_dropped_tier_failed"] == 2
        assert _stored_in(staging, REST_STEPS) == []
        world.succeed(*world.step(requests[3]))
        assert _stored_in(staging, 3) == [0, 1]


@pytest.mark.parametrize("hangs", [0, 1])
def test_tier_gets_all_its_stores_when_another_tier_hangs(hangs: int) -> None:
    """The stores of the hanging tier take only this tier's half of the allowed stores in flight.

    The other tier uses the other half.
    """
    with tiered(HeldTier("near"), HeldTier("far")) as (world, staging):
        requests = [world.request(name, CHUNK) for name in "abcdefghijkl"]
        for request in requests:
            world.admit(request)
        staging.space.base, staging.stores._in_flight_max = SPACE, 4
        world.succeed(*world.step(*requests))
        kept = [0, 0]
        for _ in requests:
            orders = staging.plan(stores=True)
            assert len(orders) + kept[hangs] <= 4
            for order in orders:
                kept[order.tier] += 1
                if order.tier != hangs:
                    staging.reported(order.id, ONE_OK)
        assert (kept[hangs], kept[1 - hangs]) == (2, len(requests))
        assert not staging.stores.pending


@pytest.mark.parametrize(("bound", "each"), [(1, 1), (2, 1), (5, 2), (1000, 32)])
def test_tiers_have_equal_parts_of_the_bound_on_stores(bound: int, each: int) -> None:
    """Each tier may have at least one store in flight. All tiers together have at most a quarter of the pool in flight.

    Read-only tiers have no part of this bound.
    """
    with tiered(HeldTier("near"), HeldTier("far"), HeldTier("read")) as (world, staging):
        side, keys = world.side, {"tier_bytes_in_flight_max": bound * world.side.geometry.slot_bytes}
        context = dataclasses.replace(side.context, settings=side.settings.model_copy(update=keys))
        specs = [SimpleNamespace(store=when) for when in ("all", "second_use", "never")]
        finder: Any = SimpleNamespace(tiers=[SimpleNamespace(name="", spec=spec) for spec in specs], split=None)
        stores = Storing(context, finder, staging.space, new_id=side.jobs.new_id, stores=True, loads=True)
        assert (world.side.catalog.slots, stores._max) == (256, each)


@pytest.mark.parametrize("producer", [True, False])
def test_producer_stores_chunks_of_finished_requests_first(*, producer: bool) -> None:
    """A router sends a finished prompt to the decode engine at once, so its chunks are stored first.

    The chunks of one request are stored in their order.
    """
    with tiered(HeldTier(), loads=not producer) as (world, staging):
        requests = [world.request(name, 2 * CHUNK) for name in "abcd"]
        for request in requests:
            world.admit(request)
        staging.space.base, staging.stores._in_flight_max = SPACE, 1
        *jobs, late = world.step(*requests)
        world.succeed(*jobs)
        for at in (2, 3):
            world.side.finished(requests[at])
        world.succeed(late)
        world.side.finished(requests[1])
        stored = []
        while orders := staging.plan(stores=True):
            (order,) = orders
            stored.append(order.chunk)
            staging.reported(order.id, ONE_OK)
        turns = (2, 3, 1, 0) if producer else (0, 1, 2, 3)
        assert stored == [chunk_name(key) for at in turns for key in requests[at].block_hashes[CHUNK - 1 :: CHUNK]]


def test_producer_stores_a_chunk_first_when_one_of_its_two_requests_has_finished() -> None:
    """The running request has saved the chunk. The finished request also uses the chunk."""
    with tiered(HeldTier(), loads=False) as (world, staging):
        running, finished = [world.request(name, 2 * CHUNK, shared=CHUNK) for name in "ab"]
        for request in (running, finished):
            world.admit(request)
        staging.space.base, staging.stores._in_flight_max = SPACE, 4
        jobs = world.step(running, finished)
        world.succeed(*jobs)
        world.side.finished(finished)
        both, ends = running.block_hashes[CHUNK - 1], [one.block_hashes[-1] for one in (finished, running)]
        assert [order.chunk for order in staging.plan(stores=True)] == [chunk_name(key) for key in (both, *ends)]


def test_prefetches_leave_lanes_of_a_tier_to_requests() -> None:
    """A prefetch has at most one order in flight per lane.

    So the chunks of a later request are ordered at once, up to the tier's limit.
    """
    tier = HeldTier()
    with tiered(tier) as (world, staging):
        staging.space.base = SPACE
        stage = staging.ahead(prompt_in(tier, world, "later", 12), world.side.prefixes, None)
        assert eventually(lambda: stage.lookup.done)
        staging.look(stage)
        world.step()
        assert world.side.counters["chunks_fetching"] == LANES
        request = prompt_in(tier, world, "now", 12)
        assert world.side.lookup(request, 0) is LATER
        waiting: Any = world.side.requests.tracked["now"].stage
        assert eventually(lambda: waiting.lookup.done)
        world.step()
        assert world.side.lookup(request, 0) is LATER
        world.step()
        assert world.side.counters["chunks_fetching"] == LANES * ORDERS_PER_LANE
        assert len(waiting.waits) == LANES * (ORDERS_PER_LANE - 1)


def test_wait_of_a_lookup_is_measured_until_its_answer() -> None:
    """A request that was answered at once waited for 0 seconds. Each call of a tier is measured, too."""
    tier = HeldTier()
    with tiered(tier) as (world, staging):
        take = world.side.counters.durations.take
        world.admit(world.request("first", 1))
        assert take() == {"lookup_wait_seconds": {"": [0.0]}}
        staging.space.base = SPACE
        request, began_s = prompt_in(tier, world, "second", 1), time.monotonic()
        _fetched(world, staging, request)
        answered_s = time.monotonic() - began_s
        assert world.admit(request) == CHUNK * UNIT - 1
        took = take()
        assert len(took["lookup_seconds"][tier.name]) > 0
        (waited_s,) = took["lookup_wait_seconds"][""]
        assert 0 < waited_s < answered_s
        assert take() == {}


def _fetched(world: SchedulerWorld, staging: Any, request: Any) -> list[Any]:
    """Fetch the chunks of a request's prompt that tiers hold. Return the orders, all of which succeed."""
    assert world.side.lookup(request, 0) is LATER
    stage: Any = world.side.requests.tracked[request.request_id].stage
    assert eventually(lambda: stage.lookup.done)
    orders = []
    while world.side.lookup(request, 0) is LATER:
        planned = staging.plan(stores=True)
        for order in planned:
            staging.reported(order.id, ONE_OK)
        orders += planned
    return orders


def test_hits_of_a_tier_are_counted_from_zero() -> None:
    """The counter of hit tokens of a tier starts at 0. The first load from the tier counts exactly its tokens."""
    tier = HeldTier()
    with tiered(tier) as (world, staging):
        staging.space.base = SPACE
        request = prompt_in(tier, world, "a", 2)
        assert len(_fetched(world, staging, request)) == 2
        tokens = world.admit(request)
        assert tokens
        assert world.side.tracer.hit_tokens == {"memory": 0, tier.name: tokens}


def test_chunks_outside_of_a_window_are_not_fetched() -> None:
    """The last two chunks are fetched for a window of one chunk.

    Two chunks are needed, because the window may begin in the second last chunk.
    """
    tier = HeldTier()
    with tiered(tier, windows=(None, CHUNK * UNIT)) as (world, staging):
        staging.space.base = SPACE
        request = prompt_in(tier, world, "a", 3)
        names = [chunk_name(key) for key in request.block_hashes[CHUNK - 1 :: CHUNK]]
        for name in names:
            tier.values[Key(SPACE, name, 1, 0, 1).text] = b""
        orders = _fetched(world, staging, request)
        assert sorted(names.index(order.chunk) for order in orders if order.group == 0) == [0, 1, 2]
        assert sorted(names.index(order.chunk) for order in orders if order.group == 1) == [1, 2]


@pytest.mark.parametrize("waits", [False, True])
def test_chunk_counts_as_prefetched_when_no_request_waits_for_it(*, waits: bool) -> None:
    """The fetch of a chunk for which a request waits does not count as a prefetch."""
    tier = HeldTier()
    with tiered(tier) as (world, staging):
        staging.space.base = SPACE
        request = prompt_in(tier, world, "a", 1)
        if waits:
            (order,) = _fetched(world, staging, request)
        else:
            stage = staging.ahead(request, world.side.prefixes, None)
            assert eventually(lambda: stage.lookup.done)
            staging.look(stage)
            (order,) = staging.plan(stores=True)
            staging.reported(order.id, ONE_OK)
        assert world.side.counters["chunks_fetched"] == 1
        assert world.side.counters["chunks_prefetched"] == (not waits)
        assert len(world.side.catalog.ahead.chunks) == (not waits)


def test_namespace_reports_a_change_of_the_reason_for_one_layout() -> None:
    """A new reason is reported as a change, and so is the end of the last reason."""
    space = Namespace()
    changed = [space.bind(why) for why in ("", "caches", "caches", "weights", "", "")]
    assert changed == [False, True, False, True, True, False]
    assert space.bound == {"caches": 0.0, "weights": 0.0}


def test_request_takes_the_room_of_a_later_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The later request gives up its stage, even if this stage holds only chunks that were already in memory."""
    tier = HeldTier()
    with tiered(tier) as (world, staging):
        world.publish(world.request("old", CHUNK, shared=CHUNK))
        staging.space.base = SPACE
        first, last = prompt_in(tier, world, "first", 1), world.request("last", 2 * CHUNK, shared=CHUNK)
        tier.values[Key(SPACE, chunk_name(last.block_hashes[-1]), 0, 0, 1).text] = b""
        # `first` precedes `last` in the order of requests, although it is looked up last
        world.side.on_new_request(first)
        monkeypatch.setattr(type(staging), "_held_max", 1)
        for request in (last, first):
            world.side.lookup(request, 0)
            stage: Any = world.side.requests.tracked[request.request_id].stage
            assert eventually(functools.partial(getattr, stage.lookup, "done"))
            for _ in range(2):
                world.step()
                world.side.lookup(request, 0)
        assert world.side.counters["tier_gave_way"] == 1
        assert len(stage.waits) == 1
