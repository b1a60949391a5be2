"""The laws, as checks of a trial: functions, each with the sentence that it holds.

A check returns what is wrong, or nothing. Those marked *outside* hold for any connector, the others look into kvpipe.
They run after each step that vLLM has scheduled, after each whose results it has digested, or when nothing is left to
do. Whoever imports `Watched` from here has them registered.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from kvpipe.cache.catalog import Chunk
from kvpipe.cache.tenants import AdapterIdentity
from kvpipe.connectors.vllm.trial import adapters
from kvpipe.connectors.vllm.trial.announced_blocks import events_are_the_catalog, what_is_announced_is_found
from kvpipe.connectors.vllm.trial.efficacy import covers, find, held, keys_of
from kvpipe.connectors.vllm.trial.laws import INVARIANTS, LAWS, OVER_MAX, SEEN_BY_TRIALS, invariant
from kvpipe.connectors.vllm.trial.operators import carry_out
from kvpipe.connectors.vllm.trial.shapes import CONSUMER
from kvpipe.connectors.vllm.trial.watched import Final, Watched, admission
from kvpipe.messages import ROW_BYTES
from kvpipe.scheduler.records import SAVE_RETRIES_MAX
from kvpipe.testing.catalog_integrity import check_integrity
from kvpipe.tiers.finder import NAME_BYTES

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvpipe.geometry import Geometry

__all__ = [
    "INVARIANTS", "LAWS", "SEEN_BY_TRIALS", "Watched", "events_are_the_catalog", "what_is_announced_is_found",
]  # fmt: skip


@invariant(1, sentence="Nothing raises into vLLM, and no fault is counted that nobody has caused.")
def only_faults_that_were_caused(watched: Watched) -> Iterator[str]:
    """Fault counters against the disturbances of the trial."""
    yield from watched.new_faults()


@invariant(
    2,
    5,
    10,
    sentence="A chunk that can be found holds, on every rank and layer, the KV of exactly the prefix of its key.",
)
def findable_chunks_are_whole_and_true(watched: Watched) -> Iterator[str]:
    """Every byte of what became findable since the last check."""
    catalog, geometry = watched.trial.side.catalog, watched.trial.side.geometry
    now: dict[tuple[int, bytes], tuple[int, int]] = {}
    for group in range(0 if watched.trial.side.weights.doubtful else len(geometry.groups)):
        for key, chunk in catalog.index(group).items():
            units = next(mark.units for mark in chunk.marks if mark.key == key)
            now[group, key] = (chunk.slot, units)
            if watched.findable.get((group, key)) != (chunk.slot, units):
                yield from _false_bytes(watched, group, key, chunk, units)
    watched.findable = now


def _false_bytes(watched: Watched, group: int, key: bytes, chunk: Chunk, units: int) -> Iterator[str]:
    known = watched.trial.prefixes.get(key)
    if known is None:
        yield f"a key that no request has: slot {chunk.slot}, group {group}"
        return
    whole = watched.trial.side.geometry
    ahead = 0 if group in whole.states else watched.trial.side.prefixes.ahead_tokens
    sequence, stop = known[0], known[1] - ahead
    stored = min(whole.unit_tokens, whole.pages_per_unit[group] * whole.groups[group].block_tokens)
    kind = whole.groups[group]
    first, tokens = stop - units * whole.unit_tokens, kind.block_tokens if kind.state else units * stored
    for rank in watched.trial.ranks:
        pool, geometry = watched.trial.engines[rank.index]._pool, rank.kvpipe.geometry  # noqa: SLF001
        layers = [layer for layer in rank.layers if layer.group == group]
        for layer, offset in zip(layers, geometry.layer_offsets[group], strict=True):
            held = pool.slot(chunk.slot)[offset : offset + tokens // layer.shards * 8].numpy().view(np.uint64)
            true, mine = layer.content(sequence, 0, stop), layer.held(first, stop)
            kept = mine[(mine - first) % geometry.unit_tokens >= geometry.unit_tokens - stored]
            differs = np.flatnonzero(held != (true[-1] if kind.state else true[kept]))
            if len(differs):
                yield f"slot {chunk.slot}, rank {rank.index}, layer {layer.name}: {len(differs)} of {tokens} tokens"


@invariant(
    3,
    5,
    10,
    sentence="Whatever attention reads is what belongs there, unless the failure is reported to vLLM in the same step.",
    outside=True,
)
def every_read_is_right(watched: Watched) -> Iterator[str]:
    """The content oracle on the paged caches."""
    yield from watched.new_wrong()


@invariant(10, sentence="A chunk that can be found has the salt and the adapter that it was computed with.")
def chunks_have_their_tenants(watched: Watched) -> Iterator[str]:
    """The tenants of chunks against what their keys stand for."""
    catalog, trial = watched.trial.side.catalog, watched.trial
    for group in range(len(trial.side.geometry.groups)):
        for key, chunk in catalog.index(group).items():
            if key in trial.prefixes:
                salt, lora = trial.prefixes[key][0].apart.split("/")[:2]
                tenant, number = chunk.tenant, int(lora)
                adapter = (
                    AdapterIdentity(adapters.name(number), adapters.path(number), key[NAME_BYTES:]) if number else None
                )
                if (tenant.salt, tenant.adapter) != ("" if salt == "0" else salt, adapter):
                    yield f"slot {chunk.slot} is counted to salt {tenant.salt!r} and {tenant.adapter}"


@invariant(4, sentence="Only tokens that are final have keys in the catalog, being written or written.")
def confirmed_tokens_only(watched: Watched) -> Iterator[str]:
    """Keys of pieces in flight against the hashes of true prefixes."""
    for job in watched.trial.side.jobs.in_flight.values():
        for piece in job.pieces:
            if piece.key not in watched.trial.prefixes and piece.key not in watched.trial.old_keys:
                yield f"a piece of {job.job.request} is written under a key of no prefix"


@invariant(
    4,
    sentence="A unit that becomes final in a step is held already, or is being saved with that step.",
    when="schedule",
)
def what_becomes_final_is_saved(watched: Watched) -> Iterator[str]:
    """The catalog against vLLM's own counts, while nothing is evicted, frozen or failed."""
    side = watched.trial.side
    before, watched.dropped = watched.dropped, watched.drops
    if watched.dropped != before or _saves_nothing(watched):
        return
    assert watched.output is not None  # noqa: S101
    per_chunk = side.geometry.units_per_chunk
    for request, was, units in _newly_final(watched):
        now = _ending_a_block(side.geometry, request, units, int(watched.trial.scheduler.use_eagle_block_drop))
        if request.request_id in watched.excused or not side.adapters.known(request):
            continue  # its adapter has changed under it, or no rank has reported what it is: it has no keys
        if request.resumable and side.geometry.states:
            continue  # its tokens may be cut, and its states are not
        start = request.num_computed_tokens - watched.output.num_scheduled_tokens[request.request_id]
        fresh = watched.asked.get(request.request_id) == before  # all that it did not find when it was looked up is new
        first = was if fresh else max(was, start // side.geometry.unit_tokens)
        if first >= now:
            continue  # all of it was loaded: what it was loaded from may be evicted since
        keys = keys_of(side, request)
        for group, kind in enumerate(side.geometry.groups):
            if kind.window_tokens is not None or kind.state:
                continue
            known = side.catalog.index(group), side.catalog.pending(group)
            for base in range(first // per_chunk * per_chunk, now, per_chunk):
                high = min(base + per_chunk, now)
                if not covers(keys, base, high, per_chunk, *known):
                    yield f"{request.request_id}: unit {high - 1}, of those from {was} on"


def _saves_nothing(watched: Watched) -> bool:
    side = watched.trial.side
    return watched.trial.shape.role == CONSUMER or side.switches.freeze or side.switches.bypass or side.weights.doubtful


def _ending_a_block(geometry: Geometry, request: Request, units: int, back: int) -> int:
    """Return how many of `units` units end a block, or the prompt's last whole unit of which a state is kept.

    `back`: it is the one before, as vLLM drops a hit's last (`get_mamba_prefill_checkpoint_position`).
    """
    last = (request.num_prompt_tokens - (0 if back else 1)) // geometry.unit_tokens - back
    return units if units == last else units - units % geometry.whole_units


@invariant(4, sentence="A lookup promises all that is held of its prefix, to the last token.", when="schedule")
def a_lookup_promises_all_that_is_held(watched: Watched) -> Iterator[str]:
    """Each answer against an oracle of its own, in the moment in which it was given."""
    short, watched.short = watched.short, []
    yield from short


@invariant(
    4,
    sentence="Whole chunks and the end of a request that is over, once found, are found until they are evicted.",
)
def what_is_found_stays_found(watched: Watched) -> Iterator[str]:
    """The last requests' prompts and answers, looked up without being asked for: now, and when they were over."""
    trial, side = watched.trial, watched.trial.side
    before, watched.found = watched.found, {}
    saving = {job.job.request for job in side.jobs.in_flight.values()}
    for one in trial.over[-OVER_MAX:]:
        then = before.get(one)
        if then is None:
            if one.id not in saving | watched.excused:
                watched.found[one] = find(side, watched.request_of(one), watched.ends.get(one, frozenset()))
            continue
        watched.found[one] = then
        keys = keys_of(side, then.request)
        stands = then.stands and all(map(side.catalog.holds, then.chunks))
        if then.units and stands and (now := held(side, then.request, len(keys))) < then.units:
            yield f"{one.id}: {now} units, {then.units} before"


@invariant(7, sentence="What a step plans for a request is bounded by what became final in it.", when="schedule")
def work_is_bounded_by_what_is_new(watched: Watched) -> Iterator[str]:
    """Rows of each save against the units that became final, and one chunk that may have to be begun anew."""
    side, requests = watched.trial.side, watched.trial.scheduler.requests
    new = {request.request_id: now - was for request, was, now in _newly_final(watched)}
    pages = sum(side.geometry.pages_per_unit)
    for job in watched.saves():
        limit = (new.get(job.request, 0) + side.geometry.units_per_chunk) * pages
        if job.request in requests and job.request not in watched.excused and len(job.rows) // ROW_BYTES > limit:
            yield f"{job.request} saves {len(job.rows) // ROW_BYTES} pages, {limit} at most are new"


def _newly_final(watched: Watched) -> Iterator[tuple[Request, int, int]]:
    """Yield (request, units final before, units final now) of what this step computes."""
    assert watched.output is not None  # noqa: S101
    unit, prefixes = watched.trial.side.geometry.unit_tokens, watched.trial.side.prefixes
    for request_id in watched.output.num_scheduled_tokens:
        request = watched.trial.scheduler.requests[request_id]
        saved = request.num_tokens if watched.trial.shape.answers else request.num_prompt_tokens
        units = min(request.num_computed_tokens // unit, prefixes.units_within(saved))
        last = watched.final.get(request_id)
        was = last.units if last is not None and last.admission == admission(request) else 0
        if units > was:
            yield request, was, units


@invariant(
    8,
    sentence="An engine that only loads, is frozen, bypassed or in doubt of its weights saves nothing.",
    when="schedule",
)
def frozen_saves_nothing(watched: Watched) -> Iterator[str]:
    """The plan of the step; and the last check of it, which remembers how far it has come."""
    side = watched.trial.side
    if _saves_nothing(watched):
        yield from (f"{job.request} saves {len(job.rows) // ROW_BYTES} pages" for job in watched.saves())
        yield from (f"slot {order.slot} is stored in a tier" for order in watched.orders() if order.stores)
        return
    for request, _, now in list(_newly_final(watched)):
        if side.adapters.known(request):  # else it is saved once it is known
            watched.final[request.request_id] = Final(admission(request), now)


@invariant(
    10,
    sentence="What was computed before a reset, or with other weights, is never found after it, nor saved.",
    when="schedule",
)
def a_reset_is_final(watched: Watched) -> Iterator[str]:
    """Admissions and chunks that were there when the connector's cache was reset."""
    side, requests = watched.trial.side, watched.trial.scheduler.requests
    for job in watched.saves():
        if job.request in watched.stale and watched.stale[job.request] == admission(requests[job.request]):
            yield f"{job.request} is saved, with blocks from before the reset"
    for group in range(0 if side.weights.doubtful else len(side.geometry.groups)):  # none is announced yet
        for chunk in watched.forgotten.intersection(side.catalog.index(group).values()):
            yield f"slot {chunk.slot} can be found again"


@invariant(
    6, sentence="Every lease has an owner that lives; every load and every store in flight has leases of its own."
)
def leases_have_owners(watched: Watched) -> Iterator[str]:
    """Owners in the catalog against loads and orders in flight, and requests that wait for tiers."""
    side = watched.trial.side
    loads = [job.owner for job in side.jobs.in_flight.values() if job.owner is not None]
    owners = set(loads)
    if len(owners) < len(loads):
        yield f"loads share an owner: the first that ends returns the leases of both: {sorted(loads)}"
    others = (side.staging.owners if side.staging is not None else set()) | side.pins.owners
    for owner in side.catalog.leased:
        if owner not in owners | others:
            yield f"{owner} has leases, but neither a load nor an order nor a stage nor a pin"
    stores = set(side.staging.stores.under_way.values()) if side.staging is not None else set()
    for owner in owners | stores:
        if owner not in side.catalog.leased:
            yield f"{owner} has a load or a store, and no leases"


@invariant(2, sentence="Slots, index, leases, writers and the policy agree.")
def catalog_is_consistent(watched: Watched) -> Iterator[str]:
    """`kvpipe.testing.catalog_integrity`."""
    try:
        check_integrity(watched.trial.side.catalog)
    except AssertionError as e:
        yield str(e)


@invariant(2, sentence="Every rank reports every job once.")
def jobs_are_reported_once(watched: Watched) -> Iterator[str]:
    """The scheduler side's count of reports about jobs that it does not know."""
    if again := watched.trial.side.counters["reported_again"]:
        yield f"{again} reports of jobs that were over"


@invariant(8, sentence="No machine meets an event that its table calls a bug.")
def no_illegal_transition(watched: Watched) -> Iterator[str]:
    """Counters of all sides."""
    for counters in _counters(watched):
        for name in ("illegal_transition", "contained_error", "loop_lost", "loop_did_not_settle"):
            if counters[name]:
                yield f"{counters[name]} x {name}"
    for rank in watched.trial.ranks:
        if errors := rank.kvpipe.worker.pipeline.copies.loop.errors:
            yield f"{errors} errors on the loop thread of rank {rank.index}"


@invariant(1, 8, sentence="Every move of every machine is traced, in order, and is one that its table allows.")
def the_trace_replays(watched: Watched) -> Iterator[str]:
    """What both sides have traced, fed back through the machines."""
    watched.trial.replay_traces()
    replay = watched.trial.replay
    yield from replay.problems[watched.replayed :]
    watched.replayed = len(replay.problems)


@invariant(1, sentence="When nothing is left to do, the trace has the end of every request and job.", when="drain")
def the_trace_ends(watched: Watched) -> Iterator[str]:
    """The last move of each is traced too; and as many chunks are held as the trace knows of."""
    watched.trial.replay_traces()
    yield from watched.trial.replay.unfinished()


@invariant(9, sentence="Retries, jobs and slots are bounded.")
def everything_is_bounded(watched: Watched) -> Iterator[str]:
    """Sizes against their limits."""
    trial, side = watched.trial, watched.trial.side
    for tracked in side.requests.tracked.values():
        if tracked.saving.retries > SAVE_RETRIES_MAX:
            yield f"{tracked.request.request_id} retried its save {tracked.saving.retries} times"
    if side.catalog.used > side.catalog.slots:
        yield f"{side.catalog.used} slots used of {side.catalog.slots}"
    if len(side.jobs.in_flight) > 64 * (trial.shape.seqs_max + len(trial.live)):
        yield f"{len(side.jobs.in_flight)} jobs in flight"


@invariant(6, sentence="When nothing is left to do nothing is held: no lease, piece, job, cursor.", when="drain")
def nothing_is_held(watched: Watched) -> Iterator[str]:
    """Gauges of both sides. What operators have pinned is held until they end it, or its time is over."""
    carry_out(watched.trial)
    pins = watched.trial.side.pins
    pins.forget()
    if pins.chunks or pins.pins:
        yield f"{pins.chunks} chunks, {len(pins.pins)} pins"
    stats = watched.trial.side.stats()
    for name in ("leases", "pieces_writing", "jobs_in_flight", "orders_in_flight", "requests"):
        if stats[name]:
            yield f"{stats[name]} {name}"
    for rank in watched.trial.ranks:
        pipeline = rank.kvpipe.worker.pipeline
        if pipeline.in_flight:
            yield f"{pipeline.in_flight} jobs on rank {rank.index}"


@invariant(6, sentence="When nothing is left to do every block is back in vLLM's pool.", outside=True, when="drain")
def all_blocks_are_back(watched: Watched) -> Iterator[str]:
    """VLLM's block pool and tables."""
    scheduler = watched.trial.scheduler
    manager = scheduler.kv_cache_manager
    if missing := manager.block_pool.num_gpu_blocks - 1 - manager.block_pool.get_num_free_blocks():
        yield f"{missing} blocks"
    if tables := sum(len(m.req_to_blocks) for m in manager.coordinator.single_type_managers):
        yield f"{tables} block tables"
    if scheduler.requests:
        yield f"requests {sorted(scheduler.requests)}"


def _counters(watched: Watched) -> Iterator[dict[str, int]]:
    assert watched.trial.kvpipe is not None  # noqa: S101
    for side in (watched.trial.kvpipe, *(rank.kvpipe for rank in watched.trial.ranks)):
        yield side.counters
