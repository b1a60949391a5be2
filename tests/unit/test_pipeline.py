"""Every extra, empty, repeated, early, late or missing call finds a pipeline that reports each job once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvpipe.plan import BROKEN, EMPTY_PLAN, Job, Kind
from kvpipe.transfer.base import Direction, Ticket
from tests.unit.fakes import FakeEngine, Rig, ThreadedEngine, Waiting, job, plan, rows

SAVE, SYNC, ASYNC = Kind.SAVE, Kind.LOAD_SYNC, Kind.LOAD_ASYNC
killed_loop = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A layerwise pipeline over a fake engine; no transition may have been illegal."""
    made = Rig()
    yield made
    made.pipeline.shutdown()
    assert made.counters["illegal_transition"] == 0
    assert made.pipeline._loop.errors == 0


@pytest.fixture
def stepwise() -> Iterator[Rig]:
    """The same in step mode."""
    made = Rig(layerwise=False)
    yield made
    made.pipeline.shutdown()
    assert made.counters["illegal_transition"] == 0


# ---- a plain step -------------------------------------------------------------------------------------------------


def test_a_plain_step(rig: Rig) -> None:
    """Saves and loads of one step are copied layer by layer and reported once, when the step has ended."""
    p = rig.pipeline
    assert rig.busy() is False
    p.begin(plan(job(1), job(2), job(3, SYNC), job(4, ASYNC)))
    assert rig.busy() is True
    assert rig.in_flight() == 4
    p.start_loads()
    for layer in range(rig.layers):
        p.wait_layer(layer)
        p.save_layer(layer)
    rig.engine.complete_all()
    assert rig.engine.layers_of(4) == [], "an async load comes after the sync ones, whose readers are in this step"
    p.end_step()
    assert rig.news() == {1: True, 2: True, 3: True}
    rig.engine.complete_all()
    assert rig.news() == {4: True}
    assert rig.news() == {}
    assert rig.in_flight() == 0
    assert rig.busy() is False
    assert rig.engine.layers_of(1) == rig.engine.layers_of(3) == rig.engine.layers_of(4) == [0, 1, 2]


def test_all_jobs_of_a_kind_share_one_copy_per_layer(rig: Rig) -> None:
    """The number of submissions does not grow with the number of requests."""
    rig.pipeline.begin(plan(*(job(i) for i in range(20))))
    rig.save_all()
    assert len(rig.engine.copies) == rig.layers
    rig.pipeline.end_step()
    assert rig.news() == dict.fromkeys(range(20), True)


def test_layers_may_come_in_any_order(rig: Rig) -> None:
    """Layers are counted as they are submitted, not by their number."""
    rig.pipeline.begin(plan(job(1)))
    for layer in (2, 0, 1):
        rig.pipeline.save_layer(layer)
    rig.pipeline.end_step()
    assert rig.news() == {1: True}


def test_a_job_without_rows(rig: Rig) -> None:
    """A job that has nothing to copy ends like any other."""
    rig.pipeline.begin(plan(job(1, SAVE, ()), job(2, ASYNC, ())))
    rig.pipeline.start_loads()
    rig.save_all()
    rig.engine.complete_all()
    rig.pipeline.end_step()
    assert rig.news() == {1: True, 2: True}


def test_completions_from_another_thread() -> None:
    """With an engine that completes on its own thread, many steps end well and nothing overtakes."""
    rig = Rig(ThreadedEngine())
    p = rig.pipeline
    for step in range(200):
        p.begin(plan(job(3 * step), job(3 * step + 1, SYNC), job(3 * step + 2, ASYNC)))
        p.start_loads()
        for layer in range(rig.layers):
            p.wait_layer(layer)
            p.save_layer(layer)
        p.end_step()
    p.shutdown()
    assert rig.news() == dict.fromkeys(range(600), True)
    assert rig.counters["illegal_transition"] == 0


def test_a_waiter_wakes_after_the_news_is_in_the_inbox() -> None:
    """When a ticket is completed, its news is handed on before any waiter can go on."""
    seen: list[bool] = []
    ticket = Ticket(None, 0, 0, lambda t: seen.append(t.done))
    assert not ticket.wait(0.0)
    ticket.complete(frozenset({4}))
    assert seen == [False]
    assert ticket.done
    assert ticket.wait(0.0)
    assert ticket.failed == {4}


