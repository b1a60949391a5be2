"""The CUDA engine on a simulated device: what only a device does, and proof that the tests see a missing wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import Phase, find, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from kvpipe.config import load_settings
from kvpipe.connectors.vllm.worker import WorkerSide
from kvpipe.errors import UnsupportedError
from kvpipe.plan import Kind
from kvpipe.tiers.memory import HostPool
from kvpipe.tiers.ready import Readier
from kvpipe.transfer import cuda
from kvpipe.transfer.base import NO_JOBS, Direction, TransferEngine
from kvpipe.transfer.cpu import CpuEngine
from kvpipe.transfer.cuda import CudaEngine
from kvpipe.transfer.pages import PageView
from tests.transfer.fake_device import FakeDevice, landed_of
from tests.transfer.programs import loads_are_right, saves_are_right, schedules, tables
from tests.transfer.worlds import FAKES, GEOMETRY, LAYERS, WAIT_S, World, eventually, make_job, rows_of, world

on_devices = pytest.mark.parametrize("kind", FAKES)
TABLE = {0: [0, 1, 5], 1: [7, 2]}
Program = Callable[[World, dict[int, list[int]]], bool]


WAITS = {
    "dma": [
        ("save-bus", "compute", saves_are_right),
        ("compute", "save-bus", saves_are_right),
        ("load-bus", "compute", loads_are_right),
        ("compute", "load-bus", loads_are_right),
    ],
    "direct": [
        ("save-kernel", "compute", saves_are_right),
        ("compute", "save-kernel", saves_are_right),
        ("load-kernel", "compute", loads_are_right),
        ("compute", "load-kernel", loads_are_right),
    ],
    "staged": [
        ("save-kernel", "compute", saves_are_right),
        ("save-bus", "save-kernel", saves_are_right),
        ("save-kernel", "save-bus", saves_are_right),
        ("compute", "save-kernel", saves_are_right),
        ("load-kernel", "compute", loads_are_right),
        ("load-kernel", "load-bus", loads_are_right),
        ("load-bus", "load-kernel", loads_are_right),
        ("compute", "load-kernel", loads_are_right),
    ],
}
WAITS["pageable"] = WAITS["dma"]
"""Every wait of the engine: (stream that waits, stream waited for, program that needs it)."""


def make_ready(w: World) -> None:
    """Make the world's whole pool ready, as a rank does at start-up."""
    Readier(w.pool, w.engine.claim, piece_bytes=w.engine.piece_bytes).begin("start")


