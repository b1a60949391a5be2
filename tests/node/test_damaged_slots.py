"""A process with the node's memory writes into slots: engines that load the slots notice it, and compute the tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvpipe.node.layout import VERSION
from kvpipe.testing.direct_node import DirectNode
from kvpipe.testing.waiting import WAIT_S, eventually
from kvpipe.transfer.base import CopyPlan, Direction, Ticket
from kvpipe.transfer.cpu import CpuEngine
from kvpipe.transfer.marks import MARK_BYTES, SlotMarks
from tests.rigs.node_rank import UNITS, NodeRank, cuda, geometry, hostile_write, make_node
from tests.rigs.pipeline_rig import FakeEngine, Waiting
from tests.rigs.scheduler_world import UNIT

HAS_DIGEST = 1 << 63
PART = geometry().slot_bytes


class Engines:
    """Engines on one memory."""

    def __init__(self) -> None:
        """Make the memory."""
        self.node: DirectNode = make_node()
        self.all: list[NodeRank] = []

    def add(self, engine: Any = None, **options: Any) -> NodeRank:
        """Start an engine."""
        self.all.append(NodeRank(self.node, engine=engine, **options))
        return self.all[-1]

    def slot(self) -> int:
        """Return the slot of the only published chunk."""
        (slot,) = self.node.keeper._chunks
        return slot

    def at(self, slot: int) -> int:
        """Return where the slot begins."""
        return slot * self.node.slot_bytes

    def mark(self, slot: int) -> tuple[int, int]:
        """Return digest and generation in the mark of a slot."""
        raw = self.all[0].segment.slots
        assert raw is not None
        at = self.at(slot) + PART
        digest, generation = np.frombuffer(bytes(raw[at : at + MARK_BYTES]), "<u8").tolist()
        return digest, generation & ~HAS_DIGEST


@pytest.fixture
def engines() -> Iterator[Engines]:
    """Return a memory without engines."""
    made = Engines()
    yield made
    for one in made.all:
        one.close()
    made.node.close()


@pytest.mark.parametrize("make", [lambda: None, cuda], ids=["cpu", "cuda"])
@pytest.mark.parametrize("digests", [False, True])
def test_chunk_of_another_engine_is_loaded_unchanged(
    engines: Engines, make: Callable[[], Any], *, digests: bool
) -> None:
    """The mark has the generation that the slot has while the chunk is published."""
    first, second = engines.add(make(), digests=digests), engines.add(make(), digests=digests)
    first.save("a")
    slot = engines.slot()
    digest, generation = engines.mark(slot)
    assert generation == int(first.segment.generations[slot])
    assert bool(digest) == digests
    assert second.load("a") == UNITS * UNIT - 1
    assert not second.bad
    assert torch.equal(second.cache[1 : UNITS + 1], first.cache[1 : UNITS + 1])
    assert not second.side.counters.faults


@pytest.mark.parametrize("make", [lambda: None, cuda], ids=["cpu", "cuda"])
@pytest.mark.parametrize(("digests", "offset"), [(False, PART + 8), (True, PART + 8), (True, 5), (True, PART - 1)])
def test_damaged_slot_is_a_miss_for_every_engine(
    engines: Engines, make: Callable[[], Any], offset: int, *, digests: bool
) -> None:
    """The first engine that loads the chunk reports the blocks as bad, and evicts the chunk for all engines."""
    first, second = engines.add(digests=digests), engines.add(make(), digests=digests)
    first.save("a")
    hostile_write(engines.node, engines.at(engines.slot()) + offset, b"\x5a")
    assert second.load("a")
    assert second.counts["slot_damaged"]
    assert second.counts["damaged_chunks_evicted"] == 1
    assert "copy_timeout" not in second.counts
    assert set(range(1, UNITS)) <= second.bad
    for one in (first, second):
        one.rest()
        assert one.world.ask(one.world.request("a", UNITS)) == 0
    assert not engines.node.keeper._chunks, "the holder keeps the chunk"
    first.save("b")
    assert second.load("b")
    assert second.counts["damaged_chunks_evicted"] == 1


class Overwritten(CpuEngine):
    """An engine during whose copies another process begins to write the slot."""

    write: Callable[[], object] = bool

    def submit(self, plan: CopyPlan, ticket: Ticket) -> None:
        """Copy, and overwrite the slot before the ticket is complete."""
        sink, ticket.sink = ticket.sink, lambda one: (self.write(), sink(one))
        super().submit(plan, ticket)


@pytest.mark.parametrize("digests", [False, True])
def test_blocks_of_a_load_from_a_damaged_slot_have_no_nan(engines: Engines, *, digests: bool) -> None:
    """A NaN in a freed block would make the results of the block's next owner NaN."""
    engine = Overwritten(0)
    first, second = engines.add(digests=digests), engines.add(engine, digests=digests)
    first.save("a")
    at = engines.at(engines.slot())
    hostile_write(engines.node, at, np.full(2, np.nan, np.float32).tobytes())
    if not digests:
        engine.write = lambda: hostile_write(engines.node, at + PART + 8, bytes(8))
    assert second.load("a")
    assert set(range(1, UNITS)) <= second.bad
    assert not torch.isnan(second.cache).any()


