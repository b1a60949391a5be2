"""Plans the loads of hits: whether they are sync or async, and which pages of chunks are copied to which blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, compress, starmap
from typing import TYPE_CHECKING

from kvpipe.cache.chunks import Chunk, Owner
from kvpipe.protocol.messages import BROKEN, LOAD_ASYNC, LOAD_SYNC, Job, rows_of
from kvpipe.scheduler.in_flight import JobInFlight
from kvpipe.scheduler.jobs import Jobs
from kvpipe.scheduler.records import Tracked
from kvpipe.scheduler.requests import Requests
from kvpipe.scheduler.stall import Stall
from kvpipe.statemachine import lookup as lookup_m
from kvpipe.statemachine import request as m

if TYPE_CHECKING:
    from kvpipe.protocol.engine import Block, Recovery, Request, Step, Tables
    from kvpipe.scheduler.context import Context


class Loading:
    """Plans the loads of one engine. `between_steps` says that all loads are asynchronous."""

    def __init__(
        self,
        context: Context,
        *,
        requests: Requests,
        jobs: Jobs,
        recovery: Recovery,
        pipeline_stages: int,
    ) -> None:
        """Start without loads. `pipeline_stages` is the number of pipeline stages.

        With several pipeline stages, all loads are asynchronous, because the failure of a sync load would be known only
        when later steps are already running.
        """
        settings, geometry = context.settings, context.geometry
        self._geometry, self._catalog, self._prefixes = geometry, context.catalog, context.prefixes
        self._context, self._counters = context, context.counters
        self._requests, self._jobs, self._recovery = requests, jobs, recovery
        self._unit, self._per_chunk = geometry.unit_tokens, geometry.units_per_chunk
        self._paging, self._pages = geometry.paging, geometry.pages_per_chunk
        self.between_steps = settings.load == "async" or pipeline_stages > 1 or geometry.loads_between_steps
        either = settings.load == "auto" and not self.between_steps
        self.stall = Stall(geometry, settings.stall_ms_max) if either else None
        self._due: list[JobInFlight] = []

    def waits(self, tokens: int) -> bool:
        """Whether a load of `tokens` tokens should be asynchronous."""
        if self.stall is None:
            return self.between_steps
        return self.between_steps or self.stall.too_long(tokens, loading=bool(self._requests.waiting))

    def drops(self, external_tokens: int, local_tokens: int) -> bool:
        """Whether a hit of `external_tokens` is no longer than the tail that the engine drops from its own hits.

        The tokens of such a hit are computed, not loaded. If all loads are asynchronous, the request would otherwise
        wait for a load of these few tokens.
        """
        return local_tokens > 0 and 0 < external_tokens <= self._geometry.dropped_units * self._unit

    def admit(self, tracked: Tracked, tables: Tables, external_tokens: int, step: int) -> None:
        """Lease chunks and plan the load of `external_tokens` into the blocks that the engine has allocated.

        If `external_tokens` is 0, note that nothing is loaded. An error while the load is planned is contained, and the
        load is sent as a job that fails. The reason is that the engine expects a report on the load.
        """
        request, asking = tracked.request, tracked.asking
        row = asking.state.row
        asked = row != lookup_m.UNASKED
        stands = row == lookup_m.ASKED and asking.asked_step == step
        held_units = asking.units if stands else 0
        tracked.life.epoch = self._requests.new_epoch()
        if external_tokens <= 0:
            self._requests.begin_admission(tracked, held_units, tables)
            tracked.fire(m.ADMIT_EMPTY)
            if asked:  # false if the lookup has raised, or if the engine made no lookup
                self._context.events.admitted(tracked, tables)
                asking.admit()
            return
        if not asked:
            asking.waits = self.between_steps
        waits = asking.waits
        kind = LOAD_ASYNC if waits else LOAD_SYNC
        owner = Owner(request.request_id, tracked.life.epoch)
        self._context.trace.about(*owner)
        chunks: list[Chunk] = []
        try:
            tracked.fire(m.ADMIT_LOAD)  # first, because the report of a failure must find a request that is loading
            self._context.events.admitted(tracked, tables)
            if asked:
                asking.admit()
            self._requests.begin_admission(tracked, held_units, tables)
            if not stands:
                msg = f"blocks for a hit of {external_tokens} tokens, but no lookup in this step returned this hit"
                raise LookupError(msg)  # noqa: TRY301
            first = asking.local // self._unit
            stop = -(-(asking.local + external_tokens) // self._unit)
            rows, chunks = self.rows(request, tables, first, stop, beyond=(asking.local + external_tokens) % self._unit)
            self._catalog.lease(owner, chunks)
            self._context.events.leased(tracked, chunks)
        except Exception as e:  # noqa: BLE001  (the engine expects a report on the load, so the load must fail)
            self._counters.fault("load_not_planned", request=request.request_id, error=repr(e))
            self._catalog.release(owner)
            tracked.saving.give_up()
            blocks = [[block.block_id for block in table if not block.is_null] for table in tables]
            rows = list(chain.from_iterable(starmap(_broken, enumerate(blocks))))
        self._recovery.planned(rows[3::4])
        self._due.append(self._jobs.load(kind, tracked, rows, owner, tokens=external_tokens, chunks=chunks))
        if waits:
            self._requests.waiting[request.request_id] = request
        elif self.stall is not None:
            self.stall.due += external_tokens
        self._counters["tokens_loaded"] += external_tokens

    def plan_step(self, step: Step) -> list[Job]:
        """Return the loads that were admitted since the last step, and the loads that the engine needs to fail."""
        if self.stall is not None:
            self.stall.running, self.stall.due = len(step.num_scheduled_tokens), 0
        due, self._due = self._due, []
        jobs: list[Job] = []
        for load in due:
            tracked = load.tracked
            if tracked.load_job_id == load.key and tracked.state.row == m.ALLOCATED:
                tracked.fire(m.DISPATCH)  # the load of an illegal admission is sent all the same, and fails
            jobs.append(load.job)
        try:
            read_early = self._recovery.begin_step(step, self._requests, loading=self._jobs.sync_loads > 0)
            if read_early:
                jobs += starmap(self._plan_failing_load, read_early.items())
        except Exception as e:  # noqa: BLE001  (the engine expects the other loads of the plan)
            self._counters.fault("spoiled_blocks_not_reported", error=repr(e))
        return jobs

    def drop(self, tracked: Tracked) -> None:
        """Drop the loads of a finished request that were not sent yet: the request's blocks may soon be reused."""
        if self._due:
            for load in [load for load in self._due if load.tracked is tracked]:
                self._due.remove(load)
                self._jobs.withdraw(load)

    def _plan_failing_load(self, request_id: str, blocks: Sequence[int]) -> Job:
        """Plan a load of `blocks` that every rank reports as failed, so that the engine computes their tokens again."""
        tracked = self._requests.tracked[request_id]
        owner = Owner(request_id, self._requests.new_epoch())  # another load of the request may be in flight
        self._catalog.lease(owner, [])
        try:
            job = self._jobs.load(LOAD_SYNC, tracked, _broken(0, blocks), owner).job
        except Exception:
            self._catalog.release(owner)
            raise
        self._counters["spoiled_blocks_reported"] += len(blocks)
        return job

    def rows(
        self, request: Request, tables: Tables, first: int, stop: int, *, beyond: int = 0
    ) -> tuple[list[int], list[Chunk]]:
        """Return the rows that copy units [first, stop) into the request's blocks, and the chunks that these rows read.

        `beyond` is the number of tokens of the last unit that are loaded; 0 stands for the whole unit. If a chunk was
        evicted, its rows make the job fail.

        Raises:
            LookupError: `first` lies within a block, a state has no block, or the table has too few blocks for the
            tokens. It is also raised if a part of a unit is requested in a model with states or windows.
        """
        # the engine already holds the block's first tokens, perhaps for other requests, too
        if first % self._geometry.whole_units:
            msg = f"a load from unit {first} on, within a block"
            raise LookupError(msg)
        if beyond and (self._geometry.states or self._geometry.tails):
            msg = f"blocks for {beyond} tokens of a unit, but states and windows exist only for whole units"
            raise LookupError(msg)
        rows: list[int] = []
        chunks: list[Chunk] = []
        for group, table in enumerate(tables):
            more, read = self._group_rows(request, group, table, first, stop)
            rows += more
            chunks += read
        return rows, chunks

    def _group_rows(
        self, request: Request, group: int, table: Sequence[Block], first: int, stop: int
    ) -> tuple[list[int], Iterable[Chunk]]:
        """Return the rows and chunks of one cache group, as `rows` does for all groups."""
        paging, in_chunk, base = self._paging[group], self._pages[group], first - first % self._per_chunk
        if group in self._geometry.states:
            first = base = stop - 1
            if table[first // self._geometry.units_per_block[group]].is_null:
                msg = f"no block for the state of {stop} units"
                raise LookupError(msg)
        stored, page = paging.stored(table, first, stop), paging.pages(first - base)
        if len(stored) < paging.pages(stop - base) - page:
            msg = f"a table of {len(table)} blocks for {stop} units"
            raise LookupError(msg)
        hashes = self._prefixes.hashes(request)
        chunks = self._prefixes.chunks(group, hashes, first, stop)
        pages = (list(range(in_chunk)) * len(chunks))[page : page + len(stored)]
        whose = list(chain.from_iterable(zip(*[chunks] * in_chunk, strict=True)))[page : page + len(stored)]
        blocks = [block.block_id for block in stored if not block.is_null]
        if len(blocks) < len(stored):  # null blocks lie before a sliding window
            wanted = [not block.is_null for block in stored]
            pages, whose = list(compress(pages, wanted)), list(compress(whose, wanted))
            chunks = list(dict.fromkeys(whose))
        if None in chunks:
            self._counters.fault("hit_vanished", request=request.request_id)
        last = chunks[-1] if chunks and stop % self._per_chunk else None
        if last is not None and last.marks[-1].key == (end := self._prefixes.key(hashes, stop)):
            self._catalog.keep_mark(last, end)
        rows = rows_of(group, BROKEN, pages, blocks)
        rows[1::4] = [chunk.slot if chunk is not None else BROKEN for chunk in whose]
        return rows, filter(None, chunks)


def _broken(group: int, blocks: Sequence[int]) -> list[int]:
    """Return rows of `blocks` that make their job fail on every rank."""
    return rows_of(group, BROKEN, [0] * len(blocks), blocks)
