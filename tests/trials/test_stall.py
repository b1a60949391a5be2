"""A hit's load is asynchronous exactly if a load within the step would delay other requests too long."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvpipe.config.settings import load_settings
from kvpipe.connectors.vllm.metadata import PlanMetadata
from kvpipe.protocol.geometry import Geometry, Group, Layer
from kvpipe.protocol.messages import Kind, Outcome, Report, StepPlan, Tally
from kvpipe.scheduler.hooks import EngineFacts
from kvpipe.scheduler.side import SchedulerSide
from kvpipe.scheduler.stall import IDLE_WAIT_MS_MAX
from kvpipe.testing.waiting import WAIT_S
from kvpipe.transfer.base import Direction
from kvpipe.worker.batch import Batch
from tests.rigs.pipeline_rig import Rig, SideRig, job, plan
from tests.rigs.scheduler_world import ASYNC, SYNC, UNIT, SchedulerWorld

GEOMETRY = Geometry((Group((Layer("a", 100), Layer("b", 100)), block_tokens=4),), 16, 1 << 20)


@pytest.mark.parametrize(("mine", "other", "slowest"), [(0, 5, 5), (5, 0, 5), (7, 5, 5), (0, 0, 0)])
def test_the_slowest_rank_counts(mine: float, other: float, slowest: float) -> None:
    """The rate is that of the slowest rank. Ranks that have not loaded yet report no rate."""
    report = Report({1: Tally(1, 0)}, rate=mine)
    report.add(Report({1: Tally(1, 0)}, rate=other))
    assert report.rate == slowest


def test_the_rate_is_that_of_copies_not_of_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bus rate is measured from one landing of queued copies to the next.

    The first wave is left out, because it may wait for the device.
    """
    rig = Rig()
    now = [1_000_000_000]
    monkeypatch.setattr("time.monotonic_ns", lambda: now[0])
    pages = [rig.geometry.groups[g].layers[i].page_bytes for g, i in rig.geometry.layers]
    for number, wait_ns in ((1, 700_000_000), (2, 5_000_000_000)):
        rig.pipeline.begin(plan(job(number, Kind.LOAD_ASYNC)))
        for layer in range(rig.layers):  # each layer is queued in its own wave
            rig.pipeline._submit(rig.pipeline._async, layer)  # type: ignore[arg-type]
            now[0] += 1000
        now[0] += wait_ns  # this is the time of the compute that was queued before the copies
        for _ in range(rig.layers):
            rig.engine.complete(Direction.LOAD)
            rig.settle()
            now[0] += 500_000
        assert rig.pipeline.copies.rate.bytes_per_s == pytest.approx(sum(pages[1:]) / 1000e-6)
        rig.pipeline.start_loads()
        rig.pipeline.end_step()
    rig.pipeline.shutdown()


