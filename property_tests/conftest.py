"""Hypothesis profiles are known before the tests are imported."""

from __future__ import annotations

import atexit
import gc

from property_tests.profiles import register

register()


def pytest_collection_finish() -> None:
    """Keep what is imported by now, which stays, out of every collection of garbage to come."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)
