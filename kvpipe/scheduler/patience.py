"""How long a request waits for tiers: by what they bring, and by how fast the engine computes."""

from __future__ import annotations

from typing import Final

from kvpipe.scheduler.pace import Pace

TRIED_EVERY: Final = 16
"""Of requests that would not wait for a tier, every so many-th has some of it fetched: it may be quick again."""


AWAIT_S: Final = 0.25
"""How long a consumer waits at least for a chunk that a producer may be storing: disks are listed each 0.1 s."""


class Patience:
    """Compares what tiers bring with what computing it would take."""

    def __init__(self, token_bytes: float, lookup_ms_max: int, lookup_slow_ms_max: int) -> None:
        """`token_bytes`: of a token's KV on a rank, of groups that are read whole. The others: as of the settings."""
        self.lookup_s_max = lookup_ms_max / 1000
        self._slow_s_max = min(lookup_ms_max, lookup_slow_ms_max) / 1000
        self._token_bytes, self._slow = token_bytes, 0
        self.pace = Pace()
        self.await_s = AWAIT_S
        self.rates: dict[int, float] = {}
        """By tier, where it is known: bytes per second of its reads, on the slowest rank."""

    def slow(self, tier: int) -> bool:
        """Whether it takes longer to read a token's KV than to compute it. False if that is not known.

        What is computed delays others, too: at a load of r by 1 / (1 - r) of what it takes, all taken together.
        """
        bytes_read = self.rates.get(tier, 0.0) * self.pace.s_per_token
        return self._token_bytes * (1 - self.pace.load) > bytes_read > 0

    def passes(self, *, asked: bool) -> bool:
        """Whether a request does without what slow tiers have. `asked`: the engine has room for it now.

        Not while the engine is busy with other prompts, or has no room: then it costs nothing to wait. And not always.
        """
        if self._slow_s_max or self.pace.busy or not asked:
            return False
        self._slow += 1
        return self._slow % TRIED_EVERY > 0

    def wait_s_max(self, tokens: int, *, slow: bool) -> float:
        """Return how long a request waits for more if `tokens` have come. `slow`: some of it is in a slow tier."""
        least_s = self._slow_s_max if slow and not self.pace.busy else self.lookup_s_max
        return max(least_s, tokens * self.pace.s_per_token)

    def await_s_max(self, tokens: int, *, whole: bool) -> float:
        """Return how long a consumer waits for `tokens` tokens that tiers lack: as long as computing them would take.

        `whole`: a whole chunk or more is lacking. If the pace is not known, `lookup_ms_max` counts.
        """
        if not self.pace.s_per_token:
            return self.lookup_s_max if self.await_s else 0.0
        return max(tokens * self.pace.s_per_token, self.await_s if whole else 0.0)
