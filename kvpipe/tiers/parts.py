"""Which part of a chunk a rank holds, and how to make it of parts that another number of ranks has written.

KV heads are spread evenly over tensor-parallel ranks, in order. With fewer heads than ranks, neighbouring ranks hold
the same heads (MLA's latents count as one head). So a part is a range of heads, and `split` is the number of parts of a
chunk. A group that is not known to be laid out like this is bound to its layout (`BOUND`): each rank has a part of its
own, and no other number of ranks can use these.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvpipe.tiers.base import Key

BOUND: Final = 0
"""In place of a number of parts: one part per rank, which only engines of the same layout can use."""


class Share(NamedTuple):
    """How one group's KV is shared among ranks.

    `heads`: KV heads of all ranks together; 1: all ranks hold the same; 0: bound to the layout.
    `rows`: by layer, the number of rows in a page, each of which has all heads one after the other: one row per kernel
    block if heads come first in it, else one per token.
    """

    heads: int = 0
    rows: tuple[int, ...] = ()


class Slice(NamedTuple):
    """A range of heads that a rank shares with part `part` of another split: `theirs` in that part, `mine` here."""

    part: int
    theirs: slice
    mine: slice


def split_of(heads: int, ranks: int) -> int:
    """Return into how many parts `ranks` ranks divide `heads` heads, or `BOUND` if not evenly."""
    if heads and (heads % ranks == 0 or ranks % heads == 0):
        return min(heads, ranks)
    return BOUND


def kept_splits(heads: Sequence[int], ranks: int, share_ranks_max: int) -> tuple[int, ...]:
    """Return, by group, in how many parts an engine stores a chunk in tiers. `heads`: by group, of all ranks.

    That is its ranks' own split, or the finer one of `share_ranks_max` ranks, if heads spread evenly over both.
    """
    own = tuple(split_of(one, ranks) for one in heads)
    finer = tuple(split_of(one, max(ranks, share_ranks_max)) for one in heads)
    fits = all(own) and all(finer) and not any(more % one for more, one in zip(finer, own, strict=True))
    return finer if fits else own


def part_of(split: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return (index of the part that `rank` holds, number of parts)."""
    return (rank * split // ranks, split) if split else (rank, ranks)


def writes(split: int, rank: int, ranks: int, chunk: bytes) -> bool:
    """Whether this rank stores its part of `chunk`. Of ranks with the same part one does; the chunk's key decides."""
    copies = max(1, ranks // split) if split else 1
    return rank % copies == chunk[-1] % copies


def part_keys(space: str, chunk: bytes, group: int, split: int, ranks: int) -> list[Key]:
    """Return the keys of all parts of a chunk."""
    parts = split or ranks
    return [Key(space, chunk, group, part, parts) for part in range(parts)]


def slices(heads: int, split: int, theirs: int, part: int) -> list[Slice]:
    """Return the slices of which part `part` of `split` parts is made, of a chunk with `theirs` parts.

    Both numbers of parts must divide `heads`.
    """
    mine, per = heads // split, heads // theirs
    first, stop, out = part * mine, (part + 1) * mine, []
    for other in range(first // per, -(-stop // per)):
        low, high = max(first, other * per), min(stop, (other + 1) * per)
        at, here = other * per, slice(low - first, high - first)
        out.append(Slice(other, slice(low - at, high - at), here))
    return out


def splits(heads: Sequence[int], ranks: int, share_ranks_max: int = 1) -> list[tuple[int, ...]]:
    """Return all other splits in which engines with other numbers of ranks may have stored chunks.

    A split is the number of parts by group. `heads`: KV heads by group, of all ranks. Empty if some group is bound to
    its layout.
    """
    own = kept_splits(heads, ranks, share_ranks_max)
    if not heads or not all(own):
        return []
    found = {tuple(split_of(one, other) for one in heads) for other in range(1, max(heads) + 1)}
    return sorted(split for split in found - {own} if all(split))


def mark_key(space: str, split: Sequence[int]) -> Key:
    """Return the key of the marker: a value that exists if chunks of this split were written."""
    text = "kvpipe split " + " ".join(map(str, split))
    return Key(space, hashlib.sha256(text.encode()).digest(), 0, 0, 1)
