"""Limits of a request: how much of it is loaded, saved and stored, and which tiers are asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from kvpipe.protocol.engine import LATER
from kvpipe.protocol.limits import RequestLimits, TierMatcher
from kvpipe.testing.held_tier import DictSpec, HeldTier
from kvpipe.testing.waiting import PATIENT, eventually
from kvpipe.tiers.base import Key
from kvpipe.tiers.guard import FIND, guarded
from kvpipe.tiers.prefix_keys import chunk_name
from tests.rigs.scheduler_world import UNIT, SchedulerWorld

SPACE, CHUNK, UNITS = "1" * 32, 4, 10
LOCAL, REMOTE = TierMatcher(None, "local"), TierMatcher(None, "remote")


def _arrive(world: SchedulerWorld, name: str, units: int = UNITS, **limits: Any) -> Any:
    """Return a new request with limits. All requests of this function begin with the same tokens."""
    request = world.request(name, units, shared=4 * UNITS)
    world.side.on_new_request(request, None, RequestLimits(**limits))
    return request


@pytest.mark.parametrize(
    ("tokens", "local", "hit"),
    [(0, 0, 0), (UNIT - 1, 0, 0), (UNIT, 0, 1), (5 * UNIT + 1, 0, 5), (3 * UNIT, 4, 3), (0, 4, 0), (99 * UNIT, 4, 6)],
)
@pytest.mark.parametrize("windows", [(None,), (None, 3 * UNIT), (2 * UNIT,)], ids=str)
def test_hit_ends_at_the_limit(windows: tuple[int | None, ...], tokens: int, local: int, hit: int) -> None:
    """The limit is rounded down to a unit. Tokens that the engine's own cache holds do not count towards the limit."""
    world = SchedulerWorld(chunk_units=CHUNK, windows=windows)
    world.publish(world.request("a", UNITS, shared=UNITS))
    request = _arrive(world, "b", UNITS + 1, load_tokens_max=tokens)
    expected = hit * UNIT
    assert [world.ask(request, local * UNIT) for _ in range(2)] == [expected, expected]


def test_limit_holds_again_after_a_preemption() -> None:
    """Each admission loads at most as much as the limit allows."""
    world = SchedulerWorld(chunk_units=CHUNK)
    world.publish(world.request("a", UNITS, shared=UNITS))
    request = _arrive(world, "b", load_tokens_max=2 * UNIT)
    assert world.admit(request) == 2 * UNIT
    world.succeed(*world.step(request))
    world.preempt(request)
    assert world.admit(request) == 2 * UNIT


@pytest.mark.parametrize(("tokens", "held", "why"), [
    (2 * UNIT, UNITS, "limit"), (2 * UNIT, 1, "not_saved"), (99 * UNIT, 5, "not_saved"), (0, 3, "limit"),
])  # fmt: skip
def test_miss_has_the_reason_limit_when_the_limit_ends_the_hit(tokens: int, held: int, why: str) -> None:
    """If the limit does not end the hit, the miss has the same reason as without a limit."""
    world = SchedulerWorld(chunk_units=CHUNK)
    world.publish(world.request("a", held, shared=held))
    request = _arrive(world, "b", load_tokens_max=tokens)
    world.ask(request)
    assert world.side.requests.tracked["b"].asking.why == why


@pytest.mark.parametrize(
    ("tokens", "saved"), [(0, 0), (UNIT - 1, 0), (UNIT, 1), (6 * UNIT + 1, 6), (8 * UNIT, 8), (99 * UNIT, UNITS)]
)
@pytest.mark.parametrize("steps", [1, 3])
def test_only_the_first_tokens_are_saved(tokens: int, saved: int, steps: int) -> None:
    """The limit is rounded down to a unit. The limit counts from the first token in all steps."""
    world = SchedulerWorld(chunk_units=CHUNK)
    request = _arrive(world, "a", UNITS - steps + 1, save_tokens_max=tokens)
    world.admit(request)
    for more in range(steps):
        world.grow(request, UNITS - steps + 1 + more)
        world.succeed(*world.step(request))
    assert world.found(request) == saved
    world.side.finished(request)
    assert world.ask(_arrive(world, "b", UNITS + 1)) == saved * UNIT
    assert world.side.counters["units_saved"] == saved


