"""Whether a hit is better loaded between steps, so that the others do not wait for it.

A layerwise (sync) load hides behind the forward of its own step, layer by layer; what it cannot hide, the whole batch
waits for. An asynchronous load lets the others run, and its own request a step later. So a hit is asynchronous when
others run and its load, with those that the step does already, would take longer than they should ever wait, or would
queue behind another asynchronous one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvpipe.geometry import Geometry

if TYPE_CHECKING:
    from kvpipe.scheduler.base import Step

IDLE_WAIT_MS_MAX: Final = 5
"""How long a step that computes nothing waits for a load: so much later may a request start that comes meanwhile."""


class Stall:
    """Knows how fast loads are and whether anybody would wait."""

    def __init__(self, geometry: Geometry, stall_ms_max: int) -> None:
        """Nothing was measured yet, and nobody runs."""
        self._token_bytes = geometry.token_bytes
        self._stall_s_max = stall_ms_max / 1000
        self.rate = 0.0
        """Bytes per second of the slowest rank's loads, as last measured; 0: not yet."""
        self.running = 0
        """Requests that the last step computed."""
        self.due = 0
        """Tokens whose sync loads the next step does already."""

    def too_long(self, tokens: int, *, loading: bool) -> bool:
        """Whether a load of `tokens` should not be waited for. `loading`: an asynchronous one is under way.

        What was never measured is taken for instant, unless no wait at all is allowed.
        """
        if not self.running:
            return False
        if loading or not self._stall_s_max:
            return True
        return self.rate > 0 and (self.due + tokens) * self._token_bytes / self.rate > self._stall_s_max


class Idle:
    """Knows when nobody runs: whether a step may wait for a load in place of many steps that find it unfinished."""

    def __init__(self, stall_ms_max: int) -> None:
        """`stall_ms_max`: nobody ever waits longer for another's load."""
        self._wait_ms_max, self._empty_steps = min(IDLE_WAIT_MS_MAX, stall_ms_max), 0

    def wait_ms(self, step: Step, *, loading: bool) -> int:
        """Return how long `step` is to wait for a load. `loading`: asynchronous ones may be under way.

        Not behind a step that computes: what it computes may be why this one cannot go on yet.
        """
        if step.num_scheduled_tokens:
            self._empty_steps = 0
            return 0
        self._empty_steps += 1
        return self._wait_ms_max if loading and self._empty_steps > 1 else 0
