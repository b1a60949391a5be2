"""Tests of orders, pins and evictions on the scheduler side."""

from __future__ import annotations

import contextlib
import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from kvpipe.cache.chunks import Owner
from kvpipe.cache.leases import oldest_lease_s
from kvpipe.cache.prefixes import Prefixes
from kvpipe.features.orders import ORDERS_MAX, Order, OrderRefusedError, Orders, Work
from kvpipe.features.pins import PART_CHUNKS, EvictedPrompt, PinnedPrompt
from kvpipe.scheduler.side import SchedulerSide
from kvpipe.testing.catalog_integrity import check_integrity
from kvpipe.trace.log import Counters
from tests.rigs.scheduler_world import UNIT, SchedulerWorld

CHUNK = 16
NOT_THE_ENGINES = {"stats", "machines", "trace_moves", "bind", "adapter_called", "carry_out_orders"}
"""Calls that need no turn. Only `carry_out_orders` touches the catalog, on the thread that borrowed the turn."""
GIVES_BACK = {"reset"}
"""vLLM may make these calls after it has asked whether anything is pending."""


class Ordering:
    """A side with orders and with saved prompts."""

    def __init__(self, **keys: Any) -> None:
        """Create the side. `keys`: the arguments of `SchedulerWorld`."""
        self.world = SchedulerWorld(**keys)
        self.side, self.now_s = self.world.side, 0.0
        self.side.orders.slice_s_max = float("inf")
        self.side.pins.clock = lambda: self.now_s
        self.prefixes = Prefixes(self.side.catalog, self.side.geometry, UNIT, lambda asked: asked.block_hashes)

    def save(self, name: str, units: int, *, shared: int = 0) -> Any:
        """Save a request to its end, and return the request."""
        request = self.world.request(name, units, shared=shared)
        self.world.admit(request)
        self.world.succeed(*self.world.step(request))
        self.side.finished(request)
        return request

    def do(self, make: Any) -> Any:
        """Put an order into the queue, make steps until the order is over, and return its result."""
        order = self.side.orders.queue_change(make)
        for _ in range(100):
            if order.over:
                break
            self.world.step()
        assert order.over
        if order.refused:
            raise OrderRefusedError(order.refused)
        check_integrity(self.side.catalog)
        return order.result

    def idle(self, make: Any) -> Order:
        """Put an order into the queue while the engine has no requests, and carry out due orders."""
        order = self.side.orders.queue_change(make)
        while self.side.orders.due:
            assert self.side.orders.turns.borrow()
            self.side.orders.carry_out()
            self.side.orders.turns.give_back()
        check_integrity(self.side.catalog)
        return order

    def pin(self, request: Any, seconds: float = 10) -> PinnedPrompt:
        """Pin a prompt."""
        noted: PinnedPrompt = self.do(lambda: self.side.pins.pin(self.prefixes, request, seconds))
        return noted

    def evict(self, request: Any, first: int = 0) -> EvictedPrompt:
        """Evict a prompt."""
        noted: EvictedPrompt = self.do(lambda: self.side.pins.evict(self.prefixes, request, first))
        return noted

    def held(self, request: Any) -> int:
        """Return the number of units of the request that the catalog finds."""
        return self.prefixes.longest(request)


def test_a_pinned_prompt_stays_until_its_deadline() -> None:
    """Saves of other requests do not evict the pinned prompt.

    If the pool has no room beside the pinned prompt, chunks of other requests are not saved.
    """
    one = Ordering(slots=8)
    kept = one.save("a", 3 * CHUNK)
    noted = one.pin(kept, 10)
    assert noted == PinnedPrompt(1, 3 * CHUNK * UNIT, 3, 10)
    for turn in range(4):
        one.save(f"other {turn}", 5 * CHUNK)
    assert one.held(kept) == 3 * CHUNK
    one.save("too much", 7 * CHUNK)
    assert one.side.counters["save_dropped_pool_full"]
    assert one.held(kept) == 3 * CHUNK
    one.now_s = 11
    one.world.step()
    assert (one.side.pins.listed(), one.side.catalog.leases, one.side.pins.chunks) == ([], 0, 0)
    one.save("more", 8 * CHUNK)
    assert one.held(kept) == 0


