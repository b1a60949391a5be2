"""A small causal transformer with a paged KV cache. Every bit of a token's result depends only on the token's prefix.

Every token is computed alone, with operands of the same shapes, at every place of a batch or a chunk of prefill. So
results are equal to the last bit, for every division of the work, and tests compare with ``==``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

VOCABULARY = 97


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model. `heads` must be a multiple of the number of ranks, because the ranks share the heads."""

    layers: int = 3
    heads: int = 4
    head_dim: int = 8

    @property
    def width(self) -> int:
        """The size of a token's state between layers."""
        return self.heads * self.head_dim

    @property
    def names(self) -> list[str]:
        """The layers' names, in the order of the layers."""
        return [f"layer.{i}" for i in range(self.layers)]


class Chunk(NamedTuple):
    """The tokens of one request that a step computes: `tokens`, from position `start` on, in the blocks of `table`."""

    tokens: Sequence[int]
    start: int
    table: Sequence[int]


class Transformer:
    """Random weights of a seed. Keys and values of every token lie in the engine's paged caches."""

    def __init__(self, shape: Shape = Shape(), *, seed: int = 0) -> None:
        """Draw the weights. Each `seed` gives other weights."""
        made = torch.Generator().manual_seed(seed)

        def draw(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=made) / size[-1] ** 0.5

        width = shape.width
        self.shape = shape
        self.embedding = draw(VOCABULARY, width) * width**0.5
        self.qkv = [draw(3 * width, width) for _ in range(shape.layers)]
        self.out = [draw(width, width) * 2 for _ in range(shape.layers)]
        self.ffn = [(draw(2 * width, width), draw(width, 2 * width)) for _ in range(shape.layers)]
        self.head = draw(VOCABULARY, width)
        self.rotation = 100 ** -torch.linspace(0, 1, shape.head_dim // 2)

    def digest(self) -> str:
        """Return a digest of the weights."""
        read = hashlib.sha256()
        for tensor in (self.embedding, *self.qkv, *self.out, *(one for pair in self.ffn for one in pair), self.head):
            read.update(tensor.numpy().tobytes())
        return read.hexdigest()

    def forward(
        self,
        chunks: Sequence[Chunk],
        caches: Sequence[dict[str, torch.Tensor]],
        before: Callable[[str], None],
        after: Callable[[str], None],
    ) -> list[torch.Tensor]:
        """Compute `chunks`. For each chunk, return the logits after its last token, float32 of (`VOCABULARY`,).

        Args:
            chunks: one per request.
            caches: per rank, each layer's paged cache, float32 of (blocks, heads / ranks, block tokens, 2 * head_dim).
            before: called with a layer's name before the layer's caches are read or written.
            after: called with a layer's name when the step has written all its data to the layer's caches.
        """
        states = [[self.embedding[token] for token in chunk.tokens] for chunk in chunks]
        for layer, name in enumerate(self.shape.names):
            before(name)
            paged = [cache[name] for cache in caches]
            for chunk, tokens in zip(chunks, states, strict=True):
                for i, state in enumerate(tokens):
                    tokens[i] = self._token(layer, state, paged, chunk.table, chunk.start + i)
            after(name)
        return [torch.mv(self.head, _normed(tokens[-1])) for tokens in states]

    def _token(
        self, layer: int, state: torch.Tensor, paged: list[torch.Tensor], table: Sequence[int], position: int
    ) -> torch.Tensor:
        """Write the keys and values of the token at `position`, and return the token's state after `layer`."""
        heads, dim = self.shape.heads, self.shape.head_dim
        query, key, value = torch.mv(self.qkv[layer], _normed(state)).view(3, heads, dim)
        angle = position * self.rotation
        query, pairs = _turned(query, angle), torch.cat((_turned(key, angle), value), dim=1)
        mine = heads // len(paged)
        seen = [self._attend(query, pairs, cache, table, position, r * mine) for r, cache in enumerate(paged)]
        state = state / 2 + torch.mv(self.out[layer], torch.cat(seen).flatten())
        up, down = self.ffn[layer]
        return state + torch.mv(down, torch.relu(torch.mv(up, _normed(state))))

    def _attend(
        self,
        query: torch.Tensor,
        pairs: torch.Tensor,
        cache: torch.Tensor,
        table: Sequence[int],
        position: int,
        at: int,
    ) -> torch.Tensor:
        """Write the token's keys and values for one rank.

        Return the attention of the rank's heads, from head `at` on, to the prefix.
        """
        size, dim, stop = cache.shape[2], self.shape.head_dim, at + cache.shape[1]
        block, offset = divmod(position, size)
        cache[table[block], :, offset] = pairs[at:stop]
        read = cache[list(table[: block + 1])].transpose(0, 1).flatten(1, 2)[:, : position + 1]
        scores = torch.bmm(read[..., :dim], query[at:stop, :, None]) * 2 / dim**0.5
        return torch.bmm(torch.softmax(scores, dim=1).transpose(1, 2), read[..., dim:])


def _normed(state: torch.Tensor) -> torch.Tensor:
    return state / state.square().mean().sqrt()


def _turned(rows: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """Return `rows` of (heads, head_dim), rotated by `angle` as in rotary position embeddings."""
    low, high = rows.chunk(2, dim=1)
    return torch.cat((low * angle.cos() - high * angle.sin(), low * angle.sin() + high * angle.cos()), dim=1)
