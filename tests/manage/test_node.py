"""Operators of an idle engine on a node's memory get answers over HTTP, and their evictions reach the holder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpipe.connectors.vllm.trial.scheduler_world import UNIT
from tests.manage.conftest import Managed
from tests.node.test_catalog import NodeWorld, Worlds

PROMPT = {"tokens": [0] * (8 * UNIT), "cache_salt": "one"}


@pytest.fixture
def worlds() -> Iterator[Worlds]:
    """Return a memory of 16 slots without engines."""
    made = Worlds(16)
    yield made
    made.close()


def saved(worlds: Worlds) -> NodeWorld:
    """Return an engine that has saved the prompt that its operators name."""
    first = worlds.start()
    one = first.request("one", 8)
    one.block_hashes[:] = [f"one/{unit}".encode() for unit in range(8)]
    first.prefixes |= {key: one.block_hashes[: at + 1] for at, key in enumerate(one.block_hashes)}
    first.run(one)
    return first


def test_idle_engine_carries_out_orders(worlds: Worlds, short_path: Path) -> None:
    """A pin ends with the eviction. The answer comes when the holder has evicted the chunks for all engines."""
    first, second = saved(worlds), worlds.start()
    second.step()
    managed = Managed(short_path, first)
    try:
        assert managed.ask("POST", "/v1/lookup", PROMPT)[1]["held_tokens"] == 8 * UNIT
        assert managed.ask("POST", "/v1/pins", PROMPT | {"seconds": 600})[1]["chunks"] == 2
        assert first.pool.leases.count == 2, "a lookup's own pins end with the slice"  # type: ignore[union-attr]
        state = managed.ask("GET", "/v1/state")[1]
        assert state["pool"]["chunks_pinned"] == 2
        assert managed.ask("GET", "/v1/holders")[1]["chunks_unnamed"] == 0
        evicted = managed.ask("POST", "/v1/evict", PROMPT)
        assert evicted == (200, {"chunks": 2, "held": 2, "pins_ended": 1})
        assert managed.ask("GET", "/v1/pins")[1]["pins"] == []
        assert worlds.node.keeper.usage().published == 0
    finally:
        managed.server.stop()
    second.step()
    assert not second.catalog.index(0)
