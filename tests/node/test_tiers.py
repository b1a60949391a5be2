"""Engines on one memory store their chunks in a tier, and fetch chunks from the tier into granted slots."""

from __future__ import annotations

from struct import unpack
from typing import Any

import pytest

from kvpipe.protocol.engine import LATER
from kvpipe.protocol.messages import Report, Tally
from kvpipe.scheduler.stages import Stage
from kvpipe.statemachine import node_link as link_m
from kvpipe.statemachine import stage as stage_m
from kvpipe.testing.waiting import eventually
from kvpipe.tiers.base import Key
from kvpipe.tiers.prefix_keys import chunk_name
from tests.node.test_catalog import CHUNK
from tests.node.tiered_worlds import SPACE, UNIT_TOKENS, TieredWorld, TieredWorlds
from tests.rigs.node_replica import evict_all


def _fill(tiered: TieredWorlds, name: str = "one", units: int = 8) -> TieredWorld:
    """Store a prompt in the tier, and evict it from the memory. Returns the engine that has stored it."""
    world = tiered.start()
    request = world.request(name, units, shared=units)
    world.run(request)
    assert len(world.store_all()) == -(-units // CHUNK)
    evict_all(tiered.node.keeper)
    world.step()
    assert world.found(request) == 0
    return world


def _fetching(tiered: TieredWorlds) -> tuple[TieredWorld, Any, Stage]:
    """Let another engine fetch two chunks that only the tier has. Returns this engine, its request and the stage."""
    _fill(tiered)
    world = tiered.start()
    request = world.request("other", 8, shared=8, extra=1)
    stage = world.want(request)
    world.step()
    return world, request, stage


def test_chunk_is_stored_after_its_publication(tiered: TieredWorlds) -> None:
    """While no holder answers, nothing is stored. An idle engine takes no steps in order to store later."""
    first = tiered.start()
    request = first.request("one", 8)
    first.requests = [request]
    first.admit(request)
    (job,) = first.step(request)
    first.pool.mute = True
    first.end(job)
    first.step()
    assert not first.begun
    assert not first.staging.pending
    first.pool.mute = False
    assert len(first.store_all()) == 2
    first.check()


def test_only_the_engine_that_wrote_a_chunk_stores_it(tiered: TieredWorlds) -> None:
    """Another engine that loads the chunk does not order a store. The last chunk of a prompt is stored, too."""
    first, second = tiered.start(), tiered.start()
    one = first.request("one", 6, shared=6)
    first.run(one)
    second.step()
    other = second.request("other", 6, shared=6, extra=1)
    assert second.ask(other) == 6 * UNIT_TOKENS
    second.run(other)
    assert not second.store_all()
    assert sorted(order.units for order in first.store_all()) == [2, CHUNK]
    assert len(tiered.tier.values) == 2


@pytest.mark.parametrize("is_late", [False, True])
def test_tier_gets_the_next_store_when_a_chunk_was_damaged(tiered: TieredWorlds, *, is_late: bool) -> None:
    """The tier has not failed. If `is_late`, another rank reports the store after the rank that noticed the damage."""
    first = tiered.start()
    first.staging.stores._in_flight_max = 1
    first.run(first.request("one", 8))
    first.step()
    (order,) = first.begun
    damaged, tallies = dict([unpack("<2Q", order.stamp)]), {order.id: Tally(0, 1)}
    if is_late:
        first.side.reported(Report({}, damaged=damaged))
    first.begun.clear()
    first.side.reported(Report(tallies, damaged={} if is_late else damaged))
    assert first.side.counters["chunks_not_stored"] == 1
    assert not first.side.counters["store_dropped_tier_failed"]
    assert len(first.store_all()) == 1


def test_part_of_a_prompt_is_stored_before_its_request_ends(tiered: TieredWorlds) -> None:
    """The request continues in another slot, so the chunk that ends with the prompt grows no more."""
    first = tiered.start()
    one = first.request("one", 6)
    first.begin(one, 6, 7)
    assert sorted(order.units for order in first.store_all()) == [2, CHUNK]
    first.side.finished(one)
    assert [order.units for order in first.store_all()] == [3]


def test_slot_of_a_store_is_not_reused_before_the_store_has_landed(tiered: TieredWorlds) -> None:
    """The holder evicts the chunk during the store. The slot is free when all ranks have reported the store."""
    first, second = tiered.start(), tiered.start(stock=8)
    one = first.request("one", 8)
    first.run(one)
    first.step()
    assert len(first.begun) == 2
    evict_all(tiered.node.keeper)
    for name in "abcde":
        second.run(second.request(name, 8))
    assert tiered.node.keeper.usage().evicting == 2
    first.carry()
    first.carry()
    first.step()
    assert tiered.node.keeper.usage().evicting == 0
    assert first.side.counters["chunks_stored"] == 2
    first.check()


def test_chunk_that_was_evicted_before_its_turn_is_not_stored(tiered: TieredWorlds) -> None:
    """The engine has not read the eviction in the journal when it would store the chunk."""
    first = tiered.start()
    first.staging.stores._in_flight_max = 1
    first.run(first.request("one", 8))
    assert len(first.begun) == 1
    evict_all(tiered.node.keeper)
    first.carry()
    first.step()
    assert not first.begun
    assert first.side.counters["store_dropped_evicted"] == 1
    first.check()


def test_fetched_chunks_are_found_by_other_engines(tiered: TieredWorlds) -> None:
    """Fetched chunks are published when all ranks have them. Then the request continues with its whole hit."""
    second, request, stage = _fetching(tiered)
    second.pool.slow = True
    third = tiered.start()
    assert [order.stores for order in second.begun] == [False, False]
    assert stage.state.row == stage_m.FETCHING
    for landed in range(2):
        assert third.found(request) == 0
        second.carry(at=-1)
        assert second.side.lookup(request, 0) is LATER
        assert landed or tiered.node.keeper.usage().published == 0
    for _ in range(3):
        second.step()
    third.step()
    assert third.found(request) == 8
    assert second.admit(request) == 8 * UNIT_TOKENS
    for job in second.step(request):
        second.end(job)
    second.side.finished(request)
    assert not second.store_all()
    assert third.ask(third.request("third", 8, shared=8, extra=1)) == 8 * UNIT_TOKENS
    assert second.side.tracer.hit_tokens[tiered.tier.name] == 8 * UNIT_TOKENS
    second.check()
    third.check()


def test_prefetched_chunk_is_noted_for_a_request_that_joins_the_fetch(tiered: TieredWorlds) -> None:
    """The prefetch has no request, and only a request has the tokens of events."""
    world = tiered.start()
    request, noted = world.in_tier("one", 4), list[Any]()
    world.side.events.fetched = lambda of, _: noted.append(of)
    ahead = world.staging.ahead(request, world.side.prefixes, None)
    assert ahead is not None
    assert eventually(lambda: ahead.lookup.done)
    world.staging.look(ahead)
    world.step()
    assert len(world.begun) == 1
    world.want(request)
    world.step()
    world.carry()
    assert noted == [request]


def test_fetched_chunk_is_published_when_the_last_rank_has_landed(tiered: TieredWorlds) -> None:
    """Until the copies of all ranks have landed, no engine finds the chunk, and its slot stays the writer's."""
    world = tiered.start(ranks=2)
    request = world.request("one", 4, extra=1)
    for rank in range(2):
        tiered.tier.values[Key(SPACE, chunk_name(request.block_hashes[-1]), 0, rank, 2).text] = b""
    world.want(request)
    world.step()
    (order,) = world.begun
    world.copy(order)
    for published in (0, 1):
        world.side.reported(Report({order.id: Tally(1, 0)}))
        for _ in range(3):
            world.step()
        assert tiered.node.keeper.usage().published == published
        assert world.found(request) == 4 * published
    world.begun.clear()
    world.check()


def test_failed_fetch_returns_its_slot(tiered: TieredWorlds) -> None:
    """The request continues with the chunks before the failed chunk."""
    second, request, _ = _fetching(tiered)
    free = second.pool.stock.free
    second.pool.mute = True
    second.carry()
    second.carry(ok=False)
    assert second.pool.stock.free == free + 1
    second.pool.mute = False
    for _ in range(3):
        second.step()
    assert second.admit(request) == 4 * UNIT_TOKENS
    second.check()


def test_fetches_wait_for_slots_when_the_stock_is_empty(tiered: TieredWorlds) -> None:
    """The holder grants more slots in the next steps. All requests get their whole hits, and no stage ends early."""
    world = tiered.start(stock=2)
    asked = [world.in_tier(name, 12) for name in "ab"]
    stages = [world.want(request) for request in asked]
    world.step()
    assert [stage.state.row for stage in stages] == [stage_m.FETCHING] * 2
    assert [world.ask(request) for request in asked] == [12 * UNIT_TOKENS] * 2
    assert not world.side.counters["tier_no_room"]
    assert not world.side.counters["tier_gave_way"]
    world.check()


@pytest.mark.parametrize("lost", [False, True])
def test_fetch_is_shorter_when_the_stock_stays_empty(tiered: TieredWorlds, *, lost: bool) -> None:
    """The request waits no longer than `lookup_ms_max`, and not at all without a holder."""
    world = tiered.start(stock=2)
    request = world.in_tier("a", 12)
    stage = world.want(request)
    if lost:
        world.pool.link.fire(link_m.HOLDER_LOST)
    world.pool.mute = True
    world.step()
    assert world.side.counters["tier_no_room"] == lost
    world.carry()
    world.carry()
    world.pool.mute = lost
    world.pool.stock.wanted = 0
    for _ in range(3):
        world.step()
    if not lost:
        assert world.side.lookup(request, 0) is LATER
        stage.waited_s = world.staging.patience.lookup_s_max
        assert world.ask(request) == 8 * UNIT_TOKENS
    assert stage.state.row == stage_m.HELD
    world.check()


def test_fetch_of_a_published_chunk_returns_its_slot(tiered: TieredWorlds) -> None:
    """Both engines fetch the chunk at once. The fetch that lands first is published, and no slot is lost."""
    _fill(tiered)
    engines = [tiered.start(), tiered.start()]
    asked = [engine.request(str(at), 8, shared=8, extra=1) for at, engine in enumerate(engines)]
    for engine, request in zip(engines, asked, strict=True):
        engine.want(request)
        engine.step()
    for engine in engines:
        engine.carry()
        engine.carry()
    for engine in engines * 3:
        engine.step()
    for engine, request in zip(engines, asked, strict=True):
        assert engine.admit(request) == 8 * UNIT_TOKENS
        engine.check()
    usage = tiered.node.keeper.usage()
    assert usage.published == 2
    assert usage.granted == sum(engine.pool.stock.free for engine in tiered.engines)  # type: ignore[attr-defined]


def test_chunk_in_memory_that_is_evicted_before_the_plan_is_no_fault(tiered: TieredWorlds) -> None:
    """Memory held the second chunk, so only the first chunk was fetched. The hit ends after the first chunk."""
    _fill(tiered)
    second, keeper = tiered.start(), tiered.node.keeper
    request, longer = (second.request(name, 8, shared=8, extra=1) for name in ("one", "two"))
    assert second.ask(request) == 8 * UNIT_TOKENS
    second.side.finished(request)
    second.step()
    tiered.evict(request.block_hashes[3])
    second.step()
    assert [*second.want(longer).lookup.found] == [(0, 4)]
    evict_all(keeper)
    second.step()
    assert [order.units for order in second.begun] == [4]
    second.carry()
    for _ in range(3):
        second.step()
    assert second.ask(longer) == 4 * UNIT_TOKENS
    assert not second.side.counters.faults
    second.check()


def test_engine_without_a_holder_does_not_wait_for_tiers(tiered: TieredWorlds) -> None:
    """A request continues even if it waits for a landed fetch. The next holder publishes the fetched chunks."""
    second, request, stage = _fetching(tiered)
    second.pool.mute = True
    second.carry()
    second.carry()
    second.step()
    assert second.side.lookup(request, 0) is LATER
    second.pool.link.fire(link_m.HOLDER_LOST)
    second.step()
    assert second.ask(request) == 0
    assert not stage.holds_up
    assert second.ask(second.request("third", 8, shared=8, extra=1)) == 0
    tiered.node.take_over()
    second.pool.link.fire(link_m.WELCOME)
    second.pool.mute = False
    for _ in range(3):
        second.step()
    assert second.found(request) == 8
    second.check()


@pytest.mark.parametrize("landed", [0, 1, 2])
def test_reset_during_a_fetch_publishes_nothing_more(tiered: TieredWorlds, landed: int) -> None:
    """Slots of the fetches in flight return to the stock when all ranks have reported."""
    second, _, _ = _fetching(tiered)
    for _ in range(landed):
        second.carry()
    second.side.reset()
    second.check()
    while second.begun:
        second.carry()
    for _ in range(4):
        second.step()
    assert not second.catalog.used
    assert not second.catalog.leases
    assert not second.staging._fetching
    assert tiered.node.keeper.usage().published == landed
    second.check()


@pytest.mark.parametrize("landed", [False, True])
def test_fetch_continues_under_another_holder(tiered: TieredWorlds, *, landed: bool) -> None:
    """The engine reports its grants to the new holder. So no slot is lost, and the fetched chunks are published."""
    second, request, _ = _fetching(tiered)
    if not landed:
        tiered.node.take_over()
    second.carry()
    second.carry()
    if landed:
        tiered.node.take_over()
    for _ in range(4):
        second.step()
    assert second.admit(request) == 8 * UNIT_TOKENS
    second.check()


def test_engine_that_ends_during_a_fetch_leaves_no_slot_behind(tiered: TieredWorlds) -> None:
    """Other engines find no chunk of the fetch, and get the fetch's slots."""
    second, _, _ = _fetching(tiered)
    second.pool.mute = True
    second.carry()
    second.pool.die()
    usage = tiered.node.keeper.usage()
    assert usage.granted == tiered.engines[0].pool.stock.free
    assert usage.published == 0
