"""The CPU engine: native copies between the engine's paged cache and the pool, beside or inside the forward.

One thread per direction copies while the forward computes; with ``threads=0`` the caller copies, which is better when
the forward's own threads use every core. A host core is the device here, so ordering is waiting.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from queue import SimpleQueue

import structlog

from kvpipe.geometry import Geometry
from kvpipe.tiers.memory import HostPool
from kvpipe.transfer.base import NO_JOBS, CopyPlan, Direction, Ticket
from kvpipe.transfer.pages import PageView

log = structlog.get_logger("kvpipe.transfer")

_memmove = ctypes.memmove
_Work = tuple[CopyPlan, Ticket] | None


class CpuEngine:
    """Implements `TransferEngine` for caches in host memory."""

    def __init__(self, threads: int, cpus: frozenset[int] = frozenset()) -> None:
        """`threads`: 0 or 1 per direction. `cpus`: cores that the threads may use; empty: any."""
        self._threads, self._cpus = threads, cpus
        self._lanes: dict[Direction, _Lane] = {}
        self._views: tuple[PageView, ...] = ()
        self._closed = False

    def attach(self, views: Sequence[PageView], geometry: Geometry, pool: HostPool) -> None:
        """See `TransferEngine.attach`."""
        self._views, self._geometry, self._pool = tuple(views), geometry, pool

    def submit(self, plan: CopyPlan, ticket: Ticket) -> None:
        """See `TransferEngine.submit`."""
        if self._closed:
            ticket.complete(frozenset(job.id for job in plan.jobs))
        elif self._threads == 0:
            self._run(plan, ticket)
        else:
            lane = self._lanes.get(plan.direction)
            if lane is None:
                lane = self._lanes[plan.direction] = _Lane(plan.direction.name.lower(), self._run, self._cpus)
            lane.queue.put((plan, ticket))

    def guard_read(self, ticket: Ticket, timeout_s: float) -> bool:
        """See `TransferEngine.guard_read`."""
        return ticket.wait(timeout_s)

    def fence(self, ticket: Ticket, timeout_s: float) -> bool:
        """See `TransferEngine.fence`. Copies of one direction complete in order, so the last one stands for all."""
        return ticket.wait(timeout_s)

    def shutdown(self) -> None:
        """See `TransferEngine.shutdown`."""
        self._closed = True
        for lane in self._lanes.values():
            lane.stop()

    def _run(self, plan: CopyPlan, ticket: Ticket) -> None:
        try:
            failed = self.copy_layer(plan, ticket.layer)
        except Exception:
            log.exception("copy_failed", layer=ticket.layer)
            failed = frozenset(job.id for job in plan.jobs)
        if failed and plan.direction is Direction.LOAD:
            self._scrub(plan, ticket.layer, failed)
        ticket.complete(failed)

    def _scrub(self, plan: CopyPlan, layer: int, failed: frozenset[int]) -> None:
        """Zero the blocks of failed loads before attention reads them.

        The step computes garbage from them in any case, and it is thrown away; but a NaN would stay behind in the
        freed blocks, and a masked position times NaN is NaN for the block's next owner.
        """
        group, _ = self._geometry.layers[layer]
        for run in plan.run_list(group):
            if run.job in failed:
                self._views[layer].tensor[run.block : run.block + run.pages] = 0

    def copy_layer(self, plan: CopyPlan, layer: int) -> frozenset[int]:
        """Copy one layer of `plan` on the calling thread; return the ids of jobs that failed."""
        group, index = self._geometry.layers[layer]
        runs = plan.runs[group]
        if not len(runs):
            return NO_JOBS
        view = self._views[layer]
        offset = self._pool.base + self._geometry.layer_offsets[group][index]
        slots = (runs[:, 1] * self._geometry.slot_bytes + runs[:, 2] * view.page_bytes + offset).tolist()
        blocks = (runs[:, 3] * view.stride_bytes + view.base).tolist()
        dst, src = (slots, blocks) if plan.direction is Direction.SAVE else (blocks, slots)
        if view.dense:
            for d, s, n in zip(dst, src, (runs[:, 4] * view.page_bytes).tolist(), strict=True):
                _memmove(d, s, n)
            return NO_JOBS
        d_step, s_step = view.page_bytes, view.stride_bytes
        if plan.direction is Direction.LOAD:
            d_step, s_step = s_step, d_step
        for d, s, pages in zip(dst, src, runs[:, 4].tolist(), strict=True):
            for i in range(pages):
                _memmove(d + i * d_step, s + i * s_step, view.page_bytes)
        return NO_JOBS


class _Lane:
    """One copying thread, fed in order."""

    def __init__(self, name: str, run: object, cpus: frozenset[int]) -> None:
        self.queue: SimpleQueue[_Work] = SimpleQueue()
        self._run, self._cpus = run, cpus
        self._thread = threading.Thread(target=self._main, name=f"kvpipe-{name}", daemon=True)
        self._thread.start()

    def _main(self) -> None:
        if self._cpus:
            os.sched_setaffinity(0, self._cpus)  # the calling thread only
        while (work := self.queue.get()) is not None:
            self._run(*work)  # type: ignore[operator]

    def stop(self) -> None:
        self.queue.put(None)
        self._thread.join(5.0)
