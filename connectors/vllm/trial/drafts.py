"""Draft tokens in a trial. Some drafts are the tokens that the model generates, and all other drafts are wrong."""

from __future__ import annotations

import random

from kvpipe.connectors.vllm.trial.content import Sequence


class Drafter:
    """Proposes drafts at random, from a seed."""

    def __init__(self, seed: int, most: int) -> None:
        """Start with the random generator of `seed`. `most` is the largest number of draft tokens per call."""
        self._rng, self._most = random.Random(seed), most  # noqa: S311

    def propose(self, sequence: Sequence, first: int) -> list[int]:
        """Propose up to `most` tokens from position `first` on."""
        return self.guess(sequence, first, self._rng.randint(0, self._most))

    def guess(self, sequence: Sequence, first: int, count: int) -> list[int]:
        """Return `count` draft tokens from position `first` on.

        The first drafts are right, and all later drafts are wrong.
        """
        right = self._rng.randint(0, count)
        return [sequence.token(first + i) ^ (i >= right) for i in range(count)]


def accepted(sequence: Sequence, stop: int, drafts: list[int]) -> int:
    """Return how many drafts, from the first on, the model would generate. The last draft is at `stop` - 1."""
    first = stop - len(drafts)
    for i, token in enumerate(drafts):
        if token != sequence.token(first + i):
            return i
    return len(drafts)
