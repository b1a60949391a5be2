"""The users of the pool, as operators see them: slots per tenant (salt and adapter), and leases per holder."""

from __future__ import annotations

from collections.abc import Callable
from heapq import nlargest
from typing import TYPE_CHECKING, Final

from kvpipe.cache.tenants import UNKNOWN, kept_salt
from kvpipe.features.pins import EPOCHS
from kvpipe.manage import models
from kvpipe.manage.salts import salt_digest
from kvpipe.scheduler.stores import STORES
from kvpipe.trace.log import bounded

if TYPE_CHECKING:
    from kvpipe.cache.tenants import Tenant
    from kvpipe.manage.reads import PoolUsers, TenantCount

_NAMES: Final = {STORES: "stores", "": "warm"}
"""The names of holders of leases that are not requests."""


def selecting(wanted: models.EvictMatching, token: bytes) -> Callable[[Tenant], bool]:
    """Return a function that says whether `wanted` selects a tenant. Salt digests depend on `token`.

    Raises ValueError if `wanted` has no field that selects chunks, or if its fields contradict each other.
    """
    salts = {"cache_salt": wanted.cache_salt, "salt_digest": wanted.salt_digest, "no_salt": wanted.no_salt}
    adapters = {"adapter": wanted.adapter, "adapter_digest": wanted.adapter_digest}
    given = [name for name, value in (salts | adapters).items() if value]
    given += [name for name in ("no_adapter", "idle_s") if getattr(wanted, name)]
    if not given and not wanted.all:
        raise ValueError('nothing is selected: set "all": true to evict all chunks')
    if wanted.all and given:
        raise ValueError(f"all contradicts {given[0]}: give one of them")
    if sum(map(bool, salts.values())) > 1:
        raise ValueError("cache_salt, salt_digest and no_salt contradict each other: give one of them")
    if wanted.no_adapter and any(adapters.values()):
        raise ValueError("no_adapter contradicts adapter and adapter_digest: leave it out")

    salt = kept_salt(wanted.cache_salt) if wanted.cache_salt is not None else None

    def selects(tenant: Tenant) -> bool:
        if tenant is UNKNOWN:
            return wanted.all
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


class PoolHolders:
    """Reports the users of the pool. Each engine has one `PoolHolders`, which only the management thread uses."""

    def __init__(self, slot_bytes: int) -> None:
        """`slot_bytes` is the size of a slot. The attribute `token`, for salt digests, is set before any request."""
        self._slot_bytes, self.token = slot_bytes, b""

    def holders(self, users: PoolUsers, rows_max: int) -> models.Holders:
        """Return the `rows_max` tenants with most chunks, and the `rows_max` holders of leases with most chunks."""
        by_owner: dict[tuple[str, str], int] = {}
        for owner, chunks in users.leases:
            kind = (
                "pin" if owner.epoch >= EPOCHS else "tiers" if owner.epoch < 0 or owner.request == STORES else "request"
            )
            by_owner[owner.request, kind] = by_owner.get((owner.request, kind), 0) + chunks
        most = nlargest(rows_max, users.tenants, key=lambda one: one.chunks)
        return models.Holders(
            tenants=len(users.tenants),
            tenants_shown=[self._row(one, users.now_s) for one in most],
            chunks=sum(one.chunks for one in users.tenants) + users.unnamed,
            chunks_unnamed=users.unnamed,
            holders=len(by_owner),
            holders_shown=[
                models.LeaseHolder(holder=_NAMES.get(name) or bounded(name), kind=kind, chunks=chunks)
                for (name, kind), chunks in nlargest(rows_max, by_owner.items(), key=lambda one: one[1])
            ],
        )

    def _row(self, one: TenantCount, now_s: float) -> models.TenantHolds:
        adapter = one.tenant.adapter
        return models.TenantHolds(
            salt_digest=salt_digest(self.token, one.tenant.salt),
            adapter=bounded(adapter.name) if adapter is not None else "",
            adapter_digest=adapter.digest.hex() if adapter is not None else "",
            chunks=one.chunks,
            bytes=one.chunks * self._slot_bytes,
            held=one.held,
            idle_s=0.0 if one.held else max(0.0, now_s - one.used_s),
        )
