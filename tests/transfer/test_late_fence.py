"""If the next step's first hook sets the fence, the compute after the forward (sampling) does not wait for copies."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from kvpipe.config.settings import load_settings
from kvpipe.protocol.messages import Kind, StepPlan
from kvpipe.testing.transfer_programs import schedules
from kvpipe.testing.transfer_worlds import FAKES, GEOMETRY, KINDS, LAYERS, World, job_rows, make_job, value_of, world
from kvpipe.testing.waiting import WAIT_S
from kvpipe.worker.caches import Hooks
from kvpipe.worker.context import RankContext
from kvpipe.worker.pipeline import Pipeline

SAVED = {0: [4, 6, 7], 1: [5]}
ROWS = job_rows(0, SAVED)
NEXT = 255


def pipeline_over(w: World) -> Pipeline:
    """Make a pipeline that sets no fence at the step's end."""
    context = RankContext(load_settings({"wait_ms_max": int(WAIT_S * 1000)}))
    return Pipeline(context, w.engine, GEOMETRY, hooks=Hooks(fences_late=True))


def forward(w: World, p: Pipeline, step: int = 1) -> None:
    """Write blocks and save them."""
    p.begin(StepPlan(step, (make_job(step, ROWS, Kind.SAVE),)))
    for layer, (group, _) in enumerate(GEOMETRY.layers):
        for block in SAVED[group]:
            w.write_block(layer, block, value_of(step, layer, block))
        w.let_run()
        p.save_layer(layer)
    p.end_step()


def reuse(w: World) -> None:
    """Let the next step's compute write to the same blocks."""
    for layer, (group, _) in enumerate(GEOMETRY.layers):
        for block in SAVED[group]:
            w.write_block(layer, block, NEXT)


def saved(w: World, step: int) -> bool:
    """Whether the slots hold the values that step `step` computed."""
    return all(
        bool(w.slot_page(layer, slot, page).eq(value_of(step, layer, block)).all())
        for layer in range(LAYERS)
        for group, slot, page, block in ROWS
        if group == GEOMETRY.layers[layer][0]
    )


@pytest.mark.parametrize("kind", FAKES)
def test_sampling_does_not_wait_for_copies(kind: str) -> None:
    """On a device whose copies do not run, all compute before the next step's first hook still runs."""
    with world(kind) as w:
        p, compute = pipeline_over(w), w.device.compute
        forward(w, p)
        sampled: list[bool] = []
        compute.put(lambda: sampled.append(True))
        while compute.queue and compute.ready:
            compute.run_head()
        assert sampled == [True]
        p.fence()
        reuse(w)
        while compute.queue and compute.ready:
            compute.run_head()
        assert compute.queue, "blocks are written while copies read them"
        w.drain_all()
        assert saved(w, 1)
        p.shutdown()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hook", [True, False], ids=["handle_preemptions", "bind"])
@settings(max_examples=40, deadline=None)
@given(schedule=schedules)
def test_saves_are_right_whenever_copies_land(kind: str, schedule: list[int], *, hook: bool) -> None:
    """The next step reuses the blocks of saves.

    Bytes are right even if vLLM skips the first hook, `handle_preemptions`, and calls only `bind`.
    """
    with world(kind, schedule=schedule) as w:
        p = pipeline_over(w)
        forward(w, p)
        w.let_run()
        if hook:
            p.fence()
        else:
            p.begin(StepPlan(2, ()))
        reuse(w)
        w.drain_all()
        p.end_step()
        p.shutdown()
        assert saved(w, 1)
        assert not p.counters.faults