def test_a_ticket_completes_once() -> None:
    """A second completion is the engine's bug and is not handed on."""
    seen: list[Ticket] = []
    ticket = Ticket(None, 0, 0, seen.append)
    ticket.complete()
    with pytest.raises(RuntimeError, match="twice"):
        ticket.complete()
    assert seen == [ticket]


# ---- calls that are extra, empty, repeated ------------------------------------------------------------------------


def test_hooks_without_a_plan(rig: Rig) -> None:
    """Every call on a pipeline that was never given work is harmless."""
    p = rig.pipeline
    for _ in range(2):
        p.start_loads()
        rig.wait_all()
        rig.save_all()
        p.end_loads()
        p.end_step()
        p.begin(EMPTY_PLAN)
    assert rig.news() == {}
    assert rig.engine.copies == []
    assert rig.counters["step_end_empty"] == 2


def test_end_step_twice(rig: Rig) -> None:
    """The second end of a step finds nothing to do."""
    rig.pipeline.begin(plan(job(1), job(2, SYNC)))
    rig.pipeline.start_loads()
    rig.wait_all()
    rig.save_all()
    rig.pipeline.end_step()
    rig.pipeline.end_step()
    assert rig.news() == {1: True, 2: True}
    assert rig.counters["step_end_empty"] == 1


def test_empty_steps_while_earlier_saves_land(rig: Rig) -> None:
    """Steps without work do not touch an earlier step's saves that the device still copies."""
    rig.engine.waiting = Waiting.DEVICE
    rig.pipeline.begin(plan(job(1)))
    rig.save_all()
    rig.pipeline.end_step()
    for _ in range(3):
        rig.pipeline.begin(EMPTY_PLAN)
        rig.save_all()
        rig.pipeline.end_step()
        assert rig.news() == {}
    rig.engine.complete(Direction.SAVE, 2)
    assert rig.news() == {}
    rig.engine.complete(Direction.SAVE)
    assert rig.news() == {1: True}


def test_two_steps_land_together(rig: Rig) -> None:
    """Saves of a step that ended land while the next step's are being submitted; each is reported once."""
    rig.engine.waiting = Waiting.DEVICE
    for number in (1, 2):
        rig.pipeline.begin(plan(job(number)))
        rig.save_all()
        rig.pipeline.end_step()
    rig.engine.complete(Direction.SAVE, 4)
    assert rig.news() == {1: True}
    rig.engine.complete(Direction.SAVE, 2)
    assert rig.news() == {2: True}


def test_begin_without_the_earlier_steps_end(rig: Rig) -> None:
    """A step that was never ended is withdrawn, even when all its copies have landed; the next one is untouched."""
    p = rig.pipeline
    p.begin(plan(job(1), job(2, SYNC), job(3, ASYNC)))
    p.start_loads()
    rig.save_all()
    rig.engine.complete_all()
    p.begin(plan(job(4)))
    rig.save_all()
    p.end_step()
    assert rig.news() == {1: False, 2: False, 3: False, 4: True}  # 3 was to begin at the step's end
    assert rig.counters["step_never_ended"] == 1


def test_a_withdrawn_job_is_reported_after_its_copies(rig: Rig) -> None:
    """A withdrawn step whose copies are in flight is reported only when they are over."""
    rig.engine.waiting = Waiting.STUCK
    rig.pipeline.begin(plan(job(1), job(2, ASYNC)))
    rig.save_all()
    rig.pipeline.begin(EMPTY_PLAN)
    assert rig.news() == {2: False}  # it was never submitted
    rig.engine.complete(Direction.SAVE, 2)
    assert rig.news() == {}
    rig.engine.complete(Direction.SAVE)
    assert rig.news() == {1: False}


