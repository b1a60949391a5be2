"""The transfer protocol: the calls that the pipeline makes to a transfer engine, and the guarantees of an engine.

Each submission makes the engine copy one layer of one batch of jobs, or several layers that are final at once. The
engine completes the submissions of one plan in the order of their submission, each exactly once, from any thread.
`prepare` and `submit` never raise. If a copy fails, the engine completes the copy's ticket with the failed jobs.

The engine orders copies only against the caller's compute. *The scheduler side orders the uses of slots.* It plans a
load from a slot only after the save into the slot has completed. It plans a save into a slot only after all loads from
the slot have completed. So a transfer engine need not make a load wait for a save, or a save for a load.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvpipe.protocol.messages import ROW_BYTES, Job, table_of

if TYPE_CHECKING:
    from kvpipe.protocol.geometry import Geometry
    from kvpipe.transfer.pages import PageView
    from kvpipe.transfer.pool import HostPool

NO_JOBS: frozenset[int] = frozenset()
"""The value of `Ticket.failed` if the copy succeeded."""


class TicketState(Enum):
    """The states of `kvpipe/statemachine/ticket.py` as an enum, so that the data plane need not import pydantic."""

    QUEUED, BEGUN, WITHDRAWN, OVER, DONE = "QUEUED", "BEGUN", "WITHDRAWN", "OVER", "DONE"


QUEUED, BEGUN, WITHDRAWN, OVER, DONE = TicketState
QUIET: Final = (OVER, DONE, WITHDRAWN)
"""The states in which a ticket's copy touches no memory. A tuple, because hashing an enum member is slow."""
_LEAVING: Final = threading.Lock()
"""A thread holds this lock for about 1 us to move a ticket out of `QUEUED`. All tickets share the lock."""


class Direction(IntEnum):
    """The direction of a copy: SAVE is device to host, LOAD is host to device."""

    SAVE = 0
    LOAD = 1


class Run(NamedTuple):
    """One copy for one job, between pages [page, page + pages) of `slot` and the blocks [block, block + pages)."""

    job: int
    slot: int
    page: int
    block: int
    pages: int


class SlotSpan(NamedTuple):
    """The pages [page, page + pages) of one slot, which are contiguous in host memory.

    `blocks` has the block of each page, shape (pages,). `adjacent` says whether `blocks` are [block, block + pages).
    """

    slot: int
    page: int
    pages: int
    block: int
    adjacent: bool
    blocks: npt.NDArray[np.int64]


Table = npt.NDArray[np.int64]


class MergedRows(NamedTuple):
    """The rows of a `CopyPlan` and the indices at which spans begin, by cache group."""

    rows: tuple[Table, ...]
    cuts: tuple[Table, ...]


