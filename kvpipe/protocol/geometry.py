"""The layout of a slot, as pure arithmetic that the scheduler side and every worker share.

A *page* is one block of one layer. A *chunk* is `chunk_tokens` tokens of one cache group. A chunk fills one slot of the
pool, in the order ``[layer][page]`` without gaps. So a layer is one slice of the slot, and tiers read or write a whole
chunk at once. If blocks are copied whole, a group counts as one layer on the rank (`kvpipe.transfer.whole_blocks`).

A *unit* is the smallest number of tokens that a hit can have: the least common multiple of the cache groups' block
sizes. A block is several units in two cases:

- The ranks divide the tokens of a block (context parallelism), and there are recurrent states. The states' boundaries
  lie within blocks, so the last page of a prefix may be partly filled.
- The engine keeps states at boundaries within the states' own blocks.

If a sliding window is shorter than a unit, only the last blocks of each unit are stored, because the window never
reaches the earlier blocks.

A group of recurrent states (Mamba, gated delta nets, short convolutions) has chunks of another kind. Such a chunk is
the state after all tokens up to one boundary, one page per layer. The state cannot be used at any other boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm
from typing import TypeVar

from kvpipe.errors import ConfigError

T = TypeVar("T")
SLOT_ALIGN_BYTES = 4096  # direct I/O and pinned copies need page-aligned slots


def rounded_up(tokens: int, block_tokens: int) -> int:
    """Return the smallest multiple of `block_tokens` that is at least `tokens`."""
    return -(-tokens // block_tokens) * block_tokens


@dataclass(frozen=True, slots=True)
class Layer:
    """An attention layer: its name, and the size of one block of this layer on this rank, in bytes."""

    name: str
    page_bytes: int


@dataclass(frozen=True)
class Group:
    """One KV cache group: layers that share a block table. `window_tokens` is None for full attention.

    `block_tokens` is the number of tokens of one block, over all ranks that divide the block. `state` says that a block
    holds a recurrent state, after all tokens up to the block's end, instead of the KV of its tokens. `local` says that
    a token attends back to the last multiple of `window_tokens`, and no further (chunked local attention). `ranks` is
    the number of ranks that divide the tokens of a block (context parallelism).
    """

    layers: tuple[Layer, ...]
    block_tokens: int
    window_tokens: int | None = None
    state: bool = False
    local: bool = False
    ranks: int = 1

    @property
    def blocks_back(self) -> int:
        """The number of blocks before a boundary that a sliding window reads, or 0.

        The result is 0 without a window, or with chunked local attention.
        """
        if self.window_tokens is None or self.local or self.state:
            return 0
        return max(1, -(-(self.window_tokens - 1) // self.block_tokens))

    @cached_property
    def bytes_per_block(self) -> int:
        """The size of one block in all of the group's layers on this rank, in bytes."""
        return sum(layer.page_bytes for layer in self.layers)


