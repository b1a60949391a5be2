"""Tests of the pipeline over an engine whose waits run on the device. Completions may arrive after the step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings

from kvpipe.config.settings import load_settings
from kvpipe.protocol.messages import Kind, Outcome, StepPlan
from kvpipe.testing.fake_device import FakeDevice, FakeEvent, landed_of
from kvpipe.testing.logged import capture_logs
from kvpipe.testing.transfer_programs import schedules
from kvpipe.testing.transfer_worlds import FAKES, GEOMETRY, KINDS, LAYERS, World, job_rows, make_job, value_of, world
from kvpipe.testing.waiting import WAIT_S, eventually
from kvpipe.transfer.waves import OrderingPoint
from kvpipe.worker.caches import Hooks
from kvpipe.worker.context import RankContext
from kvpipe.worker.pipeline import Pipeline

LOADED, SAVED = {0: [0, 1], 1: [3]}, {0: [4, 6, 7], 1: [5]}
LOAD, SAVE = 1, 2
PLAN = StepPlan(1, (make_job(LOAD, job_rows(0, LOADED), Kind.LOAD_SYNC), make_job(SAVE, job_rows(1, SAVED), Kind.SAVE)))
on_devices = pytest.mark.parametrize("kind", FAKES)
Reads = list[tuple[Callable[[], bytes], int]]


@contextmanager
def pipeline_over(w: World, *, layerwise: bool = True) -> Iterator[Pipeline]:
    """Make a pipeline over the world's engine. The pool has bytes to load."""
    for layer in range(LAYERS):
        for group, slot, page, block in job_rows(0, LOADED):
            if group == GEOMETRY.layers[layer][0]:
                w.slot_page(layer, slot, page).fill_(value_of(0, layer, block))
    context = RankContext(load_settings({"wait_ms_max": int(WAIT_S * 1000)}))
    made = Pipeline(context, w.engine, GEOMETRY, hooks=Hooks(frozenset(() if layerwise else range(LAYERS))))
    try:
        yield made
    finally:
        made.shutdown()


@contextmanager
def running(device: FakeDevice) -> Iterator[None]:
    """Let the device run on its own thread, in parallel with the test."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(0.0005):
            while device.step(0):
                pass

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(WAIT_S)


def run_step(w: World, p: Pipeline, *, waits: bool = True) -> Reads:
    """Run one step as vLLM does: each layer waits, reads the loaded blocks, writes new blocks and is saved."""
    reads: Reads = []
    p.begin(PLAN)
    p.start_loads()
    for layer in range(LAYERS):
        group = GEOMETRY.layers[layer][0]
        w.let_run()
        if waits:
            p.wait_layer(layer)
        reads += [(w.read_block(layer, block), value_of(0, layer, block)) for block in LOADED[group]]
        for block in SAVED[group]:
            w.write_block(layer, block, value_of(1, layer, block))
        w.let_run()
        p.save_layer(layer)
    p.end_step()
    for layer in range(LAYERS):  # the next step reuses the blocks
        for block in SAVED[GEOMETRY.layers[layer][0]]:
            w.write_block(layer, block, 255)
    return reads


def collect(p: Pipeline, count: int, w: World | None = None) -> list[tuple[int, bool]]:
    """Collect `count` outcomes as (job, ok), in the order of the reports. During the call the device of `w` may run."""
    got: list[Outcome] = []

    def enough() -> bool:
        if w is not None:
            w.are_complete(())
        got.extend(p.collect())
        return len(got) >= count

    assert eventually(enough)
    return [(outcome.job.id, outcome.ok) for outcome in got]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layerwise", [True, False], ids=["layerwise", "step"])
@settings(max_examples=40, deadline=None)
@given(schedule=schedules)
def test_a_step_is_right_whenever_its_copies_land(kind: str, schedule: list[int], *, layerwise: bool) -> None:
    """Any copies may land before the confirmation. Bytes are right, and each job is reported as good once."""
    with world(kind, schedule=schedule) as w, pipeline_over(w, layerwise=layerwise) as p:
        reads = run_step(w, p)
        w.drain_all()
        assert collect(p, 2) == [(LOAD, True), (SAVE, True)]
        assert p.in_flight == 0
        assert all(set(read()) == {expected} for read, expected in reads)
        for layer in range(LAYERS):
            for group, slot, page, block in job_rows(1, SAVED):
                if group == GEOMETRY.layers[layer][0]:
                    assert w.slot_page(layer, slot, page).eq(value_of(1, layer, block)).all()
        assert p.counters.keys() <= {"no_op_transitions", "wait_repeated"}, "no fault"


@on_devices
def test_nothing_is_reported_before_it_has_landed(kind: str) -> None:
    """On a device that runs no work, a whole step ends without a wait or a report. The step still confirms its jobs."""
    with world(kind) as w, pipeline_over(w) as p:
        run_step(w, p)
        assert p.collect() == []
        assert p.in_flight == 2
        w.drain_all()
        assert collect(p, 2) == [(LOAD, True), (SAVE, True)]
        assert eventually(lambda: not p.copies.live)
        took = p.counters.durations.take()
        assert {name: [tier for tier, (_,) in by.items()] for name, by in took.items()} == {
            "load_seconds": ["memory"],
            "store_seconds": ["memory"],
        }, "one duration for all layers of a step"


@on_devices
def test_an_async_load_does_not_wait_for_its_steps_forward(kind: str) -> None:
    """The load lands while its step's forward still computes. The load waits only for work from before its step."""
    with world(kind) as w, pipeline_over(w) as p:
        before, forward = FakeEvent("compute", w.device), FakeEvent("compute", w.device)
        w.device.compute.wait_event(before)
        p.begin(StepPlan(1, (make_job(LOAD, job_rows(0, LOADED), Kind.LOAD_ASYNC),)))
        w.device.compute.wait_event(forward)
        p.start_loads()  # called after the forward was queued, as vLLM's runners do
        p.end_step()
        while w.device.step(0):
            pass
        assert p.collect() == [], "the blocks may still be read by what was queued before"
        before.fired = True
        assert collect(p, 1, w) == [(LOAD, True)]
        assert w.device.compute.queue, "and the forward has not begun"
        forward.fired = True


