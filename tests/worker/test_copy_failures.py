"""Copies that fail, land late or out of order, and plans that cannot be carried out.

Each failure fails only its own jobs.
"""

from __future__ import annotations

from typing import cast

import pytest

from kvpipe.protocol.messages import BROKEN, EMPTY_PLAN, Job, Kind
from kvpipe.transfer.base import Direction, Ticket
from kvpipe.transfer.guard import GuardedEngine
from kvpipe.worker.pipeline import BLOCKS_MAX
from tests.rigs.pipeline_rig import FakeEngine, Rig, Waiting, job, plan, rows

SAVE, SYNC, ASYNC = Kind.SAVE, Kind.LOAD_SYNC, Kind.LOAD_ASYNC


def test_a_failed_copy_fails_its_job_alone(rig: Rig) -> None:
    """A save whose copy failed is reported as failed. The other saves of the step are good."""
    rig.engine.failing = lambda _plan, ticket: frozenset({2}) if ticket.layer == 1 else frozenset()
    rig.pipeline.begin(plan(job(1), job(2), job(3)))
    rig.save_all()
    rig.pipeline.end_step()
    assert rig.news() == {1: True, 2: False, 3: True}


def test_a_failed_save_is_reported_after_its_last_copy(rig: Rig) -> None:
    """A save that failed at its first layer keeps its slots until none of its copies is in flight."""
    rig.engine.waiting = Waiting.DEVICE
    rig.engine.failing = lambda _plan, ticket: frozenset({1}) if ticket.layer == 0 else frozenset()
    rig.pipeline.begin(plan(job(1)))
    rig.save_all()
    rig.engine.complete(Direction.SAVE)
    rig.pipeline.end_step()
    assert rig.news() == {}
    rig.engine.complete(Direction.SAVE)
    assert rig.news() == {}
    rig.engine.complete(Direction.SAVE)
    assert rig.news() == {1: False}


def test_a_save_that_takes_too_long(rig: Rig) -> None:
    """A wait that times out fails the save.

    The save is reported when its copies have ended, and the next step works.
    """
    rig.engine.waiting = Waiting.STUCK
    rig.pipeline.begin(plan(job(1)))
    rig.save_all()
    rig.pipeline.end_step()
    assert rig.counters["copy_timeout"] == 1
    assert rig.news() == {}
    rig.engine.complete_all()
    assert rig.news() == {1: False}
    rig.engine.waiting = Waiting.OBEDIENT
    rig.pipeline.begin(plan(job(2)))
    rig.save_all()
    rig.pipeline.end_step()
    assert rig.news() == {2: True}


def test_a_copy_that_lands_as_the_wait_is_given_up() -> None:
    """A save whose last copy lands between the timeout and the report is good, and no transition is illegal."""

    class Late(FakeEngine):
        def fence(self, ticket: Ticket, timeout_s: float) -> bool:
            self.complete_all()
            return super().guard_read(ticket, timeout_s) and False

    rig = Rig(Late())
    rig.pipeline.begin(plan(job(1)))
    rig.save_all()
    rig.pipeline.end_step()
    assert rig.news() == {1: True}
    assert rig.counters["illegal_transition"] == 0
    rig.pipeline.shutdown()


def _fail_the_load(_plan: object, ticket: Ticket) -> frozenset[int]:
    return frozenset({2}) if ticket.layer == 1 else frozenset()


def test_a_failed_sync_load_fails_the_steps_saves(rig: Rig) -> None:
    """A failed load fails the saves of its step. The saves of the next step succeed."""
    p = rig.pipeline
    rig.engine.failing = lambda copies, ticket: _fail_the_load(copies, ticket) if copies.direction else frozenset()
    p.begin(plan(job(1), job(2, SYNC), job(3, SYNC)))
    p.start_loads()
    for layer in range(rig.layers):
        p.wait_layer(layer)
        p.save_layer(layer)
    p.end_step()
    assert rig.news() == {1: False, 2: False, 3: True}
    p.begin(plan(job(4)))
    rig.save_all()
    p.end_step()
    assert rig.news() == {4: True}