class CopyPlan:
    """The rows of a batch of jobs per cache group, merged. A plan is made once per batch and used by every layer.

    The first thread that reads `rows`, `cuts` or `runs` makes these arrays. If two threads make arrays at once, both
    threads get equal arrays.
    """

    __slots__ = ("_groups", "_merged", "_runs", "_spans", "direction", "jobs", "mark", "mover")

    def __init__(self, direction: Direction, jobs: Sequence[Job], groups: int) -> None:
        """`groups` is the number of the model's cache groups."""
        self.direction, self.jobs, self._groups = direction, tuple(jobs), groups
        self.mark: object = None  # the engine's own data
        self.mover = ""  # the name of the engine's mover for this plan, for the trace
        self._spans: dict[int, list[SlotSpan]] = {}
        self._merged: MergedRows | None = None
        # made on demand, because not all movers need runs, and a call of numpy may be slow
        self._runs: tuple[Table, ...] | None = None

    @property
    def rows(self) -> tuple[Table, ...]:
        """One int64 array per cache group, shape (n, 3). Each row is one page: slot, page, block."""
        return (self._merged or self._merge()).rows

    @property
    def cuts(self) -> tuple[Table, ...]:
        """One int64 array per cache group, shape (s,). Each array has the indices into `rows` at which spans begin."""
        return (self._merged or self._merge()).cuts

    @property
    def runs(self) -> tuple[Table, ...]:
        """One int64 array per cache group, shape (m, 5). Each row has the fields of one `Run`."""
        if self._runs is None:
            owners = [job.id for job in self.jobs], [len(job.rows) // ROW_BYTES for job in self.jobs]
            each = self._by_group(np.repeat(*(np.array(numbers, np.int64) for numbers in owners)))
            self._runs = tuple(map(_runs_of, self.rows, each))
        return self._runs

    def _merge(self) -> MergedRows:
        rows = tuple(part[:, 1:] for part in self._by_group(table_of(self.jobs).astype(np.int64)))
        self._merged = made = MergedRows(rows, tuple(_apart(part).nonzero()[0] for part in rows))
        return made

    def _by_group(self, each: Table) -> Iterable[Table]:
        """Divide an array with an item for each row of the jobs by cache group."""
        if self._groups == 1:
            return (each,)
        groups = table_of(self.jobs)[:, 0]
        return [each[groups == group] for group in range(self._groups)]

    def run_list(self, group: int) -> list[Run]:
        """Return the runs of cache group `group` as tuples of Python integers."""
        return [Run(*row) for row in self.runs[group].tolist()]

    def spans(self, group: int) -> list[SlotSpan]:
        """Return the spans of cache group `group`. The first call computes the spans."""
        made = self._spans.get(group)
        if made is None:
            made = self._spans[group] = _spans(self.rows[group], self.cuts[group])
        return made


def _apart(rows: Table) -> npt.NDArray[np.bool_]:
    """Return whether a span begins at each of the (slot, page, block) rows."""
    begins = np.ones(len(rows), bool)
    slot, page, _ = (rows[1:] - rows[:-1]).T
    begins[1:] = (slot != 0) | (page != 1)
    return begins


def _runs_of(rows: Table, owners: Table) -> Table:
    """Return the runs of (slot, page, block) rows.

    The pages of a run belong to one job, and are adjacent in slot and blocks. `owners` has the id of each row's job.
    """
    begins = _apart(rows)
    begins[1:] |= (rows[1:, 2] - rows[:-1, 2] != 1) | (owners[1:] != owners[:-1])
    first = begins.nonzero()[0]
    runs = np.empty((len(first), 5), np.int64)
    runs[:, 0], runs[:, 1:4], runs[:-1, 4], runs[-1:, 4] = owners[first], rows[first], first[1:], len(rows)
    runs[:, 4] -= first
    return runs


def _spans(rows: Table, cuts: Table) -> list[SlotSpan]:
    if not len(rows):
        return []
    blocks = np.ascontiguousarray(rows[:, 2])
    apart = np.ones(len(rows), bool)  # for each row: False if its block follows the previous row's block
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
    """One submitted copy of layers. A ticket is completed exactly once, and `sink(ticket)` notifies the loop thread.

    `state` is a state of the ticket machine. A thread changes the state `QUEUED` only under a lock. Only the thread
    that completes the ticket changes any other state.
    """

    __slots__ = (
        "_landed", "batch", "begun_ns", "born_ns", "done_ns", "failed", "layer", "layers", "mark", "ordinal", "sink",
        "state",
    )  # fmt: skip

    def __init__(
        self, batch: object, layer: int, ordinal: int, sink: Callable[[Ticket], object], layers: tuple[int, ...] = ()
    ) -> None:
        """`layer` is an index into `geometry.layers`. `layers` has all copied layers, `layer` first.

        If `layers` is empty, only `layer` is copied. `ordinal` is the number of the batch's layers that were submitted
        before this ticket: the k of ``LAYER_k``.
        """
        self.batch, self.layer, self.ordinal, self.sink = batch, layer, ordinal, sink
        self.layers = layers or (layer,)
        self.failed = NO_JOBS
        self.mark: object = None  # the engine's own data, such as the point after which device work is ordered
        self.state = QUEUED
        self.born_ns = self.begun_ns = time.monotonic_ns()  # if an engine delays the copy, it sets `begun_ns` again
        self.done_ns = self.born_ns  # the time of completion, once the ticket is completed
        self._landed = threading.Lock()
        self._landed.acquire()

    @property
    def over(self) -> bool:
        """Whether the ticket is completed, so that its copy touches no memory any more."""
        state = self.state
        return state is OVER or state is DONE

    @property
    def done(self) -> bool:
        """Whether the ticket is over and `sink` has returned."""
        return self.state is DONE

    def begin(self) -> bool:
        """Announce that the copy is about to touch memory. Returns False if the copy was withdrawn and must not begin.

        This method is for engines whose `abandon` calls `withdraw`. Raises RuntimeError if the copy has begun already.
        """
        with _LEAVING:
            if self.state is QUEUED:
                self.state = BEGUN
                return True
        if self.state is BEGUN:
            raise self._illegal("begin", "the copy has begun already")
        return False

    def withdraw(self) -> bool:
        """Withdraw the copy unless the copy has begun. Returns True if the copy touches no memory from now on."""
        with _LEAVING:
            if self.state is QUEUED:
                self.state = WITHDRAWN
        return self.state is not BEGUN

    def complete(self, failed: frozenset[int] = NO_JOBS) -> None:
        """Complete the ticket, even after a withdrawal. `failed` has the ids of the jobs whose bytes must not be used.

        Raises:
            RuntimeError: the ticket was completed before.

        """
        if self.state is QUEUED:
            with _LEAVING:
                if self.state is QUEUED:  # false if another thread has just withdrawn the ticket
                    self.state = BEGUN
        if (state := self.state) is OVER or state is DONE:
            raise self._illegal("complete", "a ticket is completed only once")
        # `failed` is set before `state`, so that a thread that sees the state OVER also sees which jobs failed.
        self.failed, self.done_ns = failed, time.monotonic_ns()
        self.state = OVER
        self.sink(self)
        self.state = DONE
        self._landed.release()  # after `sink`, so that a thread in `wait` finds the completion in the loop's inbox

    def wait(self, timeout_s: float) -> bool:
        """Block until the ticket is done, for at most `timeout_s` seconds. Returns False on a timeout."""
        if not self._landed.acquire(timeout=timeout_s):
            return False
        self._landed.release()
        return True

    def _illegal(self, event: str, why: str) -> RuntimeError:
        return RuntimeError(f"ticket of layer {self.layer}: event {event} is illegal in state {self.state.name}: {why}")


class TransferEngine(Protocol):
    """A transfer engine copies layers. Each rank has one transfer engine."""

    piece_bytes: int
    """The approximate number of the pool's bytes that one call of `claim` should cover."""

    def attach(self, views: Sequence[PageView], geometry: Geometry, pool: HostPool) -> None:
        """Bind the paged cache (one view per layer, in the order of `geometry.layers`) and the pool.

        This is the first call. The caller calls `attach` again, with no copy in flight, when the same caches have moved
        to other addresses. Slots for which `claim` has returned True stay usable.
        """

    def claim(self, address: int, size: int) -> bool:
        """Make `size` bytes of whole slots at `address` ready for copies. An engine may pin these bytes, for example.

        If the slots also have parts of other ranks, the bytes are this rank's part of one slot.

        Returns whether the slots may be used. After False the caller repeats the call later. Calls are made in the
        order of the slots, on any thread. The method is idempotent and never raises.
        """

    def prepare(self, plan: CopyPlan) -> None:
        """Order the loads of `plan` after all compute enqueued so far. The caller calls this before `submit`.

        A plan of saves need not be prepared.
        """

    def submit(self, plan: CopyPlan, ticket: Ticket) -> None:
        """Copy the layers `ticket.layers` of `plan`. Complete the ticket when the bytes have landed.

        An engine may delay a layer until more of the plan is submitted, or until a call orders work after the layer. If
        a copy fails before the engine may complete the copy's ticket, the engine sets `ticket.failed` at once.
        """

    def guard_read(self, ticket: Ticket, timeout_s: float) -> bool:
        """Order the caller's next compute after the copy. On CPU the caller waits. On CUDA the compute stream waits.

        Returns False if the copy could not be ordered within `timeout_s` seconds.
        """

    def reached(self, ticket: Ticket) -> object:
        """Notify the engine that attention has reached a completed layer. The engine may then launch its next wave."""

    def fence(self, ticket: Ticket, timeout_s: float) -> bool:
        """Order later writes to the paged blocks after the copy's reads. Returns False on a timeout of `timeout_s`."""

    def abandon(self, ticket: Ticket) -> bool:
        """Give up a copy. Returns True if the copy touches no memory any more, because it is over or will never begin.

        Some engines call `Ticket.begin` before each copy and skip the copy if `begin` returns False. Such an engine
        returns `ticket.withdraw()` here.
        """

    def scrub(self, plan: CopyPlan, jobs: frozenset[int]) -> None:
        """Treat the blocks of `jobs` as the blocks of failed copies, because the copied bytes must not be used.

        All copies of `plan`, a plan of loads, have landed. The blocks still belong to the jobs' requests. Any thread
        may call this method.
        """

    def shutdown(self) -> None:
        """Finish the submitted copies and end the threads. Idempotent."""
