"""Every kind of tier satisfies the protocol, in every world."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpipe.testing.tier_conformance import TierConformance, TierWorld
from tests.rigs.tier_worlds import WORLDS


class TestOurTiers(TierConformance):
    """The suite runs for disk, Redis, S3, Mooncake, and for a dictionary as the reference."""

    @pytest.fixture(params=WORLDS)
    def world(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TierWorld]:
        """Set up one store."""
        with WORLDS[request.param](tmp_path) as made:
            yield made