@pytest.mark.parametrize("started", [True, False], ids=["layers read without waiting", "never started"])
def test_saves_that_landed_before_the_load_turned_out_bad(rig: Rig, *, started: bool) -> None:
    """Saves fail although they have landed, if their step's load fails later and the step did not wait for it."""
    p = rig.pipeline
    p.begin(plan(job(1), job(2, SYNC)))
    if started:
        p.start_loads()
        p.wait_layer(0)
    rig.save_all()
    rig.engine.complete_all()
    rig.settle()
    p.end_step()
    assert rig.news() == {1: False, 2: False}


def test_a_failed_sync_load_is_reported_in_its_own_step(rig: Rig) -> None:
    """After `end_loads`, `collect` returns bad blocks.

    So the engine learns of bad blocks in the step that read them.
    """
    rig.engine.waiting = Waiting.DEVICE
    rig.engine.failing = _fail_the_load
    rig.pipeline.begin(plan(job(2, SYNC)))
    rig.pipeline.start_loads()
    rig.wait_all()
    rig.pipeline.end_loads()
    assert {o.job.id: o.ok for o in rig.pipeline.collect()} == {2: False}


def test_a_sync_load_that_takes_too_long(rig: Rig) -> None:
    """A load that did not land in time fails. The saves that were computed from the load also fail."""
    rig.engine.waiting = Waiting.STUCK
    rig.pipeline.begin(plan(job(1), job(2, SYNC)))
    rig.pipeline.start_loads()
    rig.pipeline.wait_layer(0)
    rig.save_all()
    rig.engine.complete_all()
    rig.pipeline.end_step()
    assert rig.news() == {1: False, 2: False}


def test_a_sync_load_confirmed_before_it_lands(rig: Rig) -> None:
    """If the device waits, the step may end before its sync load lands.

    The load is reported as good when it has landed.
    """
    rig.engine.waiting = Waiting.DEVICE
    rig.pipeline.begin(plan(job(1, SYNC)))
    rig.pipeline.start_loads()
    rig.wait_all()
    rig.pipeline.end_step()
    assert rig.news() == {}
    rig.engine.complete_all()
    assert rig.news() == {1: True}


@pytest.mark.parametrize("bad", [None, 0, 1, 2])
def test_an_async_load_is_reported_after_all_its_copies(rig: Rig, bad: int | None) -> None:
    """An async load is reported once and after its last copy, whether it is good or failed at any layer."""
    rig.engine.failing = lambda _plan, ticket: frozenset({1}) if ticket.layer == bad else frozenset()
    rig.pipeline.begin(plan(job(1, ASYNC)))
    rig.pipeline.start_loads()
    rig.pipeline.end_step()
    for _ in range(rig.layers):
        assert rig.news() == {}
        rig.engine.complete(Direction.LOAD)
    assert rig.news() == {1: bad is None}


def test_completions_out_of_order_fail_the_job() -> None:
    """If an engine completes a later layer first, the job fails, and no call raises an error."""
    rig = Rig()
    rig.pipeline.begin(plan(job(1)))
    rig.save_all()
    queue = rig.engine.queues[Direction.SAVE]
    queue.rotate(-1)
    rig.engine.complete_all()
    rig.pipeline.end_step()
    assert rig.news() == {1: False}
    rig.pipeline.shutdown()


# ---- plans that cannot be carried out --------------------------------------------------------------------------------


POISON = {
    "unknown kind": job(1, 7),
    "negative kind": job(1, -1),
    "cut rows": Job(1, int(SAVE), "r", 1, rows([(0, 0, 0, 0)])[:-3]),
    "group": job(1, SAVE, [(2, 0, 0, 0)]),
    "negative group": job(1, SAVE, [(-1, 0, 0, 0)]),
    "slot": job(1, SAVE, [(0, 0, 0, 0), (0, 4, 0, 0)]),
    "negative slot": job(1, SAVE, [(0, -2, 0, 0)]),
    "page": job(1, SAVE, [(0, 0, 4, 0)]),
    "page of the other group": job(1, SAVE, [(1, 0, 2, 0)]),
    "negative page": job(1, SAVE, [(0, 0, -1, 0)]),
    "block": job(1, SAVE, [(0, 0, 0, 10)]),
    "negative block": job(1, ASYNC, [(0, 0, 0, -1)]),
}


