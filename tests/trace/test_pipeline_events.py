"""What a rank records of its jobs, and the watchdog that fails those that are stuck."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from kvpipe.loop import LoopThread
from kvpipe.messages import Kind
from kvpipe.testing.pipeline_rig import FakeEngine, Rig, Waiting, job, plan, small_geometry
from kvpipe.testing.waiting import PATIENT_MS, WAIT_S, eventually
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

SAVE, SYNC, ASYNC = Kind.SAVE, Kind.LOAD_SYNC, Kind.LOAD_ASYNC
STUCK_MS = PATIENT_MS


class Clock:
    """The real time, and what a test adds to it: until it does nothing is stuck, however slow the machine is."""

    def __init__(self) -> None:
        """Nothing is added."""
        self.ahead_ns = self.asked = 0

    def monotonic_ns(self) -> int:
        """See `time.monotonic_ns`."""
        self.asked += 1
        return time.monotonic_ns() + self.ahead_ns


class Clocks:
    """What the watchdog takes for the time, and what all others do."""

    def __init__(self) -> None:
        """Both are right."""
        self.watchdogs, self.others = Clock(), Clock()

    def later(self, limits: float, *, moved: bool = False) -> None:
        """Let so many times `stuck_ms_max` have passed. `moved`: for what comes from now on, too."""
        passed_ns = int(limits * STUCK_MS * 1e6)
        self.watchdogs.ahead_ns += passed_ns
        self.others.ahead_ns += moved * passed_ns
        self.look()

    def look(self) -> None:
        """Wait until the watchdog has looked some times more."""
        enough = self.watchdogs.asked + 3
        assert eventually(lambda: self.watchdogs.asked >= enough)


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    """The clocks of all pipelines; watchdogs look each few milliseconds."""
    made = Clocks()
    monkeypatch.setattr(watchdog, "LOOKS_PER_LIMIT", STUCK_MS / 5)
    monkeypatch.setattr(watchdog, "time", made.watchdogs)
    for module in (batch, base):
        monkeypatch.setattr(module, "time", made.others)
    return made


class Noted(Rig):
    """A pipeline that is traced, over an engine that completes nothing by itself."""

    def __init__(self, engine: FakeEngine | None = None, *, sample: float = 1.0, stuck_ms_max: int = 60_000) -> None:
        """Start the pipeline anew, with a recorder."""
        super().__init__(engine)
        self.pipeline.shutdown()
        self.recorder = Recorder(3, lifecycle=True, transitions=True, detail=True, sample=sample)
        self._events: list[e.Event] = []
        self.engine.shutdowns = 0
        self.pipeline = Pipeline(
            self.engine, self.geometry, wait_ms_max=int(WAIT_S * 1000), counters=self.counters,
            stuck_ms_max=stuck_ms_max, trace=self.recorder, blocks=10,
        )  # fmt: skip

    @property
    def events(self) -> list[e.Event]:
        """Everything recorded so far."""
        self._events += self.recorder.take()
        return self._events

    def noted(self, kind: type[e.Event]) -> list[e.Event]:
        """Events of `kind`."""
        return [one for one in self.events if isinstance(one, kind)]

    def replay(self) -> Replay:
        """Everything recorded, fed back through the machines."""
        done = Replay()
        done.feed(e.Started(0, 3, "", 0, 0, layers=self.layers))
        for one in self.events:
            done.feed(one)
        return done


def test_every_layer_of_a_save_is_reported() -> None:
    """Submitted, copied and landed layer by layer, then final; with request, epoch, step and rank."""
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


def test_who_is_not_in_the_sample_is_not_recorded_in_detail() -> None:
    """But for its failure."""
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
    """Reported once, with how long it was waited for."""
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
    """Takes back what it has not completed, if it is informed that it can."""

    can = True

    def abandon(self, ticket: Ticket) -> bool:
        """See `TransferEngine.abandon`."""
        return ticket.over or self.can


def test_a_stuck_load_is_reported_and_failed(clocks: Clocks) -> None:
    """With its last transitions; vLLM is notified of it without anybody waiting."""
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
    engine.complete_all()  # the news after all
    rig.settle()
    clocks.look()
    assert rig.pipeline.collect() == []
    assert rig.counters["stuck"] == 1
    assert not rig.pipeline.copies.live
    assert rig.replay().problems == []
    rig.pipeline.shutdown()


def test_a_stuck_load_that_may_still_write_is_not_given_back(clocks: Clocks) -> None:
    """It is failed, but its blocks are vLLM's again only when nothing can write to them."""
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


def test_the_watchdog_begins_when_there_is_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """However late whoever makes the thread gets to know it."""

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
    """Of many in one batch too."""
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


def test_what_is_submitted_to_a_stuck_batch_is_not_begun(clocks: Clocks) -> None:
    """Its step goes on, but nothing is copied any more, and it is reported when what was begun is over."""
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


def test_what_moves_or_waits_for_its_step_is_not_stuck(clocks: Clocks) -> None:
    """A save whose copies are all there may wait for the end of a long step."""
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
    """Copies nothing, and only when it may."""

    def __init__(self, threads: int) -> None:
        """Everything may go."""
        super().__init__(threads)
        self.gate = threading.Semaphore(0)
        self.begun = threading.Event()
        self.copied: list[int] = []

    def copy_layer(self, plan: CopyPlan, layer: int) -> frozenset[int]:  # noqa: ARG002
        """Wait, then note the layer."""
        self.begun.set()
        assert self.gate.acquire(timeout=WAIT_S)
        self.copied.append(layer)
        return frozenset()


def test_a_copy_that_has_not_begun_is_taken_back() -> None:
    """One that a thread is at is not; neither is begun later, and a taken back one fails."""
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
def test_what_a_timed_out_wait_leaves_is_taken_back(kind: Kind) -> None:
    """A copy that begins after its job was given up would write into blocks that are somebody else's."""
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
