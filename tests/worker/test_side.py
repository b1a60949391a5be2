"""Tests of the worker side, without an engine of vLLM."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator

import pytest

from kvpipe.config.settings import load_settings
from kvpipe.errors import UnsupportedError
from kvpipe.protocol.messages import Kind, Tally
from kvpipe.statemachine.copy import FAULT
from kvpipe.testing.dict_tier import DictTier
from kvpipe.testing.held_tier import DictSpec
from kvpipe.tiers.guard import READ, WRITE, guarded
from kvpipe.transfer.base import Direction
from kvpipe.transfer.ready import Readier
from kvpipe.worker.caches import PagedCaches
from kvpipe.worker.context import RankContext
from kvpipe.worker.limits import Limits
from kvpipe.worker.pipeline import Pipeline
from kvpipe.worker.side import WorkerSide
from tests.rigs.pipeline_rig import FakeEngine, Rig, SideRig, Waiting, job, make_caches, plan, small_geometry

GEOMETRY = small_geometry()
CACHES = PagedCaches(GEOMETRY, make_caches(GEOMETRY, 8), 8)
NONE = {
    "carrier": "this rank has no tiers",
    "_plan": "no step is bound",
}
"""The attributes that are None in a new side, each with the reason."""


@pytest.fixture
def whole() -> Iterator[SideRig]:
    """Return a side with layer hooks."""
    rig = SideRig()
    yield rig
    rig.side.shutdown()


def test_metrics_that_were_put_off_are_reported_with_the_last_job(whole: SideRig) -> None:
    """Metrics that were put off because of a save in flight are reported in the step that reports the save."""
    side, whole.engine.waiting = whole.side, Waiting.DEVICE
    assert not side.puts_off_metrics(), "no job is in flight, so no later step is known"
    side.bind(plan(job(1)))
    side.start_loads()
    for layer in "abc":
        side.save_layer(layer)
    side.end_step()
    side.collect()
    assert side.puts_off_metrics()
    whole.engine.complete_all()
    whole.settle()
    first = side.take_report()  # this report has the number of ready slots
    assert first is not None
    assert not first.tallies
    side.collect()
    assert not side.puts_off_metrics()
    report = side.take_report()
    assert report is not None
    assert report.tallies == {1: Tally(1, 0)}


def test_a_side_that_exists_is_whole(whole: SideRig) -> None:
    """A new side has all its parts. An attribute is None only because of the rank or the step.

    No later call adds a part.
    """
    side = whole.side
    parts = set(vars(side))
    assert {name for name in parts if getattr(side, name) is None} == set(NONE)
    side.handle_preemptions()
    side.bind(plan(job(1), job(2, Kind.LOAD_SYNC, [(0, 0, 0, 7)])))
    side.start_loads()
    for layer in "abc":
        side.wait_layer(layer)
        side.save_layer(layer)
    side.end_step()
    whole.engine.complete_all()
    whole.settle()
    assert side.collect() == (set(), set())
    report = side.take_report()
    assert report is not None
    assert report.tallies == dict.fromkeys((1, 2), Tally(1, 0))
    side.unbind()
    assert side.totals()
    assert set(vars(side)) == parts


@pytest.mark.parametrize(
    ("part", "method"), [(Pipeline, "__init__"), (WorkerSide, "_make_readier"), (Readier, "begin")]
)
def test_a_side_that_cannot_be_made_leaves_nothing(part: type, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If an early or a late part raises an exception, no thread is left, and the transfer engine is shut down."""
    engine, before = FakeEngine(), set(threading.enumerate())
    tiers = guarded([("t", DictSpec.model_validate({}), DictTier())], (READ, WRITE))
    monkeypatch.setattr(part, method, _boom)
    with pytest.raises(RuntimeError, match="boom"):
        WorkerSide(RankContext(load_settings()), CACHES, engine=engine, tiers=tiers)
    assert set(threading.enumerate()) == before
    assert engine.shutdowns


def test_caches_without_a_layer_are_refused() -> None:
    """The error names the missing layer, and is raised before any part is made."""
    with pytest.raises(UnsupportedError, match="no KV cache for layer 'b'"):
        PagedCaches(GEOMETRY, {"a": make_caches(GEOMETRY, 8)["a"]}, 8)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_side_is_lost_when_its_loop_has_ended(whole: SideRig) -> None:
    """The end of a step notices the dead loop thread and counts one fault, whether or not jobs are in flight."""
    side = whole.side
    for _ in range(2):
        side.bind(plan())
        side.unbind()
        assert not side.lost
    whole.kill_loop()
    for _ in range(2):
        side.bind(plan())
        side.unbind()
        assert side.lost
    assert whole.counters["loop_lost"] == 1


