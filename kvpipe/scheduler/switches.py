"""Says whether this engine saves, stores and loads: by its role, operators' switches, and the state of its ranks."""

from __future__ import annotations

from kvpipe.config.settings import Settings
from kvpipe.scheduler.weights import Weights


class Switches:
    """The switches of one engine. Operators may change `freeze` and `bypass` at any time."""

    def __init__(self, settings: Settings, weights: Weights, *, saves: bool, loads: bool) -> None:
        """Start with the switches of `settings`.

        `saves` and `loads` say what this engine does according to its `kv_role`.
        """
        self.saves, self.loads = saves, loads
        self.freeze, self.bypass = settings.freeze, settings.bypass
        self.tier_lost = False  # whether a rank can neither save nor load any more; then nothing is found or planned
        self._weights = weights

    @property
    def saving(self) -> bool:
        """Whether units that become final are saved."""
        return self.saves and not (self.freeze or self.bypass or self.tier_lost or self._weights.doubtful)

    @property
    def storing(self) -> bool:
        """Whether saved chunks are stored in tiers."""
        return not (self.freeze or self.bypass or self._weights.doubtful)
