"""The movers are methods of copying a layer's pages between the paged cache and the host pool.

=========  ========================================================================================================
dma        The copy engines copy every run of pages that is adjacent on both sides. No kernel runs. Copies of less
           than 64 KiB are slow.
staged     For a save, a kernel gathers the pages into a bay in device memory, in microseconds. Then the copy engines
           copy whole spans from the bay to the slots. For a load, both steps run in reverse. A save's blocks may be
           reused as soon as the pages are gathered.
direct     A kernel copies pages between the cache and the slots. One launch copies any number of pages. The kernel
           occupies a few multiprocessors for as long as the bus takes.
pageable   torch copies to and from slots that are not pinned. These copies block the host.
=========  ========================================================================================================

A `DirectionQueues` has the streams and bays of one direction. All layers of one plan use the same mover, so the last
event of a plan covers all of its layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from enum import StrEnum
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from kvpipe.protocol.geometry import Geometry
from kvpipe.transfer.base import CopyPlan, Direction
from kvpipe.transfer.device import VECTOR_BYTES, WORD_BYTES, Device, DeviceEvent, Launch, Stream
from kvpipe.transfer.driver import CopyBatch, Ints
from kvpipe.transfer.pages import PageView
from kvpipe.transfer.pool import HostPool
from kvpipe.transfer.tables import RowTables

BAYS: Final = 2  # two bays, so that one bay is filled while the other bay is emptied
ROW_COLUMNS: Final = 5
TABLES_BYTES: Final = 4 << 20  # for each direction, enough for 100 steps of 128 requests with a chunk each


class Mover(StrEnum):
    """The movers, which the docstring of the module describes."""

    DMA = "dma"
    STAGED = "staged"
    DIRECT = "direct"
    PAGEABLE = "pageable"


class Alike(NamedTuple):
    """The layers [first, first + layers) of one group. One launch copies all of these layers.

    The layers have the same page size and stride.
    """

    group: int
    first: int
    layers: int


class BayTransfer(NamedTuple):
    """The content of one bay: rows [first, first + rows) of the group, of layers [layer, layer + layers)."""

    layer: int
    layers: int
    first: int
    rows: int


class SubmittedWork(NamedTuple):
    """The events of queued copies, for which later device work can wait.

    `landed` fires when the bytes have landed. `read` fires when the source may be overwritten.
    """

    landed: DeviceEvent
    read: DeviceEvent


Kept = dict[tuple[int, ...], tuple[Ints, Ints, Ints]]
"""For each kind of layer, arrays that its layers share: offsets on the host and on the device, numbers of bytes."""


class Layout:
    """The addresses of the paged caches, and of the slots of the host pool."""

    def __init__(self, views: Sequence[PageView], geometry: Geometry, pool: HostPool) -> None:
        """`views` has one view per layer, in the order of `geometry.layers`."""
        self.views, self.geometry, self.pool = tuple(views), geometry, pool
        self.groups = [group for group, _ in geometry.layers]
        self.offsets = [geometry.layer_offsets[group][index] for group, index in geometry.layers]
        self.places = np.array([*zip((v.base for v in views), self.offsets, strict=True)], np.int64).reshape(-1, 2)

    @cached_property
    def align(self) -> int:
        """The alignment of all addresses and sizes of kernels, in bytes: 16 or 8, or 0 if some are not aligned to 8."""
        sizes = [n for v in self.views for n in (v.base, v.page_bytes, v.stride_bytes)]
        every = int(np.gcd.reduce([self.pool.base, self.pool.slot_bytes, *sizes, *self.offsets]))
        return next((n for n in (VECTOR_BYTES, WORD_BYTES) if every % n == 0), 0)

    def layer_bytes(self, plan: CopyPlan, layer: int) -> int:
        """Return the bytes of one layer of a plan."""
        return len(plan.rows[self.groups[layer]]) * self.views[layer].page_bytes

    def alike(self, layers: Sequence[int]) -> Iterable[Alike]:
        """Return `_alike(layers)`, where `layers` has each layer at most once. The result for all layers is cached."""
        return self._whole if len(layers) == len(self.views) else self._alike(layers)

    @cached_property
    def _whole(self) -> list[Alike]:
        return list(self._alike(range(len(self.views))))

    def _alike(self, layers: Sequence[int]) -> Iterator[Alike]:
        """Divide `layers` into runs with equal group, page size and stride that are adjacent in a slot.

        Layers may be apart in a slot, because vLLM's specification may pad a layer's bytes.
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
        """Divide `alike` into transfers that fit a bay: several layers with all rows, or ranges of one layer's rows."""
        size, rows, end = self.views[alike.first].page_bytes, len(plan.rows[alike.group]), alike.first + alike.layers
        deep = bay_bytes // max(1, rows * size)
        if deep:
            for layer in range(alike.first, end, deep):
                yield BayTransfer(layer, min(deep, end - layer), 0, rows)
            return
        step = bay_bytes // size
        for layer in range(alike.first, end):
            for first in range(0, rows, step):
                yield BayTransfer(layer, 1, first, min(step, rows - first))

    def spans(self, plan: CopyPlan, piece: BayTransfer, bay: int, kept: Kept) -> CopyBatch:
        """Return the copies of spans between a bay and slots.

        A bay holds ``[span][layer][page]`` and a slot holds ``[layer][page]``. So one copy moves all layers of a whole
        chunk.
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
            whole, deep = self.geometry.pages_per_chunk[group], np.arange(piece.layers, dtype=np.int64)
            full = pages == whole
            each = (host, staged, sizes) if not full.any() else (host[~full], staged[~full], sizes[~full])
            apart = (
                (each[0][:, None] + deep * (whole * size)).ravel(),
                (each[1][:, None] + each[2][:, None] * deep).ravel(),
                np.repeat(each[2], piece.layers),
            )
            if each[0] is host:
                return apart
            host, staged = np.append(host[full], apart[0]), np.append(staged[full], apart[1])
            sizes = np.append(sizes[full] * piece.layers, apart[2])
        return host, staged, np.ascontiguousarray(sizes)

    def table(self, plan: CopyPlan) -> tuple[np.ndarray[Any, np.dtype[np.int32]], list[int]]:
        """Return the kernel's rows of all groups, int32, shape (n, ROW_COLUMNS), and the first row of each group."""
        parts, firsts = [], [0]
        for rows, cuts in zip(plan.rows, plan.cuts, strict=True):
            pages = np.diff(np.append(cuts, len(rows)))
            parts.append(np.column_stack([rows, np.repeat(cuts, pages) + firsts[-1], np.repeat(pages, pages)]))
            firsts.append(firsts[-1] + len(rows))
        return np.concatenate(parts).astype(np.int32), firsts[:-1]


