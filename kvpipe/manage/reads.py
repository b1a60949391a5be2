"""Reads of the scheduler side for operators: orders that copy the requested data into records that never change.

The thread that has the turn carries reads out, part by part (`kvpipe.features.orders`). The engine's thread has the
turn in its steps. The management thread can have the turn while the engine is idle. Data that are copied in the same
part are of one moment.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from heapq import nlargest
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from kvpipe.cache.leases import holders, oldest_lease_s
from kvpipe.cache.quotas import SharedCatalog
from kvpipe.cache.tenants import UNKNOWN
from kvpipe.features.orders import Work
from kvpipe.features.pins import EPOCHS
from kvpipe.manage import models
from kvpipe.statemachine.request import FINISHED
from kvpipe.tiers.guard import FIND
from kvpipe.trace.log import bounded

if TYPE_CHECKING:
    from kvpipe.cache.chunks import Owner
    from kvpipe.cache.tenants import Tenant
    from kvpipe.protocol.messages import Job
    from kvpipe.scheduler.records import Tracked
    from kvpipe.scheduler.side import SchedulerSide

REQUESTS_PER_PART: Final = 128
SLOTS_PER_PART: Final = 256
KEYS_PER_PART: Final = 512
"""The largest number of a prompt's keys that one part of a read looks up in each cache group."""
TENANTS_MAX: Final = 4096
"""The largest number of tenants that are counted separately. All other tenants' chunks are counted together."""

_Ranked = tuple[tuple[bool, float], "Tracked"]


def at_once(look: Callable[[], object]) -> Work:
    """Make the work of an order that has one part. The order's result is the result of `look`."""
    yield from ()
    return look()


# ---- the engine's state -------------------------------------------------------------------------------------------


class EngineTotals(NamedTuple):
    """The scheduler side at one moment. `jobs`: the jobs in flight. `adapters`: the result of `Adapters.agreed`."""

    namespace: str
    step: int
    saving: bool
    pool: models.PoolState
    requests: int
    jobs: tuple[Job, ...]
    tier_orders: int
    traffic: models.Traffic
    tiers: list[models.TierState]
    adapters: dict[int, bytes]


class EngineSnapshot(NamedTuple):
    """A copy of the scheduler side that never changes, with `rows` of its slowest requests, the slowest first.

    If the engine has at most `REQUESTS_PER_PART` requests, totals and rows are of one moment. Otherwise the rows are
    of later moments than the totals.
    """

    totals: EngineTotals
    rows: list[dict[str, object]]
    """Each row has the fields of `models.RequestHolds`."""


def snapshot(side: SchedulerSide, requests_max: int) -> Work:
    """Return an `EngineSnapshot` with at most `requests_max` rows."""
    totals, tracked = _totals(side), list(side.requests.tracked.values())
    held = Counter[str]()
    for owner, chunks in holders(side.catalog):
        if owner.epoch < EPOCHS:  # pins also own leases, but are not requests
            held[owner.request] += chunks
    slowest: list[_Ranked] = []
    for first in range(0, len(tracked), REQUESTS_PER_PART):
        if first:
            yield
        some = [
            (models.slowness(_age_s(one), _answer_tokens(one)), one)
            for one in tracked[first : first + REQUESTS_PER_PART]
        ]
        slowest = nlargest(requests_max, slowest + some, key=itemgetter(0))
    rows: list[dict[str, object]] = []
    for first in range(0, len(slowest), REQUESTS_PER_PART):
        if first:
            yield
        living = [one for _, one in slowest[first : first + REQUESTS_PER_PART] if one.state.row != FINISHED]
        rows += [_row(side, one, held[one.request.request_id]) for one in living]
    return EngineSnapshot(totals, rows)


def _totals(side: SchedulerSide) -> EngineTotals:
    tracer, staging = side.tracer, side.staging
    return EngineTotals(
        namespace=staging.space.name if staging is not None else "",
        step=side.trace.step - 1,
        saving=side.switches.saving,
        pool=_pool(side),
        requests=len(side.requests.tracked),
        jobs=tuple(one.job for one in side.jobs.in_flight.values()),
        tier_orders=staging.orders if staging is not None else 0,
        traffic=models.Traffic(
            hit_tokens=dict(tracer.hit_tokens),
            missed_tokens=dict(tracer.missed_tokens),
            evicted=side.counters["evicted"],
            faults=sum(side.counters.faults.values()),
        ),
        tiers=list(_tiers(side)),
        adapters=side.adapters.agreed(),
    )


def _pool(side: SchedulerSide) -> models.PoolState:
    catalog, slot_bytes = side.catalog, side.geometry.slot_bytes
    used = catalog.used
    return models.PoolState(
        slots=catalog.slots,
        slots_ready=catalog.ready,
        slots_used=used,
        slot_bytes=slot_bytes,
        bytes_used=used * slot_bytes,
        bytes_max=catalog.slots * slot_bytes,
        leases=catalog.leases,
        oldest_lease_s=oldest_lease_s(catalog),
        pieces_writing=catalog.writing,
        chunks_pinned=side.pins.chunks,
        quotas=[
            models.QuotaState(name=one.spec.name, slots=one.used, slots_sure=one.sure, slots_max=one.most)
            for one in (catalog.accounts.all if isinstance(catalog, SharedCatalog) else ())
        ],
    )


