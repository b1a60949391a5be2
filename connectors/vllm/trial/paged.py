"""A layer's paged cache in a trial, and the content that its positions must hold."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvpipe.connectors.vllm.trial.content import Sequence, Words
from kvpipe.connectors.vllm.trial.shapes import INTERLEAVE, Shape

Positions = npt.NDArray[np.int64]
WORD_BYTES = 8


class PagedLayer(NamedTuple):
    """One layer's paged cache, ``[block, 1, token, 2]`` float32, and the same memory as 64-bit words.

    The tokens of a block are divided among `shards` ranks in stretches of `INTERLEAVE` tokens. This rank holds stretch
    number `shard`, and every `shards`-th stretch after it.
    """

    name: str
    group: int
    cache: torch.Tensor
    words: Words
    key: np.uint64
    ahead: int = 0  # number of later tokens on which a position's KV depends
    shard: int = 0
    shards: int = 1

    def content(self, sequence: Sequence, start: int, stop: int) -> Words:
        """Return the words that the positions [start, stop) must hold."""
        return sequence.upto(stop + self.ahead)[start + self.ahead :] ^ self.key

    def held(self, start: int, stop: int) -> Positions:
        """Return the positions within [start, stop) that this rank holds."""
        positions = np.arange(start, stop)
        return positions[positions // INTERLEAVE % self.shards == self.shard]

    def mine(self, start: int, stop: int) -> slice | Positions:
        """Return an index into the positions [start, stop) that selects the positions that this rank holds."""
        return self.held(start, stop) if self.shards > 1 else slice(start, stop)

    def places(self, table: npt.ArrayLike) -> Positions:
        """Return the index in `flat` of each position of the blocks in `table`."""
        return (np.asarray(table)[:, None] * self.stride + _offsets(self.words.shape[1], self.shards)).ravel()

    @property
    def stride(self) -> int:
        """The number of words from one block to the next.

        With a cross-layer layout, other layers lie between blocks.
        """
        return self.words.strides[0] // WORD_BYTES

    @property
    def flat(self) -> Words:
        """All words from this layer's first word to its last word."""
        if self.words.flags.c_contiguous:
            return self.words.reshape(-1)
        blocks, words = self.words.shape
        return np.lib.stride_tricks.as_strided(self.words, ((blocks - 1) * self.stride + words,), (WORD_BYTES,))


@functools.cache
def _offsets(words: int, shards: int) -> Positions:
    """Return the index of each position of a block among the `words` words that a rank holds of the block."""
    place, turn = np.arange(words * shards), INTERLEAVE * shards
    return place // turn * INTERLEAVE + place % INTERLEAVE if shards > 1 else place


def make_caches(shape: Shape, names: list[list[str]]) -> list[torch.Tensor]:
    """Return an empty cache ``[block, 1, token, 2]`` for each layer. `names` has the layers of each group."""
    tokens = [size // shape.shards(group) for group, size in enumerate(shape.block_tokens)]
    if not shape.cross:
        return [torch.zeros(shape.blocks, 1, tokens[group], 2) for group, named in enumerate(names) for _ in named]
    widest = max(len(named) * tokens[group] for group, named in enumerate(names))
    memory = torch.zeros(shape.blocks, 1, widest, 2)
    return [
        memory[:, :, tokens[group] * layer : tokens[group] * (layer + 1)]
        for group, named in enumerate(names)
        for layer in range(len(named))
    ]