class Prepared:
    """The data that `DirectionQueues` keeps for a plan, in addition to the plan's rows."""

    __slots__ = ("firsts", "kept", "mover", "start", "table")

    def __init__(
        self, mover: Mover, start: DeviceEvent | None, table: object = None, firsts: Sequence[int] = ()
    ) -> None:
        """A load runs after the event `start`.

        `table` has the kernel's rows. `firsts` has the index of each group's first row.
        """
        self.mover, self.start, self.table, self.firsts = mover, start, table, firsts
        self.kept: Kept = {}


class _Bay:
    """A part of the staging memory. `free` is the event after the bay's last use, or None for an unused bay."""

    __slots__ = ("address", "free")

    def __init__(self, address: int) -> None:
        self.address = address
        self.free: DeviceEvent | None = None


class DirectionQueues:
    """The queues of one direction: a stream for the copy engines, a stream for kernels, and the bays between them."""

    def __init__(self, device: Device, direction: Direction, layout: Layout, staging: torch.Tensor | None) -> None:
        """`staging` is the device memory of the bays, uint8. It is None without bays."""
        self.device, self.direction, self.layout = device, direction, layout
        name = direction.name.lower()
        self.bus: Stream = device.stream(f"{name}-bus")
        self.kernel: Stream = device.stream(f"{name}-kernel")
        self._staging = staging
        self.bay_bytes = 0 if staging is None else staging.numel() // BAYS // VECTOR_BYTES * VECTOR_BYTES
        base = 0 if staging is None else staging.data_ptr()
        self._bays = [_Bay(base + i * self.bay_bytes) for i in range(BAYS)]
        self._turn = 0
        self._tables: RowTables | None = None
        self.places: object = None

    def hold_tables(self) -> None:
        """Allocate the memory for uploads of row tables now, so that no step has to allocate memory.

        Raises:
            Exception: the device's exception if the device or the host has no memory left.

        """
        self._tables = RowTables(self.device, self.kernel, TABLES_BYTES)

    def over(self, layout: Layout) -> DirectionQueues:
        """Return a copy of these queues with the same streams and bays, for the caches of `layout`."""
        made = copy(self)
        made.move(layout)
        return made

    def move(self, layout: Layout) -> None:
        """Use the caches of `layout` from now on. The next upload includes the caches' addresses."""
        self.layout, self.places = layout, None

    def prepare(self, plan: CopyPlan, mover: Mover, start: DeviceEvent | None) -> Prepared:
        """Upload the table that the mover needs on the device. A load must run after the event `start`."""
        if mover not in {Mover.STAGED, Mover.DIRECT}:
            return Prepared(mover, start)
        table, firsts = self.layout.table(plan)
        return Prepared(mover, start, self._upload(table), firsts)

    def warm(self, *, staged: bool, direct: bool) -> None:
        """Compile the kernels for every page size, before any step."""
        table = self._upload(np.zeros((1, ROW_COLUMNS), np.int32))
        for layer in {view.page_bytes: layer for layer, view in enumerate(self.layout.views)}.values():
            # each launch has no rows, so it compiles the kernel and copies nothing
            for bay in [self._bays[0].address] * staged + [None] * direct:
                self.device.launch(self.kernel, self._arguments(table, 0, BayTransfer(layer, 1, 0, 0), bay))

    def queue(self, plan: CopyPlan, prepared: Prepared, layers: Sequence[int], start: DeviceEvent) -> SubmittedWork:
        """Queue the copies of `layers`, which begin after the event `start`. The device's exceptions are passed on."""
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
        """Return an event that fires after all work that was queued so far."""
        self.bus.wait_event(self.kernel.record_event())
        made: DeviceEvent = self.bus.record_event()
        return made

    def synchronize(self) -> None:
        """Block the host until all queued work is done."""
        self.kernel.synchronize()
        self.bus.synchronize()

    def _staged(self, plan: CopyPlan, prepared: Prepared, layers: Sequence[int], start: DeviceEvent) -> SubmittedWork:
        saving = plan.direction is Direction.SAVE
        self.kernel.wait_event(start)  # only the kernel's stream waits, because only the kernel touches the caches
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
        if landed is None or read is None:  # true if the plan has no rows for these layers
            landed = read = self.kernel.record_event()
        return SubmittedWork(landed, read if saving else landed)

    def _upload(self, table: np.ndarray[Any, np.dtype[np.int32]]) -> object:
        """Upload a table of rows. Before the first table, upload the layers' addresses too."""
        if self.places is None:
            self.places = self.device.upload(self.kernel, self.layout.places)
        held = self._tables.upload(table) if self._tables is not None else None
        return self.device.upload(self.kernel, table) if held is None else held

    def _copy(self, copies: CopyBatch) -> None:
        """Queue copies between slots and the device.

        The slots of a load are `settled`, because their saves have completed.
        """
        if len(copies.sizes):
            self.device.copy_batch(self.bus, copies, settled=self.direction is Direction.LOAD)

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
