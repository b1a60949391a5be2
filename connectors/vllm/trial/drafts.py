"""Draft tokens in a trial: some are what the model generates, the others are not."""

from __future__ import annotations

import random

from kvpipe.connectors.vllm.trial.content import Sequence


class Drafter:
    """Guesses by its seed."""

    def __init__(self, seed: int, most: int) -> None:
        """`most` tokens at a time."""
        self._rng, self._most = random.Random(seed), most  # noqa: S311

    def propose(self, sequence: Sequence, first: int) -> list[int]:
        """Guess up to `most` tokens from position `first` on."""
        return self.guess(sequence, first, self._rng.randint(0, self._most))

    def guess(self, sequence: Sequence, first: int, count: int) -> list[int]:
        """Guess `count` tokens from position `first` on: the first ones right, the others wrong."""
        right = self._rng.randint(0, count)
        return [sequence.token(first + i) ^ (i >= right) for i in range(count)]


def accepted(sequence: Sequence, stop: int, drafts: list[int]) -> int:
    """Return how many of `drafts`, which end before position `stop`, are what the model generates."""
    first = stop - len(drafts)
    for i, token in enumerate(drafts):
        if token != sequence.token(first + i):
            return i
    return len(drafts)
