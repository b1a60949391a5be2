"""What this engine does at all, and what is switched off: by operators, or because a rank can do no more."""

from __future__ import annotations

from kvpipe.config import Settings
from kvpipe.scheduler.weights import Weights


class Switches:
    """One per scheduler side. Operators may change `freeze` and `bypass` at any time."""

    def __init__(self, settings: Settings, weights: Weights, *, saves: bool, loads: bool) -> None:
        """`saves`, `loads`: whether this engine does that at all."""
        self.saves, self.loads = saves, loads
        self.freeze, self.bypass = settings.freeze, settings.bypass
        self.tier_lost = False  # a rank cannot keep or bring anything any more: nothing is promised or planned
        self._weights = weights

    @property
    def saving(self) -> bool:
        """Whether what becomes final is saved."""
        return self.saves and not (self.freeze or self.bypass or self.tier_lost or self._weights.doubtful)

    @property
    def storing(self) -> bool:
        """Whether what was saved goes to tiers."""
        return not (self.freeze or self.bypass or self._weights.doubtful)
