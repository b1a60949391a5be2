"""Operators of an idle engine on a node's memory get answers over HTTP, and their evictions reach the holder."""

from __future__ import annotations

from pathlib import Path

from kvpipe.testing.direct_node import DirectNode, DirectPool
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


def test_idle_engine_carries_out_orders(short_path: Path) -> None:
    """The eviction of a pinned prompt ends the pin.

    The answer is sent when the holder has evicted the chunks for all engines.
    """
    node = DirectNode(SLOTS, 4096)
    first, second = started(node), started(node)
    one = first.request("one", 8)
    one.block_hashes[:] = [f"one/{unit}".encode() for unit in range(8)]
    first.admit(one)
    for job in first.step(one):
        first.report((job, 1, 0))
    first.side.finished(one)
    for world in (first, first, first, second):
        world.step()
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
