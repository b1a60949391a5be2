"""Engines with slots of several sizes share one memory. Each byte belongs to one region at a time."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from kvpipe.machine.headroom import Headroom
from kvpipe.node.clients import RefusedError
from kvpipe.node.layout import BEAT, REGIONS_MAX, VERSION, SlotRecord
from kvpipe.node.messages import Hello
from kvpipe.statemachine import node_slot as m
from kvpipe.testing.waiting import eventually
from tests.rigs.node_engine import BusyEngine
from tests.rigs.node_processes import processes
from tests.rigs.node_regions import FUSE, SIZES, SLOTS, RegionsWorld, SizedEngine, fused
from tests.rigs.node_replica import evict_all

OTHER_BYTES = 12288
SEEDS, MOVES = 4, 400


def test_region_gets_the_least_recently_used_memory(world: RegionsWorld) -> None:
    """The second engine may save as soon as it has started. The first engine loses only its oldest chunks."""
    first = world.start(SIZES[0])
    assert world.saves(first, range(SLOTS)) >= SLOTS - 4
    before = first.index()
    second = world.start(SIZES[1])
    small, large = world.usable
    assert large >= SLOTS * SIZES[0] // SIZES[1] // 4
    assert SLOTS // 2 < small < SLOTS
    assert world.saves(second, range(10)) >= 8
    assert len(second.index()) >= 8
    lost = before.keys() - first.index().keys()
    assert 0 < len(lost) < SLOTS // 2
    assert max(map(int, lost)) < 3 * SLOTS // 4
    usages = [region.keeper.usage() for region in world.memory.regions.values()]
    assert [usage.unready for usage in usages] == [0, 0]
    assert [usage.elsewhere for usage in usages] == [
        usage.slots - usable for usage, usable in zip(usages, world.usable, strict=True)
    ]
    assert first.slot_bytes * world.usable[0] + second.slot_bytes * world.usable[1] <= SLOTS * SIZES[0]


def test_busy_region_grows_and_idle_region_shrinks_both_ways(world: RegionsWorld) -> None:
    """The memory follows the use. An idle engine keeps the slots that were granted to it."""
    first, second = world.start(SIZES[0]), world.start(SIZES[1])
    world.saves(first, range(100))
    world.saves(second, range(300))
    small, large = world.usable
    assert large * SIZES[1] > small * SIZES[0]
    assert small >= len(first.stock.grants) > 0
    world.saves(first, range(1000, 1300))
    assert world.usable[0] * SIZES[0] > world.usable[1] * SIZES[1]
    assert world.usable[1] >= len(second.stock.grants) > 0


def test_single_size_owns_all_memory(world: RegionsWorld) -> None:
    """With one slot size, no memory moves to another region and no chunk is lost."""
    first = world.start(SIZES[0])
    world.saves(first, range(3 * SLOTS))
    assert world.usable == [SLOTS]
    assert len(world.memory.status().memories) == 1


def test_leased_chunk_and_granted_slot_are_not_taken(world: RegionsWorld) -> None:
    """The second engine gets no memory while the first engine leases all chunks."""
    first = world.start(SIZES[0])
    world.saves(first, range(SLOTS))
    assert all(first.pin(key) for key in first.index())
    second = world.start(SIZES[1])
    assert world.saves(second, range(5)) == 0
    assert world.memory.regions[1].keeper.counts["not_grown"] > 0
    assert first.index().keys() == {key for _, _, key in first.pinned}
    while first.pinned:
        first.unpin()
    assert world.saves(second, range(5)) > 0


def test_lease_taken_during_the_transfer_keeps_the_slot(world: RegionsWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder sees the lease after its fence. Free slots of the same range stay with their region."""
    first = world.start(SIZES[0])
    world.saves(first, range(SLOTS))
    keeper, client = world.memory.regions[0].keeper, first.client
    assert first.segment is not None
    assert client is not None
    leases = first.segment.leases_of(client.row)
    with monkeypatch.context() as patched:
        patched.setattr(
            keeper, "_fence", lambda: leases.__setitem__(slice(None), memoryview(b"\1" * leases.nbytes).cast("I"))
        )
        second = world.start(SIZES[1])
    world.check()
    assert world.usable == [SLOTS, 0]
    assert keeper.usage().evicting > 0
    leases[:] = memoryview(bytes(leases.nbytes)).cast("I")
    keeper.drain()
    world.check()
    assert world.saves(second, range(5)) > 0


