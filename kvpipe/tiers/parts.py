"""The part of a chunk that a rank holds, and how this part is composed of parts that other engines have stored.

KV heads are divided evenly among tensor-parallel ranks, in order. With fewer heads than ranks, neighbouring ranks hold
the same heads (MLA's latents count as one head). So a part is a range of heads, and `split` is the number of parts of a
chunk. A group with an unknown or different layout is bound to its layout (`BOUND`). In such a group, each rank has its
own part, and an engine with another number of ranks cannot use these parts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvpipe.tiers.base import Key

BOUND: Final = 0
"""Replaces the number of parts if each rank has its own part, which only engines of the same layout can use."""


class Share(NamedTuple):
    """How one group's KV is shared among ranks.

    `heads` is the number of KV heads of all ranks together. With 1 head, all ranks hold the same bytes. 0 means that
    the group is bound to its layout. `rows` is the number of rows in a page, by layer. A row contains all heads, one
    after the other. If heads are the first dimension of a kernel block, each kernel block is a row. Otherwise each
    token is a row.
    """

    heads: int = 0
    rows: tuple[int, ...] = ()

    @property
    def whole(self) -> Share:
        """The share of a group that counts as one layer, because a page has the bytes of all layers of the group."""
        return Share(self.heads, (sum(self.rows),) if self.rows else ())


class RankParts(NamedTuple):
    """The facts that decide which parts of chunks rank `rank` of `ranks` has.

    `shares` has one `Share` per cache group. If `shares` is empty, all groups are bound to their layout.
    `share_ranks_max` is explained in `kept_splits`. `fetches` is False if another rank fetches the same bytes into the
    same slots.
    """

    rank: int
    ranks: int
    shares: Sequence[Share] = ()
    share_ranks_max: int = 1
    fetches: bool = True


class Slice(NamedTuple):
    """A range of heads that a rank shares with part `part` of another split.

    `theirs` is the range's position in the part of the other split. `mine` is its position in this rank's part.
    """

    part: int
    theirs: slice
    mine: slice


def split_of(heads: int, ranks: int) -> int:
    """Return how many parts `ranks` ranks make of `heads` heads, or `BOUND` if the parts would differ in size."""
    if heads and (heads % ranks == 0 or ranks % heads == 0):
        return min(heads, ranks)
    return BOUND


def kept_splits(heads: Sequence[int], ranks: int, share_ranks_max: int) -> tuple[int, ...]:
    """Return the number of parts, by group, in which an engine stores a chunk in tiers.

    `heads` has the number of KV heads of all ranks, by group. The result is the finer split of `share_ranks_max` ranks,
    if heads divide evenly into both splits. Otherwise the result is the split of the engine's own ranks.
    """
    own = tuple(split_of(one, ranks) for one in heads)
    finer = tuple(split_of(one, max(ranks, share_ranks_max)) for one in heads)
    fits = all(own) and all(finer) and not any(more % one for more, one in zip(finer, own, strict=True))
    return finer if fits else own


def part_of(split: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the index of the part that `rank` holds, and the number of parts."""
    return (rank * split // ranks, split) if split else (rank, ranks)


def writes(split: int, rank: int, ranks: int, chunk: bytes) -> bool:
    """Whether `rank` stores its part of `chunk`. The last byte of `chunk` chooses one of the ranks with this part."""
    copies = max(1, ranks // split) if split else 1
    return rank % copies == chunk[-1] % copies


def part_keys(space: str, chunk: bytes, group: int, split: int, ranks: int) -> list[Key]:
    """Return the keys of all parts of a chunk."""
    parts = split or ranks
    return [Key(space, chunk, group, part, parts) for part in range(parts)]


def slices(heads: int, split: int, theirs: int, part: int) -> list[Slice]:
    """Return the slices of a chunk stored in `theirs` parts that together make part `part` of `split` parts.

    `split` and `theirs` must divide `heads`.
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

    A split is the number of parts by group. `heads` has the number of KV heads of all ranks, by group. The result is
    empty if some group is bound to its layout.
    """
    own = kept_splits(heads, ranks, share_ranks_max)
    if not heads or not all(own):
        return []
    found = {tuple(split_of(one, other) for one in heads) for other in range(1, max(heads) + 1)}
    return sorted(split for split in found - {own} if all(split))


def mark_key(space: str, split: Sequence[int]) -> Key:
    """Return the key of the marker of `split`. A tier with this marker has chunks that are divided into these parts."""
    text = "kvpipe split " + " ".join(map(str, split))
    return Key(space, hashlib.sha256(text.encode()).digest(), 0, 0, 1)