@pytest.mark.parametrize("poison", POISON.values(), ids=POISON.keys())
def test_a_poisoned_job_is_refused_alone(rig: Rig, poison: Job) -> None:
    """A job whose rows are outside of the memory is reported as failed and not copied. Other jobs are copied."""
    rig.pipeline.begin(plan(poison, job(2, ASYNC, [(0, 3, 3, 9), (1, 3, 1, 9)])))
    rig.pipeline.start_loads()
    rig.save_all()
    rig.engine.complete_all()
    rig.pipeline.end_step()
    assert rig.news() == {1: False, 2: True}
    assert rig.engine.layers_of(1) == []
    assert rig.counters["poisoned_plan"] == 1


def test_a_load_that_was_planned_to_fail_is_no_fault(rig: Rig) -> None:
    """The scheduler's side has already counted the reason. The rank reports the load as failed, and copies nothing."""
    rig.pipeline.begin(plan(job(1, SYNC, [(0, BROKEN, 0, 5), (0, 1, 1, 6)])))
    assert rig.news() == {1: False}
    assert rig.engine.layers_of(1) == []
    assert rig.counters["poisoned_plan"] == 0


def test_a_poisoned_sync_load_fails_the_steps_saves(rig: Rig) -> None:
    """The step computes from blocks that were never loaded, so its saves fail."""
    rig.pipeline.begin(plan(job(1), job(2, SYNC, [(0, 99, 0, 0)])))
    rig.save_all()
    rig.engine.complete_all()
    rig.pipeline.end_step()
    assert rig.news() == {1: False, 2: False}


def test_only_negative_blocks_are_refused_before_the_caches_are_known() -> None:
    """If the number of blocks is not known, only negative block numbers are refused."""
    rig = Rig(blocks=BLOCKS_MAX)
    rig.pipeline.begin(plan(job(1, SAVE, [(0, 0, 0, (1 << 31) - 1)])))
    rig.save_all()
    rig.pipeline.end_step()
    assert rig.news() == {1: True}
    rig.pipeline.shutdown()


CALLS = ("prepare", "submit", "guard_read", "reached", "fence", "abandon")


def _raising(engine: FakeEngine, call: str) -> FakeEngine:
    def fail(*_: object) -> None:
        raise RuntimeError(call)

    setattr(engine, call, fail)
    return engine


@pytest.mark.parametrize("call", CALLS)
def test_an_engine_of_another_package_that_raises(call: str) -> None:
    """If a transfer engine of another package raises, loads that have not landed fail, and each job is reported.

    Later jobs fail, and no call waits for ever.
    """
    faults: list[str] = []
    engine = FakeEngine()
    engine.waiting = Waiting.STUCK if call == "abandon" else Waiting.OBEDIENT
    guarded = GuardedEngine(_raising(engine, call), "npu", lambda name, **_: faults.append(name))
    rig = Rig(cast("FakeEngine", guarded), wait_s=0.1)
    pipeline = rig.pipeline
    for first in (1, 3):
        engine.copies.clear()
        pipeline.begin(plan(job(first), job(first + 1, SYNC)))
        pipeline.start_loads()
        if call == "reached":
            engine.complete_all()
        rig.wait_all()
        rig.save_all()
        pipeline.end_step()
        suspects = pipeline.take_suspects()
        landed = [copy for copy in engine.copies if copy.plan.direction is Direction.LOAD and copy.ticket.done]
        engine.complete_all()
        ended = rig.news()
        assert ended.keys() == {first, first + 1}
        assert len(landed) == rig.layers or suspects or not ended[first + 1]
        pipeline.clear()
    assert ended == {3: False, 4: False}
    assert set(faults) == {"engine_failed"}
    pipeline.shutdown()


def test_transfer_engine_that_raises_loses_no_report(rig: Rig) -> None:
    """If `guard_read` raises, layers read a load's blocks too early. The rank reports these blocks as suspects.

    The step's saves are withdrawn.
    """
    guard_read = rig.engine.guard_read
    _raising(rig.engine, "guard_read")
    pipeline = rig.pipeline
    pipeline.begin(plan(job(1), job(2, SYNC, ((0, 0, 0, 7),))))
    for call in (pipeline.start_loads, rig.wait_all, pipeline.end_step):
        with pytest.raises(RuntimeError, match="guard_read"):
            call()
    assert pipeline.take_suspects() == {7}
    rig.engine.guard_read = guard_read  # type: ignore[method-assign]
    rig.engine.complete_all()
    pipeline.clear()
    pipeline.begin(EMPTY_PLAN)
    assert rig.busy() is False
    assert rig.news() == {1: False, 2: False}
    assert rig.counters["step_never_ended"] == 1
