"""A pool becomes resident from its beginning to its end, before its use, and only while memory is free."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

import numpy as np
import pytest

from kvpipe.machine import headroom
from kvpipe.machine.headroom import Headroom, tightest
from kvpipe.protocol.geometry import Geometry, Group, Layer
from kvpipe.testing.waiting import eventually
from kvpipe.transfer import ready
from kvpipe.transfer.pool import HostPool
from kvpipe.transfer.ready import Manners, Readier

GROUP = Group((Layer("a", 4096),), block_tokens=16)
SLOT = 16 << 10
GIB = 1 << 30
ENTRY_BYTES = 8
PLENTY = Headroom(GIB, GIB, "plenty")


def make_pool(slots: int) -> HostPool:
    """Return a pool of slots of 16 KiB."""
    return HostPool(Geometry((GROUP,), 64, slots * SLOT))


def in_memory(pool: HostPool) -> int:
    """Return the number of bytes of the pool that are resident in memory."""
    page = mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb") as pagemap:
        pagemap.seek(pool.base // page * ENTRY_BYTES)
        entries = np.frombuffer(pagemap.read(pool.slots * SLOT // page * ENTRY_BYTES), "<u8")
    return int((entries >> np.uint64(63)).sum()) * page


class Rig:
    """A readier, and its reports."""

    def __init__(self, slots: int = 64, piece_slots: int = 4, **options: object) -> None:
        """`options` are arguments of the readier."""
        self.pool, self.claimed, self.short = make_pool(slots), list[tuple[int, int]](), list[Headroom]()
        self.done: list[float] = []
        self.refuses = False
        self.room: Headroom | None = PLENTY
        self.readier = Readier(
            self.pool,
            self.claim,
            piece_bytes=piece_slots * SLOT,
            done=self.done.append,
            short=self.short.append,
            room=lambda: self.room,
            **options,  # type: ignore[arg-type]
        )

    def claim(self, address: int, size: int) -> bool:
        """Record the first slot and the number of claimed slots. All claimed slots must be resident."""
        self.claimed.append(((address - self.pool.base) // SLOT, size // SLOT))
        return not self.refuses

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread."""
        self.readier.stop()
        assert self.readier._thread is None or not self.readier._thread.is_alive()


@pytest.mark.parametrize("how", ["ahead", "start"])
def test_slots_become_ready_in_order(how: ready.How) -> None:
    """Slots become ready in order, after they are resident and claimed.

    With `start` all slots are ready when `begin` returns.
    """
    with Rig(slots=66) as rig:
        rig.readier.begin(how)
        assert how == "ahead" or rig.pool.ready == 66
        assert eventually(lambda: rig.pool.ready == 66)
        assert in_memory(rig.pool) >= 66 * SLOT
        assert rig.claimed == [(first, min(4, 66 - first)) for first in range(0, 66, 4)]
        assert eventually(lambda: len(rig.done) == 1)


def test_no_slot_is_touched_if_pages_are_mapped_on_use() -> None:
    """With `use` every slot counts as ready at once. Every slot is still claimed."""
    with Rig() as rig:
        rig.readier.begin("use")
        assert rig.pool.ready == 64
        assert eventually(lambda: len(rig.claimed) == 16)


def test_a_slot_is_not_touched_once_it_is_ready() -> None:
    """Bytes that are written to a slot as soon as the slot is ready are not overwritten."""
    with Rig(slots=60, piece_slots=1) as rig:
        words = rig.pool.tensor.numpy()

        def fill(*_: int) -> bool:
            done = rig.pool.ready
            words[:done] = np.where(words[:done] == 0, 7, words[:done])
            return True

        rig.readier._claim = fill
        rig.readier.begin("start")
        assert (words[: rig.pool.ready - 1] == 7).all()


