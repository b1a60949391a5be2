"""The transfer protocol: the calls that the pipeline makes to a transfer engine, and what an engine must guarantee.

An engine copies one layer of one batch of jobs per submission. It completes the submissions of one plan in the order in
which they were submitted, each exactly once, from any thread. `prepare` and `submit` never raise: a copy that fails
completes its ticket with the jobs that have failed.

The engine orders copies against the caller's compute, and nothing else. *Slots are ordered by the host*: a load from a
slot is submitted only after the save into it has completed, and a save into a slot only after all loads from it have.
So no engine makes a load wait for a save, or a save for a load.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvpipe.messages import ROW_BYTES, Job, table_of

if TYPE_CHECKING:
    from kvpipe.geometry import Geometry
    from kvpipe.transfer.pages import PageView
    from kvpipe.transfer.pool import HostPool

NO_JOBS: frozenset[int] = frozenset()
"""`Ticket.failed` of a copy that succeeded."""


class TicketState(Enum):
    """The states of `kvpipe/statemachine/ticket.py`, by name, in a form for which the data plane needs no pydantic."""

    QUEUED, BEGUN, WITHDRAWN, OVER, DONE = "QUEUED", "BEGUN", "WITHDRAWN", "OVER", "DONE"


QUEUED, BEGUN, WITHDRAWN, OVER, DONE = TicketState
QUIET: Final = (OVER, DONE, WITHDRAWN)
"""The states in which a ticket's copy touches no memory any more. A tuple, because an enum member's hash is slow."""
_LEAVING: Final = threading.Lock()
"""Held by the thread that moves a ticket out of `QUEUED`. All tickets share it: it is held for about a microsecond."""


class Direction(IntEnum):
    """The direction of a copy: SAVE is device to host, LOAD is host to device."""

    SAVE = 0
    LOAD = 1


class Run(NamedTuple):
    """One contiguous copy for one job: `pages` pages of `slot` from `page` on, and as many blocks from `block` on."""

    job: int
    slot: int
    page: int
    block: int
    pages: int


class SlotSpan(NamedTuple):
    """`pages` adjacent pages of one slot, from `page` on: contiguous on the host side.

    `blocks`: the block of each page, shape (pages,). `adjacent`: these are adjacent too, from `block` on.
    """

    slot: int
    page: int
    pages: int
    block: int
    adjacent: bool
    blocks: npt.NDArray[np.int64]


class CopyPlan:
    """The rows of a batch of jobs per cache group, merged. Made once per step and direction, used by every layer.

    For cache group g, in int64 arrays; an engine uses what suits it:
    `rows[g]`: shape (n, 3), one row per page: slot, page, block.
    `cuts[g]`: shape (s,), the indices into `rows[g]` at which a new span begins.
    `runs[g]`: shape (m, 5), the fields of one `Run` per row.
    """

    __slots__ = ("_spans", "cuts", "direction", "jobs", "mark", "mover", "rows", "runs")

    def __init__(self, direction: Direction, jobs: Sequence[Job], groups: int) -> None:
        """Merge adjacent rows of `jobs`, for a model with `groups` cache groups. O(rows), vectorised."""
        self.direction, self.jobs = direction, tuple(jobs)
        self.mark: object = None  # for the engine's own use
        self.mover = ""  # the engine's mover for this plan, for the trace
        self._spans: dict[int, list[SlotSpan]] = {}
        rows = table_of(jobs).astype(np.int64)
        owners = np.repeat(np.array([job.id for job in jobs], np.int64), [len(job.rows) // ROW_BYTES for job in jobs])
        if groups == 1:
            parts = [(rows[:, 1:], owners)]
        else:
            parts = [(rows[mine][:, 1:], owners[mine]) for mine in (rows[:, 0] == g for g in range(groups))]
        merged = [_merge(*part) for part in parts]
        self.rows: tuple[npt.NDArray[np.int64], ...] = tuple(mine for mine, _ in parts)
        self.runs: tuple[npt.NDArray[np.int64], ...] = tuple(runs for runs, _ in merged)
        self.cuts: tuple[npt.NDArray[np.int64], ...] = tuple(cuts for _, cuts in merged)

    def run_list(self, group: int) -> list[Run]:
        """Return the runs of cache group `group` as tuples of Python integers."""
        return [Run(*row) for row in self.runs[group].tolist()]

    def spans(self, group: int) -> list[SlotSpan]:
        """Return the spans of cache group `group`, computed at the first call."""
        made = self._spans.get(group)
        if made is None:
            made = self._spans[group] = _spans(self.rows[group], self.cuts[group])
        return made


def _merge(
    rows: npt.NDArray[np.int64], owners: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return (runs, cuts) of (slot, page, block) rows: a run is adjacent on both sides and of one job of `owners`."""
    slot, page, block = (rows[1:] - rows[:-1]).T
    span, run = np.ones((2, len(rows)), bool)  # whether one begins at each row
    span[1:] = (slot != 0) | (page != 1)
    run[1:] = span[1:] | (block != 1) | (owners[1:] != owners[:-1])
    first = run.nonzero()[0]
    runs = np.empty((len(first), 5), np.int64)
    runs[:, 0], runs[:, 1:4], runs[:-1, 4], runs[-1:, 4] = owners[first], rows[first], first[1:], len(rows)
    runs[:, 4] -= first
    return runs, span.nonzero()[0]


