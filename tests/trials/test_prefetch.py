"""A prompt's chunks are prefetched from tiers before a request needs them, in trials of vLLM's real scheduler."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvpipe.connectors.vllm.trial.arrivals import carry_out
from kvpipe.connectors.vllm.trial.shapes import SHAPES
from kvpipe.features.announced import KnownPrompt
from kvpipe.features.orders import Order, OrderRefusedError
from kvpipe.features.prefetch import PREFETCHES_MAX, WarmedPrompt
from kvpipe.scheduler.stages import AHEAD_S_MAX
from kvpipe.statemachine import stage as m
from tests.trials.test_fetches import ADD, SHAPE, Played, in_play

ROOMY = SHAPE._replace(pool_slots=24)
STEPS: tuple[tuple[object, ...], ...] = (("schedule",), ("update",))


def warm(played: Played, index: int = -1, seconds: float = 0, **more: Any) -> Order:
    """Order the prefetch of a finished request's prompt."""
    one = played.trial.over[index]
    asked: Any = played.trial.answered(one, one.sequence.prompt, one.output)
    side, prompt = played.trial.side, KnownPrompt(asked.block_hashes, asked.num_tokens)
    return side.orders.queue_change(lambda: side.prefetching.warm(prompt, asked, seconds), **more)


def warmed(order: Order) -> WarmedPrompt:
    """Return the result of an order that has ended."""
    assert order.over
    assert not order.refused
    assert isinstance(order.result, WarmedPrompt)
    return order.result


def finish(played: Played, order: Order) -> WarmedPrompt:
    """Let another request make the engine step until the order is carried out."""
    played.do(("add", 3, 60, 0, 3, 0, 0), *STEPS, ("drain",))
    assert not played.trial.side.pending
    return warmed(order)


@pytest.mark.parametrize("name", ["tier", "two-tiers", "async-scheduler-tier", "tier-hybrid"])
def test_warmed_prompt_is_a_hit_in_memory(name: str) -> None:
    """A request for a warmed prompt waits for no tier, and the prefetched chunks count as used."""
    with in_play(SHAPES[name]._replace(pool_slots=32)) as played:
        done = finish(played, warm(played))
        counters = played.trial.side.counters
        assert done.tokens >= 128
        assert done.fetched_tokens >= 128
        assert counters["chunks_prefetched"] > 0
        assert (counters["prefetch_used"], counters["prefetch_wasted"]) == (0, 0)
        assert not played.staging.owners
        before = dict(played.trial.side.tracer.hit_tokens)
        lookups = counters["tier_lookup"]
        after = played.run()
        assert after["memory"] - before["memory"] >= 128
        assert {name: after.get(name, 0) - before.get(name, 0) for name in played.staging.names} == dict.fromkeys(
            played.staging.names, 0
        )
        # one lookup more may ask for the chunk in which the prompt ends
        assert counters["tier_lookup"] <= lookups + 1
        assert 0 < counters["prefetch_used"] <= counters["chunks_prefetched"]


def test_prefetch_with_an_impossible_pin_is_refused() -> None:
    """An order is refused at once if the pin would last longer than `manage_pin_s_max`."""
    with in_play(ROOMY) as played:
        order = warm(played, seconds=1e6)
        played.do(("add", 3, 60, 0, 3, 0, 0), *STEPS, ("drain",))
        assert "manage_pin_s_max" in order.refused
        assert played.trial.side.counters["chunks_prefetched"] == 0


def test_prefetched_chunk_counts_as_wasted_when_it_is_evicted_unused() -> None:
    """Each prefetched chunk counts once, as used or as evicted before its use."""
    with in_play(ROOMY) as played:
        finish(played, warm(played))
        brought, catalog = played.trial.side.counters["chunks_prefetched"], played.trial.side.catalog
        assert brought > 0
        for chunk in [*catalog.ahead.chunks]:
            catalog.evict(chunk)
        assert played.trial.side.counters["prefetch_wasted"] == brought
        assert played.trial.side.counters["prefetch_used"] == 0


