"""The CUDA engine on a simulated device. The tests also prove that a missing wait never stays unnoticed."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from kvpipe.config.settings import load_settings
from kvpipe.errors import UnsupportedError
from kvpipe.protocol.messages import Kind
from kvpipe.testing.fake_device import CAPTURING, ILLEGAL_ACCESS, FakeDevice, FakeStream, landed_of
from kvpipe.testing.logged import capture_logs
from kvpipe.testing.transfer_programs import loads_are_right, saves_are_right, schedules, slots_are_right, tables
from kvpipe.testing.transfer_worlds import FAKES, GEOMETRY, LAYERS, World, job_rows, make_job, world
from kvpipe.testing.waiting import WAIT_S, eventually
from kvpipe.transfer import cuda, pinning, ready
from kvpipe.transfer.base import NO_JOBS, CopyPlan, Direction, TransferEngine
from kvpipe.transfer.cpu import CpuEngine
from kvpipe.transfer.cuda import CudaEngine
from kvpipe.transfer.driver import CopyBatch
from kvpipe.transfer.movers import Mover
from kvpipe.transfer.pinning import Pins
from kvpipe.transfer.pool import HostPool
from kvpipe.transfer.ready import Readier
from kvpipe.worker.engines import EngineOptions, make_engine

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
"""Every wait of the engine: (stream that waits, stream that is waited for, test program that needs the wait)."""


def make_ready(w: World) -> None:
    """Make the whole pool of the world ready, as a rank does at start-up."""
    Readier(w.pool, w.engine.claim, piece_bytes=w.engine.piece_bytes).begin("start")


@pytest.mark.parametrize(
    ("mover", "waits", "waits_for", "program"), [(m, *wait) for m, waits in WAITS.items() for wait in waits]
)
def test_a_forgotten_wait_is_found(mover: str, waits: str, waits_for: str, program: Program) -> None:
    """If any one of the engine's waits is missing, at least one schedule gives wrong bytes."""

    def breaks(drawn: tuple[dict[int, list[int]], list[int]]) -> bool:
        table, schedule = drawn
        with world(f"fake_{mover}", device=FakeDevice(forgets=[(waits, waits_for)]), schedule=schedule) as w:
            return not program(w, table)

    few = settings(max_examples=1500, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
    find(st.tuples(tables, schedules), breaks, settings=few)  # `find` raises an error if no schedule breaks the program


@on_devices
def test_the_host_never_waits(kind: str) -> None:
    """On a device that runs no work, submissions, guards and fences return, although no ticket is complete."""
    with world(kind) as w:
        for direction in Direction:
            for layer in range(LAYERS):
                ticket = w.submit(direction, layer, [make_job(direction, job_rows(direction, TABLE))], layer)
                assert w.engine.guard_read(ticket, 0)
            assert w.engine.fence(ticket, 0)
        assert not w.completed
        w.drain()
        assert len(w.completed) == 2 * LAYERS


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("copies", [0, 1, 3])
@on_devices
def test_an_error_between_copies_fails_the_ticket(kind: str, direction: Direction, copies: int) -> None:
    """If an error interrupts the queueing of a layer, the layer's ticket fails before the reader waits.

    The fence still works.
    """
    with capture_logs(), world(kind) as w:
        w.device.copies_until_error = copies if kind != "fake_direct" else 0  # `direct` makes all copies in one launch
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
    """An error that CUDA reports at an event's query fails the jobs of this ticket only, in order."""
    with capture_logs(), world(kind) as w:
        tickets = [w.submit(Direction.SAVE, layer, [make_job(4, job_rows(0, TABLE))], layer) for layer in range(LAYERS)]
        landed_of(tickets[1]).broken = True
        w.drain()
        assert w.completed == tickets
        assert [t.failed for t in tickets] == [NO_JOBS, {4}, NO_JOBS]


@pytest.mark.parametrize("direction", Direction)
@on_devices
def test_failed_query_does_not_end_the_copy(kind: str, direction: Direction) -> None:
    """If an event's query raises on a working device, the ticket fails. The ticket ends when its copies have ended."""
    with capture_logs() as logs, world(kind) as w:
        jobs = [make_job(4, job_rows(0, TABLE), Kind.SAVE if direction is Direction.SAVE else Kind.LOAD_SYNC)]
        with w.stopped():
            ticket = w.submit(direction, 0, jobs)
            behind = w.submit(direction, 1, [make_job(5, job_rows(1, TABLE), Kind(jobs[0].kind))])
            landed_of(ticket).refusals = 1
        assert eventually(lambda: bool(ticket.failed))
        assert not ticket.over
        assert not w.engine.abandon(ticket)
        assert any(stream.queue for stream in w.device.streams)
        w.drain()
        assert w.completed == [ticket, behind]
        assert ticket.failed == {4}
        assert behind.failed == NO_JOBS
    assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == ["copy_failed"]


@on_devices
def test_a_save_is_not_trusted_while_a_load_is_in_doubt(kind: str) -> None:
    """If the query of a load's event raised, the load is reported only when the load's stream is empty.

    Until the report saves fail, because they may have been computed from the load.
    """
    with capture_logs() as logs, world(kind) as w:
        with w.stopped():
            load = w.submit(Direction.LOAD, 0, [make_job(1, job_rows(0, TABLE), Kind.LOAD_SYNC)])
            assert w.engine.guard_read(load, 0)
            w.write_block(0, 0, 9)
            save = w.submit(Direction.SAVE, 0, [make_job(2, job_rows(1, TABLE))])
        event = landed_of(load)

        def query() -> bool:
            w.device.drain()
            raise RuntimeError(CAPTURING)

        event.query = query  # type: ignore[method-assign]
        assert save.wait(WAIT_S)
        assert save.failed == {2}
        assert not load.over
        w.drain()
        assert load.failed == {1}
    assert len([entry for entry in logs if entry["event"] == "copy_failed"]) == 1


@on_devices
def test_copy_with_a_failed_query_fails_at_the_end(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A query of the copy's event has raised, and then the device hangs. `shutdown` completes every ticket once."""
    monkeypatch.setattr(cuda, "SHUTDOWN_S_MAX", 0.05)
    gate = threading.Event()
    with capture_logs(), world(kind) as w:
        for stream in w.device.streams:
            monkeypatch.setattr(stream, "synchronize", gate.wait)
        tickets = [w.submit(Direction.SAVE, layer, [make_job(3, job_rows(0, TABLE))], layer) for layer in range(LAYERS)]
        landed_of(tickets[0]).refusals = 1
        assert eventually(lambda: bool(tickets[0].failed))
        w.engine.shutdown()
        assert w.completed == tickets
        gate.set()


@on_devices
def test_a_lost_device_fails_tickets_and_guards(kind: str) -> None:
    """If no event can be recorded, the ticket fails, guards and fences return False, and no error is raised."""
    with capture_logs(), world(kind) as w:
        job = make_job(4, job_rows(0, TABLE), Kind.LOAD_SYNC)
        before = w.submit(Direction.LOAD, 0, [job])
        w.device.lost = {"compute", "load"}
        ticket = w.submit(Direction.LOAD, 1, [job], 1)
        assert not w.engine.guard_read(ticket, 0)
        w.drain()
        assert w.completed == [before, ticket]
        assert ticket.failed == {4}


@pytest.mark.parametrize("late", Direction, ids=lambda d: f"fires-while-{d.name}-is-asked")
@on_devices
def test_a_failed_load_is_reported_before_a_save_that_rests_on_it(kind: str, late: Direction) -> None:
    """A failed load is reported before a save that was computed from the load, even if both end between two queries."""
    with world(kind) as w:
        asked = threading.Event()
        load = w.submit(Direction.LOAD, 0, [make_job(1, job_rows(0, TABLE), Kind.LOAD_SYNC)])
        assert w.engine.guard_read(load, 0)
        w.write_block(0, 0, 9)
        save = w.submit(Direction.SAVE, 0, [make_job(2, job_rows(1, TABLE))])
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
    """The pinned ranges are whole slots and cover the pool once, without gaps.

    `shutdown` unpins exactly these ranges.
    """
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


def test_calibration_gets_its_bytes_in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start-up pins only the bytes that calibration needs, in small ranges."""
    monkeypatch.setattr(CudaEngine, "piece_bytes", 2 * GEOMETRY.slot_bytes)
    monkeypatch.setattr(cuda, "FIRST_BYTES", 5 * GEOMETRY.slot_bytes)
    device = FakeDevice()
    with world("", engine=lambda: CudaEngine(device), where="cpu") as w:
        assert [size for _, size in device.pin_log] == 2 * [2 * GEOMETRY.slot_bytes]
        make_ready(w)
        assert [size for _, size in device.pin_log] == 4 * [2 * GEOMETRY.slot_bytes]
        assert w.pool.ready == w.pool.slots


class Pinning(FakeDevice):
    """A device that records the begin of each pin, and ends the pin only when `gate` is set."""

    def __init__(self, name: str, gate: threading.Event, seen: list[str]) -> None:
        super().__init__()
        self.name, self.gate, self.seen = name, gate, seen

    def register(self, address: int, size: int) -> None:
        """Record the begin, wait for `gate`, and record the end."""
        self.seen.append(f"{self.name} begins")
        assert self.gate.wait(WAIT_S)
        super().register(address, size)
        self.seen.append(f"{self.name} ends")


def pin_two(monkeypatch: pytest.MonkeyPatch, path: Path) -> list[str]:
    """Pin in two simulated processes. The second process begins while the first process pins."""
    gate, seen = threading.Event(), list[str]()
    monkeypatch.setattr(pinning, "TURNS", path)
    # the second process sleeps while it waits for its turn
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: gate.set())
    monkeypatch.setattr(pinning, "time", clock)
    pools = [HostPool(GEOMETRY) for _ in range(2)]
    pins = [Pins(Pinning(name, gate, seen), pool) for name, pool in zip("ab", pools, strict=True)]
    threads = [threading.Thread(target=p.claim, args=(p.pool.base, GEOMETRY.slot_bytes)) for p in pins]
    threads[0].start()
    assert eventually(lambda: bool(seen))
    threads[1].start()
    assert eventually(lambda: gate.is_set() or "b begins" in seen)
    gate.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert [one.slots for one in pins] == [1, 1]
    return seen


def test_piece_that_begins_before_the_last_one_ends_is_pinned() -> None:
    """If few slots of a node's memory exist at start-up, the first pinned range is small.

    The next range begins before the small range ends, and is still pinned.
    """
    pool, device = HostPool(GEOMETRY), FakeDevice()
    pins, size = Pins(device, pool), pool.slot_bytes
    for first, slots in ((0, 1), (0, 3), (1, 1), (3, 1)):
        assert pins.claim(pool.base + first * size, slots * size)
    assert device.pinned == {pool.base: size, pool.base + size: 2 * size, pool.base + 3 * size: size}
    assert pins.slots == 4


def test_one_process_of_a_machine_pins_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one process of a machine pins at a time, because all launches on the machine wait while a process pins."""
    monkeypatch.setattr(pinning, "TURN_S_MAX", WAIT_S)
    assert pin_two(monkeypatch, tmp_path / "lock") == ["a begins", "a ends", "b begins", "b ends"]


@pytest.mark.parametrize(("folder", "turn_s_max"), [("nowhere", WAIT_S), (".", 0.0)])
def test_pinning_does_not_depend_on_another_process(
    folder: str, turn_s_max: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process also pins if there is no file to lock, or if another process never releases the lock."""
    monkeypatch.setattr(pinning, "TURN_S_MAX", turn_s_max)
    assert pin_two(monkeypatch, tmp_path / folder / "lock")[:2] == ["a begins", "b begins"]


def test_a_piece_is_at_least_a_slot() -> None:
    """A slot that is larger than `piece_bytes` is pinned alone, so no copy crosses two pinned ranges."""
    pool, claimed = HostPool(GEOMETRY), list[tuple[int, int]]()

    def claim(*piece: int) -> bool:
        claimed.append((piece[0], piece[1]))
        return True

    Readier(pool, claim, piece_bytes=1).begin("start")
    assert claimed == [(pool.base + i * pool.slot_bytes, pool.slot_bytes) for i in range(pool.slots)]


@on_devices
def test_slots_that_cannot_be_pinned_are_not_used(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only pinned slots are used, so no plan needs the mover `pageable`.

    More slots are used when pinning succeeds later.
    """
    monkeypatch.setattr(CudaEngine, "piece_bytes", GEOMETRY.slot_bytes)
    monkeypatch.setattr(ready, "SHORT_S", 0.001)
    with capture_logs() as logs, world(kind, device=FakeDevice(pins_max=2)) as w:
        engine = cast("CudaEngine", w.engine)
        readier = Readier(w.pool, engine.claim, piece_bytes=engine.piece_bytes)
        readier.begin("start")
        assert w.pool.ready == engine.pinned_slots == len(w.device.pin_log) == 2
        plan = CopyPlan(Direction.SAVE, [make_job(1, [(0, slot, 0, slot) for slot in range(w.pool.ready)])], 2)
        engine.prepare(plan)
        assert plan.mover == kind.partition("_")[2]
        w.device.pins_max = 1 << 30
        assert eventually(lambda: w.pool.ready == engine.pinned_slots == w.pool.slots)
        readier.stop()
        w.engine.shutdown()
        assert w.device.pinned == {}
    warnings = [entry for entry in logs if entry["log_level"] != "debug"]
    assert [(entry["event"], entry["pinned_slots"]) for entry in warnings] == [("pool_not_pinned", 2)], "once"
    assert "pool_bytes_max" in warnings[0]["remedy"]


def test_nothing_is_pinned_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the engine's end no slot is pinned, because the pool's memory may have been freed."""
    monkeypatch.setattr(CudaEngine, "piece_bytes", GEOMETRY.slot_bytes)
    with world("fake_dma") as w:
        w.engine.shutdown()
        assert w.engine.claim(w.pool.base + w.pool.slot_bytes, w.pool.slot_bytes)
        assert w.device.pinned == {}


@on_devices
def test_a_pool_that_cannot_be_pinned_still_works(kind: str) -> None:
    """If no memory can be pinned, one warning with a remedy is logged, all slots are used, and bytes are right."""
    with capture_logs() as logs, world(kind, device=FakeDevice(pins_max=0)) as w:
        make_ready(w)
        assert w.pool.ready == w.pool.slots
        assert saves_are_right(w, TABLE)
    warnings = [entry["event"] for entry in logs if entry["log_level"] != "debug"]
    assert warnings == ["pool_not_pinned"]


@pytest.mark.parametrize(("where", "made"), [("cuda:0", CudaEngine), ("cpu", CpuEngine), ("xpu:0", None)])
def test_the_caches_choose_the_engine(where: str, made: type[TransferEngine] | None) -> None:
    """Caches on a CUDA device get the CUDA engine, and caches in host memory get the CPU's engine.

    Other devices are refused by name.
    """
    device, options = torch.device(where).type, EngineOptions(load_settings())
    if made is None:
        with pytest.raises(UnsupportedError, match="'xpu' are not supported"):
            make_engine(device, options)
    else:
        assert type(make_engine(device, options)) is made


@on_devices
def test_a_hanging_device_does_not_hang_shutdown(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the device hangs, `shutdown` returns, tickets fail, and memory that copies may still write stays pinned."""
    monkeypatch.setattr(cuda, "SHUTDOWN_S_MAX", 0.05)
    gate = threading.Event()
    with world(kind) as w:
        assert eventually(lambda: len(w.device.pinned) == 1)
        for stream in w.device.streams:
            monkeypatch.setattr(stream, "synchronize", gate.wait)
        ticket = w.submit(Direction.SAVE, 0, [make_job(3, job_rows(0, TABLE))])
        w.engine.shutdown()
        assert ticket.done
        assert ticket.failed == {3}
        assert w.device.pinned
        gate.set()
        for thread in cast("CudaEngine", w.engine)._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        assert w.completed == [ticket]


@on_devices
def test_a_dead_context_is_reported_once(kind: str) -> None:
    """After an error of the CUDA context, the engine logs one traceback and fails every ticket in order."""
    with capture_logs() as logs, world(kind) as w:
        before = [w.submit(Direction.SAVE, layer, [make_job(1, job_rows(0, TABLE))], layer) for layer in range(LAYERS)]
        w.device.dead = ILLEGAL_ACCESS
        after = [
            w.submit(d, layer, [make_job(2 + d, job_rows(d, TABLE))], layer) for d in Direction for layer in (0, 1)
        ]
        assert not w.engine.guard_read(after[-1], 0) or after[-1].over
        assert eventually(lambda: all(ticket.done for ticket in w.tickets))
        assert all(ticket.failed for ticket in w.tickets)
        assert [t for t in w.completed if t in before] == before
        w.engine.shutdown()
    assert [entry["event"] for entry in logs] == ["device_lost"]


@pytest.mark.parametrize("kind", FAKES)
@pytest.mark.parametrize("streams_max", [1, 2, 3])
@settings(max_examples=10, deadline=None)
@given(table=tables, schedule=schedules)
def test_lanes_may_share_streams(kind: str, streams_max: int, table: dict[int, list[int]], schedule: list[int]) -> None:
    """Torch may return the same stream twice, or the compute stream. Even then bytes are right and no thread hangs."""
    for program in (saves_are_right, loads_are_right):
        device = FakeDevice(streams_max=streams_max)
        with world(kind, device=device, schedule=schedule) as w:
            assert program(w, table)


@on_devices
def test_abandon_does_not_query_the_device(kind: str) -> None:
    """`abandon` does not query the device, because a query by the watchdog would make the capture of a graph fail."""
    with world(kind) as w:
        ticket = w.submit(Direction.SAVE, 0, [make_job(1, job_rows(0, TABLE))])
        event = landed_of(ticket)
        askers = set[str]()
        ask = event.query

        def query() -> bool:
            askers.add(threading.current_thread().name)
            return ask()

        event.query = query  # type: ignore[method-assign]
        assert not w.engine.abandon(ticket)
        w.drain()
        assert w.engine.abandon(ticket)
        assert askers <= {"kvpipe-landed"}


@on_devices
def test_completions_can_be_waited_for(kind: str) -> None:
    """With blocking events no thread polls.

    An event is queried after it has fired, and loads are reported before saves.
    """
    with world(kind, poll_us_min=0) as w:
        load = w.submit(Direction.LOAD, 0, [make_job(1, job_rows(0, TABLE), Kind.LOAD_SYNC)])
        assert w.engine.guard_read(load, 0)
        save = w.submit(Direction.SAVE, 0, [make_job(2, job_rows(1, TABLE))])
        assert eventually(lambda: w.device.waits == 2), "a thread per direction"
        assert not w.completed
        w.drain()
        assert w.completed == [load, save]
        assert landed_of(load).asked + landed_of(save).asked <= 4
        assert saves_are_right(w, TABLE)


@pytest.mark.parametrize(("lag_us", "threads"), [(30.0, 3), (900.0, 1), (-1.0, 1)])
def test_completions_are_awaited_as_measured(lag_us: float, threads: int) -> None:
    """If sleeping threads wake up soon enough, each direction has a waiting thread, and one more thread queues copies.

    Otherwise one thread polls.
    """
    device = FakeDevice()
    device.lag_us = lag_us
    engine = CudaEngine(device, mover=Mover.DMA, poll_us_min=None, calibrate_s_max=0)
    with capture_logs(), world("fake_dma", engine=lambda: engine, device=device) as w:
        assert len(engine._threads) == threads
        assert saves_are_right(w, TABLE)


@pytest.mark.parametrize(("completions", "poll_us_min"), [("auto", None), ("poll", cuda.POLL_US_MIN), ("block", 0)])
def test_the_setting_chooses_how_completions_are_awaited(completions: str, poll_us_min: int | None) -> None:
    """With the setting `poll` or `block` the wake-up time is not measured."""
    engine = make_engine("cuda", EngineOptions(load_settings({"completions": completions})))
    assert cast("CudaEngine", engine)._poll_us_min == poll_us_min


@pytest.mark.parametrize("mover", ["dma", "staged"])
def test_only_loads_read_their_sources_in_any_order(mover: str) -> None:
    """A save is queued while its blocks are still computed, so the order of its reads matters.

    A load is queued after its slots were filled.
    """
    with world(f"fake_{mover}") as w:
        asked: dict[str, set[bool]] = {}
        queue = w.device.copy_batch

        def copy_batch(stream: FakeStream, copies: CopyBatch, *, settled: bool) -> None:
            asked.setdefault(stream.name, set()).add(settled)
            queue(stream, copies, settled=settled)

        w.device.copy_batch = copy_batch  # type: ignore[method-assign]
        assert saves_are_right(w, TABLE)
        assert loads_are_right(w, TABLE)
        assert asked == {"save-bus": {False}, "load-bus": {True}}


@pytest.mark.parametrize("mover", ["dma", "staged"])
def test_a_save_in_any_order_is_found(mover: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated device reads early from sources that are marked as settled.

    So a save that is wrongly marked has wrong bytes.
    """
    queue = FakeDevice.copy_batch
    monkeypatch.setattr(FakeDevice, "copy_batch", lambda *a, settled: queue(*a, settled=True))  # noqa: ARG005
    with world(f"fake_{mover}") as w:
        assert not saves_are_right(w, TABLE)


def test_a_load_that_does_not_wait_for_its_save_is_found() -> None:
    """On the device a staged load does not wait for saves.

    If the host did not order the use of slots, at least one schedule would give wrong bytes.
    """

    def breaks(drawn: tuple[dict[int, list[int]], list[int]]) -> bool:
        table, schedule = drawn
        with world("fake_staged", schedule=schedule) as w:
            return not slots_are_right(w, table, awaited=False)

    few = settings(max_examples=1500, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
    find(st.tuples(tables, schedules), breaks, settings=few)


EXIT = """
import atexit, sys, threading, time
from kvpipe.testing.fake_device import FakeDevice
from kvpipe.testing.transfer_worlds import GEOMETRY, World
from kvpipe.transfer.ready import Readier
from kvpipe.transfer.cuda import CudaEngine

class Slow(FakeDevice):
    def register(self, address, size):
        begun.set()
        time.sleep(0.2)
        super().register(address, size)

device, begun = FakeDevice(), threading.Event()
atexit.register(lambda: print(len(device.pin_log), len(device.pinned)))
CudaEngine.piece_bytes = GEOMETRY.slot_bytes
w = World("fake_dma", device=device)
device.__class__ = Slow
Readier(w.pool, w.engine.claim, piece_bytes=GEOMETRY.slot_bytes).begin("ahead")
begun.wait()
"""


def test_a_process_may_end_while_it_pins() -> None:
    """If a process ends without `shutdown`, it waits for the pin under way, pins no more, and unpins all slots."""
    ran = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    tried, left = map(int, ran.stdout.split())
    assert 2 <= tried < GEOMETRY.slots
    assert left == 0
