"""The memory of a rank's caches is released and restored, as by vLLM's sleep mode. No copy touches released memory."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest
import torch

from kvpipe.config.settings import load_settings
from kvpipe.protocol.messages import Kind, StepPlan, Tally
from kvpipe.testing.fake_device import FakeDevice
from kvpipe.testing.waiting import WAIT_S
from kvpipe.transfer.base import Direction, Ticket
from kvpipe.transfer.cuda import CudaEngine
from kvpipe.transfer.movers import Mover
from kvpipe.worker.caches import Hooks, PagedCaches
from kvpipe.worker.context import RankContext
from kvpipe.worker.side import WorkerSide
from tests.rigs.pipeline_rig import SideRig, Waiting, job, make_caches, plan, small_geometry

BLOCKS = 8
LOAD, LOAD_AGAIN = (job(number, Kind.LOAD_ASYNC, [(0, 0, 0, 7), (1, 1, 0, 7)]) for number in (2, 3))


@pytest.fixture
def rig() -> Iterator[SideRig]:
    """Return a side over an engine that holds its copies."""
    made = SideRig(layerwise=False, blocks=BLOCKS)
    made.engine.waiting = Waiting.DEVICE
    yield made
    made.side.shutdown()


def _step(side: WorkerSide, step: StepPlan) -> None:
    side.bind(step)
    side.start_loads()
    side.end_step()
    side.collect()
    side.unbind()


def _caches(rig: SideRig, blocks: int = BLOCKS) -> dict[str, torch.Tensor]:
    return make_caches(rig.geometry, blocks)


def _tallies(rig: SideRig) -> dict[int, Tally]:
    rig.settle()
    rig.side.collect()
    report = rig.side.take_report()
    return report.tallies if report is not None else {}


def test_release_waits_for_copies_that_are_under_way(rig: SideRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves and loads in flight end before the memory is released, and are reported after the sleep."""
    _step(rig.side, plan(job(1), LOAD))
    moves, fence = queue.SimpleQueue[str](), rig.engine.fence

    def fenced(ticket: Ticket, wait_s: float) -> bool:
        moves.put("waits")
        return fence(ticket, wait_s)

    def released() -> None:
        rig.side.release()
        moves.put("is over")

    monkeypatch.setattr(rig.engine, "fence", fenced)
    sleeper = threading.Thread(target=released)
    sleeper.start()
    for direction in (Direction.SAVE, Direction.LOAD):
        assert moves.get(timeout=WAIT_S) == "waits"
        rig.engine.complete(direction, len(rig.engine.queues[direction]))
    sleeper.join(WAIT_S)
    assert not sleeper.is_alive()
    assert _tallies(rig) == dict.fromkeys((1, 2), Tally(1, 0))
    assert not rig.side.lost


def test_nothing_is_copied_during_a_sleep(rig: SideRig) -> None:
    """Jobs that arrive during the sleep fail. After the wake-up copies work again. Repeated calls do nothing."""
    rig.side.restore(_caches(rig))
    for _ in range(2):
        rig.side.release()
    _step(rig.side, plan(job(1), LOAD))
    assert rig.engine.copies == []
    assert _tallies(rig) == dict.fromkeys((1, 2), Tally(0, 1))
    for _ in range(2):
        rig.side.restore(_caches(rig))
    rig.engine.waiting = Waiting.OBEDIENT
    _step(rig.side, plan(job(3)))
    assert _tallies(rig) == {3: Tally(1, 0)}


def test_a_copy_that_does_not_end_costs_the_caches() -> None:
    """If a copy does not end, the rank shuts its transfer engine down before memory is unmapped, and loses its pool."""
    rig = SideRig(layerwise=False, wait_s=0.01)
    rig.engine.waiting = Waiting.DEVICE
    _step(rig.side, plan(job(1)))
    rig.side.release()
    assert rig.engine.shutdowns
    report = rig.side.take_report()
    assert report is not None
    assert report.lost


def test_release_has_one_deadline_for_the_copies_of_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the copies of several steps do not end, the release waits for the first of them until the deadline."""
    rig = SideRig(layerwise=False, wait_s=0.01)
    rig.engine.waiting = Waiting.DEVICE
    for number in range(1, 5):
        _step(rig.side, plan(job(number, Kind.LOAD_ASYNC)))
    fence, waits = rig.engine.fence, list[Ticket]()

    def fenced(ticket: Ticket, wait_s: float) -> bool:
        waits.append(ticket)
        return fence(ticket, wait_s)

    monkeypatch.setattr(rig.engine, "fence", fenced)
    rig.side.release()
    assert len(waits) == 1
    assert rig.side.lost


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("noticed", [True, False])
def test_release_shuts_the_engine_down_when_the_loop_thread_has_ended(rig: SideRig, *, noticed: bool) -> None:
    """The transfer engine is shut down, because its copies could still touch the memory.

    This is so whether or not a step has noticed the thread's end.
    """
    _step(rig.side, plan(job(1)))
    rig.kill_loop()
    if noticed:
        _step(rig.side, plan())
        assert rig.side.lost
    rig.side.release()
    assert rig.engine.shutdowns
    assert rig.side.lost


def test_caches_of_another_kind_are_given_up(rig: SideRig) -> None:
    """The rank stops using caches of another shape, because the pages of a slot would not fit such blocks."""
    rig.side.release()
    rig.side.restore({name: cache[::2] for name, cache in _caches(rig, 2 * BLOCKS).items()})
    assert rig.side.lost


@pytest.mark.parametrize("mover", [Mover.DMA, Mover.STAGED, Mover.DIRECT])
def test_a_device_copies_from_and_to_caches_that_have_moved(mover: Mover) -> None:
    """Delayed layers are copied before the memory is released. Kernels get the new addresses after the sleep."""
    geometry, device = small_geometry(), FakeDevice()
    engine = CudaEngine(device, mover=mover, calibrate_s_max=0, wave_bytes=1 << 30)
    old, new = make_caches(geometry, BLOCKS), make_caches(geometry, BLOCKS)
    for number, cache in enumerate(old.values()):
        cache.fill_(1 + number)
    caches = PagedCaches(geometry, old, BLOCKS, Hooks(frozenset("abc")))
    side = WorkerSide(RankContext(load_settings({"prefault": "use"})), caches, engine=engine)
    runs = threading.Event()
    turns = threading.Thread(target=lambda: [device.step(0) for _ in iter(runs.is_set, True)])
    turns.start()
    try:
        for step, then in ((plan(job(1)), old), (plan(LOAD), new), (plan(LOAD_AGAIN), new)):
            _step(side, step)
            side.release()
            assert not any(engine._flights.values())
            assert not any(stream.queue for stream in device.streams[1:]), "compute may wait, copies may not"
            side.restore(then)
    finally:
        runs.set()
        turns.join(WAIT_S)
        side.shutdown()
    for number, (was, now) in enumerate(zip(old.values(), new.values(), strict=True)):
        assert torch.equal(now[7], torch.full_like(now[7], 1 + number))
        assert not now[:7].any()
        assert torch.equal(was, torch.full_like(was, 1 + number))
