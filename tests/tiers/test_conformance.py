"""Every kind of tier keeps the protocol, in every world."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpipe.testing.tier_conformance import TierConformance, TierWorld
from kvpipe.testing.tier_worlds import WORLDS


class TestOurTiers(TierConformance):
    """Disk, Redis, S3, Mooncake, and the dictionary that they are compared with."""

    @pytest.fixture(params=WORLDS)
    def world(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TierWorld]:
        """Set up one store."""
        with WORLDS[request.param](tmp_path) as made:
            yield made
