"""The content oracle: what the KV of a token position must be, and which token the model generates next.

The KV of a position is a 64-bit hash of the token prefix up to there, of what else vLLM keeps apart (`cache_salt`,
LoRA), of the layer and of the rank. So every byte of the paged cache and of the pool can be checked, and a request's
answer is known from its prompt alone.
"""

from __future__ import annotations

import zlib
from collections import deque

import numpy as np
import numpy.typing as npt

VOCAB = 512
WRONG_TOKEN = VOCAB  # sampled when what was read was not what belongs there
EMBEDDED = 2 * VOCAB
"""What is added to a token that comes as an embedding."""

Words = npt.NDArray[np.uint64]
_MASK = (1 << 64) - 1


class Sequence:
    """A request's tokens and the hash of every prefix, as far as they are needed."""

    def __init__(self, prompt: list[int], apart: str = "") -> None:
        """`apart`: whatever makes the same tokens mean other KV."""
        self.tokens: list[int] = []
        self.hashes: Words = np.empty(0, np.uint64)
        self.prompt, self.apart, self._seed = prompt, apart, zlib.crc32(apart.encode())
        self.lora = 0

    def upto(self, stop: int) -> Words:
        """Return the hashes of the first `stop` positions."""
        if stop > len(self.hashes):
            more = []
            last = int(self.hashes[-1]) if len(self.hashes) else self._seed
            for position in range(len(self.hashes), stop):
                token = self.prompt[position] if position < len(self.prompt) else last % VOCAB
                last = ((last ^ token) * 6364136223846793005 + 1442695040888963407) & _MASK
                last ^= last >> 29
                self.tokens.append(token)
                more.append(last)
            self.hashes = np.concatenate([self.hashes, np.array(more, np.uint64)])
        return self.hashes[:stop]

    def token(self, position: int) -> int:
        """Return the token at `position`: of the prompt, or what the model generates after it."""
        self.upto(position + 1)
        return self.tokens[position]

    def answer(self, tokens: int) -> list[int]:
        """Return the first `tokens` tokens that the model generates after the prompt."""
        first = len(self.prompt)
        return [self.token(p) for p in range(first, first + tokens)]


class Live:
    """One request, and what it must answer."""

    def __init__(self, request_id: str, sequence: Sequence, wanted: int, salt: int, lora: int) -> None:
        """`wanted` is the number of tokens to answer."""
        self.id, self.sequence, self.wanted, self.salt, self.lora = request_id, sequence, wanted, salt, lora
        self.output: list[int] = []
        self.aborted = self.closed = False
        self.turns: deque[tuple[Sequence, int]] | None = None  # of a session: what is still to come

    @property
    def expected(self) -> list[int]:
        """The answer."""
        return self.sequence.answer(self.wanted)


def layer_key(rank: int, layer: int) -> np.uint64:
    """Return what the prefix hashes are XORed with in `layer` (counted over all groups) of `rank`."""
    return np.uint64((layer + 1) * 0x9E3779B97F4A7C15 + (rank + 1) * 0xC2B2AE3D27D4EB4F & _MASK)