def test_warmed_prompt_stays_in_memory_until_its_pin_ends() -> None:
    """A warmed prompt that is pinned stays in memory until the pin ends."""
    with in_play(ROOMY) as played:
        played.trial.side.pins.clock = lambda: 0.0
        order = warm(played, seconds=10)
        played.do(("add", 3, 60, 0, 9, 0, 0), *STEPS * 8)
        done = warmed(order)
        assert (done.pin, done.left_s) == (1, 10)
        assert done.tokens >= 128
        assert played.trial.side.pins.chunks > 0
        played.do(("drain",))


def test_request_does_not_wait_for_a_prefetch() -> None:
    """A request that arrives during the prefetch is scheduled in the same pass, even if the tier does not answer."""
    with in_play(ROOMY) as played:
        played.do(("hold", True))
        order = warm(played)
        played.do(("add", 3, 60, 0, 3, 0, 0), *STEPS)
        played.do(("add", 3, 20, 0, 3, 0, 0), ("schedule",))
        assert played.trial.scheduler.running
        assert not order.over
        played.do(("hold", False), ("update",), ("drain",))
        assert warmed(order).fetched_tokens >= 128


def test_fetch_in_flight_serves_prefetch_and_request() -> None:
    """One fetch of a chunk serves both the prefetch and the request, and counts for the request."""
    with in_play(ROOMY) as played:
        counters = played.trial.side.counters
        order = warm(played)
        played.do(("add", 3, 60, 0, 3, 0, 0), *STEPS * 2, ("hold", True), ADD, *STEPS * 2, ("hold", False), ("drain",))
        assert warmed(order).tokens >= 128
        assert counters["chunks_fetching"] <= len(played.trial.tiers[0].values)


