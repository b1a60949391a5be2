"""Hypothesis profiles are known before the tests are imported."""

from __future__ import annotations

import atexit
import gc
from typing import TYPE_CHECKING

import pytest

from property_tests.profiles import register

if TYPE_CHECKING:
    from property_tests.runs import Runs

register()


def pytest_collection_finish() -> None:
    """Keep what is imported by now, which stays, out of every collection of garbage to come."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Runs:
    """Return the trials of this test run, shared by all workers of pytest-xdist."""
    from property_tests.runs import Runs  # imports vLLM

    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if hasattr(request.config, "workerinput") else base) / "runs"
    folder.mkdir(exist_ok=True)
    return Runs(folder)
