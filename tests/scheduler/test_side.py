"""Regression tests of the scheduler side, one for each fault that a review found, without objects of vLLM."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvpipe.cache.chunks import Chunk
from kvpipe.protocol.engine import MISS, Recovery
from kvpipe.protocol.messages import BROKEN, Job
from kvpipe.scheduler.gauges import totals
from kvpipe.statemachine import lookup as lookup_m
from kvpipe.statemachine import request as request_m
from kvpipe.trace import miss_reasons
from kvpipe.trace.events import RequestAdmitted
from kvpipe.trace.recorder import Recorder
from tests.rigs.scheduler_world import (
    ASYNC,
    SAVE,
    SYNC,
    UNIT,
    CountingIndex,
    SchedulerWorld,
    slots_of,
)


@pytest.mark.parametrize("apart", [False, True])
def test_chunk_is_continued_only_from_the_prefix_at_its_end(apart: bool) -> None:
    """A request continues another request's chunk only if their prefix hashes at the chunk's end are equal.

    It is not enough that both prefixes have the same number of units.
    """
    world = SchedulerWorld(ranks=2)
    first, fork = world.request("first", 3, shared=3), world.request("fork", 4, shared=3)
    world.admit(first)
    (j1,) = world.step(first)
    world.grow(first, 4)
    (j2,) = world.step(first)
    if apart:  # the second piece comes before the first, so it is lost and its slot is released
        world.report((j2, 2, 0))
        world.report((j1, 2, 0))
    else:
        world.report((j1, 1, 0))
        world.report((j2, 2, 0), (j1, 1, 0))
    assert world.admit_local(fork, 3 * UNIT) == 0
    (j3,) = world.step(fork)
    world.grow(first, 5)
    (j4,) = world.step(first)
    assert not set(slots_of(j3)) & set(slots_of(j4))
    # the fork continues a chunk only if the chunk ends at the fork's prefix
    assert (set(slots_of(j1)) == set(slots_of(j3))) is apart
    world.succeed(j3, j4)
    assert world.side.catalog.find(0, fork.block_hashes[3]) is not None
    assert world.side.catalog.find(0, first.block_hashes[4]) is not None


def _without_lookup(world: SchedulerWorld, request: Any) -> int:
    world.side.on_new_request(request)
    return 4 * UNIT


def _stale(world: SchedulerWorld, request: Any) -> int:
    tokens = world.ask(request)
    world.step()
    return tokens


def _raising(world: SchedulerWorld, request: Any) -> int:
    def boom(*_: object) -> Any:
        raise RuntimeError("boom")

    world.side.loading.rows = boom  # type: ignore[method-assign, assignment]
    return world.ask(request)


def _half_leased(world: SchedulerWorld, request: Any) -> int:
    lease = world.side.catalog.lease

    def boom(owner: Any, chunks: list[Chunk], *, timed: bool = True) -> None:
        lease(owner, chunks[:1], timed=timed)
        raise RuntimeError("boom")

    world.side.catalog.lease = boom  # type: ignore[method-assign]
    return world.ask(request)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize("promise", [_without_lookup, _stale, _raising, _half_leased])
def test_a_load_that_cannot_be_planned_is_reported_as_failed(
    promise: Callable[[SchedulerWorld, Any], int], load: str, *, traced: bool
) -> None:
    """vLLM expects each promised load. If one cannot be planned, it is sent with rows that no rank accepts."""
    trace = Recorder(lifecycle=traced, transitions=traced, detail=traced)
    world = SchedulerWorld(ranks=2, load=load, trace=trace)
    world.publish(world.request("old", 4, shared=4))
    request = world.request("new", 6, shared=4)
    tokens = promise(world, request)
    assert tokens == 4 * UNIT
    world.side.admitted(request, world.allocate(request, null=1), tokens)
    noted = [one.load for one in trace.take() if isinstance(one, RequestAdmitted) and one.request == "new"]
    assert noted == [f"load_{load}"] * traced
    assert world.side.catalog.leases == 0
    jobs = world.step()
    assert [job.kind for job in jobs] == [SYNC if load == "sync" else ASYNC]
    assert slots_of(jobs[0]) == [BROKEN] * 5
    assert jobs[0].blocks() == {b.block_id for b in world.tables[0]["new"] if not b.is_null}
    other = world.request("other", 2)
    world.admit(other)
    (save,) = world.step(other)
    world.report((jobs[0], 0, 2), (save, 2, 0))  # a save in the same report is still processed
    assert world.side.catalog.leases == 0
    assert not world.side.pending
    assert world.side.lookup(request, 0) == (0, False), "a request whose load has failed never loads again"


@pytest.mark.parametrize("load", ["sync", "async"])
def test_other_loads_of_a_step_are_sent_beside_an_illegal_admission(load: str) -> None:
    """A load for a running request is sent as a load that fails. The other loads of the step are sent as planned."""
    world = SchedulerWorld(load=load)
    world.publish(world.request("old", 4, shared=4))
    odd, good = world.request("odd", 6), world.request("good", 6, shared=4)
    world.admit(odd)
    world.succeed(*world.step(odd))
    world.side.admitted(odd, world.allocate(odd), 4 * UNIT)
    world.admit(good)
    broken, whole = world.step()
    assert (broken.request, whole.request) == ("odd", "good")
    assert set(slots_of(broken)) == {BROKEN}
    world.report((broken, 0, 1), (whole, 1, 0))
    assert world.side.catalog.leases == 0
    assert not world.side.pending


@pytest.mark.parametrize("load", ["sync", "async"])
def test_other_loads_are_sent_when_an_admission_fails_half_way(load: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM relies on the failed admission's load, so this load is sent as a load that fails."""
    world = SchedulerWorld(load=load)
    world.publish(world.request("old", 4, shared=4))
    request = world.request("new", 6, shared=4)
    with monkeypatch.context() as patch:
        patch.setattr(world.remedies, "admitted", _boom)
        world.admit(request)
    (job,) = world.step()
    assert set(slots_of(job)) == {BROKEN}
    world.report((job, 0, 1))
    assert world.side.catalog.leases == 0
    assert world.side.lookup(request, 0) == (0, False), "it computes"


