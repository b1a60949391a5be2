"""Jobs in flight. The ranks' reports on each job are counted until all ranks have reported."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kvpipe.cache.chunks import Chunk, Owner, Piece
from kvpipe.protocol.messages import LOAD_SYNC, SAVE, Job, Kind, Tally
from kvpipe.scheduler.in_flight import JobInFlight
from kvpipe.scheduler.records import Tracked
from kvpipe.scheduler.reported import awaited
from kvpipe.statemachine import job as m
from kvpipe.statemachine import request as request_m

if TYPE_CHECKING:
    from kvpipe.scheduler.context import Context
    from kvpipe.scheduler.request_tracer import RequestTracer

PATIENCE_S: Final = 5.0
"""How long an outstanding tier order makes an otherwise idle engine take steps, in seconds.

The report on an older order is processed with the next step that the engine takes.
"""
_SAVE = int(SAVE)  # the kind as an int, as plans contain it


class Jobs:
    """The jobs of one engine.

    `in_flight` has the jobs on which not all ranks have reported, by id, the oldest first.
    """

    def __init__(
        self,
        context: Context,
        tracer: RequestTracer,
        *,
        ranks: int,
    ) -> None:
        """Start without jobs. `ranks` is the number of ranks."""
        self._catalog, self._counters, self._events = context.catalog, context.counters, context.events
        self._tracer, self._ranks = tracer, ranks
        self._states = context.geometry.states  # the groups of states, because an engine offers each state only once
        self._patience_s = context.settings.stuck_ms_max / 1000 + PATIENCE_S
        self.machine = m.JOB.compile()
        self.in_flight: dict[int, JobInFlight] = {}
        self.sync_loads = 0  # the number of sync loads in flight
        self._numbers = 0

    def new_id(self) -> int:
        """Return the next id, from 1 on. Jobs and tier orders share the ids, because ranks report on both by id."""
        self._numbers += 1
        return self._numbers

    def save(self, tracked: Tracked, rows: list[int], pieces: tuple[Piece, ...], first_unit: int) -> JobInFlight:
        """Begin a save of `pieces`, from unit `first_unit` of the prefix on. `rows` are made by `messages.rows_of`."""
        return self._begin(_SAVE, tracked, rows, None, pieces, first_unit, chunks=[piece.chunk for piece in pieces])

    def load(
        self, kind: Kind, tracked: Tracked, rows: list[int], owner: Owner, *, tokens: int = 0,
        chunks: Sequence[Chunk] = (),
    ) -> JobInFlight:  # fmt: skip
        """Begin a load of `tokens` tokens for `owner`, which leases `chunks`.

        A load with 0 tokens fails on every rank.
        """
        load = self._begin(int(kind), tracked, rows, owner, tokens=tokens, chunks=chunks)
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
        chunks: Sequence[Chunk] = (),
    ) -> JobInFlight:
        packed, stamps = struct.pack(f"<{len(rows)}i", *rows), b"".join([chunk.stamp for chunk in chunks])
        job = Job(self.new_id(), kind, tracked.request.request_id, tracked.life.epoch, packed, stamps)
        leases = 0 if owner is None else len(chunks)
        begun = JobInFlight(self.machine, job, tracked, owner, pieces, first_unit, tokens, leases)
        self._tracer.begun(begun)  # first, because a job is not in flight if this call raises
        self.in_flight[job.id] = begun
        return begun

    @property
    def awaited(self) -> bool:
        """Whether ranks may report on jobs soon, by the rule of `reported.awaited`."""
        return awaited(self.in_flight, self._patience_s)

    @property
    def loads_in_step(self) -> list[JobInFlight]:
        """The sync loads in flight."""
        return [job for job in self.in_flight.values() if job.job.kind == LOAD_SYNC]

    def reported(self, job_id: int, reports: Tally) -> bool:
        """Count the `reports` on a job. After the last report, publish or release the job's chunks, or fail the job.

        Returns whether the job exists.
        """
        job = self.in_flight.get(job_id)
        if job is None:
            return False
        failed = job.owner is not None and reports.bad > 0 and job.believed
        over = job.count(reports, self._ranks)
        if over:
            del self.in_flight[job_id]
            self._tracer.trace.about(job.job.request, job.job.epoch)
        try:
            if failed:  # at the first failed report, because later saves must be tainted before they are published
                self._events.load_failed(job.tracked, job)
        finally:
            if over and job.owner is not None:
                self.sync_loads -= job.job.kind == LOAD_SYNC
                self._catalog.release(job.owner)
                self._end_for_request(job)
            elif over:
                self._end_save(job)
        return True

    def withdraw(self, job: JobInFlight) -> None:
        """Drop a load that was not sent to the ranks, and release its leases. No rank will report on the load."""
        del self.in_flight[job.job.id]
        self.sync_loads -= job.job.kind == LOAD_SYNC
        job.tracked.load_job_id = 0
        if job.owner is not None:
            self._catalog.release(job.owner)

    def fail_load(self, job: JobInFlight) -> None:
        """Fail a load that the engine already treats as failed. The ranks have yet to report on the load."""
        try:
            if job.believed:
                job.fire(m.FAILED)
                self._events.load_failed(job.tracked, job)
        finally:
            self._end_for_request(job)

    def taint_saves(self, after: int = 0) -> None:
        """Taint all saves with an id above `after`, because their KV may come from the blocks of a failed load."""
        for job in self.in_flight.values():
            if job.owner is None and job.job.id > after:
                job.fire(m.TAINTED)

    def _end_for_request(self, job: JobInFlight) -> None:
        if job.tracked.load_job_id == job.key:  # false if the request was preempted, or has another load now
            job.tracked.load_job_id = 0
            job.tracked.fire(request_m.LOADED if job.believed else request_m.LOAD_FAILED)

    def _end_save(self, job: JobInFlight) -> None:
        if job.state.row == m.DONE:
            over = job.tracked.state.row == request_m.FINISHED
            for piece in job.pieces:
                if self._catalog.landed(piece, over=over):
                    self._counters["pieces_published"] += 1
                    if over:  # the request ended with this piece, so later prompts may continue from the piece's mark
                        self._catalog.keep_mark(piece.chunk, piece.key)
                    self._events.landed(job.tracked, piece)
            return
        self._counters.fault("save_failed", request=job.job.request, job=job.job.id)
        self.lose(job.pieces)
        if job.tracked.epoch == job.job.epoch:
            job.tracked.saving.lost(job.first_unit)

    def lose(self, pieces: Sequence[Piece]) -> None:
        """Drop the pieces of a failed save.

        Attention KV may be saved again, but the engine offers a state only once.
        """
        for piece in pieces:
            if piece.chunk.group in self._states:
                self._counters["states_not_saved"] += 1
            self._catalog.lost(piece)
