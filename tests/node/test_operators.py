"""Operators' orders on a node's memory: a pin belongs to one engine, and an eviction concerns all engines."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from kvpipe.cache.tenants import UNKNOWN
from kvpipe.features.announced import KnownPrompt
from kvpipe.features.orders import OrderRefusedError
from kvpipe.features.pins import EvictedPrompt, PinnedPrompt
from kvpipe.manage.holders import selecting
from kvpipe.manage.models import EvictMatching
from kvpipe.manage.reads import pool_users
from kvpipe.node.operated import OperatedCatalog
from tests.node.test_catalog import NodeWorld, Worlds
from tests.rigs.node_replica import evict_all

SECONDS = 60.0


def asked(engine: NodeWorld, units: int = 8) -> KnownPrompt:
    """Return the prompt that the tests save, in the form in which an operator names it."""
    request = engine.request("asked", units, shared=units)
    return KnownPrompt(request.block_hashes, request.num_tokens)


def carried_out(engine: NodeWorld, work: Generator[Any, None, Any]) -> Any:
    """Carry out all parts of an order, as an idle engine does, and return the order's result."""
    assert engine.side.node is not None
    try:
        while True:
            next(work)
            engine.side.node.end_step()
    except StopIteration as end:
        engine.side.node.end_step()
        return end.value


def evict(engine: NodeWorld) -> EvictedPrompt:
    """Evict the prompt that the tests save."""
    result: EvictedPrompt = carried_out(
        engine, engine.side.pins.evict(engine.side.prefetching.prefixes, asked(engine), 0)
    )
    return result


def pin(engine: NodeWorld) -> PinnedPrompt:
    """Pin the prompt that the tests save."""
    work = engine.side.pins.pin(engine.side.prefetching.prefixes, asked(engine), SECONDS)
    result: PinnedPrompt = carried_out(engine, work)
    return result


@pytest.fixture
def two(worlds: Worlds) -> tuple[NodeWorld, NodeWorld]:
    """Return two engines that both find two chunks, which the first engine has saved."""
    first, second = worlds.start(), worlds.start()
    first.run(first.request("one", 8, shared=8))
    second.step()
    assert second.found(asked(second)) == 8
    second.step()
    return first, second


def test_evicted_prompt_is_evicted_for_all_engines(worlds: Worlds, two: tuple[NodeWorld, NodeWorld]) -> None:
    """Any engine may give the order. Slots that no engine reads are free at once."""
    first, second = two
    assert evict(second) == EvictedPrompt(2, 0, 0)
    usage = worlds.node.keeper.usage()
    assert (usage.published, usage.evicting) == (0, 0)
    first.step()
    assert first.found(asked(first)) == second.found(asked(second)) == 0
    first.check()
    second.check()


def test_read_chunk_is_freed_when_its_load_has_landed(worlds: Worlds, two: tuple[NodeWorld, NodeWorld]) -> None:
    """The load of the other engine continues, and no further request finds the chunk."""
    first, second = two
    other = second.request("other", 8, shared=8, extra=1)
    second.requests = [other]
    second.admit(other)
    jobs = second.step(other)
    evict(first)
    assert worlds.node.keeper.usage().evicting == 2
    second.step()
    assert second.found(asked(second)) == 0
    for job in jobs:
        second.end(job)
    second.step()
    assert worlds.node.keeper.usage().evicting == 0


def test_chunk_that_is_reported_is_evicted_once_it_is_published(worlds: Worlds) -> None:
    """The holder carries out the report first, whether the eviction is sent with the report or later."""
    first = worlds.start()
    one = first.request("one", 8, shared=8)
    first.requests = [one]
    first.admit(one)
    (job,) = first.step(one)
    first.pool.slow = True
    first.end(job)
    chunks = [*first.catalog._landed.values()]
    assert len(chunks) == 2
    assert all(first.catalog.evict(chunk) for chunk in chunks)
    for _ in range(3):
        first.step()
    assert worlds.node.keeper.usage().published == 0
    assert first.found(one) == 0
    first.check()


def test_evicted_chunk_is_not_found_when_the_holder_ends_before_it_evicts_the_chunk(worlds: Worlds) -> None:
    """The holder has published the chunk after the order, and has not received the eviction."""
    first = worlds.start()
    one = first.request("one", 8, shared=8)
    first.requests = [one]
    first.admit(one)
    (job,) = first.step(one)
    first.pool.slow = True
    first.end(job)  # sends the reports, which the holder carries out later
    assert all(first.catalog.evict(chunk) for chunk in [*first.catalog._landed.values()])
    first.pool._node.keeper.batch(first.pool.client, first.pool._sent.pop())
    first.pool.mute = True
    first.catalog.poll()
    assert worlds.node.keeper.usage().published == 2
    assert first.catalog.lag == 0
    assert first.found(one) == 0
    first.pool.mute = False
    worlds.node.take_over()
    first.step()
    first.step()
    assert worlds.node.keeper.usage().published == 0
    first.check()


