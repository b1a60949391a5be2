"""The memories that several tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.node.test_catalog import Worlds
from tests.rigs.node_regions import RegionsWorld, fused


@pytest.fixture
def worlds() -> Iterator[Worlds]:
    """Return a memory of 16 slots without engines."""
    made = Worlds(16)
    yield made
    made.close()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[RegionsWorld]:
    """Return a memory of several slot sizes without engines. At its end, nothing is torn or lost."""
    fused(monkeypatch)
    made = RegionsWorld()
    yield made
    made.close()
