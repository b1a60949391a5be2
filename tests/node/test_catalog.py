"""Scheduler sides share one memory: each side loads chunks that others have saved, and no wrong bytes are ever read."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvpipe.cache.catalog import Catalog
from kvpipe.node.catalog import NodeCatalog
from kvpipe.node.keeper import Keeper
from kvpipe.node.replica import RECORDS_MAX, NodeLeases, SlotPins, split
from kvpipe.protocol.messages import Job
from kvpipe.statemachine.core import IllegalTransition
from kvpipe.testing.direct_node import DirectNode, DirectPool
from kvpipe.testing.node_integrity import check_node_integrity
from tests.rigs.node_replica import evict_all
from tests.rigs.scheduler_world import SAVE, SchedulerWorld

CHUNK = 4
SLOT_BYTES = 4096
TORN = b"torn"


class NodeWorld(SchedulerWorld):
    """An engine on a memory. All engines of a memory share `pages`, the expected content of each page of each slot."""

    def __init__(self, node: DirectNode, pages: dict[tuple[int, int], bytes], stock: int = 2, **world: Any) -> None:
        self.pool = DirectPool(node, stock)
        super().__init__(chunk_units=CHUNK, slots=node.slots, node=self.pool, also_of="layout {}".format, **world)
        self.pages, self.requests = pages, list[Any]()
        self.written: dict[tuple[int, int, int], bytes] = {}
        self.side.ranks_ready({}, ["weights"] * self.ranks)
        self.side.node.poll()  # type: ignore[union-attr]

    @property
    def catalog(self) -> NodeCatalog:
        """The engine's catalog."""
        assert isinstance(self.side.catalog, NodeCatalog)
        return self.side.catalog

    def step(self, *requests: Any, boundaries: tuple[int, ...] = ()) -> list[Job]:
        """Begin the copies of a step. Pages of saves are torn until their job is over."""
        before = dict(self.pages)
        jobs = super().step(*requests, boundaries=boundaries)
        for job in jobs:
            if job.kind == SAVE:
                for _, slot, page, _ in job.table().tolist():
                    self.written[job.id, slot, page] = self.pages[slot, page]
        self.pages.clear()
        self.pages.update(before)
        for job in jobs:
            if job.kind == SAVE:
                self.pages.update({(slot, page): TORN for _, slot, page, _ in job.table().tolist()})
        return jobs

    def end(self, job: Job, *, ok: bool = True) -> None:
        """End the copies of a job, and report the job."""
        rows = job.table().tolist()
        if job.kind == SAVE:
            for _, slot, page, _ in rows:
                self.pages[slot, page] = self.written.pop((job.id, slot, page)) if ok else TORN
        else:
            table = self.tables[0][job.request]
            hashes = next(one for one in self.requests if one.request_id == job.request).block_hashes
            for _, slot, page, block in rows:
                unit = next(i for i, held in enumerate(table) if held.block_id == block)
                assert self.pages[slot, page] == hashes[unit], "a load has read another chunk's bytes"
        self.report((job, int(ok), int(not ok)))

    def check(self) -> None:
        """Check the catalog, and the bytes of every chunk that a lookup would pin."""
        check_node_integrity(self.catalog)
        generations = self.catalog._segment.generations
        for key, chunk in self.catalog.index(0).items():
            if chunk.generation == generations[chunk.slot]:  # type: ignore[attr-defined]
                held = [self.pages[chunk.slot, page] for page in range(chunk.ready)]
                assert held == self.prefixes[key][-chunk.ready :], f"{key!r} is found where {held} lie"

    def begin(self, request: Any, *units: int) -> None:
        """Admit a request, and let it grow to each number in `units`. The copies of each step end within the step."""
        self.requests = [request]
        self.admit(request)
        for grown in units:
            self.grow(request, grown)
            for job in self.step(request):
                self.end(job)

    def run(self, request: Any) -> None:
        """Run a request to its end, and let the holder publish its chunks."""
        self.requests = [*self.requests, request]
        self.admit(request)
        for job in self.step(request):
            self.end(job)
        self.side.finished(request)
        for _ in range(3):
            self.step()


class Worlds:
    """A memory and its engines."""

    def __init__(self, slots: int) -> None:
        self.node, self.pages = DirectNode(slots, SLOT_BYTES), dict[tuple[int, int], bytes]()
        self.engines: list[NodeWorld] = []

    def start(self, stock: int = 2, **world: Any) -> NodeWorld:
        """Start an engine."""
        made = NodeWorld(self.node, self.pages, stock, **world)
        self.engines.append(made)
        if len(self.engines) > 1:
            made.prefixes = self.engines[0].prefixes
        return made

    def close(self) -> None:
        """Close the memory."""
        self.node.close()


