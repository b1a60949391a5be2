"""If a copy never completes or cannot be submitted, only its jobs fail, after at most one wait. No call hangs."""

from __future__ import annotations

import pytest

from kvpipe.protocol.messages import Kind
from kvpipe.transfer.base import CopyPlan, Direction, Ticket
from kvpipe.worker.outcomes import REPORTED_EARLY
from tests.rigs.pipeline_rig import FakeEngine, Rig, Waiting, job, plan

SAVE, SYNC, ASYNC = Kind.SAVE, Kind.LOAD_SYNC, Kind.LOAD_ASYNC


class StuckEngine(FakeEngine):
    """An engine that completes no copy during a wait, and counts the waits."""

    def __init__(self) -> None:
        """Start without waits."""
        super().__init__()
        self.waiting = Waiting.STUCK
        self.waits = 0

    def guard_read(self, ticket: Ticket, timeout_s: float) -> bool:
        """See `TransferEngine.guard_read`."""
        self.waits += 1
        return super().guard_read(ticket, timeout_s)

    fence = guard_read


class RaisingEngine(FakeEngine):
    """An engine that cannot submit `layers`."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        """`layers` has the layers whose submission raises."""
        super().__init__()
        self.layers = layers

    def submit(self, plan: CopyPlan, ticket: Ticket) -> None:
        """Raise for some layers, although `TransferEngine.submit` must never raise."""
        if not {*ticket.layers}.isdisjoint(self.layers):
            raise RuntimeError("can't start new thread")
        super().submit(plan, ticket)


@pytest.mark.parametrize("layerwise", [True, False])
def test_a_load_that_times_out_is_waited_for_once(layerwise: bool) -> None:
    """There is one wait per batch. The blocks are reported in the load's step.

    The jobs are reported once, when the copies end.
    """
    engine = StuckEngine()
    rig = Rig(engine, layerwise=layerwise)
    p = rig.pipeline
    p.begin(plan(job(1, SYNC, [(0, 0, 0, 3), (1, 1, 0, 5)]), job(2, SYNC, [(0, 2, 0, 7)])))
    p.start_loads()
    rig.wait_all()
    rig.wait_all()
    p.end_step()
    assert engine.waits == 1
    assert rig.counters["copy_timeout"] == 1
    assert p.take_suspects() == {3, 5, 7}
    assert p.take_suspects() == set()
    assert rig.news() == {}, "a copy may still write to its blocks"
    engine.complete_all()
    assert rig.news() == {1: False, 2: False}
    assert rig.news() == {}
    assert rig.in_flight() == 0
    p.shutdown()
    assert rig.news() == {}
    assert rig.counters["illegal_transition"] == 0


@pytest.mark.parametrize("layerwise", [True, False])
def test_a_save_that_times_out_is_waited_for_once(layerwise: bool) -> None:
    """A save's fence also waits only once. No block is reported, because a save only reads blocks."""
    engine = StuckEngine()
    rig = Rig(engine, layerwise=layerwise)
    p = rig.pipeline
    p.begin(plan(job(1), job(2)))
    rig.save_all()
    p.end_step()
    assert engine.waits == 1
    assert p.take_suspects() == set()
    assert rig.news() == {}
    engine.complete_all()
    assert rig.news() == {1: False, 2: False}
    p.shutdown()
    assert rig.counters["illegal_transition"] == 0


def test_saves_of_a_step_fail_when_its_load_times_out() -> None:
    """The saves of the step fail with the step's load, although their own copies succeed."""
    engine = StuckEngine()
    rig = Rig(engine)
    p = rig.pipeline
    p.begin(plan(job(1), job(2, SYNC)))
    p.start_loads()
    rig.wait_all()
    rig.save_all()
    engine.complete_all()
    p.end_step()
    assert rig.news() == {1: False, 2: False}
    p.shutdown()
    assert rig.counters["illegal_transition"] == 0