@pytest.mark.parametrize(
    ("mover", "waits", "waits_for", "program"), [(m, *wait) for m, waits in WAITS.items() for wait in waits]
)
def test_a_forgotten_wait_is_found(mover: str, waits: str, waits_for: str, program: Program) -> None:
    """Without any one of the engine's waits some schedule gives wrong bytes, and the tests would find it."""

    def breaks(drawn: tuple[dict[int, list[int]], list[int]]) -> bool:
        table, schedule = drawn
        with world(f"fake_{mover}", device=FakeDevice(forgets=[(waits, waits_for)]), schedule=schedule) as w:
            return not program(w, table)

    few = settings(max_examples=300, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
    find(st.tuples(tables, schedules), breaks, settings=few)  # raises where there is none


@on_devices
def test_the_host_never_waits(kind: str) -> None:
    """On a device that runs nothing at all, submissions, guards and fences return, and no ticket is complete."""
    with world(kind) as w:
        for direction in Direction:
            for layer in range(LAYERS):
                ticket = w.submit(direction, layer, [make_job(direction, rows_of(direction, TABLE))], layer)
                assert w.engine.guard_read(ticket, 0)
            assert w.engine.fence(ticket, 0)
        assert not w.completed
        w.drain()
        assert len(w.completed) == 2 * LAYERS


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("copies", [0, 1, 3])
@on_devices
def test_an_error_between_copies_fails_the_ticket(kind: str, direction: Direction, copies: int) -> None:
    """A layer of which some copies were queued fails, early enough for its reader to know; the fence still holds."""
    with capture_logs(), world(kind) as w:
        w.device.copies_until_error = copies if kind != "fake_direct" else 0  # which does all in one launch
        job = make_job(7, [(0, 1, page, block) for page, block in enumerate((0, 2, 4, 6))])
        bad = w.submit(direction, 0, [job])
        assert bad.failed == {7}
        assert not bad.done
        assert w.engine.fence(bad, 0)
        assert len(w.device.compute.queue) == 2, "the record at the submission and the wait of the fence"
        good = w.submit(direction, 1, [job], 1)
        w.drain()
        assert bad.failed == {7}
        assert good.failed == NO_JOBS
        assert w.completed == [bad, good]


@on_devices
def test_an_error_on_the_device_fails_the_ticket(kind: str) -> None:
    """An error that CUDA reports only when the event is asked fails that ticket's jobs, in order, and no other's."""
    with capture_logs(), world(kind) as w:
        tickets = [w.submit(Direction.SAVE, layer, [make_job(4, rows_of(0, TABLE))], layer) for layer in range(LAYERS)]
        landed_of(tickets[1]).broken = True
        w.drain()
        assert w.completed == tickets
        assert [t.failed for t in tickets] == [NO_JOBS, {4}, NO_JOBS]


@on_devices
def test_a_lost_device_fails_tickets_and_guards(kind: str) -> None:
    """Where not even an event can be recorded, the ticket fails and no order is claimed; nothing raises."""
    with capture_logs(), world(kind) as w:
        job = make_job(4, rows_of(0, TABLE), Kind.LOAD_SYNC)
        before = w.submit(Direction.LOAD, 0, [job])
        w.device.lost = {"compute", "load"}
        ticket = w.submit(Direction.LOAD, 1, [job], 1)
        assert not w.engine.guard_read(ticket, 0)
        w.drain()
        assert w.completed == [before, ticket]
        assert ticket.failed == {4}


@pytest.mark.parametrize("late", Direction, ids=lambda d: f"fires-while-{d.name}-is-asked")
@on_devices
def test_a_failed_load_is_told_before_a_save_that_rests_on_it(kind: str, late: Direction) -> None:
    """Whenever the device gets on between two questions, news of a load precedes news of a save computed from it."""
    with world(kind) as w:
        asked = threading.Event()
        load = w.submit(Direction.LOAD, 0, [make_job(1, rows_of(0, TABLE), Kind.LOAD_SYNC)])
        assert w.engine.guard_read(load, 0)
        w.write_block(0, 0, 9)
        save = w.submit(Direction.SAVE, 0, [make_job(2, rows_of(1, TABLE))])
        event = landed_of(save if late is Direction.SAVE else load)
        ask = event.query

        def query() -> bool:
            answer = ask()
            w.device.drain()
            asked.set()
            return answer

        event.query = query  # type: ignore[method-assign]
        assert asked.wait(WAIT_S)
        assert save.wait(WAIT_S)
        assert w.completed == [load, save]


@on_devices
def test_the_pool_is_pinned_in_whole_slots(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of whole slots cover the pool once, without a gap, and `shutdown` unpins exactly what was pinned."""
    monkeypatch.setattr(CudaEngine, "piece_bytes", 3 * GEOMETRY.slot_bytes + 1)
    with world(kind) as w:
        pool = w.pool
        sizes = [3 * pool.slot_bytes, 3 * pool.slot_bytes, 2 * pool.slot_bytes]
        assert len(w.device.pin_log) == 1, "enough to measure in"
        make_ready(w)
        assert pool.ready == pool.slots
        assert [size for _, size in w.device.pin_log] == sizes
        assert [at - pool.base for at, _ in w.device.pin_log] == [0, sizes[0], sizes[0] + sizes[1]]
        w.engine.shutdown()
        assert w.device.pinned == {}


def test_a_piece_is_at_least_a_slot() -> None:
    """A slot larger than the piece limit is a piece of its own: no copy ever crosses two pieces."""
    pool, claimed = HostPool(GEOMETRY), list[tuple[int, int]]()
    Readier(pool, lambda *piece: claimed.append(piece), piece_bytes=1).begin("start")
    assert claimed == [(pool.base + i * pool.slot_bytes, pool.slot_bytes) for i in range(pool.slots)]


@on_devices
def test_a_pool_that_cannot_be_pinned_still_works(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where pinning fails there is one warning with a remedy, bytes are right, and only what is pinned is unpinned."""
    monkeypatch.setattr(CudaEngine, "piece_bytes", GEOMETRY.slot_bytes)
    with capture_logs() as logs, world(kind, device=FakeDevice(pins_max=2)) as w:
        make_ready(w)
        assert w.pool.ready == w.pool.slots, "all can be used"
        assert cast("CudaEngine", w.engine).pinned_slots == len(w.device.pin_log) == 2
        assert saves_are_right(w, TABLE)
        w.engine.shutdown()
        assert w.device.pinned == {}
    warnings = [entry for entry in logs if entry["log_level"] != "debug"]
    assert [(entry["event"], entry["pinned_pieces"]) for entry in warnings] == [("pool_not_pinned", 2)]
    assert "pool_bytes_max" in warnings[0]["remedy"]


@pytest.mark.parametrize(("where", "made"), [("cuda:0", CudaEngine), ("cpu", CpuEngine), ("xpu:0", None)])
def test_the_caches_choose_the_engine(where: str, made: type[TransferEngine] | None) -> None:
    """Caches on a CUDA device get the CUDA engine, those in host memory the CPU's; others are refused by name."""
    tensor = cast("torch.Tensor", SimpleNamespace(device=torch.device(where)))
    views = [PageView("layer.0", 0, 1, 64, 64, tensor)]
    side = WorkerSide(load_settings(), GEOMETRY)
    if made is None:
        with pytest.raises(UnsupportedError, match="'xpu' are not supported"):
            side._make_engine(views)
    else:
        assert type(side._make_engine(views)) is made


@on_devices
def test_a_hanging_device_does_not_hang_shutdown(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the device never gets on, `shutdown` returns, tickets fail, and memory it may still write stays pinned."""
    monkeypatch.setattr(cuda, "SHUTDOWN_S_MAX", 0.05)
    gate = threading.Event()
    with world(kind) as w:
        assert eventually(lambda: len(w.device.pinned) == 1)
        for stream in w.device.streams:
            monkeypatch.setattr(stream, "synchronize", gate.wait)
        ticket = w.submit(Direction.SAVE, 0, [make_job(3, rows_of(0, TABLE))])
        w.engine.shutdown()
        assert ticket.done
        assert ticket.failed == {3}
        assert w.device.pinned
        gate.set()
        thread = cast("CudaEngine", w.engine)._thread
        assert thread is not None
        thread.join(WAIT_S)
        assert not thread.is_alive()
        assert w.completed == [ticket]