def test_changed_bytes_are_not_noticed_without_digests(engines: Engines) -> None:
    """The generation names the chunk, and says nothing about the chunk's bytes."""
    first, second = engines.add(), engines.add()
    first.save("a")
    hostile_write(engines.node, engines.at(engines.slot()) + 5, b"\x5a")
    assert second.load("a")
    assert not second.bad
    assert not torch.equal(second.cache[1], first.cache[1])


def test_engine_without_digests_saves_chunks_that_an_engine_with_digests_loads(engines: Engines) -> None:
    """Engines of one memory may be configured differently. A chunk without a digest is loaded."""
    first, second = engines.add(), engines.add(digests=True)
    first.save("a")
    assert engines.mark(engines.slot())[0] == 0
    assert second.load("a")
    assert not second.bad


def test_slot_that_another_process_overwrites_during_a_load_is_a_miss(engines: Engines) -> None:
    """A writer clears the mark before its first copy, so the comparison after the last copy finds the writer."""
    fake = FakeEngine()
    fake.waiting = Waiting.DEVICE
    first, second = engines.add(), engines.add(fake)
    first.save("a")
    second.step()
    second.world.admit(second.world.request("a", UNITS))
    second.begin(second.world.step())
    assert not second.counts.get("slot_damaged")
    hostile_write(engines.node, engines.at(engines.slot()) + PART + 8, bytes(8))
    fake.complete_all()
    report = second.end()
    assert report is not None
    assert [one.bad for one in report.tallies.values()] == [1]
    assert report.damaged
    assert second.bad
    second.rest()
    assert second.world.ask(second.world.request("a", UNITS)) == 0


def test_overwritten_slot_is_reported_late_when_the_load_lands_after_its_step(engines: Engines) -> None:
    """On a device a step ends before its copies end. The blocks may then belong to another request."""
    fake = FakeEngine()
    fake.waiting = Waiting.DEVICE
    first, second = engines.add(), engines.add(fake)
    first.save("a")
    second.step()
    second.world.admit(second.world.request("a", UNITS))
    second.begin(second.world.step())
    hostile_write(engines.node, engines.at(engines.slot()) + PART + 8, bytes(8))
    report = second.end()
    assert report is None or not (report.tallies or report.damaged)
    assert not second.bad
    fake.complete_all()
    second.begin(second.world.step())
    second.side.end_step()
    second.side.collect()
    assert not second.side.take_bad_blocks(late=False)
    second.side.unbind()
    report = second.side.take_report()
    assert report is not None
    assert [one.bad for one in report.tallies.values()] == [1]
    assert report.damaged
    second.world.side.reported(report)
    assert second.counts["load_failed"] == 1
    assert second.counts["damaged_chunks_evicted"] == 1
    second.rest()
    assert second.world.ask(second.world.request("a", UNITS)) == 0


def test_mark_is_cleared_before_the_first_copy_of_a_save(engines: Engines) -> None:
    """Otherwise a load that runs by mistake would find the old generation behind half of the new bytes."""
    fake = FakeEngine()
    fake.waiting = Waiting.DEVICE
    engine = engines.add(fake)
    request = engine.world.request("a", UNITS)
    engine.world.admit(request)
    (job,) = jobs = engine.world.step(request)
    slot = int(job.table()[0, 1])
    hostile_write(engines.node, engines.at(slot) + PART, b"\1" * MARK_BYTES)
    engine.begin(jobs)
    assert engines.mark(slot)[1] == 0
    report = engine.end()
    assert report is None or not report.tallies
    assert engines.mark(slot)[1] == 0, "the copies have not landed"
    fake.complete(Direction.SAVE, len(fake.queues[Direction.SAVE]))
    assert engines.mark(slot)[1] == engine.world.side.node._stock.grants[slot].generation + 1  # type: ignore[union-attr]
    engine.rest()