class Paging:
    """Computes which blocks of a request's table a cache group stores, and which pages of a chunk these blocks fill."""

    __slots__ = ("_blocks", "_pages", "_units")

    def __init__(self, units_per_block: int, blocks_per_unit: int, pages_per_unit: int) -> None:
        """Keep the numbers, which are explained in `Geometry`."""
        self._units, self._blocks, self._pages = units_per_block, blocks_per_unit, pages_per_unit

    def stored(self, table: Sequence[T], low: int, high: int) -> Sequence[T]:
        """Return the stored blocks of units [low, high), one per page.

        Blocks beyond the end of `table` are missing. A block must begin at `low`. `high` may lie within a block.
        """
        if (units := self._units) > 1:
            return table[low // units : -(-high // units)]
        blocks, pages = self._blocks, self._pages
        if blocks == pages:
            return table[low * blocks : high * blocks]
        ends = range((low + 1) * blocks, high * blocks + 1, blocks)
        return [block for end in ends for block in table[end - pages : end]]

    def pages(self, units: int) -> int:
        """Return how many pages the first `units` units of a chunk fill. The last page may be partly filled."""
        return -(-units * self._pages // self._units)


@dataclass(frozen=True)
class Geometry:
    """The slot layout of one engine, for one rank. Raises `ConfigError` when the sizes do not fit together."""

    groups: tuple[Group, ...]
    chunk_tokens: int
    pool_bytes_max: int
    ahead_tokens: int = 0
    """The number of later tokens on which a token's KV depends: more than 0 if a drafter reads the next token."""
    states_back: int = 0
    """The distance, in units, from the last state of a prompt that the engine keeps to the prompt's last whole unit."""
    match_tokens: int = 0
    """The number of tokens per unit, if the engine keeps states within blocks.

    If the number is 0, the unit is computed from the block sizes.
    """
    branches_within: bool = False
    """Whether the engine keeps the state at a branch within a block, instead of the state at the block's beginning."""

    def __post_init__(self) -> None:
        """Check the two sizes that a user sets against the sizes of blocks."""
        whole = lcm(*(g.block_tokens for g in self.groups))
        if self.chunk_tokens % whole:
            near = max(1, round(self.chunk_tokens / whole)) * whole
            msg = (
                f"kvpipe: chunk_tokens={self.chunk_tokens} is not a multiple of the engine's block size "
                f"{whole}; set chunk_tokens={near}"
            )
            raise ConfigError(msg)
        if self.pool_bytes_max < self.slot_bytes:
            from kvpipe.inputs.values import exact_size  # noqa: PLC0415  (pydantic: the data plane's benchmark does without)

            msg = (
                f"kvpipe: pool_bytes_max={exact_size(self.pool_bytes_max)} is smaller than one chunk of "
                f"{self.chunk_tokens} tokens ({exact_size(self.slot_bytes)}); set pool_bytes_max to at least "
                f"{exact_size(self.slot_bytes)} or a smaller chunk_tokens"
            )
            raise ConfigError(msg)

    @cached_property
    def unit_tokens(self) -> int:
        """The number of tokens per unit."""
        return self.match_tokens or lcm(*(g.block_tokens // (g.ranks if self.states else 1) for g in self.groups))

    @cached_property
    def units_per_chunk(self) -> int:
        """The number of units per chunk."""
        return self.chunk_tokens // self.unit_tokens

    @cached_property
    def blocks_per_unit(self) -> tuple[int, ...]:
        """By group: the number of blocks per unit, or 1 if a block is several units."""
        return tuple(max(1, self.unit_tokens // g.block_tokens) for g in self.groups)

    @cached_property
    def units_per_block(self) -> tuple[int, ...]:
        """By group: the number of units per block, or 1 if a unit is several blocks."""
        return tuple(max(1, g.block_tokens // self.unit_tokens) for g in self.groups)

    @cached_property
    def whole_units(self) -> int:
        """The number of units between boundaries at which blocks of all groups end."""
        return lcm(*self.units_per_block)

    @cached_property
    def end_units(self) -> int:
        """The number of a request's last units that must be searched for the last final unit that ends a block."""
        return self.whole_units + 1

    @cached_property
    def pages_per_unit(self) -> tuple[int, ...]:
        """By group: the number of stored blocks of a unit. The stored blocks are the unit's last blocks."""
        return tuple(min(n, g.blocks_back or n) for n, g in zip(self.blocks_per_unit, self.groups, strict=True))

    @property
    def tails(self) -> bool:
        """Whether some group stores only the last blocks of its units, so that a hit cannot end within a unit."""
        return self.pages_per_unit != self.blocks_per_unit

    @cached_property
    def paging(self) -> tuple[Paging, ...]:
        """By group: the mapping from blocks to the pages that store the blocks."""
        return tuple(map(Paging, self.units_per_block, self.blocks_per_unit, self.pages_per_unit))

    @cached_property
    def pages_per_chunk(self) -> tuple[int, ...]:
        """By group: the number of pages per chunk and layer, or 1 for a group of states."""
        pages = [paging.pages(self.units_per_chunk) for paging in self.paging]
        return tuple(1 if g.state else n for g, n in zip(self.groups, pages, strict=True))

    @cached_property
    def token_bytes(self) -> float:
        """The number of stored bytes per token on this rank, over all groups except groups of states."""
        return sum(self._bytes_per_token(g, n) for g, n in zip(self.groups, self.pages_per_chunk, strict=True))

    @cached_property
    def whole_token_bytes(self) -> float:
        """The number of bytes per token, over the groups whose whole prefix a hit reads.

        Groups with a window are left out, because a hit of a long prompt reads only the last window.
        """
        groups = zip(self.groups, self.pages_per_chunk, strict=True)
        return sum(self._bytes_per_token(g, n) for g, n in groups if g.window_tokens is None)

    def _bytes_per_token(self, group: Group, pages: int) -> float:
        return 0.0 if group.state else group.bytes_per_block * pages / self.chunk_tokens

    @cached_property
    def boundary_bytes(self) -> int:
        """The size of the states of one boundary, over all groups of states, in bytes."""
        return sum(g.bytes_per_block for g in self.groups if g.state)

    @cached_property
    def states(self) -> frozenset[int]:
        """The indices of the groups of recurrent states."""
        return frozenset(i for i, g in enumerate(self.groups) if g.state)

    @property
    def dropped_units(self) -> int:
        """The number of valid units that the engine drops at the end of each hit in its own prefix cache."""
        return 0 if self.ahead_tokens else self.states_back

    @property
    def windows(self) -> bool:
        """Whether any group has a window. vLLM frees the blocks before a window."""
        return any(g.window_tokens is not None for g in self.groups)

    @property
    def loads_between_steps(self) -> bool:
        """Whether every load must be asynchronous, because vLLM could not recover from a sync load that fails.

        With several groups, vLLM accepts no report of failed blocks. With a window, vLLM truncates the request to the
        first failed block. At that time, the window's earlier blocks are already free, and attention would read their
        new content.
        """
        return len(self.groups) > 1 or self.windows or bool(self.states)

    @cached_property
    def layer_offsets(self) -> tuple[tuple[int, ...], ...]:
        """By group and layer: the byte offset of the layer's first page in a slot."""
        out = []
        for group, pages in zip(self.groups, self.pages_per_chunk, strict=True):
            offset, offsets = 0, []
            for layer in group.layers:
                offsets.append(offset)
                offset += layer.page_bytes * pages
            out.append(tuple(offsets))
        return tuple(out)

    @cached_property
    def slot_bytes(self) -> int:
        """The size of one slot in bytes: the size of the largest group's chunk, aligned."""
        need = max(g.bytes_per_block * p for g, p in zip(self.groups, self.pages_per_chunk, strict=True))
        return -(-need // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES

    @cached_property
    def slots(self) -> int:
        """The number of slots in the pool. A slot holds one chunk."""
        return self.pool_bytes_max // self.slot_bytes

    @cached_property
    def layers(self) -> tuple[tuple[int, int], ...]:
        """Every layer as (group, index in the group), in registration order of the groups."""
        return tuple((g, i) for g, group in enumerate(self.groups) for i in range(len(group.layers)))