def test_loads_of_a_step_are_sent_beside_an_illegal_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an admission that failed half way, its request may not be preempted.

    Other loads of the step are sent all the same.
    """
    world = SchedulerWorld(load="sync")
    world.publish(world.request("old", 4, shared=4))
    odd, good = world.request("odd", 6), world.request("good", 6, shared=4)
    world.ask(odd, UNIT)
    tables = world.allocate(odd)
    with monkeypatch.context() as patch:
        patch.setattr(world.side.loading, "admit", _boom)
        with pytest.raises(RuntimeError, match="boom"):
            world.side.admitted(odd, tables, 0)
    world.step(odd)
    world.admit(good)
    world.preempt(odd)
    notice = SimpleNamespace(num_scheduled_tokens={"good": 2 * UNIT}, preempted_req_ids={"odd"})
    assert "good" in {job.request for job in world.side.plan_step(notice).jobs if job.kind == SYNC}


def _boom(*_: object) -> None:
    raise RuntimeError("boom")


@pytest.mark.parametrize("load", ["sync", "async"])
def test_a_hit_that_vanished_is_emitted_as_broken(load: str) -> None:
    """A promised chunk is gone at the admission. The job still names it, in rows that fail on every rank."""
    world = SchedulerWorld(load=load, chunk_units=2)
    old = world.request("old", 4, shared=4)
    world.publish(old)
    request = world.request("new", 6, shared=4)
    tokens = world.ask(request)
    assert tokens == 4 * UNIT
    world.drop(0, old.block_hashes[3])
    world.side.admitted(request, world.allocate(request), tokens)
    (job,) = world.step()
    assert [slot == BROKEN for slot in slots_of(job)] == [False, False, True, True]
    assert job.table()[:, 3].tolist() == [b.block_id for b in world.tables[0]["new"][:4]]
    assert world.side.counters["hit_vanished"] == 1
    assert world.side.catalog.leases == 1
    world.report((job, 0, 1))
    assert world.side.catalog.leases == 0


def test_other_jobs_are_sent_when_one_save_cannot_be_planned() -> None:
    """If one save raises while it is planned, no load, no other save of the step, and no claimed piece is lost."""
    world = SchedulerWorld(windows=(None, None))
    world.publish(world.request("old", 2, shared=2))
    loading, broken, fine = world.request("loading", 4, shared=2), world.request("broken", 3), world.request("fine", 3)
    for request in (loading, broken, fine):
        world.admit(request)
    world.tables[1]["broken"] = [None] * 3  # type: ignore[list-item]  # the first group's piece has been claimed when this is found out
    jobs = world.step(broken, loading, fine)
    assert [(job.kind, job.request) for job in jobs] == [(ASYNC, "loading"), (SAVE, "loading"), (SAVE, "fine")]
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
    """A running request may continue with KV that the reset drops. So it saves nothing until its next admission."""
    world = SchedulerWorld()
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
    """A hit is shortened until all windows are held, not only one window."""
    world = SchedulerWorld(windows=(None, 2 * UNIT + 1, 2 * UNIT + 1), chunk_units=2)
    old = world.request("old", 8, shared=8)
    world.publish(old)
    lacking, whole = (1 + i for i in order)
    world.drop(lacking, old.block_hashes[7])
    assert world.side.catalog.find(whole, old.block_hashes[7]) is not None
    request = world.request("new", 8, shared=8, extra=1)
    assert world.side.lookup(request, 0) == (6 * UNIT, True)
    world.side.admitted(request, world.allocate(request, null=4), 6 * UNIT)
    (load,) = world.step()
    assert BROKEN not in slots_of(load)
    world.drop(whole, old.block_hashes[5])  # now one group holds units 4 and 5, the second group units 6 and 7
    assert world.side.lookup(world.request("newer", 8, shared=8, extra=1), 0) == (4 * UNIT, True)


@pytest.mark.parametrize("load", ["sync", "async"])
def test_a_whole_prompt_hit_of_a_windowed_model_leaves_one_unit(load: str) -> None:
    """The last token is computed again. Its window begins one position before the window for which a hit is checked."""
    world = SchedulerWorld(windows=(2 * UNIT + 1,), chunk_units=2, load=load)
    old = world.request("old", 8, shared=8)
    world.publish(old)
    request = world.request("new", 8, shared=8)
    assert world.ask(request) == 7 * UNIT
    world.drop(0, old.block_hashes[5])
    assert world.ask(request) == 4 * UNIT
    world.side.admitted(request, world.allocate(request, null=2), 4 * UNIT)
    (job,) = world.step()
    assert BROKEN not in slots_of(job)


def _together(world: SchedulerWorld, load: Job, save: Job) -> None:
    world.report((load, 1, 1), (save, 2, 0))


def _one_rank_first(world: SchedulerWorld, load: Job, save: Job) -> None:
    world.report((load, 0, 1), (save, 1, 0))
    world.report((save, 1, 0), (load, 1, 0))


def _save_lands_first(world: SchedulerWorld, load: Job, save: Job) -> None:
    world.report((load, 0, 1))
    world.report((save, 2, 0))
    world.report((load, 1, 0))


def _bad_news_last(world: SchedulerWorld, load: Job, save: Job) -> None:
    world.report((load, 1, 0), (save, 1, 0))
    world.report((load, 0, 1), (save, 1, 0))


@pytest.mark.parametrize("order", [_together, _one_rank_first, _save_lands_first, _bad_news_last])
def test_saves_planned_after_a_failed_load_are_not_published(order: Callable[[SchedulerWorld, Job, Job], None]) -> None:
    """The load of a step fails, so the saves of that step are not published, though every rank reports them as ok.

    The request plans no save before it is admitted again.
    """
    world = SchedulerWorld(ranks=2)
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
    request.num_computed_tokens = 0  # vLLM takes these tokens back
    world.grow(request, 8)
    assert world.step(request) == []
    world.preempt(request)
    assert world.admit(request) == 0
    world.succeed(*world.step(request))
    assert world.found(request) == 8


def test_nothing_is_saved_between_the_first_failed_report_and_the_last() -> None:
    """While only the first rank has reported that a load failed, the load's request saves nothing."""
    world = SchedulerWorld(ranks=2)
    world.publish(world.request("old", 4, shared=4))
    request = world.request("new", 6, shared=4)
    world.admit(request)
    load, save = world.step(request)
    world.report((load, 0, 1))
    request.num_computed_tokens = 0  # vLLM takes these tokens back
    world.grow(request, 7)
    assert world.step(request) == []
    world.report((save, 2, 0))
    world.grow(request, 8)
    assert world.step(request) == []
    world.report((load, 1, 0))
    world.grow(request, 9)
    assert world.step(request) == []
    assert world.found(request) == 4


