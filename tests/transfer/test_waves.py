"""Layers are queued in waves. A load with readers is queued when its readers arrive."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import cast

import pytest
import torch

from kvpipe.protocol.messages import Kind
from kvpipe.testing.fake_device import FakeDevice, FakeEvent, FakeStream
from kvpipe.testing.logged import capture_logs
from kvpipe.testing.transfer_worlds import FAKES, GEOMETRY, LAYERS, PAGE_BYTES, World, job_rows, make_job, world
from kvpipe.testing.waiting import WAIT_S, eventually
from kvpipe.transfer import cuda
from kvpipe.transfer.base import CopyPlan, Direction, Ticket
from kvpipe.transfer.cuda import WAVES_AHEAD, CudaEngine
from kvpipe.transfer.waves import OrderingPoint, PlanQueue

on_devices = pytest.mark.parametrize("kind", FAKES)
on_pinned = pytest.mark.parametrize("kind", [kind for kind in FAKES if kind != "fake_pageable"])
TABLE = {0: [0, 2], 1: [5, 3]}
LAYER_BYTES = 2 * PAGE_BYTES


def test_a_wave_ends_with_the_last_layer_that_its_event_covers() -> None:
    """A layer that a wave's event does not cover may not be computed yet, so the wave does not include this layer."""
    queue = PlanQueue(CopyPlan(Direction.SAVE, [make_job(1, job_rows(0, TABLE))], len(GEOMETRY.groups)))
    tickets = [Ticket(None, layer, layer, lambda _: None) for layer in range(5)]
    for ticket in tickets[:4]:
        queue.put(ticket, LAYER_BYTES)
    event = FakeEvent("compute", FakeDevice())
    queue.computed = len(queue.tickets), event
    assert queue.take(2 * LAYER_BYTES + 1) == tickets[:3]
    queue.put(tickets[4], LAYER_BYTES)
    assert queue.take(2 * LAYER_BYTES + 1) == tickets[3:4]
    covered = [queue.computed]
    queue.computed = 1, event
    queue.drop(tickets[4])
    assert [*covered, queue.computed] == [None, None]


def submit_all(w: World, kind: Kind, layers: int = LAYERS) -> list[Ticket]:
    """Submit the first `layers` layers of one plan."""
    direction = Direction.SAVE if kind is Kind.SAVE else Direction.LOAD
    plan = CopyPlan(direction, [make_job(1, job_rows(0, TABLE), kind)], len(GEOMETRY.groups))
    tickets = [Ticket(None, layer, layer, w.completed.append) for layer in range(layers)]
    w.engine.prepare(plan)
    for ticket in tickets:
        w.engine.submit(plan, ticket)
    w.tickets += tickets
    w.await_queueing()
    return tickets


def landed(mark: OrderingPoint) -> bool:
    """Whether the bytes have landed."""
    assert isinstance(mark.landed, FakeEvent)
    return mark.landed.fired


def queued(w: World) -> int:
    """Return the number of operations queued on all streams except the compute stream."""
    return sum(len(stream.queue) for stream in w.device.streams[1:])


@on_devices
@pytest.mark.parametrize("wave_bytes", [LAYER_BYTES, LAYER_BYTES + 1, 10 * LAYER_BYTES])
@pytest.mark.parametrize("kind_of_job", [Kind.SAVE, Kind.LOAD_ASYNC])
def test_a_wave_has_as_many_layers_as_have_the_bytes(kind: str, wave_bytes: int, kind_of_job: Kind) -> None:
    """A wave is queued when its layers have `wave_bytes` bytes, or include the last layer. Each wave has one event."""
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
    """The row table is released with the last wave. A later fence still finds the plan's event."""
    with world(kind) as w:
        tickets = submit_all(w, Kind.SAVE)
        queue = tickets[0].mark.queue  # type: ignore[attr-defined]
        assert queue.prepared is not None
        w.drain()
        assert eventually(lambda: queue.prepared is None)
        assert w.engine.fence(tickets[-1], 0)


@on_devices
def test_load_with_readers_is_queued_two_waves_ahead(kind: str) -> None:
    """Two waves are queued before a reader needs them.

    When the reader enters the newest wave, the next wave is queued.
    """
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
def test_readers_may_arrive_in_any_order(kind: str, order: list[int]) -> None:
    """Readers of layers may arrive in any order: each layer is queued when its reader arrives."""
    with world(kind) as w:
        for layer in range(LAYERS):
            for group, slot, page, _ in job_rows(0, TABLE):
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
def test_fence_queues_delayed_layers(kind: str) -> None:
    """The fence queues the delayed layers of a step that ends before a wave is full, or before all layers arrive."""
    with world(kind, wave_bytes=1 << 20) as w:
        tickets = submit_all(w, Kind.SAVE, LAYERS - 1)
        assert not queued(w) or kind in {"fake_staged", "fake_direct"}, "but for the table of rows"
        assert w.engine.fence(tickets[-1], 0)
        w.drain()
        assert w.completed == tickets


@on_devices
def test_delayed_copies_are_queued_before_those_of_the_next_plan(kind: str) -> None:
    """When a second plan of the same direction arrives, the delayed copies of the first plan are queued first."""
    with world(kind, wave_bytes=1 << 20) as w:
        first = submit_all(w, Kind.SAVE, 1)
        second = submit_all(w, Kind.SAVE)
        w.drain()
        assert w.completed == [*first, *second]