def test_side_reports_the_digest_of_its_weights_once_when_it_is_asked(whole: SideRig) -> None:
    """The scheduler's side asks every rank for its weights' digest, and shares no chunks before all have answered."""
    side, answered = whole.side, []
    for question in (3, 0):
        side.bind(plan()._replace(question=question))
        side.adapters.changes = 1  # because of this change, the side has something to report
        side.adapters.now = {7: bytes([question])}.copy
        report = side.take_report()
        assert report is not None
        answered.append(report.weights)
        side.unbind()
    assert answered == [{0: (3, "")}, {}]


def test_side_reports_nothing_when_nothing_has_happened_since_its_last_report(whole: SideRig) -> None:
    """The number of ready slots is reported once, and again only if the number has changed."""
    side = whole.side
    reports = [side.take_report(), side.take_report()]
    side._ready_reported -= 1
    reports += [side.take_report(), side.take_report()]
    assert [one and one.ready for one in reports] == [{0: side.ready}, None] * 2


def test_caches_name_the_device_that_they_lie_on() -> None:
    """The worker side reads the type of the caches' device, because the pool's limit on a CPU is different."""
    assert CACHES.device == "cpu"


def test_side_counts_in_the_counters_that_it_was_given(whole: SideRig) -> None:
    """The side uses the engine's counters, so that faults of a rank are not lost."""
    assert whole.side.counters is whole.counters


def test_side_that_gives_up_reports_open_jobs(whole: SideRig) -> None:
    """After the side gives up, open jobs are reported, jobs of later steps fail, and the pool is reported as lost."""
    side = whole.side
    side.bind(plan(job(1), job(2, Kind.LOAD_ASYNC, [(0, 0, 0, 7)])))
    side.start_loads()
    side.give_up("its caches are gone")
    assert whole.engine.shutdowns
    assert side.collect()[0] == {"r2"}
    side.unbind()
    side.bind(plan(job(3)))
    side.end_step()
    side.collect()
    report = side.take_report()
    assert report is not None
    assert report.lost
    assert report.tallies.keys() == {1, 2, 3}
    assert report.tallies[3] == Tally(0, 1)
    side.unbind()


def _boom(*_: object, **__: object) -> None:
    raise RuntimeError("boom")


def _begin_raises(where: str, rig: Rig, side: WorkerSide, patch: pytest.MonkeyPatch) -> None:
    """Let the next `bind` raise. Job 9, if given, belongs to the previous step."""
    if where == "checked":
        patch.setattr(side.adapters, "checked", _boom)
    elif where == "orders":
        patch.setattr(side, "_begin_orders", _boom)
    elif where in {"fence", "withdraw"}:
        side.bind(plan(job(9)))
        rig.save_all()
        if where == "fence":
            side.end_step()
            side.unbind()
        patch.setattr(rig.engine, "fence", _boom)
    elif where == "limits":
        patch.setattr(Limits, "refused", _boom)
    else:
        direction, prepare = Direction[where], rig.engine.prepare
        patch.setattr(rig.engine, "prepare", lambda p: _boom() if p.direction is direction else prepare(p))