def test_repeated_hooks_submit_once(rig: Rig) -> None:
    """A layer's save or load is submitted once, however often its hooks run."""
    p = rig.pipeline
    p.begin(plan(job(1), job(2, SYNC), job(3, ASYNC)))
    for _ in range(3):
        p.start_loads()
        rig.wait_all()
        rig.save_all()
    p.end_step()
    rig.engine.complete_all()
    assert rig.news() == {1: True, 2: True, 3: True}
    assert [rig.engine.layers_of(number) for number in (1, 2, 3)] == [[0, 1, 2]] * 3
    assert rig.counters["save_repeated"] == rig.counters["wait_repeated"] == 6


@pytest.mark.parametrize("submitted", [0, 1, 2])
def test_layers_that_were_never_submitted_fail_the_save(rig: Rig, submitted: int) -> None:
    """A save with a missing layer is not whole, whether or not the submitted ones landed first."""
    rig.pipeline.begin(plan(job(1)))
    for layer in range(submitted):
        rig.pipeline.save_layer(layer)
    rig.engine.complete_all()
    rig.pipeline.end_step()
    assert rig.news() == {1: False}
    assert rig.counters["layers_never_submitted"] == 1


def test_loads_that_were_never_started(rig: Rig) -> None:
    """When no hook starts the loads, the step's end reports the sync load as failed and starts the async one."""
    rig.pipeline.begin(plan(job(1, SYNC), job(2, ASYNC)))
    rig.pipeline.end_loads()
    rig.engine.complete_all()
    assert rig.news() == {1: False, 2: True}
    assert rig.engine.layers_of(1) == []
    assert rig.counters["loads_never_started"] == 1


def test_a_wait_starts_the_loads(rig: Rig) -> None:
    """The first layer's wait starts loads that nobody started, in time for every reader."""
    rig.pipeline.begin(plan(job(1, SYNC)))
    rig.wait_all()
    rig.pipeline.end_step()
    assert rig.news() == {1: True}
    assert rig.counters["loads_started_by_hook"] == 1


def test_end_loads_twice(rig: Rig) -> None:
    """Loads are settled once."""
    rig.pipeline.begin(plan(job(1, SYNC)))
    rig.wait_all()
    rig.pipeline.end_loads()
    rig.pipeline.end_loads()
    rig.pipeline.end_step()
    assert rig.news() == {1: True}


# ---- failures -----------------------------------------------------------------------------------------------------


def test_a_failed_copy_fails_its_job_alone(rig: Rig) -> None:
    """A save whose copy failed is reported as failed; the other saves of the step are good."""
    rig.engine.failing = lambda _plan, ticket: frozenset({2}) if ticket.layer == 1 else frozenset()
    rig.pipeline.begin(plan(job(1), job(2), job(3)))
    rig.save_all()
    rig.pipeline.end_step()
    assert rig.news() == {1: True, 2: False, 3: True}


def test_a_failed_save_is_reported_after_its_last_copy(rig: Rig) -> None:
    """A save that failed at its first layer keeps its slots until no copy of it is in flight."""
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
    """A wait that times out fails the save; it is reported when its copies are over, and the next step works."""
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
    """A save whose last copy lands between the timeout and its report is good, and nothing is illegal."""

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
    """What a step computes over a load that failed is not saved; a later step's saves are."""
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
    """Even when every save of the step has landed already, a load that nobody waited for makes them worthless."""
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
    """The engine has to hear of bad blocks in the step that read them: collect after end_loads has them."""
    rig.engine.waiting = Waiting.DEVICE
    rig.engine.failing = _fail_the_load
    rig.pipeline.begin(plan(job(2, SYNC)))
    rig.pipeline.start_loads()
    rig.wait_all()
    rig.pipeline.end_loads()
    assert {o.job.id: o.ok for o in rig.pipeline.collect()} == {2: False}


def test_a_sync_load_that_takes_too_long(rig: Rig) -> None:
    """A load that did not land in time fails, and so do the saves over it."""
    rig.engine.waiting = Waiting.STUCK
    rig.pipeline.begin(plan(job(1), job(2, SYNC)))
    rig.pipeline.start_loads()
    rig.pipeline.wait_layer(0)
    rig.save_all()
    rig.engine.complete_all()
    rig.pipeline.end_step()
    assert rig.news() == {1: False, 2: False}


