"""The movers: ways to copy a layer's pages between the paged cache and the host pool, each by a few queue operations.

=========  ========================================================================================================
dma        The copy engines copy every run of pages that is adjacent on both sides. No kernel; slow below 64 KiB.
staged     For a save, a kernel gathers the pages into a bay in device memory, in microseconds, and the copy engines
           copy whole spans from the bay to the slots; for a load, the reverse. A save's blocks are free as soon as
           they are gathered.
direct     A kernel copies pages between the cache and the slots. One launch, however many pages; it keeps a few
           multiprocessors busy for as long as the bus takes.
pageable   torch's copies, for slots that are not pinned. They block the host.
=========  ========================================================================================================

A `DirectionQueues` has the streams and bays of one direction. All layers of one plan use the same mover, so the last
event of a plan covers all of its layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from enum import StrEnum
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from kvpipe.geometry import Geometry
from kvpipe.transfer.base import CopyPlan, Direction
from kvpipe.transfer.device import VECTOR_BYTES, WORD_BYTES, CopyBatch, Device, DeviceEvent, Ints, Launch, Stream
from kvpipe.transfer.pages import PageView
from kvpipe.transfer.pool import HostPool
from kvpipe.transfer.tables import Tables

BAYS: Final = 2  # one fills while the other empties
ROW_COLUMNS: Final = 5
TABLES_BYTES: Final = 4 << 20  # per direction: 100 steps of 128 requests with a chunk each


class Mover(StrEnum):
    """How pages are copied: see the module."""

    DMA = "dma"
    STAGED = "staged"
    DIRECT = "direct"
    PAGEABLE = "pageable"


class Alike(NamedTuple):
    """`layers` layers of one group from `first` on, of equal page size and stride: one launch copies them."""

    group: int
    first: int
    layers: int


class BayTransfer(NamedTuple):
    """One filling of a bay: `rows` rows from row `first` of the group on, of `layers` layers from `layer` on."""

    layer: int
    layers: int
    first: int
    rows: int


class SubmittedWork(NamedTuple):
    """Events that later device work can wait for: the bytes have landed; the source can be overwritten."""

    landed: DeviceEvent
    read: DeviceEvent


Kept = dict[tuple[int, ...], tuple[Ints, Ints, Ints]]
"""By kind of layer, the arrays that all its layers share: offsets on the host, offsets on the device, bytes."""


class Layout:
    """The addresses of the paged caches, and of the slots of the host pool."""

    def __init__(self, views: Sequence[PageView], geometry: Geometry, pool: HostPool) -> None:
        """`views`: one per layer, in the order of `geometry.layers`."""
        self.views, self.geometry, self.pool = tuple(views), geometry, pool
        self.groups = [group for group, _ in geometry.layers]
        self.offsets = [geometry.layer_offsets[group][index] for group, index in geometry.layers]
        self.places = np.array([*zip((v.base for v in views), self.offsets, strict=True)], np.int64).reshape(-1, 2)

    @cached_property
    def align(self) -> int:
        """The largest of 16 and 8 that divides every address and size that a kernel would use, or 0."""
        sizes = [n for v in self.views for n in (v.base, v.page_bytes, v.stride_bytes)]
        every = int(np.gcd.reduce([self.pool.base, self.pool.slot_bytes, *sizes, *self.offsets]))
        return next((n for n in (VECTOR_BYTES, WORD_BYTES) if every % n == 0), 0)

    def layer_bytes(self, plan: CopyPlan, layer: int) -> int:
        """Return the bytes of one layer of a plan."""
        return len(plan.rows[self.groups[layer]]) * self.views[layer].page_bytes

    def alike(self, layers: Sequence[int]) -> Iterator[Alike]:
        """Divide `layers` where group, page size or stride changes, or where layers are not adjacent in a slot.

        They need not be adjacent: vLLM's specification may pad a layer's part of a slot.
        """
        if len(layers) == 1:
            yield Alike(self.groups[layers[0]], layers[0], 1)
            return
        run: list[int] = []
        for layer in sorted(layers):
            if run and not self._follows(layer, run[-1]):
                yield Alike(self.groups[run[0]], run[0], len(run))
                run = []
            run.append(layer)
        if run:
            yield Alike(self.groups[run[0]], run[0], len(run))

    def _follows(self, layer: int, before: int) -> bool:
        size = self.geometry.pages_per_chunk[self.groups[before]] * self.views[before].page_bytes
        adjacent = layer == before + 1 and self.offsets[layer] == self.offsets[before] + size
        return adjacent and self._kind(layer) == self._kind(before)

    def _kind(self, layer: int) -> tuple[int, int, int]:
        view = self.views[layer]
        return self.groups[layer], view.page_bytes, view.stride_bytes

    def runs(self, plan: CopyPlan, alike: Alike, kept: Kept) -> CopyBatch:
        """Return the copies of runs of pages between cache and slots, for all layers of `alike`."""
        view = self.views[alike.first]
        size, stride = view.page_bytes, view.stride_bytes
        key = (alike.group, size, stride)
        if key not in kept:
            if view.dense:
                _, slot, page, block, pages = plan.runs[alike.group].T
            else:
                slot, page, block = plan.rows[alike.group].T
                pages = np.ones_like(page)
            kept[key] = (slot * self.pool.slot_bytes + page * size, block * stride, np.ascontiguousarray(pages * size))
        host, paged, sizes = kept[key]
        if alike.layers == 1:
            host, paged = host + (self.pool.base + self.offsets[alike.first]), paged + view.base
        else:
            deep = slice(alike.first, alike.first + alike.layers)
            host = np.add.outer(self.places[deep, 1] + self.pool.base, host).ravel()
            paged, sizes = np.add.outer(self.places[deep, 0], paged).ravel(), np.tile(sizes, alike.layers)
        return CopyBatch(host, paged, sizes) if plan.direction is Direction.SAVE else CopyBatch(paged, host, sizes)

    def pieces(self, plan: CopyPlan, alike: Alike, bay_bytes: int) -> Iterator[BayTransfer]:
        """Divide `alike` into parts that fit into a bay: all of it, or else ranges of rows of single layers."""
        size, rows = self.views[alike.first].page_bytes, len(plan.rows[alike.group])
        if alike.layers * rows * size <= bay_bytes:
            yield BayTransfer(alike.first, alike.layers, 0, rows)
            return
        step = bay_bytes // size
        for layer in range(alike.first, alike.first + alike.layers):
            for first in range(0, rows, step):
                yield BayTransfer(layer, 1, first, min(step, rows - first))

    def spans(self, plan: CopyPlan, piece: BayTransfer, bay: int, kept: Kept) -> CopyBatch:
        """Return the copies of spans between a bay and slots.

        A bay holds ``[span][layer][page]``, a slot ``[layer][page]``: a whole chunk is one copy for all layers.
        """
        group, size = self.groups[piece.layer], self.views[piece.layer].page_bytes
        key = (group, size, piece.layers, piece.first, piece.rows)
        if key not in kept:
            kept[key] = self._spans(plan, piece, group, size)
        host, staged, sizes = kept[key]
        host, staged = host + (self.pool.base + self.offsets[piece.layer]), staged + bay
        return CopyBatch(host, staged, sizes) if plan.direction is Direction.SAVE else CopyBatch(staged, host, sizes)

    def _spans(self, plan: CopyPlan, piece: BayTransfer, group: int, size: int) -> tuple[Ints, Ints, Ints]:
        """Return (offset from the layer's first slot, offset in the bay, bytes) of the spans of a piece."""
        rows, cuts = plan.rows[group], plan.cuts[group]
        last = piece.first + piece.rows
        begin, end = np.searchsorted(cuts, piece.first, "right") - 1, np.searchsorted(cuts, last, "left")
        first = np.maximum(cuts[begin:end], piece.first)
        pages = np.diff(np.append(first, last))
        slot, page, _ = rows[first].T
        host = slot * self.pool.slot_bytes + page * size
        staged = (first - piece.first) * piece.layers * size
        sizes = pages * size
        if piece.layers > 1:
            whole = self.geometry.pages_per_chunk[group]
            full = pages == whole
            part, deep = np.flatnonzero(~full), np.arange(piece.layers, dtype=np.int64)
            host = np.append(host[full], np.add.outer(host[part], deep * whole * size).ravel())
            staged = np.append(staged[full], (staged[part, None] + np.outer(sizes[part], deep)).ravel())
            sizes = np.append(sizes[full] * piece.layers, np.repeat(sizes[part], piece.layers))
        return host, staged, np.ascontiguousarray(sizes)

    def table(self, plan: CopyPlan) -> tuple[np.ndarray[Any, np.dtype[np.int32]], list[int]]:
        """Return (the kernel's rows of all groups, int32, shape (n, ROW_COLUMNS); the first row of each group)."""
        parts, firsts = [], [0]
        for rows, cuts in zip(plan.rows, plan.cuts, strict=True):
            pages = np.diff(np.append(cuts, len(rows)))
            parts.append(np.column_stack([rows, np.repeat(cuts, pages) + firsts[-1], np.repeat(pages, pages)]))
            firsts.append(firsts[-1] + len(rows))
        return np.concatenate(parts).astype(np.int32), firsts[:-1]


class Prepared:
    """What `DirectionQueues` keeps of a plan beside its rows."""

    __slots__ = ("firsts", "kept", "mover", "start", "table")

    def __init__(
        self, mover: Mover, start: DeviceEvent | None, table: object = None, firsts: Sequence[int] = ()
    ) -> None:
        """`start`: the event that a load must come after. `table`: the kernel's rows; `firsts`: of each group."""
        self.mover, self.start, self.table, self.firsts = mover, start, table, firsts
        self.kept: Kept = {}


class _Bay:
    """A part of the staging memory. `free`: the event after its last use; None: it was never used."""

    __slots__ = ("address", "free")

    def __init__(self, address: int) -> None:
        self.address = address
        self.free: DeviceEvent | None = None


class DirectionQueues:
    """One direction: a stream for the copy engines, one for kernels, and the bays between them."""

    def __init__(self, device: Device, direction: Direction, layout: Layout, staging: torch.Tensor | None) -> None:
        """`staging`: device memory for the bays, uint8; None: there are none."""
        self.device, self.direction, self.layout = device, direction, layout
        name = direction.name.lower()
        self.bus: Stream = device.stream(f"{name}-bus")
        self.kernel: Stream = device.stream(f"{name}-kernel")
        self._staging = staging
        self.bay_bytes = 0 if staging is None else staging.numel() // BAYS // VECTOR_BYTES * VECTOR_BYTES
        base = 0 if staging is None else staging.data_ptr()
        self._bays = [_Bay(base + i * self.bay_bytes) for i in range(BAYS)]
        self._turn = 0
        self._tables: Tables | None = None
        self.places: object = None

    def hold_tables(self) -> None:
        """Allocate the memory for uploads of row tables, so that no step has to.

        Raises:
            Exception: whatever the device raises when there is no memory.

        """
        self._tables = Tables(self.device, self.kernel, TABLES_BYTES)

    def over(self, layout: Layout) -> DirectionQueues:
        """Return a copy with the same streams and bays, for other caches."""
        made = copy(self)
        made.layout, made.places = layout, None
        return made

    def prepare(self, plan: CopyPlan, mover: Mover, start: DeviceEvent | None) -> Prepared:
        """Upload what the mover needs on the device. `start`: the event that a load must come after."""
        if mover not in {Mover.STAGED, Mover.DIRECT}:
            return Prepared(mover, start)
        table, firsts = self.layout.table(plan)
        return Prepared(mover, start, self._upload(table), firsts)

    def warm(self, *, staged: bool, direct: bool) -> None:
        """Compile the kernels for every page size, before any step."""
        table = self._upload(np.zeros((1, ROW_COLUMNS), np.int32))
        for layer in {view.page_bytes: layer for layer, view in enumerate(self.layout.views)}.values():
            for bay in [self._bays[0].address] * staged + [None] * direct:  # of no rows: nothing is copied
                self.device.launch(self.kernel, self._arguments(table, 0, BayTransfer(layer, 1, 0, 0), bay))

    def queue(self, plan: CopyPlan, prepared: Prepared, layers: Sequence[int], start: DeviceEvent) -> SubmittedWork:
        """Queue the copies of `layers`, which begin after the event `start`. Raises what the device raises."""
        if prepared.mover is Mover.STAGED:
            return self._staged(plan, prepared, layers, start)
        if prepared.mover is Mover.DIRECT:
            self.kernel.wait_event(start)
            for alike in self.layout.alike(layers):
                piece = BayTransfer(alike.first, alike.layers, 0, len(plan.rows[alike.group]))
                self._launch(prepared, alike.group, piece, None)
            landed = self.kernel.record_event()
            return SubmittedWork(landed, landed)
        self.bus.wait_event(start)
        if prepared.mover is Mover.PAGEABLE:
            self.device.copy(self.bus, self._pairs(plan, layers))
        else:
            for alike in self.layout.alike(layers):
                self._copy(self.layout.runs(plan, alike, prepared.kept))
        landed = self.bus.record_event()
        return SubmittedWork(landed, landed)

    def end(self) -> DeviceEvent:
        """Return an event after everything that was queued."""
        self.bus.wait_event(self.kernel.record_event())
        made: DeviceEvent = self.bus.record_event()
        return made

    def synchronize(self) -> None:
        """Block the host until everything is done."""
        self.kernel.synchronize()
        self.bus.synchronize()

    def _staged(self, plan: CopyPlan, prepared: Prepared, layers: Sequence[int], start: DeviceEvent) -> SubmittedWork:
        saving = plan.direction is Direction.SAVE
        self.kernel.wait_event(start)  # bays are private: only the kernel has to wait
        landed = read = None
        for alike in self.layout.alike(layers):
            for piece in self.layout.pieces(plan, alike, self.bay_bytes):
                bay = self._bays[self._turn]
                self._turn = (self._turn + 1) % BAYS
                first, second = (self.kernel, self.bus) if saving else (self.bus, self.kernel)
                if bay.free is not None:
                    first.wait_event(bay.free)
                if saving:
                    self._launch(prepared, alike.group, piece, bay.address)
                else:
                    self._copy(self.layout.spans(plan, piece, bay.address, prepared.kept))
                read = first.record_event()
                second.wait_event(read)
                if saving:
                    self._copy(self.layout.spans(plan, piece, bay.address, prepared.kept))
                else:
                    self._launch(prepared, alike.group, piece, bay.address)
                landed = bay.free = second.record_event()
        if landed is None or read is None:  # no rows of these layers
            landed = read = self.kernel.record_event()
        return SubmittedWork(landed, read if saving else landed)

    def _upload(self, table: np.ndarray[Any, np.dtype[np.int32]]) -> object:
        """Upload a table of rows; before the first one, the layers' addresses too."""
        if self.places is None:
            self.places = self.device.upload(self.kernel, self.layout.places)
        held = self._tables.upload(table) if self._tables is not None else None
        return self.device.upload(self.kernel, table) if held is None else held

    def _copy(self, copies: CopyBatch) -> None:
        if len(copies.sizes):
            self.device.copy_batch(self.bus, copies)

    def _launch(self, prepared: Prepared, group: int, piece: BayTransfer, bay: int | None) -> None:
        if piece.rows:
            launch = self._arguments(prepared.table, prepared.firsts[group] + piece.first, piece, bay)
            self.device.launch(self.kernel, launch)

    def _arguments(self, table: object, first: int, piece: BayTransfer, bay: int | None) -> Launch:
        view, pool = self.layout.views[piece.layer], self.layout.pool
        return Launch(
            table, self.places, bay, pool.base, pool.slot_bytes, view.stride_bytes, view.page_bytes,
            first, piece.rows, piece.layer, piece.layers,
            saving=self.direction is Direction.SAVE, align=self.layout.align,
        )  # fmt: skip

    def _pairs(self, plan: CopyPlan, layers: Sequence[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for layer in layers:
            view, offset = self.layout.views[layer], self.layout.offsets[layer]
            for _, slot, page, block, pages in plan.run_list(self.layout.groups[layer]):
                start = offset + page * view.page_bytes
                host = self.layout.pool.tensor[slot, start : start + pages * view.page_bytes]
                host, paged = host.view(pages, view.page_bytes), view.tensor[block : block + pages]
                to, source = (host, paged) if plan.direction is Direction.SAVE else (paged, host)
                if view.dense:
                    yield to, source
                else:
                    yield from zip(to, source, strict=True)
