"""Decides how long a request waits for tiers: by the tokens that tiers bring, and by how fast the engine computes."""

from __future__ import annotations

from typing import Final

from kvpipe.scheduler.pace import Pace

TRIED_EVERY: Final = 16
"""One in this many requests that would skip a slow tier still reads the tier, which may have become fast again."""


AWAIT_S: Final = 0.25
"""The shortest time for which a consumer waits for a chunk that a producer may be storing, in seconds.

Disks are listed every 0.1 s.
"""


class Patience:
    """Compares the time that tiers need for tokens with the time that the engine needs to compute them."""

    def __init__(self, token_bytes: float, lookup_ms_max: int, lookup_slow_ms_max: int) -> None:
        """Start without measurements.

        `token_bytes` is the size of a token's KV on a rank, in groups that are read whole. The other parameters are
        settings with the same names.
        """
        self.lookup_s_max = lookup_ms_max / 1000
        self._slow_s_max = min(lookup_ms_max, lookup_slow_ms_max) / 1000
        self._token_bytes, self._slow = token_bytes, 0
        self.pace = Pace()
        self.await_s = AWAIT_S
        self.rates: dict[int, float] = {}
        """The read rate of the slowest rank in bytes per second, by tier. A tier without a measurement has no entry."""

    def slow(self, tier: int) -> bool:
        """Whether reading a token's KV from `tier` takes longer than computing the token.

        False if the rates are unknown. Computing also delays other requests. If the engine computes prompts in a share
        r of the time, all delays together are 1 / (1 - r) times the computing time.
        """
        bytes_read = self.rates.get(tier, 0.0) * self.pace.s_per_token
        return self._token_bytes * (1 - self.pace.load) > bytes_read > 0

    def passes(self, *, asked: bool) -> bool:
        """Whether a request skips the chunks in slow tiers. `asked` says that the engine has room for the request now.

        While the engine computes other prompts or has no room, a request skips no chunks, because waiting costs
        nothing. One in `TRIED_EVERY` requests also skips no chunks, to measure whether the tier is still slow.
        """
        if self._slow_s_max or self.pace.busy or not asked:
            return False
        self._slow += 1
        return self._slow % TRIED_EVERY > 0

    def wait_s_max(self, tokens: int, *, slow: bool) -> float:
        """Return how many seconds a request waits at most for more chunks, after `tokens` of its tokens were fetched.

        `slow` says that some of the chunks are in a slow tier.
        """
        least_s = self._slow_s_max if slow and not self.pace.busy else self.lookup_s_max
        return max(least_s, tokens * self.pace.s_per_token)

    def await_s_max(self, tokens: int, *, whole: bool) -> float:
        """Return how many seconds a consumer waits for `tokens` tokens that tiers lack.

        The consumer waits as long as computing the tokens would take. `whole` says that at least one whole chunk is
        missing. If the pace of computing is unknown, the limit is `lookup_ms_max`.
        """
        if not self.pace.s_per_token:
            return self.lookup_s_max if self.await_s else 0.0
        return max(tokens * self.pace.s_per_token, self.await_s if whole else 0.0)