def test_engines_of_both_sizes_find_their_chunks_after_a_restart(world: RegionsWorld) -> None:
    """Chunks of a size stay when its last engine ends, also if another holder takes over."""
    first, second = world.start(SIZES[0]), world.start(SIZES[1])
    world.saves(first, range(20))
    world.saves(second, range(20))
    for engine, other in ((first, second), (second, first)):
        found = engine.index().keys()
        world.end(engine)
        world.take_over()
        assert other.pin(next(iter(other.index())))
        again = world.start(engine.slot_bytes)
        assert again.index().keys() == found
        assert len(found) > 10


def test_memory_has_a_bounded_number_of_slot_sizes(world: RegionsWorld) -> None:
    """A new size replaces a size without engines.

    The chunks of the replaced size are lost, and its bytes are used again.
    """
    sizes = [8192 + 64 * n for n in range(REGIONS_MAX)]
    engines = [world.start(SIZES[0]), *(world.start(size) for size in sizes[:-1])]
    world.saves(engines[3], range(8))
    world.start(sizes[-1])
    assert world.counts["refused"] == 1
    world.end(engines[3])
    new = world.start(sizes[-1])
    assert new.segment is not None
    assert new.segment.layout.region == 3
    assert new.index() == {}
    world.check()
    world.take_over()
    assert world.saves(new, range(8)) > 0
    assert sorted(region.segment.layout.slot_bytes for region in world.memory.regions.values()) == sorted(
        [SIZES[0], *(size for size in sizes if size != sizes[2])]
    )


def test_holder_that_dies_while_it_replaces_a_size_loses_no_other_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next holder either finds the old size whole, or does not find it."""
    fused(monkeypatch)
    monkeypatch.setattr("kvpipe.node.memory.REGIONS_MAX", 2)
    for step in (1, 9, 25):
        world = RegionsWorld()
        first, second = world.start(SIZES[0]), world.start(SIZES[1])
        world.saves(first, range(8))
        world.saves(second, range(8))
        world.end(second)
        FUSE.left = step
        world.start(SIZES[2])
        assert world.counts["killed"] == 1
        assert len(first.index()) == 8
        world.check()
        world.close()


def test_processes_of_one_engine_have_slots_of_one_size(world: RegionsWorld) -> None:
    """A rank whose slots had another size would write its part of a slot into slots of other engines."""
    first = world.start(SIZES[0])
    world.start(SIZES[1])
    for size in SIZES[1:]:
        hello = Hello(VERSION, "rank", first.token, b"n" * 32, SLOTS, size)
        with pytest.raises(
            RefusedError, match=f"needs slots of {size} bytes, another one of its engine needs {SIZES[0]}"
        ):
            world.memory.region_for(hello)


def test_memory_whose_slots_overlap_is_refused(world: RegionsWorld) -> None:
    """A client has written into the tables. If a holder served such a memory, the chunks would be torn."""
    first, second = world.start(SIZES[0]), world.start(SIZES[1])
    world.saves(first, range(SLOTS))
    world.saves(second, range(4))
    segment, keeper = world.memory.regions[0]
    slot = next(slot for slot in range(SLOTS) if slot not in keeper._usable)
    at = segment.layout.table_at + slot * 112
    before = bytes(segment.buffer[at : at + 112])
    segment.buffer[at : at + 112] = SlotRecord(1, slot, m.PUBLISHED, 1, key=b"k").pack()
    with pytest.raises(ValueError, match="slots of another size own it"):
        world.memory._open(0, segment)
    segment.buffer[at : at + 112] = before


def _beats(*engines: SizedEngine) -> list[int]:
    """Return the value of the holder's clock that each engine sees."""
    return [engine.segment.words[BEAT] for engine in engines if engine.segment is not None]


