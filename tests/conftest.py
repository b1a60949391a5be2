"""What is not collected with the other tests; Hypothesis profiles are known before they are imported."""

import atexit
import gc

from property_tests.profiles import register

register()
collect_ignore = ["third_party_tier"]


def pytest_collection_finish() -> None:
    """Keep what is imported by now, which stays, out of every collection of garbage to come."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)