def test_engine_finds_a_published_chunk_of_another_engine(worlds: Worlds) -> None:
    """A chunk is a miss until it is published, and then a hit for every engine."""
    first, second = worlds.start(), worlds.start()
    one = first.request("one", 8, shared=8)
    first.requests = [one]
    first.admit(one)
    (job,) = first.step(one)
    first.end(job)
    other = second.request("other", 8, shared=8, extra=1)
    assert second.ask(other) == 0
    second.step()
    first.step()
    first.step()
    second.step()
    assert second.ask(other) == 8 * 16
    second.run(other)


def test_hit_that_the_holder_has_evicted_is_a_miss(worlds: Worlds) -> None:
    """An engine that has not read the eviction yet cannot pin the chunk. So it looks the prompt up again."""
    first, second = worlds.start(), worlds.start()
    first.run(first.request("one", 8, shared=8))
    second.step()
    assert second.found(second.request("probe", 8, shared=8)) == 8
    evict_all(worlds.node.keeper)
    assert second.ask(second.request("other", 8, shared=8, extra=1)) == 0
    second.step()
    second.check()


def test_pins_last_until_the_load_has_landed(worlds: Worlds) -> None:
    """If a lookup of this step or a load has pinned a slot, the holder does not reuse the slot."""
    first, second = worlds.start(), worlds.start()
    first.run(first.request("one", 8, shared=8))
    second.step()
    other = second.request("other", 8, shared=8, extra=1)
    second.requests = [other]
    tokens = second.ask(other)
    evict_all(worlds.node.keeper)
    assert worlds.node.keeper.usage().evicting == 2
    second.side.admitted(other, second.allocate(other), tokens)
    other.num_computed_tokens = tokens
    jobs = second.step(other)
    assert worlds.node.keeper.usage().evicting == 2
    for job in jobs:
        second.end(job)
    second.step()
    assert worlds.node.keeper.usage().evicting == 0


def test_reset_changes_no_other_engine(worlds: Worlds) -> None:
    """After its reset, the engine finds no earlier chunk and saves again.

    Another engine still finds the earlier chunks.
    """
    first, second = worlds.start(), worlds.start()
    first.run(first.request("one", 8, shared=8))
    first.side.reset()
    first.step()
    first.step()
    again = first.request("again", 8, shared=8)
    assert first.ask(again) == 0
    first.run(again)
    assert first.found(again) == 8
    second.step()
    assert second.found(second.request("other", 8, shared=8)) == 8
    assert worlds.node.keeper.usage().published == 4


def test_new_weights_find_no_chunk_of_old_ones(worlds: Worlds) -> None:
    """An engine that gets its old weights back finds its old chunks."""
    first = worlds.start()
    one = first.request("one", 8, shared=8)
    first.run(one)
    for digest, found in (("other", 0), ("weights", 8)):
        first.side.ranks_ready({}, [digest])
        first.catalog.poll()
        first.catalog.poll()
        assert first.found(one) == found