@on_devices
def test_readers_call_for_layers_however_fast_copies_are(kind: str) -> None:
    """A layer is queued before its reader arrives, even if all earlier layers have landed long ago."""
    with world(kind) as w, pipeline_over(w) as p, running(w.device):
        p.begin(StepPlan(1, (make_job(LOAD, job_rows(0, LOADED), Kind.LOAD_SYNC),)))
        p.start_loads()
        tickets = p._sync.tickets
        for layer in range(LAYERS):
            assert tickets[layer].wait(WAIT_S), "nobody has called for it"
            p.wait_layer(layer)
        p.end_step()
        assert collect(p, 1) == [(LOAD, True)]


@on_devices
def test_sync_loads_are_queued_before_async_loads(kind: str) -> None:
    """In a step with both kinds of loads, only two waves of the sync load are queued before the step's forward."""
    with world(kind) as w, pipeline_over(w) as p:
        both = (
            make_job(LOAD, job_rows(0, LOADED), Kind.LOAD_SYNC),
            make_job(3, job_rows(1, SAVED), Kind.LOAD_ASYNC),
        )
        p.begin(StepPlan(1, both))
        p.start_loads()
        assert [isinstance(ticket.mark, OrderingPoint) for ticket in p._sync.tickets.values()] == [True, True, False]
        for layer in range(LAYERS):
            p.wait_layer(layer)
        p.end_step()
        assert sorted(collect(p, 2, w)) == [(LOAD, True), (3, True)]


@on_devices
def test_a_layer_read_without_waiting_is_never_trusted(kind: str) -> None:
    """If a step's layers did not wait for its load, the load and the step's save fail, even if the load lands later."""
    with capture_logs(), world(kind) as w, pipeline_over(w) as p:
        run_step(w, p, waits=False)
        assert p.collect() == [], "the copies may still touch slots and blocks"
        w.drain_all()
        assert sorted(collect(p, 2)) == [(LOAD, False), (SAVE, False)]


@pytest.mark.parametrize("copies", range(LAYERS))
@on_devices
def test_a_load_that_cannot_be_queued_is_reported_in_its_step(kind: str, copies: int) -> None:
    """A load that failed at its submission is reported at the end of the same step, and the step's save fails."""
    with capture_logs(), world(kind) as w, pipeline_over(w) as p, running(w.device):
        w.device.errors_on, w.device.copies_until_error = "load", copies
        p.begin(PLAN)
        p.start_loads()
        for layer in range(LAYERS):
            p.wait_layer(layer)
            p.save_layer(layer)
        p.end_loads()
        assert [(o.job.id, o.ok) for o in p.collect() if o.job.id == LOAD] == [(LOAD, False)]
        p.end_step()
        assert collect(p, 1) == [(SAVE, False)]
        assert p.in_flight == 0


@pytest.mark.parametrize("layer", range(LAYERS))
@on_devices
def test_a_load_that_fails_on_the_device_is_reported_before_the_save(kind: str, layer: int) -> None:
    """A load fails after its step.

    The save that was computed from the load is reported as failed, or is reported after the load's failure. If the
    load's failure is reported first, the scheduler side can drop the save.
    """
    with capture_logs(), world(kind) as w, pipeline_over(w) as p:
        p.begin(PLAN)
        p.start_loads()
        for k in range(LAYERS):
            p.wait_layer(k)
            p.save_layer(k)
        landed_of(p._sync.tickets[layer]).broken = True
        p.end_step()
        w.drain_all()
        reported = collect(p, 2, w)
        assert sorted(job for job, _ in reported) == sorted([LOAD, SAVE])
        assert (LOAD, False) in reported
        assert reported[0] != (SAVE, True)


@on_devices
def test_shutdown_withdraws_an_open_step(kind: str) -> None:
    """A step that never ends is withdrawn at shutdown. Each of its jobs is reported as failed, once."""
    with capture_logs(), world(kind) as w:
        with pipeline_over(w) as p:
            p.begin(PLAN)
            p.start_loads()
            p.save_layer(0)
        assert sorted(collect(p, 2)) == [(LOAD, False), (SAVE, False)]
