"""Plans loads of hits: sync or async, and from which chunks' pages into which of the engine's blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, compress, starmap
from typing import TYPE_CHECKING

from kvpipe.cache.catalog import Catalog, Chunk, Owner
from kvpipe.cache.prefixes import Prefixes
from kvpipe.config import Settings
from kvpipe.geometry import Geometry
from kvpipe.messages import BROKEN, LOAD_ASYNC, LOAD_SYNC, Job, rows_of
from kvpipe.scheduler.jobs import JobInFlight, Jobs
from kvpipe.scheduler.records import Tracked
from kvpipe.scheduler.requests import Requests
from kvpipe.scheduler.stall import Stall
from kvpipe.statemachine import lookup as lookup_m
from kvpipe.statemachine import request as m
from kvpipe.trace.log import Counters

if TYPE_CHECKING:
    from kvpipe.scheduler.base import Block, Recovery, Request, Step, Tables
    from kvpipe.scheduler.fetches import Staging
    from kvpipe.scheduler.report import RequestReporter
    from kvpipe.trace.recorder import Recorder


class Loading:
    """One per scheduler side. `between_steps`: all loads are asynchronous."""

    def __init__(
        self,
        settings: Settings,
        geometry: Geometry,
        *,
        catalog: Catalog,
        prefixes: Prefixes,
        requests: Requests,
        jobs: Jobs,
        report: RequestReporter,
        staging: Staging | None,
        recovery: Recovery,
        counters: Counters,
        trace: Recorder,
        stages: int,
    ) -> None:
        """`settings`: `load` and `stall_ms_max`. `staging`: None without tiers.

        `stages`: pipeline stages. With more than one, a sync load's failure is known only when later steps run already,
        so all loads are asynchronous.
        """
        self._geometry, self._catalog, self._prefixes, self._counters = geometry, catalog, prefixes, counters
        self._requests, self._jobs, self._staging = requests, jobs, staging
        self._recovery, self._report, self._trace = recovery, report, trace
        self._unit, self._per_chunk = geometry.unit_tokens, geometry.units_per_chunk
        self._paging, self._pages = geometry.paging, geometry.pages_per_chunk
        self.between_steps = settings.load == "async" or stages > 1 or geometry.loads_between_steps
        either = settings.load == "auto" and not self.between_steps
        self.stall = Stall(geometry, settings.stall_ms_max) if either else None
        self._due: list[JobInFlight] = []

    def waits(self, tokens: int) -> bool:
        """Whether a load of `tokens` tokens is to be asynchronous."""
        if self.stall is None:
            return self.between_steps
        return self.between_steps or self.stall.too_long(tokens, loading=bool(self._requests.waiting))

    def drops(self, external_tokens: int, local_tokens: int) -> bool:
        """Whether a hit of `external_tokens` is only what the engine drops of each hit in its own prefix cache.

        Then it is computed anew: if all loads are asynchronous, every request with such a hit would wait for its load.
        """
        return local_tokens > 0 and 0 < external_tokens <= self._geometry.dropped_units * self._unit

    def admit(self, tracked: Tracked, tables: Tables, external_tokens: int, step: int) -> None:
        """Blocks were allocated: lease chunks and plan the load of `external_tokens`; 0: note that there is no load.

        Never raises for a load: one that cannot be planned goes out to fail, because the engine counts on its report.
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
            if asked:  # else its lookup has raised, or there was none
                self._report.admitted(tracked, loads=False)
                asking.admit()
            return
        if not asked:
            asking.waits = self.between_steps
        waits = asking.waits
        kind = LOAD_ASYNC if waits else LOAD_SYNC
        owner = Owner(request.request_id, tracked.life.epoch)
        self._trace.about(*owner)
        chunks: list[Chunk] = []
        try:
            tracked.fire(m.ADMIT_LOAD)  # first: the report of its failure finds a request that is loading
            self._report.admitted(tracked, loads=True)
            if asked:
                asking.admit()
            self._requests.begin_admission(tracked, held_units, tables)
            if not stands:
                msg = f"blocks for {external_tokens} tokens that no lookup of this pass has promised"
                raise LookupError(msg)  # noqa: TRY301
            first = asking.local // self._unit
            stop = -(-(asking.local + external_tokens) // self._unit)
            rows, chunks = self.rows(request, tables, first, stop, beyond=(asking.local + external_tokens) % self._unit)
            self._catalog.lease(owner, chunks)
            if self._staging is not None:
                self._staging.stores.used(chunks)
        except Exception as e:  # noqa: BLE001  (the engine counts on the load now: it must be reported, as failed)
            self._counters.fault("load_not_planned", request=request.request_id, error=repr(e))
            self._catalog.release(owner)
            tracked.saving.give_up()
            blocks = [[block.block_id for block in table if not block.is_null] for table in tables]
            rows = list(chain.from_iterable(starmap(_broken, enumerate(blocks))))
        self._recovery.planned(rows[3::4])
        self._due.append(self._jobs.load(kind, tracked, rows, owner, tokens=external_tokens, leases=len(chunks)))
        if waits:
            self._requests.waiting[request.request_id] = request
        elif self.stall is not None:
            self.stall.due += external_tokens
        self._counters["tokens_loaded"] += external_tokens

    def plan_step(self, step: Step) -> list[Job]:
        """Return the loads that were admitted since the last step, and those that the engine needs to fail."""
        if self.stall is not None:
            self.stall.running, self.stall.due = len(step.num_scheduled_tokens), 0
        due, self._due = self._due, []
        jobs: list[Job] = []
        for load in due:
            tracked = load.tracked
            if tracked.load_job_id == load.key and tracked.state.row == m.ALLOCATED:
                tracked.fire(m.DISPATCH)  # else its admission was illegal: it goes out to fail
            jobs.append(load.job)
        try:
            read_early = self._recovery.begin_step(step, self._requests, loading=self._jobs.sync_loads > 0)
            if read_early:
                jobs += starmap(self._plan_failing_load, read_early.items())
        except Exception as e:  # noqa: BLE001  (the engine counts on the other loads of the plan)
            self._counters.fault("spoiled_blocks_not_reported", error=repr(e))
        return jobs

    def drop(self, tracked: Tracked) -> None:
        """Drop the loads of a finished request that were not sent yet: its blocks may soon be another's."""
        if self._due:
            for load in [load for load in self._due if load.tracked is tracked]:
                self._due.remove(load)
                self._jobs.withdraw(load)

    def _plan_failing_load(self, request_id: str, blocks: Sequence[int]) -> Job:
        """Plan a load of `blocks` that every rank reports as failed, so that the engine computes them anew."""
        tracked = self._requests.tracked[request_id]
        owner = Owner(request_id, self._requests.new_epoch())  # its own: another load of the request may be in flight
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
        """Return the rows that copy units [first, stop) into the request's blocks, and the chunks that they read.

        `beyond`: how many tokens of the last unit are wanted; 0: all. A chunk that is gone gets rows that fail the job.

        Raises:
            LookupError: `first` lies within a block; a part of a unit is wanted where states or windows rule that out;
                or there is no block for a state, or for all tokens.

        """
        if first % self._geometry.whole_units:  # of which the engine has the beginning, and perhaps shares it
            msg = f"a load from unit {first} on, within a block"
            raise LookupError(msg)
        if beyond and (self._geometry.states or self._geometry.tails):
            msg = f"blocks for {beyond} tokens of a unit, whose state nobody has"
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
        """Return what `rows` does, of one cache group."""
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
        if len(blocks) < len(stored):  # the others lie before a sliding window
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
    """Return rows of `blocks` that fail their job on every rank."""
    return rows_of(group, BROKEN, [0] * len(blocks), blocks)
