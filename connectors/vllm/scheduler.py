"""The scheduler side: looks up, leases, plans saves and loads, and publishes what every rank has landed.

Nothing here keeps a copy of a token list or of a block table: vLLM's `Request` and cache manager are asked when a new
unit becomes final, so a preempted request that comes back with other blocks needs no special case. Work per step is
one comparison per scheduled request, plus work for what is new.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvpipe import misses
from kvpipe.catalog import Catalog, Chunk, Owner, Piece
from kvpipe.config import Settings
from kvpipe.connectors.vllm.adapters import Adapters
from kvpipe.connectors.vllm.prefixes import Prefixes
from kvpipe.connectors.vllm.room import Room
from kvpipe.connectors.vllm.saving import NEVER, Row, Saving
from kvpipe.connectors.vllm.spoiled import Part, Spoiled
from kvpipe.connectors.vllm.staging import PATIENCE_S, STAGE, Staging
from kvpipe.connectors.vllm.stale import Stale
from kvpipe.connectors.vllm.stall import Stall
from kvpipe.connectors.vllm.tracing import Answer, Teller
from kvpipe.connectors.vllm.tracked import REQUEST, Flight, Match, Tracked
from kvpipe.connectors.vllm.weights import Weights
from kvpipe.geometry import Geometry
from kvpipe.plan import BROKEN, Job, Kind, Order, StepPlan
from kvpipe.policy import make_policy
from kvpipe.statemachine import request as m
from kvpipe.statemachine.chunk import CHUNK
from kvpipe.statemachine.core import Compiled
from kvpipe.tiers.shelf import BREAKER
from kvpipe.trace.events import CacheReset
from kvpipe.trace.log import Counters
from kvpipe.trace.recorder import OFF, Recorder

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvpipe.connectors.vllm.kv_events import KvEvents
    from kvpipe.connectors.vllm.metadata import Tally
    from kvpipe.connectors.vllm.metrics import Values
    from kvpipe.tiers.finder import Finder

NO_TIERS: tuple[tuple[str, int], ...] = ()
SAVE_RETRIES_MAX = 3
LATER_STEPS_MAX = 100
"""For how many steps a lookup asks to be asked again, before the hit is given up."""


class SchedulerSide:
    """One per engine, in the scheduler's process, on its thread."""

    def __init__(
        self,
        settings: Settings,
        geometry: Geometry,
        *,
        hash_tokens: int,
        ranks: int,
        saves: bool,
        loads: bool,
        step_tokens_max: int = NEVER,
        trace: Recorder = OFF,
    ) -> None:
        """`saves` and `loads` follow from vLLM's kv_role; `step_tokens_max` is the most that a step computes."""
        self.settings, self.geometry = settings, geometry
        self.counters = Counters()
        self.trace, self._tell = trace, Teller(trace)
        trace.step = 1
        groups = len(geometry.groups)
        policy, ready = make_policy(settings.policy, geometry.slots), None if settings.prefault == "use" else 0
        self.catalog = Catalog(geometry.slots, groups, policy, self.counters, ready=ready)
        if trace.detail:
            self.trace_chunks()
        self.freeze, self.bypass = settings.freeze, settings.bypass
        self.tier_lost = False  # a rank cannot keep or bring anything any more: nothing is promised or planned
        self._saves, self._loads, self._ranks = saves, loads, ranks
        self._async = settings.load == "async" or geometry.loads_between_steps
        self._stall = Stall(geometry, settings.stall_ms_max) if settings.load == "auto" and not self._async else None
        self._unit, self._per_chunk = geometry.unit_tokens, geometry.units_per_chunk
        self.adapters = Adapters(ranks, settings.lookup_ms_max / 1000, self.counters)
        self._prefixes = Prefixes(self.catalog, geometry, hash_tokens, self.adapters.keys)
        self._saving = Saving(settings, geometry, self.catalog, self._prefixes, self.counters)
        self.events: KvEvents | None = None
        self._room = Room(geometry, step_tokens_max)
        self._spoiled = Spoiled(geometry.groups[0].block_tokens)
        self.weights, self._stale = Weights(ranks, self.counters), Stale()
        self.base_of: Callable[[str], str] = str  # the namespace's base, of the weights' digest
        self._left: set[int] = set()  # blocks of requests that were over before a sync load of their step was reported
        self._tracked: dict[str, Tracked] = {}
        self._flights: dict[int, Flight] = {}
        self._loads_due: list[Flight] = []
        self._step = 0
        self._patience_ns = int(settings.stuck_ms_max * 1e6 + PATIENCE_S * 1e9)
        self._next_job = self._epochs = 1
        self._manager: KVCacheManager | None = None
        self.staging: Staging | None = None
        self._unreadable: dict[int, frozenset[int]] = {}  # by rank
        self._ready: dict[int, int] = {}  # slots, by rank

    def use_tiers(self, finder: Finder) -> None:
        """Look beyond memory, through `finder`."""
        self.staging = Staging(
            finder,
            self.catalog,
            self._prefixes,
            self.geometry,
            ranks=self._ranks,
            lookup_ms_max=self.settings.lookup_ms_max,
            bytes_in_flight_max=int(self.settings.tier_bytes_in_flight_max),
            counters=self.counters,
            new_id=self._new_job_id,
            watch=self._tell.stage_moved if self.trace.detail else None,
            stores=self._saves,
            published=self._published,
        )

    # ---- vLLM's calls, in the order of a request's life -----------------------------------------------------------

    def bind(self, manager: KVCacheManager) -> None:
        """Remember the cache manager: the truth about block tables."""
        self._manager = self._saving.manager = self._stale.manager = manager
        self.weights.watch_resets(manager)
        if self.events is not None:
            self.events.watch(manager)

    def announce(self, events: KvEvents) -> None:
        """Tell `events` of what can be found from now on."""
        self.events, self.catalog.on_drop = events, events.dropped

    def trace_chunks(self) -> None:
        """Trace the moves of chunks that are reserved from now on."""
        self.catalog.watch = self._tell.chunk_moved

    def on_new_request(self, request: Request) -> Tracked:
        """Start to track. The id of a request that is over may be used again: it gets a new cursor."""
        old = self._tracked.get(request.request_id)
        if old is not None:
            if old.request is request:
                return old
            self.counters.fault("id_reused_before_finish", request=request.request_id)
            self._finish(old)
        self.adapters.begin(request)
        life, watch = self._tell.added(request)
        tracked = self._tracked[request.request_id] = Tracked(request, len(self.geometry.groups), life, watch)
        return tracked

    def lookup(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        """Return (external tokens, async), or (None, False): ask again. Takes nothing, so it may be asked any time."""
        tracked = self.on_new_request(request)
        self._notice_preemption(tracked)
        if tracked.state.row == m.RUNNING:
            tracked.fire(m.ASKED_ANEW)
        tracked.match = None
        why = self._why_not(tracked)
        unknown = self._unknown(tracked, local_tokens, why)
        if unknown is not None:
            return unknown
        if why:
            tracked.match = Match(self._step, local_tokens, 0)
            tracked.fire(m.LOOKUP_MISS)
            self._tell.answered(tracked, Answer(local_tokens, 0, request.num_tokens - local_tokens, why))
            return 0, False
        staging = self.staging
        if staging is not None and self.adapters.known(request):
            tracked.stage, waits = staging.ask(tracked.stage, request, local_tokens // self._unit, self._step)
            if waits:
                return self._later(tracked, local_tokens, misses.TIER_ASKED)
        units, waits = self._held(tracked, local_tokens)
        tokens = units * self._unit
        tracked.match = Match(self._step, local_tokens, units, waits)
        if not waits:
            # vLLM must compute at least one token; an async load may cover the whole prompt, it sees to it itself
            tokens = min(tokens, request.num_tokens - 1)
        external = max(0, tokens - local_tokens)
        missed = request.num_tokens - max(local_tokens, units * self._unit)  # the last token, if held, is no miss
        why = self._prefixes.why_short(request, max(units, local_tokens // self._unit)) if missed > 0 else ""
        staged = NO_TIERS
        if staging is not None:
            why, staged = staging.why(tracked.stage, why), staging.brought(tracked.stage, external)
        if not external:
            tracked.fire(m.LOOKUP_MISS)
            self.counters["lookup_miss"] += 1
            self._tell.answered(tracked, Answer(local_tokens, 0, max(0, missed), why))
            return 0, False
        if waits and self._room and self._manager is not None and not self._room.fits(request, self._manager):
            return self._ask_later(tracked, local_tokens, misses.NO_ROOM)
        tracked.fire(m.LOOKUP_HIT)
        self.counters["lookup_hit"] += 1
        self._tell.answered(tracked, Answer(local_tokens, external, max(0, missed), why, staged=staged))
        return external, waits

    def _held(self, tracked: Tracked, local_tokens: int) -> tuple[int, bool]:
        """Return (units of the prefix that can be loaded, whether asynchronously)."""
        units = self._prefixes.longest(tracked.request)
        waits = tracked.state.row != m.LET_DOWN and self._waits(units * self._unit - local_tokens)
        if waits and not self.adapters.certain(tracked.request):  # it could land before the ranks hold another adapter
            return 0 if self._async else units, False
        return units, waits

    def _unknown(self, tracked: Tracked, local_tokens: int, why: str) -> tuple[int | None, bool] | None:
        """Return the answer while nobody knows which weights or which adapter count, and None otherwise."""
        if self.weights.doubtful and why != misses.LOAD_FAILED:  # vLLM's own cache may be out of date, too
            return self._ask_later(tracked, local_tokens, misses.WEIGHTS)
        if self.adapters.waits(tracked.request, self._step, worth=self.staging is not None and not self.bypass):
            return self._later(tracked, local_tokens, misses.ADAPTER)
        return None

    def _later(self, tracked: Tracked, local_tokens: int, why: str) -> tuple[None, bool]:
        """Ask to be asked again."""
        missed = tracked.request.num_tokens - local_tokens
        self._tell.answered(tracked, Answer(local_tokens, 0, missed, why, later=True))
        tracked.fire(m.LOOKUP_LATER)
        return None, False

    def _waits(self, tokens: int) -> bool:
        """Whether a load of `tokens` is asynchronous."""
        return self._async or (self._stall is not None and self._stall.too_long(tokens, loading=bool(self._room)))

    def _why_not(self, tracked: Tracked) -> str:
        """Return why nothing is loaded for this request, whatever is held."""
        if self.bypass:
            return misses.BYPASS
        if tracked.request.skip_reading_prefix_cache:  # vLLM would take no hit: it needs every token of the prompt
            return misses.NOT_READ
        if not self._loads:
            return misses.NO_CONSUMER
        if self.tier_lost:
            return misses.TIER_DOWN
        row = tracked.state.row
        return misses.LOAD_FAILED if row == m.RECOMPUTING or (row == m.LET_DOWN and self._async) else ""

    def _ask_later(self, tracked: Tracked, local_tokens: int, why: str) -> tuple[int | None, bool]:
        """Wait for others' loads to end, or for the ranks to say which weights they have; after a while compute."""
        tracked.later = tracked.later or self._step + LATER_STEPS_MAX
        missed, later = tracked.request.num_tokens - local_tokens, self._step < tracked.later
        self._tell.answered(tracked, Answer(local_tokens, 0, missed, why, later=later))
        if not later:
            tracked.match = Match(self._step, 0, 0)  # what is held now may be evicted before it is computed
            tracked.fire(m.LOOKUP_MISS)
            self.counters["lookup_gave_up"] += 1
            return 0, False
        tracked.fire(m.LOOKUP_LATER)
        self.counters["lookup_later"] += 1
        return None, False

    def admitted(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """Blocks were allocated: lease and plan the load of `external_tokens`, or note that there is none."""
        tracked = self.on_new_request(request)
        self._notice_preemption(tracked)
        match, tracked.match = tracked.match, None
        if match is not None:
            self._entered(request, match.local_tokens)
        if external_tokens <= 0:
            tracked.fire(m.ADMIT_EMPTY)
            if match is not None:
                self._begin_admission(tracked, match.units, blocks)
                self._tell.admitted(tracked, "")
            self._end_stage(tracked)
            return
        self._begin_admission(tracked, match.units if match is not None else 0, blocks)
        waits = self._async if match is None else match.waits
        kind = Kind.LOAD_ASYNC if waits else Kind.LOAD_SYNC
        owner = Owner(request.request_id, tracked.epoch)
        self.trace.about(*owner)
        self._tell.admitted(tracked, kind.name.lower())
        chunks: list[Chunk] = []
        try:
            tracked.fire(m.ADMIT_LOAD)  # first: the report of its failure finds a request that is loading
            if match is None or match.step != self._step:
                msg = f"blocks for {external_tokens} tokens that no lookup of this pass has promised"
                raise LookupError(msg)  # noqa: TRY301
            first = match.local_tokens // self._unit
            stop = -(-(match.local_tokens + external_tokens) // self._unit)
            rows, chunks = self._load_rows(request, blocks, first, stop)
            self.catalog.lease(owner, chunks)
            if self.staging is not None:
                self.staging.stores.used(chunks)
        except Exception as e:  # noqa: BLE001  (vLLM counts on the load now: it must be reported, as failed)
            self.counters.fault("load_not_planned", request=request.request_id, error=repr(e))
            self.catalog.release(owner)
            rows = [(group, BROKEN, 0, b.block_id) for group, t in enumerate(blocks.blocks) for b in t if not b.is_null]
        if self._spoiled:
            self._spoiled.discard(row[3] for row in rows)
        flight = self._take_off(kind, tracked, rows, (), owner, 0)
        self._loads_due.append(flight)
        self._tell.load_planned(tracked, flight.job, external_tokens, len(chunks))
        if waits:
            self._room.park(request)
        elif self._stall is not None:
            self._stall.due += external_tokens
        self.counters["tokens_loaded"] += external_tokens

    def _entered(self, request: Request, local_tokens: int) -> None:
        """What vLLM holds of the request is of use, too, though it needs no copy of it."""
        self.adapters.admitted(request, self._step + 1, local_tokens)
        if local_tokens:
            self.catalog.refresh(self._prefixes.chunks_from_the_end(request, local_tokens // self._unit))

    def plan_step(self, output: SchedulerOutput) -> StepPlan:
        """Plan the step: the loads that were admitted, and a save for every request with newly final units."""
        for request_id in output.preempted_req_ids or ():
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                self._notice_preemption(tracked, told=True)
        self._stale.plan_step(output.preempted_req_ids or ())
        if self._room:
            self._room.leave(output.num_scheduled_tokens.keys())
        if self._stall is not None:
            self._stall.running, self._stall.due = len(output.num_scheduled_tokens), 0
        jobs = (*self._plan_loads(output), *self._plan_saves(output))
        orders = self._plan_orders()
        self._step += 1
        self.trace.step = self._step + 1  # what comes now belongs to the step that is planned next
        space = self.staging.space.name if self.staging is not None else ""
        return StepPlan(self._step, jobs, orders, space, self.weights.ask(), self.adapters.claims(jobs))

    def _plan_orders(self) -> tuple[Order, ...]:
        """Plan what goes to and comes from tiers."""
        if self.staging is None:
            return ()
        self.trace.about("", 0)
        return self.staging.plan(stores=not (self.freeze or self.bypass or self.weights.doubtful))

    def _plan_loads(self, output: SchedulerOutput) -> list[Job]:
        due, self._loads_due = self._loads_due, []
        if self._left and not any(flight.job.kind == Kind.LOAD_SYNC for flight in self._flights.values()):
            self._left.clear()
        for flight in due:
            if flight.tracked.job == flight.job.id and flight.tracked.state.row == m.ALLOCATED:
                flight.tracked.fire(m.DISPATCH)
        jobs = [flight.job for flight in due]
        if self._spoiled:
            try:
                jobs += self._condemn(output)
            except Exception as e:  # noqa: BLE001  (vLLM counts on the other loads of the plan)
                self.counters.fault("spoiled_blocks_not_reported", error=repr(e))
        return jobs

    def _plan_saves(self, output: SchedulerOutput) -> list[Job]:
        jobs: list[Job] = []
        if not self._saves or self.freeze or self.bypass or self.tier_lost or self.weights.doubtful:
            return jobs
        tracked_of = self._tracked
        for request_id, scheduled in output.num_scheduled_tokens.items():
            tracked = tracked_of.get(request_id)
            if tracked is None:
                self.counters.fault("scheduled_unknown_request", request=request_id)
                continue
            end = tracked.request.num_computed_tokens + scheduled
            if end >= tracked.next_at:
                job = self._try_save(tracked, end)
                if job is not None:
                    jobs.append(job)
        return jobs

    def reported(self, tallies: dict[int, Tally], rate: float = 0.0) -> None:
        """Ranks have ended jobs: publish, release, or fail them once all ranks have spoken.

        `rate`: bytes per second of the slowest one's loads; 0: none has loaded yet.
        """
        if self._stall is not None and rate:
            self._stall.rate = rate
        for job_id, tally in sorted(tallies.items()):  # pieces of a chunk land in the order of their jobs
            flight = self._flights.get(job_id)
            if flight is None:
                self._order_reported(job_id, tally)
                continue
            flight.ok += tally.ok
            if tally.bad and flight.owner is not None:
                self._distrust(flight)  # at the first bad news, before other ranks' saves are believed
            flight.bad += tally.bad
            if flight.ok + flight.bad >= self._ranks:
                self._land(flight)

    def tiers_left(self, unreadable: dict[int, frozenset[int]]) -> None:
        """Ranks have said which tiers they leave alone from now on."""
        if unreadable and self.staging is not None:
            self._unreadable |= unreadable
            self.staging.finder.unreadable = frozenset().union(*self._unreadable.values())

    def slots_ready(self, ready: dict[int, int]) -> None:
        """Ranks have said how many of their slots, from the first on, may be used. All of them count, or none."""
        self._ready |= ready
        if ready and len(self._ready) == self._ranks:
            self.catalog.use_more(min(self._ready.values()))

    def _order_reported(self, order_id: int, tally: Tally) -> None:
        try:
            known = self.staging is not None and self.staging.reported(order_id, tally)
        except Exception as e:  # noqa: BLE001  (other reports of the step must be heard)
            self.counters.fault("order_not_landed", order=order_id, error=repr(e))
            return
        if not known:
            self.counters["reported_again"] += 1

    def invalidated(self, blocks: set[int]) -> None:
        """VLLM was told that sync loads into `blocks` failed, ours or somebody else's.

        Nothing that is being saved is believed. A load of ours has failed now, though its report may come much later.
        """
        for flight in list(self._flights.values()):
            if flight.owner is None:
                flight.distrusted = True
            elif flight.job.kind == Kind.LOAD_SYNC and blocks & flight.job.blocks():
                self._distrust(flight)
                if flight.tracked.job == flight.job.id:
                    flight.tracked.fire(m.LOAD_FAILED)

    def finished(self, request: Request) -> None:
        """The request is over, in whatever state. Its jobs in flight end by themselves."""
        tracked = self._tracked.get(request.request_id)
        if tracked is not None and tracked.request is request:
            self._saving.ended(request)
            if any(flight.job.kind == Kind.LOAD_SYNC for flight in self._flights.values()):
                self._left |= self._blocks_of(request.request_id)
            self.catalog.refresh(self._prefixes.chunks_from_the_end(request, len(request.block_hashes)))
            self._finish(tracked)
            if self.staging is not None:
                self.staging.stores.ended(tracked)

    def weighed(self, told: dict[int, tuple[int, str]]) -> None:
        """Ranks have read their weights again. If they are others, nothing is left that was computed with them."""
        if told and self.weights.answered(told):
            self.weights_changed()

    def weights_changed(self) -> None:
        """Forget what was computed with others, and keep nothing of what goes on with it."""
        self._forget()
        self._stale.begin(self._tracked)
        self.name_space()

    def name_space(self) -> None:
        """Keep chunks in tiers under the name of the weights as they are now; if they are not known, nowhere."""
        if self.staging is not None:
            self.staging.space.base = self.base_of(self.weights.digest) if self.weights.digest else ""

    def reset(self) -> bool:
        """Forget every chunk, for good: in tiers, too, nothing is found again that was kept before."""
        self.counters["reset"] += 1
        self._forget()
        if self.staging is not None:
            self.staging.space.renew()
        return True

    def _forget(self) -> None:
        """Forget every chunk. Jobs in flight are not published any more."""
        dropped = self.catalog.reset()
        self.trace.put(CacheReset(*self.trace.of("", 0), chunks=dropped))
        for tracked in self._tracked.values():
            self._saving.give_up(tracked)  # the KV that it goes on with may be what the reset was meant to forget
            tracked.epoch = self._new_epoch()
            tracked.match = None
        if self.staging is not None:
            self.staging.forget()
        self.counters["reset_chunks"] += dropped

    @property
    def pending(self) -> bool:
        """Whether ranks owe reports that should come soon: an engine that has nothing else to do steps until they have.

        A rank fails a job that does not move for `stuck_ms_max`. A report that has not come some time after that may be
        lost; if it is not, it comes with the next step there is.
        """
        last = next(reversed(self._flights.values()), None)
        if last is not None and time.monotonic_ns() - last.born_ns < self._patience_ns:
            return True
        return self.staging is not None and self.staging.pending

    def stats(self) -> dict[str, int]:
        """Counters and gauges, for tests, the demo and operators."""
        c = self.catalog
        gauges = {
            "slots": c.slots,
            "slots_used": c.used,
            "slots_ready": c.ready,
            "leases": c.leases,
            "pieces_writing": c.writing,
        }
        orders = self.staging.orders if self.staging is not None else 0
        gauges |= {"jobs_in_flight": len(self._flights), "orders_in_flight": orders, "requests": len(self._tracked)}
        return dict(self.counters) | gauges

    def totals(self) -> Values:
        """Return what the metrics say of this side, as of now."""
        from kvpipe.connectors.vllm.metrics import left  # noqa: PLC0415  (imports vllm)

        c, tell, now_ns = self.catalog, self._tell, time.monotonic_ns()
        stuck_ns = self.settings.stuck_ms_max * 1_000_000
        old = itertools.takewhile(lambda flight: now_ns - flight.born_ns > stuck_ns, self._flights.values())
        gauges = {
            "pool_chunks": c.slots, "pool_chunks_ready": c.ready, "pool_chunks_used": c.used, "leases": c.leases,
            "oldest_lease_seconds": c.oldest_lease_s, "requests": len(self._tracked),
            "jobs_in_flight": len(self._flights), "stuck_jobs": sum(1 for _ in old),
            "frozen": self.freeze, "preemptions": self.counters["preempted"], "evictions": self.counters["evicted"],
        }  # fmt: skip
        values: Values = {name: {"": value} for name, value in gauges.items()}
        if self.staging is not None:
            values["tiers_left"] = left(self.staging.finder.shelves)
        values |= {"hit_tokens": tell.hit_tokens, "missed_tokens": tell.missed_tokens, "misses": tell.misses}
        return values | {"faults": self.counters.faults, "trace_dropped": self.trace.losses}

    def machines(self) -> tuple[Compiled, ...]:
        """Return the machines whose cursors this side owns."""
        return REQUEST, CHUNK.compile(), STAGE, BREAKER

    # ---- loading --------------------------------------------------------------------------------------------------

    def _load_rows(
        self, request: Request, blocks: KVCacheBlocks, first: int, stop: int
    ) -> tuple[list[Row], list[Chunk]]:
        """Return the rows that bring units [first, stop) into `blocks`, and the chunks they read."""
        hashes = self._prefixes.hashes(request)
        rows: list[Row] = []
        chunks: list[Chunk] = []
        for group, table in enumerate(blocks.blocks):
            pages = self.geometry.pages_per_unit[group]
            for base in range(first // self._per_chunk * self._per_chunk, stop, self._per_chunk):
                low, high = max(base, first), min(base + self._per_chunk, stop)
                wanted = [
                    (page - base * pages, table[page].block_id)
                    for page in range(low * pages, high * pages)
                    if not table[page].is_null
                ]
                if not wanted:  # wholly outside of a sliding window
                    continue
                chunk = self._prefixes.holding(group, hashes, base, high)
                if chunk is None:
                    self.counters.fault("hit_vanished", request=request.request_id)
                    rows += [(group, BROKEN, page, block) for page, block in wanted]
                    continue
                if self._partial_use(chunk, hashes, high):
                    self.catalog.keep_mark(chunk, self._prefixes.key(hashes, high))
                chunks.append(chunk)
                rows += [(group, chunk.slot, page, block) for page, block in wanted]
        return rows, chunks

    def _partial_use(self, chunk: Chunk, hashes: Sequence[bytes], stop: int) -> bool:
        return stop % self._per_chunk != 0 and chunk.identity == self._prefixes.key(hashes, stop)

    def _condemn(self, output: SchedulerOutput) -> list[Job]:
        """Plan loads that fail, for requests that would read what an earlier one has left: vLLM computes it anew."""
        assert self._manager is not None  # noqa: S101  (bound before the first step)
        held = self._manager.coordinator.single_type_managers[0].req_to_blocks
        tables = {request_id: [block.block_id for block in held.get(request_id, ())] for request_id in self._tracked}
        self._spoiled.keep({block for table in tables.values() for block in table})
        parts = []
        for request_id, scheduled in output.num_scheduled_tokens.items():
            if request_id in tables:
                start = self._tracked[request_id].request.num_computed_tokens
                parts.append(Part(request_id, tables[request_id], start, start + scheduled))
        condemned = []
        for request_id, blocks in self._spoiled.readers(parts).items():
            owner = Owner(request_id, self._new_epoch())  # its own: another load of the request may be in flight
            self.catalog.lease(owner, [])
            rows = [(0, BROKEN, 0, block) for block in blocks]
            condemned.append(self._take_off(Kind.LOAD_SYNC, self._tracked[request_id], rows, (), owner, 0).job)
            self.counters["spoiled_blocks_reported"] += len(blocks)
        return condemned

    # ---- saving ---------------------------------------------------------------------------------------------------

    def _try_save(self, tracked: Tracked, end: int) -> Job | None:
        """Plan one request's save. What goes wrong costs this save only: loads of the step depend on the plan."""
        pieces: list[Piece] = []
        self.trace.about(tracked.request.request_id, tracked.epoch)
        try:
            rows, first = self._saving.plan(tracked, end, pieces)
            if not pieces:
                return None
            job = self._take_off(Kind.SAVE, tracked, rows, tuple(pieces), None, first).job
            self._tell.save_planned(tracked, job)
        except Exception as e:  # noqa: BLE001
            self.counters.fault("save_not_planned", request=tracked.request.request_id, error=repr(e))
            for piece in pieces:
                self.catalog.lost(piece)
            self._saving.give_up(tracked)
            return None
        return job

    # ---- jobs -----------------------------------------------------------------------------------------------------

    def _take_off(
        self,
        kind: Kind,
        tracked: Tracked,
        rows: list[Row],
        pieces: tuple[Piece, ...],
        owner: Owner | None,
        unit: int,
    ) -> Flight:
        packed = np.asarray(rows, dtype="<i4").tobytes()
        job = Job(self._new_job_id(), int(kind), tracked.request.request_id, tracked.epoch, packed)
        flight = self._flights[job.id] = Flight(job, tracked, pieces, owner, unit)
        if owner is not None:
            tracked.job = job.id
        return flight

    def _land(self, flight: Flight) -> None:
        if self._flights.pop(flight.job.id, None) is None:
            return
        tracked = flight.tracked
        self.trace.about(flight.job.request, flight.job.epoch)
        if flight.owner is None:
            self._land_save(flight)
            return
        leases = self.catalog.release(flight.owner)
        self._tell.load_ended(tracked, flight.job, leases, ok=not flight.bad)
        if tracked.job == flight.job.id:
            tracked.job = 0
            tracked.fire(m.LOAD_FAILED if flight.bad else m.LOADED)

    def _published(self, request: Request, piece: Piece) -> None:
        """Tell routers of what can be found now, if anybody listens."""
        if self.events is not None and piece.chunk.marks:  # else another copy was quicker
            self.events.published(request, piece.chunk, piece.base)

    def _saved(self, tracked: Tracked, piece: Piece) -> None:
        self.counters["pieces_published"] += 1
        if tracked.state.row == m.FINISHED:  # it has ended here, as in `Saving.ended`
            self.catalog.keep_mark(piece.chunk, piece.key)
        if self.staging is not None:
            self.staging.stores.landed(tracked, piece.chunk, piece.stop)
        self._published(tracked.request, piece)

    def _land_save(self, flight: Flight) -> None:
        if not flight.bad and not flight.distrusted:
            for piece in flight.pieces:
                if self.catalog.landed(piece):
                    self._saved(flight.tracked, piece)
            return
        self.counters.fault("save_failed", request=flight.job.request, job=flight.job.id)
        for piece in flight.pieces:
            self.catalog.lost(piece)
        tracked = flight.tracked
        if tracked.epoch != flight.job.epoch:
            return
        tracked.opened = [None] * len(tracked.opened)
        load = self._flights.get(tracked.job)
        if load is not None and load.distrusted:  # it is over with this admission, though not every rank has spoken yet
            return
        if tracked.retries < SAVE_RETRIES_MAX and tracked.state.row != m.RECOMPUTING:
            tracked.retries += 1
            tracked.saved = min(tracked.saved, flight.unit)
            tracked.next_at = 0

    def _distrust(self, failed: Flight) -> None:
        """A load failed: what was computed since it was planned may rest on garbage, by whomever. Idempotent."""
        if failed.distrusted:
            return
        failed.distrusted = True
        kind = Kind(failed.job.kind).name.lower()
        self.counters.fault("load_failed", request=failed.job.request, job=failed.job.id, kind=kind)
        if failed.tracked.epoch == failed.job.epoch:
            self._saving.give_up(failed.tracked)
        if failed.job.kind == Kind.LOAD_SYNC:
            self._spoiled.add(failed.job.blocks())
            self._forget_local_hits(failed)
            for flight in self._flights.values():
                if flight.owner is None and flight.job.id > failed.job.id:
                    flight.distrusted = True

    def _forget_local_hits(self, failed: Flight) -> None:
        """Take what the failed sync load was to fill, and what may rest on it, out of vLLM's own prefix cache.

        vLLM offers a sync load's blocks to others from their allocation on and, with policy `recompute`, leaves them
        there when the load fails: a preemption or abort before they are recomputed would make garbage a local hit.
        """
        if self._manager is None:
            return
        blocks = failed.job.blocks() | self._left
        for request_id in self._tracked:
            blocks |= self._blocks_of(request_id)
        self._manager.evict_blocks(blocks)

    def _blocks_of(self, request_id: str) -> set[int]:
        """Return the blocks that a request holds, of all groups."""
        managers = self._manager.coordinator.single_type_managers if self._manager is not None else ()
        return {block.block_id for one in managers for block in one.req_to_blocks.get(request_id, ())}

    # ---- requests -------------------------------------------------------------------------------------------------

    def _new_job_id(self) -> int:
        """Jobs and orders are numbered together: ranks report both by their number."""
        self._next_job += 1
        return self._next_job - 1

    def _end_stage(self, tracked: Tracked) -> None:
        if self.staging is not None:
            self.staging.end(tracked.stage)
        tracked.stage = None

    def _new_epoch(self) -> int:
        """Epochs are unique in the engine, so that a reused request id never meets an older one's leases."""
        self._epochs += 1
        return self._epochs

    def _begin_admission(self, tracked: Tracked, held_units: int, blocks: KVCacheBlocks) -> None:
        """New blocks: what the catalog holds need not be saved, everything beyond it is open again."""
        tracked.epoch = self._new_epoch()
        self._end_stage(tracked)
        tracked.later = 0
        tracked.saved = held_units
        tracked.next_at = tracked.retries = 0
        tracked.opened = [None] * len(tracked.opened)
        if self._stale.rests_on(tracked.request.request_id, blocks):
            self._saving.give_up(tracked)

    def _notice_preemption(self, tracked: Tracked, *, told: bool = False) -> None:
        """VLLM counts preemptions on the request: the notice itself may be late, or never come."""
        now = tracked.request.num_preemptions
        if now != tracked.preemptions:
            tracked.preemptions = now
            tracked.next_at = NEVER
            tracked.fire(m.PREEMPT)
            self.counters["preempted"] += 1
        elif told:
            tracked.fire(m.PREEMPT_LATE)

    def _finish(self, tracked: Tracked) -> None:
        tracked.fire(m.FINISH)
        self._end_stage(tracked)
        self.adapters.end(tracked.request)
        self._room.leave([tracked.request.request_id])
        tracked.next_at = NEVER
        self._stale.leave(tracked.request.request_id)
        del self._tracked[tracked.request.request_id]
        due = [f for f in self._loads_due if f.tracked is tracked]
        for flight in due:  # never sent: nobody will report it
            self._loads_due.remove(flight)
            self._flights.pop(flight.job.id, None)
            if flight.owner is not None:
                self._tell.load_dropped(tracked, flight.job, self.catalog.release(flight.owner))
        self._tell.done(tracked)