def _spans(rows: npt.NDArray[np.int64], cuts: npt.NDArray[np.int64]) -> list[SlotSpan]:
    if not len(rows):
        return []
    blocks = np.ascontiguousarray(rows[:, 2])
    apart = np.ones(len(rows), bool)  # from the block before
    apart[1:] = blocks[1:] != blocks[:-1] + 1
    apart[cuts] = False
    adjacent = (~np.logical_or.reduceat(apart, cuts)).tolist()
    starts, firsts = cuts.tolist(), rows[cuts].tolist()
    stops = *starts[1:], len(rows)
    return [
        SlotSpan(slot, page, stop - start, block, near, blocks[start:stop])
        for (slot, page, block), start, stop, near in zip(firsts, starts, stops, adjacent, strict=True)
    ]


class Ticket:
    """One submitted copy of one layer. Completed exactly once; `sink(ticket)` then hands it to the loop thread.

    `state` is a state of the ticket machine. It leaves `QUEUED` under a lock; the thread that completes the ticket
    leaves every other state.
    """

    __slots__ = (
        "_landed", "batch", "begun_ns", "born_ns", "done_ns", "failed", "layer", "mark", "ordinal", "sink", "state",
    )  # fmt: skip

    def __init__(self, batch: object, layer: int, ordinal: int, sink: Callable[[Ticket], object]) -> None:
        """`layer`: an index into `geometry.layers`. `ordinal`: of the batch's submissions, from 0: k of ``LAYER_k``."""
        self.batch, self.layer, self.ordinal, self.sink = batch, layer, ordinal, sink
        self.failed = NO_JOBS
        self.mark: object = None  # for the engine's own use: what device work is ordered after
        self.state = QUEUED
        self.born_ns = self.begun_ns = time.monotonic_ns()  # an engine that holds it back sets `begun_ns`
        self.done_ns = self.born_ns  # until it is completed
        self._landed = threading.Lock()
        self._landed.acquire()

    @property
    def over(self) -> bool:
        """Whether it is completed: its copy touches no memory any more."""
        state = self.state
        return state is OVER or state is DONE

    @property
    def done(self) -> bool:
        """Whether it is over, and `sink` has returned."""
        return self.state is DONE

    def begin(self) -> bool:
        """Announce that the copy is about to touch memory. Returns False if it was given up: it must not begin then.

        For engines whose `abandon` is `withdraw`. Raises RuntimeError if the copy has begun already.
        """
        with _LEAVING:
            if self.state is QUEUED:
                self.state = BEGUN
                return True
        if self.state is BEGUN:
            raise self._illegal("begin", "its copy has begun already")
        return False

    def withdraw(self) -> bool:
        """Give the copy up, unless it has begun. Returns True if it touches no memory from now on."""
        with _LEAVING:
            if self.state is QUEUED:
                self.state = WITHDRAWN
        return self.state is not BEGUN

    def complete(self, failed: frozenset[int] = NO_JOBS) -> None:
        """Complete the copy, also one that was withdrawn. `failed`: ids of the jobs whose bytes must not be used.

        Raises:
            RuntimeError: it was completed before.

        """
        if self.state is QUEUED:
            with _LEAVING:
                if self.state is QUEUED:  # else somebody withdraws it just now
                    self.state = BEGUN
        if (state := self.state) is OVER or state is DONE:
            raise self._illegal("complete", "it was completed twice")
        self.failed, self.done_ns = failed, time.monotonic_ns()  # first: who sees that it is over sees how
        self.state = OVER
        self.sink(self)
        self.state = DONE
        self._landed.release()  # last: a waiter finds the completion in the loop's inbox

    def wait(self, timeout_s: float) -> bool:
        """Block until the copy is done, for at most `timeout_s` seconds. Returns False on a timeout."""
        if not self._landed.acquire(timeout=timeout_s):
            return False
        self._landed.release()
        return True

    def _illegal(self, event: str, why: str) -> RuntimeError:
        return RuntimeError(f"ticket of layer {self.layer}: event {event} is illegal in state {self.state.name}: {why}")


class TransferEngine(Protocol):
    """Copies layers. One per rank."""

    piece_bytes: int
    """About how many bytes of the pool one call of `claim` should get."""

    def attach(self, views: Sequence[PageView], geometry: Geometry, pool: HostPool) -> None:
        """Bind the paged cache (one view per layer, in the order of `geometry.layers`) and the pool. Called first."""

    def claim(self, address: int, size: int) -> bool:
        """Take `size` bytes at `address`, which are whole slots in memory: pin them, for example.

        Returns whether the slots may be used; after False, call again later. Calls come in the order of the slots.
        Idempotent; on any thread; never raises.
        """

    def prepare(self, plan: CopyPlan) -> None:
        """Order the loads of `plan` after all compute enqueued so far. Called at step start, before `submit`."""

    def submit(self, plan: CopyPlan, ticket: Ticket) -> None:
        """Copy layer `ticket.layer` of `plan`; complete the ticket when the bytes have landed.

        An engine may hold a layer back until more of the plan is submitted, or until a call orders something after it.
        One that learns of a failure before it may complete the ticket sets `ticket.failed` early.
        """

    def guard_read(self, ticket: Ticket, timeout_s: float) -> bool:
        """Order the caller's next compute after the copy. On CPU the caller waits; on CUDA the compute stream does.

        Returns False if that was not possible within `timeout_s` seconds.
        """

    def reached(self, ticket: Ticket) -> object:
        """Notify the engine that attention has reached a completed layer: it may launch its next wave."""

    def fence(self, ticket: Ticket, timeout_s: float) -> bool:
        """Order later writes to the paged blocks after the copy's reads. Returns False after `timeout_s` seconds."""

    def abandon(self, ticket: Ticket) -> bool:
        """Give up a copy. Returns True if it touches no memory from now on: it is over, or will never begin.

        An engine that calls `Ticket.begin` before each copy, and makes none for which that returns False, returns
        `ticket.withdraw()`.
        """

    def shutdown(self) -> None:
        """Finish what was submitted and free threads. Idempotent."""
