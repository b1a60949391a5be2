"""Measures how fast the engine computes prompts, from the times between its steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from typing import Final

PREFILL_TOKENS_MIN: Final = 256
"""A step with fewer prompt tokens than this takes about as long as a step without prompts."""
DECODED_TOKENS_MAX: Final = 32
"""The most tokens that a request in decode computes in a step, drafts included. With more, it is in prefill."""
BURST_STEPS_MAX: Final = 16
BURSTS: Final = 15
LOAD_S: Final = 60.0
"""The time constant of `Pace.load`, in seconds: the weight of earlier work falls exponentially."""


class Pace:
    """Measures the seconds per prompt token, as the median of the last bursts.

    A burst is a run of steps with prompts. The time of a burst ends when the second step after the burst's last step is
    planned. With asynchronous scheduling, the scheduler plans a step when the previous step begins, not when that step
    ends. So the time of a burst includes one additional step without prompts, which is short.
    """

    def __init__(self) -> None:
        """Start without a measurement."""
        self.s_per_token = 0.0
        """Seconds per prompt token; 0 if no burst has been measured yet."""
        self._samples: deque[float] = deque(maxlen=BURSTS)
        self._tokens = self._left = 0  # the tokens of the open burst, and the steps until the burst ends
        self._seconds = self._at_s = self._work_s = 0.0

    @property
    def busy(self) -> bool:
        """Whether the engine computes prompts at present."""
        return self._tokens > 0

    @property
    def load(self) -> float:
        """The share of recent time in which the engine computed prompts: 1 if it computed prompts all the time."""
        return min(1.0, self._work_s / LOAD_S)

    def step(self, scheduled: Collection[int], now_s: float) -> None:
        """Record that a step is planned.

        `scheduled` has the number of tokens of each request that the step computes.
        """
        if self._tokens:
            self._seconds += now_s - self._at_s
            self._left -= 1
            if not self._left:
                self._end()
        self._work_s *= math.exp((self._at_s - now_s) / LOAD_S)
        self._at_s = now_s
        decodes = max(scheduled, default=0) <= DECODED_TOKENS_MAX  # true in most steps: then all requests decode
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