@on_devices
def test_delayed_layer_can_be_given_up(kind: str) -> None:
    """If a layer is given up before it is queued, the layer fails, and its copies touch no memory.

    Other layers succeed.
    """
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
def test_layer_can_be_given_up_while_it_is_read(kind: str) -> None:
    """Every ticket completes exactly once, although the watchdog's thread abandons tickets that readers ask for."""
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
def test_shutdown_completes_delayed_copies(kind: str) -> None:
    """The engine's shutdown completes every submitted ticket without a failure."""
    with world(kind, wave_bytes=1 << 20) as w:
        tickets = [*submit_all(w, Kind.LOAD_SYNC, 2), *submit_all(w, Kind.SAVE, 1)]
        w.engine.shutdown()
        assert all(ticket.done and not ticket.failed for ticket in tickets)


@on_devices
def test_reader_of_a_landed_layer_queues_a_wave(kind: str) -> None:
    """A reader of a layer that has already landed also queues a wave, so that two waves stay in flight."""
    with world(kind) as w:
        tickets = submit_all(w, Kind.LOAD_SYNC)
        w.drain_all()
        assert all(ticket.wait(WAIT_S) for ticket in tickets[:2])
        w.engine.reached(tickets[1])
        assert queued(w)
        w.drain()


@on_pinned
def test_a_load_without_readers_is_queued_two_waves_ahead_of_the_bus(kind: str) -> None:
    """The submitting thread queues two waves. The completion thread queues one more for each wave that has landed."""
    with world(kind) as w:
        tickets = submit_all(w, Kind.LOAD_ASYNC)
        assert [isinstance(ticket.mark, OrderingPoint) for ticket in tickets] == [True, True, False]
        w.drain()
        assert w.completed == tickets


@on_pinned
def test_loads_with_readers_are_queued_before_loads_without(kind: str) -> None:
    """A load with readers waits for at most two waves of earlier loads without readers.

    The loads without readers keep their order.
    """
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
    """Delayed copies touch no memory after they are given up. The fence of a plan queues only the rest of this plan."""
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
    """The shutdown completes all loads without readers, in their order."""
    with world(kind) as w:
        tickets = [ticket for _ in range(3) for ticket in submit_all(w, Kind.LOAD_ASYNC)]
        w.engine.shutdown()
        assert w.completed == tickets
        assert not any(ticket.failed for ticket in tickets)


def test_copy_that_may_block_is_queued_by_the_submitting_thread() -> None:
    """The submitting thread queues a copy that may block.

    The completion thread must not queue it, because other threads wait for the completion thread.
    """
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
    """Return the result of `ask`. The call must return while the other thread is stuck."""
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(ask()), daemon=True)
    thread.start()
    thread.join(WAIT_S / 2)
    assert answers, "it waits"
    return answers[0]


@contextmanager
def stuck(w: World) -> Iterator[list[Ticket]]:
    """Block a thread in the copy of a save, and yield the tickets of a load. At the end the thread continues."""
    entered, gate = threading.Event(), threading.Event()
    tickets = submit_all(w, Kind.LOAD_SYNC)  # the load's third layer is not queued yet
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
    """`abandon` returns False while another thread's copy blocks, and True when the watchdog calls it later."""
    with world("fake_pageable") as w:
        with stuck(w) as tickets:
            assert not within(lambda: w.engine.abandon(tickets[-1]))
            assert not within(lambda: w.engine.abandon(tickets[0]))
        assert eventually(lambda: w.engine.abandon(tickets[-1]))  # each call waits for at most two milliseconds
        w.drain()
        assert tickets[-1].failed


def test_shutdown_does_not_wait_for_a_copy_that_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """After its time limit the shutdown counts the device as lost, and every ticket fails once."""
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


@on_devices
def test_a_save_waits_for_the_compute_before_its_submission_only(kind: str) -> None:
    """A save's event is recorded when its layers are submitted, not when the completion thread queues the copies."""
    with world(kind) as w:
        with w.engine._queueing:  # type: ignore[attr-defined]  # the completion thread waits
            w.write_block(0, 0, 7)
            plan = CopyPlan(Direction.SAVE, [make_job(1, [(0, 0, 0, 0)])], len(GEOMETRY.groups))
            ticket = Ticket(None, 0, 0, w.completed.append, (0, 1, 2))
            w.engine.submit(plan, ticket)
            w.tickets.append(ticket)
            assert queued(w) == 0, "vLLM's thread queues nothing"
            w.device.drain()
            w.write_block(1, 0, 9)
        w.await_queueing()
        assert not isinstance(w.device.compute.queue[-1], FakeEvent)
        while any(stream.queue for stream in w.device.streams[1:]):
            later = w.device.streams[1:]
            next(stream for stream in later if stream.ready).run_head()
        assert w.slot_page(0, 0, 0).eq(7).all()
        assert w.slot_page(1, 0, 0).eq(0).all()
        assert len(w.device.compute.queue) == 1, "the compute after the submission was not waited for"
        w.drain()
        assert w.completed == [ticket]


@on_devices
def test_fence_queues_a_save_before_the_completion_thread_does(kind: str) -> None:
    """The fence queues the save. Compute after the fence waits until the whole save has read its blocks."""
    with world(kind) as w, w.engine._queueing:  # type: ignore[attr-defined]
        plan = CopyPlan(Direction.SAVE, [make_job(1, job_rows(0, TABLE))], len(GEOMETRY.groups))
        ticket = Ticket(None, 0, 0, w.completed.append, tuple(range(LAYERS)))
        w.engine.submit(plan, ticket)
        w.tickets.append(ticket)
        assert w.engine.fence(ticket, 0)
        assert queued(w)
        assert any(isinstance(one, FakeEvent) for one in w.device.compute.queue)
