"""Waves: several layers are queued at once, and a load that has readers is queued as they come."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import cast

import pytest
import torch

from kvpipe.messages import Kind
from kvpipe.testing.fake_device import FakeEvent, FakeStream
from kvpipe.testing.logged import capture_logs
from kvpipe.testing.transfer_worlds import FAKES, GEOMETRY, LAYERS, PAGE_BYTES, World, make_job, rows_of, world
from kvpipe.testing.waiting import WAIT_S, eventually
from kvpipe.transfer import cuda
from kvpipe.transfer.base import CopyPlan, Direction, Ticket
from kvpipe.transfer.cuda import WAVES_AHEAD, CudaEngine, OrderingPoint

on_devices = pytest.mark.parametrize("kind", FAKES)
on_pinned = pytest.mark.parametrize("kind", [kind for kind in FAKES if kind != "fake_pageable"])
TABLE = {0: [0, 2], 1: [5, 3]}
LAYER_BYTES = 2 * PAGE_BYTES


def submit_all(w: World, kind: Kind, layers: int = LAYERS) -> list[Ticket]:
    """Submit the first `layers` layers of one plan."""
    direction = Direction.SAVE if kind is Kind.SAVE else Direction.LOAD
    plan = CopyPlan(direction, [make_job(1, rows_of(0, TABLE), kind)], len(GEOMETRY.groups))
    tickets = [Ticket(None, layer, layer, w.completed.append) for layer in range(layers)]
    w.engine.prepare(plan)
    for ticket in tickets:
        w.engine.submit(plan, ticket)
    w.tickets += tickets
    return tickets


def landed(mark: OrderingPoint) -> bool:
    """Whether the bytes are there."""
    assert isinstance(mark.landed, FakeEvent)
    return mark.landed.fired


def queued(w: World) -> int:
    """Return how much work lies on streams that are not compute's."""
    return sum(len(stream.queue) for stream in w.device.streams[1:])


