"""A rank records its jobs, and the watchdog fails jobs that are stuck."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from kvpipe.protocol.messages import Kind
from kvpipe.testing.waiting import PATIENT_MS, WAIT_S, eventually
from kvpipe.threads.loop import LoopThread
from kvpipe.trace import events as e
from kvpipe.trace import transitions
from kvpipe.trace.recorder import Recorder
from kvpipe.trace.replay import Replay
from kvpipe.transfer import base
from kvpipe.transfer.base import CopyPlan, Direction, Ticket
from kvpipe.transfer.cpu import CpuEngine
from kvpipe.worker import batch, copies, watchdog
from kvpipe.worker.pipeline import Pipeline
from kvpipe.worker.watchdog import STUCK
from tests.rigs.pipeline_rig import FakeEngine, Rig, Waiting, job, plan, small_geometry

SAVE, SYNC, ASYNC = Kind.SAVE, Kind.LOAD_SYNC, Kind.LOAD_ASYNC
STUCK_MS = PATIENT_MS


class Clock:
    """A clock with the real time plus the time that a test adds.

    Only added time makes a job count as stuck, even on a slow machine.
    """

    def __init__(self) -> None:
        """Start with the real time."""
        self.ahead_ns = self.asked = 0

    def monotonic_ns(self) -> int:
        """See `time.monotonic_ns`."""
        self.asked += 1
        return time.monotonic_ns() + self.ahead_ns


class Clocks:
    """Two clocks: one for the watchdog, and one for all other modules."""

    def __init__(self) -> None:
        """Start with the real time on both clocks."""
        self.watchdogs, self.others = Clock(), Clock()

    def later(self, limits: float, *, moved: bool = False) -> None:
        """Add `limits` times `stuck_ms_max` to the watchdog's clock. With `moved`, add the same to the other clock."""
        passed_ns = int(limits * STUCK_MS * 1e6)
        self.watchdogs.ahead_ns += passed_ns
        self.others.ahead_ns += moved * passed_ns
        self.look()

    def look(self) -> None:
        """Wait until the watchdog has checked all jobs several more times."""
        enough = self.watchdogs.asked + 3
        assert eventually(lambda: self.watchdogs.asked >= enough)


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    """Replace the clocks of all pipelines. Watchdogs then check every few milliseconds."""
    made = Clocks()
    monkeypatch.setattr(watchdog, "LOOKS_PER_LIMIT", STUCK_MS / 5)
    monkeypatch.setattr(watchdog, "time", made.watchdogs)
    for module in (batch, base):
        monkeypatch.setattr(module, "time", made.others)
    return made


class Noted(Rig):
    """A traced pipeline over an engine that completes copies only when the test says so."""

    def __init__(self, engine: FakeEngine | None = None, *, sample: float = 1.0, stuck_ms_max: int = 60_000) -> None:
        """Start a pipeline with a recorder."""
        super().__init__(engine)
        self.pipeline.shutdown()
        self.recorder = Recorder(3, lifecycle=True, transitions=True, detail=True, sample=sample)
        self._events: list[e.Event] = []
        self.engine.shutdowns = 0
        self.pipeline = Pipeline(
            self.context({"wait_ms_max": int(WAIT_S * 1000), "stuck_ms_max": stuck_ms_max}, trace=self.recorder),
            self.engine,
            self.geometry,
            blocks=10,
        )

    @property
    def events(self) -> list[e.Event]:
        """All events recorded so far."""
        self._events += self.recorder.take()
        return self._events

    def noted(self, kind: type[e.Event]) -> list[e.Event]:
        """Events of `kind`."""
        return [one for one in self.events if isinstance(one, kind)]

    def replay(self) -> Replay:
        """The replay of all events recorded so far."""
        done = Replay()
        done.feed(e.Started(0, 3, "", 0, 0, layers=self.layers))
        for one in self.events:
            done.feed(one)
        return done