def test_a_wave_lands_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that were queued together share the time since the previous wave has landed."""
    rig = Rig()
    now = [1_000_000_000]
    monkeypatch.setattr("time.monotonic_ns", lambda: now[0])
    pages = [rig.geometry.groups[g].layers[i].page_bytes for g, i in rig.geometry.layers]
    rig.pipeline.begin(plan(job(1, Kind.LOAD_ASYNC)))
    rig.pipeline._submit(rig.pipeline._async, 0)  # type: ignore[arg-type]
    now[0] += 1000
    rig.pipeline.start_loads()
    for layer in (1, 2):
        rig.pipeline._submit(rig.pipeline._async or _batch(rig), layer)
    now[0] += 800_000
    rig.engine.complete(Direction.LOAD)
    rig.settle()
    assert rig.pipeline.copies.rate.bytes_per_s == 0, "the first says nothing"
    now[0] += 500_000
    rig.engine.complete(Direction.LOAD)
    rig.engine.complete(Direction.LOAD)
    rig.settle()
    assert rig.pipeline.copies.rate.bytes_per_s == pytest.approx(sum(pages[1:]) / 500e-6)
    rig.pipeline.end_step()
    rig.pipeline.shutdown()


def _batch(rig: Rig) -> Batch:
    """Return the batch of the last submission."""
    batch = rig.engine.copies[-1].ticket.batch
    assert isinstance(batch, Batch)
    return batch


def _kinds(world: SchedulerWorld, *requests: Any) -> list[Kind]:
    """Admit requests in one pass, and return the kind of each load."""
    jobs: dict[str, Kind] = {}
    for request in requests:
        world.admit(request)
    for one in world.step():
        jobs[one.request] = Kind(one.kind)
    return [jobs[request.request_id] for request in requests]


def test_loads_of_one_step_share_the_longest_allowed_wait() -> None:
    """A single hit is loaded within its step.

    If other requests run, all sync loads of the step together must be fast enough.
    """
    world = SchedulerWorld(load="auto")
    page_bytes = 64
    saved = world.request("saved", 8, shared=8)
    world.admit(saved)
    world.succeed(*world.step(saved))  # this request runs, so a sync load would delay it
    world.side.reported(Report(rate=8 * page_bytes / 0.03))  # a hit of eight units takes 30 ms
    hits = [world.request(f"hit{i}", 9, shared=8) for i in range(3)]
    assert _kinds(world, *hits) == [SYNC, ASYNC, ASYNC]


def test_a_hit_alone_is_loaded_in_its_step_however_large() -> None:
    """If no other request runs, only the request itself waits for the load."""
    world = SchedulerWorld(load="auto")
    saved = world.request("saved", 8, shared=8)
    world.admit(saved)
    world.succeed(*world.step(saved))
    world.side.reported(Report(rate=1.0))
    world.step()  # this step ends the last running request
    assert _kinds(world, world.request("hit", 9, shared=8)) == [SYNC]


def test_a_step_that_computes_nothing_waits_for_a_load() -> None:
    """The second of two empty steps waits for a load, if a request waits for the load and no request computes."""
    world = SchedulerWorld(load="async", waits_idle=True)
    world.publish(world.request("old", 4, shared=4))
    world.step()
    assert world.wait_ms == 0, "nobody loads"
    loads, runs = world.request("loads", 6, shared=4), world.request("runs", 2)
    assert world.admit(loads) == 4 * UNIT
    (load,) = world.step()
    assert world.wait_ms == IDLE_WAIT_MS_MAX
    world.admit(runs)
    waits = []
    for step in ((runs,), (), (), (runs,), ()):
        runs.num_computed_tokens = 0
        world.step(*step)
        waits.append(world.wait_ms)
    assert waits == [0, 0, IDLE_WAIT_MS_MAX, 0, 0]
    world.succeed(load)
    world.step(loads)
    world.step()
    world.step()
    assert world.wait_ms == 0, "it runs"


def test_stages_do_not_wait() -> None:
    """A stage has nothing to compute while another stage still computes the step before.

    The next step needs both stages, so no stage may wait for a load.
    """
    facts = EngineFacts(hash_tokens=4, ranks=2, saves=True, loads=True, waits_idle=True)
    plans = []
    for stages in (1, 2):
        side = SchedulerSide(load_settings(), GEOMETRY, dataclasses.replace(facts, pipeline_stages=stages))
        side.requests.waiting["r"] = SchedulerWorld().request("r", 2)
        nothing = SimpleNamespace(num_scheduled_tokens={}, preempted_req_ids=None)
        plans.append([side.plan_step(nothing).wait_ms for _ in "12"])
        side.shutdown()
    assert plans == [[0, IDLE_WAIT_MS_MAX], [0, 0]]


@pytest.mark.parametrize("load", ["auto", "async"])
def test_stages_load_between_steps(load: str) -> None:
    """Stages load only between steps.

    If a load within a step failed, vLLM would compute and use further steps before it learned of the failure.
    """
    facts = EngineFacts(hash_tokens=4, ranks=2, saves=True, loads=True)
    waits = []
    for stages in (1, 2):
        side = SchedulerSide(
            load_settings({"load": load}), GEOMETRY, dataclasses.replace(facts, pipeline_stages=stages)
        )
        waits.append((side.loading.between_steps, side.loading.waits(4)))
        side.shutdown()
    assert waits == [(load == "async",) * 2, (True, True)]


def _loading(rig: Rig, number: int) -> None:
    """Submit an asynchronous load in a step of its own."""
    rig.pipeline.begin(plan(job(number, Kind.LOAD_ASYNC)))
    rig.pipeline.start_loads()
    rig.pipeline.end_step()


def test_a_rank_waits_until_a_load_has_landed() -> None:
    """The rank waits for the oldest load, because copies land in order.

    The rank does not wait for a load that has landed.
    """
    rig = Rig()
    for number in (1, 2):
        _loading(rig, number)
    oldest = rig.engine.copies[rig.layers - 1].ticket

    def land(timeout_s: float) -> bool:
        assert 0 < timeout_s <= WAIT_S
        rig.engine.complete(Direction.LOAD, rig.layers)
        double.done = oldest.done
        return oldest.done

    double = SimpleNamespace(wait=land, done=False)
    rig.pipeline.async_loads._batches[0].last = cast("Any", double)
    rig.pipeline.async_loads.await_one(WAIT_S)
    assert [outcome.job.id for outcome in rig.pipeline.copies.outbox] == [1]
    rig.pipeline.async_loads.await_one(WAIT_S)  # this call must not wait, because a wait would land the other load
    assert [outcome.job.id for outcome in rig.pipeline.collect()] == [1]
    rig.engine.complete_all()
    rig.pipeline.async_loads.await_one(WAIT_S)
    assert [outcome.job.id for outcome in rig.pipeline.collect()] == [2]
    rig.pipeline.async_loads.await_one(WAIT_S)
    assert not rig.pipeline.async_loads._batches
    rig.pipeline.shutdown()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_wait_for_a_load_is_bounded() -> None:
    """A copy that never lands, a withdrawn copy, and a lost loop do not delay a step beyond the time limit."""
    rig = Rig()
    _loading(rig, 1)
    rig.pipeline.async_loads.await_one(0.001)
    assert rig.pipeline.collect() == []
    rig.pipeline.async_loads._batches[0].stuck = True
    rig.pipeline.async_loads.await_one(WAIT_S)
    assert not rig.pipeline.async_loads._batches
    _loading(rig, 2)
    rig.kill_loop()
    rig.engine.complete_all()
    rig.pipeline.async_loads.await_one(WAIT_S)
    assert {outcome.job.id for outcome in rig.pipeline.collect()} == {1, 2}
    rig.pipeline.shutdown()


def test_all_waits_of_a_step_have_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The waits for the loop, for the copy and for the loop again share one time limit."""
    rig, now_s, limits = Rig(), [100.0], list[float]()
    _loading(rig, 1)

    def waits(timeout_s: float) -> bool:
        limits.append(timeout_s)
        now_s[0] += 0.75
        return True

    monkeypatch.setattr("kvpipe.worker.async_loads.time.monotonic", lambda: now_s[0])
    with monkeypatch.context() as patched:
        patched.setattr(rig.pipeline.copies.loop, "settle", waits)
        oldest = rig.pipeline.async_loads._batches[0]
        patched.setattr(oldest, "last", SimpleNamespace(wait=waits, done=False))
        rig.pipeline.async_loads.await_one(1.0)
    monkeypatch.undo()
    assert limits == [1.0, 0.25, 0.0]
    rig.engine.complete_all()
    rig.pipeline.shutdown()


