"""The content oracle: the KV that each token position must hold, and the token that the model generates next.

The KV of a position is a 64-bit hash. The hash covers the token prefix up to the position, the `cache_salt` and the
LoRA adapter, the layer and the rank. So every byte of the paged cache and of the pool can be checked, and a request's
answer follows from its prompt alone.
"""

from __future__ import annotations

import zlib
from collections import deque

import numpy as np
import numpy.typing as npt

from kvpipe.connectors.vllm.trial.limits import Allowed

VOCAB = 512
WRONG_TOKEN = VOCAB  # a rank that has read wrong KV samples this token
EMBEDDED = 2 * VOCAB
"""The offset that is added to a token that is given as an embedding."""

Words = npt.NDArray[np.uint64]
_MASK = (1 << 64) - 1


class Sequence:
    """A request's tokens and the hash of every prefix, computed on demand."""

    def __init__(self, prompt: list[int], apart: str = "") -> None:
        """Start with `prompt`.

        `apart` names everything that gives the same tokens other KV: salt, adapter and weights.
        """
        self.tokens: list[int] = []
        self.hashes: Words = np.empty(0, np.uint64)
        self.prompt, self.apart, self._seed = prompt, apart, zlib.crc32(apart.encode())
        self.lora = 0

    def upto(self, stop: int) -> Words:
        """Return the hashes of the first `stop` positions, which are computed on demand."""
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
        """Return the token at `position`, in the prompt or in the tokens that the model generates after the prompt."""
        self.upto(position + 1)
        return self.tokens[position]

    def answer(self, tokens: int) -> list[int]:
        """Return the first `tokens` tokens that the model generates after the prompt."""
        first = len(self.prompt)
        return [self.token(p) for p in range(first, first + tokens)]


class Live:
    """One request, and the answer that it must get."""

    def __init__(self, request_id: str, sequence: Sequence, wanted: int, salt: int, lora: int) -> None:
        """`wanted` is the number of tokens that the request must generate."""
        self.id, self.sequence, self.wanted, self.salt, self.lora = request_id, sequence, wanted, salt, lora
        self.output: list[int] = []
        self.aborted = self.closed = False
        self.allowed = Allowed()
        self.turns: deque[tuple[Sequence, int]] | None = None  # a session's inputs that vLLM has not begun

    @property
    def expected(self) -> list[int]:
        """The tokens of the right answer."""
        return self.sequence.answer(self.wanted)


def layer_key(rank: int, layer: int) -> np.uint64:
    """Return the number with which prefix hashes are XORed in `layer` (counted over all groups) of `rank`."""
    return np.uint64((layer + 1) * 0x9E3779B97F4A7C15 + (rank + 1) * 0xC2B2AE3D27D4EB4F & _MASK)