def test_a_pin_ends_at_its_own_deadline_when_an_earlier_pin_lasts_longer() -> None:
    """Two pins hold the same prompt. The second pin has the earlier deadline and ends first."""
    one = Ordering(slots=8)
    kept = one.save("a", 3 * CHUNK)
    longer = one.pin(kept, 100)
    one.world.step()  # this step notes 100 as the earliest deadline
    one.pin(kept, 10)
    one.now_s = 11
    one.world.step()
    assert [*one.side.pins.pins] == [longer.pin]
    assert one.held(kept) == 3 * CHUNK
    one.now_s = 101
    one.world.step()
    assert (one.side.pins.pins, one.side.catalog.leases) == ({}, 0)


def test_the_age_of_the_oldest_lease_counts_no_pins() -> None:
    """Leases of pins do not count, because pins are meant to last long."""
    one = Ordering()
    one.pin(one.save("a", CHUNK))
    assert one.side.catalog.leases == 1
    assert oldest_lease_s(one.side.catalog) == 0


def test_a_pin_that_is_over_takes_no_room() -> None:
    """An expired pin is not reported, even if no step follows. The next pin may use its room."""
    one = Ordering(slots=8)
    kept, other = one.save("a", 4 * CHUNK), one.save("b", 2 * CHUNK)
    one.pin(kept, 10)
    assert not one.side.pending
    one.now_s = 11
    assert one.side.pins.listed() == []
    order = one.idle(lambda: one.side.pins.pin(one.prefixes, other, 10))
    assert (order.refused, order.result) == ("", PinnedPrompt(2, 2 * CHUNK * UNIT, 2, 10))
    assert (one.side.catalog.leases, one.side.pins.chunks) == (2, 2)


@pytest.mark.parametrize("units", [CHUNK + 4, 2 * CHUNK])
@pytest.mark.parametrize("keys", [{"windows": (None, 4 * UNIT)}, {"windows": (None, None), "states": (1,)}])
def test_a_pinned_prompt_may_end_with_a_block(keys: dict[str, Any], units: int) -> None:
    """A pin includes the prompt's last unit and the state after the last unit.

    Only longer prompts load these two, because a request with the same prompt computes its last unit again.
    """
    one = Ordering(slots=16, **keys)
    continued = one.world.request("a", units, extra=1)
    continued.shared_prefix_boundary = (units - 1) * UNIT
    one.world.admit(continued)
    ends = () if "states" not in keys else (units - 1, units)
    one.world.succeed(*one.world.step(continued, boundaries=ends))
    one.side.finished(continued)
    asked = SimpleNamespace(**vars(continued) | {"num_tokens": units * UNIT, "num_prompt_tokens": units * UNIT})
    noted = one.pin(asked)
    assert noted.tokens == units * UNIT
    for turn in range(4):
        one.save(f"other {turn}", 8 * CHUNK)
    assert (one.held(asked), one.held(continued)) == (units - 1, units)


@pytest.mark.parametrize("keys", [{"windows": (None, 4 * UNIT)}, {"windows": (None, None), "states": (1,)}])
def test_pin_holds_the_chunks_that_a_hit_needs(keys: dict[str, Any]) -> None:
    """A pin holds only the window and the state that a hit needs."""
    one = Ordering(slots=16, **keys)
    request = one.world.request("a", 3 * CHUNK + 2, extra=1)
    one.world.admit(request)
    jobs = one.world.step(request) if "states" not in keys else one.world.step(request, boundaries=(3 * CHUNK + 2,))
    one.world.succeed(*jobs)
    units = one.held(request)
    assert units
    noted = one.pin(request)
    assert noted.tokens == units * UNIT
    assert noted.chunks == (4 + 2 if "states" not in keys else 4 + 1)
    for turn in range(4):
        one.save(f"other {turn}", 8 * CHUNK)
    assert one.held(request) == units


