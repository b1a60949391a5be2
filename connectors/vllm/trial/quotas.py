"""The check of quotas, which counts the slots of all chunks at each reservation and after each processed step."""

from __future__ import annotations

from collections.abc import Iterator

from kvpipe.cache.quotas import SharedCatalog
from kvpipe.connectors.vllm.trial.laws import invariant
from kvpipe.connectors.vllm.trial.shapes import QUOTAS
from kvpipe.connectors.vllm.trial.watched import Watched, used_slots


@invariant(
    9,
    sentence="No quota loses a slot to another quota while it is within its share of the ready slots. No quota "
    "holds more slots than its limit.",
)
def quotas_are_kept(watched: Watched) -> Iterator[str]:
    """Compare the slot count of each account with the tenants of all chunks."""
    yield from watched.unfair
    watched.unfair.clear()
    catalog = watched.trial.side.catalog
    if isinstance(catalog, SharedCatalog):
        used = used_slots(catalog)
        for one, account in zip(QUOTAS, catalog.accounts.all, strict=True):
            slots, most = used[one.get("salt", "")], int(one.get("limit", 1) * catalog.slots)
            if not account.used == slots <= most:
                yield f"{one['name']} counts {account.used} slots, and has {slots} of {most}"
