"""Fixtures that several tests of a node's memory share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.node.test_catalog import Worlds
from tests.node.tiered_worlds import TieredWorlds
from tests.rigs.node_regions import RegionsWorld, fused


@pytest.fixture
def worlds() -> Iterator[Worlds]:
    """Return a memory of 16 slots without engines."""
    made = Worlds(16)
    yield made
    made.close()


@pytest.fixture
def tiered() -> Iterator[TieredWorlds]:
    """Return a memory of 24 slots and an empty tier, without engines."""
    made = TieredWorlds(24)
    yield made
    made.close()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[RegionsWorld]:
    """Return a memory of several slot sizes without engines. At the test's end, no chunk is torn or lost."""
    fused(monkeypatch)
    made = RegionsWorld()
    yield made
    made.close()
