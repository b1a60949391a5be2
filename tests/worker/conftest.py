"""Pipelines over a fake engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvpipe.testing.pipeline_rig import Rig


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """A layerwise pipeline over a fake engine, with the parameter's options; no transition may have been illegal."""
    made = Rig(**getattr(request, "param", {}))
    yield made
    made.pipeline.shutdown()
    assert made.counters["illegal_transition"] == 0
    assert made.pipeline.copies.loop.errors == 0


@pytest.fixture
def stepwise() -> Iterator[Rig]:
    """The same in step mode."""
    made = Rig(layerwise=False)
    yield made
    made.pipeline.shutdown()
    assert made.counters["illegal_transition"] == 0


@pytest.fixture
def halfway() -> Iterator[Rig]:
    """A layerwise pipeline of which layer 1 has no hook."""
    made = Rig(unhooked={1})
    yield made
    made.pipeline.shutdown()
    assert made.counters["illegal_transition"] == 0
