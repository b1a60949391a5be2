"""The transfer protocol: what the pipeline asks of an engine, and what an engine owes it.

An engine copies one layer of one batch of jobs per submission. It completes the submissions of one plan in the order in
which they were submitted, each exactly once, from any thread. It never raises out of `prepare` and `submit`.

The engine orders copies against the caller's compute, and nothing else. *Slots are ordered by the host*: a load from a
slot is submitted after its save's completion was notified, and a save to a slot after that of its loads. So no engine
makes a load wait for a save or a save for a load.
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
    """The states of `kvpipe/statemachine/ticket.py`, by their names: the data plane needs no pydantic."""

    QUEUED, BEGUN, WITHDRAWN, OVER, DONE = "QUEUED", "BEGUN", "WITHDRAWN", "OVER", "DONE"


QUEUED, BEGUN, WITHDRAWN, OVER, DONE = TicketState
QUIET: Final = (OVER, DONE, WITHDRAWN)
"""A ticket's states in which its copy touches no memory any more. No set: an enumeration's hash is Python's."""
_LEAVING: Final = threading.Lock()
"""Held by whoever takes a ticket out of `QUEUED`. All tickets share it: it is held for a microsecond."""


class Direction(IntEnum):
    """Which way the bytes go."""

    SAVE = 0
    LOAD = 1


class Run(NamedTuple):
    """`pages` adjacent pages of one slot and as many adjacent blocks, for one job."""

    job: int
    slot: int
    page: int
    block: int
    pages: int


class SlotSpan(NamedTuple):
    """`pages` adjacent pages of one slot, from `page` on, and the block of each: contiguous on the host side.

    `adjacent`: the blocks are so too, from `block` on.
    """

    slot: int
    page: int
    pages: int
    block: int
    adjacent: bool
    blocks: npt.NDArray[np.int64]


class CopyPlan:
    """The rows of a batch of jobs per cache group, merged. Compiled once per step, used by every layer.

    `rows[g]` is an (n, 3) array of slot, page and block, `cuts[g]` where a new span begins in it, and `runs[g]` an
    (m, 5) array with a `Run` in each row: an engine takes what suits it.
    """

    __slots__ = ("_spans", "cuts", "direction", "jobs", "mark", "mover", "rows", "runs")

    def __init__(self, direction: Direction, jobs: Sequence[Job], groups: int) -> None:
        """Merge adjacent rows. O(rows), vectorised."""
        self.direction, self.jobs = direction, tuple(jobs)
        self.mark: object = None  # the engine's own
        self.mover = ""  # how the engine moves it, for the trace
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
        """Return the runs of `group` as plain tuples."""
        return [Run(*row) for row in self.runs[group].tolist()]

    def spans(self, group: int) -> list[SlotSpan]:
        """Return the spans of `group`. Made when they are first asked for."""
        made = self._spans.get(group)
        if made is None:
            rows = self.rows[group]
            made = self._spans[group] = [_span(part) for part in np.split(rows, self.cuts[group][1:]) if len(part)]
        return made