def test_a_rank_that_has_something_to_report_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank reports a refused or landed load in the same step, even if other loads are still under way."""
    rig, waited = Rig(), list[float]()
    _loading(rig, 1)
    _loading(rig, 2)
    monkeypatch.setattr(rig.pipeline.async_loads._batches[0], "last", SimpleNamespace(wait=waited.append, done=False))
    rig.pipeline.outcomes.refuse([job(3, Kind.LOAD_ASYNC)], "refused")
    with monkeypatch.context() as patched:
        patched.setattr(rig.pipeline.copies.loop, "settle", waited.append)
        rig.pipeline.async_loads.await_one(WAIT_S)
        assert rig.pipeline.collect()
        rig.pipeline.copies.outbox.append(Outcome(job(2, Kind.LOAD_ASYNC), ok=True, why=""))
        rig.pipeline.async_loads.await_one(WAIT_S)
        assert rig.pipeline.collect()
        assert not waited
        rig.pipeline.async_loads.await_one(WAIT_S)
        assert len(waited) == 2
    rig.engine.complete_all()
    rig.pipeline.shutdown()


def test_the_plan_shows_how_long_a_rank_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan has the time that a rank waits before it reports. In steps without such a wait the time is 0."""
    rig, waits = SideRig(), list[float]()
    side = rig.side
    monkeypatch.setattr(rig.pipeline.async_loads, "await_one", waits.append)
    for wait_ms in (0, 5):
        unpack, packed = PlanMetadata(StepPlan(1, wait_ms=wait_ms)).__reduce__()
        side.bind(unpack(*packed).plan)
        side.collect()
        side.unbind()
    assert waits == [0.005]
    side.shutdown()