@pytest.mark.parametrize("windows", [(None, 1024), (None, 1024, 4096), (1024,)])
def test_a_long_prompt_is_looked_up_in_linear_time(windows: tuple[int | None, ...]) -> None:
    """The full group holds 128k tokens, and the window groups hold none.

    The number of index probes grows only linearly with the number of chunks.
    """
    chunks, per_chunk = 512, 16
    world = SchedulerWorld(windows=windows, chunk_units=per_chunk)
    request = world.request("long", chunks * per_chunk)
    catalog, indices = world.side.catalog, [CountingIndex() for _ in windows]
    for group, window in enumerate(windows):
        for i in range(per_chunk - 1, chunks * per_chunk, per_chunk):
            if window is None:
                dict.__setitem__(indices[group], request.block_hashes[i], Chunk(catalog.machine, group, i))
    catalog._index = tuple(indices)
    assert world.side.lookup(request, 0) == (0, False)
    probes = sum(index.probes for index in indices)
    assert chunks <= probes <= 3 * len(windows) * per_chunk * chunks


def test_a_reused_request_id_has_leases_of_its_own() -> None:
    """Two requests have one id, and the first still loads.

    They have different owners, so their leases end separately.
    """
    world = SchedulerWorld()
    world.publish(world.request("old", 4, shared=4))
    loads = []
    for _ in range(2):
        request = world.request("same", 6, shared=4)
        assert world.admit(request) == 4 * UNIT
        loads.append(world.step()[0])
        assert loads[-1].kind == SYNC
        world.side.finished(request)
    jobs = world.side.jobs.in_flight
    owners = [jobs[job.id].owner for job in loads]
    assert None not in owners
    assert len(set(owners)) == 2
    for left in (1, 0):
        assert world.side.catalog.leases == left + 1
        world.succeed(loads[1 - left])
        assert world.side.catalog.leases == left


