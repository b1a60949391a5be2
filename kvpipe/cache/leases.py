"""Who holds leases, and since when: for metrics and operators.

On any thread. What changes meanwhile raises RuntimeError or StopIteration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpipe.cache.catalog import Catalog, Owner


def holders(catalog: Catalog) -> list[tuple[Owner, int]]:
    """Return how many leases each owner holds."""
    return [(owner, len(chunks)) for owner, chunks in catalog.leased.items()]


def oldest_lease_s(catalog: Catalog) -> float:
    """Return the age of the oldest lease in seconds; 0 if there is none."""
    since_s = catalog.leased_since_s
    return catalog.now_s - next(iter(since_s.values())) if since_s else 0.0