def _tiers(side: SchedulerSide) -> Iterator[models.TierState]:
    staging = side.staging
    if staging is None:
        return
    for place, tier in enumerate(staging.finder.tiers):
        yield models.TierState(
            name=tier.name,
            kind=tier.spec.kind,
            breaker=tier.breakers[FIND].state.row,
            left_by_ranks=place in staging.finder.unreadable,
            read_bytes_per_s=staging.patience.rates.get(place, 0.0),
            slow=staging.patience.slow(place),
        )


def _row(side: SchedulerSide, tracked: Tracked, chunks: int) -> dict[str, object]:
    request, stage = tracked.request, tracked.stage
    return {
        "request": bounded(request.request_id),
        "lived_s": _age_s(tracked),
        "tokens": request.num_tokens,
        "answer_tokens": _answer_tokens(tracked),
        "preemptions": request.num_preemptions,
        "state": tracked.state.row,
        "saving": tracked.saving.state.row,
        "saved_tokens": tracked.saving.saved_units * side.geometry.unit_tokens,
        "chunks_held": chunks,
        "waits_for_tiers": stage is not None and stage.holds_up,
    }


def _age_s(tracked: Tracked) -> float:
    return (time.monotonic_ns() - tracked.life.added_ns) / 1e9


def _answer_tokens(tracked: Tracked) -> int:
    return max(0, tracked.request.num_tokens - tracked.request.num_prompt_tokens)


# ---- prompts ------------------------------------------------------------------------------------------------------


class HeldKeys(NamedTuple):
    """The keys of a prompt that memory holds: `found` has these keys by cache group.

    `space` is the engine's namespace in tiers, and `also` the second namespace, if any (`Namespace`). Both are empty if
    the engine uses no tiers.
    """

    found: tuple[dict[bytes, object], ...]
    space: str
    also: str


def held_keys(side: SchedulerSide, units: Sequence[bytes], states: Sequence[bytes]) -> Work:
    """Return the `HeldKeys` of a prompt with the keys `units`.

    `states` has the prompt's keys in the groups of states.
    """
    catalog, of_states = side.catalog, side.geometry.states
    groups = [(group, states if group in of_states else units) for group in range(len(side.geometry.groups))]
    found: tuple[dict[bytes, object], ...] = tuple({} for _ in groups)
    for first in range(0, max(len(units), len(states)), KEYS_PER_PART):
        for group, keys in groups:
            index = catalog.index(group)
            found[group].update((key, True) for key in keys[first : first + KEYS_PER_PART] if key in index)
        yield
    space = side.staging.space if side.staging is not None else None
    return HeldKeys(found, *((space.name, space.also) if space is not None else ("", "")))


# ---- users of the pool --------------------------------------------------------------------------------------------


class TenantCount(NamedTuple):
    """The number of one tenant's chunks. `held` is the number of these chunks that have readers or writers.

    `used_s` is the time of the last use of any of these chunks, in seconds of the catalog's clock.
    """

    tenant: Tenant
    chunks: int
    held: int
    used_s: int


class PoolUsers(NamedTuple):
    """The users of the pool. `unnamed` is the number of chunks of unknown tenants and of tenants beyond `TENANTS_MAX`.

    `leases` has each owner of leases, with the number of the owner's chunks. `now_s` is the time in seconds of the
    catalog's clock. The slots are counted part by part, so the counts are not of one moment.
    """

    tenants: list[TenantCount]
    unnamed: int
    leases: list[tuple[Owner, int]]
    now_s: float


def pool_users(side: SchedulerSide) -> Work:
    """Count the chunks in the pool by tenant, and return the `PoolUsers`."""
    # for each tenant: the values of `chunks`, `held` and `used_s` of its `TenantCount`
    out: dict[Tenant, list[int]] = {}
    catalog, rest = side.catalog, 0
    for first in range(0, catalog.ready, SLOTS_PER_PART):
        for slot in range(first, min(first + SLOTS_PER_PART, catalog.ready)):
            chunk = catalog.at(slot)
            if chunk is None:
                continue
            if chunk.tenant is UNKNOWN:
                rest += 1
                continue
            one = out.get(chunk.tenant)
            if one is None:
                if len(out) >= TENANTS_MAX:
                    rest += 1
                    continue
                one = out[chunk.tenant] = [0, 0, 0]
            one[0] += 1
            one[1] += chunk.held
            one[2] = max(one[2], chunk.used_s)
        yield
    counts: list[TenantCount] = []
    for first in range(0, len(out), SLOTS_PER_PART):
        counts += [TenantCount(tenant, *one) for tenant, one in islice(out.items(), first, first + SLOTS_PER_PART)]
        yield
    return PoolUsers(counts, rest, holders(catalog), catalog.now_s)
