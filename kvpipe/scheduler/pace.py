"""How fast the engine computes prompts, as far as the times between its steps tell."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from typing import Final

PREFILL_TOKENS_MIN: Final = 256
"""A step with fewer tokens of prompts takes about as long with none."""
DECODED_TOKENS_MAX: Final = 32
"""Of one request, in a step: no more are an answer, with its drafts."""
BURST_STEPS_MAX: Final = 16
BURSTS: Final = 15
LOAD_S: Final = 60.0
"""The load is that of so many seconds; what was before counts less and less."""


class Pace:
    """Seconds per token of prompts, the median of the last bursts.

    A burst is a run of steps with prompts, up to the step after the next: with asynchronous scheduling, a step is
    planned when the one before it begins, not when that is over. So a burst has one step too many, a short one.
    """

    def __init__(self) -> None:
        """Nothing has been computed yet."""
        self.s_per_token = 0.0
        """0: not known yet."""
        self._samples: deque[float] = deque(maxlen=BURSTS)
        self._tokens = self._left = 0  # of the burst that goes on: what it computes, and when it ends, in steps
        self._seconds = self._at_s = self._work_s = 0.0

    @property
    def busy(self) -> bool:
        """Whether the engine computes prompts at present."""
        return self._tokens > 0

    @property
    def load(self) -> float:
        """The share of the engine's time that prompts took of late: 1 if it has been busy with them throughout."""
        return min(1.0, self._work_s / LOAD_S)

    def step(self, scheduled: Collection[int], now_s: float) -> None:
        """A step is planned. `scheduled`: how many tokens of each request it computes."""
        if self._tokens:
            self._seconds += now_s - self._at_s
            self._left -= 1
            if not self._left:
                self._end()
        self._work_s *= math.exp((self._at_s - now_s) / LOAD_S)
        self._at_s = now_s
        decodes = max(scheduled, default=0) <= DECODED_TOKENS_MAX  # as most steps do, of hundreds of requests
        tokens = 0 if decodes else sum(some for some in scheduled if some > DECODED_TOKENS_MAX)
        if tokens < PREFILL_TOKENS_MIN:
            self._left = 1
            return
        if not self._tokens:
            self._left = BURST_STEPS_MAX
        self._tokens += tokens
        self._work_s += tokens * self.s_per_token

    def _end(self) -> None:
        self._samples.append(self._seconds / self._tokens)
        self.s_per_token = sorted(self._samples)[len(self._samples) // 2]
        self._tokens, self._seconds = 0, 0.0
