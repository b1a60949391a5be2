"""Decides whether a hit is loaded asynchronously, so that other requests do not wait for it.

A sync load overlaps with the forward of its own step, layer by layer; for what does not overlap, the whole batch waits.
With an async load the others run, and its own request runs a step later. So a hit is loaded asynchronously if other
requests run, and its load, together with the step's other sync loads, would take longer than `stall_ms_max`, or another
async load is under way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvpipe.geometry import Geometry

if TYPE_CHECKING:
    from kvpipe.scheduler.base import Step

IDLE_WAIT_MS_MAX: Final = 5
"""How long a step that computes nothing waits for a load. A request that arrives meanwhile may start so much later."""


class Stall:
    """Compares the time of a load, by the measured rate, with how long other requests may wait."""

    def __init__(self, geometry: Geometry, stall_ms_max: int) -> None:
        """Start without a measured rate, and without running requests."""
        self._token_bytes = geometry.token_bytes
        self._stall_s_max = stall_ms_max / 1000
        self.rate = 0.0
        """Bytes per second of loads on the slowest rank, as last measured; 0: not measured yet."""
        self.running = 0
        """The number of requests that the last step computed."""
        self.due = 0
        """Tokens of the sync loads that are planned for the next step."""

    def too_long(self, tokens: int, *, loading: bool) -> bool:
        """Whether a load of `tokens` tokens should be asynchronous. `loading`: another asynchronous one is under way.

        Without a measured rate a load counts as instant, unless `stall_ms_max` is 0.
        """
        if not self.running:
            return False
        if loading or not self._stall_s_max:
            return True
        return self.rate > 0 and (self.due + tokens) * self._token_bytes / self.rate > self._stall_s_max


class Idle:
    """Lets a step that computes nothing wait for a load, instead of many steps that find it unfinished."""

    def __init__(self, stall_ms_max: int) -> None:
        """`stall_ms_max`: an upper bound for the wait, in milliseconds."""
        self._wait_ms_max, self._empty_steps = min(IDLE_WAIT_MS_MAX, stall_ms_max), 0

    def wait_ms(self, step: Step, *, loading: bool) -> int:
        """Return how many milliseconds `step` is to wait for a load. `loading`: asynchronous ones may be under way.

        0 for the first step after one that computes: that one's output may be what the engine waits for.
        """
        if step.num_scheduled_tokens:
            self._empty_steps = 0
            return 0
        self._empty_steps += 1
        return self._wait_ms_max if loading and self._empty_steps > 1 else 0
