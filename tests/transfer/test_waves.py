"""Waves: several layers are queued at once, and a load that has readers is queued as they come."""

from __future__ import annotations

import itertools
import threading

import pytest
from structlog.testing import capture_logs

from kvpipe.plan import Kind
from kvpipe.transfer.base import CopyPlan, Direction, Ticket
from tests.transfer.worlds import (
    FAKES,
    GEOMETRY,
    LAYERS,
    PAGE_BYTES,
    WAIT_S,
    World,
    eventually,
    make_job,
    rows_of,
    world,
)

on_devices = pytest.mark.parametrize("kind", FAKES)
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
        marks = [id(ticket.mark.landed) for ticket in tickets]  # type: ignore[attr-defined]
        each = min(LAYERS, -(-wave_bytes // LAYER_BYTES))
        waves = [marks[i : i + each] for i in range(0, LAYERS, each)]
        assert [len(set(wave)) for wave in waves] == [1] * len(waves)
        assert len(set(marks)) == len(waves)
        w.drain()
        assert w.completed == tickets


@on_devices
def test_a_plan_that_has_landed_holds_no_device_memory(kind: str) -> None:
    """Its table of rows is given back with the last wave; a fence that comes later finds its event all the same."""
    with world(kind) as w:
        tickets = submit_all(w, Kind.SAVE)
        plan = tickets[0].mark.queue.plan  # type: ignore[attr-defined]
        assert plan.mark is not None
        w.drain()
        assert eventually(lambda: plan.mark is None)
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