@pytest.mark.parametrize("steps", range(7))
def test_reset_ends_a_prefetch_in_any_state(steps: int) -> None:
    """After a reset in any state of the prefetch, nothing is held, and no chunk from before the reset is found."""
    with in_play(ROOMY) as played:
        order = warm(played)
        played.do(("add", 3, 60, 0, 9, 0, 0), *STEPS * (steps // 2), *STEPS[: steps % 2], ("reset", True, False))
        played.do(("drain",))
        assert warmed(order).tokens == 0
        assert not played.staging.owners
        assert not played.trial.side.pending
        played.watched.after_drain()
        assert not played.watched.broken


def test_prefetch_ends_when_a_tier_does_not_answer() -> None:
    """A tier that does not answer delays the order for a limited time, and does not delay the engine."""
    with in_play(ROOMY) as played:
        played.do(("hold", True))
        order = warm(played)
        played.do(("add", 3, 60, 0, 9, 0, 0), *STEPS * 2)
        assert played.trial.side.pending
        assert not order.over
        played.do(("late",), *STEPS * 2)
        assert warmed(order).fetched_tokens == 0
        assert played.trial.side.counters["prefetch_late"] == 1
        played.do(("hold", False), ("drain",))


def test_an_engine_that_has_nothing_to_do_begins_with_its_next_step() -> None:
    """The operators' thread carries out orders of an idle engine.

    But a prefetch begins only with the next step, because ranks get tier orders in steps.
    """
    with in_play(ROOMY) as played:
        side = played.trial.side
        assert not side.pending
        lookups, order = side.counters["tier_lookup"], warm(played)
        carry_out(played.trial)
        assert not order.over
        assert side.counters["tier_lookup"] == lookups
        assert finish(played, order).fetched_tokens >= 128


def test_bypass_ends_prefetches() -> None:
    """After bypass is switched on, no more chunks are requested from tiers, and nothing is held."""
    with in_play(ROOMY) as played:
        played.do(("hold", True))
        order = warm(played)
        played.do(("add", 3, 60, 0, 9, 0, 0), *STEPS * 2)
        played.trial.side.switches.bypass = True
        played.do(*STEPS * 2)
        assert warmed(order).fetched_tokens == 0
        assert not played.staging.owners
        played.do(("hold", False), ("drain",))


@pytest.mark.parametrize("kind", ["forgets", "damages", "cuts", "down"])
def test_prefetch_ends_with_the_chunks_before_a_failed_fetch(kind: str) -> None:
    """If some chunks cannot be fetched, the order ends with the chunks before them."""
    with in_play(ROOMY) as played:
        played.trial.excused |= {"tier_failed", "chunk_damaged"}
        order = warm(played)
        played.do(("add", 3, 60, 0, 9, 0, 0), *STEPS, ("schedule",))
        played.trial.tiers[0].trouble = kind
        played.do(("drain",))
        assert warmed(order).fetched_tokens < 192


def test_prefetch_keeps_to_its_share_of_the_pool() -> None:
    """The prefetch begins with the prompt's first chunk. The prefetch uses at most all lanes."""
    for slots, tokens in ((4, 128), (24, 192)):
        with in_play(SHAPE._replace(pool_slots=slots)) as played:
            played.staging._fetches_max = [1]
            order = warm(played)
            for _ in range(5):
                played.do(("add", 3, 10, 0, 9, 0, 0), *STEPS)
                assert len(played.staging._fetching) <= 1
            played.do(("drain",))
            assert warmed(order).fetched_tokens == tokens


def test_prefetch_ends_when_a_waiting_request_needs_its_room() -> None:
    """If there is no room for both a request and a prefetch, the request's chunks are fetched and the prefetch ends."""
    with in_play(SHAPE._replace(pool_slots=8)) as played:
        order = warm(played)
        played.do(
            ("add", 3, 10, 0, 9, 0, 0), *STEPS, ("hold", True), *STEPS, ("add", 1, 199, 0, 3, 0, 0), ("schedule",)
        )
        ahead, demand = sorted(played.staging._stages, key=lambda stage: not stage.ahead)
        assert (ahead.state.name, demand.state.name) == (m.ASKING, m.ASKING)
        assert played.staging._room(demand, 6) == 6
        assert played.staging._room(ahead, 6) == 2
        assert ahead in played.staging._stages
        assert played.staging._room(demand, 7) == 6
        assert ahead not in played.staging._stages
        assert played.trial.side.counters["prefetch_gave_way"] == 1
        played.do(("hold", False), ("update",), ("drain",))
        assert warmed(order).fetched_tokens == 0


def test_prompts_are_prefetched_one_after_the_other() -> None:
    """A limited number of prefetches wait, and any further prefetch is refused.

    Other orders are carried out while prefetches wait.
    """
    with in_play(ROOMY) as played:
        played.trial.side.orders.slice_s_max = float("inf")
        played.do(("hold", True))
        orders = [warm(played) for _ in range(PREFETCHES_MAX + 1)]
        played.do(("add", 3, 60, 0, 9, 0, 0), *STEPS * 2)
        other = played.trial.side.orders.queue_change(lambda: played.trial.side.pins.unpin(7))
        played.do(*STEPS)
        assert other.refused == "pin: there is no pin 7"
        assert [order.over for order in orders] == [False] * PREFETCHES_MAX + [True]
        assert orders[-1].refused == f"{PREFETCHES_MAX} prompts are being fetched, or wait to be fetched, already"
        played.do(("hold", False), ("drain",))
        assert all(warmed(order).tokens >= 128 for order in orders[:-1])


def test_waiting_prefetch_ends_after_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiting prefetch also ends after a time limit, because vLLM's pause and sleep wait for all prefetches."""
    with in_play(ROOMY) as played:
        played.do(("hold", True))
        played.trial.side.orders.slice_s_max = float("inf")
        orders = [warm(played) for _ in range(PREFETCHES_MAX)]
        played.do(("add", 3, 60, 0, 9, 0, 0), *STEPS * 2)
        assert not any(order.over for order in orders)
        now_s = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now_s + AHEAD_S_MAX)
        played.do(*STEPS)
        monkeypatch.undo()
        played.do(*STEPS)
        assert all(order.over for order in orders)
        assert not played.trial.side.prefetching.has_work()
        played.do(("hold", False), ("drain",))


@pytest.mark.parametrize(
    ("switched", "why"),
    [
        ("bypass", "loads nothing now"),
        ("tier_lost", "loads nothing now"),
        ("doubtful", "weights"),
        ("tiers", "no tiers"),
    ],
)
def test_prefetch_is_refused_if_no_request_is_served_from_tiers(switched: str, why: str) -> None:
    """A prefetch is refused if no request would be served from tiers."""
    with in_play(ROOMY) as played:
        side = played.trial.side
        if switched == "doubtful":
            side.weights.suspect()
        elif switched == "tiers":
            side.prefetching._staging = None
        else:
            setattr(side.switches, switched, True)
        with pytest.raises(OrderRefusedError, match=why):
            side.prefetching.queue(KnownPrompt((), 0))