def test_save_is_reported_after_its_digest_is_written(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps do not wait for the digest. The chunk is published later."""
    digest, read, going_on = SlotMarks._digest, threading.Event(), threading.Event()

    def slow(marks: SlotMarks, slot: int) -> int:
        read.set()
        assert going_on.wait(WAIT_S)
        return digest(marks, slot)

    monkeypatch.setattr(SlotMarks, "_digest", slow)
    engine = engines.add(digests=True)
    request = engine.world.request("a", UNITS)
    engine.world.admit(request)
    (job,) = engine.step(request)
    slot = int(job.table()[0, 1])
    assert read.wait(WAIT_S)
    for _ in range(3):
        engine.step()
        assert engine.world.side.jobs.in_flight
        assert engines.mark(slot) == (0, 0)
    going_on.set()
    assert eventually(lambda: engine.step() or not engine.world.side.jobs.in_flight)
    assert all(engines.mark(slot))


def test_load_that_lands_before_its_digests_waits_for_them(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step ends when the digests are compared, so the engine computes the tokens of the failed load."""
    fake, landed, digest = FakeEngine(), threading.Event(), SlotMarks._digest
    fake.waiting = Waiting.DEVICE
    first, second = engines.add(digests=True), engines.add(fake, digests=True)
    first.save("a")
    hostile_write(engines.node, engines.at(engines.slot()) + 5, b"\x5a")
    monkeypatch.setattr(SlotMarks, "_digest", lambda *slot: landed.wait(WAIT_S) and digest(*slot))
    second.step()
    second.world.admit(second.world.request("a", UNITS))
    second.begin(second.world.step())
    fake.complete_all()
    threading.Timer(0.1, landed.set).start()
    report = second.end()
    assert report is not None
    assert [one.bad for one in report.tallies.values()] == [1]
    assert second.bad
    assert 0 < second.side.pipeline.copies.rate.bytes_per_s < 10 * PART, "the rate leaves out the digests"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_step_does_not_wait_for_digests_when_their_thread_has_ended(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load fails, and the rank reports its pool as lost."""
    first, second = engines.add(digests=True), engines.add(digests=True, wait_ms_max=3_600_000)
    first.save("a")

    def end(*_: object) -> str:
        raise SystemExit

    monkeypatch.setattr(SlotMarks, "damage", end)
    second.step()
    second.world.admit(second.world.request("a", UNITS))
    second.begin(second.world.step())
    report = second.end()
    assert report is not None
    assert report.lost
    assert second.bad


def test_step_does_not_wait_for_a_load_whose_landing_raises(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digests are compared, so vLLM's thread is not blocked for `wait_ms_max`."""
    fake, landed, damage = FakeEngine(), threading.Event(), SlotMarks.damage
    fake.waiting = Waiting.DEVICE
    first, second = engines.add(digests=True), engines.add(fake, digests=True)
    first.save("a")
    monkeypatch.setattr(SlotMarks, "damage", lambda *slot: landed.wait(WAIT_S) and damage(*slot))
    second.step()
    second.world.admit(second.world.request("a", UNITS))
    second.begin(second.world.step())
    monkeypatch.delattr(second.side.pipeline.copies, "bytes")
    fake.complete_all()
    landed.set()
    second.side.end_step()
    assert "copy_timeout" not in second.counts


def test_save_is_marked_without_a_digest_when_the_digest_makes_no_progress(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chunk is published after `stuck_ms_max`, and the late digest changes no mark."""
    digest, going_on, over = SlotMarks._digest, threading.Event(), threading.Event()

    def slow(marks: SlotMarks, slot: int) -> int:
        assert going_on.wait(WAIT_S)
        over.set()
        return digest(marks, slot)

    monkeypatch.setattr(SlotMarks, "_digest", slow)
    engine = engines.add(digests=True, stuck_ms_max=100)
    for name in "ab":
        request = engine.world.request(name, UNITS)
        engine.world.admit(request)
        (job,) = engine.step(request)
    slot = int(job.table()[0, 1])
    assert eventually(lambda: engine.step() or not engine.world.side.jobs.in_flight)
    assert engines.mark(slot)[0] == 0
    assert engines.mark(slot)[1]
    going_on.set()
    assert over.wait(WAIT_S)
    engine.close()
    assert engines.mark(slot)[0] == 0


def test_save_is_marked_without_a_digest_when_the_digest_raises(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save is reported as done, so other engines load the chunk."""
    first, second = engines.add(digests=True), engines.add(digests=True)
    with monkeypatch.context() as patched:
        patched.setattr(SlotMarks, "_digest", lambda *_: 1 // 0)
        first.save("a")
    assert engines.mark(engines.slot())[0] == 0
    assert second.load("a")
    assert not second.bad


@pytest.mark.parametrize("word", [0, 1])
def test_any_digest_is_compared(engines: Engines, monkeypatch: pytest.MonkeyPatch, word: int) -> None:
    """No digest stands for a chunk without a digest."""
    first, second = engines.add(digests=True), engines.add(digests=True)
    monkeypatch.setattr(SlotMarks, "_digest", lambda *_: word)
    first.save("a")
    monkeypatch.undo()
    assert second.load("a")
    assert second.bad


def test_digest_covers_a_save_that_has_failed(engines: Engines) -> None:
    """The failed save has changed bytes of a chunk whose earlier units stay."""
    fake = FakeEngine()
    engine = engines.add(fake, digests=True)
    fake.failing = lambda plan, _ticket: frozenset(job.id for job in plan.jobs)
    request = engine.world.request("a", UNITS)
    engine.world.admit(request)
    (job,) = engine.step(request)
    engine.rest()
    slot = int(job.table()[0, 1])
    assert engine.counts["save_failed"] == 1
    assert all(engines.mark(slot))


def test_memory_of_another_version_has_other_slots() -> None:
    """Version 3 had no marks."""
    assert VERSION == 4