def test_a_pool_that_does_not_fit_stops_growing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without free memory, no more slots become ready, and one warning is logged.

    When memory becomes free, more slots become ready.
    """
    monkeypatch.setattr(ready, "SHORT_S", 0.001)
    keep = GIB // 20  # the reserve for a limit of 1 GiB
    with Rig(piece_slots=16) as rig:
        rig.readier._room = lambda: (
            rig.room or Headroom(keep + 32 * SLOT - len(rig.claimed) * 16 * SLOT, GIB, "a limit")
        )
        rig.room = None
        rig.readier.begin("ahead")
        assert eventually(lambda: bool(rig.short))
        assert rig.pool.ready == 32
        assert in_memory(rig.pool) >= 32 * SLOT  # the kernel may add huge pages, or neighbours of touched pages
        rig.room = PLENTY
        assert eventually(lambda: rig.pool.ready == 64)
        assert [room.where for room in rig.short] == ["a limit"], "told once"


def test_start_does_not_wait_for_missing_memory() -> None:
    """With `start` and too little memory, the engine starts with the slots that fit."""
    with Rig() as rig:
        rig.room = Headroom(0, GIB, "a limit")
        rig.readier.begin("start")
        assert rig.pool.ready == 0
        assert len(rig.short) == 1


def test_whole_pool_is_made_ready_if_the_free_memory_is_unknown() -> None:
    """If the free memory is unknown, the whole pool is made ready."""
    with Rig() as rig:
        rig.room = None
        rig.readier.begin("start")
        assert rig.pool.ready == 64


@pytest.mark.parametrize("busy", [True, False])
def test_readier_pauses_on_cores_of_the_forward(busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the engine is busy, the thread mostly pauses if it shares cores with the forward.

    While the engine is idle it does not pause.
    """
    monkeypatch.setattr(ready, "STROKE_BYTES", SLOT)
    rests: list[float] = []
    with Rig(manners=Manners(share=0.25, busy=lambda: busy)) as rig:
        monkeypatch.setattr(rig.readier._stop, "wait", rests.append)
        rig.readier.begin("start")
        assert len(rests) == (64 if busy else 0)