@pytest.mark.parametrize("layerwise", [True, False])
@pytest.mark.parametrize("layers", [(0,), (1,), (2,), (0, 1, 2)])
def test_a_copy_that_cannot_be_submitted_fails_its_jobs(layerwise: bool, layers: tuple[int, ...]) -> None:
    """If `submit` raises, every job of the batch is reported as failed in the same step."""
    rig = Rig(RaisingEngine(layers), layerwise=layerwise)
    p = rig.pipeline
    p.begin(plan(job(1), job(2, SYNC), job(3, ASYNC)))
    p.start_loads()
    for layer in range(rig.layers):
        p.wait_layer(layer)
        p.save_layer(layer)
    p.end_step()
    rig.engine.complete_all()
    assert rig.news() == {1: False, 2: False, 3: False}
    assert rig.in_flight() == 0
    saves = len(layers) if layerwise else 1  # without hooks all layers of a save are submitted together
    assert rig.counters["submit_failed"] == 2 * len(layers) + saves
    p.shutdown()
    assert rig.counters["illegal_transition"] == 0


@pytest.mark.parametrize("kind", [SAVE, SYNC, ASYNC])
@pytest.mark.parametrize("layer", range(3))
def test_no_job_is_reported_while_a_layer_before_the_refused_one_is_copied(kind: Kind, layer: int) -> None:
    """The transfer engine raises at one layer. The job ends when all submitted copies have ended, in any order."""
    rig = Rig(RaisingEngine((layer,)))
    rig.engine.waiting = Waiting.DEVICE
    p = rig.pipeline
    p.begin(plan(job(1, kind)))
    p.start_loads()
    rig.wait_all()
    rig.save_all()
    p.end_step()
    direction = Direction.SAVE if kind is SAVE else Direction.LOAD
    queue = rig.engine.queues[direction]
    assert rig.news() == ({} if queue else {1: False})
    while queue:
        rig.engine.complete(direction)
        assert rig.news() == ({} if queue else {1: False}), "a copy may still touch its blocks"
    p.shutdown()
    assert rig.counters["illegal_transition"] == 0


class SilentDevice(FakeEngine):
    """An engine whose waits run on the device. Its failures are known early, and it completes no ticket by itself."""

    def guard_read(self, ticket: Ticket, timeout_s: float) -> bool:
        """See `TransferEngine.guard_read`."""
        return timeout_s > 0 and isinstance(ticket, Ticket)

    fence = guard_read


def test_failed_load_without_a_last_completion_is_reported_in_its_step() -> None:
    """A load has failed, but its last completion never arrives. Its blocks are reported in its own step."""
    engine = SilentDevice()
    engine.failing = lambda copies, ticket: frozenset(j.id for j in copies.jobs if ticket.layer == 0)
    rig = Rig(engine, wait_s=0.05)
    p = rig.pipeline
    p.begin(plan(job(1, SYNC, [(0, 0, 0, 3)])))
    p.start_loads()
    rig.wait_all()
    p.end_step()
    assert rig.counters["copy_timeout"] == 1
    assert p.take_suspects() == {3}
    engine.complete_all()
    assert rig.news() == {1: False}
    p.shutdown()


def test_a_load_that_was_not_waited_for_is_reported_in_its_step() -> None:
    """No hook has waited, and the device has not finished the load.

    The blocks are reported in this step, and not again later.
    """
    engine = SilentDevice()
    rig = Rig(engine)
    p = rig.pipeline
    p.begin(plan(job(1, SYNC, [(0, 0, 0, 3)])))
    p.start_loads()
    p.end_step()
    assert p.take_suspects() == {3}
    assert p.collect() == []
    engine.complete_all()
    p.end_step()
    p._settle()
    (outcome,) = p.collect()
    assert (outcome.ok, outcome.why) == (False, REPORTED_EARLY)
    assert p.take_suspects() == set()
    p.shutdown()
