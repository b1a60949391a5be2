"""Layers whose hook is not called: in step mode, in layers without a hook, and in steps that replay a CUDA graph."""

from __future__ import annotations

import pytest

from kvpipe.protocol.messages import Kind
from kvpipe.testing.waiting import eventually
from tests.rigs.pipeline_rig import Rig, job, plan

SYNC = Kind.LOAD_SYNC


def test_step_mode_copies_at_the_steps_end(stepwise: Rig) -> None:
    """In step mode the hooks submit nothing and the end of the step submits every layer."""
    stepwise.pipeline.begin(plan(job(1)))
    stepwise.save_all()
    assert stepwise.engine.copies == []
    stepwise.pipeline.end_step()
    assert stepwise.engine.layers_of(1) == [0, 1, 2]
    assert len(stepwise.engine.copies) == 1, "one submission for layers that are final at once"
    assert stepwise.news() == {1: True}


@pytest.mark.parametrize("over", [False, True])
def test_step_end_waits_for_the_loop_thread_only_when_the_steps_copies_are_complete(
    over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a step's copies are complete at its end, they are reported with the step.

    Other copies wake the loop thread later.
    """
    rig = Rig(layerwise=False, fences_late=not over)
    p, waits = rig.pipeline, list[float]()
    settle = p.copies.loop.settle

    def counted(wait_s: float) -> bool:
        waits.append(wait_s)
        return settle(wait_s)

    monkeypatch.setattr(p.copies.loop, "settle", counted)
    p.begin(plan(job(1)))
    p.end_step()
    assert len(waits) == over
    assert [outcome.job.id for outcome in p.collect()] == [1] * over
    monkeypatch.undo()
    rig.engine.complete_all()
    assert eventually(lambda: over or p.copies.outbox), "the last copy wakes the loop thread"
    assert rig.news() == ({} if over else {1: True})
    p.shutdown()


def test_step_mode_waits_for_loads_at_the_start(stepwise: Rig) -> None:
    """In step mode a sync load has landed when `start_loads` returns, without any hook."""
    stepwise.pipeline.begin(plan(job(1, SYNC), job(2, SYNC)))
    stepwise.pipeline.start_loads()
    assert all(copy.ticket.done for copy in stepwise.engine.copies)
    stepwise.pipeline.end_step()
    assert stepwise.news() == {1: True, 2: True}


def test_a_layer_without_a_hook_is_saved_at_the_steps_end(halfway: Rig) -> None:
    """The other layers are copied by their own hooks. A job has ended when all layers are copied."""
    p = halfway.pipeline
    p.begin(plan(job(1)))
    p.save_layer(0)
    p.save_layer(2)
    assert halfway.engine.layers_of(1) == [0, 2]
    p.end_step()
    assert halfway.engine.layers_of(1) == [0, 2, 1]
    assert halfway.news() == {1: True}
    assert not halfway.counters.faults


def test_a_layer_without_a_hook_is_loaded_first(halfway: Rig) -> None:
    """The layer's load has landed when the step's compute begins, because no hook of this layer waits."""
    p = halfway.pipeline
    p.begin(plan(job(1, SYNC)))
    p.start_loads()
    assert halfway.engine.layers_of(1) == [1, 0, 2]
    assert p._sync.tickets[1].done
    p.wait_layer(0)
    p.wait_layer(2)
    p.end_step()
    assert halfway.news() == {1: True}
    assert not halfway.counters.faults


def test_a_hook_that_was_not_expected_is_harmless(halfway: Rig) -> None:
    """If the hook of a layer without an expected hook is called, the layer is still copied once."""
    p = halfway.pipeline
    p.begin(plan(job(1), job(2, SYNC)))
    p.start_loads()
    for layer in range(halfway.layers):
        p.wait_layer(layer)
        p.save_layer(layer)
    p.end_step()
    assert sorted(halfway.engine.layers_of(1)) == [0, 1, 2]
    assert halfway.news() == {1: True, 2: True}
    assert not halfway.counters.faults


def test_a_missing_hook_is_reported_beside_a_layer_that_has_none(halfway: Rig) -> None:
    """If an expected hook is not called, its layer was perhaps not computed.

    So this layer is not copied at the step's end, and a fault is counted.
    """
    halfway.pipeline.begin(plan(job(1)))
    halfway.pipeline.save_layer(0)
    halfway.pipeline.end_step()
    assert halfway.news() == {1: False}
    assert halfway.counters.faults["layers_never_submitted"] == 1


@pytest.mark.parametrize("rig", [{"replayed": bool}], indirect=True)
def test_a_replayed_step_is_copied_around(rig: Rig) -> None:
    """A replayed step calls no hook: its loads land before the step, and its saves are copied after the step.

    In the next step, hooks are called again.
    """
    p = rig.pipeline
    p.begin(plan(job(1), job(2, SYNC)))
    p.start_loads(forward=True)
    assert all(copy.ticket.done for copy in rig.engine.copies)
    assert rig.engine.layers_of(1) == []
    p.end_step()
    assert rig.engine.layers_of(1) == [0, 1, 2]
    p.begin(plan(job(3), job(4, SYNC)))
    p.start_loads()
    for layer in range(rig.layers):
        p.wait_layer(layer)
        p.save_layer(layer)
        assert rig.engine.layers_of(3) == list(range(layer + 1))
    p.end_step()
    assert rig.news() == {1: True, 2: True, 3: True, 4: True}
    assert not rig.counters.faults


@pytest.mark.parametrize("rig", [{"replayed": bool}], indirect=True)
def test_save_fails_when_a_step_calls_only_some_of_its_hooks(rig: Rig) -> None:
    """A step with only some of its hooks was not replayed. The save fails, because a layer was perhaps not computed."""
    p = rig.pipeline
    p.begin(plan(job(1)))
    p.save_layer(0)
    p.end_step()
    assert rig.news() == {1: False}
    assert rig.counters.faults["layers_never_submitted"] == 1


def test_step_without_a_forward_saves_kv_of_earlier_steps(rig: Rig) -> None:
    """A step without a forward calls no hook, so its save of KV of earlier steps is copied at the step's end.

    In the next step, hooks copy saves again.
    """
    p = rig.pipeline
    p.begin(plan(job(1))._replace(computes=False))
    p.start_loads(forward=True)
    p.end_step()
    assert rig.engine.layers_of(1) == list(range(rig.layers))
    rig.engine.complete_all()
    assert rig.news() == {1: True}
    assert not rig.counters.faults
    p.begin(plan(job(2)))
    p.end_step()
    assert rig.news() == {2: False}


def test_nothing_is_replayed_where_there_are_no_graphs(rig: Rig) -> None:
    """In an engine without graphs, a step without calls of hooks is a fault, with any forward context."""
    p = rig.pipeline
    p.begin(plan(job(1), job(2, SYNC)))
    p.start_loads(forward=True)
    p.end_step()
    assert rig.news() == {1: False, 2: False}
