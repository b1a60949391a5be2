"""Jobs and tier transfers in flight: the ranks' reports on each are counted until the last one has come."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Container, Mapping, Sequence
from typing import TYPE_CHECKING

from kvpipe.cache.catalog import Catalog, Owner, Piece
from kvpipe.messages import LOAD_SYNC, SAVE, Job, Kind, Tally
from kvpipe.scheduler.records import Tracked
from kvpipe.statemachine import job as m
from kvpipe.statemachine import request as request_m
from kvpipe.statemachine.core import Compiled, Cursor, Watch
from kvpipe.trace.log import Counters

if TYPE_CHECKING:
    from kvpipe.scheduler.report import RequestReporter


_BELIEVED = frozenset({m.SENT, m.DONE})
_SAVE = int(SAVE)  # as it is sent


class Reported(Cursor):
    """A job or tier transfer, which every rank reports once. `ok` and `bad` count the reports.

    `sent_at_s`: when it was planned, in seconds of the monotonic clock.
    """

    __slots__ = ("bad", "ok", "sent_at_s")

    def __init__(self, machine: Compiled, number: int, watch: Watch | None) -> None:
        """`machine`: the job machine. `number`: its id."""
        super().__init__(machine, number, watch)
        self.ok = self.bad = 0
        self.sent_at_s = time.monotonic()

    def count(self, reports: Tally, ranks: int) -> bool:
        """Add `reports`; `ranks` are expected in all. Returns whether all have reported."""
        self.ok, self.bad = self.ok + reports.ok, self.bad + reports.bad
        if self.ok + self.bad < ranks:
            return self.fire(m.FAILED if reports.bad else m.SOME).to.final
        return self.fire(m.NOT_ALL if self.bad else m.ALL).to.final


def awaited(sent: Mapping[int, Reported], patience_s: float) -> bool:
    """Whether reports may come soon: the last of `sent`, in the order of sending, is younger than `patience_s`."""
    return bool(sent) and time.monotonic() - next(reversed(sent.values())).sent_at_s < patience_s  # type: ignore[call-overload]


class JobInFlight(Reported):
    """A save or load that not all ranks have reported yet.

    A save has `pieces`, from unit `first_unit` of the prefix on. A load has an `owner`, which holds `leases` leases; it
    loads `tokens` tokens; 0: it is planned to fail.
    """

    __slots__ = ("first_unit", "job", "leases", "owner", "pieces", "tokens", "tracked")

    def __init__(
        self,
        machine: Compiled,
        job: Job,
        tracked: Tracked,
        owner: Owner | None,
        pieces: tuple[Piece, ...],
        first_unit: int,
        tokens: int,
        leases: int,
    ) -> None:
        """Start as sent with the step that is being planned, without a watch."""
        self.machine, self.key, self.state, self.watch = machine, job.id, machine.initial, None  # as `Reported`
        self.ok = self.bad = 0
        self.sent_at_s = time.monotonic()
        self.job, self.tracked, self.pieces, self.first_unit, self.owner = job, tracked, pieces, first_unit, owner
        self.tokens, self.leases = tokens, leases

    @property
    def believed(self) -> bool:
        """Whether no rank has failed it, and it was not doubted."""
        return self.state.row in _BELIEVED


class Jobs:
    """The jobs of one engine. `in_flight`: by id, the oldest first."""

    def __init__(
        self,
        catalog: Catalog,
        counters: Counters,
        report: RequestReporter,
        *,
        ranks: int,
        states: Container[int],
        saved: Callable[[Tracked, Piece], object],
        load_failed: Callable[[JobInFlight], object],
        patience_s: float,
    ) -> None:
        """`saved` is called for each piece that can be found now, `load_failed` once for each load that fails.

        `ranks`: their number. `states`: the cache groups of recurrent states, which an engine offers once.
        `patience_s`: see `awaited`.
        """
        self._catalog, self._counters, self._report, self._ranks = catalog, counters, report, ranks
        self._states, self._patience_s = states, patience_s
        self._saved, self._load_failed = saved, load_failed
        self.machine = m.JOB.compile()
        self.in_flight: dict[int, JobInFlight] = {}
        self.sync_loads = 0  # of those in flight
        self._numbers = 0

    def new_id(self) -> int:
        """Return the next id, from 1 on. Jobs and tier orders share them: ranks report both by their ids."""
        self._numbers += 1
        return self._numbers

    def save(self, tracked: Tracked, rows: list[int], pieces: tuple[Piece, ...], first_unit: int) -> JobInFlight:
        """Begin a save of `pieces`, from unit `first_unit` of the prefix on. `rows`: as of `messages.rows_of`."""
        return self._begin(_SAVE, tracked, rows, None, pieces, first_unit)

    def load(
        self, kind: Kind, tracked: Tracked, rows: list[int], owner: Owner, *, tokens: int = 0, leases: int = 0
    ) -> JobInFlight:
        """Begin a load of `tokens` tokens for `owner`, which holds `leases` leases. With 0 tokens it will fail."""
        load = self._begin(int(kind), tracked, rows, owner, tokens=tokens, leases=leases)
        tracked.load_job_id = load.job.id
        self.sync_loads += kind == LOAD_SYNC
        return load

    def _begin(
        self,
        kind: int,
        tracked: Tracked,
        rows: list[int],
        owner: Owner | None,
        pieces: tuple[Piece, ...] = (),
        first_unit: int = 0,
        tokens: int = 0,
        leases: int = 0,
    ) -> JobInFlight:
        packed = struct.pack(f"<{len(rows)}i", *rows)
        job = Job(self.new_id(), kind, tracked.request.request_id, tracked.life.epoch, packed)
        begun = JobInFlight(self.machine, job, tracked, owner, pieces, first_unit, tokens, leases)
        self._report.begun(begun)  # first: what fails here is not in flight
        self.in_flight[job.id] = begun
        return begun

    @property
    def awaited(self) -> bool:
        """Whether reports of jobs may come soon: see `awaited`."""
        return awaited(self.in_flight, self._patience_s)

    @property
    def loads_in_step(self) -> list[JobInFlight]:
        """The sync loads in flight."""
        return [job for job in self.in_flight.values() if job.job.kind == LOAD_SYNC]

    def reported(self, job_id: int, reports: Tally) -> bool:
        """Count `reports` of a job; with the last one, publish, release or fail it. Returns whether the job exists."""
        job = self.in_flight.get(job_id)
        if job is None:
            return False
        failed = job.owner is not None and reports.bad > 0 and job.believed
        over = job.count(reports, self._ranks)
        if over:
            del self.in_flight[job_id]
            self._report.trace.about(job.job.request, job.job.epoch)
        try:
            if failed:
                self._load_failed(job)  # at the first failure, before other ranks' saves are published
        finally:
            if over and job.owner is not None:
                self.sync_loads -= job.job.kind == LOAD_SYNC
                self._catalog.release(job.owner)
                self._end_for_request(job)
            elif over:
                self._end_save(job)
        return True

    def withdraw(self, job: JobInFlight) -> None:
        """Drop a load that was not sent to the ranks: nobody reports it. Its leases end."""
        del self.in_flight[job.job.id]
        self.sync_loads -= job.job.kind == LOAD_SYNC
        job.tracked.load_job_id = 0
        if job.owner is not None:
            self._catalog.release(job.owner)

    def fail_load(self, job: JobInFlight) -> None:
        """The engine knows that a load has failed; the ranks have yet to report it."""
        try:
            if job.believed:
                job.fire(m.FAILED)
                self._load_failed(job)
        finally:
            self._end_for_request(job)

    def taint_saves(self, after: int = 0) -> None:
        """Doubt all saves with an id above `after`: a load has failed, and what they save may be computed from it."""
        for job in self.in_flight.values():
            if job.owner is None and job.job.id > after:
                job.fire(m.TAINTED)

    def _end_for_request(self, job: JobInFlight) -> None:
        if job.tracked.load_job_id == job.key:  # else it has no admission any more, or another load
            job.tracked.load_job_id = 0
            job.tracked.fire(request_m.LOADED if job.believed else request_m.LOAD_FAILED)

    def _end_save(self, job: JobInFlight) -> None:
        if job.state.row == m.DONE:
            over = job.tracked.state.row == request_m.FINISHED
            for piece in job.pieces:
                if self._catalog.landed(piece, over=over):
                    self._saved(job.tracked, piece)
            return
        self._counters.fault("save_failed", request=job.job.request, job=job.job.id)
        self.lose(job.pieces)
        if job.tracked.epoch == job.job.epoch:
            job.tracked.saving.lost(job.first_unit)

    def lose(self, pieces: Sequence[Piece]) -> None:
        """Drop the pieces of a failed save. Attention KV may be saved again; a state is offered only once."""
        for piece in pieces:
            if piece.chunk.group in self._states:
                self._counters["states_not_saved"] += 1
            self._catalog.lost(piece)
