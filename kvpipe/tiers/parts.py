"""Which part of a cache group's chunks a rank holds, and how parts that another number of ranks has written make it up.

KV heads are spread evenly over tensor-parallel ranks, in their order; where there are fewer heads than ranks, and where
there is nothing to spread (MLA's latents count as one head), neighbouring ranks hold the same. So a part is a range of
heads, and `split` is the number of parts of a chunk. What is not known to lie so is bound to its layout (`BOUND`): its
parts are those of the ranks, and no other number of ranks can use them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvpipe.tiers.base import Key

BOUND: Final = 0
"""In place of a number of parts: a part per rank, which only engines of this layout can use."""


class Share(NamedTuple):
    """What a rank knows of one group's caches.

    `heads`: KV heads of all ranks together, 1 where all ranks hold the same; 0: bound to the layout.
    `rows`: by layer, runs of one head's bytes in a page: 1 per kernel block where heads come first, else 1 per token.
    """

    heads: int = 0
    rows: tuple[int, ...] = ()


class Slice(NamedTuple):
    """A range of heads that a rank shares with part `part` of another split: at `theirs` in it, at `mine` here."""

    part: int
    theirs: slice
    mine: slice


def split_of(heads: int, ranks: int) -> int:
    """Return how many parts `ranks` ranks make of `heads` heads, or `BOUND`."""
    if heads and (heads % ranks == 0 or ranks % heads == 0):
        return min(heads, ranks)
    return BOUND


def kept_splits(heads: Sequence[int], ranks: int, share_ranks_max: int) -> tuple[int, ...]:
    """Return the split of an engine's chunks in tiers: the number of parts of a chunk, by group.

    That is its ranks' own split, or the finer one of `share_ranks_max` ranks, where heads spread evenly over both.
    """
    own = tuple(split_of(one, ranks) for one in heads)
    finer = tuple(split_of(one, max(ranks, share_ranks_max)) for one in heads)
    fits = all(own) and all(finer) and not any(more % one for more, one in zip(finer, own, strict=True))
    return finer if fits else own


def part_of(split: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the part that a rank holds: (its index, number of parts)."""
    return (rank * split // ranks, split) if split else (rank, ranks)


def writes(split: int, rank: int, ranks: int, chunk: bytes) -> bool:
    """Whether this rank stores its part of `chunk`: of ranks that hold the same part one does, by the chunk's key."""
    copies = max(1, ranks // split) if split else 1
    return rank % copies == chunk[-1] % copies


def part_keys(space: str, chunk: bytes, group: int, split: int, ranks: int) -> list[Key]:
    """Return the keys of all parts of a chunk."""
    parts = split or ranks
    return [Key(space, chunk, group, part, parts) for part in range(parts)]


def slices(heads: int, split: int, theirs: int, part: int) -> list[Slice]:
    """Return what part `part` of `split` is made of, where the chunk has `theirs` parts. Both divide `heads`."""
    mine, per = heads // split, heads // theirs
    first, stop, out = part * mine, (part + 1) * mine, []
    for other in range(first // per, -(-stop // per)):
        low, high = max(first, other * per), min(stop, (other + 1) * per)
        at, here = other * per, slice(low - first, high - first)
        out.append(Slice(other, slice(low - at, high - at), here))
    return out


def splits(heads: Sequence[int], ranks: int, share_ranks_max: int = 1) -> list[tuple[int, ...]]:
    """Return all splits, numbers of parts by group, that engines of other numbers of ranks may have stored.

    `heads`: KV heads by group, of all ranks. An empty list: some group's parts are bound to the ranks' layout.
    """
    own = kept_splits(heads, ranks, share_ranks_max)
    if not heads or not all(own):
        return []
    found = {tuple(split_of(one, other) for one in heads) for other in range(1, max(heads) + 1)}
    return sorted(split for split in found - {own} if all(split))


def mark_key(space: str, split: Sequence[int]) -> Key:
    """Return the key of the value that marks that chunks of this split were written."""
    text = "kvpipe split " + " ".join(map(str, split))
    return Key(space, hashlib.sha256(text.encode()).digest(), 0, 0, 1)
