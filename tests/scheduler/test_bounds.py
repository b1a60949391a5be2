"""The scheduler side's memory is bounded, however many salts, sessions and classes of requests arrive."""

from __future__ import annotations

import gc
from collections import deque
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Final

import pytest

from kvpipe.protocol.messages import Report, Tally
from kvpipe.scheduler.wishes import RawHints
from kvpipe.trace import durations
from kvpipe.trace.miss_reasons import LostKeys
from tests.rigs.scheduler_world import UNIT, SchedulerWorld

TENANTS: Final = 10_000
CHUNK: Final = 4


def _entries(root: object) -> dict[str, int]:
    """Return the number of entries in all mappings, lists and sets that `root` refers to, by their type."""
    seen, new, entries = {id(root): root}, [root], dict[str, int]()
    while new:
        one = new.pop()
        if isinstance(one, dict | list | set | deque):
            entries[type(one).__name__] = entries.get(type(one).__name__, 0) + len(one)
        for other in gc.get_referents(one):
            if id(other) not in seen and not isinstance(other, type | ModuleType | FunctionType | BuiltinFunctionType):
                seen[id(other)] = other
                new.append(other)
    return entries


def _serve(world: SchedulerWorld, number: int) -> None:
    """Serve a request with a new salt, session and class, with a hint and an answer.

    Every tenth session has a second turn.
    """
    side, salt = world.side, f"salt {number}"
    for turn, units in enumerate((CHUNK, CHUNK + 1)[: 2 - bool(number % 10)]):
        request: Any = world.request(f"{number}/{turn}", 2 * CHUNK + 2)
        request.block_hashes = [f"{number}/{unit}/{turn * (unit >= CHUNK)}".encode() for unit in range(2 * CHUNK + 2)]
        request.num_prompt_tokens = units * UNIT
        request.cache_salt, request.session_id = salt, f"session {number}"
        side.on_new_request(request, RawHints(None, {"retain": {"ttl_seconds": 9}, salt: {}}))
        world.admit(request)
        side.reported(Report({job.id: Tally(1, 0) for job in world.step(request)}))
        side.finished(request)
    world.prefixes.clear()
    world.pages.clear()
    for table in world.tables:
        table.clear()


def test_tenants_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """After all tenants were served, the scheduler side keeps as many entries as after half of them."""
    monkeypatch.setenv("KVPIPE_POLICY", "sessions")
    monkeypatch.setenv("KVPIPE_QUOTAS", '[{"name": "alice", "salt": "alice", "share": 0.5}]')
    monkeypatch.setattr(durations, "KEPT_MAX", 1024)
    world = SchedulerWorld(chunk_units=CHUNK, slots=64)
    world.side.catalog.lost_keys = LostKeys(1, 1024)
    sizes = []
    for half in range(2):
        for number in range(half * TENANTS // 2, (half + 1) * TENANTS // 2):
            _serve(world, number)
        gc.collect()
        sizes.append(_entries(world.side))
    assert world.side.counters["evicted"] > TENANTS
    assert world.side.counters["lookup_hit"] > 0
    assert len(world.side.catalog.tenants) <= 64
    for kind, entries in sizes[1].items():
        assert entries - sizes[0].get(kind, 0) < TENANTS // 100, f"{kind}: {sizes}"
