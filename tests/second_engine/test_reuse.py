"""The engine with kvpipe gives the same answers as without kvpipe, bit by bit, from KV that was saved and loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpipe.testing.catalog_integrity import check_integrity
from kvpipe.testing.faults import FaultyCpuEngine
from kvpipe.testing.held import HeldEngine
from kvpipe.testing.waiting import PATIENT, PATIENT_MS
from kvpipe.transfer.base import Direction
from tests.second_engine.adapter import KVPipe, MakeCopier
from tests.second_engine.engine import Engine, Request
from tests.second_engine.prompts import MODEL, check, prompt

BLOCK, CHUNK, POOL = 4, 8, "1MiB"


class World:
    """Engines with kvpipe. The fixture ends the engines.

    Their own prefix cache is off unless a test enables the cache.
    """

    def __init__(self) -> None:
        """Start without engines."""
        self._made: list[KVPipe] = []

    def make(
        self,
        *,
        blocks: int = 64,
        ranks: int = 1,
        prefix_cache: bool = False,
        copier: MakeCopier = lambda: None,
        **keys: Any,
    ) -> tuple[Engine, KVPipe]:
        """Return an engine, and kvpipe behind it."""
        engine = Engine(MODEL, blocks=blocks, block_tokens=BLOCK, ranks=ranks, prefix_cache=prefix_cache)
        kvpipe = KVPipe(
            engine, make_copier=copier, **{"chunk_tokens": CHUNK, "pool_bytes_max": POOL, "prefault": "use", **keys}
        )
        self._made.append(kvpipe)
        return engine, kvpipe

    def end(self) -> None:
        """End all engines. Check that no job, no lease and no unexpected fault is left."""
        for kvpipe in self._made:
            kvpipe.shutdown()


@pytest.fixture
def world() -> Iterator[World]:
    """Yield a world, and end its engines after the test."""
    made = World()
    yield made
    made.end()


def settled(engine: Engine, kvpipe: KVPipe) -> None:
    """Check that every block is free, and that no job is in flight."""
    stats = kvpipe.scheduler.stats()
    assert engine.blocks.free() == engine.blocks.count
    assert {name: stats[name] for name in ("leases", "jobs_in_flight", "requests", "pieces_writing")} == {
        "leases": 0, "jobs_in_flight": 0, "requests": 0, "pieces_writing": 0,
    }  # fmt: skip
    check_integrity(kvpipe.scheduler.catalog)


def faults(kvpipe: KVPipe) -> dict[str, int]:
    """Return the faults of all sides."""
    every = [kvpipe.scheduler.counters, *(worker.counters for worker in kvpipe.workers)]
    return {name: count for counters in every for name, count in counters.faults.items()}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("load", ["sync", "async"])
def test_computed_prefix_is_loaded(world: World, load: str, ranks: int) -> None:
    """A prompt that begins like an earlier prompt, and a conversation that continues, are not computed again."""
    engine, kvpipe = world.make(ranks=ranks, load=load)
    first = engine.add("first", prompt(30, shared=22))
    engine.run()
    again = engine.add("again", prompt(30, shared=22))
    branch = engine.add("branch", prompt(30, seed=2, shared=22))
    longer = engine.add("longer", [*first.all_token_ids, *prompt(5, seed=3)])
    engine.run()
    check([first, again, branch, longer])
    assert (
        kvpipe.scheduler.counters["tokens_loaded"] == 28 + 16 + 36
    )  # a hit has whole blocks, or whole chunks if prompts diverge
    assert faults(kvpipe) == {}
    settled(engine, kvpipe)


def test_blocks_of_the_engine_s_own_cache_are_not_loaded(world: World) -> None:
    """Blocks that the engine holds are not loaded, and blocks that the engine has dropped are loaded."""
    engine, kvpipe = world.make(prefix_cache=True)
    engine.add("first", prompt(30))
    engine.run()
    engine.add("again", prompt(30))
    engine.run()
    assert kvpipe.scheduler.counters["tokens_loaded"] == 0
    engine.blocks.clear()
    loaded = engine.add("loaded", prompt(30))
    engine.run()
    assert kvpipe.scheduler.counters["tokens_loaded"] == 28
    check([loaded])
    settled(engine, kvpipe)


@pytest.mark.parametrize("load", ["sync", "async"])
def test_preempted_requests_get_their_answers(world: World, load: str) -> None:
    """When blocks run out while other requests save and load, every request still gets its answer."""
    engine, kvpipe = world.make(blocks=14, load=load)
    rounds: list[Request] = []
    for turn in range(3):
        asked = [engine.add(f"{turn}.{i}", prompt(14 + turn, seed=i), 16) for i in range(4)]
        engine.run()
        rounds += asked
    check(rounds)
    assert sum(request.num_preemptions for request in rounds) > 3
    assert kvpipe.scheduler.counters["tokens_loaded"] > 100
    assert faults(kvpipe) == {}
    settled(engine, kvpipe)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_restart_finds_the_disk(world: World, tmp_path: Path, ranks: int) -> None:
    """Another engine with the same weights loads the KV that this engine has computed.

    An engine with other weights finds no KV.
    """
    tier = {"kind": "disk", "path": str(tmp_path), **PATIENT}
    keys: dict[str, Any] = {
        "tiers": [tier],
        "lookup_ms_max": PATIENT_MS,
        "lookup_slow_ms_max": PATIENT_MS,
        "ranks": ranks,
    }
    engine, kvpipe = world.make(**keys)
    engine.add("first", prompt(30))
    engine.run()
    kvpipe.shutdown()
    engine, kvpipe = world.make(**keys)
    again = engine.add("again", prompt(30))
    engine.run()
    check([again])
    assert kvpipe.scheduler.counters["tokens_loaded"] >= 24
    assert faults(kvpipe) == {}
    settled(engine, kvpipe)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("load", ["sync", "async"])
def test_failed_loads_are_computed(world: World, load: str, ranks: int) -> None:
    """Every second load fails. The tokens of a failed load are computed, and no KV that depends on the load is kept."""

    def fails(direction: Direction, second: bool, layer: int) -> bool:
        return direction is Direction.LOAD and second and layer == 1

    engine, kvpipe = world.make(ranks=ranks, load=load, copier=lambda: FaultyCpuEngine(0, fails), prefix_cache=True)
    asked = [engine.add("first", prompt(30))]
    engine.run()
    for turn in range(4):
        engine.blocks.clear()
        asked += [engine.add(f"{turn}.{i}", prompt(20 + 2 * turn, seed=i, shared=16)) for i in range(3)]
        engine.run()
    check(asked)
    assert faults(kvpipe)["load_failed"] > 1
    assert kvpipe.scheduler.counters["tokens_loaded"] > 100
    settled(engine, kvpipe)


def test_blocks_are_kept_until_the_load_of_an_aborted_request_has_ended(world: World) -> None:
    """The load of an aborted request still writes to its blocks, so no other request may get these blocks yet."""
    copiers: list[HeldEngine] = []

    def copier() -> HeldEngine:
        copiers.append(HeldEngine())
        return copiers[-1]

    engine, kvpipe = world.make(load="async", copier=copier)
    engine.add("first", prompt(30))
    engine.run()
    gone = engine.add("gone", prompt(30))
    engine.step()
    assert gone.request_id in engine.loading
    engine.abort(gone)
    other = engine.add("other", prompt(30, seed=1))
    while not other.done:
        engine.step()
    assert engine.blocks.free() < engine.blocks.count
    copiers[0].tick(Direction.LOAD, 100)
    engine.run()
    check([other])
    assert faults(kvpipe) == {}
    settled(engine, kvpipe)


def test_chunks_are_not_found_after_a_reset(world: World) -> None:
    """After a reset, a lookup finds no KV that was saved before the reset."""
    engine, kvpipe = world.make()
    engine.add("first", prompt(30))
    engine.run()
    engine.reset()
    again = engine.add("again", prompt(30))
    engine.run()
    check([again])
    assert kvpipe.scheduler.counters["tokens_loaded"] == 0
    settled(engine, kvpipe)