def test_every_layer_of_a_save_is_reported() -> None:
    """Each layer is recorded as submitted, copied and landed.

    Then the job is recorded as final, with request and step.
    """
    rig = Noted()
    rig.pipeline.begin(plan(job(1, SAVE, [(0, 0, 0, 3), (1, 1, 0, 5)])))
    rig.save_all()
    rig.engine.complete_all()
    rig.pipeline.end_step()
    assert rig.news() == {1: True}
    copied = rig.noted(e.LayerCopied)
    assert [one.layer for one in copied if isinstance(one, e.LayerCopied)] == list(range(rig.layers))
    assert len(rig.noted(e.LayerSubmitted)) == rig.layers
    assert len(rig.noted(transitions.LayerLanded)) == rig.layers
    (final,) = rig.noted(transitions.Finalized)
    assert isinstance(final, transitions.Finalized)
    assert (final.rank, final.machine, final.cursor, final.was, final.now) == (3, "save", 1, "LANDED", "FINALIZED")
    assert {(one.request, one.epoch, one.step) for one in rig.events} == {(final.request, final.epoch, final.step)}
    assert final.request
    assert rig.replay().problems == []
    sizes = [layer.page_bytes for group in rig.geometry.groups for layer in group.layers]
    assert rig.pipeline.copies.bytes[SAVE] == sum(sizes)
    rig.pipeline.shutdown()


def test_only_failures_are_recorded_of_a_request_outside_the_sample() -> None:
    """For a request outside the sample, only failures are recorded."""
    rig = Noted(sample=0.0)
    rig.pipeline.begin(plan(job(1, SAVE, [(0, 0, 0, 3)])))
    rig.save_all()
    rig.engine.complete_all()
    rig.pipeline.end_step()
    assert rig.news() == {1: True}
    assert rig.events == []
    rig.engine.failing = lambda _plan, _ticket: frozenset({2})
    rig.pipeline.begin(plan(job(2, SAVE, [(0, 0, 0, 3)])))
    rig.save_all()
    rig.engine.complete_all()
    rig.pipeline.end_step()
    assert rig.news() == {2: False}
    assert [type(one) for one in rig.events] == [transitions.Failed]
    rig.pipeline.shutdown()


def test_a_failure_reports_why() -> None:
    """The transition to FAILED carries the reason, and the trace replays."""
    rig = Noted()
    rig.engine.failing = lambda _plan, ticket: frozenset({1}) if ticket.layer == 1 else frozenset()
    rig.pipeline.begin(plan(job(1, SAVE, [(0, 0, 0, 3)])))
    rig.save_all()
    rig.engine.complete_all()
    rig.pipeline.end_step()
    assert rig.news() == {1: False}
    (failed,) = rig.noted(transitions.Failed)
    assert isinstance(failed, transitions.Failed)
    assert failed.why == "the copy of layer 1 failed"
    assert rig.replay().problems == []
    rig.pipeline.shutdown()


def test_a_wait_that_times_out_is_a_slow_tier() -> None:
    """A wait for memory that times out is recorded once as a slow tier, with the time that the step waited."""
    rig = Noted()
    rig.engine.waiting = Waiting.STUCK
    rig.pipeline._wait_s = 0.01
    rig.pipeline.begin(plan(job(1, SYNC, [(0, 0, 0, 3)])))
    rig.pipeline.start_loads()
    rig.wait_all()
    (slow,) = rig.noted(e.TierSlow)
    assert isinstance(slow, e.TierSlow)
    assert (slow.tier, slow.waited_ms) == ("memory", 10)
    rig.engine.complete_all()
    rig.pipeline.end_step()
    rig.pipeline.shutdown()


# ---- the watchdog ---------------------------------------------------------------------------------------------------


class Obliging(FakeEngine):
    """An engine that gives up every copy that is not complete, if `can` is set."""

    can = True

    def abandon(self, ticket: Ticket) -> bool:
        """See `TransferEngine.abandon`."""
        return ticket.over or self.can