def test_lookup_may_wait_for_an_adapter(worlds: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lookup waits, so that a restarted engine finds chunks with its first request of an adapter."""
    world, asked = worlds.start(), list[bool]()
    monkeypatch.setattr(world.side.adapters, "waits", lambda *_, worth: asked.append(worth))
    request = world.request("one", 8)
    request.lora_request = SimpleNamespace(
        lora_int_id=1, lora_name="x", lora_path="/x", load_inplace=False, is_3d_lora_weight=False
    )
    world.ask(request)
    assert asked == [True]


def test_private_namespace_waits_for_no_holder(worlds: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    """A private namespace has no chunks of other engines, so the engine need not wait for the holder."""
    world, waits = worlds.start(), list[float]()
    world.pool.mute = True
    monkeypatch.setattr("kvpipe.node.catalog.time.sleep", waits.append)
    world.catalog.name_space("")
    assert not waits


def test_scan_of_a_large_table_ends_at_its_deadline() -> None:
    """Later polls scan the rest of the table. The scheduler's thread must not wait for the whole scan."""
    worlds = Worlds(4 * RECORDS_MAX)
    follower = worlds.start().catalog._follower
    assert follower is not None
    follower._scan()
    whole = []
    for until in (0, math.inf):
        follower.read_all(until)
        whole.append(follower.is_whole)
    assert whole == [False, True]
    worlds.node.close()


def test_hits_and_saves_continue_without_a_holder(worlds: Worlds) -> None:
    """Without a holder, only saves beyond the stock are lost. The next holder publishes the landed chunks."""
    first, second = worlds.start(stock=4), worlds.start()
    one = first.request("one", 8, shared=8)
    first.run(one)
    first.pool.mute = True
    assert first.ask(first.request("two", 8, shared=8, extra=1)) == 8 * 16
    three = first.request("three", 8)
    first.run(three)
    assert first.found(three) == 0
    worlds.node.take_over()
    first.pool.mute = False
    for _ in range(3):
        first.step()
        second.step()
    assert first.found(three) == 8
    assert second.found(one) == 8


class RandomEngines:
    """Three engines share few slots. Each move is a random call of a random engine."""

    def __init__(self, seed: int) -> None:
        self.chance, self.worlds, self.loaded = random.Random(seed), Worlds(14), 0
        self.engines = [self.worlds.start() for _ in range(3)]
        self.jobs: list[list[Job]] = [[], [], []]

    def play(self, moves: int = 250) -> int:
        """Return how many tokens were loaded."""
        weighed = self.moves()
        for _ in range(moves):
            (move,) = self.chance.choices([*weighed], [*weighed.values()])
            move(self.chance.randrange(len(self.engines)))
            for one in self.engines:
                one.check()
        self.worlds.close()
        return self.loaded

    def moves(self) -> dict[Callable[[int], object], int]:
        """Return the weight of each move."""
        return {
            self.ask: 35,
            self.end: 40,
            self.grow: 20,
            self.preempt: 3,
            self.finish: 10,
            self.take_over: 2,
            self.reset: 2,
            self.restart: 3,
            self.step: 8,
        }

    def step(self, at: int) -> None:
        """Take a step without requests."""
        self.engines[at].step()

    def ask(self, at: int) -> None:
        """Admit a request with one of four prefixes."""
        world = self.engines[at]
        if len(world.requests) == 6:
            return
        prefix = self.chance.randrange(4)
        name = f"{prefix}/{self.chance.random()}"
        request = world.request(name, self.chance.randint(1, 12), extra=1)
        request.block_hashes = [f"{prefix}/{unit}".encode() for unit in range(len(request.block_hashes))]
        for unit, key in enumerate(request.block_hashes, 1):
            world.prefixes[key] = request.block_hashes[:unit]
        world.requests = [*world.requests, request]
        self.loaded += world.admit(request)
        self.jobs[at] += world.step(request)

    def grow(self, at: int) -> None:
        """Let a request decode up to two units."""
        world = self.engines[at]
        if world.requests:
            request = self.chance.choice(world.requests)
            world.grow(request, len(request.block_hashes) + self.chance.randint(1, 2))
            self.jobs[at] += world.step(request)

    def preempt(self, at: int) -> None:
        """Take the blocks of a request without jobs, and admit the request again."""
        world, busy = self.engines[at], {job.request for job in self.jobs[at]}
        idle = [request for request in world.requests if request.request_id not in busy]
        if idle:
            request = self.chance.choice(idle)
            world.preempt(request)
            self.loaded += world.admit(request)
            self.jobs[at] += world.step(request)

    def end(self, at: int) -> None:
        """End a job. Some saves fail."""
        if jobs := self.jobs[at]:
            job = jobs.pop(self.chance.randrange(len(jobs)))
            self.engines[at].end(job, ok=job.kind != SAVE or self.chance.random() < 0.9)

    def finish(self, at: int) -> None:
        """Finish all requests without jobs."""
        world, busy = self.engines[at], {job.request for job in self.jobs[at]}
        for request in world.requests:
            if request.request_id not in busy:
                world.side.finished(request)
        world.requests = [request for request in world.requests if request.request_id in busy]

    def take_over(self, _: int) -> None:
        """Kill the holder."""
        self.worlds.node.take_over()

    def reset(self, at: int) -> None:
        """Reset an engine's cache."""
        self.engines[at].side.reset()

    def restart(self, at: int) -> None:
        """Kill an engine, and start another one."""
        if not self.jobs[at]:
            self.engines[at].pool.die()
            self.engines[at] = self.start()

    def start(self) -> NodeWorld:
        """Start an engine."""
        return self.worlds.start()


def test_random_engines_read_only_their_chunks() -> None:
    """Leases, stock and bytes are consistent after each move, and loads happen."""
    assert sum(RandomEngines(seed).play() for seed in range(4)) > 0


def _no_second_check(leases: NodeLeases, stamps: bytes) -> SlotPins:
    slots = np.array([slot for slot, _ in split(stamps)], np.int64)
    np.add.at(leases._row, slots, np.uint32(1))
    return slots


def _reported_when_planned(catalog: NodeCatalog, chunk: Any, stop: int, key: bytes, **more: Any) -> Any:
    piece = Catalog.write(catalog, chunk, stop, key, **more)
    catalog.pool.stock.landed(chunk.slot, chunk.group, key, stop, catalog._digest)
    return piece


MUTANTS = {
    "no second check": (NodeLeases, "pin", _no_second_check, 50),
    "leases are not seen": (Keeper, "_is_leased", lambda *_: False, 4),
    "published before it has landed": (NodeCatalog, "write", _reported_when_planned, 0),
}
"""For each mutant: the place of the patch, the wrong code, and the first seed that is tried."""


def _play(first: int) -> None:
    for seed in range(first, first + 80):
        RandomEngines(seed).play()


@pytest.mark.parametrize("name", MUTANTS)
def test_random_engines_find_mutants(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The random test finds mutants that read a slot while it is being written or after it was reused."""
    where, what, wrong, first = MUTANTS[name]
    monkeypatch.setattr(where, what, wrong)
    with pytest.raises((AssertionError, IllegalTransition)):
        _play(first)
