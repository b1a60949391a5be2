"""The checks of a trial.

Each check is a function with a sentence, which is the invariant that the check tests for its laws.

A check yields one sentence per violation. Checks marked *outside* hold for any connector; the other checks read
kvpipe's internals. A check runs after each scheduled step, after each step whose results vLLM's scheduler has
processed, or when all requests have ended. Import `Watched` from here: importing this module registers the checks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import numpy as np

from kvpipe.cache.chunks import Chunk
from kvpipe.cache.tenants import AdapterIdentity
from kvpipe.connectors.vllm.trial import adapters
from kvpipe.connectors.vllm.trial.announced_blocks import (
    events_are_the_catalog,
    tiers_are_announced_truly,
    tiers_have_what_is_announced,
    what_is_announced_is_found,
)
from kvpipe.connectors.vllm.trial.arrivals import carry_out
from kvpipe.connectors.vllm.trial.efficacy import covers, find_chunks, held_units, keys_of
from kvpipe.connectors.vllm.trial.laws import INVARIANTS, LAWS, OVER_MAX, SEEN_BY_TRIALS, invariant
from kvpipe.connectors.vllm.trial.limited import limits_are_kept
from kvpipe.connectors.vllm.trial.quotas import quotas_are_kept
from kvpipe.connectors.vllm.trial.shapes import CONSUMER
from kvpipe.connectors.vllm.trial.tap import plan_in
from kvpipe.connectors.vllm.trial.watched import Final, Watched, admission
from kvpipe.protocol.messages import ROW_BYTES
from kvpipe.scheduler.records import SAVE_RETRIES_MAX
from kvpipe.scheduler.saves import steps_per_save
from kvpipe.testing.catalog_integrity import check_integrity
from kvpipe.tiers.prefix_keys import NAME_BYTES

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvpipe.node.shared import SharedChunk
    from kvpipe.protocol.geometry import Geometry

__all__ = [
    "INVARIANTS", "LAWS", "SEEN_BY_TRIALS", "Watched", "events_are_the_catalog", "limits_are_kept", "quotas_are_kept",
    "tiers_are_announced_truly", "tiers_have_what_is_announced", "what_is_announced_is_found",
]  # fmt: skip


@invariant(1, sentence="kvpipe raises no exception into vLLM, and counts only faults that the trial has caused.")
def only_faults_that_were_caused(watched: Watched) -> Iterator[str]:
    """Compare the fault counters with the faults that the trial's moves may cause."""
    yield from watched.new_faults()


@invariant(
    2,
    5,
    10,
    sentence="A chunk that lookups can find holds the KV of exactly its key's prefix, in every layer on every rank.",
)
def findable_chunks_are_whole_and_true(watched: Watched) -> Iterator[str]:
    """Compare every byte of the chunks that became findable since the last check.

    The holder of a node's memory may have evicted a chunk that the engine still lists. A lookup then misses the chunk.
    """
    catalog, geometry, node = watched.trial.side.catalog, watched.trial.side.geometry, watched.trial.side.node
    leases = None if node is None else node.pool.leases
    now: dict[tuple[int, bytes], tuple[int, int]] = {}
    for group in range(0 if watched.trial.side.weights.doubtful else len(geometry.groups)):
        for key, chunk in catalog.index(group).items():
            units = next(mark.units for mark in chunk.marks if mark.key == key)
            now[group, key] = (chunk.slot, units)
            is_new = watched.findable.get((group, key)) != (chunk.slot, units)
            if is_new and (leases is None or leases.is_there(cast("SharedChunk", chunk))):
                yield from _false_bytes(watched, group, key, chunk, units)
    watched.findable = now


