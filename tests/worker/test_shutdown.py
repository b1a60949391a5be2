"""How a pipeline ends: with copies in flight, with an engine that never finishes, with its loop lost."""

from __future__ import annotations

import pytest

from kvpipe.messages import EMPTY_PLAN, Kind
from kvpipe.testing.pipeline_rig import Rig, Waiting, job, plan

SYNC, ASYNC = Kind.LOAD_SYNC, Kind.LOAD_ASYNC
killed_loop = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def test_shutdown_with_work_in_flight(rig: Rig) -> None:
    """What was submitted is finished, what is open is withdrawn, and every job is reported once."""
    rig.engine.waiting = Waiting.DEVICE
    p = rig.pipeline
    p.begin(plan(job(1), job(2, ASYNC)))
    p.start_loads()
    rig.save_all()
    p.end_step()
    p.begin(plan(job(3), job(4, SYNC), job(5, ASYNC)))
    p.save_layer(0)
    p.shutdown()
    p.shutdown()
    assert rig.news() == {1: True, 2: True, 3: False, 4: False, 5: False}
    assert p.in_flight == 0
    assert rig.engine.shutdowns == 1
    assert not p.copies.loop._thread.is_alive()


def test_shutdown_with_an_engine_that_never_finishes(rig: Rig) -> None:
    """Copies that never complete do not leave jobs open for ever: after shutdown they are reported as failed."""
    rig.engine.waiting, rig.engine.finishes_at_shutdown = Waiting.STUCK, False
    rig.pipeline.begin(plan(job(1), job(2, ASYNC)))
    rig.pipeline.start_loads()
    rig.save_all()
    rig.pipeline.end_step()
    rig.pipeline.shutdown()
    assert rig.news() == {1: False, 2: False}
    assert rig.news() == {}
    assert rig.pipeline.in_flight == 0


def test_calls_after_shutdown(rig: Rig) -> None:
    """After shutdown every call is harmless and a plan's jobs are reported as failed at once."""
    p = rig.pipeline
    p.shutdown()
    p.begin(plan(job(1), job(2, SYNC), job(3, ASYNC)))
    p.start_loads()
    rig.wait_all()
    rig.save_all()
    p.end_loads()
    p.end_step()
    p.begin(EMPTY_PLAN)
    assert rig.news() == {1: False, 2: False, 3: False}
    assert p.in_flight == 0
    assert rig.engine.copies == []


@killed_loop
def test_a_lost_loop_fails_the_open_jobs(rig: Rig) -> None:
    """When the loop thread dies, open jobs are reported as failed, once; later plans are refused, nothing blocks."""
    p = rig.pipeline
    p.begin(plan(job(1), job(2, ASYNC)))
    p.start_loads()
    rig.settle()
    rig.kill_loop()
    rig.save_all()
    p.end_step()
    assert rig.news() == {1: False, 2: False}
    assert rig.news() == {}
    assert rig.counters["loop_lost"] == 1
    p.begin(plan(job(3), job(4, SYNC)))
    p.start_loads()
    rig.wait_all()
    rig.save_all()
    p.end_step()
    assert rig.news() == {3: False, 4: False}
    assert p.in_flight == 0


@killed_loop
def test_a_lost_loop_does_not_take_back_what_it_reported(rig: Rig) -> None:
    """A job that had ended before the loop was lost is reported as it ended, and once."""
    rig.pipeline.begin(plan(job(1, ASYNC), job(2)))
    rig.pipeline.start_loads()
    rig.engine.complete_all()
    rig.settle()
    rig.kill_loop()
    assert rig.news() == {1: True, 2: False}