@pytest.mark.parametrize("busy", [True, False])
def test_readier_rests_after_each_claim_while_the_engine_is_busy(busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread pauses after each claim, because pinning delays every launch.

    After the last claim the thread does not pause.
    """
    rests: list[float] = []
    with Rig(manners=Manners(claim_share=0.05, busy=lambda: busy)) as rig:
        monkeypatch.setattr(rig.readier._stop, "wait", rests.append)
        rig.readier.begin("start")
        assert rig.pool.ready == 64
        assert len(rests) == (15 if busy else 0)


def test_readier_keeps_its_priority_on_its_own_cores() -> None:
    """The thread runs on the given cores with the process's own priority.

    With a lower priority, it would keep its locks longer, and delay the threads that wait for them.
    """
    cpus = frozenset([max(os.sched_getaffinity(0))])
    found: list[tuple[frozenset[int], int]] = []

    def look(*_: int) -> bool:
        thread = threading.get_native_id()
        found.append((frozenset(os.sched_getaffinity(0)), os.getpriority(os.PRIO_PROCESS, thread)))
        return True

    with Rig(manners=Manners(cpus)) as rig:
        rig.readier._claim = look
        rig.readier.begin("start")
        assert len(found) == 16
        assert found[-1] == (cpus, os.getpriority(os.PRIO_PROCESS, 0))


def test_slots_are_used_before_they_are_in_memory_where_nothing_is_pinned() -> None:
    """The thread that brings slots into memory touches only slots after the used slots, so it overwrites no chunk."""
    gate, begun = threading.Event(), threading.Event()

    def claim(*_: int) -> bool:
        begun.set()
        return rig.readier._at == 0 or gate.wait()

    with Rig(slots=60, demand_bytes_max=GIB) as rig:
        rig.readier._claim = claim
        rig.readier.begin("ahead")
        assert rig.readier._at == 4, "the first piece"
        assert rig.pool.ready == 60
        rig.readier.use(41)
        rig.pool.tensor[4:41] = 7
        gate.set()
        assert eventually(lambda: rig.readier._at == 60)
        assert (rig.pool.tensor[8:41] == 7).all()
        assert in_memory(rig.pool) >= 60 * SLOT
        assert eventually(lambda: len(rig.done) == 1)


def test_slots_used_on_demand_are_bounded_by_the_free_memory() -> None:
    """While memory is free, the number of usable slots grows with the number of used slots."""
    with Rig(slots=60, demand_bytes_max=GIB) as rig:
        rig.room = Headroom(GIB // 20 + 12 * SLOT, GIB, "a limit")
        rig.readier._claim = lambda *_: rig.readier._at == 0
        rig.readier.begin("ahead")
        assert rig.pool.ready == 4 + 12
        rig.readier.use(10)
        assert rig.pool.ready == 10 + 12
        rig.room = Headroom(0, GIB, "a limit")
        rig.readier.use(15)
        assert rig.pool.ready == 10 + 12


def test_slots_are_counted_under_a_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's thread and the readier's thread both increase `ready` under a lock, so no update is lost."""
    locked = list[bool]()

    class Watched(HostPool):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "ready":
                locked.append(rig.readier._lock.locked())
            super().__setattr__(name, value)

    with Rig(slots=60, demand_bytes_max=GIB) as rig:
        rig.room = Headroom(GIB // 20 + 12 * SLOT, GIB, "a limit")
        rig.readier._claim = lambda *_: rig.readier._at == 0
        rig.readier.begin("ahead")
        monkeypatch.setattr(rig.pool, "__class__", Watched)
        rig.readier.use(30)
        assert rig.pool.ready == 42
        assert locked == [True]


def test_slots_that_cannot_be_claimed_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots that cannot be claimed are not used. `start` does not wait for them.

    These slots are used after a later claim succeeds.
    """
    monkeypatch.setattr(ready, "SHORT_S", 0.001)
    with Rig(piece_slots=16) as rig:
        claim = rig.readier._claim
        rig.readier._claim = lambda at, size: claim(at, size) or at < rig.pool.base + 32 * SLOT
        rig.refuses = True
        rig.readier.begin("start")
        assert rig.pool.ready == 32
        assert eventually(lambda: rig.claimed[-2:] == [(32, 16), (32, 16)])
        assert rig.pool.ready == 32
        rig.refuses = False
        assert eventually(lambda: rig.pool.ready == 64)
        assert not rig.short, "there was memory"


def test_pages_are_touched_near_the_device() -> None:
    """Cores near the device touch the pages. Among these cores, cores that the thread may use come first."""
    mine = sorted(os.sched_getaffinity(0))
    for near, given in ((mine[:1], mine), (mine[-1:], [])):
        found = set[frozenset[int]]()
        with Rig(manners=Manners(frozenset(given))) as rig:
            rig.pool.near = frozenset(near)
            rig.readier._claim = lambda *_, found=found: found.add(frozenset(os.sched_getaffinity(0))) is None  # type: ignore[misc]
            rig.readier._next()
            found.clear()
            rig.readier.begin("start")
        assert frozenset(near) in found


def test_stop_ends_the_readier_in_the_middle() -> None:
    """After `stop` no more slots are touched, and no thread waits for the remaining slots."""
    gate = threading.Event()
    with Rig(piece_slots=1) as rig:
        claim: Callable[[int, int], bool] = lambda *_: rig.pool.ready != 2 or gate.wait()  # noqa: E731
        rig.readier._claim = claim
        rig.readier.begin("ahead")
        assert eventually(lambda: rig.pool.ready == 2)
        rig.readier._stop.set()
        gate.set()
        rig.readier.stop()
        assert rig.pool.ready == 3
        rig.readier.stop()


def test_an_error_is_contained() -> None:
    """After an error, the slots that were ready before the error are still used."""
    with Rig(piece_slots=32) as rig:

        def fail(*_: int) -> bool:
            if rig.pool.ready:
                raise RuntimeError
            return True

        rig.readier._claim = fail
        rig.readier.begin("start")
        assert rig.pool.ready == 32


def test_free_memory_of_this_machine_is_known() -> None:
    """The result names the source of the number, and is less than the free memory."""
    room = tightest()
    assert room is not None
    assert 0 <= room.spare < room.free <= room.total
    assert room.where


def test_free_memory_is_unknown_without_proc(tmp_path: Path) -> None:
    """Without /proc the free memory is unknown, which is not an error."""
    assert tightest(tmp_path, tmp_path) is None
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\n")
    assert tightest(tmp_path, tmp_path) is None


def test_reserve_is_5_percent_and_at_most_1_gib() -> None:
    """The reserve for other programs is 5 % of the limit, but at most 1 GiB."""
    assert Headroom(10 * GIB, 10 * GIB, "").spare == 10 * GIB - GIB // 2
    assert Headroom(100 * GIB, 100 * GIB, "").spare == 99 * GIB
    assert headroom.RESERVE_BYTES_MAX == GIB
