"""The suite that every tier must pass: one test for each requirement of the protocol of `kvpipe/tiers/base.py`.

A test module of a tier has a subclass of `TierConformance`. The subclass's fixture `world` provides one empty store:

    class TestShed(TierConformance):
        @pytest.fixture
        def world(self, tmp_path):
            spec = ShedSpec(path=tmp_path)
            yield TierWorld(lambda: spec.make("shed"), spec, broken=partial(moved, tmp_path))

Every test is a method that takes a `TierWorld`, so that the method can also be called without pytest's fixtures.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvpipe.testing.overriding import not_overridden
from kvpipe.testing.tier_conformance.blocking import LoopClaims
from kvpipe.testing.tier_conformance.bounds import BoundClaims
from kvpipe.testing.tier_conformance.cancelling import CancelClaims
from kvpipe.testing.tier_conformance.closing import ClosingClaims
from kvpipe.testing.tier_conformance.failing import FailureClaims
from kvpipe.testing.tier_conformance.sharing import SharingClaims
from kvpipe.testing.tier_conformance.values import ValueClaims
from kvpipe.testing.tier_conformance.worlds import Limit, TierWorld, client, run

__all__ = ["Limit", "TierConformance", "TierWorld", "client", "run"]


class TierConformance(ValueClaims, SharingClaims, BoundClaims, CancelClaims, LoopClaims, FailureClaims, ClosingClaims):
    """The tests of a tier. A tier may lack only the properties that `TierWorld.limits` lists."""

    @pytest.fixture
    def world(self) -> Any:
        """Provide one empty store. Subclasses override this fixture."""
        not_overridden(self, "world", "a `TierWorld` with an empty store")
