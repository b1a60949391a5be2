"""Tests of the order in which a rank's digests are computed, without copies."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvpipe.node.replica import stamp_of
from kvpipe.protocol.messages import LOAD_ASYNC, LOAD_SYNC, SAVE, Job, Kind
from kvpipe.testing.waiting import WAIT_S, eventually
from kvpipe.threads.loop import LoopThread
from kvpipe.trace.log import Counters
from kvpipe.transfer.base import Ticket
from kvpipe.transfer.marks import MARK_BYTES, MarkPlace, SlotMarks
from kvpipe.worker import checks as module
from kvpipe.worker.async_loads import AsyncLoads
from kvpipe.worker.batch import Batch
from kvpipe.worker.checks import SlotChecks

PART, SLOTS = 64, 8


def _report(batch: Batch) -> None:
    if batch.checked is not None:
        batch.checked.set()


class Checks:
    """The checks of a rank whose digests wait until `go` is set. `read` has the slots whose digests have begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.memory, self.go, self.read = bytearray(SLOTS * (PART + MARK_BYTES)), threading.Event(), list[int]()
        place = MarkPlace(PART + MARK_BYTES, PART, 0, PART)
        self.marks = SlotMarks(memoryview(self.memory), place, digests=True)
        digest = SlotMarks._digest

        def slow(marks: SlotMarks, slot: int) -> int:
            self.read.append(slot)
            assert self.go.wait(WAIT_S)
            return digest(marks, slot)

        monkeypatch.setattr(SlotMarks, "_digest", slow)
        self.counters = Counters()
        self.all = SlotChecks(self.marks, self.counters, saves=True, cpus=frozenset())
        self.all.on_checked = _report

    def batch(self, kind: Kind, slot: int, number: int = 1) -> Batch:
        """Begin a batch with one job."""
        made = Batch(kind, (Job(number, int(kind), "r", 1, b"", stamps=stamp_of(slot, 5)),), 1, 1, traced=False)
        self.all.begin(made)
        return made

    def word(self, slot: int) -> int:
        """Return the digest in a mark."""
        at = slot * (PART + MARK_BYTES) + PART
        return int(np.frombuffer(self.memory, np.uint64, 1, at)[0])


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Checks]:
    """Return checks without queued work."""
    made = Checks(monkeypatch)
    yield made
    made.go.set()
    made.all.stop()


def _ticket(batch: Batch) -> Ticket:
    return Ticket(batch, 0, 0, bool)


def test_slots_of_sync_loads_are_read_before_other_slots(checks: Checks) -> None:
    """A step waits for its sync loads."""
    checks.go.set()
    checks.marks.write(stamp_of(3, 5) + stamp_of(4, 5))
    checks.go.clear()
    checks.read.clear()
    assert not checks.all.is_marked(checks.batch(SAVE, 0))
    assert eventually(lambda: checks.read == [0])
    for slot in (1, 2):
        assert not checks.all.is_marked(checks.batch(SAVE, slot))
    later, sync = checks.batch(LOAD_ASYNC, 3), checks.batch(LOAD_SYNC, 4)
    assert checks.all.holds(later, _ticket(later), layers=1)
    checks.go.set()
    assert checks.all.wait(_ticket(sync), WAIT_S)
    assert eventually(lambda: len(checks.read) == 5)
    assert checks.read == [0, 4, 1, 2, 3]


def test_slot_of_an_async_load_is_read_when_its_last_copy_has_landed(checks: Checks) -> None:
    """The copies begin after the forward, so an earlier comparison would say nothing about the copied bytes."""
    checks.go.set()
    checks.marks.write(stamp_of(3, 5))
    checks.read.clear()
    load, save = checks.batch(LOAD_ASYNC, 3), checks.batch(SAVE, 1)
    assert not checks.all.is_marked(save)
    assert checks.all.wait(_ticket(save), WAIT_S)
    assert checks.read == [1]
    checks.memory[3 * (PART + MARK_BYTES)] = 1
    assert checks.all.holds(load, _ticket(load), layers=1)
    assert checks.all.wait(_ticket(load), WAIT_S)
    assert checks.all.failed(load) == {1}


def test_digest_is_left_out_when_a_later_save_has_begun(checks: Checks) -> None:
    """The later save changes the slot, so the digest would be wrong. The mark names the chunk all the same."""
    first, earlier = checks.batch(SAVE, 0), checks.batch(SAVE, 1)
    assert not checks.all.is_marked(first)
    assert not checks.all.is_marked(earlier)
    assert eventually(lambda: checks.read == [0])
    later = checks.batch(SAVE, 1, 2)
    checks.go.set()
    assert checks.all.wait(_ticket(earlier), WAIT_S)
    assert not checks.word(1)
    assert not checks.marks.other_chunk(stamp_of(1, 5))
    assert not checks.all.is_marked(later)
    assert checks.all.wait(_ticket(later), WAIT_S)
    assert checks.word(1)
    assert checks.read == [0, 1]
    assert not checks.all._latest


def test_save_is_marked_without_a_digest_when_many_slots_wait(checks: Checks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise chunks would be published later and later."""
    monkeypatch.setattr(module, "SLOTS_WAITING_MAX", 2)
    assert not checks.all.is_marked(checks.batch(SAVE, 0))
    assert eventually(lambda: checks.read == [0])
    for slot in (1, 2):
        assert not checks.all.is_marked(checks.batch(SAVE, slot))
    assert checks.all.is_marked(checks.batch(SAVE, 3))
    assert not checks.word(3)
    assert not checks.marks.other_chunk(stamp_of(3, 5))
    assert checks.counters["digests_left_out"] == 1


def test_idle_engine_waits_for_the_digests_of_an_async_load(checks: Checks) -> None:
    """The load's copies have landed, so an engine that waited only for them would spin."""
    outcomes: Any = type("Outcomes", (), {"waiting": False})()
    loop = LoopThread("kvpipe-test")
    try:
        loads, batch = AsyncLoads(loop, outcomes), checks.batch(LOAD_ASYNC, 3)
        loads.begun(batch)
        began_s = time.monotonic()
        loads.await_one(0.1)
        assert time.monotonic() - began_s >= 0.1
        assert batch.checked is not None
        batch.checked.set()
        loads.await_one(WAIT_S)
        assert not loads._batches
    finally:
        loop.stop()