def test_limit_of_saves_applies_after_a_longer_hit() -> None:
    """A request may load more than it may save."""
    world = SchedulerWorld(chunk_units=CHUNK)
    world.publish(world.request("a", 6, shared=6))
    request = _arrive(world, "b", save_tokens_max=2 * UNIT)
    assert world.admit(request) == 6 * UNIT
    world.succeed(*world.step(request))
    assert world.found(request) == 6


def test_failed_save_is_retried_up_to_the_limit() -> None:
    """The retry saves no more than the first attempt."""
    world = SchedulerWorld(chunk_units=CHUNK)
    request = _arrive(world, "a", save_tokens_max=3 * UNIT)
    world.admit(request)
    (job,) = world.step(request)
    world.report((job, 0, 1))
    world.grow(request, UNITS + 1)
    world.succeed(*world.step(request))
    assert world.found(request) == 3


def test_end_of_the_saved_part_stays_found_when_another_request_extends_the_chunk() -> None:
    """A client may limit saves to the beginning that its prompts share, so that later prompts find this beginning."""
    world = SchedulerWorld(chunk_units=CHUNK)
    limited = _arrive(world, "a", save_tokens_max=2 * UNIT)
    world.admit(limited)
    world.succeed(*world.step(limited))
    world.publish(world.request("b", CHUNK, shared=CHUNK))
    assert world.ask(world.request("c", CHUNK, shared=2)) == 2 * UNIT


@pytest.mark.parametrize(("tokens", "saved"), [(8 * UNIT - 1, 0), (8 * UNIT, 1)])
def test_states_behind_the_limit_are_not_saved(tokens: int, saved: int) -> None:
    """A state after 8 units counts as the tokens of all 8 units, so a limit below 8 units excludes the state."""
    world = SchedulerWorld(windows=(None, None), states=(1,), chunk_units=CHUNK)
    request = _arrive(world, "a", 9, save_tokens_max=tokens)
    world.admit(request)
    world.step(request, boundaries=(8,))
    assert world.side.counters["states_saved"] == saved


@contextmanager
def _tiered(store: str = "all") -> Iterator[tuple[SchedulerWorld, Any, list[HeldTier]]]:
    """Yield a scheduler side with a local and a remote tier, its staging, and the tiers."""
    tiers = [HeldTier("local"), HeldTier("remote")]
    specs = [DictSpec.model_validate(PATIENT | {"announce": tier.name, "store": store}) for tier in tiers]
    made = [(tier.name, spec, tier) for tier, spec in zip(tiers, specs, strict=True)]
    world = SchedulerWorld(tiers=guarded(made, (FIND,)), chunk_units=CHUNK)
    try:
        yield world, world.side.staging, tiers
    finally:
        world.side.shutdown()


def _fill(tier: HeldTier, request: Any, ends: range) -> None:
    for end in ends:
        tier.values[Key(SPACE, chunk_name(request.block_hashes[end - 1]), 0, 0, 1).text] = b""


def _orders(world: SchedulerWorld, staging: Any) -> list[Any]:
    """Return the fetches that are ordered for the only request."""
    (tracked,) = world.side.requests.tracked.values()
    stage: Any = tracked.stage
    assert eventually(lambda: stage.lookup.done)
    return [*staging.plan(stores=False), *staging.plan(stores=False)]


@pytest.mark.parametrize(
    ("matchers", "orders"),
    [(None, [0, 0]), ({LOCAL}, [0, 0]), ({REMOTE}, [1, 1]), ({LOCAL, REMOTE}, [0, 0]), ({TierMatcher()}, [0, 0]),
     ({TierMatcher("storage")}, [0, 0]), ({TierMatcher("cpu")}, None), ({TierMatcher("cpu"), REMOTE}, [1, 1]),
     ((), None)],
)  # fmt: skip
def test_only_tiers_that_a_matcher_stands_for_are_asked(matchers: Any, orders: list[int] | None) -> None:
    """If no matcher selects a tier, no tier is asked and the lookup does not wait."""
    with _tiered() as (world, staging, tiers):
        staging.space.base = SPACE
        request = _arrive(world, "a", 2 * CHUNK, load_tiers=None if matchers is None else frozenset(matchers))
        for tier in tiers:
            _fill(tier, request, range(CHUNK, 2 * CHUNK + 1, CHUNK))
        if orders is None:
            assert world.ask(request) == 0
            return
        assert world.side.lookup(request, 0) is LATER
        assert [order.tier for order in _orders(world, staging)] == orders


