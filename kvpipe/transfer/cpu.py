"""The CPU engine copies between paged cache and pool with native code, in parallel with the forward or within it.

One thread per direction copies while the forward computes. With ``threads=0`` the calling thread copies, which is
better if the forward's own threads use every core. To order compute after a copy, the caller waits for the copy.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvpipe.machine.cores import bind_this_thread
from kvpipe.protocol.geometry import Geometry
from kvpipe.trace.log import log
from kvpipe.transfer.base import NO_JOBS, CopyPlan, Direction, Ticket
from kvpipe.transfer.pages import PageView
from kvpipe.transfer.pool import HostPool

_memmove = ctypes.memmove
_WORD = 8
_TORCH_BYTES_MIN = 65_536  # `memmove` copies fewer bytes faster than torch
_QueuedCopy = tuple[CopyPlan, Ticket] | None


class CpuEngine:
    """The implementation of `TransferEngine` for caches in host memory."""

    piece_bytes = 64 << 20

    def __init__(self, threads: int, cpus: frozenset[int] = frozenset()) -> None:
        """`threads` is 0 or 1 per direction. `cpus` has the cores that the threads may use. Empty means all cores."""
        self._threads, self._cpus = threads, cpus
        self._lanes: dict[Direction, _CopyThread] = {}
        self._views: tuple[PageView, ...] = ()
        self._closed = False

    def attach(self, views: Sequence[PageView], geometry: Geometry, pool: HostPool) -> None:
        """Bind the paged cache and the pool."""
        self._views, self._geometry, self._pool = tuple(views), geometry, pool
        self._words = tuple(map(_as_words, self._views))
        self._host_bytes = pool.flat.numpy()

    def claim(self, address: int, size: int) -> bool:  # noqa: ARG002
        """Return True. The bytes are resident, and this engine needs no pinned memory."""
        return True

    def prepare(self, plan: CopyPlan) -> None:
        """Order the loads of `plan` after all compute enqueued so far.

        This method does nothing, because on a CPU all earlier compute has ended before the call.
        """

    def submit(self, plan: CopyPlan, ticket: Ticket) -> None:
        """Copy the layers `ticket.layers` of `plan`, and complete the ticket when the bytes have landed."""
        if self._closed:
            ticket.complete(frozenset(job.id for job in plan.jobs))
        elif self._threads == 0:
            self._run(plan, ticket)
        else:
            lane = self._lanes.get(plan.direction)
            if lane is None:
                lane = self._lanes[plan.direction] = _CopyThread(plan.direction.name.lower(), self._run, self._cpus)
            lane.queue.put((plan, ticket))

    def guard_read(self, ticket: Ticket, timeout_s: float) -> bool:
        """Order the caller's next compute after the copy."""
        return ticket.wait(timeout_s)

    def reached(self, ticket: Ticket) -> None:
        """Do nothing, because this engine delays no layer."""

    def fence(self, ticket: Ticket, timeout_s: float) -> bool:
        """Wait for the copy. Copies of a plan complete in order, so waiting for the last copy is enough."""
        return ticket.wait(timeout_s)

    def abandon(self, ticket: Ticket) -> bool:
        """Give up a copy. Returns False for a copy that has begun and is not over, because it cannot be stopped."""
        return ticket.withdraw()

    def scrub(self, plan: CopyPlan, jobs: frozenset[int]) -> None:
        """Zero the blocks of `jobs`, see `_scrub`."""
        for layer in range(len(self._views)):
            self._scrub(plan, layer, jobs)

    def shutdown(self) -> None:
        """Finish the submitted copies and end the threads."""
        self._closed = True
        for lane in self._lanes.values():
            lane.stop()

    def _run(self, plan: CopyPlan, ticket: Ticket) -> None:
        failed = frozenset(job.id for job in plan.jobs)
        try:
            if ticket.begin():
                failed = self._copy(plan, ticket.layers)
        except Exception:
            log.exception("copy_failed", layer=ticket.layer)
        finally:
            ticket.complete(failed)

    def _copy(self, plan: CopyPlan, layers: Iterable[int]) -> frozenset[int]:
        """Copy `layers` of `plan`. Returns the ids of the jobs that have failed."""
        bad = NO_JOBS
        for layer in layers:
            failed = self.copy_layer(plan, layer)
            if failed and plan.direction is Direction.LOAD:
                self._scrub(plan, layer, failed)
            bad |= failed
        return bad

    def _scrub(self, plan: CopyPlan, layer: int, failed: frozenset[int]) -> None:
        """Zero the blocks of failed loads before attention reads them.

        The step's results from these blocks are discarded in any case. But without the zeros, a NaN could remain in the
        freed blocks. The weight of a masked position is 0, and 0 times NaN is NaN, so the block's next owner would
        compute NaN.
        """
        group, _ = self._geometry.layers[layer]
        for run in plan.run_list(group):
            if run.job in failed:
                self._views[layer].tensor[run.block : run.block + run.pages] = 0

    def copy_layer(self, plan: CopyPlan, layer: int) -> frozenset[int]:
        """Copy one layer of `plan` on the calling thread. Returns the ids of the jobs that have failed."""
        group, index = self._geometry.layers[layer]
        view, words, offset = self._views[layer], self._words[layer], self._geometry.layer_offsets[group][index]
        saving, size, flat = plan.direction is Direction.SAVE, view.page_bytes, self._pool.flat
        slot_bytes, pool, dense, stride = self._pool.slot_bytes, self._pool.base, view.dense, view.stride_bytes
        for slot, first, pages, block, adjacent, blocks in plan.spans(group):
            at, n = slot * slot_bytes + offset + first * size, pages * size
            if (adjacent and dense) or pages == 1:
                if n < _TORCH_BYTES_MIN:
                    host, paged = pool + at, view.base + block * stride
                    _memmove(host if saving else paged, paged if saving else host, n)
                    continue
                a = torch.as_strided(flat, (n,), (1,), at)
                b = torch.as_strided(view.tensor, (n,), (1,), view.tensor.storage_offset() + block * stride)
                (a if saving else b).copy_(b if saving else a)
            elif saving:  # torch gathers faster than numpy, which would first copy a whole strided cache
                out = torch.as_strided(flat, (pages, size), (size, 1), at)
                torch.index_select(view.tensor, 0, torch.from_numpy(blocks), out=out)
            else:
                words[blocks] = self._host(at, pages, size)
        return NO_JOBS

    def _host(self, at: int, pages: int, page_bytes: int) -> npt.NDArray[Any]:
        """Return `pages` pages of the pool from byte `at` on, as an array like that of `_as_words`."""
        region = self._host_bytes[at : at + pages * page_bytes].reshape(pages, page_bytes)
        return region.view(np.int64) if page_bytes % _WORD == 0 else region


def _as_words(view: PageView) -> npt.NDArray[Any]:
    """Return the paged cache as words of 8 bytes, shape (blocks, words), or as bytes if a size is no multiple of 8."""
    pages: npt.NDArray[np.uint8] = view.tensor.numpy()
    whole = view.page_bytes % _WORD == 0 and view.stride_bytes % _WORD == 0
    return pages.view(np.int64) if whole else pages


class _CopyThread:
    """One thread that copies the items of its queue in order."""

    def __init__(self, name: str, run: object, cpus: frozenset[int]) -> None:
        self.queue: SimpleQueue[_QueuedCopy] = SimpleQueue()
        self._run, self._cpus = run, cpus
        self._thread = threading.Thread(target=self._main, name=f"kvpipe-{name}", daemon=True)
        self._thread.start()

    def _main(self) -> None:
        if self._cpus:
            bind_this_thread(self._cpus)
        while (work := self.queue.get()) is not None:
            self._run(*work)  # type: ignore[operator]

    def stop(self) -> None:
        self.queue.put(None)
        self._thread.join(5.0)
