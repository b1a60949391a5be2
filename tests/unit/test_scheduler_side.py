"""What reviews found on the scheduler side, one test per claim; vLLM is played by plain namespaces."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from kvpipe.catalog import Chunk
from kvpipe.config import load_settings
from kvpipe.connectors.vllm.room import Room
from kvpipe.connectors.vllm.scheduler import LATER_STEPS_MAX, SchedulerSide
from kvpipe.connectors.vllm.spoiled import Part, Spoiled
from kvpipe.geometry import Geometry, Group, Layer
from kvpipe.plan import BROKEN, Job, Kind

UNIT = 16
SAVE, SYNC, ASYNC = Kind.SAVE, Kind.LOAD_SYNC, Kind.LOAD_ASYNC


class Tally(NamedTuple):
    """As in the connector's metadata, which needs vLLM."""

    ok: int
    bad: int


class Block(NamedTuple):
    """A paged block as a block table holds it."""

    block_id: int
    is_null: bool


class CountingIndex(dict[bytes, Chunk]):
    """An index that counts how often it is asked."""

    probes = 0

    def __contains__(self, key: object) -> bool:
        """Count and ask."""
        self.probes += 1
        return super().__contains__(key)

    def get(self, key: bytes, default: Any = None) -> Any:
        """Count and ask."""
        self.probes += 1
        return super().get(key, default)


def _geometry(windows: tuple[int | None, ...], chunk_units: int, slots: int) -> Geometry:
    groups = tuple(Group((Layer(f"l{i}", 64),), UNIT, window) for i, window in enumerate(windows))
    return Geometry(groups, chunk_units * UNIT, slots * 4096)