def _false_bytes(watched: Watched, group: int, key: bytes, chunk: Chunk, units: int) -> Iterator[str]:
    known = watched.trial.prefixes.get(key)
    if known is None:
        if not watched.trial.shape.engines:  # otherwise the other engine's requests have keys too
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
        for number, layer in enumerate(layers):
            places = rank.places(group, number, tokens // layer.shards)
            held = pool.slot(chunk.slot).numpy().view(np.uint64)[places]
            true, mine = layer.content(sequence, 0, stop), layer.held(first, stop)
            kept = mine[(mine - first) % geometry.unit_tokens >= geometry.unit_tokens - stored]
            differs = np.flatnonzero(held != (true[-1] if kind.state else true[kept]))
            if len(differs):
                yield f"slot {chunk.slot}, rank {rank.index}, layer {layer.name}: {len(differs)} of {tokens} tokens"


@invariant(
    3,
    5,
    10,
    sentence="Attention reads the KV of its own tokens, or the failed load is reported to vLLM in the same step.",
    outside=True,
)
def every_read_is_right(watched: Watched) -> Iterator[str]:
    """Compare the paged caches with the content oracle."""
    yield from watched.new_wrong()


@invariant(
    10,
    sentence="A chunk that lookups can find is recorded with the salt and the adapter that its KV was computed with.",
)
def chunks_have_their_tenants(watched: Watched) -> Iterator[str]:
    """Compare the tenants of chunks with the salts and adapters in their keys. A node's memory knows no tenants."""
    catalog, trial = watched.trial.side.catalog, watched.trial
    for group in range(0 if trial.shape.engines else len(trial.side.geometry.groups)):
        for key, chunk in catalog.index(group).items():
            if key in trial.prefixes:
                salt, lora = trial.prefixes[key][0].apart.split("/")[:2]
                tenant, number = chunk.tenant, int(lora)
                adapter = (
                    AdapterIdentity(adapters.adapter_name(number), adapters.path(number), key[NAME_BYTES:])
                    if number
                    else None
                )
                if (tenant.salt, tenant.adapter) != ("" if salt == "0" else salt, adapter):
                    yield f"slot {chunk.slot} is counted to salt {tenant.salt!r} and {tenant.adapter}"


@invariant(
    4,
    sentence="The catalog has only keys of final tokens, for chunks that are saved and for chunks that "
    "are being saved.",
)
def confirmed_tokens_only(watched: Watched) -> Iterator[str]:
    """Compare the keys of pieces in flight with the hashes of requests' prompts and right answers."""
    for job in watched.trial.side.jobs.in_flight.values():
        for piece in job.pieces:
            if piece.key not in watched.trial.prefixes and piece.key not in watched.trial.old_keys:
                yield f"a piece of {job.job.request} is written under a key of no prefix"


@invariant(
    4,
    sentence="A unit that becomes final in a step is in memory already, or is saved with that step or with the next "
    "step that saves answers.",
    when="schedule",
)
def what_becomes_final_is_saved(watched: Watched) -> Iterator[str]:
    """Compare the catalog with vLLM's own counts, in steps without an eviction, a freeze or a failed save."""
    side = watched.trial.side
    before, watched.dropped = watched.dropped, watched.drops
    if watched.dropped != before or _saves_nothing(watched):
        return
    assert watched.output is not None  # noqa: S101
    per_chunk = side.geometry.units_per_chunk
    for request, was, units in _newly_final(watched):
        now = _ending_a_block(side.geometry, request, units, int(watched.trial.scheduler.use_eagle_block_drop))
        if request.request_id in watched.excused or not side.adapters.known(request):
            continue  # the request has no keys: its adapter is unknown or has changed
        if request.resumable and side.geometry.states:
            continue  # the session's tokens may be cut, but its states cannot
        start = request.num_computed_tokens - watched.output.num_scheduled_tokens[request.request_id]
        # no chunk was dropped since the lookup, so each unit that it did not find is new
        fresh = watched.asked.get(request.request_id) == before
        first = was if fresh else max(was, start // side.geometry.unit_tokens)
        if first >= now:
            continue  # all units were loaded, and their chunks may be evicted by now
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
    """Return `units`, rounded down to a block's end, unless the state after `units` units is the prompt's last state.

    If `back` is 1, the prompt's last state is one unit earlier, because vLLM drops the last unit of a hit
    (`get_mamba_prefill_checkpoint_position`).
    """
    last = (request.num_prompt_tokens - (0 if back else 1)) // geometry.unit_tokens - back
    return units if units == last else units - units % geometry.whole_units


@invariant(
    4,
    sentence="A lookup promises the longest prefix that the pool holds and that its request may load.",
    when="schedule",
)
def a_lookup_promises_all_that_is_held(watched: Watched) -> Iterator[str]:
    """Compare each answer, at the time of its lookup, with an independent search of the catalog."""
    short, watched.short = watched.short, []
    yield from short


@invariant(
    4,
    sentence="If a lookup finds a finished request's whole chunks and last chunk, lookups find them until they "
    "are evicted.",
)
def what_is_found_stays_found(watched: Watched) -> Iterator[str]:
    """Compare the hit of each recently finished request with its hit at an earlier check."""
    trial, side = watched.trial, watched.trial.side
    before, watched.found = watched.found, {}
    saving = {job.job.request for job in side.jobs.in_flight.values()}
    for one in trial.over[-OVER_MAX:]:
        then = before.get(one)
        if then is None:
            if one.id not in saving | watched.excused:
                watched.found[one] = find_chunks(side, watched.request_of(one), watched.ends.get(one, frozenset()))
            continue
        watched.found[one] = then
        keys = keys_of(side, then.request)
        stands = then.stands and all(map(side.catalog.holds, then.chunks))
        if then.units and stands and (now := held_units(side, then.request, len(keys))) < then.units:
            yield f"{one.id}: {now} units, {then.units} before"


@invariant(
    7,
    sentence="In each step, the work for a request is bounded by the number of its tokens that became final.",
    when="schedule",
)
def work_is_bounded_by_what_is_new(watched: Watched) -> Iterator[str]:
    """Compare the rows of each save with the new final units, plus one chunk that may have to be started again."""
    side, requests = watched.trial.side, watched.trial.scheduler.requests
    new = {request.request_id: now - was for request, was, now in _newly_final(watched, waiting=True)}
    pages = sum(side.geometry.pages_per_unit)
    for job in watched.saves():
        limit = (new.get(job.request, 0) + side.geometry.units_per_chunk) * pages
        if job.request in requests and job.request not in watched.excused and len(job.rows) // ROW_BYTES > limit:
            yield f"{job.request} saves {len(job.rows) // ROW_BYTES} pages, {limit} at most are new"


def _newly_final(watched: Watched, *, waiting: bool = False) -> Iterator[tuple[Request, int, int]]:
    """Yield (request, units final before, units final now) for the requests that this step computes.

    In a step that saves no answers, requests that only generate are left out unless `waiting` is true. The units of
    these requests count in the next step that saves answers. Some of these units may be saved earlier, for example
    before the units leave a window. So a bound that uses these numbers is loose.
    """
    assert watched.output is not None  # noqa: S101
    unit, prefixes = watched.trial.side.geometry.unit_tokens, watched.trial.side.prefixes
    step = plan_in(watched.output.kv_connector_metadata).step
    shape = watched.trial.shape
    every = shape.save_steps or steps_per_save(len(watched.output.num_scheduled_tokens))
    saves_answers = (step - 1) // shape.stages % every == 0
    for request_id, scheduled in watched.output.num_scheduled_tokens.items():
        request = watched.trial.scheduler.requests[request_id]
        generates = request.num_computed_tokens - scheduled >= max(request.num_tokens - 1, request.num_prompt_tokens)
        if generates and not (saves_answers or waiting):
            continue
        saved = request.num_tokens if watched.trial.shape.answers else request.num_prompt_tokens
        units = min(request.num_computed_tokens // unit, prefixes.units_within(saved))
        limit = watched.trial.allowed(request_id).save_tokens
        if limit is not None:
            units = min(units, limit // unit)
        last = watched.final.get(request_id)
        was = last.units if last is not None and last.admission == admission(request) else 0
        if units > was:
            yield request, was, units


@invariant(
    8,
    sentence="An engine saves nothing while it is a consumer, frozen or bypassed, or while its weights are in doubt.",
    when="schedule",
)
def frozen_saves_nothing(watched: Watched) -> Iterator[str]:
    """Check the step's plan, and record how many units of each request are final.

    This is the last check of a plan, because the checks before it compare with the earlier numbers of final units.
    """
    side = watched.trial.side
    if _saves_nothing(watched):
        yield from (f"{job.request} saves {len(job.rows) // ROW_BYTES} pages" for job in watched.saves())
        yield from (f"slot {order.slot} is stored in a tier" for order in watched.orders() if order.stores)
        return
    for request, _, now in list(_newly_final(watched)):
        if side.adapters.known(request):  # other requests are saved once their adapter is known
            watched.final[request.request_id] = Final(admission(request), now)


@invariant(
    10,
    sentence="KV that was computed before a reset or a change of weights is neither found nor saved afterwards.",
    when="schedule",
)
def a_reset_is_final(watched: Watched) -> Iterator[str]:
    """Search for admissions and chunks that existed when the connector's cache was reset."""
    side, requests = watched.trial.side, watched.trial.scheduler.requests
    for job in watched.saves():
        if job.request in watched.stale and watched.stale[job.request] == admission(requests[job.request]):
            yield f"{job.request} is saved, with blocks from before the reset"
    # while the weights are in doubt, lookups find no chunk
    for group in range(0 if side.weights.doubtful else len(side.geometry.groups)):
        for chunk in watched.forgotten.intersection(side.catalog.index(group).values()):
            yield f"slot {chunk.slot} can be found again"


@invariant(
    6, sentence="Every lease has an owner that still exists, and every load and store in flight has leases of its own."
)
def leases_have_owners(watched: Watched) -> Iterator[str]:
    """Compare owners in the catalog with loads and orders in flight, and with requests that wait for tiers."""
    side = watched.trial.side
    loads = [job.owner for job in side.jobs.in_flight.values() if job.owner is not None]
    owners = set(loads)
    if len(owners) < len(loads):
        yield f"loads share an owner: the first that ends returns the leases of both: {sorted(loads)}"
    others = (side.staging.owners if side.staging is not None else set()) | side.pins.owners
    for owner in side.catalog.leased:
        if owner not in owners | others:
            yield f"{owner} has leases, but neither a load nor an order nor a stage nor a pin"
    stores = set(side.staging.stores.owners) if side.staging is not None else set()
    for owner in owners | stores:
        if owner not in side.catalog.leased:
            yield f"{owner} has a load or a store, and no leases"


@invariant(
    2, sentence="The catalog's slots, index, leases and writers agree with each other and with the eviction policy."
)
def catalog_is_consistent(watched: Watched) -> Iterator[str]:
    """Run `kvpipe.testing.catalog_integrity`."""
    try:
        check_integrity(watched.trial.side.catalog)
    except AssertionError as e:
        yield str(e)


@invariant(2, sentence="Every rank reports each job exactly once.")
def jobs_are_reported_once(watched: Watched) -> Iterator[str]:
    """Read the count of reports on jobs that the scheduler side does not know."""
    if again := watched.trial.side.counters["reported_again"]:
        yield f"{again} reports of jobs that were over"


@invariant(8, sentence="No state machine gets an event that its table calls a bug.")
def no_illegal_transition(watched: Watched) -> Iterator[str]:
    """Read the counters of all sides."""
    for counters in _counters(watched):
        for name in ("illegal_transition", "contained_error", "loop_lost", "loop_did_not_settle"):
            if counters[name]:
                yield f"{counters[name]} x {name}"
    for rank in watched.trial.ranks:
        if errors := rank.kvpipe.worker.pipeline.copies.loop.errors:
            yield f"{errors} errors on the loop thread of rank {rank.index}"


@invariant(
    1,
    8,
    sentence="The trace has every transition of every state machine, in order, and each transition "
    "is in the machine's table.",
)
def the_trace_replays(watched: Watched) -> Iterator[str]:
    """Replay the traces of both sides through the state machines."""
    watched.trial.replay_traces()
    replay = watched.trial.replay
    yield from replay.problems[watched.replayed :]
    watched.replayed = len(replay.problems)


@invariant(1, sentence="After the last request, the trace has the end of every request and of every job.", when="drain")
def the_trace_ends(watched: Watched) -> Iterator[str]:
    """Search the replayed trace for requests, jobs and other cursors that are not in a final state."""
    watched.trial.replay_traces()
    yield from watched.trial.replay.unfinished()


@invariant(9, sentence="The retries of a save, the jobs in flight and the used slots stay within their limits.")
def everything_is_bounded(watched: Watched) -> Iterator[str]:
    """Compare sizes with their limits."""
    trial, side = watched.trial, watched.trial.side
    for tracked in side.requests.tracked.values():
        if tracked.saving.retries > SAVE_RETRIES_MAX:
            yield f"{tracked.request.request_id} retried its save {tracked.saving.retries} times"
    if side.catalog.used > side.catalog.slots:
        yield f"{side.catalog.used} slots used of {side.catalog.slots}"
    if len(side.jobs.in_flight) > 64 * (trial.shape.seqs_max + len(trial.live)):
        yield f"{len(side.jobs.in_flight)} jobs in flight"


@invariant(6, sentence="After the last request, no lease, piece, job or request is left.", when="drain")
def nothing_is_held(watched: Watched) -> Iterator[str]:
    """Read the gauges of both sides. Pins are ended first, because they may hold chunks until their deadlines."""
    carry_out(watched.trial)
    pins = watched.trial.side.pins
    pins.reset()
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


@invariant(6, sentence="After the last request, all blocks are free in vLLM's pool again.", outside=True, when="drain")
def all_blocks_are_back(watched: Watched) -> Iterator[str]:
    """Check vLLM's block pool and tables."""
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
