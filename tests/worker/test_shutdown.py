"""Tests of a pipeline's end with copies in flight, with an engine that never finishes, and with a dead loop thread."""

from __future__ import annotations

import pytest

from kvpipe.protocol.messages import EMPTY_PLAN, Kind
from tests.rigs.pipeline_rig import Rig, Waiting, job, plan

SYNC, ASYNC = Kind.LOAD_SYNC, Kind.LOAD_ASYNC
killed_loop = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def test_shutdown_with_work_in_flight(rig: Rig) -> None:
    """Submitted copies are finished, open jobs are withdrawn, and each job is reported once."""
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
    """After a shutdown, jobs whose copies never complete are reported as failed."""
    rig.engine.waiting, rig.engine.finishes_at_shutdown = Waiting.STUCK, False
    rig.pipeline.begin(plan(job(1), job(2, ASYNC)))
    rig.pipeline.start_loads()
    rig.save_all()
    rig.pipeline.end_step()
    rig.pipeline.shutdown()
    assert rig.news() == {1: False, 2: False}
    assert rig.news() == {}
    assert rig.pipeline.in_flight == 0


def test_calls_after_shutdown_are_harmless(rig: Rig) -> None:
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
    """If the loop thread dies, open jobs are reported as failed once. Later plans are refused. No call blocks."""
    p = rig.pipeline
    p.begin(plan(job(1), job(2, ASYNC)))
    p.start_loads()
    rig.settle()
    rig.kill_loop()
    rig.save_all()
    p.end_step()
    assert rig.news() == {1: False, 2: False}
    assert rig.news() == {}
    p.begin(plan(job(3), job(4, SYNC)))
    p.start_loads()
    rig.wait_all()
    rig.save_all()
    p.end_step()
    assert rig.news() == {3: False, 4: False}
    assert p.in_flight == 0


@killed_loop
def test_lost_loop_does_not_change_reported_outcomes(rig: Rig) -> None:
    """A job that ended before the loop thread died is reported once, with its own outcome."""
    rig.pipeline.begin(plan(job(1, ASYNC), job(2)))
    rig.pipeline.start_loads()
    rig.engine.complete_all()
    rig.settle()
    rig.kill_loop()
    assert rig.news() == {1: True, 2: False}


@killed_loop
def test_a_job_that_was_reported_as_lost_is_not_reported_again(rig: Rig) -> None:
    """A completion thread that has the turn when the loop thread dies still handles its items.

    The lost jobs are not reported a second time.
    """
    rig.pipeline.begin(plan(job(1, ASYNC)))
    rig.pipeline.start_loads()
    rig.settle()
    (batch,) = rig.pipeline.copies.live
    rig.kill_loop()
    assert rig.news() == {1: False}
    rig.engine.complete_all()
    for ticket in batch.tickets.values():
        rig.pipeline.copies._handle(ticket)
    assert rig.pipeline.copies.outbox
    assert rig.news() == {}
