"""An engine with a tier, while other engines take slots or while the engine has no holder."""

from __future__ import annotations

from typing import Any

import pytest

from kvpipe.node.layout import OWNED
from kvpipe.statemachine import node_link as link_m
from kvpipe.statemachine import stage as stage_m
from tests.node.test_catalog import CHUNK
from tests.node.tiered_worlds import UNIT_TOKENS, TieredWorlds


@pytest.mark.parametrize(("evicted", "then"), [(2, stage_m.FETCHING), (3, stage_m.OVER)])
def test_stage_ends_when_other_engines_evict_its_chunks_in_each_try(
    tiered: TieredWorlds, monkeypatch: pytest.MonkeyPatch, evicted: int, then: str
) -> None:
    """A stage that stayed in FOUND for another step would have no deadline."""
    world = tiered.start(stock=8)
    request = world.in_tier("a", 16)
    assert world.ask(request) == 16 * UNIT_TOKENS
    world.side.finished(request)
    world.step()
    tiered.evict(request.block_hashes[CHUNK - 1])
    world.step()
    again, later = world.request("again", 16, extra=1), [*request.block_hashes[2 * CHUNK - 1 :: CHUNK]]
    again.block_hashes = request.block_hashes
    stage = world.want(again)
    lease = world.catalog.lease

    def leased(owner: Any, chunks: Any, **more: Any) -> None:
        if len(later) > 3 - evicted:
            tiered.evict(later.pop())
        lease(owner, chunks, **more)

    monkeypatch.setattr(world.catalog, "lease", leased)
    world.step()
    assert stage.state.row == then
    monkeypatch.undo()
    assert world.ask(again) == (2 * CHUNK * UNIT_TOKENS if evicted == 2 else 0)
    assert not world.side.counters.faults
    world.check()


def test_waiting_requests_of_all_engines_hold_at_most_half_of_the_usable_slots(tiered: TieredWorlds) -> None:
    """The memory that slots of another size use does not count. The share shrinks with each further engine."""
    first = tiered.start(stock=8)
    first.want(first.in_tier("a", 4))
    first.step()
    assert first.staging._held_max == 12
    tiered.start(stock=8)
    first.pool.segment.words[OWNED] = 16  # type: ignore[union-attr]
    first.want(first.in_tier("b", 4))
    first.step()
    assert first.staging._held_max == 4
    while first.begun:
        first.carry()
    first.check()


def test_chunks_that_cannot_be_fetched_without_a_holder_are_no_fault_of_a_tier(tiered: TieredWorlds) -> None:
    """Offers of chunks to a tier wait until a holder has published the chunks."""
    whys, world = list[object](), tiered.start()
    world.side.counters.watcher = lambda name, fields: whys.append((name, fields["why"]))
    request = world.request("one", 8)
    world.requests = [request]
    world.admit(request)
    (job,) = world.step(request)
    world.pool.mute = True
    world.pool.link.fire(link_m.HOLDER_LOST)
    world.end(job)
    world.step()
    assert not world.side.pending
    assert whys == [("stores_too_slow", "no holder")]


def test_fetch_without_a_slot_is_no_dropped_save(tiered: TieredWorlds) -> None:
    """The chunks of decoding requests continue to grow, although the fetch has no slot."""
    world = tiered.start(stock=1)
    grows = world.request("grows", 3)
    world.requests = [grows]
    world.admit(grows)
    grows.num_prompt_tokens = 2 * UNIT_TOKENS
    for job in world.step(grows):
        world.end(job)
    world.want(world.in_tier("a", 12))
    world.pool.mute = True
    for _ in range(2):
        world.step()
    assert world.pool.stock.free == 0
    assert not world.side.counters["save_dropped_pool_full"]
    assert [chunk.sealed for chunk in world.catalog._open.values()] == [False]
