"""Decides whether a hit is loaded asynchronously, so that other requests do not wait for the load.

A sync load overlaps with the forward of its own step, layer by layer. The whole batch waits for the part of the load
that does not overlap. During an async load, other requests run, and the load's own request runs a step later. Therefore
a hit is loaded asynchronously only if other requests run. In addition, another async load must be under way, or the
step's sync loads, including this load, must take longer than `stall_ms_max`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvpipe.protocol.geometry import Geometry

if TYPE_CHECKING:
    from kvpipe.protocol.engine import Step

IDLE_WAIT_MS_MAX: Final = 5
"""The longest time for which a step that computes nothing waits for a load, in milliseconds.

A request that arrives during the wait may start later by this time.
"""


class Stall:
    """Compares the time of a load, by the measured rate, with the time for which other requests may wait."""

    def __init__(self, geometry: Geometry, stall_ms_max: int) -> None:
        """Start without a measured rate, and without running requests."""
        self._token_bytes = geometry.token_bytes
        self._stall_s_max = stall_ms_max / 1000
        self.rate = 0.0
        """The last measured rate of loads on the slowest rank, in bytes per second. 0 before the first measurement."""
        self.running = 0
        """The number of requests that the last step computed."""
        self.due = 0
        """The number of tokens of the sync loads that are planned for the next step."""

    def too_long(self, tokens: int, *, loading: bool) -> bool:
        """Whether a load of `tokens` tokens should be asynchronous.

        `loading` says that another async load is under way. Without a measured rate, a load counts as instant, unless
        `stall_ms_max` is 0.
        """
        if not self.running:
            return False
        if loading or not self._stall_s_max:
            return True
        return self.rate > 0 and (self.due + tokens) * self._token_bytes / self.rate > self._stall_s_max


class Idle:
    """Decides how long a step that computes nothing waits for a load.

    Without the wait, many empty steps would find the load unfinished.
    """

    def __init__(self, stall_ms_max: int) -> None:
        """Start without empty steps. `stall_ms_max` is an upper limit of the wait, in milliseconds."""
        self._wait_ms_max, self._empty_steps = min(IDLE_WAIT_MS_MAX, stall_ms_max), 0

    def wait_ms(self, step: Step, *, loading: bool) -> int:
        """Return how many milliseconds `step` should wait for a load. `loading` says that async loads may be under way.

        The result is 0 for the first step after a step that computes, because the engine may be waiting for the
        computing step's output.
        """
        if step.num_scheduled_tokens:
            self._empty_steps = 0
            return 0
        self._empty_steps += 1
        return self._wait_ms_max if loading and self._empty_steps > 1 else 0