def test_chunk_with_an_answered_report_is_evicted(worlds: Worlds) -> None:
    """The holder has answered the report. The engine reads the chunk's record first, and then sends the eviction."""
    first = worlds.start()
    one = first.request("one", 4, shared=4)
    first.requests = [one]
    first.admit(one)
    (job,) = first.step(one)
    first.pool.slow = True
    first.end(job)
    first.pool.poll()
    first.pool.poll()
    (chunk,) = first.catalog._landed.values()
    assert first.catalog.evict(chunk)
    assert not first.catalog.evict(chunk)
    first.step()
    first.step()
    assert worlds.node.keeper.usage().published == 0
    first.check()


def test_growing_chunk_is_evicted_without_the_holder(worlds: Worlds) -> None:
    """The slot of the growing chunk returns to the engine's stock."""
    first = worlds.start(stock=4)
    one = first.request("one", 6)
    first.begin(one, 6, 7)
    (chunk,) = first.catalog._open.values()
    assert first.catalog.evict(chunk)
    assert not first.catalog.evictions_wait
    for _ in range(3):
        first.step()
    first.check()


def test_eviction_of_an_old_chunk_leaves_the_slot_s_present_chunk(
    worlds: Worlds, two: tuple[NodeWorld, NodeWorld]
) -> None:
    """A holder was replaced before it answered, so the order is sent again. By then the slot has another chunk."""
    first, second = two
    (slot, other) = (chunk.slot for chunk in second.catalog.index(0).values())
    second.pool.stock.evictions[slot] = second.catalog._chunks[slot].generation - 2  # type: ignore[union-attr]
    second.step()
    second.step()
    assert not second.catalog.evictions_wait
    assert worlds.node.keeper.usage().published == 2
    assert first.found(asked(first)) == 8
    assert other != slot


def test_eviction_waits_for_a_holder(worlds: Worlds, two: tuple[NodeWorld, NodeWorld]) -> None:
    """The order itself ends at once. Its evictions are sent to the next holder."""
    first, second = two
    second.pool.mute = True
    second.side.pins.clock = iter(range(1000)).__next__
    assert evict(second).chunks == 2
    assert worlds.node.keeper.usage().published == 2
    second.pool.mute = False
    worlds.node.take_over()
    second.step()
    second.step()
    assert worlds.node.keeper.usage().published == 0
    first.step()
    first.check()


def test_pin_keeps_chunks_until_its_engine_ends(two: tuple[NodeWorld, NodeWorld]) -> None:
    """Until then, saves of the other engine evict only other chunks."""
    first, second = two
    assert pin(second).chunks == 2
    for number in range(8):
        first.run(first.request(str(number), 8))
        second.step()
    assert second.found(asked(second)) == 8
    second.pool.die()
    for number in range(8, 16):
        first.run(first.request(str(number), 8))
    assert first.found(asked(first)) == 0
    first.check()


def test_eviction_ends_pins_of_other_engines(worlds: Worlds, two: tuple[NodeWorld, NodeWorld]) -> None:
    """The pins end with the next step of their engines. Then the slots are free."""
    first, second = two
    pin(second)
    assert evict(first).pins_ended == 0, "first has no pin"
    assert worlds.node.keeper.usage().evicting == 2
    second.step()
    second.step()
    assert second.side.pins.listed() == []
    assert second.catalog.leases == 0
    assert worlds.node.keeper.usage().evicting == 0


def test_prompt_that_is_evicted_meanwhile_is_not_pinned(worlds: Worlds, two: tuple[NodeWorld, NodeWorld]) -> None:
    """The order to pin is refused, and holds no chunk."""
    _, second = two
    assert isinstance(second.catalog, OperatedCatalog)
    pins = second.side.pins
    longest = second.side.prefetching.prefixes.longest
    work = pins.pin(second.side.prefetching.prefixes, asked(second), SECONDS)
    second.side.prefetching.prefixes.longest = lambda *a, **k: (longest(*a, **k), evict_all(worlds.node.keeper))[0]  # type: ignore[method-assign]
    second.catalog.hold = bool  # type: ignore[assignment]
    with pytest.raises(OrderRefusedError, match="were evicted meanwhile"):
        carried_out(second, work)
    assert (pins.listed(), pins.chunks, second.catalog.leases, second.pool.leases.count) == ([], 0, 0, 0)  # type: ignore[union-attr]


def test_pins_of_each_engine_have_an_equal_share(worlds: Worlds) -> None:
    """All engines together pin no more than one engine alone."""
    first = worlds.start()
    alone = first.side.pins.chunks_max
    worlds.start()
    assert first.side.pins.chunks_max == alone // 2 > 0


def test_tenants_of_other_engines_are_unknown(two: tuple[NodeWorld, NodeWorld]) -> None:
    """An engine can evict other engines' chunks by prompt or all at once, but not by salt, adapter or age."""
    first, second = two
    assert carried_out(first, pool_users(first.side)).unnamed == 0
    users = carried_out(second, pool_users(second.side))
    assert (users.tenants, users.unnamed) == ([], 2)
    for wanted in (EvictMatching(no_salt=True), EvictMatching(no_adapter=True), EvictMatching(idle_s=1.0)):
        assert not selecting(wanted, b"")(UNKNOWN)
    evicted = carried_out(second, second.side.pins.evict_those(selecting(EvictMatching(all=True), b"")))
    assert evicted.chunks == 2
