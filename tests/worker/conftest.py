"""Pipelines over a fake engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rigs.pipeline_rig import Rig


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Yield a layerwise pipeline over a fake engine, with the test parameter's options.

    No transition may be illegal.
    """
    made = Rig(**getattr(request, "param", {}))
    yield made
    made.pipeline.shutdown()
    assert made.counters["illegal_transition"] == 0
    assert made.pipeline.copies.loop.errors == 0


@pytest.fixture
def stepwise() -> Iterator[Rig]:
    """Yield a pipeline in step mode over a fake engine."""
    made = Rig(layerwise=False)
    yield made
    made.pipeline.shutdown()
    assert made.counters["illegal_transition"] == 0


@pytest.fixture
def halfway() -> Iterator[Rig]:
    """Yield a layerwise pipeline in which layer 1 has no hook."""
    made = Rig(unhooked={1})
    yield made
    made.pipeline.shutdown()
    assert made.counters["illegal_transition"] == 0