def test_pins_are_bounded() -> None:
    """The share of the pool, the seconds and the number of held chunks limit a pin. A refused pin holds nothing."""
    one = Ordering(slots=2 * (PART_CHUNKS + 4))
    long = one.save("a", (PART_CHUNKS + 5) * CHUNK)
    with pytest.raises(OrderRefusedError, match="pins may hold 20 chunks"):
        one.pin(long)
    assert (one.side.catalog.leases, one.side.pins.listed(), one.side.pins.chunks) == (0, [], 0)
    with pytest.raises(OrderRefusedError, match="seconds: 1e\\+06 are more than manage_pin_s_max"):
        one.pin(long, 1e6)
    with pytest.raises(OrderRefusedError, match="nothing of this prompt"):
        one.pin(one.world.request("b", CHUNK))
    half = one.save("c", 12 * CHUNK)
    assert one.pin(half).chunks == 12
    assert one.pin(half) == PinnedPrompt(3, 12 * CHUNK * UNIT, 12, 10)  # the same chunks need no more room
    assert one.side.pins.chunks == 12
    with pytest.raises(OrderRefusedError, match="there is no pin 7"):
        one.do(lambda: one.side.pins.unpin(7))
    one.do(lambda: one.side.pins.unpin(2))
    assert one.side.catalog.leases == 12
    one.do(lambda: one.side.pins.unpin(3))
    assert one.side.catalog.leases == 0


def test_a_pin_has_no_gaps() -> None:
    """If one of its chunks is evicted while a pin is made, the pin is refused and holds nothing."""
    one = Ordering(slots=8 * PART_CHUNKS)
    request = one.save("a", 3 * PART_CHUNKS * CHUNK)
    work = one.side.pins.pin(one.prefixes, request, 10)
    next(work)
    gone = one.side.catalog.find(0, one.prefixes.key(request.block_hashes, 2 * PART_CHUNKS * CHUNK))
    assert gone is not None
    assert one.side.catalog.evict(gone)
    with pytest.raises(OrderRefusedError, match="evicted meanwhile"):
        list(work)
    assert (one.side.catalog.leases, one.side.pins.listed(), one.side.pins.chunks) == (0, [], 0)


def test_eviction_from_a_token_on_keeps_the_chunks_before_it() -> None:
    """The chunk with the token and all later chunks are evicted."""
    one = Ordering()
    request, other = one.save("a", 4 * CHUNK + 3), one.save("b", 2 * CHUNK)
    assert one.evict(request, 2 * CHUNK * UNIT + 5) == EvictedPrompt(3, 0, 0)
    assert one.held(request) == 2 * CHUNK
    assert one.evict(request) == EvictedPrompt(2, 0, 0)
    assert (one.held(request), one.held(other)) == (0, 2 * CHUNK)
    assert one.evict(request) == EvictedPrompt(0, 0, 0)
    assert one.prefixes.why_short(request, 0) == "evicted"


def test_chunk_with_a_save_in_flight_is_evicted() -> None:
    """The save lands, but the chunk is not found any more. Then its slot is free."""
    one = Ordering()
    request = one.world.request("a", 2 * CHUNK)
    one.world.admit(request)
    jobs = one.world.step(request)
    assert one.evict(request) == EvictedPrompt(2, 2, 0)
    one.world.succeed(*jobs)
    assert (one.held(request), one.side.catalog.used) == (0, 0)


def test_eviction_of_a_chunk_ends_its_pins() -> None:
    """A pin without the evicted chunk gives no hit, so the pin ends and its other slots become free."""
    one = Ordering()
    request, beside = one.save("a", 3 * CHUNK), one.save("b", CHUNK)
    one.pin(request)
    one.pin(request)
    one.pin(beside)
    assert one.evict(request, 2 * CHUNK * UNIT) == EvictedPrompt(1, 1, 2)
    one.world.step()
    assert [pin.pin for pin in one.side.pins.listed()] == [3]
    assert (one.side.catalog.leases, one.side.catalog.used) == (1, 3)


def test_a_reset_ends_pins() -> None:
    """A reset ends all pins. A pin that is being made is refused."""
    one = Ordering(slots=4 * PART_CHUNKS)
    request = one.save("a", 2 * PART_CHUNKS * CHUNK)
    one.pin(request)
    one.side.reset()
    assert (one.side.catalog.leases, one.side.catalog.used, one.side.pins.listed()) == (0, 0, [])
    request = one.save("b", 2 * PART_CHUNKS * CHUNK)
    work = one.side.pins.pin(one.prefixes, request, 10)
    next(work)
    assert one.side.catalog.leases == PART_CHUNKS
    one.side.reset()
    with pytest.raises(OrderRefusedError, match="evicted or reset"):
        next(work)
    assert (one.side.catalog.leases, one.side.catalog.used) == (0, 0)


def test_owner_of_a_pin_differs_from_every_requests_owner() -> None:
    """A request may have the name of a pin's owner. The request's owner still differs, in every epoch."""
    one = Ordering()
    request = one.save("a", CHUNK)
    one.pin(request)
    (owner,) = one.side.pins.owners
    for epoch in range(-10, 10):
        assert owner != Owner(owner.request, epoch)