def test_a_producer_saves_again_after_a_preemption() -> None:
    """A producer never loads. From the admission it still learns that a preempted request has new blocks."""
    world = SchedulerWorld(loads=False)
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
    """A load has timed out. The engine reports its blocks long before ranks report the load, which fails at once."""
    world = SchedulerWorld()
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


def test_a_request_that_reads_no_cache_is_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request computes its whole prompt without an index probe, a tier lookup or a hit. The KV is saved."""
    world = SchedulerWorld()
    world.publish(world.request("old", 4, shared=4))
    monkeypatch.setattr(world.side.prefixes, "longest", lambda _: pytest.fail("looked up"))
    monkeypatch.setattr(world.side, "staging", object())  # any access raises
    request = world.request("new", 6, shared=4)
    request.skip_reading_prefix_cache = True
    assert world.ask(request) == 0
    monkeypatch.undo()
    assert world.admit(request) == 0
    (job,) = world.step(request)
    assert job.kind == SAVE
    world.succeed(job)
    assert world.found(request) == 6
    assert world.side.tracer.misses["not_read"] == 1
    assert not any(world.side.tracer.hit_tokens.values())
    assert world.side.catalog.leases == 0


def test_a_request_that_reads_no_cache_waits_for_nothing() -> None:
    """vLLM accepts neither a hit nor `LATER` for such a request, so it is admitted while the weights are unknown."""
    world = SchedulerWorld()
    request = world.request("new", 6)
    request.skip_reading_prefix_cache = True
    world.side.weights.suspect("test")
    assert world.side.lookup(request, 0) == MISS
    world.side.admitted(request, world.allocate(request), 0)
    tracked = world.side.requests.tracked["new"]
    assert (tracked.state.row, tracked.asking.state.row) == (request_m.RUNNING, lookup_m.UNASKED)


@pytest.mark.parametrize(("load", "answers"), [("auto", (4 * UNIT, False)), ("async", (0, False))])
def test_hit_is_loaded_in_the_step_after_the_load_of_another_connector_failed(
    load: str, answers: tuple[int, bool]
) -> None:
    """Another connector's load has failed.

    An async load might then never end, so the hit is loaded within the step.
    """
    world = SchedulerWorld(load=load)
    world.publish(world.request("old", 4, shared=4))
    request = world.request("new", 6, shared=4)
    hit = world.ask(request)
    assert hit == 4 * UNIT
    # these blocks are of the other connector's load, which fails
    world.side.admitted(request, world.allocate(request), 0)
    for tables in world.tables:
        del tables["new"]
    world.step()
    if world.side.loading.stall is not None:
        # a request is running, and it would wait very long for a load
        world.side.loading.stall.running, world.side.loading.stall.rate = 1, 1.0
    assert world.side.lookup(request, 0) == world.side.lookup(request, 0) == answers
    world.side.admitted(request, world.allocate(request), answers[0])
    jobs = world.step(request)
    assert [job.kind for job in jobs] == ([SYNC, SAVE] if answers[0] else [SAVE])
    world.succeed(*jobs)
    world.side.finished(request)
    assert world.found(request) == 6
    assert world.side.counters["contained_error"] == world.side.catalog.leases == 0


@pytest.mark.parametrize("kind", [SAVE, SYNC, ASYNC])
def test_lost_report_does_not_keep_the_engine_busy(kind: int) -> None:
    """After a time limit no more steps are planned only for the report. A late report is still processed."""
    world = SchedulerWorld(ranks=2)
    first, other = world.request("first", 4, shared=4), world.request("other", 4, shared=4)
    world.admit(first)
    (job,) = world.step(first)
    if kind != SAVE:
        world.succeed(job)
        world.side.loading.between_steps = kind == ASYNC
        world.admit(other)
        (job,) = world.step(*([] if kind == ASYNC else [other]))
    assert job.kind == kind
    assert bool(world.side.pending)
    sent = world.side.jobs.in_flight[job.id]
    sent.sent_at_s -= world.side.settings.stuck_ms_max / 1000 - 1
    assert bool(world.side.pending), "its rank may fail it only now"
    sent.sent_at_s -= 10.0
    assert not bool(world.side.pending)
    assert world.side.stats()["jobs_in_flight"] == 1
    world.succeed(job)
    assert not bool(world.side.pending)
    assert world.side.stats()["jobs_in_flight"] == 0


def test_a_later_job_is_waited_for_beside_a_lost_one() -> None:
    """After a lost report, the engine still plans steps to get the reports of jobs in flight."""
    world = SchedulerWorld()
    first, other = world.request("first", 4), world.request("other", 4)
    world.admit(first)
    (lost,) = world.step(first)
    world.side.jobs.in_flight[lost.id].sent_at_s -= 1000.0
    assert not bool(world.side.pending)
    world.admit(other)
    (job,) = world.step(other)
    assert bool(world.side.pending)
    world.succeed(job)
    assert not bool(world.side.pending)


def test_slots_are_used_when_every_rank_has_them_ready() -> None:
    """Ranks that have not reported, or that have fewer ready slots, limit the number of slots in use."""
    side = SchedulerWorld(ranks=2, slots=8, touch="ahead").side
    assert side.catalog.ready == 0
    side.slots_ready({0: 5})
    assert side.catalog.ready == 0
    side.slots_ready({1: 3})
    assert side.catalog.ready == 3
    side.slots_ready({})
    side.slots_ready({0: 8})
    assert side.catalog.ready == 3
    side.slots_ready({1: 8})
    assert side.stats()["slots_ready"] == totals(side)["pool_chunks_ready"][""] == 8


def test_the_tail_of_a_request_does_not_evict_its_head() -> None:
    """A prefix in vLLM's own cache counts as used. So a full pool evicts chunks of other requests first."""
    world = SchedulerWorld(chunk_units=4, slots=4)
    world.publish(world.request("head", 8, shared=8))
    world.publish(world.request("other", 8))
    whole = world.request("whole", 11, shared=8)
    assert world.admit_local(whole, 8 * UNIT) == 0
    world.succeed(*world.step(whole))
    world.side.finished(whole)
    again = world.request("whole", 11, shared=8)
    assert world.ask(again) == 11 * UNIT - 1
    assert world.side.counters["evicted"] == 1


