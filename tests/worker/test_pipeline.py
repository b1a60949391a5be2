"""A pipeline reports each job once, in plain steps and after any extra, empty, repeated, early or missing call."""

from __future__ import annotations

import pytest

from kvpipe.protocol.messages import EMPTY_PLAN, Kind
from kvpipe.transfer.base import Direction, Ticket
from tests.rigs.pipeline_rig import Rig, SideRig, ThreadedEngine, Waiting, job, plan

SAVE, SYNC, ASYNC = Kind.SAVE, Kind.LOAD_SYNC, Kind.LOAD_ASYNC


def test_jobs_of_a_step_are_copied_by_layer_and_reported_once(rig: Rig) -> None:
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


def test_rank_whose_bytes_another_rank_saves_copies_loads_only() -> None:
    """This rank's saves are reported without copies.

    The saves still fail if a load of their step fails, because the KV depends on the load.
    """
    rig = Rig(saves=False)
    p = rig.pipeline
    p.begin(plan(job(1), job(2, SYNC)))
    p.start_loads()
    rig.wait_all()
    rig.save_all()
    p.end_step()
    assert rig.news() == {1: True, 2: True}
    assert rig.engine.layers_of(1) == []
    assert rig.engine.layers_of(2) == [0, 1, 2]
    assert p.copies.bytes[SAVE] == p.copies.ns[SAVE] == 0, "the rank that saves these bytes counts them"
    assert p.copies.bytes[SYNC] > 0
    p.begin(plan(job(3), job(4, SYNC)))
    p.start_loads()
    rig.save_all()
    p.end_step()
    assert rig.news() == {3: False, 4: False}
    p.shutdown()


def test_layers_may_be_submitted_in_any_order(rig: Rig) -> None:
    """The job's state machine counts layers in the order of their submission, not by their number."""
    rig.pipeline.begin(plan(job(1)))
    for layer in (2, 0, 1):
        rig.pipeline.save_layer(layer)
    rig.pipeline.end_step()
    assert rig.news() == {1: True}


def test_a_job_without_rows(rig: Rig) -> None:
    """A job without rows to copy ends like any other job."""
    rig.pipeline.begin(plan(job(1, SAVE, ()), job(2, ASYNC, ())))
    rig.pipeline.start_loads()
    rig.save_all()
    rig.engine.complete_all()
    rig.pipeline.end_step()
    assert rig.news() == {1: True, 2: True}


def test_completions_from_another_thread() -> None:
    """With an engine that completes copies on its own thread, many steps succeed, and completions stay in order."""
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
    """A layer may write its new token into a loaded block before vLLM calls the layer's hook.

    So each layer's blocks must be loaded one layer ahead.
    """
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
    """Every call on a pipeline without any plan is harmless."""
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


def test_second_end_step_does_nothing(rig: Rig) -> None:
    """The second end of a step does nothing."""
    rig.pipeline.begin(plan(job(1), job(2, SYNC)))
    rig.pipeline.start_loads()
    rig.wait_all()
    rig.save_all()
    rig.pipeline.end_step()
    rig.pipeline.end_step()
    assert rig.news() == {1: True, 2: True}
    assert rig.counters["step_end_empty"] == 1


def test_empty_steps_while_earlier_saves_land(rig: Rig) -> None:
    """Steps without jobs do not affect saves of an earlier step that the device still copies."""
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
    """Saves of an ended step land while the next step's saves are submitted. Each save is reported once."""
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
    """A step that was never ended is withdrawn, even if all its copies have landed. The next step is not affected."""
    p = rig.pipeline
    p.begin(plan(job(1), job(2, SYNC), job(3, ASYNC)))
    p.start_loads()
    rig.save_all()
    rig.engine.complete_all()
    p.begin(plan(job(4)))
    rig.save_all()
    p.end_step()
    assert rig.news() == {1: False, 2: False, 3: False, 4: True}  # job 3 would begin only at the step's end
    assert rig.counters["step_never_ended"] == 1


def test_a_withdrawn_job_is_reported_after_its_copies(rig: Rig) -> None:
    """The jobs of a withdrawn step are reported only when their copies have ended."""
    rig.engine.waiting = Waiting.STUCK
    rig.pipeline.begin(plan(job(1), job(2, ASYNC)))
    rig.save_all()
    rig.pipeline.begin(EMPTY_PLAN)
    assert rig.news() == {2: False}  # job 2 was never submitted
    rig.engine.complete(Direction.SAVE, 2)
    assert rig.news() == {}
    rig.engine.complete(Direction.SAVE)
    assert rig.news() == {1: False}


def test_repeated_hooks_submit_once(rig: Rig) -> None:
    """A layer's save or load is submitted once, even if the layer's hooks run several times."""
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
    """A save with a missing layer fails, whether or not its submitted layers landed first."""
    rig.pipeline.begin(plan(job(1)))
    for layer in range(submitted):
        rig.pipeline.save_layer(layer)
    rig.engine.complete_all()
    rig.pipeline.end_step()
    assert rig.news() == {1: False}
    assert rig.counters["layers_never_submitted"] == 1


def test_loads_that_were_never_started(rig: Rig) -> None:
    """If no hook starts the loads, the step's end reports the sync load as failed and starts the async load."""
    rig.pipeline.begin(plan(job(1, SYNC), job(2, ASYNC)))
    rig.pipeline.end_loads()
    rig.engine.complete_all()
    assert rig.news() == {1: False, 2: True}
    assert rig.engine.layers_of(1) == []
    assert rig.counters["loads_never_started"] == 1


def test_a_wait_starts_the_loads(rig: Rig) -> None:
    """If the step's loads were not started, the first layer's wait starts the loads, in time for every reader."""
    rig.pipeline.begin(plan(job(1, SYNC)))
    rig.wait_all()
    rig.pipeline.end_step()
    assert rig.news() == {1: True}
    assert rig.counters["loads_started_by_hook"] == 1


def test_second_end_loads_does_nothing(rig: Rig) -> None:
    """A second call of `end_loads` changes nothing."""
    rig.pipeline.begin(plan(job(1, SYNC)))
    rig.wait_all()
    rig.pipeline.end_loads()
    rig.pipeline.end_loads()
    rig.pipeline.end_step()
    assert rig.news() == {1: True}


# ---- where the fence is ----------------------------------------------------------------------------------------------


def test_the_fence_is_set_when_the_step_ends(rig: Rig) -> None:
    """The fence must be set at the step's end, because runner V2 zeroes blocks before the next step's first call."""
    rig.pipeline.begin(plan(job(1)))
    rig.save_all()
    rig.pipeline.end_step()
    assert all(copy.ticket.done for copy in rig.engine.copies)


def test_the_next_steps_first_hook_sets_the_fence() -> None:
    """With runner V1 on a GPU, the step's end does not wait for saves.

    The next step's first hook waits for all saves.
    """
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
    """After `end_loads`, the engine clears the metadata or begins the next step without `end_step`.

    This is not counted as a fault.
    """
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
    """The loop thread ends although the transfer engine raises."""
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


def test_reported_load_is_not_reported_at_the_end_of_its_step(rig: Rig) -> None:
    """A failed load is reported before its step ends. The end of the step does not report it again."""
    p = rig.pipeline
    rig.engine.failing = lambda copied, _ticket: frozenset(one.id for one in copied.jobs)
    p.begin(plan(job(1, SYNC)))
    p.start_loads()
    rig.engine.complete_all()
    assert rig.news() == {1: False}
    p.end_step()
    assert not p.outcomes._early
    assert p.take_suspects()