def test_engines_of_all_sizes_see_the_clock_move_while_the_holder_reads_tables(
    world: RegionsWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the clock stood still, engines would kill each new holder of a memory with many slots."""
    engines = world.start(SIZES[0]), world.start(SIZES[1])
    world.saves(engines[0], range(8))
    monkeypatch.setattr("kvpipe.node.ledger.BEAT_SLOTS", 4)
    before, pieces = _beats(*engines), (SLOTS + SLOTS * SIZES[0] // SIZES[1]) // 4
    world.take_over()
    assert all(now - then > 5 * pieces for now, then in zip(_beats(*engines), before, strict=True)), "5 loops over all"
    before = _beats(*engines)
    evict_all(world.memory.regions[0].keeper)
    assert all(now > then for now, then in zip(_beats(*engines), before, strict=True))


def test_engines_see_the_clock_move_while_the_holder_writes_tables(
    world: RegionsWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the clock stood still while the holder makes many small slots, other engines would kill the holder."""
    first = world.start(SIZES[0])
    monkeypatch.setattr("kvpipe.node.segment.PIECE_BYTES", 512)
    (before,) = _beats(first)
    second = world.start(SIZES[1])
    assert second.segment is not None
    assert _beats(first)[0] - before > second.segment.layout.tables_bytes // 512 - 10


def test_second_size_with_too_many_slots_is_refused(world: RegionsWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the smallest slot size that the memory accepts."""
    monkeypatch.setattr("kvpipe.node.memory.REGION_SLOTS_MAX", 50)
    least = SLOTS * SIZES[0] // 51 + 1
    with pytest.raises(RefusedError, match=f"at most 50 slots, so it needs at least {least} bytes.*chunk_tokens"):
        world.memory.region_for(Hello(VERSION, "scheduler", b"t" * 16, b"n" * 32, SLOTS, least - 1))
    world.memory.region_for(Hello(VERSION, "scheduler", b"t" * 16, b"n" * 32, SLOTS, least))


def test_second_size_needs_free_memory_for_its_tables(world: RegionsWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables of many small slots could take memory that engines need. The engine may try again later."""
    monkeypatch.setattr("kvpipe.node.segment.tightest", lambda: Headroom(9 << 10, 100 << 10, "a limit"))
    with pytest.raises(RefusedError, match=r"get no tables: \d+ bytes are needed, but only 4096 are free") as caught:
        world.memory.region_for(Hello(VERSION, "scheduler", b"t" * 16, b"n" * 32, SLOTS, SIZES[1]))
    assert caught.value.again


@pytest.mark.parametrize("sizes", [2, REGIONS_MAX])
def test_holder_killed_at_any_store_loses_and_damages_no_chunk(monkeypatch: pytest.MonkeyPatch, sizes: int) -> None:
    """All runs together cause every kind of event, so the test cannot pass by doing nothing.

    With room for two sizes, the third size replaces the second one.
    """
    fused(monkeypatch)
    monkeypatch.setattr("kvpipe.node.memory.REGIONS_MAX", sizes)
    total: Counter[str] = Counter()
    for seed in range(SEEDS):
        made = RegionsWorld()
        made.play(seed, MOVES)
        made.close()
        total += made.counts
    for name in ("published", "evicted", "grown", "killed", "takeovers"):
        assert total[name] > SEEDS, (name, total)
    assert (total["refused"] > 0) == (sizes == 2)


def test_killed_engines_of_two_sizes_lose_and_damage_no_chunk(short_path: Path) -> None:
    """Engines restart and hit while the other size serves. A killed holder loses no chunk of either size."""
    with processes(short_path) as node:
        observer = node.observe()
        node.saves_on(100)
        victim = node.start(1, slot_bytes=OTHER_BYTES)
        assert victim.busy.recv() == "busy"
        node.kill(victim)
        node.saves_on()
        other = BusyEngine(node.folder, 2, slot_bytes=OTHER_BYTES)

        def both(true: object) -> bool:
            observer.step()
            other.step()
            assert observer.wrong == other.wrong == 0
            assert callable(true)
            return bool(true())

        assert eventually(lambda: both(lambda: other.pool.state == "ATTACHED"))
        old = node.holder()
        os.kill(old, signal.SIGKILL)
        assert eventually(lambda: both(lambda: node.holder() not in {0, old}))
        assert eventually(lambda: both(lambda: observer.pool.state == other.pool.state == "ATTACHED"))
        wanted = [(one, one.saved + 20, one.hits + 20) for one in (observer, other)]
        assert eventually(
            lambda: both(lambda: all(one.saved > saved and one.hits > hits for one, saved, hits in wanted))
        )
        again = node.start(3, slot_bytes=OTHER_BYTES)
        assert again.busy.recv() == "busy"
        node.kill(again)
        other.pool.close()
        node.rest()