def test_turns_of_a_conversation_are_one_chain() -> None:
    """A turn ends in the middle of a chunk, and the next turn continues the chunk. This chunk is no separate branch."""
    world = SchedulerWorld(chunk_units=4, slots=64, policy="sessions")
    for turn in range(1, 9):
        world.publish(world.request("chat", 6 * turn + 1))
    guard: Any = world.side.catalog._policy
    assert {len(chain.stack) for chain in guard._one._chains if chain is not None} == {world.side.catalog.used} == {13}


@pytest.mark.parametrize("why", [miss_reasons.NO_ROOM, miss_reasons.ADAPTER])
def test_a_hit_whose_load_may_not_begin_is_reported(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hit without room for its load is a miss with its own reason. The reason `not_saved` would mislead operators."""
    world = SchedulerWorld(load="async")
    world.publish(world.request("old", 4, shared=4))
    if why == miss_reasons.NO_ROOM:
        session = world.request("session", 6)
        session.resumable = True
        world.admit(session)
        world.step(session)
        world.free = 58 + 7  # enough for the session, but one block less than the other requests need
    else:
        monkeypatch.setattr(world.side.adapters, "certain", lambda _: False)
    for shared, reason in ((4, why), (0, miss_reasons.NOT_SAVED)):
        request = world.request(f"shares {shared}", 8, shared=shared)
        assert world.ask(request) == 0
        assert world.side.requests.tracked[request.request_id].asking.answer.why == reason


@pytest.mark.parametrize("old", ["step_planned", "extra_loads"])
def test_a_recovery_of_an_older_version_is_refused(old: str) -> None:
    """If a remedy's method had a former name, it would never be called, and nobody would notice."""
    with pytest.raises(TypeError, match=rf"Mine: rename {old} to .*begin_step\("):
        type("Mine", (Recovery,), {old: lambda *_: None})


def test_policy_is_notified_of_the_length_of_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a request ends, the policy is notified of the number of computed tokens after the prompt."""
    world, told = SchedulerWorld(), list[int]()
    monkeypatch.setattr(world.side.catalog, "_answered", told.append)
    request = world.request("a", 3)
    world.admit(request)
    request.num_tokens = request.num_prompt_tokens + 5
    world.side.finished(request)
    assert told == [5]