@on_devices
@pytest.mark.parametrize("wave_bytes", [LAYER_BYTES, LAYER_BYTES + 1, 10 * LAYER_BYTES])
@pytest.mark.parametrize("kind_of_job", [Kind.SAVE, Kind.LOAD_ASYNC])
def test_a_wave_has_as_many_layers_as_have_the_bytes(kind: str, wave_bytes: int, kind_of_job: Kind) -> None:
    """Layers are queued together as soon as they have `wave_bytes`, or are the last; one event stands for a wave."""
    with world(kind, wave_bytes=wave_bytes) as w:
        tickets = submit_all(w, kind_of_job)
        w.drain()
        marks = [id(ticket.mark.landed) for ticket in tickets]  # type: ignore[attr-defined]
        each = min(LAYERS, -(-wave_bytes // LAYER_BYTES))
        waves = [marks[i : i + each] for i in range(0, LAYERS, each)]
        assert [len(set(wave)) for wave in waves] == [1] * len(waves)
        assert len(set(marks)) == len(waves)
        assert w.completed == tickets


@on_devices
def test_a_plan_that_has_landed_holds_no_device_memory(kind: str) -> None:
    """Its table of rows is given back with the last wave; a fence that comes later finds its event all the same."""
    with world(kind) as w:
        tickets = submit_all(w, Kind.SAVE)
        queue = tickets[0].mark.queue  # type: ignore[attr-defined]
        assert queue.prepared is not None
        w.drain()
        assert eventually(lambda: queue.prepared is None)
        assert w.engine.fence(tickets[-1], 0)


@on_devices
def test_a_load_with_readers_is_queued_as_they_come(kind: str) -> None:
    """Two waves lie ahead of the reader; when it enters the newest, the next is queued."""
    with world(kind) as w:
        tickets = submit_all(w, Kind.LOAD_SYNC)
        lengths = [queued(w)]
        for ticket in tickets:
            assert w.engine.guard_read(ticket, 0)
            lengths.append(queued(w))
        grew = [b > a for a, b in itertools.pairwise(lengths)]
        assert grew == [False, True, False], "three layers: the second reader calls for the third"
        w.drain()
        assert w.completed == tickets


@on_devices
@pytest.mark.parametrize("order", [[2, 1, 0], [2], [1, 2, 0]])
def test_readers_may_come_in_any_order(kind: str, order: list[int]) -> None:
    """A reader's layer is queued when it asks, whoever has asked before."""
    with world(kind) as w:
        for layer in range(LAYERS):
            for group, slot, page, _ in rows_of(0, TABLE):
                if group == GEOMETRY.layers[layer][0]:
                    w.slot_page(layer, slot, page).fill_(17 + layer)
        tickets = submit_all(w, Kind.LOAD_SYNC)
        read = []
        for layer in order:
            assert w.engine.guard_read(tickets[layer], 0)
            read.append((layer, w.read_block(layer, TABLE[GEOMETRY.layers[layer][0]][0])))
        w.drain()
        assert all(set(got()) == {17 + layer} for layer, got in read)


@on_devices
def test_a_fence_queues_what_was_held_back(kind: str) -> None:
    """A step that ends before a wave is full, or before every layer has come, leaves nothing behind."""
    with world(kind, wave_bytes=1 << 20) as w:
        tickets = submit_all(w, Kind.SAVE, LAYERS - 1)
        assert not queued(w) or kind in {"fake_staged", "fake_direct"}, "but for the table of rows"
        assert w.engine.fence(tickets[-1], 0)
        w.drain()
        assert w.completed == tickets


@on_devices
def test_another_plan_goes_behind(kind: str) -> None:
    """What was held back of one plan is queued before anything of the next of its direction."""
    with world(kind, wave_bytes=1 << 20) as w:
        first = submit_all(w, Kind.SAVE, 1)
        second = submit_all(w, Kind.SAVE)
        w.drain()
        assert w.completed == [*first, *second]


@on_devices
def test_what_was_held_back_can_be_given_up(kind: str) -> None:
    """A layer that was not queued touches nothing once it is given up: it fails, and the others do not."""
    with world(kind) as w:
        tickets = submit_all(w, Kind.LOAD_SYNC)
        before = w.caches[LAYERS - 1].clone()
        w.pool.tensor.fill_(9)
        assert w.engine.abandon(tickets[-1])
        assert w.engine.guard_read(tickets[0], 0)
        assert w.engine.guard_read(tickets[1], 0)
        w.drain()
        assert w.completed == tickets
        assert [bool(ticket.failed) for ticket in tickets] == [False, False, True]
        assert before.equal(w.caches[LAYERS - 1])


@on_devices
def test_giving_up_and_reading_at_once(kind: str) -> None:
    """Whatever the watchdog's thread gives up while readers ask, every ticket completes exactly once."""
    for _ in range(50):
        with capture_logs(), world(kind) as w:
            tickets = submit_all(w, Kind.LOAD_SYNC)
            thread = threading.Thread(target=lambda: [w.engine.abandon(t) for t in reversed(tickets)])  # noqa: B023
            thread.start()
            for ticket in tickets:
                w.engine.guard_read(ticket, 0)
            thread.join(WAIT_S)
            w.drain()
            assert sorted(t.layer for t in w.completed) == list(range(LAYERS))


@on_devices
def test_shutdown_finishes_what_was_held_back(kind: str) -> None:
    """Nothing that was submitted is lost when the engine ends."""
    with world(kind, wave_bytes=1 << 20) as w:
        tickets = [*submit_all(w, Kind.LOAD_SYNC, 2), *submit_all(w, Kind.SAVE, 1)]
        w.engine.shutdown()
        assert all(ticket.done and not ticket.failed for ticket in tickets)


@on_devices
def test_a_reader_of_what_has_landed_calls_for_more_too(kind: str) -> None:
    """However far the copies are ahead of the forward, two waves are under way."""
    with world(kind) as w:
        tickets = submit_all(w, Kind.LOAD_SYNC)
        w.drain_all()
        assert all(ticket.wait(WAIT_S) for ticket in tickets[:2])
        w.engine.reached(tickets[1])
        assert queued(w)
        w.drain()


@on_pinned
def test_a_load_without_readers_is_queued_two_waves_ahead_of_the_bus(kind: str) -> None:
    """Whoever submits it queues two waves; the completion thread queues one for each that has landed."""
    with world(kind) as w:
        tickets = submit_all(w, Kind.LOAD_ASYNC)
        assert [isinstance(ticket.mark, OrderingPoint) for ticket in tickets] == [True, True, False]
        w.drain()
        assert w.completed == tickets


@on_pinned
def test_loads_without_readers_let_those_with_readers_pass(kind: str) -> None:
    """Of all of them together two waves are before a later load that readers wait for; among themselves they queue."""
    with world(kind) as w:
        patient = [submit_all(w, Kind.LOAD_ASYNC) for _ in range(3)]
        before = queued(w)
        urgent = submit_all(w, Kind.LOAD_SYNC)
        assert sum(isinstance(ticket.mark, OrderingPoint) for tickets in patient for ticket in tickets) == 2
        assert queued(w) > before
        for ticket in urgent:
            assert w.engine.guard_read(ticket, 0)
        assert all(isinstance(ticket.mark, OrderingPoint) for ticket in urgent)
        while w.device.step(0) or not all(ticket.done for ticket in w.tickets):
            marks = [ticket.mark for tickets in patient for ticket in tickets]
            assert sum(isinstance(m, OrderingPoint) and not landed(m) for m in marks) <= WAVES_AHEAD
        assert [t for t in w.completed if t not in urgent] == [t for tickets in patient for t in tickets]
        assert w.completed.index(urgent[-1]) < w.completed.index(patient[0][-1])


@on_pinned
def test_a_load_without_readers_can_be_given_up_and_waited_for(kind: str) -> None:
    """What is held back touches nothing once it is given up; a fence queues the rest of its own plan only."""
    with world(kind) as w:
        first, second, third = (submit_all(w, Kind.LOAD_ASYNC) for _ in range(3))
        assert all(w.engine.abandon(ticket) for ticket in second)
        assert w.engine.fence(third[0], 0)
        assert isinstance(third[0].mark, OrderingPoint)
        assert not isinstance(third[-1].mark, OrderingPoint)
        w.drain()
        assert all(ticket.failed for ticket in second)
        assert not any(ticket.failed for ticket in (*first, *third))


@on_devices
def test_shutdown_finishes_loads_without_readers(kind: str) -> None:
    """All of them, in their order."""
    with world(kind) as w:
        tickets = [ticket for _ in range(3) for ticket in submit_all(w, Kind.LOAD_ASYNC)]
        w.engine.shutdown()
        assert w.completed == tickets
        assert not any(ticket.failed for ticket in tickets)


def test_a_copy_that_blocks_is_of_the_thread_that_submits_it() -> None:
    """The completion thread, whose news others wait for, never blocks in one, whoever waits for the load."""
    with world("fake_pageable") as w:
        names = set[str]()
        copy = w.device.copy

        def copy_by(stream: FakeStream, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
            names.add(threading.current_thread().name)
            copy(stream, pairs)

        w.device.copy = copy_by  # type: ignore[method-assign]
        tickets = submit_all(w, Kind.LOAD_ASYNC)
        w.drain()
        assert w.completed == tickets
        assert names == {threading.current_thread().name}


def within(ask: Callable[[], bool]) -> bool:
    """Return the answer, which must come while the thread is stuck."""
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(ask()), daemon=True)
    thread.start()
    thread.join(WAIT_S / 2)
    assert answers, "it waits"
    return answers[0]


@contextmanager
def stuck(w: World) -> Iterator[list[Ticket]]:
    """Have a thread block in the copy of a save, and yield the tickets of a load; in the end it goes on."""
    entered, gate = threading.Event(), threading.Event()
    tickets = submit_all(w, Kind.LOAD_SYNC)  # its third is held back
    copy = w.device.copy

    def wait(stream: FakeStream, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        entered.set()
        gate.wait(WAIT_S)
        copy(stream, pairs)

    w.device.copy = wait  # type: ignore[method-assign]
    thread = threading.Thread(target=lambda: submit_all(w, Kind.SAVE, 1))
    thread.start()
    assert entered.wait(WAIT_S)
    try:
        yield tickets
    finally:
        gate.set()
        thread.join(WAIT_S)


def test_giving_up_does_not_wait_for_a_copy_that_blocks() -> None:
    """What is held back behind it cannot be taken back now: the watchdog asks again, and it is given up then."""
    with world("fake_pageable") as w:
        with stuck(w) as tickets:
            assert not within(lambda: w.engine.abandon(tickets[-1]))
            assert not within(lambda: w.engine.abandon(tickets[0]))
        assert w.engine.abandon(tickets[-1])
        w.drain()
        assert tickets[-1].failed


def test_shutdown_does_not_wait_for_a_copy_that_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit, that is: the device counts as lost, and whatever had begun or not fails, once."""
    monkeypatch.setattr(cuda, "SHUTDOWN_S_MAX", 0.05)
    with capture_logs(), world("fake_pageable") as w:
        with stuck(w):
            assert within(lambda: not w.engine.shutdown())  # type: ignore[func-returns-value]
            assert w.device.pinned, "it may still write there"
        assert eventually(lambda: len(w.completed) == LAYERS + 1)
        for thread in cast("CudaEngine", w.engine)._threads:
            thread.join(WAIT_S)
        assert all(ticket.failed for ticket in w.completed)
        assert len(set(w.completed)) == LAYERS + 1
