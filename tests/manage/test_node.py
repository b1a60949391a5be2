"""Operators of an idle engine on a node's memory get answers over HTTP, and their evictions reach the holder."""

from __future__ import annotations

from pathlib import Path

from kvpipe.testing.direct_node import DirectNode, DirectPool
from kvpipe.testing.waiting import eventually
from tests.manage.conftest import Managed
from tests.rigs.scheduler_world import UNIT, SchedulerWorld

SLOTS = 16
PROMPT = {"tokens": [0] * (8 * UNIT), "cache_salt": "one"}


def started(node: DirectNode) -> SchedulerWorld:
    """Return an engine of `node`."""
    made = SchedulerWorld(chunk_units=4, slots=SLOTS, node=DirectPool(node), also_of="layout {}".format)
    made.side.ranks_ready({}, ["weights"])
    assert made.side.node is not None
    made.side.node.poll()
    return made


def save(engine: SchedulerWorld) -> None:
    """Save the prompt, and let its chunks be published."""
    one = engine.request("one", 8)
    one.block_hashes[:] = [f"one/{unit}".encode() for unit in range(8)]
    engine.admit(one)
    for job in engine.step(one):
        engine.report((job, 1, 0))
    engine.side.finished(one)
    for _ in range(3):
        engine.step()


def test_idle_engine_carries_out_orders(short_path: Path) -> None:
    """The eviction of a pinned prompt ends the pin.

    The answer is sent when the holder has evicted the chunks for all engines.
    """
    node = DirectNode(SLOTS, 4096)
    first, second = started(node), started(node)
    save(first)
    second.step()
    assert second.side.catalog.used == 2
    managed = Managed(short_path, first)
    try:
        assert managed.ask("POST", "/v1/lookup", PROMPT)[1]["held_tokens"] == 8 * UNIT
        assert managed.ask("POST", "/v1/pins", PROMPT | {"seconds": 600})[1]["chunks"] == 2
        assert first.side.node is not None
        assert first.side.node.pool.leases.count == 2, "a lookup's own pins end with the slice"  # type: ignore[union-attr]
        assert managed.ask("GET", "/v1/state")[1]["pool"]["chunks_pinned"] == 2
        assert managed.ask("GET", "/v1/holders")[1]["chunks_unnamed"] == 0
        assert managed.ask("POST", "/v1/evict", PROMPT) == (200, {"chunks": 2, "held": 2, "pins_ended": 1})
        assert managed.ask("GET", "/v1/pins")[1]["pins"] == []
        assert node.keeper.usage().published == 0
    finally:
        managed.server.stop()
        node.close()
    second.step()
    assert second.side.catalog.used == 0


def test_eviction_of_an_idle_engine_reaches_the_next_holder(short_path: Path) -> None:
    """The holder was killed before it had the eviction. The order is over, and no request or operator comes."""
    node = DirectNode(SLOTS, 4096)
    first = started(node)
    save(first)
    assert first.side.node is not None
    pool = first.side.node.pool
    assert isinstance(pool, DirectPool)
    managed = Managed(short_path, first)
    try:
        pool.mute = True
        assert managed.ask("POST", "/v1/evict", PROMPT)[1]["chunks"] == 2
        assert node.keeper.usage().published == len(pool.stock.evictions) == 2
        node.take_over()
        pool.mute = False
        assert eventually(lambda: not pool.stock.evictions)
        assert node.keeper.usage().published == 0
    finally:
        managed.server.stop()
        node.close()