def test_a_stuck_load_is_reported_and_failed(clocks: Clocks) -> None:
    """A stuck load is recorded with its last transitions. The load fails even if no thread waits for it."""
    engine = Obliging()
    rig = Noted(engine, stuck_ms_max=STUCK_MS)
    rig.pipeline.begin(plan(job(1, ASYNC, [(0, 0, 0, 3)])))
    rig.pipeline.start_loads()
    engine.complete(Direction.LOAD)
    rig.pipeline.end_step()
    rig.settle()
    clocks.later(2)
    ended: list[object] = []
    assert eventually(lambda: bool(ended.extend(rig.pipeline.collect()) or ended))  # type: ignore[func-returns-value]
    (outcome,) = ended
    assert (outcome.ok, outcome.why) == (False, STUCK)  # type: ignore[attr-defined]
    assert rig.counters["stuck"] == 1
    (stuck,) = rig.noted(e.Stuck)
    assert isinstance(stuck, e.Stuck)
    assert (stuck.job, stuck.kind, stuck.request) == (1, "load_async", "r1")
    assert stuck.waited_ms >= STUCK_MS
    assert stuck.last == ["confirm -> CONFIRMED", "landed_next -> CONFIRMED_LAYER_0"]
    engine.complete_all()  # the copies complete only now
    rig.settle()
    clocks.look()
    assert rig.pipeline.collect() == []
    assert rig.counters["stuck"] == 1
    assert not rig.pipeline.copies.live
    assert rig.replay().problems == []
    rig.pipeline.shutdown()


def test_a_stuck_load_that_may_still_write_is_not_given_back(clocks: Clocks) -> None:
    """The load fails. VLLM gets its blocks back only when no copy can write to the blocks any more."""
    engine = Obliging()
    engine.can = False
    rig = Noted(engine, stuck_ms_max=STUCK_MS)
    rig.pipeline.begin(plan(job(1, ASYNC, [(0, 0, 0, 3)])))
    rig.pipeline.start_loads()
    rig.pipeline.end_step()
    clocks.later(2)
    assert eventually(lambda: rig.counters["stuck"] == 1)
    clocks.look()
    assert rig.pipeline.collect() == []
    assert rig.counters["stuck"] == 1
    engine.can = True
    assert eventually(lambda: rig.pipeline.copies.outbox.__len__() == 1)
    assert [outcome.ok for outcome in rig.pipeline.collect()] == [False]
    rig.pipeline.shutdown()


def test_watchdog_works_when_the_loop_starts_before_it_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop's thread starts before the constructor has stored it. The watchdog still works."""

    class Late(LoopThread):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            time.sleep(0.05)

    monkeypatch.setattr(copies, "LoopThread", Late)
    rig = Noted(Obliging(), stuck_ms_max=4)
    rig.settle()
    assert rig.pipeline.copies.loop.errors == 0
    rig.pipeline.shutdown()


def test_each_stuck_job_is_reported_with_its_own_moves(clocks: Clocks) -> None:
    """Many jobs in one batch are stuck. Each job is recorded with its own transitions."""
    rig = Noted(Obliging(), stuck_ms_max=STUCK_MS)
    rig.pipeline.begin(plan(*(job(i, ASYNC, [(0, 0, 0, i)]) for i in range(9))))
    rig.pipeline.start_loads()
    rig.engine.complete(Direction.LOAD)
    rig.pipeline.end_step()
    rig.settle()
    clocks.later(2)
    assert eventually(lambda: rig.counters["stuck"] == 9)
    rig.settle()
    stuck = rig.noted(e.Stuck)
    assert [one.job for one in stuck if isinstance(one, e.Stuck)] == list(range(9))
    last = ["confirm -> CONFIRMED", "landed_next -> CONFIRMED_LAYER_0"]
    assert all(one.last == last for one in stuck if isinstance(one, e.Stuck))
    rig.pipeline.shutdown()