def test_a_sync_load_confirmed_before_it_lands(rig: Rig) -> None:
    """Where the device waits, a sync load's step may end first; it is reported good once it has landed."""
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
    """An async load, good or failed at any layer, is reported once, and never before its last copy."""
    rig.engine.failing = lambda _plan, ticket: frozenset({1}) if ticket.layer == bad else frozenset()
    rig.pipeline.begin(plan(job(1, ASYNC)))
    rig.pipeline.start_loads()
    rig.pipeline.end_step()
    for _ in range(rig.layers):
        assert rig.news() == {}
        rig.engine.complete(Direction.LOAD)
    assert rig.news() == {1: bad is None}


def test_completions_out_of_order_fail_the_job() -> None:
    """An engine that completes a later layer first is not trusted, and nothing raises."""
    rig = Rig()
    rig.pipeline.begin(plan(job(1)))
    rig.save_all()
    queue = rig.engine.queues[Direction.SAVE]
    queue.rotate(-1)
    rig.engine.complete_all()
    rig.pipeline.end_step()
    assert rig.news() == {1: False}
    rig.pipeline.shutdown()


# ---- plans that cannot be carried out -----------------------------------------------------------------------------

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
    """A job that would touch memory it must not is reported as failed and never copied; others go on."""
    rig.pipeline.begin(plan(poison, job(2, ASYNC, [(0, 3, 3, 9), (1, 3, 1, 9)])))
    rig.pipeline.start_loads()
    rig.save_all()
    rig.engine.complete_all()
    rig.pipeline.end_step()
    assert rig.news() == {1: False, 2: True}
    assert rig.engine.layers_of(1) == []
    assert rig.counters["poisoned_plan"] == 1


def test_a_load_that_was_planned_to_fail_is_no_fault(rig: Rig) -> None:
    """The scheduler's side has counted why; here it is reported as failed, and nothing is copied."""
    rig.pipeline.begin(plan(job(1, SYNC, [(0, BROKEN, 0, 5), (0, 1, 1, 6)])))
    assert rig.news() == {1: False}
    assert rig.engine.layers_of(1) == []
    assert rig.counters["poisoned_plan"] == 0


def test_a_poisoned_sync_load_fails_the_steps_saves(rig: Rig) -> None:
    """The step computes over blocks that were never loaded, so its saves are dropped."""
    rig.pipeline.begin(plan(job(1), job(2, SYNC, [(0, 99, 0, 0)])))
    rig.save_all()
    rig.engine.complete_all()
    rig.pipeline.end_step()
    assert rig.news() == {1: False, 2: False}


def test_any_block_is_fine_before_the_caches_are_known() -> None:
    """Without a known number of blocks only the sign is checked."""
    rig = Rig()
    rig.pipeline.blocks = 1 << 31
    rig.pipeline.begin(plan(job(1, SAVE, [(0, 0, 0, (1 << 31) - 1)])))
    rig.save_all()
    rig.pipeline.end_step()
    assert rig.news() == {1: True}
    rig.pipeline.shutdown()


# ---- step mode ----------------------------------------------------------------------------------------------------


def test_step_mode_copies_at_the_steps_end(stepwise: Rig) -> None:
    """In step mode the hooks submit nothing and the end of the step submits every layer."""
    stepwise.pipeline.begin(plan(job(1)))
    stepwise.save_all()
    assert stepwise.engine.copies == []
    stepwise.pipeline.end_step()
    assert stepwise.engine.layers_of(1) == [0, 1, 2]
    assert stepwise.news() == {1: True}


def test_step_mode_waits_for_loads_at_the_start(stepwise: Rig) -> None:
    """In step mode a sync load is in place when start_loads returns, without any hook."""
    stepwise.pipeline.begin(plan(job(1, SYNC), job(2, SYNC)))
    stepwise.pipeline.start_loads()
    assert all(copy.ticket.done for copy in stepwise.engine.copies)
    stepwise.pipeline.end_step()
    assert stepwise.news() == {1: True, 2: True}


# ---- the end ------------------------------------------------------------------------------------------------------


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
    assert not p._loop._thread.is_alive()


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
