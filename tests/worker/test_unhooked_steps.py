"""Layers for which no hook comes: in step mode, without a hook of their own, replayed from a graph."""

from __future__ import annotations

import pytest

from kvpipe.messages import Kind
from kvpipe.testing.pipeline_rig import Rig, job, plan

SYNC = Kind.LOAD_SYNC


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


def test_a_layer_without_a_hook_is_saved_at_the_steps_end(halfway: Rig) -> None:
    """The others are copied by their hooks; a job is whole when all are."""
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
    """It is in place when the step's compute begins: its reader will not ask."""
    p = halfway.pipeline
    p.begin(plan(job(1, SYNC)))
    p.start_loads()
    assert halfway.engine.layers_of(1) == [1, 0, 2]
    assert p._sync is not None
    assert p._sync.tickets[1].done
    p.wait_layer(0)
    p.wait_layer(2)
    p.end_step()
    assert halfway.news() == {1: True}
    assert not halfway.counters.faults


def test_a_hook_that_was_not_expected_is_harmless(halfway: Rig) -> None:
    """Whoever takes a layer for one without a hook copies it once all the same."""
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
    """A layer whose hook should have come was perhaps never computed: nothing is made up for it."""
    halfway.pipeline.begin(plan(job(1)))
    halfway.pipeline.save_layer(0)
    halfway.pipeline.end_step()
    assert halfway.news() == {1: False}
    assert halfway.counters.faults["layers_never_submitted"] == 1


@pytest.mark.parametrize("rig", [{"replayed": bool}], indirect=True)
def test_a_replayed_step_is_copied_around(rig: Rig) -> None:
    """No hook comes: loads are in place before it, saves are made after it; the next step has its hooks again."""
    p = rig.pipeline
    p.begin(plan(job(1), job(2, SYNC)))
    p.start_loads(context=True)
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
def test_a_step_with_some_of_its_hooks_was_not_replayed(rig: Rig) -> None:
    """Who has hooks for some layers has them for all: a layer that is missing was perhaps never computed."""
    p = rig.pipeline
    p.begin(plan(job(1)))
    p.save_layer(0)
    p.end_step()
    assert rig.news() == {1: False}
    assert rig.counters.faults["layers_never_submitted"] == 1


def test_what_is_saved_in_a_step_that_computes_nothing(rig: Rig) -> None:
    """No hook comes: what earlier steps have computed is copied at its end. Of the next step's hooks none may lack."""
    p = rig.pipeline
    p.begin(plan(job(1))._replace(computes=False))
    p.start_loads(context=True)
    p.end_step()
    assert rig.engine.layers_of(1) == list(range(rig.layers))
    rig.engine.complete_all()
    assert rig.news() == {1: True}
    assert not rig.counters.faults
    p.begin(plan(job(2)))
    p.end_step()
    assert rig.news() == {2: False}


def test_nothing_is_replayed_where_there_are_no_graphs(rig: Rig) -> None:
    """A step without hooks is a fault there, whatever was in the context."""
    p = rig.pipeline
    p.begin(plan(job(1), job(2, SYNC)))
    p.start_loads(context=True)
    p.end_step()
    assert rig.news() == {1: False, 2: False}
