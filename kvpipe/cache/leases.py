"""The holders and ages of leases, for metrics and operators."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpipe.cache.catalog import Catalog
    from kvpipe.cache.chunks import Owner


def holders(catalog: Catalog) -> list[tuple[Owner, int]]:
    """Return the number of leases of each owner."""
    return [(owner, len(chunks)) for owner, chunks in catalog.leased.items()]


def oldest_lease_s(catalog: Catalog) -> float:
    """Return the age of the oldest lease in seconds, or 0 if there is no lease."""
    since_s = catalog.leased_since_s
    return catalog.now_s - next(iter(since_s.values())) if since_s else 0.0
