"""Quotas of a trial: counted anew from the chunks, whenever a slot is asked for, and whenever a step is digested."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvpipe.cache.quotas import SharedCatalog
from kvpipe.cache.tenants import ANYBODY, Tenant
from kvpipe.connectors.vllm.trial.laws import invariant
from kvpipe.connectors.vllm.trial.shapes import QUOTAS

if TYPE_CHECKING:
    from kvpipe.cache.catalog import Catalog, Chunk
    from kvpipe.connectors.vllm.trial.watched import Watched


def watch(catalog: Catalog) -> list[str]:
    """Look at each slot that `catalog` gives away from now on. Returns what will be wrong."""
    broken: list[str] = []
    reserve = catalog.reserve

    def checked(group: int, tenant: Tenant = ANYBODY) -> Chunk | None:
        before = _used(catalog)
        chunk = reserve(group, tenant)
        now = _used(catalog)
        for one in QUOTAS:
            salt, sure = one.get("salt", ""), int(one.get("share", 0) * catalog.slots)
            if salt != _whose(tenant) and now[salt] < min(sure, before[salt]):
                broken.append(f"{one['name']} had {before[salt]} slots of {sure}, and has {now[salt]} for another")
        return chunk

    catalog.reserve = checked  # type: ignore[method-assign]
    return broken


@invariant(9, sentence="Nobody loses to another what is within its quota's share, or holds more than its limit.")
def quotas_are_kept(watched: Watched) -> Iterator[str]:
    """The slots of each account against the tenants of all chunks."""
    yield from watched.unfair
    watched.unfair.clear()
    catalog = watched.trial.side.catalog
    if isinstance(catalog, SharedCatalog):
        used = _used(catalog)
        for one, account in zip(QUOTAS, catalog.accounts.all, strict=True):
            slots, most = used[one.get("salt", "")], int(one.get("limit", 1) * catalog.slots)
            if not account.used == slots <= most:
                yield f"{one['name']} counts {account.used} slots, and has {slots} of {most}"


def _whose(tenant: Tenant) -> str:
    return tenant.salt if tenant.salt in {"1", "2"} else ""


def _used(catalog: Catalog) -> Counter[str]:
    return Counter(_whose(chunk.tenant) for chunk in catalog.chunks())