def _merge(
    rows: npt.NDArray[np.int64], owners: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Merge (slot, page, block) rows into runs (both sides adjacent, one owner); and where spans begin."""
    step = np.diff(rows, axis=0)
    same_span = (step[:, 0] == 0) & (step[:, 1] == 1)
    same_run = same_span & (step[:, 2] == 1) & (np.diff(owners) == 0)
    first = np.flatnonzero(np.append(len(rows) > 0, ~same_run)[: len(rows)])
    length = np.diff(np.append(first, len(rows)))
    runs = np.column_stack([owners[first], rows[first], length]).astype(np.int64)
    return runs, np.flatnonzero(np.append(len(rows) > 0, ~same_span)[: len(rows)])


def _span(part: npt.NDArray[np.int64]) -> SlotSpan:
    blocks = np.ascontiguousarray(part[:, 2])
    slot, page, block = part[0].tolist()
    return SlotSpan(slot, page, len(part), block, bool((np.diff(blocks) == 1).all()), blocks)


class Ticket:
    """One submitted copy of one layer. Completed exactly once; `sink` then hands it to the loop thread.

    `state` is one of the ticket machine's. It leaves `QUEUED` under a lock, and every other by whoever completes it.
    """

    __slots__ = (
        "_landed", "batch", "begun_ns", "born_ns", "failed", "layer", "mark", "ordinal", "sink", "state",
    )  # fmt: skip

    def __init__(self, batch: object, layer: int, ordinal: int, sink: Callable[[Ticket], object]) -> None:
        """`ordinal` counts the batch's submissions from 0: the k of ``LAYER_k``."""
        self.batch, self.layer, self.ordinal, self.sink = batch, layer, ordinal, sink
        self.failed = NO_JOBS
        self.mark: object = None  # the engine's own: what device work can be ordered after
        self.state = QUEUED
        self.born_ns = self.begun_ns = time.monotonic_ns()  # an engine that holds it back says when it has begun
        self._landed = threading.Lock()
        self._landed.acquire()

    @property
    def over(self) -> bool:
        """Whether it was completed: its copy touches memory no more."""
        state = self.state
        return state is OVER or state is DONE

    @property
    def done(self) -> bool:
        """Whether it is over, and `sink` has returned."""
        return self.state is DONE

    def begin(self) -> bool:
        """Say that the copy is about to touch memory. Returns whether it may: nobody has given it up.

        For engines whose `abandon` is `withdraw`. Raises RuntimeError for a copy that has begun.
        """
        with _LEAVING:
            if self.state is QUEUED:
                self.state = BEGUN
                return True
        if self.state is BEGUN:
            raise self._illegal("begin", "its copy has begun already")
        return False

    def withdraw(self) -> bool:
        """Give the copy up, unless it has begun. Returns whether it touches no memory from now on."""
        with _LEAVING:
            if self.state is QUEUED:
                self.state = WITHDRAWN
        return self.state is not BEGUN

    def complete(self, failed: frozenset[int] = NO_JOBS) -> None:
        """Mark the copy done, also one that was withdrawn; `failed` names the jobs whose bytes are not to be trusted.

        Raises:
            RuntimeError: it was completed before.

        """
        if self.state is QUEUED:
            with _LEAVING:
                if self.state is QUEUED:  # else somebody withdraws it just now
                    self.state = BEGUN
        if self.over:
            raise self._illegal("complete", "it was completed twice")
        self.failed = failed  # first: who sees that it is over sees how
        self.state = OVER
        self.sink(self)
        self.state = DONE
        self._landed.release()  # last: a waiter finds the completion in the loop's inbox

    def wait(self, timeout_s: float) -> bool:
        """Block until the copy has completed. Returns False on a timeout."""
        if not self._landed.acquire(timeout=timeout_s):
            return False
        self._landed.release()
        return True

    def _illegal(self, event: str, why: str) -> RuntimeError:
        return RuntimeError(f"ticket of layer {self.layer}: event {event} is illegal in state {self.state.name}: {why}")


class TransferEngine(Protocol):
    """Copies layers. One per rank."""

    piece_bytes: int
    """How much of the pool `claim` takes at once, about."""

    def attach(self, views: Sequence[PageView], geometry: Geometry, pool: HostPool) -> None:
        """Bind the paged cache (one view per layer, in `geometry.layers` order) and the pool."""

    def claim(self, address: int, size: int) -> bool:
        """Take whole slots that are in memory (to pin them, say). Returns whether they may be used; if not, call again.

        Pieces come in the order of their slots. Harmless when repeated; on any thread. Never raises.
        """

    def prepare(self, plan: CopyPlan) -> None:
        """Called at step start. Order the loads of `plan` after all compute enqueued so far."""

    def submit(self, plan: CopyPlan, ticket: Ticket) -> None:
        """Copy layer `ticket.layer` of `plan`; complete the ticket when the bytes have landed.

        An engine may hold a layer back until more of the plan has come, or until somebody orders something after it.
        One that knows of a failure before it may complete the ticket sets `ticket.failed` early.
        """

    def guard_read(self, ticket: Ticket, timeout_s: float) -> bool:
        """Order the caller's next compute after the copy. CPU: wait. CUDA: the compute stream waits."""

    def reached(self, ticket: Ticket) -> object:
        """Notification: attention reached a completed layer; the engine may launch its next wave."""

    def fence(self, ticket: Ticket, timeout_s: float) -> bool:
        """Order later writes to the paged blocks after the copy has read them."""

    def abandon(self, ticket: Ticket) -> bool:
        """Give up a copy. Returns whether it touches no memory from now on: it is over, or will never begin.

        `Ticket.withdraw`, for an engine that calls `Ticket.begin` before each copy and makes none that it refuses.
        """

    def shutdown(self) -> None:
        """Finish what was submitted and free threads. Idempotent."""