def test_stuck_batch_copies_no_further_layer(clocks: Clocks) -> None:
    """The step of a stuck batch continues, but copies no further layer.

    The batch's job is reported when the copies that have begun end.
    """
    engine = Obliging()
    engine.can = False
    rig = Noted(engine, stuck_ms_max=STUCK_MS)
    rig.pipeline.begin(plan(job(1, SAVE, [(0, 0, 0, 3)])))
    rig.pipeline.save_layer(0)
    clocks.later(2)
    assert eventually(lambda: rig.counters["stuck"] == 1)
    rig.settle()
    for layer in range(1, rig.layers):
        rig.pipeline.save_layer(layer)
    assert engine.layers_of(1) == [0]
    engine.waiting = Waiting.DEVICE
    rig.pipeline.end_step()
    rig.settle()
    assert rig.pipeline.collect() == [], "a copy of it may still read"
    engine.complete_all()
    assert rig.news() == {1: False}
    assert rig.replay().problems == []
    rig.pipeline.shutdown()


def test_save_that_waits_for_the_end_of_its_step_is_not_stuck(clocks: Clocks) -> None:
    """All copies of a save have landed. While the save waits for the end of a long step, it does not count as stuck."""
    rig = Noted(Obliging(), stuck_ms_max=STUCK_MS)
    rig.pipeline.begin(plan(job(1, SAVE, [(0, 0, 0, 3)])))
    for layer in range(rig.layers):
        rig.pipeline.save_layer(layer)
        rig.engine.complete(Direction.SAVE)
        rig.settle()
        clocks.later(0.5, moved=True)
    clocks.later(3, moved=True)
    rig.pipeline.end_step()
    assert rig.news() == {1: True}
    assert rig.counters["stuck"] == 0
    rig.pipeline.shutdown()


# ---- taking copies back ---------------------------------------------------------------------------------------------


class Blocking(CpuEngine):
    """An engine that copies nothing. Each call waits for `gate`, and then records its layer."""

    def __init__(self, threads: int) -> None:
        """Start with a closed gate."""
        super().__init__(threads)
        self.gate = threading.Semaphore(0)
        self.begun = threading.Event()
        self.copied: list[int] = []

    def copy_layer(self, plan: CopyPlan, layer: int) -> frozenset[int]:  # noqa: ARG002
        """Wait for the gate, then note the layer."""
        self.begun.set()
        assert self.gate.acquire(timeout=WAIT_S)
        self.copied.append(layer)
        return frozenset()


def test_a_copy_that_has_not_begun_is_taken_back() -> None:
    """A queued copy is withdrawn and fails, and a running copy is not withdrawn. Neither copy begins again later."""
    engine, done = Blocking(1), list[Ticket]()
    copies = CopyPlan(Direction.LOAD, [job(1, ASYNC, [(0, 0, 0, 3)])], len(small_geometry().groups))
    tickets = [Ticket(None, layer, layer, done.append) for layer in range(2)]
    for ticket in tickets:
        engine.submit(copies, ticket)
    assert engine.begun.wait(WAIT_S)
    assert engine.abandon(tickets[1])
    assert not engine.abandon(tickets[0])
    engine.gate.release(2)
    assert all(ticket.wait(WAIT_S) for ticket in tickets)
    assert engine.copied == [0]
    assert (tickets[0].failed, tickets[1].failed) == (frozenset(), frozenset({1}))
    assert engine.abandon(tickets[0])
    engine.shutdown()


@pytest.mark.parametrize("kind", [SYNC, SAVE])
def test_copies_are_given_up_after_a_wait_has_timed_out(kind: Kind) -> None:
    """After a wait has timed out, all copies are given up. Otherwise they could write to blocks of other requests."""
    abandoned: list[int] = []

    class Noting(FakeEngine):
        def abandon(self, ticket: Ticket) -> bool:
            abandoned.append(ticket.layer)
            return False

    rig = Noted(Noting())
    rig.engine.waiting = Waiting.STUCK
    rig.pipeline._wait_s = 0.01
    rig.pipeline.begin(plan(job(1, kind, [(0, 0, 0, 3)])))
    rig.pipeline.start_loads()
    rig.save_all()
    rig.wait_all()
    rig.pipeline.end_step()
    assert abandoned == list(range(rig.layers))
    rig.engine.complete_all()
    rig.pipeline.shutdown()