def test_memory_counts_although_no_tier_may_be_asked() -> None:
    """Every load goes through host memory, so no matcher excludes the chunks in host memory."""
    with _tiered() as (world, staging, _):
        world.publish(world.request("a", UNITS, shared=UNITS))
        staging.space.base = SPACE
        assert world.ask(_arrive(world, "b", UNITS + 1, load_tiers=frozenset())) == UNITS * UNIT


@pytest.mark.parametrize(("tokens", "units"), [(2 * CHUNK * UNIT - 1, [CHUNK]), (2 * CHUNK * UNIT, [CHUNK] * 2)])
def test_chunks_behind_the_limit_are_not_fetched(tokens: int, units: list[int]) -> None:
    """If the limit ends within a chunk, this chunk is not fetched, because a tier returns only whole chunks."""
    with _tiered() as (world, staging, tiers):
        staging.space.base = SPACE
        request = _arrive(world, "a", 4 * CHUNK, load_tokens_max=tokens)
        _fill(tiers[0], request, range(CHUNK, 4 * CHUNK + 1, CHUNK))
        assert world.side.lookup(request, 0) is LATER
        assert [order.units for order in _orders(world, staging)] == units


def test_no_tier_is_asked_when_nothing_may_be_loaded() -> None:
    """A lookup of such a request does not wait."""
    with _tiered() as (world, staging, tiers):
        staging.space.base = SPACE
        request = _arrive(world, "a", 4 * CHUNK, load_tokens_max=0)
        _fill(tiers[0], request, range(CHUNK, 4 * CHUNK + 1, CHUNK))
        assert world.ask(request) == 0
        assert not world.side.counters["tier_lookup"]


@pytest.mark.parametrize(("tokens", "stored"), [(None, 4), (CHUNK * UNIT, 2), (0, 0)])
def test_chunks_behind_the_limit_are_not_stored_at_a_second_use(tokens: int | None, stored: int) -> None:
    """Two tiers store a chunk only when a second request uses it.

    The limit of this second request also applies to the stores.
    """
    with _tiered(store="second_use") as (world, staging, _):
        world.publish(world.request("a", 2 * CHUNK, shared=2 * CHUNK))
        request = _arrive(world, "b", 2 * CHUNK + 1, save_tokens_max=tokens)
        assert world.admit(request) == 2 * CHUNK * UNIT
        staging.space.base = SPACE
        chunks: list[Any] = world.side.prefixes.chunks(0, request.block_hashes, 0, 2 * CHUNK)
        world.side.events.leased(world.side.requests.tracked["b"], chunks)
        assert len(staging.plan(stores=True)) == stored


def test_repeated_lookups_keep_the_prompt_that_they_want_when_its_limit_stays() -> None:
    """vLLM repeats a lookup in each step while the request waits.

    All these lookups use the same description of the prompt.
    """
    with _tiered() as (world, staging, _):
        staging.space.base = SPACE
        request = _arrive(world, "a")
        world.side.lookup(request, 0)
        stage = world.side.requests.tracked["a"].stage
        assert stage is not None
        wanted = stage.wanted
        world.step()
        world.side.lookup(request, 0)
        assert stage.wanted is wanted


def test_loads_search_no_keys_when_no_tier_stores_at_the_second_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without such a tier, the limit on saves can forbid no store, so a load searches no keys."""
    with _tiered() as (world, staging, _):
        _arrive(world, "a", save_tokens_max=UNIT)
        without = dataclasses.replace(staging.stores._context, prefixes=cast("Any", None))
        monkeypatch.setattr(staging.stores, "_context", without)
        staging.stores.leased(world.side.requests.tracked["a"], [])
