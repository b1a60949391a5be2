"""Plain steps, and every extra, empty, repeated, early or missing call: a pipeline reports each job once."""

from __future__ import annotations

import pytest

from kvpipe.messages import EMPTY_PLAN, Kind
from kvpipe.testing.pipeline_rig import Rig, SideRig, ThreadedEngine, Waiting, job, plan
from kvpipe.transfer.base import Direction, Ticket

SAVE, SYNC, ASYNC = Kind.SAVE, Kind.LOAD_SYNC, Kind.LOAD_ASYNC


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


def test_loads_are_in_place_a_layer_ahead(rig: Rig) -> None:
    """Attention's hook comes after the new token was written, perhaps into a block that is being loaded."""
    guarded: list[int] = []
    guard = rig.engine.guard_read

    def noted(ticket: Ticket, timeout_s: float) -> bool:
        guarded.append(ticket.layer)
        return guard(ticket, timeout_s)

    rig.engine.guard_read = noted  # type: ignore[method-assign]
    rig.engine.waiting = Waiting.DEVICE
    rig.pipeline.begin(plan(job(1, SYNC)))
    rig.pipeline.start_loads()
    for layer, placed in enumerate(([0], [0, 1], [0, 1, 2])):
        assert guarded == placed, f"layer {layer} is about to be written"
        rig.pipeline.wait_layer(layer)
    rig.engine.complete_all()
    rig.pipeline.end_step()
    assert rig.news() == {1: True}


# ---- calls that are extra, empty, repeated ---------------------------------------------------------------------------


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


# ---- where the fence is ----------------------------------------------------------------------------------------------


def test_the_fence_is_set_when_the_step_ends(rig: Rig) -> None:
    """The next step's first call may come when blocks are written already: with runner V2 they are zeroed before it."""
    rig.pipeline.begin(plan(job(1)))
    rig.save_all()
    rig.pipeline.end_step()
    assert all(copy.ticket.done for copy in rig.engine.copies)


def test_the_next_steps_first_hook_sets_the_fence() -> None:
    """With runner V1 on a GPU: at the step's end nothing is waited for, before blocks are written everything is."""
    rig = SideRig(fences_late=True)
    side = rig.side
    side.bind(plan(job(1)))
    rig.save_all()
    side.end_step()
    assert not any(copy.ticket.done for copy in rig.engine.copies)
    side.handle_preemptions()
    assert all(copy.ticket.done for copy in rig.engine.copies)
    assert rig.news() == {1: True}
    side.shutdown()


@pytest.mark.parametrize("kind", [SYNC, ASYNC])
def test_a_step_whose_loads_are_settled_needs_no_end(rig: Rig, kind: int) -> None:
    """Nothing is open any more when the next step is bound, or its metadata is cleared: nothing is counted."""
    p = rig.pipeline
    for number, end in ((1, p.clear), (2, lambda: p.begin(EMPTY_PLAN))):
        p.begin(plan(job(number, kind)))
        p.start_loads()
        if kind == SYNC:
            rig.wait_all()
        p.end_loads()
        end()
        rig.engine.complete_all()
        assert rig.news() == {number: True}
    assert not rig.counters.faults


@pytest.mark.parametrize("where", ["fence", "shutdown"])
def test_a_shutdown_that_raises_ends_the_thread(rig: Rig, where: str) -> None:
    """Whatever the engine does, the loop does not outlive it."""
    p = rig.pipeline
    p.begin(plan(job(1)))
    rig.save_all()

    def boom(*_: object) -> bool:
        raise RuntimeError(where)

    setattr(rig.engine, where, boom)
    with pytest.raises(RuntimeError, match=where):
        p.shutdown()
    assert not p.copies.loop._thread.is_alive()
    assert rig.engine.shutdowns == (where == "fence")
    p.shutdown()


def test_what_was_reported_is_not_expected_again(rig: Rig) -> None:
    """A load that has failed and was reported before its step's end is remembered no longer."""
    p = rig.pipeline
    rig.engine.failing = lambda copied, _ticket: frozenset(one.id for one in copied.jobs)
    p.begin(plan(job(1, SYNC)))
    p.start_loads()
    rig.engine.complete_all()
    assert rig.news() == {1: False}
    p.end_step()
    assert not p.outcomes._early
    assert p.take_suspects()
