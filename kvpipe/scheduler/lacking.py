"""The chunks of a prompt that memory lacks, and the chunks that the prompt's fetches need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvpipe.cache.catalog import Catalog
    from kvpipe.cache.chunks import Chunk
    from kvpipe.protocol.geometry import Geometry
    from kvpipe.scheduler.stages import Stage
    from kvpipe.tiers.finder import Place

LEASE_TRIES: Final = 3
"""The number of tries in one step to lease a stage's chunks in memory. A try fails if a chunk is evicted meanwhile."""


def lacking(catalog: Catalog, group: int, keys: Sequence[bytes], ends: Iterable[int]) -> list[int]:
    """Return those of `ends` at which memory has no chunk of `group`.

    `keys[end - 1]` is the key of the chunk that ends at `end`.
    """
    index = catalog.index(group)
    return [end for end in ends if keys[end - 1] not in index]


def lacking_states(catalog: Catalog, groups: Sequence[int], keys: Sequence[bytes], ends: Sequence[int]) -> list[Place]:
    """Return the places of states to look up in tiers.

    For the first of `groups`, these are all states that memory lacks. For the other groups, these are the missing
    states at boundaries where memory has the first group's state.
    """
    if not groups:
        return []
    first, *others = groups
    missing = lacking(catalog, first, keys, ends)
    held = sorted({*ends} - {*missing})
    return [(first, end) for end in missing] + [
        (group, end) for group in others for end in lacking(catalog, group, keys, held)
    ]


def needed_chunks(
    catalog: Catalog, geometry: Geometry, stage: Stage, reach: int
) -> Iterator[tuple[Place, Chunk | None]]:
    """Yield the places of the prefix that memory and tiers cover together, in the prefix's order. States come last.

    `reach` is the number of units of this prefix. Each place comes with the chunk that memory holds there, or with None
    if a tier must bring the chunk.
    """
    per_chunk, keys = geometry.units_per_chunk, stage.lookup.keys
    for base in range(0, reach, per_chunk):
        high = min(base + per_chunk, reach)
        for group, kind in enumerate(geometry.groups):
            if kind.state:
                continue
            window = kind.window_tokens
            if window is not None and (reach - high) * geometry.unit_tokens > window:
                continue  # this chunk lies wholly before the window of the last token
            chunk = stage.prefixes.holding(group, stage.prefixes.hashes(stage.asked), base, high)
            if chunk is not None:
                yield (group, high), chunk
                continue
            ends = range(high, min(base + per_chunk, len(keys)) + 1)
            end = next((units for units in ends if (group, units) in stage.lookup.found), 0)
            if end:
                yield (group, end), None
    for group in sorted(geometry.states) if reach else ():  # a state is useful only at the end of the prefix
        yield (group, reach), catalog.find(group, stage.lookup.key((group, reach)))


def lease_needed(
    needed: Callable[[], Iterable[tuple[Place, Chunk | None]]], lease: Callable[[list[Chunk]], bool]
) -> list[tuple[Place, Chunk | None]] | None:
    """Lease the chunks of a prefix that memory has. Returns all chunks of the prefix.

    `needed` returns the prefix that memory and tiers cover now. After the holder of a node's memory has evicted a
    chunk, the prefix is shorter. Returns None if the holder evicts chunks in each of `LEASE_TRIES` tries.
    """
    for _ in range(LEASE_TRIES):
        chunks = list(needed())
        if lease([chunk for _, chunk in chunks if chunk is not None]):
            return chunks
    return None
