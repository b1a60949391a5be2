"""Who uses the pool: slots per tenant (salt and adapter), and leases per holder.

The slots are counted some at a time while the engine serves, so the counts are not of one moment.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import nlargest
from typing import TYPE_CHECKING, Final

import anyio

from kvpipe.cache.tenants import kept_salt
from kvpipe.manage import models
from kvpipe.manage.salts import salt_digest
from kvpipe.scheduler.pins import EPOCHS
from kvpipe.scheduler.stores import STORES
from kvpipe.trace.log import bounded

if TYPE_CHECKING:
    from kvpipe.cache.catalog import Owner
    from kvpipe.cache.tenants import Tenant
    from kvpipe.scheduler.side import SchedulerSide

TENANTS_MAX: Final = 4096
"""Tenants counted by name; the chunks of any others are counted together."""
SLOTS_PER_TURN: Final = 1024
PAUSE_S: Final = 0.0005
"""Between two slices of counting: other threads get the interpreter."""
_NAMES: Final = {STORES: "stores", "": "warm"}
"""Names of lease holders that are not requests."""


def selecting(wanted: models.EvictMatching, token: bytes) -> Callable[[Tenant], bool]:
    """Return the predicate for tenants whose chunks `wanted` selects. `token`: the operators', for digests of salts.

    Raises ValueError if `wanted` selects nothing, or its fields contradict each other.
    """
    salts = {"cache_salt": wanted.cache_salt, "salt_digest": wanted.salt_digest, "no_salt": wanted.no_salt}
    adapters = {"adapter": wanted.adapter, "adapter_digest": wanted.adapter_digest}
    given = [name for name, value in (salts | adapters).items() if value]
    given += [name for name in ("no_adapter", "idle_s") if getattr(wanted, name)]
    if not given and not wanted.all:
        raise ValueError('nothing is selected: set "all": true to evict all that there is')
    if wanted.all and given:
        raise ValueError(f"all contradicts {given[0]}: give one of them")
    if sum(map(bool, salts.values())) > 1:
        raise ValueError("cache_salt, salt_digest and no_salt contradict each other: give one of them")
    if wanted.no_adapter and any(adapters.values()):
        raise ValueError("no_adapter contradicts adapter and adapter_digest: leave it out")

    salt = kept_salt(wanted.cache_salt) if wanted.cache_salt is not None else None

    def selects(tenant: Tenant) -> bool:
        adapter = tenant.adapter
        return (
            (salt is None or tenant.salt == salt)
            and (not wanted.no_salt or not tenant.salt)
            and (wanted.salt_digest is None or salt_digest(token, tenant.salt) == wanted.salt_digest)
            and (not wanted.no_adapter or adapter is None)
            and (wanted.adapter is None or (adapter is not None and adapter.name == wanted.adapter))
            and (
                wanted.adapter_digest is None or (adapter is not None and adapter.digest.hex() == wanted.adapter_digest)
            )
        )

    return selects


class _TenantCount:
    """Chunks of one tenant. `held`: of them with readers or writers; `used_s`: the last use, by the catalog's clock."""

    __slots__ = ("chunks", "held", "tenant", "used_s")

    def __init__(self, tenant: Tenant) -> None:
        """Start at zero."""
        self.tenant, self.chunks, self.held, self.used_s = tenant, 0, 0, 0


class PoolHolders:
    """Counts who uses the pool. One per engine; used by the management thread."""

    def __init__(self, side: SchedulerSide) -> None:
        """`side`: read only. The attribute `token`, the operators', is set before the first request."""
        self._side, self._one = side, anyio.Lock()
        self.token = b""

    async def report(self, rows_max: int, leases: list[tuple[Owner, int]]) -> models.Holders:
        """Return tenants and lease holders, those with most chunks first, at most `rows_max` of each.

        `leases`: each owner with the number of chunks that it holds.
        """
        async with self._one:
            held, rest = await self._counted()
        by_owner: dict[tuple[str, str], int] = {}
        for owner, chunks in leases:
            kind = (
                "pin" if owner.epoch >= EPOCHS else "tiers" if owner.epoch < 0 or owner.request == STORES else "request"
            )
            by_owner[owner.request, kind] = by_owner.get((owner.request, kind), 0) + chunks
        most = nlargest(rows_max, held.values(), key=lambda one: one.chunks)
        return models.Holders(
            tenants=len(held),
            tenants_shown=[self._row(one, self._side.catalog.now_s) for one in most],
            chunks=sum(one.chunks for one in held.values()) + rest,
            chunks_unnamed=rest,
            holders=len(by_owner),
            holders_shown=[
                models.LeaseHolder(holder=_NAMES.get(name) or bounded(name), kind=kind, chunks=chunks)
                for (name, kind), chunks in nlargest(rows_max, by_owner.items(), key=lambda one: one[1])
            ],
        )

    async def _counted(self) -> tuple[dict[Tenant, _TenantCount], int]:
        """Return the counts by tenant, and how many chunks belong to tenants beyond `TENANTS_MAX`."""
        out: dict[Tenant, _TenantCount] = {}
        catalog, rest = self._side.catalog, 0
        for first in range(0, catalog.ready, SLOTS_PER_TURN):
            for slot in range(first, min(first + SLOTS_PER_TURN, catalog.ready)):
                chunk = catalog.at(slot)
                if chunk is None:
                    continue
                one = out.get(chunk.tenant)
                if one is None:
                    if len(out) >= TENANTS_MAX:
                        rest += 1
                        continue
                    one = out[chunk.tenant] = _TenantCount(chunk.tenant)
                one.chunks += 1
                one.held += chunk.held
                one.used_s = max(one.used_s, chunk.used_s)
            await anyio.sleep(PAUSE_S)
        return out, rest

    def _row(self, one: _TenantCount, now_s: float) -> models.TenantHolds:
        adapter = one.tenant.adapter
        return models.TenantHolds(
            salt_digest=salt_digest(self.token, one.tenant.salt),
            adapter=bounded(adapter.name) if adapter is not None else "",
            adapter_digest=adapter.digest.hex() if adapter is not None else "",
            chunks=one.chunks,
            bytes=one.chunks * self._side.geometry.slot_bytes,
            held=one.held,
            idle_s=0.0 if one.held else max(0.0, now_s - one.used_s),
        )