def test_too_many_orders_are_refused_but_pins_end_in_time() -> None:
    """The number of waiting orders is limited. A pin still ends at its deadline."""
    one = Ordering()
    request = one.save("a", CHUNK)
    one.pin(request)
    waiting = [one.side.orders.queue_change(lambda: one.side.pins.unpin(99)) for _ in range(ORDERS_MAX)]
    refused = one.side.orders.queue_change(lambda: one.side.pins.unpin(1))
    assert (refused.over, refused.failed, refused.refused) == (True, True, f"{ORDERS_MAX} orders wait already")
    one.now_s = 100
    for _ in range(20):
        one.world.step()
    assert all(order.over for order in waiting)
    assert one.side.catalog.leases == 0


def test_ends_of_pins_leave_orders_their_room() -> None:
    """The ends of expired pins wait as orders, too, but take no room from other orders."""
    one = Ordering()
    request = one.save("a", CHUNK)
    for _ in range(ORDERS_MAX + 1):
        one.pin(request)
    one.now_s = 100
    one.side.pins.expire()
    assert len(one.side.orders.due) == ORDERS_MAX + 1
    order = one.side.orders.queue_change(lambda: one.side.pins.unpin(99))
    assert not order.over


def test_failed_order_is_answered_and_counted() -> None:
    """The order's caller gets the failure, which is counted. Later orders are carried out."""

    def broken() -> Work:
        yield
        raise KeyError("x")

    def good() -> Work:
        yield
        return 7

    counters = Counters()
    orders = Orders(counters)
    orders.slice_s_max = float("inf")
    first, second = orders.queue_change(broken), orders.queue_change(good)
    orders.carry_out()
    assert (first.failed, first.refused, second.result) == (
        True,
        "the request failed; the reason is in the engine's log",
        7,
    )
    assert counters["contained_error"] == 1


def test_orders_are_refused_when_the_engine_ends() -> None:
    """Orders that wait at the end, and later orders, are refused."""
    one = Ordering()
    orders: list[Order] = [one.side.orders.queue_change(lambda: one.side.pins.unpin(1))]
    one.side.shutdown()
    orders.append(one.side.orders.queue_change(lambda: one.side.pins.unpin(1)))
    assert [(order.over, order.refused) for order in orders] == [(True, "the engine is shutting down")] * 2


def _calls() -> list[str]:
    return [
        name
        for name, member in inspect.getmembers(SchedulerSide, inspect.isfunction)
        if not name.startswith("_") and name not in NOT_THE_ENGINES
    ]


@pytest.mark.parametrize("name", _calls())
def test_every_call_takes_the_turn(name: str) -> None:
    """Each call takes the turn before any other work, because another thread may be using the catalog."""
    one = Ordering()
    assert not one.side.pending
    turns = one.side.orders.turns
    assert turns.away
    method, taken = getattr(one.side, name), list[str]()
    take = turns.take
    turns.take = lambda: taken.append(name) or take()  # type: ignore[method-assign, func-returns-value]
    parameters = inspect.signature(method).parameters.values()
    arguments = [SimpleNamespace() for one in parameters if one.kind is not one.KEYWORD_ONLY]
    with contextlib.suppress(AttributeError, TypeError):
        method(*arguments)
    assert taken
    assert turns.away == (name in GIVES_BACK)


def test_an_idle_engine_gives_the_turn_back_after_a_reset() -> None:
    """vLLM's pause first asks whether anything is pending, and then resets the caches. No step follows."""
    one = Ordering()
    one.save("a", CHUNK)
    one.side.reset()
    assert not one.side.orders.turns.away, "a busy engine keeps it"
    assert not one.side.pending
    one.side.reset()
    assert one.side.orders.turns.borrow()
    one.side.orders.turns.give_back()


def test_the_turn_is_given_when_nothing_is_pending() -> None:
    """The turn is not given away until ranks have reported every save."""
    one = Ordering()

    def pending() -> bool:
        return one.side.pending

    request = one.world.request("a", CHUNK)
    one.world.admit(request)
    jobs = one.world.step(request)
    assert pending()
    assert not one.side.orders.turns.borrow()
    one.world.succeed(*jobs)
    assert not pending()
    assert one.side.orders.turns.borrow()
    one.side.orders.turns.give_back()