class World:
    """A scheduler side, the requests and block tables around it, and what every page of every slot holds."""

    def __init__(
        self,
        *,
        windows: tuple[int | None, ...] = (None,),
        chunk_units: int = 16,
        slots: int = 256,
        ranks: int = 1,
        loads: bool = True,
        load: str = "auto",
    ) -> None:
        """An empty cache."""
        settings = load_settings({"load": load})
        geometry = _geometry(windows, chunk_units, slots)
        self.ranks, self.groups, self.free = ranks, len(windows), 1 << 20
        self.side = SchedulerSide(settings, geometry, hash_tokens=UNIT, ranks=ranks, saves=True, loads=loads)
        self.tables: list[dict[str, list[Block]]] = [{} for _ in windows]
        self.forgotten: set[int] = set()
        managers = [SimpleNamespace(req_to_blocks=tables) for tables in self.tables]
        self.side.bind(
            SimpleNamespace(
                coordinator=SimpleNamespace(single_type_managers=managers),
                evict_blocks=self.forgotten.update,
                block_pool=SimpleNamespace(get_num_free_blocks=lambda: self.free),
            )
        )
        self.prefixes: dict[bytes, list[bytes]] = {}
        self.pages: dict[tuple[int, int], bytes] = {}
        self._blocks = 0

    def request(self, name: str, units: int, *, shared: int = 0, extra: int = 0) -> Any:
        """Make a request of `units` units and `extra` tokens; the first `shared` units are common to all requests."""
        made = SimpleNamespace(request_id=name, num_preemptions=0, num_computed_tokens=0, block_hashes=[])
        made.num_tokens = made.num_prompt_tokens = units * UNIT + extra
        made.shared = shared
        self._hash(made)
        return made

    def grow(self, request: Any, units: int) -> None:
        """Let `request` generate tokens until it has `units` units."""
        request.num_tokens = units * UNIT
        self._hash(request)
        self.allocate(request)

    def _hash(self, request: Any) -> None:
        for unit in range(len(request.block_hashes), request.num_tokens // UNIT):
            whose = "" if unit < request.shared else request.request_id
            request.block_hashes.append(f"{whose}/{unit}".encode())
            self.prefixes[request.block_hashes[-1]] = list(request.block_hashes)

    def allocate(self, request: Any, null: int = 0) -> Any:
        """Extend the request's block tables to its tokens; the first `null` blocks are null."""
        for tables in self.tables:
            table = tables.setdefault(request.request_id, [])
            while len(table) * UNIT < request.num_tokens:
                self._blocks += 1
                table.append(Block(0, is_null=True) if len(table) < null else Block(self._blocks, is_null=False))
        return SimpleNamespace(blocks=tuple(tables[request.request_id] for tables in self.tables))

    def ask(self, request: Any, local: int = 0) -> int:
        """Look up, and return the tokens that are promised."""
        tokens, _ = self.side.lookup(request, local)
        assert tokens is not None
        return tokens

    def admit(self, request: Any) -> int:
        """Look up and admit `request`, loading what is held. Returns the tokens that the load brings."""
        tokens = self.ask(request)
        self.side.admitted(request, self.allocate(request), tokens)
        request.num_computed_tokens = tokens
        return tokens

    def admit_local(self, request: Any, tokens: int) -> int:
        """Look up and admit `request` when vLLM's own cache holds `tokens`. Returns what kvpipe would have added."""
        external = self.ask(request, tokens)
        self.side.admitted(request, self.allocate(request), 0)
        request.num_computed_tokens = tokens
        return external

    def step(self, *requests: Any) -> list[Job]:
        """Schedule all the tokens that `requests` have left, and return the step's jobs."""
        scheduled = {r.request_id: r.num_tokens - r.num_computed_tokens for r in requests}
        plan = self.side.plan_step(SimpleNamespace(num_scheduled_tokens=scheduled, preempted_req_ids=None))
        for request in requests:
            request.num_computed_tokens = request.num_tokens
        hashes = {r.request_id: r.block_hashes for r in requests}
        for job in plan.jobs:
            if job.kind == SAVE:
                for group, slot, page, block in job.table().tolist():
                    table = self.tables[group][job.request]
                    unit = next(i for i, held in enumerate(table) if held.block_id == block)
                    self.pages[slot, page] = hashes[job.request][unit]
        return list(plan.jobs)

    def report(self, *tallies: tuple[Job, int, int]) -> None:
        """Report (job, ok, bad) for each."""
        told: Any = {job.id: Tally(ok, bad) for job, ok, bad in tallies}
        self.side.reported(told)
        self.check()

    def succeed(self, *jobs: Job) -> None:
        """Report that every rank has done `jobs`."""
        self.report(*((job, self.ranks, 0) for job in jobs))

    def preempt(self, request: Any) -> None:
        """Take the request's blocks."""
        request.num_preemptions += 1
        request.num_computed_tokens = 0
        for tables in self.tables:
            del tables[request.request_id]

    def publish(self, request: Any) -> None:
        """Run `request` to its end with everything saved."""
        self.admit(request)
        self.succeed(*self.step(request))
        self.side.finished(request)
        assert self.found(request) == len(request.block_hashes)

    def found(self, request: Any) -> int:
        """Return the longest prefix of `request`, in units, that the first group's index names."""
        index = self.side.catalog.index(0)
        return max((i for i, key in enumerate(request.block_hashes, 1) if key in index), default=0)

    def drop(self, group: int, key: bytes) -> None:
        """Lose the chunk that is found under `key`."""
        chunk = self.side.catalog.find(group, key)
        assert chunk is not None
        self.side.catalog._drop(chunk)

    def check(self) -> None:
        """The catalog agrees with itself, and every prefix that can be found is in the pages that it names."""
        catalog = self.side.catalog
        catalog.check_integrity()
        for group in range(self.groups):
            for key, chunk in catalog.index(group).items():
                units = next(mark.units for mark in chunk.marks if mark.key == key)
                held = [self.pages[chunk.slot, page] for page in range(units)]
                assert held == self.prefixes[key][-units:], f"{key!r} is found where {held} lie"


def _slots(job: Job) -> list[int]:
    return [int(slot) for slot in job.table()[:, 1]]


# ---- the bugs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("apart", [False, True])
def test_nobody_continues_a_chunk_that_another_prefix_has_grown(apart: bool) -> None:
    """A chunk is continued only from the prefix hash at its tail: equal unit counts are not equal prefixes (ABA)."""
    world = World(ranks=2)
    first, fork = world.request("first", 3, shared=3), world.request("fork", 4, shared=3)
    world.admit(first)
    (j1,) = world.step(first)
    world.grow(first, 4)
    (j2,) = world.step(first)
    if apart:  # the second piece comes before the first, so it is lost and its claim given back
        world.report((j2, 2, 0))
        world.report((j1, 2, 0))
    else:
        world.report((j1, 1, 0))
        world.report((j2, 2, 0), (j1, 1, 0))
    assert world.admit_local(fork, 3 * UNIT) == 0
    (j3,) = world.step(fork)
    world.grow(first, 5)
    (j4,) = world.step(first)
    assert not set(_slots(j3)) & set(_slots(j4))
    assert (set(_slots(j1)) == set(_slots(j3))) is apart  # the fork adopts the chunk where its tail is the fork's
    world.succeed(j3, j4)
    assert world.side.catalog.find(0, fork.block_hashes[3]) is not None
    assert world.side.catalog.find(0, first.block_hashes[4]) is not None


def _without_lookup(world: World, request: Any) -> int:
    world.side.on_new_request(request)
    return 4 * UNIT


def _stale(world: World, request: Any) -> int:
    tokens = world.ask(request)
    world.step()
    return tokens


def _raising(world: World, request: Any) -> int:
    def boom(*_: object) -> Any:
        raise RuntimeError("boom")

    world.side._load_rows = boom  # type: ignore[method-assign, assignment]
    return world.ask(request)


def _half_leased(world: World, request: Any) -> int:
    lease = world.side.catalog.lease

    def boom(owner: Any, chunks: list[Chunk]) -> None:
        lease(owner, chunks[:1])
        raise RuntimeError("boom")

    world.side.catalog.lease = boom  # type: ignore[method-assign]
    return world.ask(request)


@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize("promise", [_without_lookup, _stale, _raising, _half_leased])
def test_a_load_that_cannot_be_planned_is_reported_as_failed(promise: Callable[[World, Any], int], load: str) -> None:
    """Every load that was granted is counted on: one that cannot be planned goes out with rows no rank accepts."""
    world = World(ranks=2, load=load)
    world.publish(world.request("old", 4, shared=4))
    request = world.request("new", 6, shared=4)
    tokens = promise(world, request)
    assert tokens == 4 * UNIT
    world.side.admitted(request, world.allocate(request, null=1), tokens)
    assert world.side.catalog.leases == 0
    jobs = world.step()
    assert [job.kind for job in jobs] == [SYNC if load == "sync" else ASYNC]
    assert _slots(jobs[0]) == [BROKEN] * 5
    assert jobs[0].blocks() == {b.block_id for b in world.tables[0]["new"] if not b.is_null}
    other = world.request("other", 2)
    world.admit(other)
    (save,) = world.step(other)
    world.report((jobs[0], 0, 2), (save, 2, 0))  # the other job's news is not lost on the way
    assert world.side.catalog.leases == 0
    assert not world.side.pending
    assert world.side.lookup(request, 0) == (0, False), "a request whose load has failed never loads again"


@pytest.mark.parametrize("load", ["sync", "async"])
def test_a_hit_that_vanished_is_emitted_as_broken(load: str) -> None:
    """A promised chunk that is gone at admission is in the job all the same, in rows that fail on every rank."""
    world = World(load=load, chunk_units=2)
    old = world.request("old", 4, shared=4)
    world.publish(old)
    request = world.request("new", 6, shared=4)
    tokens = world.ask(request)
    assert tokens == 4 * UNIT
    world.drop(0, old.block_hashes[3])
    world.side.admitted(request, world.allocate(request), tokens)
    (job,) = world.step()
    assert [slot == BROKEN for slot in _slots(job)] == [False, False, True, True]
    assert job.table()[:, 3].tolist() == [b.block_id for b in world.tables[0]["new"][:4]]
    assert world.side.counters["hit_vanished"] == 1
    assert world.side.catalog.leases == 1
    world.report((job, 0, 1))
    assert world.side.catalog.leases == 0


def test_one_failed_save_plan_costs_nobody_else_anything() -> None:
    """An exception while a save is planned loses neither loads nor other saves of the step, nor any claimed piece."""
    world = World(windows=(None, None), load="sync")
    world.publish(world.request("old", 2, shared=2))
    loading, broken, fine = world.request("loading", 4, shared=2), world.request("broken", 3), world.request("fine", 3)
    for request in (loading, broken, fine):
        world.admit(request)
    del world.tables[1]["broken"]  # the first group's piece has been claimed when this is found out
    jobs = world.step(broken, loading, fine)
    assert [(job.kind, job.request) for job in jobs] == [(SYNC, "loading"), (SAVE, "loading"), (SAVE, "fine")]
    world.check()
    assert world.side.counters["save_not_planned"] == 1
    assert world.side.catalog.writing == 4  # two requests in two groups
    world.succeed(*jobs)
    assert world.side.catalog.writing == world.side.catalog.leases == 0
    assert not world.side.pending
    assert (world.found(loading), world.found(broken), world.found(fine)) == (4, 0, 3)
    world.allocate(broken)
    world.grow(broken, 4)
    assert world.step(broken) == []


@pytest.mark.parametrize("bad", [0, 1])
def test_a_reset_ends_the_saving_of_running_requests(bad: int) -> None:
    """The KV that a running request goes on with may be what the reset is to forget: it saves after readmission."""
    world = World()
    request = world.request("running", 3)
    world.admit(request)
    (job,) = world.step(request)
    assert world.side.reset()
    world.grow(request, 4)
    assert world.step(request) == []
    world.report((job, 1 - bad, bad))
    world.grow(request, 40)
    assert world.step(request) == []
    assert world.found(request) == 0
    assert world.side.catalog.used == 0
    world.preempt(request)
    assert world.admit(request) == 0
    world.succeed(*world.step(request))
    assert world.found(request) == 40


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_hit_satisfies_every_sliding_window(order: tuple[int, int]) -> None:
    """A hit is shortened until all windows are held, not until one of them is."""
    world = World(windows=(None, 2 * UNIT + 1, 2 * UNIT + 1), chunk_units=2)
    old = world.request("old", 8, shared=8)
    world.publish(old)
    lacking, whole = (1 + i for i in order)
    world.drop(lacking, old.block_hashes[7])
    assert world.side.catalog.find(whole, old.block_hashes[7]) is not None
    request = world.request("new", 8, shared=8, extra=1)
    assert world.side.lookup(request, 0) == (6 * UNIT, True)
    world.side.admitted(request, world.allocate(request, null=4), 6 * UNIT)
    (load,) = world.step()
    assert BROKEN not in _slots(load)
    world.drop(whole, old.block_hashes[5])  # now the one holds units 4 and 5, the other 6 and 7
    assert world.side.lookup(world.request("newer", 8, shared=8, extra=1), 0) == (4 * UNIT, True)


@pytest.mark.parametrize("load", ["sync", "async"])
def test_a_whole_prompt_hit_of_a_windowed_model_leaves_one_unit(load: str) -> None:
    """The window of the recomputed last token reaches further back than the window that the hit was checked for."""
    world = World(windows=(2 * UNIT + 1,), chunk_units=2, load=load)
    old = world.request("old", 8, shared=8)
    world.publish(old)
    request = world.request("new", 8, shared=8)
    assert world.side.lookup(request, 0)[0] == 7 * UNIT
    world.drop(0, old.block_hashes[5])
    assert world.side.lookup(request, 0)[0] == 4 * UNIT
    world.side.admitted(request, world.allocate(request, null=2), 4 * UNIT)
    (job,) = world.step()
    assert BROKEN not in _slots(job)


def _together(world: World, load: Job, save: Job) -> None:
    world.report((load, 1, 1), (save, 2, 0))


def _one_rank_first(world: World, load: Job, save: Job) -> None:
    world.report((load, 0, 1), (save, 1, 0))
    world.report((save, 1, 0), (load, 1, 0))


def _save_lands_first(world: World, load: Job, save: Job) -> None:
    world.report((load, 0, 1))
    world.report((save, 2, 0))
    world.report((load, 1, 0))


def _bad_news_last(world: World, load: Job, save: Job) -> None:
    world.report((load, 1, 0), (save, 1, 0))
    world.report((load, 0, 1), (save, 1, 0))


@pytest.mark.parametrize("order", [_together, _one_rank_first, _save_lands_first, _bad_news_last])
def test_saves_planned_after_a_failed_load_are_not_believed(order: Callable[[World, Job, Job], None]) -> None:
    """What was computed on a failed load is not published though every rank says ok, nor is anything after it."""
    world = World(ranks=2)
    world.publish(world.request("old", 4, shared=4))
    request, beside = world.request("new", 6, shared=4), world.request("beside", 2)
    assert world.admit(request) == 4 * UNIT
    world.admit(beside)
    load, save, other = world.step(request, beside)
    assert (load.kind, save.kind, save.request) == (SYNC, SAVE, "new")
    order(world, load, save)
    world.succeed(other)
    assert world.found(request) == 4
    assert world.found(beside) == 0, "another request of the step may have hit the garbage in vLLM's own cache"
    assert load.blocks() <= world.forgotten
    assert world.side.catalog.leases == world.side.catalog.writing == 0
    request.num_computed_tokens = 0  # vLLM takes them back
    world.grow(request, 8)
    assert world.step(request) == []
    world.preempt(request)
    assert world.admit(request) == 0
    world.succeed(*world.step(request))
    assert world.found(request) == 8


def test_nothing_is_saved_between_the_first_bad_news_and_the_last_rank() -> None:
    """A request whose load one rank has failed saves nothing more, though the load has not landed yet."""
    world = World(ranks=2)
    world.publish(world.request("old", 4, shared=4))
    request = world.request("new", 6, shared=4)
    world.admit(request)
    load, save = world.step(request)
    world.report((load, 0, 1))
    request.num_computed_tokens = 0  # vLLM takes them back
    world.grow(request, 7)
    assert world.step(request) == []
    world.report((save, 2, 0))
    world.grow(request, 8)
    assert world.step(request) == []
    world.report((load, 1, 0))
    world.grow(request, 9)
    assert world.step(request) == []
    assert world.found(request) == 4


def test_an_async_load_waits_for_room() -> None:
    """Two requests that each hold blocks and need more than are left would wait for each other for ever."""
    world = World(load="async")
    world.publish(world.request("old", 4, shared=4))
    first, second = world.request("first", 6, shared=4), world.request("second", 8, shared=4)
    assert world.ask(first) == 4 * UNIT
    world.side.admitted(first, world.allocate(first), 4 * UNIT)
    del world.tables[0]["first"][4:]  # vLLM gives it no more than the load needs
    world.step()
    for free, answer in ((9, (None, False)), (10, (4 * UNIT, True))):  # two more for the first, eight for the second
        world.free = free
        assert world.side.lookup(second, 0) == world.side.lookup(second, 0) == answer
    world.free = 9
    for _ in range(LATER_STEPS_MAX):
        assert world.side.lookup(second, 0) == (None, False)
        world.step()
    assert world.side.lookup(second, 0) == (0, False), "it computes at last"
    world.allocate(first)
    world.step(first)
    assert world.side.lookup(second, 0) == (4 * UNIT, True), "nobody holds blocks any more without running"


def test_blocks_outside_of_a_window_are_not_held() -> None:
    """What a request needs in a group with a window is bounded by the window and a step, less what it really holds."""
    world = World(windows=(None, 2 * UNIT), load="async")
    room, manager = Room(world.side.geometry, 3 * UNIT), world.side._manager
    assert manager is not None
    request = world.request("one", 10)
    assert room.needed(request, manager) == 10 + 6
    world.allocate(request, null=4)
    del world.tables[0]["one"][6:], world.tables[1]["one"][6:]
    assert room.needed(request, manager) == 4 + 4


def test_a_spoiled_block_is_reported_to_who_would_read_it() -> None:
    """Two requests share a block whose load failed; the one that vLLM lets compute it anew is gone: the other does."""
    world = World()
    world.publish(world.request("old", 4, shared=4))
    first, second = world.request("first", 5, shared=4), world.request("second", 5, shared=4)
    assert world.admit(first) == 4 * UNIT
    world.allocate(second)
    table = world.tables[0]
    table["second"][:4] = table["first"][:4]  # local hits
    world.admit_local(second, 4 * UNIT)
    load, *saves = world.step(first, second)
    world.report((load, 0, 1), *((save, 1, 0) for save in saves))
    first.num_computed_tokens, second.num_computed_tokens = 0, 4 * UNIT  # as vLLM takes them back
    world.side.finished(first)
    del table["first"]
    told, retried = world.step(second)
    assert (told.kind, told.request, told.blocks()) == (SYNC, "second", {b.block_id for b in table["second"][:4]})
    assert set(_slots(told)) == {BROKEN}
    world.report((told, 0, 1), (retried, 1, 0))
    assert world.found(second) == 4, "what it computed from garbage is not saved"
    second.num_computed_tokens = 0
    assert world.step(second) == []
    second.num_computed_tokens = 4 * UNIT
    assert world.step(second) == [], "computed anew"
    assert world.side.catalog.leases == 0
    assert not world.side.pending


def test_loads_go_out_though_spoiled_blocks_cannot_be_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception there costs no other load of the step."""
    world = World()
    world.publish(world.request("old", 4, shared=4))
    world.side._spoiled.add({1000})
    monkeypatch.setattr(world.side, "_condemn", None)
    assert world.admit(world.request("new", 6, shared=4)) == 4 * UNIT
    (load,) = world.step()
    assert load.kind == SYNC
    assert world.side.counters["spoiled_blocks_not_reported"] == 1


@pytest.mark.parametrize(
    ("parts", "read"),
    [
        ([("a", 0, 32), ("b", 32, 40)], {}),  # computed in the same step
        ([("a", 0, 31), ("b", 32, 40)], {"b": [1]}),  # not to its end
        ([("b", 32, 40)], {"b": [1]}),
        ([("b", 20, 40)], {"b": [1]}),
        ([("b", 0, 40)], {}),
        ([("c", 32, 40)], {}),  # other blocks
    ],
)
def test_spoiled_blocks(parts: list[tuple[str, int, int]], read: dict[str, list[int]]) -> None:
    """A block is read too early unless its tokens up to there were computed anew, in this step at the latest."""
    spoiled = Spoiled(32)
    spoiled.add({1})
    tables = {"a": [1, 2], "b": [1, 3], "c": [4, 5]}
    assert spoiled.readers([Part(request, tables[request], *span) for request, *span in parts]) == read


def test_a_spoiled_block_is_computed_piece_by_piece() -> None:
    """One request may compute a block over several steps; only then others may read it."""
    spoiled = Spoiled(32)
    spoiled.add({1, 7})
    assert spoiled.readers([Part("a", [1], 0, 20)]) == {}
    assert spoiled.readers([Part("a", [1], 20, 31), Part("b", [1, 2], 32, 33)]) == {"b": [1]}
    assert spoiled.readers([Part("a", [1], 31, 33), Part("b", [1, 2], 32, 33)]) == {}
    assert spoiled
    spoiled.keep({1})
    assert not spoiled


@pytest.mark.parametrize("windows", [(None, 1024), (None, 1024, 4096), (1024,)])
def test_a_long_prompt_is_looked_up_in_linear_time(windows: tuple[int | None, ...]) -> None:
    """128k tokens that the full group holds and the window groups do not: index probes are linear in the chunks."""
    chunks, per_chunk = 512, 16
    world = World(windows=windows, chunk_units=per_chunk)
    request = world.request("long", chunks * per_chunk)
    indices = [CountingIndex() for _ in windows]
    for group, window in enumerate(windows):
        for i in range(per_chunk - 1, chunks * per_chunk, per_chunk):
            if window is None:
                dict.__setitem__(indices[group], request.block_hashes[i], Chunk(group, i))
    world.side.catalog._index = tuple(indices)
    assert world.side.lookup(request, 0) == (0, False)
    probes = sum(index.probes for index in indices)
    assert chunks <= probes <= 3 * len(windows) * per_chunk * chunks


def test_a_reused_request_id_has_leases_of_its_own() -> None:
    """Two requests of one id, the first still loading, never share an owner: a landing frees its own leases only."""
    world = World()
    world.publish(world.request("old", 4, shared=4))
    loads = []
    for _ in range(2):
        request = world.request("same", 6, shared=4)
        assert world.admit(request) == 4 * UNIT
        loads.append(world.step()[0])
        assert loads[-1].kind == SYNC
        world.side.finished(request)
    flights = world.side._flights
    owners = [flights[job.id].owner for job in loads]
    assert None not in owners
    assert len(set(owners)) == 2
    for left in (1, 0):
        assert world.side.catalog.leases == left + 1
        world.succeed(loads[1 - left])
        assert world.side.catalog.leases == left


def test_a_producer_saves_again_after_a_preemption() -> None:
    """A connector that never loads still learns from the admission that a preempted request has new blocks."""
    world = World(loads=False)
    request = world.request("r", 3)
    assert world.admit(request) == 0
    world.succeed(*world.step(request))
    assert world.found(request) == 3
    world.preempt(request)
    assert world.admit(request) == 0
    world.grow(request, 5)
    (job,) = world.step(request)
    world.succeed(job)
    assert job.kind == SAVE
    assert world.found(request) == 5


def test_blocks_reported_as_invalid_fail_their_load_before_its_report() -> None:
    """A load that timed out is told by its blocks, its report comes much later: all follows from the blocks."""
    world = World()
    world.publish(world.request("old", 4, shared=4))
    request = world.request("new", 6, shared=4)
    world.admit(request)
    load, save = world.step(request)
    world.side.invalidated(load.blocks())
    assert load.blocks() <= world.forgotten, "or a preemption would make the garbage a hit of vLLM's own cache"
    world.succeed(save)
    assert world.found(request) == 4
    world.preempt(request)
    assert world.admit(request) == 0, "the old load may still write to its blocks: no second one"
    world.succeed(*world.step(request))
    assert world.found(request) == 6
    world.report((load, 0, 1))
    assert world.side.catalog.leases == 0
    assert world.side.counters["load_failed"] == 1
    assert world.side.counters["illegal_transition"] == 0
