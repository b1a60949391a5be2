"""The scheduler side of tiers without an engine: namespaces, stores, and lanes of prefetches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvpipe.connectors.vllm.trial.scheduler_world import SchedulerWorld
from kvpipe.messages import ONE_BAD, ONE_OK
from kvpipe.scheduler.base import LATER
from kvpipe.scheduler.fetches import ORDERS_PER_LANE
from kvpipe.scheduler.stores import REST_STEPS
from kvpipe.testing.held_tier import DictSpec, HeldTier
from kvpipe.testing.waiting import PATIENT, eventually
from kvpipe.tiers.base import Key
from kvpipe.tiers.finder import chunk_name
from kvpipe.tiers.guard import FIND, guarded

SPACE, CHUNK, LANES = "1" * 32, 4, 2


@contextmanager
def tiered(*tiers: HeldTier, **world: Any) -> Iterator[tuple[SchedulerWorld, Any]]:
    """Yield a scheduler side with tiers, and its staging. No rank carries out orders."""
    spec = DictSpec.model_validate(PATIENT | {"lanes": LANES})
    uses = guarded([(tier.name, spec, tier) for tier in tiers], (FIND,))
    made = SchedulerWorld(tiers=uses, chunk_units=CHUNK, **world)
    try:
        yield made, made.side.staging
    finally:
        made.side.shutdown()


def prompt_in(tier: HeldTier, world: SchedulerWorld, name: str, chunks: int) -> Any:
    """Return a request for a prompt of so many chunks, all of which the tier holds."""
    request = world.request(name, chunks * CHUNK)
    for key in request.block_hashes[CHUNK - 1 :: CHUNK]:
        tier.values[Key(SPACE, chunk_name(key), 0, 0, 1).text] = b""
    return request


@pytest.mark.parametrize("restarted", [False, True])
def test_both_namespaces_follow_the_weights(*, restarted: bool) -> None:
    """Ranks report new weights after a call of the engine, or because the engine has restarted them."""
    with tiered(HeldTier(), also_of="layout of {}".format) as (world, staging):
        world.side.ranks_ready({0: 256}, ["first"])
        assert (staging.space.name, staging.space.also) == ("first", "layout of first")
        for digest in ("second", "", "first"):
            if restarted:
                world.side.ranks_ready({0: 256}, [digest])
            else:
                world.side.weights.suspect()
                world.side.weighed({0: (world.side.weights.ask(), digest)})
            assert staging.space.name == digest
            assert staging.space.also == (f"layout of {digest}" if digest else "")


@pytest.mark.parametrize("late", [False, True])
def test_last_chunk_of_a_request_is_stored_when_its_save_lands(*, late: bool) -> None:
    """The request may end before that, or after it. A chunk that the request may still fill is not stored."""
    with tiered(HeldTier()) as (world, staging):
        request = world.request("a", CHUNK + 2)
        world.admit(request)
        staging.space.base = SPACE  # only now, because a lookup would wait for the tier
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
    """Report all stores that so many steps plan, and return their tiers."""
    tiers = []
    for _ in range(steps):
        for order in staging.plan(stores=True):
            tiers.append(order.tier)
            staging.reported(order.id, ONE_OK)
    return tiers


def test_tier_gets_its_stores_when_a_store_in_another_tier_fails() -> None:
    """The other tier gets none for some steps, and what was offered to it is dropped."""
    with tiered(HeldTier("near"), HeldTier("far")) as (world, staging):
        requests = [world.request(name, CHUNK) for name in "abcd"]
        for request in requests:
            world.admit(request)
        staging.space.base, staging.stores._in_flight_max = SPACE, 1
        world.succeed(*world.step(*requests[:2]))
        (order,) = staging.plan(stores=True)
        assert order.tier == 0
        staging.reported(order.id, ONE_BAD)
        assert _stored_in(staging, 3) == [1, 1]
        world.succeed(*world.step(requests[2]))
        assert _stored_in(staging, 3) == [1]
        assert world.side.counters["store_dropped_tier_failed"] == 2
        assert _stored_in(staging, REST_STEPS) == []
        world.succeed(*world.step(requests[3]))
        assert _stored_in(staging, 3) == [0, 1]


def test_prefetches_leave_lanes_of_a_tier_to_requests() -> None:
    """A prefetch takes one order per lane. A request that comes then is fetched at once, up to the tier's limit."""
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