@pytest.mark.parametrize("where", ["checked", "orders", "fence", "withdraw", "limits", "LOAD"])
def test_a_step_that_cannot_be_begun_loses_no_job(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every job is reported as failed. Blocks of sync loads are reported in the step of the load.

    Wrong tier orders fail no job.
    """
    rig = SideRig(fences_late=True)
    side, good = rig.side, where == "orders"
    with monkeypatch.context() as patch:
        _begin_raises(where, rig, side, patch)
        with contextlib.nullcontext() if where == "checked" else pytest.raises(RuntimeError, match="boom"):
            side.bind(plan(job(1), job(2, Kind.LOAD_SYNC, [(0, 0, 0, 7)]), job(3, Kind.LOAD_ASYNC, [(0, 0, 0, 8)])))
    side.start_loads()
    rig.wait_all()
    rig.save_all()
    side.end_step()
    ended = [side.collect()]
    assert side.take_bad_blocks(late=False) == (set() if good else {7})
    side.unbind()
    assert not rig.busy()
    rig.engine.complete_all()
    rig.settle()
    ended.append(side.collect())
    report = side.take_report()
    assert report is not None
    before = {9: Tally(0, 1)} if where in {"fence", "withdraw"} else {}
    assert report.tallies == dict.fromkeys((1, 2, 3), Tally(int(good), int(not good))) | before
    assert [one for one in ended if any(one)] == [({"r3"}, set() if good else {"r3"})]
    assert not rig.in_flight()
    assert not side.take_bad_blocks()
    side.bind(plan(job(10)))
    rig.save_all()
    side.end_step()
    rig.engine.complete_all()
    assert rig.news() == {10: True}
    assert not rig.counters["illegal_transition"]
    assert not rig.pipeline.copies.loop.errors
    side.shutdown()


@pytest.mark.parametrize("late", [False, True])
def test_blocks_of_a_load_are_late_when_it_fails_after_its_step(late: bool, whole: SideRig) -> None:
    """The device waits for the load, so the step may end before the load fails.

    By then, another request may have the blocks. So `take_bad_blocks` returns the blocks only if `late` is true. The
    report has the failed job in both cases.
    """
    side, whole.engine.waiting = whole.side, Waiting.DEVICE
    side.bind(plan(job(1, Kind.LOAD_SYNC, [(0, 0, 0, 7)])))
    side.start_loads()
    whole.wait_all()
    side.end_step()
    assert side.collect() == (set(), set())
    assert not side.take_bad_blocks(late=late)
    report = side.take_report()
    assert report is not None
    assert not report.tallies
    side.unbind()
    side.bind(plan())
    whole.settle()
    whole.pipeline.copies.put(FAULT, next(iter(whole.pipeline.copies.live)), "found later")
    whole.engine.complete_all()
    whole.settle()
    side.end_step()
    assert side.collect() == (set(), set())
    assert side.take_bad_blocks(late=late) == ({7} if late else set())
    report = side.take_report()
    assert report is not None
    assert report.tallies == {1: Tally(0, 1)}
    side.unbind()
    assert not side.take_bad_blocks()


def test_blocks_of_a_load_are_reported_once_when_it_was_given_up_in_its_step(whole: SideRig) -> None:
    """The blocks were reported in the load's step. The blocks are not reported again as late when the copies end."""
    side, whole.engine.waiting = whole.side, Waiting.STUCK
    side.bind(plan(job(1, Kind.LOAD_SYNC, [(0, 0, 0, 7)])))
    side.start_loads()
    whole.wait_all()
    side.end_step()
    assert side.collect() == (set(), set())
    assert side.take_bad_blocks() == {7}
    assert side.take_report() is not None
    side.unbind()
    whole.engine.complete_all()
    whole.settle()
    assert side.collect() == (set(), set())
    report = side.take_report()
    assert report is not None
    assert report.tallies == {1: Tally(0, 1)}
    assert not side.take_bad_blocks()


def test_shutdown_continues_when_a_part_raises(whole: SideRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The carrier's thread ends although the pipeline's shutdown raises."""
    side, ended = whole.side, list[str]()

    class Part:
        def __init__(self, name: str) -> None:
            self.name = name

        def shutdown(self) -> None:
            ended.append(self.name)
            raise RuntimeError(self.name)

        stop = shutdown

    with monkeypatch.context() as patch:
        for name in ("_readier", "pipeline", "carrier"):
            patch.setattr(side, name, Part(name))
        with pytest.raises(RuntimeError, match="carrier"):
            side.shutdown()
    assert ended == ["_readier", "pipeline", "carrier"]


def test_tallies_are_reported_when_adapters_cannot_be(whole: SideRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank reports its jobs although reporting its adapters raises.

    The scheduler's side waits for these reports without a time limit.
    """
    side = whole.side

    def fail() -> dict[int, bytes]:
        raise OSError

    monkeypatch.setattr(side.adapters, "news", fail)
    side.bind(plan(job(1)))
    for layer in "abc":
        side.save_layer(layer)
    side.end_step()
    whole.engine.complete_all()
    whole.settle()
    report = side.take_report()
    assert report is not None
    assert report.tallies == {1: Tally(1, 0)}
    assert side.counters["contained_error"] == 1


@pytest.mark.parametrize(("device", "share"), [("cpu", 1.0), ("cuda", 0.0125)])
def test_ranks_share_the_time_that_pinning_may_take(whole: SideRig, device: str, share: float) -> None:
    """All ranks together pin for 5 % of a busy engine's time, because pinning delays the launches of all ranks."""
    whole.side.context = dataclasses.replace(whole.side.context, ranks=4)
    assert whole.side._make_readier(whole.engine, device)._manners.claim_share == pytest.approx(share)
